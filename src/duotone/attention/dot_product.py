"""DotProductAttention: softmax(Q K^T) V, by torch's own kernels or in the formats of the roles of attention."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from duotone.attention.heads import channels_of, check_layout, from_heads, groups_of, share_of, to_heads, token_axis
from duotone.attention.kv_cache import KVCache
from duotone.attention.low_precision import Alike, LowPrecision, traced_pick
from duotone.attention.masks import Lengths, Masking, Masks, MaskType, Window, mask_type, seen_by, window_of
from duotone.attention.picks import Pick
from duotone.attention.products import AttentionFormats, ProductPlan, product_rows, refused
from duotone.attention.ranks import Ranks
from duotone.attention.recipe_following import FollowsRecipes
from duotone.dispatch.attention import (
    CUDNN_TOKENS,
    CUDNN_WIDTH,
    FORWARD,
    NO_TOKENS,
    AttentionProblem,
    attend,
)
from duotone.dispatch.target import HOPPER, target
from duotone.errors import RecipeError, UserError
from duotone.formats import IDENTITY
from duotone.numbered import ByName
from duotone.pipeline.slot_roles import BoundaryRoles, ConsumerRoles
from duotone.pipeline.titles import title
from duotone.planned import delayed_states, extra_state
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe, drop_dead
from duotone.recipes.roles import ANYWHERE, UNNAMED, QuantizerRole, Site
from duotone.state.autocast_context import HIGH_PRECISION
from duotone.state.region import AmaxMode, mode_now
from duotone.state.torch_private import specialized
from duotone.tensor.quantizer import Quantizer

KINDS = {"forward": ("qkv", "output", "s"), "backward": ("grad_input", "do", "dp")}
COUNTS = {kind: 3 if mode == "forward" else 2 for mode, kinds in KINDS.items() for kind in kinds}
"""Slots of each kind."""

MULTIPLIED = ("qkv", "s", "do", "dp")
"""The kinds that attention's products multiply."""

TRANSIENT = ("_answers", "_requests", "_picks", "_prepared", "_low_precision", "_alike", "consumers")
"""Attributes that follow from recipes and the rest."""


