"""Statistics taps: a recipe that computes the same bits and records what they lost, and a step under such recipes.

Run sampled steps under `autocast(recipe=with_statistics(recipe, store))` and all others under the recipe itself: which
steps are sampled is the caller's choice. Sums stay on the device, so a tapped step synchronises nothing; `Tap.rows`
reads them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.modules.planned import Planned
from duotone.observe.sampling import Sampler
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.recipes.roles import ANYWHERE, QuantizerRole, Site
from duotone.tensor.content import WithContent
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.plane import BOTH, Planes, Usage
from duotone.tensor.quantizer import Quantizer

T = TypeVar("T")


class Tapped:
    """Stands for `inner` in this process. Copies are the same object, and a pickle is that of `inner`."""

    inner: Any

    def __reduce__(self) -> tuple[object, ...]:
        return _untapped, (self.inner,)

    def __deepcopy__(self, memo: object) -> Self:
        return self


@dataclass(frozen=True)
class TappedQuantizer(Tapped, WithContent):
    """A quantizer that records each plane that it makes. Two are equal if quantizer, role and store are equal.

    Everything but `encode` is the inner quantizer's. So tensors from `make` and `quantize` carry the inner quantizer.
    """

    inner: Quantizer
    role: QuantizerRole
    store: Sampler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def encode_produced(self, producer: object, usage: Usage, ctx: QuantizeContext) -> None:
        """None: a matrix that only its cast kernel computes cannot be recorded, so it is materialized."""

    def encode(self, x: Tensor, usage: Usage = BOTH, ctx: QuantizeContext = LOCAL) -> Planes:
        """The planes of the inner quantizer, which the store samples."""
        planes = self.inner.encode(x, usage, ctx)
        with torch.no_grad():
            self.store.take(self.role, x, planes, ctx.slots)
        return planes


@dataclass(frozen=True, kw_only=True)
class TappedRecipe(Tapped, Recipe):
    """`inner` with taps on every quantizer that it returns, in evaluation too.

    A value: two are equal if recipe and store are equal. Its pickle and its JSON are those of the inner recipe, without
    the store, because observation belongs to this process.
    """

    inner: Recipe
    store: Sampler

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def asks_by_slot(self) -> bool:
        return self.inner.asks_by_slot

    @property
    def alignment(self) -> int:
        return self.inner.alignment

    def __call__(self, role: QuantizerRole | None) -> Quantizer:
        return self._tapped(self.inner(role), role)

    def quantizer(
        self, role: QuantizerRole | None, site: Site = ANYWHERE, slot: QuantizerRole | None = None
    ) -> Quantizer:
        return self._tapped(self.inner.quantizer(role, site, slot), role)

    def attention_quantizer(self, role: QuantizerRole, site: Site = ANYWHERE) -> Quantizer:
        """The quantizer of the inner recipe: operands of attention are not sampled."""
        return self.inner.attention_quantizer(role, site)

    def asks_for(self, role: QuantizerRole, site: Site = ANYWHERE) -> bool:
        return self.inner.asks_for(role, site)

    def _tapped(self, quantizer: Quantizer, role: QuantizerRole | None) -> Quantizer:
        return quantizer if role is None else cast(Quantizer, TappedQuantizer(quantizer, role, self.store))

    def to_dict(self) -> dict[str, Any]:
        return self.inner.to_dict()


def _untapped(inner: T) -> T:
    return inner


def with_statistics(recipe: RecipeLike, store: Sampler) -> TappedRecipe:
    """The recipe with the same bits that records into `store`, such as a `Tap`."""
    recipe = as_recipe("with_statistics", recipe)
    if not isinstance(store, Sampler):
        got = type(store).__name__
        raise UserError(f"with_statistics takes a Tap; got {got}: call with_statistics(recipe, observe.Tap())")
    evaluation = None if recipe.evaluation is None else with_statistics(recipe.evaluation, store)
    options = {field.name: getattr(recipe, field.name) for field in fields(Recipe)}
    return TappedRecipe(inner=recipe, store=store, **{**options, "evaluation": evaluation})


@contextmanager
def sampled_step(model: nn.Module, sampler: Sampler, recipes: dict[str, TappedRecipe] | None = None) -> Iterator[None]:
    """Run the block, which computes the same bits, with a tap on every operand that linears of `model` encode.

    Run backward inside the block too. There, compiled code with such a linear runs eagerly: a graph cannot call a
    sampler, and its guards see `tapped`. Nothing is compiled again. Operands of attention products (`fp8_dpa`) are not
    sampled, and replays of CUDA graphs give no samples. `recipes` holds tapped recipes for the next step with this
    sampler, so that the plans of modules stay.
    """
    recipes = {} if recipes is None else recipes

    def tapped(recipe: Recipe) -> Recipe:
        if recipe.key not in recipes:
            recipes[recipe.key] = with_statistics(recipe, sampler)
        return recipes[recipe.key]

    planners = [module.plans for module in model.modules() if isinstance(module, Planned)]
    if any(planner.tapped is not None for planner in planners):
        raise UserError("this step of the model is sampled already; close the other monitor first")
    eager = torch.compiler.set_stance("eager_on_recompile") if "torch._dynamo" in sys.modules else nullcontext()
    with eager:
        try:
            for planner in planners:
                planner.tapped = tapped
            yield
        finally:
            for planner in planners:
                planner.tapped = None
