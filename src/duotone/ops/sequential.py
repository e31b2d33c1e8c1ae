"""Sequential: modules one after the other, of which neighbouring ops run as one pipeline."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from duotone.errors import UserError
from duotone.pipeline.channels import INPUTS, InOrder, Routing, are_used, bound, check_channels, public_inputs
from duotone.pipeline.op import Op, run
from duotone.pipeline.slot_roles import KnownRoles

NOTHING: Mapping[Any, Any] = {}


class Sequential(KnownRoles, nn.Sequential):
    """nn.Sequential whose ops run as pipelines; other modules, and ops with hooks, are called by themselves.

    Further inputs of a call go to the ops that take some, in order, but for those that take a channel. Further outputs
    follow the output. A first microbatch is passed on to every module of Duotone. `op_kwargs` are keyword arguments of
    single modules, by the module or by its index.
    """

    takes_first_microbatch = True

    @property
    def extra_inputs(self) -> int:
        """How many further inputs a call takes."""
        return public_inputs(tuple(self))

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *extra: Any,
        is_first_microbatch: bool | None = None,
        op_kwargs: Mapping[nn.Module | int, Mapping[str, Any]] | None = None,
    ) -> Any:
        modules = tuple(self._modules.values())
        takes = public_inputs(modules)
        if takes != len(extra):
            raise UserError(f"{len(extra)} further inputs were given to ops that take {takes}; pass one for each")
        own = _keywords(modules, op_kwargs) if op_kwargs else {}
        made, outputs = run_modules(modules, x, extra, is_first_microbatch, self, own)
        return (made, *outputs) if outputs else made

    def __add__(self, other: nn.Sequential) -> "Sequential":
        return type(self)(*self, *other)

    def __mul__(self, other: int) -> "Sequential":
        return type(self)(*(list(self) * other))

    __rmul__ = __mul__

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rewritten"}


def run_modules(
    modules: Sequence[Any],
    x: Tensor,
    extra: Sequence[Any],
    first: bool | None,
    owner: Any,
    keywords: Mapping[int, Mapping[str, Any]] = NOTHING,
) -> tuple[Tensor, list[Any]]:
    """The output and the further outputs of modules and ops, neighbouring ops in one pipeline.

    `keywords` are keyword arguments by the index of a module.
    """
    channels = are_used(modules)
    if channels:
        check_channels(modules)
    routing = Routing(extra) if channels else InOrder(extra)
    for part in _parts(modules, keywords, channels):
        ops = part if isinstance(part, list) else part[:1]
        inputs = routing.inputs(ops)
        if isinstance(part, list):
            y = run(part, x, inputs, first, owner)
        else:
            module, given = part
            if getattr(module, "takes_first_microbatch", False):
                given = {"is_first_microbatch": first, **given}
            y = module(x, *inputs, **given)
        if isinstance(y, tuple):
            y, *more = y
            routing.take(ops, more)
        x = y
    return x, routing.outputs


def _keywords(modules: Sequence[Any], op_kwargs: Any) -> dict[int, Mapping[str, Any]]:
    """`op_kwargs` by index. UserError for a module that is not there, and for what its forward does not take."""
    if not isinstance(op_kwargs, Mapping):
        raise UserError(f"op_kwargs is a dict of modules, or their indices, to dicts; got {type(op_kwargs).__name__}")
    found: dict[int, Mapping[str, Any]] = {}
    for key, given in op_kwargs.items():
        places = [i for i, module in enumerate(modules) if module is key or (type(key) is int and i == key)]
        if not places:
            what = repr(key) if isinstance(key, int) else f"a {type(key).__name__} that is not there"
            raise UserError(f"op_kwargs has {what}; give a module of this Sequential, or an index below {len(modules)}")
        if not isinstance(given, Mapping):
            raise UserError(f"op_kwargs of {key!r} is {given!r}; give a dict of keyword arguments")
        for i in places:
            _check_keywords(i, modules[i], given)
            found[i] = {**found.get(i, {}), **given}
    return found


def _check_keywords(place: int, module: Any, given: Mapping[str, Any]) -> None:
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    for name in given:
        if name not in known:
            kind = type(module).__name__
            raise UserError(f"op_kwargs of {kind} at {place} has {name!r}; its forward takes {', '.join(known[1:])}")


def _parts(modules: Sequence[Any], keywords: Mapping[int, Any], channels: bool) -> list[Any]:
    """Lists of neighbouring ops, and modules that run alone with their keyword arguments.

    A channel ends a list where the next op takes what an op of that list gives.
    """
    parts: list[Any] = []
    for i, module in enumerate(modules):
        alone = i in keywords or (isinstance(module, nn.Module) and is_hooked(module))
        ops = None if alone else getattr(module, "pipeline", None)
        if ops is None:
            parts.append((module, keywords.get(i, NOTHING)))
        elif parts and isinstance(parts[-1], list) and not (channels and bound(module, INPUTS)):
            parts[-1] += ops
        else:
            parts.append(list(ops))
    return parts


def is_plain(*modules: Any) -> bool:
    """Whether modules are ops without hooks, whose stages say all that they do."""
    return all(isinstance(module, Op) and not is_hooked(module) for module in modules)


def is_hooked(module: Any) -> bool:
    """Whether a module has hooks that want to see its calls; those that say `watches` take a step as it is."""
    if not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks):
        return False
    every = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return not all(getattr(hook, "watches", False) for hooks in every for hook in hooks.values())
