"""How the first moment of a parameter is stored: in a plain dtype, or as FP8 codes with a scale for 128 of a row."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from duotone import formats
from duotone.errors import UserError
from duotone.optim.update import Saved
from duotone.sharding.dtensors import is_distributed, shard_of
from duotone.tensor import Plane, Quantizer
from duotone.tensor.plane import Usage

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALE = "exp_avg_scale"
FP8, CODES, BLOCK = str(torch.float8_e4m3fn), torch.uint8, 128
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)} | {FP8: CODES}
"""Dtypes of moments and, except FP8, of masters. Groups hold names: torch.distributed.checkpoint takes no dtypes, and
gloo gathers no FP8."""
FORMAT = formats.get("fp8_e4m3_1x128_fp32")
QUANTIZER = Quantizer(FORMAT, None)


def first_moment(state: Saved) -> Tensor:
    """`exp_avg` of this rank as it is stored, or the fp32 values of FP8 codes."""
    stored = shard_of(state["exp_avg"])
    if stored.dtype != CODES:
        return stored
    rows, scale = stored.flatten(0, -2), shard_of(state[SCALE]).flatten(0, -2)
    plane = Plane(FORMAT, {"codes": rows, "scale": scale}, (rows.shape[0], rows.shape[1]))
    return plane.dequantize(torch.float32).reshape(stored.shape)


def store_first_moment(state: Saved, values: Tensor) -> None:
    """Write fp32 values over the FP8 codes and scales, which keep their memory. Nothing for a plain dtype."""
    if SCALE in state:
        for name, part in zip(("exp_avg", SCALE), encoded(values), strict=True):
            shard_of(state[name]).copy_(part)


def change_first_moment(state: Saved, parameter: Tensor, dtype: torch.dtype) -> None:
    """Store `exp_avg` in another dtype, in new contiguous memory."""
    values = first_moment(state)
    state.pop(SCALE, None)
    if dtype == CODES:
        codes, state[SCALE] = (laid_like(parameter, part) for part in encoded(values.to(torch.float32)))
    else:
        codes = laid_like(parameter, values.to(dtype).contiguous())
    state["exp_avg"] = codes


def encoded(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 (*lead, K) -> codes of E4M3 (*lead, K) and fp32 scales (*lead, K / 128, rounded up)."""
    plane = QUANTIZER.encode(values.flatten(0, -2), Usage(True, False)).rowwise
    assert plane is not None
    codes, scale = (plane.parts[name].contiguous() for name in ("codes", "scale"))
    return codes.view(values.shape), scale.view(*values.shape[:-1], scale.shape[-1])


def laid_like(parameter: Tensor, shard: Tensor) -> Tensor:
    """A DTensor of these shards with the placement of the parameter. The shard itself if the parameter is no DTensor.

    The last dimension may differ from the parameter's.
    """
    if not is_distributed(parameter):
        return shard
    cut, shape = (parameter.device_mesh, parameter.placements), parameter.shape
    if shard.shape != shard_of(parameter).shape:
        shape = torch.Size((*shape[:-1], shard.shape[-1] * ranks_across(parameter)))
    stride = parameter.stride() if shape == parameter.shape else shard.new_empty(shape, device="meta").stride()
    return type(parameter).from_local(shard, *cut, run_check=False, shape=shape, stride=stride)


def cuts_blocks(parameter: Tensor) -> bool:
    """Whether ranks cut rows inside of a block. Blocks of shards are then not those of the whole."""
    ranks = ranks_across(parameter) if is_distributed(parameter) else 1
    return ranks > 1 and parameter.shape[-1] % (BLOCK * ranks) != 0


def require_blocks(parameter: Tensor) -> None:
    """UserError if ranks cut the blocks of a saved first moment in FP8."""
    if cuts_blocks(parameter):
        raise UserError(
            f"a saved exp_avg in FP8 has blocks of {BLOCK} columns, and ranks cut a parameter of shape "
            f"{tuple(parameter.shape)} inside of them; save it with moment_dtype = torch.float32"
        )


def ranks_across(parameter: "DTensor") -> int:
    """The number of ranks over which the last dimension is cut."""
    last, mesh = parameter.dim() - 1, parameter.device_mesh
    return math.prod([mesh.size(at) for at, each in enumerate(parameter.placements) if each.is_shard(last)])
