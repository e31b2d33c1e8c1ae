"""What ranks send to each other, counted as torch dispatches its collectives."""

from collections.abc import Iterable, Mapping

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from duotone_lab.memory.storages import tensors_in

COLLECTIVES = ("c10d", "_c10d_functional")


class Wire(TorchDispatchMode):
    """Counts bytes of this rank's collectives while it is open, forward and backward.

    `gathers` are the bytes that each all-gather gets from other ranks, `exchanged` those of all-to-alls. `reduced` are
    the bytes that are summed or compared over ranks: outputs and gradients, in high precision, and amaxes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gathers: list[int] = []
        self.exchanged = self.reduced = 0

    @property
    def gathered(self) -> int:
        """The bytes of all all-gathers."""
        return sum(self.gathers)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVES:
            self._count(func._schema.name.split("::")[1].replace("_", ""), args, result)
        return result

    def _count(self, name: str, args: tuple[object, ...], result: object) -> None:
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors_in((args, result))]
        if name.startswith("allgather"):
            self.gathers.append(max(sizes) - min(sizes))
        elif name.startswith("alltoall"):
            self.exchanged += sizes[len(tensors_in(args)) - 1]
        elif "reduce" in name:
            self.reduced += max(sizes)
