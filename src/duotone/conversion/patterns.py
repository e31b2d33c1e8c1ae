"""Patterns that can run as pipelines: norms and MLPs, which are recognized by their parts and by their values.

A module is compared with the ops on random hidden states and random weights, in float64 on the CPU. The comparison does
not use its parameters. So it works for models on meta, for weights of zero, and for weights of few bits.
"""

import copy
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from duotone import ops
from duotone.conversion.effects import effect_of, effects_of_children
from duotone.conversion.transposed import is_transposed
from duotone.dispatch.activations import ACTIVATIONS
from duotone.dispatch.norms import NORMS
from duotone.ops.norm import NormStage
from duotone.planned.linear import PlannedLinear

EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
"""Attribute names of the number that a norm adds to the variance."""

TOLERANCE = 1e-5
"""Relative to the largest value: above the error of a norm in fp32, below the difference of two kinds of GELU."""

UNIT = 8
"""Sizes of a module are compared at the same proportions, in this unit."""

ROWS = 6
SCALES = torch.tensor([0.1, 1, 4, 16, 1e3, 1e6], dtype=torch.float64, device="cpu")
"""Of the rows of an input: where functions differ, and where a module that limits its values would differ."""


class Norm(NamedTuple):
    """A norm of `NORMS`."""

    kind: str
    eps: float
    zero_centered: bool


class MLP(NamedTuple):
    """last(activation(first(x))); two linears in `first` are the halves of the input of a gated activation."""

    first: tuple[str, ...]
    activation: str
    last: str


Chain = tuple[Norm | str | None, ...]
"""For each child of an nn.Sequential, the norm or activation that it is, or None."""


OTHER_VALUES = "its values or gradients are not those of linears and an activation of duotone.ops"


class NoMatch(Exception):
    """A module has the parts of a pattern, and cannot run as one for this reason."""


def norm_of(module: nn.Module, plain: type[nn.Module]) -> Norm | None:
    """The norm that a module is; `plain` is its class. None if it has other parts. NoMatch if it has other values."""
    if isinstance(module, ops.RMSNorm | ops.LayerNorm):
        return Norm(module.kind, module.eps, module.zero_centered_gamma)
    parameters, eps = module._parameters, epsilon(module)
    gamma = parameters.get("weight")
    if eps is None or gamma is None or gamma.dim() != 1 or not set(parameters) <= {"weight", "bias"}:
        return None
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return None
    numbers, twin = torch.Generator().manual_seed(0), _twin(module, plain)
    twin.__dict__.update({name: eps for name in EPSILONS if name in module.__dict__})
    vectors = {
        name: None if p is None else nn.Parameter(_random(p.shape, numbers), requires_grad=False)
        for name, p in parameters.items()
    }
    twin.__dict__["_parameters"] = vectors
    scales = torch.logspace(-3, 2, ROWS, dtype=torch.float64).unsqueeze(1)
    x = _random((ROWS, gamma.shape[0]), numbers) * scales + scales
    result = _results(twin.forward, [x.clone().requires_grad_()])
    for kind in ("RMSNorm", "LayerNorm"):
        for zero_centered in (False, True):
            stage = NormStage(NORMS[kind], eps, zero_centered, False)
            compute = functools.partial(_norm_value, stage, vectors)
            if _all_same(result, _results(compute, [x.clone().requires_grad_()])):
                if effect := effect_of(module, plain, no_autocast=True):
                    raise NoMatch(effect)
                return Norm(kind, eps, zero_centered)
    raise NoMatch("its values, or its gradients, are those of no norm of duotone.ops")


def _norm_value(stage: NormStage, vectors: Mapping[str, nn.Parameter | None], x: Tensor) -> Tensor:
    return stage.forward(x, vectors["weight"], vectors.get("bias"))[0]


