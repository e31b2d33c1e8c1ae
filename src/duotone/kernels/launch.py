"""Launching a Triton kernel at the least cost to the host. It is compiled once per key, then passed to its launcher.

Triton's own call binds, types and hashes every argument each time, which takes about 20 us. This takes about 5.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import or_
from types import FunctionType
from typing import NamedTuple, cast

import torch
import triton
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

DIRECT = triton.__version__.startswith("3.6.")
"""Whether this Triton's launcher takes the arguments below. If not, kernels are called by Triton's own call."""


Constants = dict[str, object]
"""The constants that a kernel is compiled for, by the names of its parameters."""


class Described(NamedTuple):
    """The fields of Triton's `TensorDescriptor`, which checks them at each call."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: list[int]
    padding: str = "zero"


class Kernel:
    """A jitted function whose parameters are descriptors, tensors, integers, floats and constants, in this order."""

    def __init__(self, function: JITFunction[object]) -> None:
        self.function = function

    def bind(self, constants: Constants, warps: int = 4, stages: int = 3, options: Constants | None = None) -> "Launch":
        """The kernel for these constants; `options` are further ones of Triton's compiler."""
        options = {**constants, "num_warps": warps, "num_stages": stages, **(options or {})}
        return Launch(self.function, options, len(constants))


class Launch:
    """A kernel with its constants; call it with what changes.

    The first tensor may have any dtype. The dtypes of the others, and of descriptors, follow from it and the constants.
    A tensor that is None is not read or written. It is None in every call.
    """

    def __init__(self, function: JITFunction[object], options: Constants, constants: int) -> None:
        self.function, self.options = function, options
        self._compiled: dict[tuple[object, ...], Compiled] = {}
        self._nothing = (None,) * constants

    def __call__(
        self,
        programs: int,
        tensors: tuple[Tensor | None, ...],
        integers: tuple[int, ...] = (),
        floats: tuple[float, ...] = (),
        descriptors: tuple[Described, ...] = (),
    ) -> None:
        """Enqueue `programs` programs on the current stream of the first tensor's device.

        A mode of torch functions sees the launch, as it sees the functions of torch.
        """
        if has_torch_function(tensors):
            arguments = programs, tensors, integers, floats, descriptors
            return handle_torch_function(self.__call__, tensors, *arguments)  # type: ignore[no-any-return]
        first = tensors[0]
        index = first.get_device()
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(programs, tensors, integers, floats, descriptors)
        if not DIRECT:
            arguments = *[TensorDescriptor(*each) for each in descriptors], *tensors, *integers, *floats
            self.function.run(*arguments, grid=(programs,), warmup=False, **self.options)
            return None
        (enqueue, of_kernel), addresses = self._of(tensors, integers, floats, descriptors, index)
        stream = torch._C._cuda_getCurrentRawStream(index)
        enqueue(programs, 1, 1, stream, *of_kernel, *descriptors, *addresses, *integers, *floats, *self._nothing)
        return None

    def fixed(
        self,
        tensors: tuple[Tensor | None, ...],
        integers: tuple[int, ...] = (),
        floats: tuple[float, ...] = (),
        descriptors: tuple[Described, ...] = (),
    ) -> tuple[Callable[..., None], tuple[object, ...], tuple[object, ...]] | None:
        """What enqueues this call again: a function, and its arguments before and after the addresses of the tensors.

        The grid and the stream come first. None if kernels are called by Triton's own call.
        """
        if not DIRECT or descriptors or tensors[0].get_device() < 0:
            return None
        function, before = self._of(tensors, integers, floats, (), tensors[0].get_device())[0]
        return function, before, (*integers, *floats, *self._nothing)

    def _of(
        self,
        tensors: tuple[Tensor | None, ...],
        integers: tuple[int, ...],
        floats: tuple[float, ...],
        descriptors: tuple[Described, ...],
        index: int,
    ) -> "tuple[Compiled, list[int | None]]":
        """The compiled kernel for these arguments, and the addresses of the tensors."""
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        joint = reduce(or_, filter(None, addresses), 0)
        aligned = joint & 15 == 0 or tuple([address is None or address & 15 == 0 for address in addresses])
        key = tensors[0].dtype, aligned, index, _specialized(*integers)
        compiled = self._compiled.get(key)
        if compiled is None:
            checked = [TensorDescriptor(*each) for each in descriptors]
            compiled = self._compiled[key] = self._compile((*checked, *tensors, *integers, *floats))
        return compiled, addresses

    def _compile(self, arguments: tuple[object, ...]) -> "Compiled":
        binary = self.function.run(*arguments, grid=(1,), warmup=True, **self.options)
        launcher = binary.run  # this loads the binary, so it precedes `function`
        handle, metadata, hooks = binary.function, binary.packed_metadata, (None, None, None)
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return launcher, (handle, metadata, *hooks)
        of_kernel = handle, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, metadata, *hooks
        maps = getattr(binary.metadata, "tensordesc_meta", None)
        return _mapped(launcher.launch, maps, 4 + len(of_kernel)) if maps and all(maps) else launcher.launch, of_kernel


def _mapped(wrapper: FunctionType, maps: Sequence[dict[str, int]], before: int) -> Callable[..., None]:
    """What Triton's wrapper of a launcher does for tensor maps after `before` arguments, in a third of its time."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as DTYPES  # absent in other backends

    enqueue = inspect.getclosurevars(wrapper).nonlocals["launcher"]
    fill = triton.runtime.driver.active.utils.fill_tma_descriptor
    fixed = [(m["swizzle"], m["elem_size"], DTYPES[m["elem_type"]], m["block_size"]) for m in maps]
    after = before + len(fixed)

    def launch(*arguments: object) -> None:
        expanded: list[object] = []
        described = cast(tuple[Described, ...], arguments[before:after])
        for (base, shape, strides, *_), constant in zip(described, fixed, strict=True):
            expanded += fill(base.data_ptr(), *constant, shape, strides, 0), *shape, *strides
        enqueue(*arguments[:before], *expanded, *arguments[after:])

    return launch


Compiled = tuple[Callable[..., None], tuple[object, ...]]
"""What enqueues a compiled kernel, and its arguments between the stream and those of the kernel."""


@lru_cache(maxsize=4096)
def _specialized(*integers: int) -> tuple[int, ...]:
    """What Triton specializes on: integers that are 1, divisible by 16, or wider than 31 bits."""
    return tuple([n if n == 1 else (n & 15 == 0) + 2 * (n >> 31 == 0) + 4 for n in integers])


def kernel(
    function: Callable[..., object], unspecialized: tuple[str, ...] = (), any_alignment: tuple[str, ...] = ()
) -> Kernel:
    """`triton.jit` and a `Kernel` over it. `unspecialized` numbers make no variants, nor does the alignment of the
    tensors `any_alignment`: slots of a history, 4 bytes apart."""
    options = {"do_not_specialize": list(unspecialized), "do_not_specialize_on_alignment": list(any_alignment)}
    return Kernel(triton.jit(function, **options))
