"""Fusible ops: stages that one autograd function runs, and the modules that are one stage each."""

from duotone.modules.activation import (
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
from duotone.modules.basic import AllGather, AllReduce, Bias, ConstantScale, Dropout, Identity, ReduceScatter, Reshape
from duotone.modules.extra_tensors import AddExtraInput, MakeExtraOutput
from duotone.modules.grouped_linear import GroupedLinear
from duotone.modules.linear import BasicLinear, Linear
from duotone.modules.norm import L2Normalization, LayerNorm, RMSNorm
from duotone.modules.quantize_op import Quantize
from duotone.modules.sequential import Sequential
from duotone.pipeline.rewrites import register_rule, unregister_rule

__all__ = [
    "GEGLU", "GELU", "GLU", "QGEGLU", "QGELU", "AddExtraInput", "AllGather", "AllReduce", "BasicLinear", "Bias",
    "ClampedSwiGLU", "ConstantScale", "Dropout", "GroupedLinear", "Identity", "L2Normalization", "LayerNorm",
    "Linear", "MakeExtraOutput", "Quantize", "RMSNorm", "ReGLU", "ReLU", "ReduceScatter", "Reshape", "SReGLU",
    "SReLU", "ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU", "Sequential", "SiLU", "SiTUGLU",
    "SwiGLU", "register_rule", "unregister_rule",
]  # fmt: skip
