"""DotProductAttention: softmax(Q K^T) V by torch's own kernels, with the roles of attention."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.attention.heads import check_layout, from_heads, to_heads, token_axis
from duotone.attention.masks import Masking, Window, mask_type, window_of
from duotone.attention.meeting import UNNAMED, MeetsRecipes
from duotone.errors import RecipeError, UserError
from duotone.formats import IDENTITY
from duotone.pipeline.slot_roles import BoundaryRoles
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe, drop_dead
from duotone.recipes.roles import ANYWHERE, QuantizerRole, Site
from duotone.recipes.rules import RuleRecipe, first_match
from duotone.state.autocast_context import HIGH_PRECISION
from duotone.tensor.quantizer import Quantizer

COUNTS = {"forward": 3, "backward": 2}
"""Slots of each kind."""

SLOTS = {"qkv": 3, "s": 3, "do": 2, "dp": 2}
"""The tensors that attention's products multiply, with their slots: three each in forward, two in backward."""


class ProductPlan(NamedTuple):
    """One product of attention, by the names of the formats that it multiplies, and why."""

    gemm: str
    a: str
    b: str
    reason: str


class DotProductAttention(BoundaryRoles, MeetsRecipes):
    """Attention of heads, grouped where `num_gqa_groups` is below `num_attention_heads`; holds no parameters.

    `kv_channels` is the width of a head, or (of query and key, of value). `softmax_scale` None is 1/sqrt(width).
    `window_size` (left, right) bounds the keys around a query's own position, -1 for no bound. Products run in high
    precision; a recipe that asks for less shows in `plan_rows`, and is a RecipeError where it is strict. UserError for
    names that are not allowed, heads that groups do not divide, and probabilities outside of [0, 1).
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
        groups = num_gqa_groups or num_attention_heads
        if num_attention_heads % groups:
            raise UserError(f"num_gqa_groups {groups} does not divide num_attention_heads {num_attention_heads}")
        if not 0 <= attention_dropout < 1:
            raise UserError(f"attention_dropout is {attention_dropout}; give a probability from 0 to below 1")
        window_of(mask_type(attn_mask_type), window_size)
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.attention_dropout, self.softmax_scale = attention_dropout, softmax_scale
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.qkv_format = check_layout(qkv_format)
        self.recipe = as_recipe(type(self).__name__, recipe or HIGH_PRECISION)
        self._roles: tuple[QuantizerRole | None, QuantizerRole | None] = (None, None)
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
    ) -> Tensor:
        """Heads (s, b, h, d), (b, s, h, d) or packed (t, h, d), as `qkv_format` -> (s, b, h*d), (b, s, h*d), (t, h*d).

        `attention_mask` is bool, True for what is not seen: for "padding" types tokens (b, s) or (b, 1, 1, s), one mask
        or (of queries, of keys); for "arbitrary" what broadcasts to (b, h, queries, keys). `cu_seqlens`, integers
        (sequences + 1,), delimit packed sequences, or give the lengths of padded ones; a mask of (t, t) comes of the
        former. Queries that see no key give zeros. UserError where shapes, dtypes or masks do not fit.
        """
        layout = check_layout(qkv_format or self.qkv_format)
        self._check(layout, query_layer, key_layer, value_layer)
        self.meet_recipe_of_call(self.recipe)
        kind = mask_type(attn_mask_type or self.attn_mask_type)
        query, key, value = (to_heads(x, layout) for x in (query_layer, key_layer, value_layer))
        seen = self.visible(
            query_layer,
            key_layer,
            attention_mask,
            layout,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
        )
        if seen is None:
            return from_heads(self._attend(query, key, value, is_causal=kind.causal), layout)
        nothing = ~seen.any(dim=-1, keepdim=True)
        return from_heads(self._attend(query, key, value, attn_mask=seen | nothing).masked_fill(nothing, 0), layout)

    def visible(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | tuple[Tensor, Tensor] | None,
        layout: str,
        *,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_kv: Tensor | None,
        attn_mask_type: str | None,
        window_size: Window | None,
    ) -> Tensor | None:
        """Which keys a query sees, bool, or None for all or for what is causal. UserError where masks do not fit."""
        kind = mask_type(attn_mask_type or self.attn_mask_type)
        window = window_of(kind, window_size or self.window_size)
        alike = cu_seqlens_kv is None and query.shape[:-2] == key.shape[:-2]
        cu_seqlens = (cu_seqlens_q, cu_seqlens_q if alike else cu_seqlens_kv)
        masking = Masking(kind, window, layout == "thd")
        return masking.mask(to_heads(query, layout), to_heads(key, layout), mask, cu_seqlens)

    def _attend(self, *heads: Tensor, **masking: Any) -> Tensor:
        dropout = self.attention_dropout if self.training else 0.0
        grouped = self.num_gqa_groups != self.num_attention_heads
        return F.scaled_dot_product_attention(
            *heads, dropout_p=dropout, scale=self.softmax_scale, enable_gqa=grouped, **masking
        )

    def _check(self, layout: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        inputs, axes = (query, key, value), len(layout)
        heads = (self.num_attention_heads, self.num_gqa_groups, self.num_gqa_groups)
        widths = (self.channels[0], *self.channels)
        ends = list(zip(heads, widths, strict=True))
        fit = all(x.dim() == axes and tuple(x.shape[-2:]) == end for x, end in zip(inputs, ends, strict=True))
        fit = fit and key.shape[:-2] == value.shape[:-2]
        if fit and axes == 4:
            batch = 1 - token_axis(layout)
            fit = query.shape[batch] == key.shape[batch]
        same = len({x.dtype for x in inputs}) == 1 or torch.is_autocast_enabled(query.device.type)
        if not (fit and same and query.is_floating_point()):
            wanted = ", ".join(f"(..., {count}, {width})" for count, width in ends)
            got = ", ".join(f"{tuple(x.shape)} in {x.dtype}" for x in inputs)
            raise UserError(
                f"{self.module_name} takes query, key and value as {layout} {wanted} of one batch and floating dtype, "
                f"keys and values alike; got {got}: reshape or cast them"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)  # scales of Transformer Engine for products that run in FP8 there
        super()._load_from_state_dict(state_dict, prefix, *args)

    def take_name(self, name: str, site: Site) -> None:
        """The full name in the model, and where rules find the module."""
        self.module_name, self.site = name, site
        self.forget()

    def forget(self) -> None:
        """Ask every recipe anew at the next forward."""
        super().forget()
        self._answers: dict[tuple[str, QuantizerRole], tuple[Quantizer, ...]] = {}
        self._requests: dict[str, list[str]] = {}
        self._met = ""
        """The key of the recipe that was met last."""

    def roles_changed(self) -> None:
        self._met = ""

    def roles_of(self, mode: str) -> dict[str, QuantizerRole | None]:
        """`<kind>.<number>`: nine of "forward", six of "backward". Unknown consumers have a name and no type."""
        output, grad = self._roles
        if mode == "forward":
            output = output or QuantizerRole(name=f"{self.module_name}.dpa_output")
            kinds = {"qkv": self._role("qkv"), "output": output, "s": self._role("s")}
        else:
            grad = grad or QuantizerRole(name=f"{self.module_name}.dpa_grad_input")
            kinds = {"grad_input": grad, "do": self._role("do"), "dp": self._role("dp")}
        return {f"{kind}.{i}": role for kind, role in kinds.items() for i in range(COUNTS[mode])}

    def quantizers(self, recipe: Recipe) -> list[Quantizer]:
        """What the recipe gives every slot, forward slots first; it is asked once for each."""
        every = {mode: [role for role in self.roles_of(mode).values() if role] for mode in COUNTS}
        roles = [(role, count) for mode, count in COUNTS.items() for role in every[mode][::count]]
        return [quantizer for role, slots in roles for quantizer in self._ask(recipe, role, slots)]

    def requested(self, recipe: Recipe) -> list[str]:
        """The tensor types of attention's products that the recipe wants in low precision; RecipeError where strict."""
        kinds = self._requests.get(recipe.key)
        if kinds is None:
            roles = {kind: self._role(kind) for kind in SLOTS}
            low = [kind for kind, role in roles.items() if self._ask(recipe, role, SLOTS[kind])[0] != Quantizer()]
            kinds = [kind for kind in low if recipe.asks_for(roles[kind], self.site)]
            drop_dead(self._requests)
            self._requests[recipe.key] = kinds
        if kinds and recipe.strict:
            remedy = "give roles of module type 'dpa' identity, or set strict to false"
            asked = f"the recipe asks for low precision in {', '.join(kinds)}"
            raise RecipeError(f"strict: {self.module_name} runs in high precision and {asked}; {remedy}")
        return kinds

    def plan_rows(self, recipe: Recipe) -> list[ProductPlan]:
        """What runs for both products under the recipe; RecipeError if it is strict and asks for something else."""
        reason, asked = "attention runs in high precision", self.requested(recipe)
        if asked:
            reason += f"; the request of recipe {recipe.name} for {', '.join(asked)} is not met"
        return [ProductPlan(gemm, IDENTITY.name, IDENTITY.name, reason) for gemm in ("QK^T", "PV")]

    def meet(self, recipe: Recipe) -> None:
        if recipe.key != self._met:
            self.quantizers(recipe)
            self.requested(recipe)
            self._met = recipe.key

    def _ask(self, recipe: Recipe, role: QuantizerRole, slots: int) -> tuple[Quantizer, ...]:
        key = (recipe.key, role)
        if key not in self._answers:
            drop_dead(self._answers)
            self._answers[key] = tuple(_answer(recipe, role, self.site) for _ in range(slots))
        return self._answers[key]

    def _role(self, tensor_type: str) -> QuantizerRole:
        return QuantizerRole("dpa", tensor_type, self.module_name)

    def __getstate__(self) -> dict[str, Any]:  # the keys of recipes are this process's
        return {name: value for name, value in self.__dict__.items() if name not in ("_answers", "_requests", "_met")}


def _answer(recipe: Recipe, role: QuantizerRole, site: Site) -> Quantizer:
    """What the recipe gives a slot of attention. Strict rules without a word on attention leave it as it is."""
    if not isinstance(recipe, RuleRecipe):
        return recipe.quantizer(role, site)
    quantizer = first_match(recipe.rules, role, site, recipe.history)
    return quantizer or (Quantizer() if recipe.base is None else _answer(recipe.base, role, site))
