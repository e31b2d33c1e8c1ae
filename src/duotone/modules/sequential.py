"""Sequential: modules in a row. Neighbouring ops run as one pipeline."""

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from duotone.errors import UserError
from duotone.pipeline.autograd import Outputs
from duotone.pipeline.channels import INPUTS, Routing, are_used, bound, check_channels, public_inputs
from duotone.pipeline.op import Op, run
from duotone.pipeline.slot_roles import KnownRoles

Keywords = Mapping[str, object]
Member = Op | nn.Module
"""Some ops are no modules: a norm whose parameters another module holds."""

NOTHING: Mapping[int, Keywords] = {}


class RunsOps(KnownRoles):
    """Mixed in before an nn.Module that runs ops as pipelines, and so does not call them as modules."""

    def _slow_forward(self, *inputs: object, **options: object) -> object:
        """The forward that nn.Module takes while torch.jit.trace records."""
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, Op):
                module.refuse_jit_trace(inputs)
        return super()._slow_forward(*inputs, **options)  # type: ignore[misc]


class Sequential(RunsOps, nn.Sequential):
    """nn.Sequential whose ops run as pipelines; other modules, and ops with hooks, are called by themselves.

    Further inputs of a call go, in order, to the ops that take further inputs, except those that take a channel.
    Further outputs follow the output. `is_first_microbatch` is passed on to every module of Duotone. `op_kwargs` are
    keyword arguments of single modules, by the module or by its index.
    """

    takes_first_microbatch = True

    @property
    def extra_inputs(self) -> int:
        """How many further inputs a call takes."""
        return public_inputs(tuple(self))

    def forward(
        self,
        x: Tensor,
        *extra: object,
        is_first_microbatch: bool | Tensor | None = None,
        op_kwargs: Mapping[nn.Module | int, Keywords] | None = None,
    ) -> Outputs:
        """The output of the last module, and further outputs behind it. UserError if further inputs are missing."""
        modules = tuple(self._modules.values())
        takes = public_inputs(modules)
        if takes != len(extra):
            raise UserError(f"{len(extra)} further inputs were given to ops that take {takes}; pass one for each")
        keywords = _keywords(modules, op_kwargs) if op_kwargs else NOTHING
        y, outputs = run_modules(modules, x, extra, is_first_microbatch, self, keywords)
        return (y, *outputs) if outputs else y

    def __add__(self, other: nn.Sequential) -> "Sequential":
        return type(self)(*self, *other)

    def __mul__(self, other: int) -> "Sequential":
        return type(self)(*(list(self) * other))

    __rmul__ = __mul__


def run_modules(
    modules: Sequence[Member],
    x: Tensor,
    extra: Sequence[object],
    first: bool | Tensor | None,
    owner: nn.Module,
    keywords: Mapping[int, Keywords] = NOTHING,
) -> tuple[Tensor, list[object]]:
    """The output and the further outputs of modules and ops, neighbouring ops in one pipeline.

    `keywords` are keyword arguments by the index of a module.
    """
    channels = are_used(modules)
    if channels:
        check_channels(modules)
    routing = Routing(extra, channels)
    for part in _parts(modules, keywords, channels):
        members = part if isinstance(part, list) else part[:1]
        inputs = routing.inputs(members)
        if isinstance(part, list):
            y = run(part, x, inputs, first, owner)
        else:
            module, options = part
            if getattr(module, "takes_first_microbatch", False):
                options = {"is_first_microbatch": first, **options}
            y = module(x, *inputs, **options)
        if isinstance(y, tuple):
            y, *more = y
            routing.take(members, more)
        x = y
    return x, routing.outputs


def _keywords(modules: Sequence[Member | None], op_kwargs: object) -> dict[int, Keywords]:
    """`op_kwargs` by index. UserError for an unknown module, and for an argument that its forward does not take."""
    if not isinstance(op_kwargs, Mapping):
        raise UserError(f"op_kwargs is a dict of modules, or their indices, to dicts; got {type(op_kwargs).__name__}")
    keywords: dict[int, Keywords] = {}
    for key, options in op_kwargs.items():
        places = [i for i, module in enumerate(modules) if module is key or (type(key) is int and i == key)]
        if not places:
            what = repr(key) if isinstance(key, int) else f"a {type(key).__name__} that is not there"
            raise UserError(f"op_kwargs has {what}; give a module of this Sequential, or an index below {len(modules)}")
        if not isinstance(options, Mapping):
            raise UserError(f"op_kwargs of {key!r} is {options!r}; give a dict of keyword arguments")
        for i in places:
            _check_keywords(i, modules[i], options)
            keywords[i] = {**keywords.get(i, {}), **options}
    return keywords


def _check_keywords(place: int, module: Member | None, options: Keywords) -> None:
    parameters = inspect.signature(module.forward).parameters.values()  # type: ignore[union-attr]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    for name in options:
        if name not in names:
            kind = type(module).__name__
            raise UserError(f"op_kwargs of {kind} at {place} has {name!r}; its forward takes {', '.join(names[1:])}")


def _parts(
    modules: Sequence[Member], keywords: Mapping[int, Keywords], channels: bool
) -> list[list[Op] | tuple[nn.Module, Keywords]]:
    """Lists of neighbouring ops, and modules that run alone with their keyword arguments.

    A channel ends a list: the next op takes the output of an op of that list.
    """
    parts: list[list[Op] | tuple[nn.Module, Keywords]] = []
    for i, module in enumerate(modules):
        alone = i in keywords or (isinstance(module, nn.Module) and is_hooked(module))
        ops = None if alone else getattr(module, "pipeline", None)
        if ops is None:
            assert isinstance(module, nn.Module)
            parts.append((module, keywords.get(i, {})))
        elif parts and isinstance(last := parts[-1], list) and not (channels and bound(module, INPUTS)):
            last += ops
        else:
            parts.append(list(ops))
    return parts


def is_plain(*modules: object) -> bool:
    """Whether modules are ops without hooks, so that their stages do everything that they do."""
    return all(isinstance(module, Op) and isinstance(module, nn.Module) and not is_hooked(module) for module in modules)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks that need its calls. Hooks with `watches` do not. Global hooks are on all modules."""
    if not torch.compiler.is_dynamo_compiling() and _has_any_global_hook():
        return True
    if not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks):
        return False
    every = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return not all(getattr(hook, "watches", False) for hooks in every for hook in hooks.values())
