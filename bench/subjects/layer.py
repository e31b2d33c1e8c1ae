"""A layer at work: forward and backward of a module over one input, in plain torch, torchao and under recipes."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.timing.case import BASE, Candidate, Settings, Work
from duotone.recipes import Recipe

DTYPE = torch.bfloat16
TORCHAO_RECIPES = ("tensorwise", "rowwise")
MIB = 2**20


@dataclass(frozen=True)
class ForwardBackward:
    """One step of `module(x, *extra, **options)`: gradients of x and of all parameters."""

    module: Callable[..., Tensor]
    leaves: Sequence[Tensor]
    x: Tensor
    dy: Tensor
    extra: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def forward(self) -> Tensor:
        return self.module(self.x, *self.extra, **dict(self.options))

    def __call__(self) -> None:
        torch.autograd.grad(self.forward(), self.leaves, self.dy)

    def peak_mib(self) -> float:
        """How far a step rises above what is allocated after one whose gradients are kept; it drops those first."""
        self._drop()
        self.forward().backward(self.dy)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._drop()
        self.forward().backward(self.dy)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        self._drop()
        return peak / MIB

    def _drop(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


@dataclass(frozen=True)
class Inputs:
    """The input and the gradient of the output that all candidates of a case share; `finish` makes work of a step."""

    x: Tensor
    dy: Tensor
    finish: Callable[[ForwardBackward], Work]

    def work(self, module: nn.Module, *extra: Any, compiled: bool = False, **options: Any) -> Work:
        leaves = [self.x, *module.parameters()]
        called = compile_module(module) if compiled else module
        return self.finish(ForwardBackward(called, leaves, self.x, self.dy, extra, tuple(options.items())))


def step_with_peak(step: ForwardBackward) -> Work:
    """A call is a step; on CUDA its memory is measured too."""
    return Work(step, peak_mib=step.peak_mib if step.x.is_cuda else None)


def inputs(
    device: str, rows: int, width: int, out: int, finish: Callable[[ForwardBackward], Work] = step_with_peak
) -> Inputs:
    """Normal values, bf16."""
    x = torch.randn(rows, width, device=device, dtype=DTYPE, requires_grad=True)
    return Inputs(x, torch.randn(rows, out, device=device, dtype=DTYPE), finish)


def compile_module(module: Callable[..., Any]) -> Any:
    """The module, or a function, under torch.compile, for the sizes that it meets."""
    return torch.compile(module, dynamic=False)


def of_torch(make: Callable[[], nn.Module], shared: Inputs) -> list[Candidate]:
    """The plain module, eager and compiled, and with torchao's linears where torchao is installed."""
    return [
        Candidate("torch bf16 eager", lambda: shared.work(make())),
        Candidate(BASE, lambda: shared.work(make(), compiled=True)),
        *(
            Candidate(f"torchao {name}", lambda name=name: shared.work(to_torchao(make(), name), compiled=True))
            for name in torchao_recipes()
        ),
    ]


def torchao_recipes() -> tuple[str, ...]:
    return TORCHAO_RECIPES if importlib.util.find_spec("torchao") else ()


def to_torchao(module: nn.Module, recipe: str, **options: Any) -> nn.Module:
    """The module with torchao's linears."""
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(module, config=config, **options)


def of_recipes(
    make: Callable[[Recipe], nn.Module], shared: Inputs, settings: Settings, *extra: Any, suffix: str = ""
) -> list[Candidate]:
    """Duotone's module under each recipe; with cached weights, compiled, or both where the settings ask for it."""
    forms = [(False, False), (True, False), (False, True), (True, True)]
    return [
        Candidate(
            ", ".join([recipe.name + suffix, *["cached"] * cached, *["compiled"] * compiled]),
            lambda recipe=recipe, cached=cached, compiled=compiled: _work(
                make(recipe), shared, extra, cached=cached, compiled=compiled
            ),
        )
        for recipe in settings.recipes
        for cached, compiled in forms
        if cached <= settings.cached and compiled <= settings.compiled
    ]


def _work(module: nn.Module, shared: Inputs, extra: tuple[Any, ...], *, cached: bool, compiled: bool) -> Work:
    if not cached:
        return shared.work(module, *extra, compiled=compiled)
    module(shared.x, *extra, is_first_microbatch=True)
    return shared.work(module, *extra, compiled=compiled, is_first_microbatch=False)
