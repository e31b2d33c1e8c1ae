"""Trials of a module on random values, in evaluation and in training. The module itself does not change."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-5
"""Relative to the largest value: above the error of a norm in fp32, below the difference of two kinds of GELU."""

COLLECTIONS = list, set, deque


class NoMatch(Exception):
    """A module has the parts of a pattern, and cannot run as one for this reason."""


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """The children by name. A child with several names comes once for each."""
    return {name: child for name, child in module._modules.items() if child is not None}


def is_dropout(module: nn.Module) -> bool:
    """Whether a module drops elements as torch does."""
    return isinstance(module, nn.Dropout) and type(module).forward is nn.Dropout.forward


def twin_of(module: nn.Module, plain: type[nn.Module]) -> nn.Module:
    """A copy of the module under its plain class, and of the modules in it, to be changed."""
    twin = nn.Module()
    twin.__dict__.update({name: _copied(value) for name, value in module.__dict__.items()})
    twin.__class__ = plain
    twin.__dict__.pop("forward", None)
    twin.__dict__["_modules"] = {name: _twin_of_child(child) for name, child in children_of(module).items()}
    return twin


def _twin_of_child(child: nn.Module) -> nn.Module:
    twin = twin_of(child, type(child))
    if "forward" in child.__dict__:  # that another library gave it
        twin.__dict__["forward"] = child.__dict__["forward"]
    return twin


def _copied(value: Any) -> Any:
    """A value that a trial may write to without changing the module's: tensors and the usual collections are copies."""
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else value.clone()
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return type(value)(map(_copied, value)) if type(value) in COLLECTIONS else value


def _contents(value: object) -> Iterator[object]:
    """A value, the version of a tensor, and what is in a collection."""
    yield value
    if isinstance(value, Tensor) and not value.is_inference():
        yield value._version
    if type(value) in COLLECTIONS or type(value) is dict:
        for each in (*value, *(value.values() if type(value) is dict else ())):  # type: ignore[misc]
            yield from _contents(each)


def _is_unchanged(now: object, before: Sequence[object]) -> bool:
    """Whether a value has the contents that it had. Versions are equal numbers; all else is the same object."""
    contents = list(_contents(now))
    pairs = zip(contents, before, strict=False)
    return len(contents) == len(before) and all(x is y or (type(x) is int and x == y) for x, y in pairs)


def in_both_modes(twin: nn.Module, inputs: Sequence[Tensor]) -> list[list[Tensor | None] | None]:
    """The results of a twin in evaluation and in training. NoMatch if a module has more to it than a forward.

    Such are calls of its own, and attributes that change in a call.
    """
    results = []
    for part in twin.modules():
        if type(part).__call__ is not nn.Module.__call__:
            raise NoMatch(f"{type(part).__name__} has a __call__ of its own")
    for training in (False, True):
        twin.train(training)
        before = [(part, {name: list(_contents(x)) for name, x in part.__dict__.items()}) for part in twin.modules()]
        results.append(results_of(twin.forward, [inputs[0].clone().requires_grad_(), *inputs[1:]]))
        for part, values in before:
            for name in {**part.__dict__, **values}:
                if not _is_unchanged(part.__dict__.get(name), values.get(name, ())):
                    raise NoMatch(f"a call changes {type(part).__name__}.{name}")
    return results


def results_of(forward: Callable[[Tensor], object], inputs: Sequence[Tensor]) -> list[Tensor | None] | None:
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


def computed_by(twin: nn.Module, what: str, functions: Mapping[Any, Callable[[Tensor], Tensor]], x: Tensor) -> Any:
    """The name of the function that a twin computes of rows, in two, three and four dimensions. NoMatch if of none."""
    results = [(y, in_both_modes(twin, [y])) for y in (x, x.unflatten(0, (2, -1)), x.unflatten(0, (1, 2, -1)))]
    for name, compute in functions.items():
        expected = ((both, results_of(compute, [y.clone().requires_grad_()])) for y, both in results)
        if all(all_same(result, other) for both, other in expected for result in both):
            return name
    raise NoMatch(f"its values, or its gradients, are those of no {what} of duotone.ops")


def _direction(y: Tensor) -> Tensor:
    """A gradient for an output, the same for all of its shape."""
    return random(y.shape, torch.Generator().manual_seed(1)).to(y.dtype)


def all_same(result: Sequence[Tensor | None] | None, expected: Sequence[Tensor | None] | None) -> bool:
    """Whether outputs and gradients are the same, row by row."""
    if result is None or expected is None or len(result) != len(expected):
        return False
    return all(
        one is other if one is None or other is None else _same(one, other)
        for one, other in zip(result, expected, strict=True)
    )


def _same(y: Tensor, expected: Tensor) -> bool:
    if y.shape != expected.shape or y.dtype != expected.dtype:
        return False
    error, largest = (y - expected).abs(), expected.abs()
    return bool((error.amax(-1) <= TOLERANCE * largest.amax(-1)).all()) if y.dim() else bool(error <= TOLERANCE)


def random(shape: Sequence[int], numbers: torch.Generator) -> Tensor:
    """Normal numbers, fp64 on the CPU."""
    return torch.randn(tuple(shape), generator=numbers, dtype=torch.float64, device="cpu")
