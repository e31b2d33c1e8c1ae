"""AttentionRoles: what recipes give the tensors of a module of attention."""

import math

from torch import Tensor

from duotone.attention.heads import channels_of, groups_of, share_of
from duotone.attention.picks import Pick
from duotone.attention.products import AttentionFormats, refused
from duotone.attention.recipe_following import FollowsRecipes
from duotone.dispatch.attention import AttentionProblem
from duotone.errors import UserError
from duotone.numbered import ByName
from duotone.pipeline.slot_roles import BoundaryRoles
from duotone.pipeline.titles import title
from duotone.recipes.recipe import Recipe, drop_dead
from duotone.recipes.roles import QuantizerRole, Site
from duotone.state.torch_private import specialized
from duotone.tensor.quantizer import Quantizer

KINDS = {"forward": ("qkv", "output", "s"), "backward": ("grad_input", "do", "dp")}
COUNTS = {kind: 3 if mode == "forward" else 2 for mode, kinds in KINDS.items() for kind in kinds}
"""Slots of each kind."""

MULTIPLIED = ("qkv", "s", "do", "dp")
"""The kinds that attention's products multiply."""


class AttentionRoles(BoundaryRoles, FollowsRecipes):
    """Heads that ask recipes for the formats of their tensors, each role once."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None,
        attention_dropout: float,
        softmax_scale: float | None,
    ) -> None:
        super().__init__()
        groups, channels = groups_of(num_attention_heads, num_gqa_groups), channels_of(kv_channels)
        if softmax_scale is not None and not 0 < softmax_scale < math.inf:
            raise UserError(f"softmax_scale is {softmax_scale}; give a positive number, or None for 1/sqrt(width)")
        if not 0 <= attention_dropout < 1:
            raise UserError(f"attention_dropout is {attention_dropout}; give a probability from 0 to below 1")
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.channels, self.attention_dropout, self.softmax_scale = channels, attention_dropout, softmax_scale
        self.saved_states: dict[str, dict[str, Tensor]] = {}

    @property
    def dropout(self) -> float:
        """The probability with which a call drops weights now."""
        return specialized(self.attention_dropout) if self.training else 0.0

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

    def roles_changed(self) -> None:
        self._picks: dict[tuple[str, str, float, str], Pick] = {}
        self._prepared = ""
        """The key of the recipe of the last `prepare_recipe`."""

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

    def pick(self, recipe: Recipe, device: str, dropout: float = 0.0, ranks: str = "") -> Pick:
        """What `dpa_min_tokens` means on a device. The first call of `ranks`, by name, is a collective."""
        key = recipe.key, device, dropout, ranks
        if key not in self._picks:
            drop_dead(self._picks)
            self._picks[key] = Pick.of(self._problem(recipe, device, dropout), recipe, ranks, device)
        return self._picks[key]

    def keeps_high_precision(self, recipe: Recipe) -> bool:
        return not self.requested(recipe)

    def prepare_recipe(self, recipe: Recipe) -> None:
        if recipe.key != self._prepared:
            self.quantizers(recipe)
            self.requested(recipe)
            self._prepared = recipe.key

    def _ask(self, recipe: Recipe, role: QuantizerRole, slots: int) -> tuple[Quantizer, ...]:
        key = (recipe.key, role)
        if key not in self._answers:
            drop_dead(self._answers)
            self._answers[key] = tuple(recipe.attention_quantizer(role, self.site) for _ in range(slots))
        return self._answers[key]

    def _role(self, tensor_type: str) -> QuantizerRole:
        return QuantizerRole("dpa", tensor_type, self.module_name)
