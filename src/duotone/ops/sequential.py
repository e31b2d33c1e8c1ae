"""Sequential: modules one after the other, of which neighbouring ops run as one pipeline."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from duotone.errors import UserError
from duotone.ops.consumers import KnownRoles
from duotone.ops.op import Op, run


class Sequential(KnownRoles, nn.Sequential):
    """nn.Sequential whose ops run as pipelines; other modules, and ops with hooks, are called by themselves.

    Further inputs of a call go to the ops that take some, in order. Further outputs follow the output. A first
    microbatch is passed on to every module of Duotone.
    """

    takes_first_microbatch = True

    @property
    def extra_inputs(self) -> int:
        """How many further inputs a call takes."""
        return sum(getattr(module, "extra_inputs", 0) for module in self)

    def forward(self, x: Tensor, *extra: Any, is_first_microbatch: bool | None = None) -> Any:  # type: ignore[override]
        if self.extra_inputs != len(extra):
            takes = self.extra_inputs
            raise UserError(f"{len(extra)} further inputs were given to ops that take {takes}; pass one for each")
        made, outputs = run_modules(tuple(self), x, extra, is_first_microbatch, self)
        return (made, *outputs) if outputs else made

    def __add__(self, other: nn.Sequential) -> "Sequential":
        return type(self)(*self, *other)

    def __mul__(self, other: int) -> "Sequential":
        return type(self)(*(list(self) * other))

    __rmul__ = __mul__

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rewritten"}


def run_modules(
    modules: Sequence[Any], x: Tensor, extra: Sequence[Any], first: bool | None, owner: Any
) -> tuple[Tensor, list[Any]]:
    """The output and the further outputs of modules and ops, neighbouring ops in one pipeline."""
    outputs: list[Any] = []
    at = 0
    for part in _parts(modules):
        ops = part if isinstance(part, list) else [part]
        count = sum(getattr(op, "extra_inputs", 0) for op in ops)
        own, at = extra[at : at + count], at + count
        if isinstance(part, list):
            y = run(part, x, own, first, owner)
        elif getattr(part, "takes_first_microbatch", False):
            y = part(x, *own, is_first_microbatch=first)
        else:
            y = part(x)
        if isinstance(y, tuple):
            y, *more = y
            outputs += more
        x = y
    return x, outputs


def _parts(modules: Sequence[Any]) -> list[Any]:
    """Lists of neighbouring ops, and modules that run alone."""
    parts: list[Any] = []
    for module in modules:
        ops = None if isinstance(module, nn.Module) and is_hooked(module) else getattr(module, "pipeline", None)
        if ops is None:
            parts.append(module)
        elif parts and isinstance(parts[-1], list):
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
