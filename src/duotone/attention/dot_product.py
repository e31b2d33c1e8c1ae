"""DotProductAttention: softmax(Q K^T) V, by torch's own kernels or in the formats of the roles of attention."""

import warnings
from typing import Any

import torch
from torch import Tensor

from duotone.attention.attention_roles import AttentionRoles
from duotone.attention.heads import check_layout, from_heads, to_heads, token_axis
from duotone.attention.kv_cache import KVCache
from duotone.attention.low_precision import LowPrecision, traced_pick
from duotone.attention.masks import Lengths, Masking, Masks, MaskType, Window, mask_type, seen_by, window_of
from duotone.attention.products import ProductPlan, product_rows
from duotone.attention.ranks import Ranks
from duotone.dispatch.attention import (
    CUDNN_TOKENS,
    CUDNN_WIDTH,
    FORWARD,
    NO_TOKENS,
    attend,
)
from duotone.dispatch.target import HOPPER, target
from duotone.errors import RecipeError, UserError
from duotone.formats import IDENTITY
from duotone.modules import delayed_states
from duotone.modules.foreign_states import translate
from duotone.pipeline.slot_roles import ConsumerRoles
from duotone.pipeline.titles import title
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.recipes.roles import ANYWHERE, UNNAMED
from duotone.state.autocast_context import HIGH_PRECISION
from duotone.state.region import AmaxMode, mode_now

TRANSIENT = ("_answers", "_requests", "_picks", "_prepared", "_low_precision", "consumers")
"""Attributes that follow from recipes and the rest."""


