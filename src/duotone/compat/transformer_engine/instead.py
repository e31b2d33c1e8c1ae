"""Names and modules of Transformer Engine without a counterpart, and what to write instead. They can be imported."""

ATTENTION = "use duotone.DotProductAttention, or torch.nn.functional.scaled_dot_product_attention"
CASTS = "use duotone.Quantizer.quantize and torch.matmul of what it returns"
CONTEXT_PARALLEL = "use torch.distributed.tensor.experimental.context_parallel"
DELTA = "use a module of its own library"
EXPERTS = "use duotone.MoE(ep_group=)"
FUSION = "register a rewrite rule with duotone.ops.register_rule"
GLU = "use torch.Tensor.unflatten and transpose"
LINEAR_MATH = "write the iteration with torch"
OBSERVE = "use duotone.observe.with_statistics, duotone.observe.Monitor or a recipe of rules"
OVERLAP = "collectives do not overlap through user buffers: leave it out"
PADDING = "GroupedLinear takes row counts of any size: leave it out"
PRIVATE = "its modules have no such part: write it with torch"
QUANTIZED = "duotone.QuantizedTensor, whose .quantizer tells formats"
RECIPES = "write a duotone.CustomRecipe with quantizers of duotone"
ROUTING = "use duotone.MoE, or index tokens with torch"
STATES = "states belong to modules: use duotone.recipe_state"
TENSOR = f"use {QUANTIZED}"
TRITON = "call the functions of duotone, which choose their kernels"
UPROJECTION = "use LayerNormLinear and RotaryPositionEmbedding"

BY_REMEDY = {
    "give a duotone.KVCache as kv_cache": "InferenceParams",
    "give a torch.dtype, or a format of duotone.formats": "DType get_fp8_max get_fp8_te_dtype get_fp8_torch_dtype",
    "give quantizers or a DelayedScalingRequest": "QuantizerRequest",
    "use duotone.convert_parameters": "apply_recipe",
    "use duotone.export, or torch.onnx.export of the model after duotone.revert": "onnx_export",
    "use duotone.optim.AdamW, whose step writes quantized weights": "replace_raw_data",
    "use duotone.optim.quantize_master_weights": "cast_master_weights_to_fp8",
    "use get_cpu_offload_context, or torch.autograd.graph.save_on_cpu": "ManualOffloadSynchronizer "
    "is_cpu_offload_enabled mark_activation_offload start_offload",
    "use functions of torch.distributed": "gather_along_first_dim reduce_scatter_along_first_dim symmetric_all_reduce",
    "use restore_from_saved": "restore_from_func_ctx",
    "use torch.backends.cudnn.version()": "get_cudnn_version",
    "use torch._foreach functions": "multi_tensor_applier",
    "use torch.nn.functional.cross_entropy": "parallel_cross_entropy",
    "write a duotone.pipeline.op.Op": "BasicOperation FusibleOperation OperationContext",
    CONTEXT_PARALLEL: "CPLoadBalancingStrategy",
    DELTA: "GatedDeltaNetAttention GatedDeltaNet2Attention GatedDeltaProductAttention",
    FUSION: "FusedOperation register_backward_fusion register_forward_backward_fusion register_forward_fusion",
    GLU: "deinterleave_glu_tensor interleave_glu_tensor",
    LINEAR_MATH: "CusolverMpCtx newton_schulz newton_schulz_tp",
    OVERLAP: "UserBufferQuantizationMode fill_userbuffers_buffer_for_all_gather get_ub",
    PADDING: "Fp8Padding Fp8Unpadding",
    ROUTING: "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss fused_topk_with_score_function moe_permute "
    "moe_permute_and_pad_with_probs moe_permute_with_probs moe_sort_chunks_by_index "
    "moe_sort_chunks_by_index_with_probs moe_unpermute",
    STATES: "RecipeState DelayedScalingRecipeState",
    TENSOR: "GroupedTensor HybridQuantizedTensor HybridQuantizedTensorStorage IdentityTensor IdentityTensorStorage",
    UPROJECTION: "FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant",
}
INSTEAD = {name: remedy for remedy, names in BY_REMEDY.items() for name in names.split()}
"""What a script can import, and what to write instead. A call is a UserError."""

PARTS_BY_REMEDY = {
    ATTENTION: "attention.dot_product_attention.backends attention.dot_product_attention.softmax "
    "attention.dot_product_attention.utils attention.sparse_attention",
    CASTS: "cpp_extensions cpp_extensions.fused_attn cpp_extensions.gemm",
    CONTEXT_PARALLEL: "attention.dot_product_attention.context_parallel",
    DELTA: "attention.linear_attention",
    EXPERTS: "ep",
    FUSION: "ops.fused",
    OBSERVE: "numerics_debug",
    PRIVATE: "constants distributed_weight dynamo jit module._common onnx_extensions ops._common",
    RECIPES: "custom_recipes custom_recipes.gemm custom_recipes.quantizer_factories "
    "custom_recipes.quantizer_factory_zoo experimental experimental.quantization experimental.quantization_nvfp4",
    TRITON: "triton triton.cross_entropy triton.pad triton.permutation",
    UPROJECTION: "attention.fused_mla_q_uproj",
}
MODULES_WITHOUT = {
    "transformer_engine_torch": CASTS,
    **dict.fromkeys(("transformer_engine.debug", "transformer_engine.debug.pytorch"), OBSERVE),
    **dict.fromkeys(("transformer_engine.debug.features", "transformer_engine.debug.pytorch.debug_state"), OBSERVE),
    **{f"transformer_engine.pytorch.{p}": remedy for remedy, parts in PARTS_BY_REMEDY.items() for p in parts.split()},
}
"""Modules of which every name is such a stand-in, and what to write instead."""
