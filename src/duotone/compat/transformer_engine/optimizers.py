"""Optimizers under the names of Transformer Engine."""

from typing import Any

import torch

from duotone import optim
from duotone.compat.transformer_engine.options import Rule, is_ignored, is_off, is_unset
from duotone.errors import UserError

ADAM: dict[str, Rule] = {
    "bias_correction": (lambda value: value is True, "write the update yourself"),
    "adam_w_mode": (lambda value: value in (True, 1), "use torch.optim.Adam"),
    "amsgrad": (is_off, "use torch.optim.AdamW"),
    "set_grad_none": (is_ignored, ""),
    "capturable": (is_off, "use torch.optim.AdamW(capturable=True)"),
    "master_weight_dtype": (lambda value: value is torch.float32, "masters are fp32: leave it out"),
    "exp_avg_dtype": (lambda value: value is torch.float32, "moments are fp32: leave it out"),
    "exp_avg_sq_dtype": (lambda value: value is torch.float32, "moments are fp32: leave it out"),
    "use_decoupled_grad": (is_off, "put gradients into .grad"),
    "store_param_remainders": (is_off, "masters are whole: leave it out"),
}
SGD: dict[str, Rule] = {
    "wd_after_momentum": (is_off, "leave it out"),
    "materialize_master_grads": (is_ignored, ""),
    "set_grad_none": (is_ignored, ""),
    "master_weights": (is_off, "keep fp32 parameters, or use duotone.optim.AdamW"),
    "use_decoupled_grad": (is_off, "put gradients into .grad"),
    "momentum_buffer_dtype": (is_unset, "leave it out"),
}


class FusedAdam(optim.AdamW):
    """`duotone.optim.AdamW` with the defaults there: no weight decay."""

    def __init__(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        master_weights: bool = False,
        **options: Any,
    ) -> None:
        options |= {"bias_correction": bias_correction, "adam_w_mode": adam_w_mode, "amsgrad": amsgrad}
        _refuse("FusedAdam", options, ADAM)
        super().__init__(params, lr, betas, eps, weight_decay, master_weights=master_weights)


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        _refuse("FusedSGD", options, SGD)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


def _refuse(title: str, options: dict[str, Any], allowed: dict[str, Rule]) -> None:
    """UserError for an option that has no counterpart."""
    for name, value in options.items():
        is_harmless, remedy = allowed.get(name, (lambda value: False, "leave it out"))
        if not is_harmless(value):
            raise UserError(f"te.optimizers.{title}({name}={value!r}) has no counterpart in Duotone; {remedy}")
