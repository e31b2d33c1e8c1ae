"""Patterns that can run as pipelines: norms and MLPs, which are recognized by their parts and by their values.

A module is compared with the ops on random hidden states and random weights, in float64 on the CPU, in evaluation and
in training. The comparison does not use its parameters. So it works for models on meta, for weights of zero, and for
weights of few bits. A forward that changes an attribute, or what is around its linears, is left alone.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from duotone import ops
from duotone.conversion.transposed import is_transposed
from duotone.conversion.trial import (
    NoMatch,
    all_same,
    children_of,
    computed_by,
    in_both_modes,
    is_dropout,
    random,
    results_of,
    twin_of,
)
from duotone.dispatch.activations import ACTIVATIONS
from duotone.dispatch.norms import NORMS
from duotone.modules.linear import PlannedLinear
from duotone.modules.norm import NormStage
from duotone.numbered import constant_in_traces
from duotone.state.region import STACK

EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
"""Attribute names of the number that a norm adds to the variance."""

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


def has_parts_of_norm(module: nn.Module) -> bool:
    """Whether a module has an epsilon, a vector as weight, and no other tensors but a bias."""
    parameters, gamma = module._parameters, module._parameters.get("weight")
    if epsilon(module) is None or gamma is None or gamma.dim() != 1 or not set(parameters) <= {"weight", "bias"}:
        return False
    return not any(True for _ in (*module.children(), *module.buffers()))


def norms_of(parent: nn.Module) -> dict[str, nn.Module]:
    """The children with the parts of a norm, by name."""
    return {name: child for name, child in children_of(parent).items() if has_parts_of_norm(child)}


def norm_of(module: nn.Module, plain: type[nn.Module]) -> Norm | None:
    """The norm that a module is; `plain` is its class. None if it has other parts. NoMatch if it has other values."""
    if isinstance(module, ops.RMSNorm | ops.LayerNorm):
        return Norm(module.kind, module.eps, module.zero_centered_gamma)
    eps = epsilon(module)
    if eps is None or not has_parts_of_norm(module):
        return None
    numbers, twin = torch.Generator().manual_seed(0), twin_of(module, plain)
    twin.__dict__.update({name: eps for name in EPSILONS if name in module.__dict__})
    vectors = {
        name: None if p is None else nn.Parameter(random(p.shape, numbers), requires_grad=False)
        for name, p in module._parameters.items()
    }
    twin.__dict__["_parameters"] = vectors
    scales = torch.logspace(-3, 2, ROWS, dtype=torch.float64).unsqueeze(1)
    x = random((ROWS, module.weight.shape[0]), numbers) * scales + scales  # type: ignore[union-attr, operator]
    norms = [Norm(kind, eps, zero_centered) for kind in ("RMSNorm", "LayerNorm") for zero_centered in (False, True)]
    return computed_by(twin, "norm", {norm: functools.partial(_norm_value, norm, vectors) for norm in norms}, x)


def _norm_value(norm: Norm, vectors: Mapping[str, nn.Parameter | None], x: Tensor) -> Tensor:
    return NormStage(NORMS[norm.kind], *norm[1:], False).forward(x, vectors["weight"], vectors.get("bias"))[0]


def first_linears(module: nn.Module, norm: nn.Module) -> tuple[str, ...]:
    """The children that read the output of a norm, if a module has the linears of an MLP and it is clear which."""
    linears, width = _linears(module), width_of(norm)
    firsts = {frozenset(one.first) for one in _candidates(module) if width_of(linears[one.first[0]]) == width}
    return tuple(sorted(firsts.pop())) if len(firsts) == 1 else ()


def mlp_of(module: nn.Module, plain: type[nn.Module], sample: Tensor | None = None) -> MLP | None:
    """The MLP that a module is; `plain` is its class. None if it has other parts. NoMatch if it has other values.

    `sample` is an input for which the values have to be the same too, with the weights of the module.
    """
    linears, candidates = _linears(module), list(_candidates(module))
    if not candidates:
        return None
    unit = math.gcd(*(size for linear in linears.values() for size in _shape(linear)))
    for small in dict.fromkeys((min(unit, UNIT), unit)):  # a forward may require the sizes of its weights
        numbers = torch.Generator().manual_seed(0)
        twins = {name: _random_linear(linear, small, unit, numbers) for name, linear in linears.items()}
        x = SCALES.view(-1, 1) * random((2, len(SCALES), twins[candidates[0].first[0]].in_features), numbers)
        matching = _Trial(module, plain, x, twins).matching(candidates)
        if matching:
            break
    if matching and sample is not None:
        twins = {name: _wide(linear) for name, linear in linears.items()}
        matching = _Trial(module, plain, sample.detach().double(), twins).matching(matching)
    if matching == []:
        raise NoMatch("its values or gradients are not those of linears and an activation of duotone.ops")
    return matching[0] if matching else None


class _Trial(NamedTuple):
    """A module under its plain class, with other linears, to be compared with candidates for an input."""

    module: nn.Module
    plain: type[nn.Module]
    x: Tensor
    linears: Mapping[str, nn.Linear]

    def matching(self, candidates: Iterable[MLP]) -> list[MLP] | None:
        """The candidates with the same output and gradients as the module, in both modes. NoMatch if it does more.

        None if the module has no such forward: from one tensor to another, without writing to the first.
        """
        twin = twin_of(self.module, self.plain)
        twin.__dict__["_modules"].update(self.linears)
        seen: set[tuple[object, ...]] = set()
        for linear in self.linears.values():
            linear.register_forward_pre_hook(lambda *_: seen.add(_surroundings()))
        for child in twin.children():
            if is_dropout(child):
                child.__dict__["p"] = 0.0  # a call with dropout runs the forward of the class
        results = in_both_modes(twin, [self.x, *self.parameters])
        for linear in self.linears.values():
            linear._forward_pre_hooks.clear()
        if seen - {(*map(id, STACK.regions), False, True)}:  # as `results_of` sets them
            raise NoMatch("its forward has a region, torch.autocast or a mode of gradients around a linear")
        if None in results:
            return None
        return [one for one in candidates if all(self.matches(one, result) for result in results)]

    @property
    def parameters(self) -> list[Tensor]:
        return [p for linear in self.linears.values() for p in linear.parameters()]

    def matches(self, candidate: MLP, result: Sequence[Tensor | None] | None) -> bool:
        first, kind, last = candidate
        if result is None or self.linears[first[0]].in_features != self.x.shape[-1]:
            return False

        def compute(x: Tensor) -> Tensor:
            hidden = torch.cat([self.linears[name](x) for name in first], -1)
            return self.linears[last](ACTIVATIONS[kind].value(hidden))

        return all_same(result, results_of(compute, [self.x.clone().requires_grad_(), *self.parameters]))


def _surroundings() -> tuple[object, ...]:
    """What a linear follows besides its input and weight: regions, torch.autocast on a CPU, the mode of gradients."""
    return *map(id, STACK.regions), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()


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
            with suppress(NoMatch):
                part = norm_of(child, type(child))
        if part is None and (linear[i] or linear[i + 2]) and not linear[i + 1]:
            part = activation_of(child)
        parts.append(part)
    return tuple(parts) if any(parts) else None


def activation_of(module: nn.Module) -> str | None:
    """The name in `ACTIVATIONS` of the function that a module without tensors computes. None for another function."""
    if _holds_tensors(module):
        return None
    x = torch.linspace(-8, 8, 128, dtype=torch.float64, device="cpu").view(2, 64)
    x = torch.cat([x, 1e5 * x])
    plain = {name: activation.value for name, activation in ACTIVATIONS.items() if not activation.gated}
    with suppress(NoMatch):
        return computed_by(twin_of(module, type(module)), "activation", plain, x)
    return None


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by its weight and does nothing else."""
    return isinstance(module, nn.Linear | PlannedLinear) or is_transposed(module)


def width_of(module: nn.Module) -> int:
    """The in_features of a linear, or the size of a norm."""
    return _shape(module)[1] if is_linear(module) else module.weight.shape[0]  # type: ignore[union-attr, return-value, index]


def _holds_tensors(module: nn.Module, recurse: bool = True) -> bool:
    return any(True for _ in (*module.parameters(recurse), *module.buffers(recurse)))


def _shape(linear: nn.Module) -> tuple[int, int]:
    """(out_features, in_features)."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return (rows, columns) if isinstance(linear, nn.Linear) else (columns, rows)


def _linears(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in children_of(module).items() if is_linear(child)}


def _candidates(module: nn.Module) -> Iterator[MLP]:
    """The MLPs that a module may be: its linears have the sizes, and nothing else in it has tensors."""
    linears = _linears(module)
    others = [child for child in children_of(module).values() if not is_linear(child)]
    has_tensors = _holds_tensors(module, recurse=False) or any(map(_holds_tensors, others))
    for *first, last in permutations(linears) if len(linears) in (2, 3) and not has_tensors else ():
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
                return default_epsilon(weight.dtype, "cpu" if weight.is_meta else weight.device.type)
            return float(eps) if isinstance(eps, float | int) else None
    return None


@constant_in_traces
@functools.cache
def default_epsilon(dtype: torch.dtype, device: str) -> float:
    """The epsilon of torch's RMSNorm without one: of the dtype or of fp32, as the device and the version have it."""
    x = torch.full((1, 64), 0.01, dtype=dtype, device=device)
    ratio = x.double() / torch.rms_norm(x, (64,), torch.ones_like(x[0])).double()
    measured = (ratio.square() - x.double().square()).mean().item()
    return min((torch.finfo(each).eps for each in (dtype, torch.float32)), key=lambda eps: abs(measured - eps))


def _random_linear(linear: nn.Module, small: int, unit: int, numbers: torch.Generator) -> nn.Linear:
    rows, columns = (size // unit * small for size in _shape(linear))
    bias = None if linear.bias is None else random((rows,), numbers)
    return _linear(random((rows, columns), numbers) / columns**0.5, bias)


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