class DotProductAttention(AttentionRoles):
    """Attention of heads, without parameters. Heads share keys if `num_gqa_groups` is below `num_attention_heads`.

    A call takes all heads, or those of one of several ranks: the same share of heads and of groups.

    `kv_channels` is the width of a head, or (of query and key, of value). `softmax_scale` None is 1/sqrt(width).
    `window_size` (left, right) bounds the keys around a query's own position, -1 for no bound. Products run in high
    precision, or in the formats of a recipe that asks for them; `plan_rows` shows which. UserError for names that are
    not allowed, heads that groups do not divide, and probabilities outside of [0, 1).
    """

    def __init__(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        softmax_scale: float | None = None,
        qkv_format: str = "sbhd",
        name: str = "",
        recipe: RecipeLike | None = None,
    ) -> None:
        super().__init__(num_attention_heads, kv_channels, num_gqa_groups, attention_dropout, softmax_scale)
        window_of(mask_type(attn_mask_type), window_size)
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.qkv_format = check_layout(qkv_format)
        self.recipe = as_recipe(type(self).__name__, recipe or HIGH_PRECISION)
        self.consumers = ConsumerRoles()
        self.take_name(name or f"Attention_{self._number}", ANYWHERE if name else UNNAMED)

    def forward(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        *,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        kv_cache: KVCache | None = None,
    ) -> Tensor:
        """Heads (s, b, h, d), (b, s, h, d) or packed (t, h, d), as `qkv_format` -> (s, b, h*d), (b, s, h*d), (t, h*d).

        - `attention_mask` is bool, True for what is not seen. For "padding" types it masks tokens: (b, s) or
          (b, 1, 1, s), one mask or a pair (queries, keys). For "arbitrary" it broadcasts to (b, h, queries, keys).
        - `cu_seqlens`, integers (sequences + 1,), delimit packed sequences, or give the lengths of padded ones. In high
          precision they become a mask (t, t).
        - A `kv_cache` takes the new keys and values. Queries see all that it holds, up to their own position.

        Queries that see no key give zeros. UserError if shapes, dtypes or masks do not fit.
        """
        layout = check_layout(qkv_format or self.qkv_format)
        self._check(layout, query_layer, key_layer, value_layer)
        if kv_cache is not None:
            attn_mask_type = self._kind_with_cache(attn_mask_type, attention_mask, cu_seqlens_q, cu_seqlens_kv)
        kind, window = self.masking(attn_mask_type, window_size)
        recipe, group = self.recipe_of_call(self.recipe)
        if kv_cache is not None:
            cached = kv_cache.append(key_layer, value_layer, layout)
            key_layer, value_layer = (x.to(query_layer.dtype) for x in cached)
        heads = query_layer, key_layer, value_layer
        is_low, ranks = self.over_ranks(recipe, query_layer, key_layer, layout)
        lengths = cu_seqlens_q, cu_seqlens_kv
        seen = self.visible((query_layer, key_layer), attention_mask, lengths, layout, kind, window, ranks)
        if is_low and self._pays(recipe, heads, layout, seen, kind, ranks):
            return self._low_precision.run(heads, layout, seen, window, recipe, group, ranks)
        query, key, value = (to_heads(x, layout) for x in heads)
        options = {"dropout": self.dropout, "scale": self.softmax_scale}
        if seen is None:
            return from_heads(attend(query, key, value, **options, is_causal=kind.causal), layout)
        if seen.dtype is torch.int32:
            seen = seen_by(seen, slice(0, query.shape[2]), slice(0, key.shape[2]))
        nothing = ~seen.any(dim=-1, keepdim=True)
        out = attend(query, key, value, **options, attn_mask=seen | nothing)
        return from_heads(out.masked_fill(nothing, 0), layout)

    def over_ranks(self, recipe: Recipe, query: Tensor, key: Tensor, layout: str) -> tuple[bool, Ranks | None]:
        """Whether a call may run in low precision, and the ranks that share its sequence.

        With unequal numbers of queries and keys torch's ring runs in high precision. RecipeError if `recipe` is strict.
        """
        if not self.requested(recipe):
            return False, None
        ranks, axis = Ranks.now(), token_axis(layout)
        if ranks is None or query.shape[axis] == key.shape[axis]:
            return True, ranks
        cause = "context_parallel has no products of codes with a cache or another number of keys"
        problem = f"{title(self)} runs in high precision: {cause}"
        if recipe.strict:
            raise RecipeError(f"strict: {problem}; leave roles of module type 'dpa' in high precision, or strict false")
        warnings.warn(problem, stacklevel=3)
        return False, None

    def masking(self, attn_mask_type: str | None, window_size: Window | None) -> tuple[MaskType, Window]:
        """The type and the window of a call with these arguments, else those of the module."""
        kind = mask_type(attn_mask_type or self.attn_mask_type)
        return kind, window_of(kind, window_size or self.window_size)

    def _kind_with_cache(self, name: str | None, *masks: object) -> str:
        name = name or self.attn_mask_type
        kind = mask_type(name)
        if kind.padding or kind.arbitrary or any(mask is not None for mask in masks):
            raise UserError(
                f"a kv_cache goes with attn_mask_type 'causal' or 'no_mask' and no masks of the call; got {name!r}"
            )
        return "causal_bottom_right" if kind.causal else name

    def visible(
        self,
        heads: tuple[Tensor, Tensor],
        mask: Masks,
        lengths: tuple[Lengths, Lengths],
        layout: str,
        kind: MaskType,
        window: Window,
        ranks: Ranks | None,
    ) -> Tensor | None:
        """Which keys a query sees, as `Masking.mask`. UserError if masks do not fit.

        `lengths` are the `cu_seqlens` of queries and of keys.
        """
        query, key = heads
        alike = lengths[1] is None and query.shape[:-2] == key.shape[:-2]
        cu_seqlens = (lengths[0], lengths[0] if alike else lengths[1])
        masking = Masking(kind, window, layout == "thd", ranks)
        return masking.mask(to_heads(query, layout), to_heads(key, layout), mask, cu_seqlens)

    def _check(self, layout: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        inputs, axes = (query, key, value), len(layout)
        count, groups = self.heads_of(query)
        heads = count, groups, groups
        widths = (self.channels[0], *self.channels)
        ends = list(zip(heads, widths, strict=True))
        fit = all(x.dim() == axes and tuple(x.shape[-2:]) == end for x, end in zip(inputs, ends, strict=True))
        fit = fit and key.shape[:-2] == value.shape[:-2] and query.device == key.device == value.device
        if fit and axes == 4:
            batch = 1 - token_axis(layout)
            fit = query.shape[batch] == key.shape[batch]
        same = len({x.dtype for x in inputs}) == 1 or torch.is_autocast_enabled(query.device.type)
        if not (fit and same and query.is_floating_point()):
            allowed = ", ".join(f"(..., {count}, {width})" for count, width in ends)
            got = ", ".join(f"{tuple(x.shape)} in {x.dtype} on {x.device}" for x in inputs)
            raise UserError(
                f"{title(self)} takes query, key and value as {layout} {allowed} of one batch and floating dtype on "
                f"one device, keys and values alike; got {got}: reshape, cast or move them"
            )

    def forget_recipe(self, recipe: str) -> None:
        super().forget_recipe(recipe)
        self._low_precision.forget_recipe(recipe)

    def roles_changed(self) -> None:
        super().roles_changed()
        self._low_precision = LowPrecision(self)

    def _pays(
        self,
        recipe: Recipe,
        heads: tuple[Tensor, Tensor, Tensor],
        layout: str,
        seen: Tensor | None,
        kind: MaskType,
        ranks: Ranks | None,
    ) -> bool:
        """Whether the call runs in low precision as far as `dpa_min_tokens` decides.

        Ranks that share a sequence run all masks so: torch's ring takes none.
        """
        if ranks is not None and seen is not None:
            return True
        compiling = torch.compiler.is_dynamo_compiling()
        where = str(heads[0].device), self.dropout, ranks.name if ranks else ""
        pick = traced_pick(self._low_precision.alike, recipe, *where) if compiling else self.pick(recipe, *where)
        if not pick.least.forward:
            return True
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in heads)
        if not compiling:
            trains = trains or mode_now() is AmaxMode.DEFER  # a checkpoint, which trains later
        return pick.takes(heads, layout, seen, kind, trains)

    def plan_rows(self, recipe: Recipe, device: str | None = None) -> list[ProductPlan]:
        """What runs for each product under the recipe; RecipeError if it is strict and no kernel takes its formats.

        `device` may be an architecture, as "sm90"; None is CUDA if it is here, else the CPU.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        reason = "attention runs in high precision"
        if target(device).arch == HOPPER and max(self.channels) <= CUDNN_WIDTH:
            reason += f", from {CUDNN_TOKENS} queries on without a mask by cuDNN"
        if self.requested(recipe):
            problem = self.formats(recipe, device).problem(self.channels, self.dropout, device)
            is_measured, least = self.pick(recipe, device, self.dropout)
            if not is_measured or least != NO_TOKENS:
                return product_rows(problem, is_measured, least)
            reason += f"; FP8 would be slower (dpa_min_tokens): {problem.forward_refusal() or 'measured'}"
        return [ProductPlan(gemm, IDENTITY.name, IDENTITY.name, reason) for gemm in FORWARD]

    def share(self, recipe: Recipe) -> None:
        self.prepare_recipe(recipe)
        if not self.is_shared(recipe):
            self._low_precision.share(recipe)

    def is_shared(self, recipe: Recipe) -> bool:
        return hasattr(self._low_precision.alike, recipe.key)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Delayed scales that the module does not have yet wait for a recipe that needs them."""
        translate(state_dict, prefix, attends=True)
        self.saved_states.update(delayed_states.set_aside(self, state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:  # the keys of recipes are this process's
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.consumers = ConsumerRoles()
        super().__setstate__({"saved_states": {}, **state})
