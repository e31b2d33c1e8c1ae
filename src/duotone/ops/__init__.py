"""Fusible ops: stages that one autograd function runs, and the modules that are one stage each."""

from duotone.ops import fused_cast  # noqa: F401 (adds its rewrite rules)
from duotone.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from duotone.ops.basic import AllGather, AllReduce, Bias, ConstantScale, Dropout, Identity, ReduceScatter, Reshape
from duotone.ops.extra_tensors import AddExtraInput, MakeExtraOutput
from duotone.ops.norm import L2Normalization, LayerNorm, RMSNorm
from duotone.ops.quantize_op import Quantize
from duotone.ops.sequential import Sequential
from duotone.pipeline.rewrites import register_rule, unregister_rule
from duotone.planned.grouped_linear import GroupedLinear
from duotone.planned.linear import BasicLinear, Linear

__all__ = [
    "GEGLU", "GELU", "GLU", "QGEGLU", "QGELU", "AddExtraInput", "AllGather", "AllReduce", "BasicLinear", "Bias",
    "ClampedSwiGLU", "ConstantScale", "Dropout", "GroupedLinear", "Identity", "L2Normalization", "LayerNorm",
    "Linear", "MakeExtraOutput", "Quantize", "RMSNorm", "ReGLU", "ReLU", "ReduceScatter", "Reshape", "SReGLU",
    "SReLU", "ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU", "Sequential", "SiLU", "SiTUGLU",
    "SwiGLU", "register_rule", "unregister_rule",
]  # fmt: skip
