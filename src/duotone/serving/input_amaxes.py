"""Amaxes of activations: what linears read while a calibration runs."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.tensor.plane_tensor import plain


def calibrated(
    linears: Mapping[str, nn.Module], calibrate: Callable[[], object] | None, scheme: str
) -> dict[str, Tensor]:
    """The largest magnitude that each linear reads in a calibration, fp32 (1,), by its name.

    UserError without a calibration, and for a linear that did not run or read no finite value.
    """
    if calibrate is None:
        other = "NVFP4A16" if scheme == "NVFP4" else "FP8_DYNAMIC"
        remedy = f"give calibrate=lambda: model(batch), or export scheme {other}"
        raise UserError(f"scheme {scheme} stores the scales of activations; {remedy}")
    amaxes: dict[str, Tensor] = {}

    def note(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        amax = plain(inputs[0]).detach().abs().amax().float().reshape(1)
        amaxes[name] = torch.maximum(amaxes.get(name, amax), amax)

    hooks = [module.register_forward_pre_hook(partial(note, name)) for name, module in linears.items()]
    try:
        with torch.no_grad():
            calibrate()
    finally:
        for hook in hooks:
            hook.remove()
    for name in linears:
        if name not in amaxes:
            raise UserError(f"{name} did not run while calibrate was called, so its activations have no scale")
        if not 0 < amaxes[name].item() < float("inf"):
            raise UserError(f"{name} read an amax of {amaxes[name].item()} while calibrate was called; give real data")
    return amaxes
