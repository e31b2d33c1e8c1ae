"""FusedModule: the base of modules that contain other modules and run them as one pipeline."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from duotone.modules.sequential import Member, RunsOps, is_plain, run_modules
from duotone.pipeline.slot_roles import KnownRoles

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Output = Tensor | tuple[object, ...]
"""The result of a forward: the output, or a tuple that starts with it."""


class ModuleGroup(KnownRoles, nn.Module):
    """A module that contains other modules. These methods call the same method of each child that has it."""

    takes_first_microbatch = True

    def reset_parameters(self) -> None:
        """Fill all parameters anew; those on meta come to the default device first."""
        _call_each(self.children(), "reset_parameters")

    def set_tensor_parallel_group(self, tp_group: "ProcessGroup") -> None:
        """Communicate in another group from the next forward on."""
        _call_each(self.children(), "set_tensor_parallel_group", tp_group)

    def invalidate_weight_cache(self) -> None:
        """Encode the weights again at the next microbatch: writes through `.data` leave no version."""
        _call_each(self.children(), "invalidate_weight_cache")

    def backward_dw(self) -> None:
        """Compute the oldest delayed weight gradients, those of the last child first."""
        _call_each(reversed(list(self.children())), "backward_dw")


class FusedModule(RunsOps, ModuleGroup):
    """Runs its children in order, neighbouring ops as one pipeline. A subclass only builds them."""

    @property
    def ops(self) -> tuple[Member, ...]:
        """The modules that run, in order."""
        return tuple(module for module in self._modules.values() if module is not None)

    @property
    def pipeline(self) -> tuple[Member, ...] | None:
        """The ops that stand for this module in a larger pipeline; None if its forward does more than them."""
        return self.ops if type(self).forward is FusedModule.forward and is_plain(*self.ops) else None

    def forward(self, x: Tensor, *, is_first_microbatch: bool | Tensor | None = None) -> Output:
        """(*lead, width of the first child) -> (*lead, width of the last one), then the children's further outputs."""
        y, extra = run_modules(self.ops, x, (), is_first_microbatch, self)
        return (y, *extra) if extra else y


def _call_each(modules: Iterable[nn.Module], method: str, *arguments: object) -> None:
    """Call this method of every child that has it."""
    for module in modules:
        if hasattr(module, method):
            getattr(module, method)(*arguments)
