"""Arguments of Transformer Engine's modules: their order, and those that Duotone does not have."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from duotone.errors import UserError

Options = dict[str, Any]


def is_off(value: object) -> bool:
    """Whether an option is None or False."""
    return value is None or value is False


def is_unset(value: object) -> bool:
    """Whether an option is None."""
    return value is None


def is_ignored(value: object) -> bool:
    """True: an option that is a hint or a label changes no result."""
    return True


NO_OVERLAP = "collectives do not overlap with products here, and results are the same; leave it out"

Rule = tuple[Callable[..., bool], str]
"""Which values of an option change no result, and what to write instead of others. Ignored ones warn of it."""

WITHOUT: dict[str, Rule] = {
    "alibi_slopes": (is_unset, "attention takes no biases: use rotary_pos_emb"),
    "atomic_gemm": (is_off, "leave it out"),
    "checkpoint_core_attention": (is_off, "attention keeps no scores: leave it out"),
    "core_attention_bias": (is_unset, "call torch's scaled_dot_product_attention with attn_mask"),
    "core_attention_bias_type": (lambda value: value == "no_bias", "call torch's scaled_dot_product_attention"),
    "cp_comm_type": (is_ignored, ""),
    "cp_global_ranks": (is_ignored, ""),
    "cp_stream": (is_ignored, ""),
    "fast_zero_fill": (is_ignored, ""),
    "inference_params": (is_unset, "give a duotone.KVCache as kv_cache"),
    "layer_number": (is_ignored, ""),
    "max_seqlen_kv": (is_ignored, ""),
    "max_seqlen_q": (is_ignored, ""),
    "micro_batch_size": (is_ignored, ""),
    "num_splits": (lambda value: value in (None, 1), "torch chooses: leave it out"),
    "pad_between_seqs": (is_ignored, ""),
    "return_layernorm_output_gathered": (is_off, "call torch.distributed.all_gather_into_tensor on the output"),
    "return_max_logit": (is_off, "compute it from query and key"),
    "rng_tracker_name": (is_ignored, ""),
    "rotary_pos_interleaved": (is_off, "turn pairs of neighbours in a RotaryPositionEmbedding of your own"),
    "seq_length": (is_ignored, ""),
    "softmax_type": (lambda value: value == "vanilla", "call torch's flex_attention"),
    "symmetric_ar_type": (is_unset, "leave it out"),
    "ub_name": (is_ignored, ""),
}
"""Options without a counterpart."""

LEAVE_OUT: Rule = (lambda value: not value), "leave it out"
OWN_ANGLES: Rule = (lambda value: not value), "compute such angles, and give them as rotary_pos_emb"
OF_FUNCTIONS: dict[str, dict[str, Rule]] = {
    "checkpoint": {"distribute_saved_activations": LEAVE_OUT},
    "get_cpu_offload_context": {"offload_weights": LEAVE_OUT, "manual_synchronization": LEAVE_OUT},
    "make_graphed_callables": dict.fromkeys(
        "fp8_weight_caching cache_quantized_params sample_kwargs pool retain_graph_in_backward pre_warmup_hook "
        "post_warmup_hook capture_time_hooks".split(),
        LEAVE_OUT,
    ),
    "RotaryPositionEmbedding": dict.fromkeys(
        ("interleaved", "pretrained_max_position_embeddings", "seq_len_interpolation_factor"), OWN_ANGLES
    ),
}
"""Options without a counterpart of functions, by their name."""


def refuse(function: str, **options: object) -> None:
    """UserError for an option of a function that has no counterpart, and for one that is not known."""
    for name, value in options.items():
        is_harmless, remedy = OF_FUNCTIONS[function].get(name, LEAVE_OUT)
        if not is_harmless(value):
            raise UserError(f"te.{function}({name}={value!r}) has no counterpart in Duotone; {remedy}")


LINEAR = (
    "sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker init_method bias return_bias "
    "params_dtype parallel_mode parameters_split device"
)
ORDER = {
    "Linear": f"in_features out_features {LINEAR}",
    "LayerNormLinear": "in_features out_features eps sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
    "get_rng_state_tracker init_method bias normalization return_bias params_dtype parallel_mode",
    "LayerNormMLP": "hidden_size ffn_hidden_size eps sequence_parallel return_bias get_rng_state_tracker tp_group "
    "tp_size init_method bias normalization activation",
    "GroupedLinear": "num_gemms in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
    "get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype parallel_mode device",
    "LayerNorm": "normalized_shape eps",
    "RMSNorm": "normalized_shape eps",
    "DotProductAttention": "num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type",
    "MultiheadAttention": "hidden_size num_attention_heads kv_channels attention_dropout layernorm_epsilon "
    "init_method output_layer_init_method layer_number attn_mask_type",
    "TransformerLayer": "hidden_size ffn_hidden_size num_attention_heads num_gqa_groups layernorm_epsilon "
    "hidden_dropout attention_dropout init_method output_layer_init_method layer_number kv_channels "
    "self_attn_mask_type",
}
"""The arguments of constructors, in the order in which scripts may pass them by position."""

ATTENTION = (
    "is_first_microbatch checkpoint_core_attention inference_params rotary_pos_emb core_attention_bias_type "
    "core_attention_bias alibi_slopes cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv fast_zero_fill"
)
CALLS = {
    "Linear": "inp is_first_microbatch fp8_output fp8_grad",
    "LayerNormLinear": "inp is_first_microbatch fp8_output fp8_grad",
    "LayerNormMLP": "inp is_first_microbatch",
    "GroupedLinear": "inp m_splits is_first_microbatch",
    "LayerNorm": "inp",
    "RMSNorm": "inp",
    "DotProductAttention": "query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv "
    "cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size",
    "MultiheadAttention": f"hidden_states attention_mask encoder_output attn_mask_type window_size {ATTENTION}",
    "TransformerLayer": "hidden_states attention_mask self_attn_mask_type window_size encoder_output "
    f"enc_dec_attn_mask enc_dec_attn_mask_type enc_dec_window_size {ATTENTION}",
}
"""The arguments of forwards."""

RENAMED = {"inp": "x", "input_": "x", "hidden_size": "normalized_shape"}
"""Arguments with another name in Duotone. A module that still has the old name takes that."""


def rule_of(option: str) -> Rule | None:
    """The rule of an option without a counterpart."""
    return WITHOUT.get(option, (is_ignored, NO_OVERLAP) if option.startswith("ub_") else None)


def by_name(call: str, order: Sequence[str], values: Sequence[object], options: Mapping[str, object]) -> Options:
    """All arguments of a call by name. TypeError, like Python's, for too many and for one that is passed twice."""
    if len(values) > len(order):
        raise TypeError(f"{call} takes {len(order)} arguments by position; got {len(values)}: name the others")
    named = dict(zip(order, values, strict=False))
    for name in named.keys() & options.keys():
        raise TypeError(f"{call} got {name} twice, by position and by name")
    return {**named, **options}


def counterparts(call: str, named: Options, parameters: frozenset[str]) -> Options:
    """The arguments under Duotone's names. UserError for a value without a counterpart."""
    result: Options = {}
    for name, value in named.items():
        new = name if name in parameters else RENAMED.get(name, name)
        if new in parameters:
            result[new] = value
            continue
        rule = rule_of(name)
        if rule is None:
            raise UserError(f"{call} has no argument {name}; allowed are {', '.join(sorted(parameters))}")
        is_harmless, remedy = rule
        if not is_harmless(value):
            raise UserError(f"{call}({name}={value!r}) has no counterpart in Duotone; {remedy}")
        if is_harmless is is_ignored and remedy and not is_off(value):
            warnings.warn(f"{call}({name}={value!r}): {remedy}", stacklevel=3)
    return result
