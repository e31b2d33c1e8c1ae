"""The modules and names of Transformer Engine: the place of each in Duotone, or what to write instead."""

from collections.abc import Mapping

from duotone.compat.transformer_engine.instead import MODULES_WITHOUT, QUANTIZED

VERSION = "2.9.0+duotone"
"""The version that scripts see. Its modules take the arguments that are listed here."""

PACKAGE = "duotone.compat.transformer_engine"


def _all(home: str, names: str) -> dict[str, str]:
    return {name: f"{home}:{name}" for name in names.split()}


TENSORS = "Float8BlockwiseQTensor Float8Tensor MXFP8Tensor NVFP4Tensor"
RECIPE = {
    **_all(
        f"{PACKAGE}.recipe",
        "CustomRecipe DelayedScaling DelayedScalingRequest Float8BlockScaling Float8CurrentScaling MMParams "
        "MXFP8BlockScaling NVFP4BlockScaling QParams",
    ),
    **_all("duotone.recipes", "Format QuantizerRole Recipe"),
    "quantizer_factory": "duotone.compat:factories",
}
OPTIMIZERS = _all(f"{PACKAGE}.optimizers", "FusedAdam FusedSGD")
OPS = {
    **_all(
        "duotone.ops",
        "AddExtraInput AllGather AllReduce ClampedSwiGLU ConstantScale Dropout GEGLU GELU GLU Identity "
        "L2Normalization MakeExtraOutput QGEGLU QGELU Quantize ReGLU ReLU ReduceScatter Reshape SReGLU SReLU "
        "ScaledClampedQGeGLU ScaledSReLU ScaledSwiGLU Sequential SiLU SwiGLU",
    ),
    **_all(f"{PACKAGE}.ops", "BasicLinear Bias GroupedLinear LayerNorm Linear RMSNorm"),
}
PYTORCH = {
    **RECIPE,
    **_all(
        f"{PACKAGE}.pytorch",
        "DotProductAttention GroupedLinear LayerNorm LayerNormLinear LayerNormMLP Linear MultiheadAttention RMSNorm "
        "TransformerEngineBaseModule TransformerLayer",
    ),
    **_all(
        f"{PACKAGE}.contexts",
        "CudaRNGStatesTracker FP8GlobalStateManager activation_recompute_forward autocast check_fp8_support "
        "check_fp8_block_scaling_support check_mxfp8_support check_nvfp4_support checkpoint destroy_ub fp8_autocast "
        "get_cpu_offload_context get_default_recipe get_device_compute_capability initialize_ub "
        "is_bf16_available is_fp8_available is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available "
        "make_graphed_callables mark_not_offload prepare_te_modules_for_fsdp quantized_model_init",
    ),
    **_all(
        "duotone",
        "Float8BlockQuantizer Float8CurrentScalingQuantizer Float8Quantizer HybridQuantizer IdentityQuantizer "
        "MXFP8Quantizer NVFP4Quantizer QuantizedTensor Quantizer",
    ),
    **_all(f"{PACKAGE}.rotary_embedding", "RotaryPositionEmbedding"),
    **_all(f"{PACKAGE}.tensors", TENSORS),
    **{f"{name}Storage": f"{PACKAGE}.tensors:{name}" for name in TENSORS.split()},
    "QuantizedTensorStorage": "duotone:QuantizedTensor",
    **_all(f"{PACKAGE}.context_parallel", "apply_rotary_pos_emb"),
    **_all("duotone.tensor", "prepare_for_saving restore_from_saved"),
    "align_size": "duotone.recipes:align_size",
    "fp8_model_init": f"{PACKAGE}.contexts:quantized_model_init",
    "get_default_fp8_recipe": f"{PACKAGE}.contexts:get_default_recipe",
}
CONTEXT_PARALLEL = _all(
    f"{PACKAGE}.batches",
    "generate_positional_ids_for_cp get_batch_on_this_cp_rank pad_thd_sequences_for_cp",
)
EXTENSIONS = {
    **_all(f"{PACKAGE}.contexts", "device_supports_multicast"),
    **_all(f"{PACKAGE}.batches", "thd_get_partitioned_indices"),
}
PARTS = (
    "attention attention.dot_product_attention attention.dot_product_attention.dot_product_attention "
    "attention.inference attention.multi_head_attention attention.rope cpu_offload cpu_offload_v1 cross_entropy "
    "distributed export float8_tensor fp8 graph module module.base module.fp8_padding module.fp8_unpadding "
    "module.grouped_linear module.layernorm module.layernorm_linear module.layernorm_mlp module.linear module.rmsnorm "
    "permutation quantization quantized_tensor rope router tensor tensor.float8_blockwise_tensor "
    "tensor.float8_tensor tensor.grouped_tensor tensor.hybrid_tensor tensor.identity_tensor tensor.mxfp8_tensor "
    "tensor.nvfp4_tensor tensor.quantized_tensor tensor.storage "
    "tensor.storage.float8_blockwise_tensor_storage tensor.storage.float8_tensor_storage "
    "tensor.storage.mxfp8_tensor_storage tensor.storage.nvfp4_tensor_storage tensor.utils transformer utils"
)
OP_PARTS = (
    "ops ops.basic ops.basic.activation ops.basic.basic_linear ops.basic.bias ops.basic.dropout "
    "ops.basic.grouped_linear ops.basic.layer_norm ops.basic.quantize ops.basic.rmsnorm ops.basic.swiglu ops.fuser "
    "ops.linear ops.op ops.sequential"
)
OPTIMIZER_PARTS = "optimizers optimizers.fused_adam optimizers.fused_sgd optimizers.newton_schulz"
MODULES: dict[str, Mapping[str, str]] = {
    "transformer_engine": {},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": RECIPE,
    "transformer_engine.pytorch": PYTORCH,
    "transformer_engine.pytorch.recipe": RECIPE,
    **{f"transformer_engine.pytorch.{part}": OPS for part in OP_PARTS.split()},
    **{f"transformer_engine.pytorch.{part}": OPTIMIZERS for part in OPTIMIZER_PARTS.split()},
    **{f"transformer_engine.pytorch.{part}": PYTORCH for part in PARTS.split()},
    **{module: {} for module in MODULES_WITHOUT},
    **dict.fromkeys(("transformer_engine_torch", "transformer_engine.pytorch.cpp_extensions"), EXTENSIONS),
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel": CONTEXT_PARALLEL,
}
"""Each module with its names, and where they are: "module:name"."""

