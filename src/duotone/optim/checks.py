"""What AdamW refuses, before anything changes."""

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from duotone.errors import MissingPlaneError, UserError
from duotone.optim.master import needs_master
from duotone.optim.update import Group, Saved
from duotone.tensor import QuantizedTensor

AT_LEAST_ZERO = ("lr", "eps", "weight_decay")


def check_group(group: Group) -> None:
    """UserError if a hyperparameter is out of range or the group asks for AMSGrad."""
    for name in AT_LEAST_ZERO:
        value = group[name]
        if not _is_number(value) or not value >= 0:
            raise UserError(f"AdamW takes {name} as one number that is at least 0; got {value!r}")
    betas = group["betas"]
    is_pair = isinstance(betas, Sequence) and len(betas) == 2 and all(map(_is_number, betas))
    if not is_pair or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"AdamW takes two betas, each at least 0 and below 1; got {betas!r}")
    if group.get("amsgrad"):
        raise UserError("AdamW keeps no maximum of second moments; use torch.optim.AdamW for AMSGrad")


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_meta and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def refuse_distributed(parameter: Tensor, group: Group) -> None:
    """UserError if a parameter that needs a master is a DTensor."""
    to_local = getattr(parameter, "to_local", None)  # needs no import of DTensor
    if to_local is not None and needs_master(to_local(), group):
        raise UserError(
            f"a DTensor of shape {tuple(parameter.shape)} would need a master, which AdamW keeps for whole tensors "
            "alone; shard plain parameters, without master_weights"
        )


def refuse_capture() -> None:
    """MissingPlaneError inside of a CUDA graph, which would replay the numbers of one step for ever."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise MissingPlaneError(
            "AdamW makes the numbers of a step on the host, so no CUDA graph can hold it; step outside"
        )


def check_step(parameter: Tensor) -> None:
    """UserError or MissingPlaneError where a step could not write the parameter from its gradient."""
    grad = parameter.grad
    if grad is not None and grad.layout != torch.strided:
        raise UserError("AdamW takes dense gradients; got a sparse one: use torch.optim.SparseAdam for its parameter")
    if not isinstance(parameter, QuantizedTensor):
        return
    parameter.require_writable()
    parameter.update_quantizer(parameter.quantizer)  # refuses one that does not make what is held
    if any(p is not None and p.format.is_stochastic for p in parameter.planes) and parameter.context.seed is None:
        raise UserError(
            f"{parameter!r} rounds stochastically and has no seed; give its context one: QuantizeContext(seed=)"
        )


def check_saved(parameter: Tensor, saved: Saved) -> None:
    """UserError if a state dict does not have the state of this parameter."""
    missing = [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in saved]
    if missing:
        raise UserError(f"a saved state without {missing[0]}; load what AdamW's state_dict() gave")
    step = saved["step"]
    if not _is_number(step) or not 0 <= step < float("inf"):
        raise UserError(f"a saved step is {step!r}; it must be a finite number that is at least 0")
    for name, value in saved.items():
        if name not in ("exp_avg", "exp_avg_sq", "master"):
            continue
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            got = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"that is a {type(value).__name__}"
            raise UserError(
                f"a saved {name} {got} for a parameter of shape {tuple(parameter.shape)}; load it into the optimizer "
                "of the same model"
            )
        if value.layout != torch.strided or value.is_meta or value.is_complex() != parameter.is_complex():
            where = "meta" if value.is_meta else str(value.layout)
            raise UserError(
                f"a saved {name} is {value.dtype}, {where}, for a parameter of {parameter.dtype}; give a dense tensor "
                "of real or complex numbers as the parameter has"
            )
        if not (value.is_floating_point() or value.is_complex()):
            raise UserError(f"a saved {name} is {value.dtype}; it must be a floating dtype, such as torch.float32")