def mlp_of(
    module: nn.Module, plain: type[nn.Module], first: Collection[str] | None, sample: Tensor | None = None
) -> MLP | None:
    """The MLP that a module is; `plain` is its class. None if it has other parts. NoMatch if it has other values.

    `first` are the children that read the input of the module, None if that is not known. `sample` is an input for
    which the values have to be the same too, with the weights of the module.
    """
    children = children_of(module)
    linears = {name: child for name, child in children.items() if is_linear(child)}
    others = [name for name in children if name not in linears]
    has_tensors = _holds_tensors(module, recurse=False) or any(_holds_tensors(children[name]) for name in others)
    if len(linears) not in (2, 3) or has_tensors:
        return None
    candidates = [one for one in _candidates(linears) if first is None or set(one.first) == set(first)]
    if not candidates:
        return None
    unit = math.gcd(*(size for linear in linears.values() for size in _shape(linear)))
    for small in dict.fromkeys((min(unit, UNIT), unit)):  # a forward may require the sizes of its weights
        numbers = torch.Generator().manual_seed(0)
        twins = {name: _random_linear(linear, small, unit, numbers) for name, linear in linears.items()}
        x = SCALES.view(-1, 1) * _random((2, len(SCALES), twins[candidates[0].first[0]].in_features), numbers)
        matching = _Trial(module, plain, x, twins).matching(candidates)
        if matching:
            break
    if sample is not None:
        twins = {name: _wide(linear) for name, linear in linears.items()}
        matching = _Trial(module, plain, sample.detach().double(), twins).matching(matching)
    if not matching:
        raise NoMatch(OTHER_VALUES)
    if effect := effect_of(module, plain) or effects_of_children(module, others):
        raise NoMatch(effect)
    return matching[0]


class _Trial(NamedTuple):
    """A module under its plain class, with other linears, to be compared with candidates for an input."""

    module: nn.Module
    plain: type[nn.Module]
    x: Tensor
    linears: Mapping[str, nn.Linear]

    def matching(self, candidates: Iterable[MLP]) -> list[MLP]:
        """The candidates with the same output and gradients as the module, in evaluation and in training."""
        results = [self.results(self.copy_of_module(training).forward) for training in (False, True)]
        return [one for one in candidates if all(self.matches(one, result) for result in results)]

    def copy_of_module(self, training: bool) -> nn.Module:
        twin = _twin(self.module, self.plain)
        copies = {name: copy.copy(child) for name, child in children_of(self.module).items()}
        twin.__dict__["_modules"] = {**copies, **self.linears}
        for part in (twin, *twin.children()):
            part.training = training
            if isinstance(part, nn.Dropout):
                part.p = 0.0  # a call with dropout runs the forward of the class
        return twin

    def results(self, forward: Callable[[Tensor], object]) -> list[Tensor | None] | None:
        """The output, and the gradients of the input and of all parameters. None if there is no such output."""
        x = self.x.clone().requires_grad_()
        parameters = [p for linear in self.linears.values() for p in linear.parameters()]
        return _results(forward, [x, *parameters])

    def matches(self, candidate: MLP, result: Sequence[Tensor | None] | None) -> bool:
        first, kind, last = candidate
        if result is None or self.linears[first[0]].in_features != self.x.shape[-1]:
            return False

        def compute(x: Tensor) -> Tensor:
            hidden = torch.cat([self.linears[name](x) for name in first], -1)
            return self.linears[last](ACTIVATIONS[kind].value(hidden))

        return _all_same(result, self.results(compute))


def chain_of(module: nn.Module, plain: type[nn.Module]) -> Chain | None:
    """The norms and activations beside the linears of an nn.Sequential; None without them, or for another class."""
    if plain.forward is not nn.Sequential.forward:
        return None
    children = list(children_of(module).values())
    linear = [False, *(is_linear(child) for child in children), False]
    parts: list[Norm | str | None] = []
    for i, child in enumerate(children):
        part: Norm | str | None = None
        if linear[i + 2]:
            try:
                part = norm_of(child, type(child))
            except NoMatch:
                part = None
        if part is None and (linear[i] or linear[i + 2]) and not linear[i + 1]:
            part = activation_of(child)
        parts.append(part)
    return tuple(parts) if any(parts) else None