NORMAL = "duotone.{}, with init_method= for normal weights"
ANYWHERE = "nothing: every recipe runs on every device"
NUMERICS = "propagate_nonfinite=False for equal numerics"
SCALE_ONE = "first_scale_from_amax=False, skip_nonfinite_amax=False, spike_factor=0.0"
NATIVE = {
    **{name: NORMAL.format(name) for name in "Linear LayerNormLinear LayerNormMLP GroupedLinear".split()},
    **{name: NORMAL.format(name) for name in "MultiheadAttention TransformerLayer".split()},
    **{name: f"duotone.{name}" for name in "LayerNorm RMSNorm DotProductAttention".split()},
    **{name: f"duotone.{name}, with {NUMERICS}" for name in "Float8BlockScaling Float8CurrentScaling".split()},
    **{name: f"duotone.{name}, with {NUMERICS}" for name in "CustomRecipe MXFP8BlockScaling NVFP4BlockScaling".split()},
    **{f"is_{kind}_available": ANYWHERE for kind in "bf16 fp8 fp8_block_scaling mxfp8 nvfp4".split()},
    **dict.fromkeys(TENSORS.split(), QUANTIZED),
    **{f"check_{kind}_support": ANYWHERE for kind in "fp8 fp8_block_scaling mxfp8 nvfp4".split()},
    "CudaRNGStatesTracker": "torch.cuda.get_rng_state and set_rng_state",
    "DelayedScaling": f"duotone.DelayedScaling, with {SCALE_ONE} and {NUMERICS}",
    "DelayedScalingRequest": f"duotone.DelayedScalingRequest, with {SCALE_ONE}",
    "FP8GlobalStateManager": "duotone.autocast; states belong to modules: duotone.recipe_state",
    f"{PACKAGE}.ops:Linear": "duotone.ops.Linear, with zeros in its bias",
    f"{PACKAGE}.ops:GroupedLinear": "duotone.ops.GroupedLinear, with zeros in its biases",
    "BasicLinear": "duotone.ops.BasicLinear",
    "Bias": "duotone.ops.Bias",
    **dict.fromkeys(("MMParams", "QParams"), "the options of a recipe"),
    **dict.fromkeys(("activation_recompute_forward", "destroy_ub", "initialize_ub"), "nothing"),
    "device_supports_multicast": "nothing: products and collectives do not overlap",
    "get_device_compute_capability": "torch.cuda.get_device_capability",
    "FusedAdam": "duotone.optim.AdamW, with weight_decay=0.0",
    "FusedSGD": "torch.optim.SGD",
    "apply_rotary_pos_emb": "duotone.attention.apply_rotary_pos_emb",
    **dict.fromkeys(
        (*CONTEXT_PARALLEL, "thd_get_partitioned_indices"),
        "torch.distributed.tensor.experimental.context_parallel, and torch to pad",
    ),
    "autocast": "duotone.autocast, with recipe=",
    "checkpoint": "torch.utils.checkpoint.checkpoint",
    "fp8_autocast": "duotone.autocast, with recipe= for fp8_recipe= and amax_reduction_group= for fp8_group=",
    "fp8_model_init": "duotone.quantized_model_init, with recipe=",
    "get_cpu_offload_context": "torch.autograd.graph.save_on_cpu",
    "get_default_recipe": "the recipe by its name",
    "make_graphed_callables": "torch.cuda.make_graphed_callables, with autocast in the forward",
    "TransformerEngineBaseModule": "duotone.modules.planned.Planned",
    "mark_not_offload": "nothing",
    "prepare_te_modules_for_fsdp": "nothing",
    "quantized_model_init": "duotone.quantized_model_init, with recipe=",
}
"""What a script that imports Duotone itself writes, by name or by place, if that differs from the name in `MODULES`."""
