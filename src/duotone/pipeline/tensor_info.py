"""TensorInfo: what is known of a tensor between two ops, and what of it does not fit a linear."""

from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeGuard

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.formats.format import require_dense
from duotone.tensor import QuantizedTensor, Quantizer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from duotone.pipeline.spread import Spread


class TensorInfo(NamedTuple):
    """What is known of a tensor between two ops before anything runs.

    `width` is its last dimension and `rows` the product of the others; None if that is not known. `quantizer` is that
    of a quantized tensor.
    """

    device: str
    dtype: torch.dtype
    width: int | None
    rows: int | None
    requires_grad: bool
    quantizer: Quantizer | None = None
    index: int = -1
    """Of a CUDA device, -1 elsewhere."""

    spread: "Spread | None" = None
    """Set if the tensor is the local tensor of a DTensor."""

    @property
    def place(self) -> str:
        """The device with its number, as plans name it."""
        return self.device if self.index < 0 else f"{self.device}:{self.index}"


def is_autocast(device: str) -> bool:
    """Whether torch.autocast is active for a device; there is none for meta."""
    return device != "meta" and torch.is_autocast_enabled(device)


def is_distributed(x: object) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor, without importing that."""
    return hasattr(x, "device_mesh")


def title(owner: object) -> str:
    """How errors name a module. Only errors ask: in a trace the name of a module would be a guard."""
    return getattr(owner, "__dict__", {}).get("module_name", "") or "a module"


def refuse_distributed(owner: object) -> NoReturn:
    raise UserError(f"{title(owner)} takes local tensors; got a DTensor: pass its to_local()")


def info_of(x: object, owner: object = None, spread: "Spread | None" = None) -> TensorInfo:
    """What the first op is told. UserError unless `x` is a dense local tensor with a last dimension.

    `spread` is that of the DTensor whose local tensor is `x`.
    """
    if isinstance(x, Tensor) and (x.is_nested or x.layout is not torch.strided):
        require_dense(title(owner), x)
    if not isinstance(x, Tensor) or x.dim() == 0:
        got = f"() in {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise UserError(f"{title(owner)} takes a tensor (*lead, width); got {got}")
    if type(x) is not Tensor and is_distributed(x):
        refuse_distributed(owner)
    device, dtype = x.device.type, x.dtype
    if dtype in CAST and device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    width = x.shape[-1]
    rows = x.numel() // width if width else x.shape[:-1].numel()
    quantizer = None
    if isinstance(x, QuantizedTensor) and dtype is x.dtype:  # casting a quantized tensor dequantizes it
        quantizer = quantizer_of(x)
    index = x.get_device() if device == "cuda" else -1
    return TensorInfo(device, dtype, width, rows, x.requires_grad and torch.is_grad_enabled(), quantizer, index, spread)


CAST = (torch.float32, torch.float16, torch.bfloat16)
"""What torch.autocast casts."""


def require_fit(owner: object, info: TensorInfo, weight: Tensor, bias: Tensor | None = None) -> None:
    """UserError unless an input like `info` can be multiplied by `weight` (out, width), and `bias` goes with it."""
    if weight.device.type != info.device:
        raise UserError(f"{title(owner)} is on {weight.device.type} and its input on {info.device}; move one of them")
    width = weight.shape[1]
    if (info.width is not None and info.width != width) or not (
        info.dtype is weight.dtype or _casts_to(info, weight.dtype)
    ):
        raise UserError(
            f"{title(owner)} takes (..., {width}) in {weight.dtype}; "
            f"got (..., {info.width}) in {info.dtype}: cast or reshape the input"
        )
    # Kernels see the address of a bias alone.
    if bias is not None and (bias.shape != weight.shape[:1] or bias.device != weight.device):
        raise UserError(
            f"{title(owner)}: its bias is {tuple(bias.shape)} on {bias.device}; "
            f"its weight asks for ({weight.shape[0]},) on {weight.device}"
        )


def _casts_to(info: TensorInfo, dtype: torch.dtype) -> bool:
    """Whether torch.autocast casts parameters of `dtype` to the dtype of the input."""
    return is_autocast(info.device) and info.dtype is torch.get_autocast_dtype(info.device)


def quantizer_of(x: Tensor) -> Quantizer | None:
    """The quantizer of a quantized tensor, in the formats that it really holds."""
    if type(x) is Tensor or not isinstance(x, QuantizedTensor):
        return None
    row, col = x.planes
    quantizer = x.quantizer
    if (row is None or quantizer.rowwise == row.format) and (col is None or quantizer.columnwise == col.format):
        return quantizer
    return Quantizer(row.format if row else quantizer.rowwise, col.format if col else quantizer.columnwise)