class DotProductAttention(BoundaryRoles, FollowsRecipes):
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
        super().__init__()
        groups, channels = groups_of(num_attention_heads, num_gqa_groups), channels_of(kv_channels)
        if softmax_scale is not None and not 0 < softmax_scale < math.inf:
            raise UserError(f"softmax_scale is {softmax_scale}; give a positive number, or None for 1/sqrt(width)")
        if not 0 <= attention_dropout < 1:
            raise UserError(f"attention_dropout is {attention_dropout}; give a probability from 0 to below 1")
        window_of(mask_type(attn_mask_type), window_size)
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.channels, self.attention_dropout, self.softmax_scale = channels, attention_dropout, softmax_scale
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.qkv_format = check_layout(qkv_format)
        self.recipe = as_recipe(type(self).__name__, recipe or HIGH_PRECISION)
        self.consumers = ConsumerRoles()
        self.saved_states: dict[str, dict[str, Tensor]] = {}
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

    @property
    def dropout(self) -> float:
        """The probability with which a call drops weights now."""
        if not self.training:
            return 0.0
        return specialized(self.attention_dropout) if torch.compiler.is_dynamo_compiling() else self.attention_dropout

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

    def heads_of(self, query: Tensor) -> tuple[int, int]:
        """How many heads a call has, and how many of keys: all, or the share of the rank whose query this is."""
        return share_of(self.num_attention_heads, self.num_gqa_groups, query.shape[-2] if query.dim() > 2 else 0)

    def take_name(self, name: str, site: Site) -> None:
        """The full name in the model, and where rules find the module."""
        self.module_name, self.site = name, site
        self.forget()

    def forget(self) -> None:
        """Ask every recipe anew at the next forward."""
        super().forget()
        self._answers: dict[tuple[str, QuantizerRole], tuple[Quantizer, ...]] = {}
        self._requests = ByName()
        self.roles_changed()

    def forget_recipe(self, recipe: str) -> None:
        self._prepared = ""
        self._picks = {key: pick for key, pick in self._picks.items() if key[0] != recipe}
        self._low_precision.forget_recipe(recipe)
        vars(self._alike).pop(recipe, None)

    def roles_changed(self) -> None:
        self._picks: dict[tuple[str, str, float, str], Pick] = {}
        self._low_precision = LowPrecision(self)
        self._prepared = ""
        """The key of the recipe of the last `prepare_recipe`."""
        self._alike = ByName()
        """By the key of a recipe: the modules whose traced calls have the same stages."""

    def roles_of(self, mode: str) -> dict[str, QuantizerRole | None]:
        """`<kind>.<number>`: nine of "forward", six of "backward". Unknown consumers have a name and no type."""
        roles = self._roles_by_kind(self.output_quantizer_role, self.grad_input_quantizer_role)
        return {f"{kind}.{i}": roles[kind] for kind in KINDS[mode] for i in range(COUNTS[kind])}

    def _roles_by_kind(self, output: QuantizerRole | None, gradient: QuantizerRole | None) -> dict[str, QuantizerRole]:
        roles = {kind: self._role(kind) for kind in COUNTS}
        roles["output"] = output or QuantizerRole(name=f"{self.module_name}.dpa_output")
        roles["grad_input"] = gradient or QuantizerRole(name=f"{self.module_name}.dpa_grad_input")
        return roles

    def _answers_by_kind(self, recipe: Recipe) -> dict[str, tuple[Quantizer, ...]]:
        roles = self._roles_by_kind(*self.roles_under(recipe.key))
        return {kind: self._ask(recipe, role, COUNTS[kind]) for kind, role in roles.items()}

    def quantizers(self, recipe: Recipe) -> list[Quantizer]:
        """What the recipe gives every slot, forward slots first; it is asked once for each."""
        return [quantizer for answers in self._answers_by_kind(recipe).values() for quantizer in answers]

    def requested(self, recipe: Recipe) -> list[str]:
        """The tensor types of attention's products that the recipe wants in low precision.

        RecipeError if the recipe is strict, and no attention kernel takes their formats, the heads or the dropout.
        """
        kinds: list[str] | None = getattr(self._requests, recipe.key, None)
        if kinds is None:
            roles = {kind: self._role(kind) for kind in MULTIPLIED}
            low = [kind for kind, role in roles.items() if self._ask(recipe, role, COUNTS[kind])[0] != Quantizer()]
            kinds = [kind for kind in low if recipe.asks_for(roles[kind], self.site)]
            if kinds and recipe.strict and (refusal := self._problem(recipe, "cpu", 0.0).nowhere()):
                raise refused(title(self), refusal)
            drop_dead(vars(self._requests))
            setattr(self._requests, recipe.key, kinds)
        if kinds and recipe.strict and self.dropout:
            raise refused(title(self))
        return kinds

    def formats(self, recipe: Recipe, device: str = "", ranks: str = "") -> AttentionFormats:
        """What a recipe that asks for low precision gives the tensors of attention.

        On a device where measurements decide, backward is in high precision, which is faster.
        """
        formats = AttentionFormats.of(self._answers_by_kind(recipe), recipe, self.module_name)
        if device and recipe.backward_override is None and self.pick(recipe, device, 0.0, ranks).is_measured:
            return formats.overridden("dequantized")
        return formats

    def _problem(self, recipe: Recipe, device: str, dropout: float) -> AttentionProblem:
        return self.formats(recipe).problem(self.channels, dropout, device)

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
        pick = traced_pick(self._alike, recipe, *where) if compiling else self.pick(recipe, *where)
        if not pick.least.forward:
            return True
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in heads)
        if not compiling:
            trains = trains or mode_now() is AmaxMode.DEFER  # a checkpoint, which trains later
        return pick.takes(heads, layout, seen, kind, trains)

    def pick(self, recipe: Recipe, device: str, dropout: float = 0.0, ranks: str = "") -> Pick:
        """What `dpa_min_tokens` means on a device. The first call of `ranks`, by name, is a collective."""
        key = recipe.key, device, dropout, ranks
        if key not in self._picks:
            drop_dead(self._picks)
            self._picks[key] = Pick.of(self._problem(recipe, device, dropout), recipe, ranks, device)
        return self._picks[key]

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

    def keeps_high_precision(self, recipe: Recipe) -> bool:
        return not self.requested(recipe)

    def prepare_recipe(self, recipe: Recipe) -> None:
        if recipe.key != self._prepared:
            self.quantizers(recipe)
            self.requested(recipe)
            self._prepared = recipe.key

    def share(self, recipe: Recipe) -> None:
        self.prepare_recipe(recipe)
        if not self.is_shared(recipe):
            drop_dead(vars(self._alike))
            formats = self.formats(recipe)
            content = recipe.key, formats, self.channels
            setattr(self._alike, recipe.key, Alike.of(content, self))

    def is_shared(self, recipe: Recipe) -> bool:
        return hasattr(self._alike, recipe.key)

    def _ask(self, recipe: Recipe, role: QuantizerRole, slots: int) -> tuple[Quantizer, ...]:
        key = (recipe.key, role)
        if key not in self._answers:
            drop_dead(self._answers)
            self._answers[key] = tuple(recipe.attention_quantizer(role, self.site) for _ in range(slots))
        return self._answers[key]

    def _role(self, tensor_type: str) -> QuantizerRole:
        return QuantizerRole("dpa", tensor_type, self.module_name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Delayed scales that the module does not have yet wait for a recipe that needs them."""
        extra_state.unpack(state_dict, prefix, slots=extra_state.ATTENTION)
        self.saved_states.update(delayed_states.set_aside(self, state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:  # the keys of recipes are this process's
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.consumers = ConsumerRoles()
        super().__setstate__({"saved_states": {}, **state})