def activation_of(module: nn.Module) -> str | None:
    """The name in `ACTIVATIONS` of the function that a module without tensors computes. None for another function."""
    if _holds_tensors(module) or effect_of(module, type(module)):
        return None
    x = torch.linspace(-8, 8, 128, dtype=torch.float64, device="cpu").view(2, 64)
    x = torch.cat([x, 1e5 * x])
    result = _results(module.forward, [x.clone().requires_grad_()])
    plain = {name: activation.value for name, activation in ACTIVATIONS.items() if not activation.gated}
    same = (name for name, value in plain.items() if _all_same(result, _results(value, [x.clone().requires_grad_()])))
    return next(same, None)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """The children by name. A child with several names comes once for each."""
    return {name: child for name, child in module._modules.items() if child is not None}


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by its weight and does nothing else."""
    return isinstance(module, nn.Linear | PlannedLinear) or is_transposed(module)


def _holds_tensors(module: nn.Module, recurse: bool = True) -> bool:
    return any(True for _ in (*module.parameters(recurse), *module.buffers(recurse)))


def _shape(linear: nn.Module) -> tuple[int, int]:
    """(out_features, in_features)."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return (rows, columns) if isinstance(linear, nn.Linear) else (columns, rows)


def _candidates(linears: Mapping[str, nn.Module]) -> Iterator[MLP]:
    """The MLPs that linears of these sizes may be."""
    for *first, last in permutations(linears):
        shapes = {_shape(linears[name]) for name in first}
        rows, inner = next(iter(shapes))[0], _shape(linears[last])[1]
        if len(shapes) == 1 and rows * len(first) in (inner, 2 * inner):
            gated = rows * len(first) == 2 * inner
            names = [name for name, activation in ACTIVATIONS.items() if activation.gated == gated]
            yield from (MLP(tuple(first), name, last) for name in names)


def epsilon(module: nn.Module) -> float | None:
    """The number that a norm adds to the variance; torch's default where it is None."""
    for name in EPSILONS:
        if name in module.__dict__:
            eps, weight = module.__dict__[name], module._parameters.get("weight")
            if eps is None and weight is not None:
                return torch.finfo(weight.dtype).eps
            return float(eps) if isinstance(eps, float | int) else None
    return None


def _twin(module: nn.Module, plain: type[nn.Module]) -> nn.Module:
    """A copy of the module under its plain class, to be changed."""
    twin = nn.Module()
    twin.__dict__.update(module.__dict__)
    twin.__class__ = plain
    twin.__dict__.pop("forward", None)
    return twin


def _results(forward: Callable[[Tensor], object], inputs: Sequence[Tensor]) -> list[Tensor | None] | None:
    """The output for the first input, and the gradients of all inputs. None if the code has no such output, or raises.

    The state of random generators stays.
    """
    x = inputs[0]
    version = x._version
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.autocast(x.device.type, enabled=False):
            y = forward(x)
            if not isinstance(y, Tensor) or x._version != version:
                return None
            gradients = torch.autograd.grad(y, inputs, _direction(y), allow_unused=True)
    except Exception:  # any code of the user
        return None
    return [y.detach(), *gradients]


def _direction(y: Tensor) -> Tensor:
    """A gradient for an output, the same for all of its shape."""
    return _random(y.shape, torch.Generator().manual_seed(1)).to(y.dtype)


def _all_same(result: Sequence[Tensor | None] | None, expected: Sequence[Tensor | None] | None) -> bool:
    """Whether outputs and gradients are the same, row by row."""
    if result is None or expected is None or len(result) != len(expected):
        return False
    return all(
        one is other if one is None or other is None else _same(one, other)
        for one, other in zip(result, expected, strict=True)
    )


def _same(y: Tensor, expected: Tensor) -> bool:
    if y.shape != expected.shape:
        return False
    error, largest = (y - expected).abs(), expected.abs()
    return bool((error.amax(-1) <= TOLERANCE * largest.amax(-1)).all()) if y.dim() else bool(error <= TOLERANCE)


def _random(shape: Sequence[int], numbers: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=numbers, dtype=torch.float64, device="cpu")


def _random_linear(linear: nn.Module, small: int, unit: int, numbers: torch.Generator) -> nn.Linear:
    rows, columns = (size // unit * small for size in _shape(linear))
    bias = None if linear.bias is None else _random((rows,), numbers)
    return _linear(_random((rows, columns), numbers) / columns**0.5, bias)


def _wide(linear: Any) -> nn.Linear:
    """The linear with its own weight."""
    weight, bias = linear.weight.detach().double(), linear.bias
    return _linear(
        weight if isinstance(linear, nn.Linear) else weight.t(), None if bias is None else bias.detach().double()
    )


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear
