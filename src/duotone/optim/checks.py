"""What AdamW refuses, in one line each, before anything changes."""

from collections.abc import Container, Sequence
from numbers import Real

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.optim.moments import BLOCK, CODES, DTYPES, FP8, MOMENTS, SCALE, require_blocks
from duotone.optim.update import Group, Saved
from duotone.sharding.dtensors import is_distributed, shard_of
from duotone.tensor import QuantizedTensor
from duotone.tensor.plane import memory_of

COMPUTED = torch.float32, torch.bfloat16, torch.float16


def check_group(group: Group) -> None:
    """UserError if a hyperparameter is out of range or the group asks for AMSGrad."""
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if not _is_number(value) or not value >= 0:
            raise UserError(f"AdamW takes {name} as one number that is at least 0; got {value!r}")
    betas = group["betas"]
    is_pair = isinstance(betas, Sequence) and len(betas) == 2 and all(map(_is_number, betas))
    if not is_pair or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"AdamW takes two betas, each at least 0 and below 1; got {betas!r}")
    check_dtypes(group)
    if group.get("amsgrad"):
        raise UserError("AdamW keeps no maximum of second moments; use torch.optim.AdamW for AMSGrad")


def check_dtypes(group: Group) -> None:
    """UserError if the group does not hold the names of dtypes for moments and masters."""
    moments, masters = group["moment_dtype"], group["master_dtype"]
    if moments not in (*DTYPES, None) or masters not in (*DTYPES, None) or masters == FP8:
        raise UserError(
            "AdamW takes torch.float32 or torch.bfloat16 for masters, and torch.float8_e4m3fn too for moments. Groups "
            f'hold names: write group["moment_dtype"] = "torch.bfloat16"; got master_dtype={masters!r} and '
            f"moment_dtype={moments!r}"
        )


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_meta and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def check_step(parameter: Tensor, group: Group) -> None:
    """UserError or MissingPlaneError if a step could not write the parameter from its gradient."""
    grad = parameter.grad
    if grad is not None and grad.layout != torch.strided:
        raise UserError("AdamW takes dense gradients; got a sparse one: use torch.optim.SparseAdam for its parameter")
    if group["moment_dtype"] is not None and parameter.dtype not in COMPUTED:
        raise UserError(
            f"AdamW stores moments of another dtype for parameters up to 32 bits; put that in {parameter.dtype} into a "
            "group with moment_dtype=None"
        )
    check_writable(shard_of(parameter))


def check_apart(parameters: Sequence[Tensor], known: Container[Tensor]) -> None:
    """UserError if two parameters lie in the same memory: each would be written from a master of its own.

    Parameters of which all are known were compared before.
    """
    seen: set[tuple[int, int]] = set()
    for parameter in () if all(each in known for each in parameters) else parameters:
        shard = shard_of(parameter)
        plane = (shard.planes.rowwise or shard.planes.columnwise) if isinstance(shard, QuantizedTensor) else None
        memory = memory_of(shard if plane is None else plane.parts["codes"])[:2]
        if shard.numel() and memory in seen:
            raise UserError(
                f"two parameters of shape {tuple(parameter.shape)} share their memory, and a step would lose the "
                "update of one of them; tie modules by one Parameter: b.weight = a.weight"
            )
        seen.add(memory)


def check_writable(parameter: Tensor) -> None:
    """UserError or MissingPlaneError if a quantized parameter cannot be written."""
    if not isinstance(parameter, QuantizedTensor):
        return
    parameter.require_writable()
    parameter.update_quantizer(parameter.quantizer)  # refuses a quantizer with other formats
    if any(p is not None and p.format.is_stochastic for p in parameter.planes) and parameter.context.seed is None:
        raise UserError(
            f"{parameter!r} rounds stochastically and has no seed; give its context one: QuantizeContext(seed=)"
        )


def check_saved(parameter: Tensor, saved: Saved) -> None:
    """UserError if a state dict does not have the state of this parameter."""
    if "master_param" in saved:
        raise UserError("a saved state of te.optimizers.FusedAdam; load it there, or rename its master_param to master")
    missing = [name for name in ("step", *MOMENTS) if name not in saved]
    if missing:
        raise UserError(f"a saved state without {missing[0]}; load what AdamW's state_dict() gave")
    step = saved["step"]
    if not _is_number(step) or not 0 <= step < float("inf"):
        raise UserError(f"a saved step is {step!r}; it must be a finite number that is at least 0")
    for name, value in ((name, saved[name]) for name in (*MOMENTS, "master") if name in saved):
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            got = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"that is a {type(value).__name__}"
            raise UserError(
                f"a saved {name} {got} for a parameter of shape {tuple(parameter.shape)}; load it into the optimizer "
                "of the same model"
            )
        if not is_distributed(value) and value.shape != shard_of(parameter).shape:
            raise UserError(
                f"a saved {name} is a whole tensor for a parameter that lies over ranks; load it with torch's "
                "set_optimizer_state_dict(options=StateDictOptions(full_state_dict=True))"
            )
        if value.layout != torch.strided or value.is_meta or value.is_complex() != parameter.is_complex():
            where = "meta" if value.is_meta else str(value.layout)
            raise UserError(
                f"a saved {name} is {value.dtype}, {where}, for a parameter of {parameter.dtype}; give a dense tensor "
                "of real or complex numbers as the parameter has"
            )
        if value.dtype == CODES and name == "exp_avg" and SCALE in saved:
            require_blocks(parameter)
            check_scale(saved, shard_of(value).shape)
        elif not (value.is_floating_point() or value.is_complex()):
            raise UserError(f"a saved {name} is {value.dtype}; it must be a floating dtype, such as torch.float32")


def check_scale(saved: Saved, shape: torch.Size) -> None:
    """UserError unless FP8 codes of this shape, of this rank, have their scales."""
    scale, want = saved[SCALE], (*shape[:-1], -(-shape[-1] // BLOCK) if shape else 0)
    if not isinstance(scale, Tensor) or scale.is_meta or not scale.is_floating_point() or shard_of(scale).shape != want:
        raise UserError(f"a saved {SCALE} has to be of shape {want} on this rank; load what AdamW's state_dict() gave")
