"""Sequential: modules one after the other, of which neighbouring ops run as one pipeline."""

from typing import Any

from torch import Tensor, nn

from duotone.errors import UserError
from duotone.ops.op import Op, run


class Sequential(nn.Sequential):
    """nn.Sequential whose ops run as pipelines; other modules, and ops with hooks, are called by themselves.

    Further inputs of a call go to the ops that take some, in order. Further outputs follow the output.
    """

    def forward(self, x: Tensor, *extra: Any, is_first_microbatch: bool | None = None) -> Any:  # type: ignore[override]
        outputs: list[Tensor] = []
        parts = self._parts()
        taken = sum(op.extra_inputs for part in parts if isinstance(part, list) for op in part)
        if taken != len(extra):
            raise UserError(f"{len(extra)} further inputs were given to ops that take {taken}; pass one for each")
        at = 0
        for part in parts:
            if isinstance(part, list):
                count = sum(op.extra_inputs for op in part)
                y = run(part, x, extra[at : at + count], is_first_microbatch, self.__dict__)
                at += count
            else:
                y = part(x)
            if isinstance(y, tuple):
                y, *more = y
                outputs += more
            x = y
        return (x, *outputs) if outputs else x

    def _parts(self) -> list[Any]:
        """Lists of neighbouring ops, and modules that run alone."""
        parts: list[Any] = []
        for module in self:
            if not isinstance(module, Op) or _is_hooked(module):
                parts.append(module)
            elif parts and isinstance(parts[-1], list):
                parts[-1].append(module)
            else:
                parts.append([module])
        return parts

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rewritten"}


def _is_hooked(module: Any) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
