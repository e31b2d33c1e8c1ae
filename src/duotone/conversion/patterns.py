"""Patterns that can run as pipelines: which modules are norms and MLPs, by their parts and by their values.

A module is compared with the ops on random hidden states and random weights, in float64 on the CPU. Its parameters take
no part, so models on meta, with weights of zero, or in few bits are compared too.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from duotone.dispatch.activations import ACTIVATIONS
from duotone.dispatch.norms import NORMS
from duotone.ops.norm import NormStage

EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
"""Names of the number that a norm adds to the variance."""

TOLERANCE = 1e-5
"""Of the largest value: above what a norm loses that computes in fp32, below the difference of two kinds of GELU."""

UNIT = 8
"""Sizes of a module are compared at the same proportions, in this unit."""

ROWS = 6


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


class NoMatch(Exception):
    """A module has the parts of a pattern, and cannot run as one for this reason."""


def norm_of(module: nn.Module, plain: type[nn.Module]) -> Norm | None:
    """The norm that a module is; `plain` is its class. None if it has other parts. NoMatch if it has other values."""
    parameters, eps = module._parameters, _epsilon(module)
    gamma = parameters.get("weight")
    if eps is None or gamma is None or gamma.dim() != 1 or not set(parameters) <= {"weight", "bias"}:
        return None
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return None
    generator = torch.Generator().manual_seed(0)
    twin = _twin(module, plain)
    twin.__dict__.update({name: eps for name in EPSILONS if name in module.__dict__})
    vectors = {
        name: None if p is None else nn.Parameter(_random(generator, p.shape), requires_grad=False)
        for name, p in parameters.items()
    }
    twin.__dict__["_parameters"] = vectors
    scales = torch.logspace(-3, 2, ROWS, dtype=torch.float64).unsqueeze(1)
    x = _random(generator, (ROWS, gamma.shape[0])) * scales + scales
    y = _values(twin, x)
    for kind in ("RMSNorm", "LayerNorm"):
        for zero_centered in (False, True):
            stage = NormStage(NORMS[kind], eps, zero_centered, False)
            if _same(y, stage.forward(x, vectors["weight"], vectors.get("bias"))[0]):
                return Norm(kind, eps, zero_centered)
    raise NoMatch("its values are those of no norm of duotone.ops")


def mlp_of(module: nn.Module, plain: type[nn.Module], sample: Tensor | None = None) -> MLP | None:
    """The MLP that a module is; `plain` is its class. None if it has other parts. NoMatch if it has other values.

    `sample` is an input for which the values have to be the same too, with the weights of the module.
    """
    if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
        return None
    linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    others = [child for name, child in module.named_children() if name not in linears]
    if len(linears) not in (2, 3) or any(True for child in others for _ in (*child.parameters(), *child.buffers())):
        return None
    candidates = list(_candidates(linears))
    if not candidates:
        return None
    unit = math.gcd(*(size for linear in linears.values() for size in linear.weight.shape))
    for small in dict.fromkeys((min(unit, UNIT), unit)):
        generator = torch.Generator().manual_seed(0)
        twins = {name: _random_linear(linear, small, unit, generator) for name, linear in linears.items()}
        try:
            candidates = [one for one in candidates if _matches(module, plain, one, twins, generator)]
            break
        except Exception as error:  # any code of the user; it may insist on the sizes of its weights
            failure = error
    else:
        raise NoMatch(f"it cannot be called alone: {failure}".split("\n")[0])
    if sample is not None:
        twins = {name: _wide(linear) for name, linear in linears.items()}
        candidates = [one for one in candidates if _matches(module, plain, one, twins, None, sample)]
    if not candidates:
        raise NoMatch("its values are not those of linears and an activation of duotone.ops")
    return candidates[0]


def _candidates(linears: Mapping[str, nn.Linear]) -> Iterator[MLP]:
    """The MLPs that linears of these sizes may be."""
    for *first, last in permutations(linears):
        shapes = {tuple(linears[name].weight.shape) for name in first}
        rows, inner = next(iter(shapes))[0], linears[last].weight.shape[1]
        if len(shapes) == 1 and rows * len(first) in (inner, 2 * inner):
            gated = rows * len(first) == 2 * inner
            names = [name for name, activation in ACTIVATIONS.items() if activation.gated == gated]
            yield from (MLP(tuple(first), name, last) for name in names)


def _matches(
    module: nn.Module,
    plain: type[nn.Module],
    candidate: MLP,
    linears: Mapping[str, nn.Linear],
    generator: torch.Generator | None,
    sample: Tensor | None = None,
) -> bool:
    """Whether the module with these linears gives what the candidate gives, in evaluation and in training."""
    first, kind, last = candidate
    heads = [linears[name] for name in first]
    x = sample if sample is not None else 4 * _random(generator, (2, ROWS, heads[0].in_features))
    x = x.detach().double()
    with torch.no_grad():
        hidden = torch.cat([head(x) for head in heads], -1)
        expected = linears[last](ACTIVATIONS[kind].value(hidden))
    for training in (False, True):
        twin = _twin(module, plain)
        children = {name: copy.copy(child) for name, child in module._modules.items() if child is not None}
        twin.__dict__["_modules"] = {**children, **linears}
        for part in (twin, *twin.children()):
            part.training = training
            if isinstance(part, nn.Dropout):
                part.p = 0.0  # a call with dropout runs the forward of the class
        if not _same(_values(twin, x), expected):
            return False
    return True


def _epsilon(module: nn.Module) -> float | None:
    """The number that a norm adds to the variance; torch's default where it is None."""
    for name in EPSILONS:
        if name in module.__dict__:
            eps, weight = module.__dict__[name], module._parameters.get("weight")
            if eps is None and weight is not None:
                return torch.finfo(weight.dtype).eps
            return float(eps) if isinstance(eps, float | int) else None
    return None


def _twin(module: nn.Module, plain: type[nn.Module]) -> nn.Module:
    """The same module under its plain class, to be changed."""
    twin = nn.Module()
    twin.__dict__.update(module.__dict__)
    twin.__class__ = plain
    twin.__dict__.pop("forward", None)
    return twin


def _values(module: nn.Module, x: Tensor) -> object:
    """What the module gives in float64, without a trace in random numbers."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast(x.device.type, enabled=False):
        return module.forward(x)


def _same(y: object, expected: Tensor) -> bool:
    if not isinstance(y, Tensor) or y.shape != expected.shape:
        return False
    return bool((y - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _random(generator: torch.Generator | None, shape: torch.Size | tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _random_linear(linear: nn.Linear, small: int, unit: int, generator: torch.Generator) -> nn.Linear:
    rows, columns = (size // unit * small for size in linear.weight.shape)
    bias = None if linear.bias is None else _random(generator, (rows,))
    return _linear(_random(generator, (rows, columns)) / columns**0.5, bias)


def _wide(linear: nn.Linear) -> nn.Linear:
    bias = None if linear.bias is None else linear.bias.detach().double()
    return _linear(linear.weight.detach().double(), bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
