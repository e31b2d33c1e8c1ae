"""Launching a Triton kernel at the least cost to the host: compiled once per key, then handed to its launcher directly.

Triton's own call binds, types and hashes every argument each time, about 20 us; this costs about 5.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

DIRECT = triton.__version__.startswith("3.6.")
"""Whether this Triton's launcher takes the arguments below; another one is called the slow way."""


class Kernel:
    """A jitted function whose parameters are descriptors, tensors, integers, floats and constants, in this order."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def bind(
        self, constants: dict[str, Any], warps: int = 4, stages: int = 3, options: dict[str, Any] | None = None
    ) -> "Launch":
        """The kernel for these constants; `options` are further ones of Triton's compiler."""
        given = {**constants, "num_warps": warps, "num_stages": stages, **(options or {})}
        return Launch(self.function, given, len(constants))


class Launch:
    """A kernel with its constants; call it with what changes.

    The first tensor may have any dtype; those of the others, and of descriptors, follow from it and from the constants.
    A tensor that is None is not read or written, and is so in every call.
    """

    def __init__(self, function: Any, options: dict[str, Any], constants: int) -> None:
        self.function, self.options = function, options
        self._made: dict[Any, Any] = {}
        self._nothing = (None,) * constants

    def __call__(
        self,
        programs: int,
        tensors: tuple[Any, ...],
        integers: tuple[int, ...] = (),
        floats: tuple[float, ...] = (),
        descriptors: tuple[Any, ...] = (),
    ) -> None:
        """Enqueue `programs` programs on the current stream of the first tensor's device."""
        first: Tensor = tensors[0]
        index = first.get_device()
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(programs, tensors, integers, floats, descriptors)
        if not DIRECT:
            given = (*descriptors, *tensors, *integers, *floats)
            self.function.run(*given, grid=(programs,), warmup=False, **self.options)
            return None
        addresses, joint = [], 0
        for tensor in tensors:
            address = None if tensor is None else tensor.data_ptr()
            addresses.append(address)
            joint |= address or 0
        # What Triton specializes on: integers that are 1, divisible by 16, or wider than 31 bits.
        hints = [n if n == 1 else (n & 15 == 0) + 2 * (n >> 31 == 0) + 4 for n in integers]
        aligned = joint & 15 == 0 or tuple([address is None or address & 15 == 0 for address in addresses])
        key = (first.dtype, aligned, index, *hints)
        launch = self._made.get(key)
        if launch is None:
            launch = self._made[key] = self._compile((*descriptors, *tensors, *integers, *floats))
        stream = torch._C._cuda_getCurrentRawStream(index)
        launch(programs, stream, (*descriptors, *addresses, *integers, *floats, *self._nothing))
        return None

    def _compile(self, given: tuple[Any, ...]) -> Callable[..., None]:
        made = self.function.run(*given, grid=(1,), warmup=True, **self.options)
        launcher = made.run  # loads the binary, and so goes before `function`
        handle, metadata = made.function, made.packed_metadata
        enqueue, needs_scratch = launcher.launch, launcher.global_scratch_size or launcher.profile_scratch_size
        modes = launcher.launch_cooperative_grid, launcher.launch_pdl

        def directly(programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
            enqueue(programs, 1, 1, stream, handle, *modes, None, None, metadata, None, None, None, *arguments)

        def with_scratch(programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
            launcher(programs, 1, 1, stream, handle, metadata, None, None, None, *arguments)

        return with_scratch if needs_scratch else directly


def kernel(function: Any, unspecialized: tuple[str, ...] = (), any_alignment: tuple[str, ...] = ()) -> Kernel:
    """`triton.jit` and a `Kernel` over it. `unspecialized` numbers make no variants, nor does the alignment of the
    tensors `any_alignment`: slots of a history, 4 bytes apart."""
    given = {"do_not_specialize": list(unspecialized), "do_not_specialize_on_alignment": list(any_alignment)}
    return Kernel(triton.jit(function, **given))
