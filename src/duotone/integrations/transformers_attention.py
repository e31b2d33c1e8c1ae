"""`attn_implementation="duotone"`: converted models of transformers attend through `DotProductAttention`."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from duotone.attention import DotProductAttention
from duotone.conversion.attention_cores import CORE, NAME
from duotone.errors import UserError
from duotone.pipeline.titles import title

UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")
"""Changes of scores that some models ask for, and that Duotone's attention does not support."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Heads (batch, heads, tokens, width) -> (batch, tokens, heads, width), as transformers calls it.

    A module that `duotone.convert` did not see runs as "sdpa". `cu_seq_lens_q` and `cu_seq_lens_k`, which collators
    make, keep packed sequences apart. UserError for masks that are not bool, and for models that change scores.
    """
    core = module._modules.get(CORE)
    if not isinstance(core, DotProductAttention):
        options |= {"scaling": scaling, "dropout": dropout}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    for name in UNKNOWN:
        if options.get(name) is not None:
            raise UserError(f"{title(core)}: attention of Duotone has no {name}; load the model with 'eager'")
    if scaling is not None and core.softmax_scale != scaling:
        core.softmax_scale = scaling
    if module.training and core.attention_dropout != dropout:
        core.attention_dropout = dropout
    heads = [x.transpose(1, 2) for x in (query, key, value)]
    is_causal = options.get("is_causal")
    is_causal = module.is_causal if is_causal is None else is_causal
    edges: list[Any] = [options.get(f"cu_seq_lens_{side}") for side in "qk"]
    if edges[0] is not None and len(query) != 1:
        raise UserError(f"{title(core)}: packed sequences are one row; got {len(query)} rows and cu_seq_lens_q")
    if attention_mask is not None:
        kind = str(attention_mask.dtype).removeprefix("torch.")
        if kind != "bool":
            raise UserError(f"{title(core)}: a mask of transformers is bool, True for what is seen; got {kind}")
        seen = attention_mask[..., : key.shape[2]]
        out = core(*heads, ~(seen if edges[0] is None else seen & _together(edges, heads)), attn_mask_type="arbitrary")
    elif edges[0] is not None:
        lengths = {"cu_seqlens_q": edges[0], "cu_seqlens_kv": edges[1], "qkv_format": "thd"}
        kind = "padding_causal" if is_causal else "padding"
        out = core(*(x[0] for x in heads), attn_mask_type=kind, **lengths)[None]
    else:
        # Without a mask, the keys of a static cache behind those of the queries are empty.
        out = core(*heads, attn_mask_type="causal" if is_causal and query.shape[2] > 1 else "no_mask")
    return out.unflatten(-1, (query.shape[1], -1)), None


def _together(edges: list[Any], heads: list[Tensor]) -> Tensor:
    """Bool (queries, keys), True where both are of one packed sequence."""
    places = (torch.arange(x.shape[1], device=x.device) for x in heads[:2])
    first, second = (torch.searchsorted(ends, place, right=True) for ends, place in zip(edges, places, strict=True))
    return first[:, None] == second


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
