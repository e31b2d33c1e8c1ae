"""Optimizers under the names of Transformer Engine."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from duotone import optim
from duotone.compat.transformer_engine.options import Rule, is_ignored, is_off, is_unset
from duotone.errors import UserError
from duotone.optim.master import needs_master, values_of
from duotone.optim.moments import SCALE, first_moment, laid_like, store_first_moment
from duotone.optim.update import Saved
from duotone.sharding.dtensors import shard_of
from duotone.tensor import QuantizedTensor

ADAM: dict[str, Rule] = {
    "bias_correction": (lambda value: value is True, "write the update yourself"),
    "adam_w_mode": (lambda value: value in (True, 1), "use torch.optim.Adam"),
    "amsgrad": (is_off, "use torch.optim.AdamW"),
    "set_grad_none": (is_ignored, ""),
    "exp_avg_sq_dtype": (lambda value: value is torch.float32, "it is fp32, because it has to fall: leave it out"),
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


MASTER = "master_param"


def renamed(saved: Saved, old: str, new: str) -> Saved:
    """The state of one parameter with another name for its master."""
    return {new if name == old else name: value for name, value in saved.items()}


class FusedAdam(optim.AdamW):
    """`duotone.optim.AdamW` with other defaults: no weight decay, and moments in fp32 for every parameter.

    `exp_avg_dtype` and `master_weight_dtype` are `moment_dtype` and `master_dtype`; torch.uint8 is FP8.
    `use_decoupled_grad` takes gradients, of any dtype, from `parameter.decoupled_grad`.
    """

    def __init__(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        capturable: bool = False,
        **options: object,
    ) -> None:
        options |= {"bias_correction": bias_correction, "adam_w_mode": adam_w_mode, "amsgrad": amsgrad}
        _refuse("FusedAdam", options, ADAM)
        self.use_decoupled_grad = use_decoupled_grad
        moments = torch.float8_e4m3fn if exp_avg_dtype is torch.uint8 else exp_avg_dtype
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            master_weights=master_weights,
            master_dtype=master_weight_dtype,
            moment_dtype=moments,
            capturable=capturable,
        )

    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        """Create the states of a parameter before its first step. Values that `quantized_model_init` preserved stay."""
        group = next(group for group in self.param_groups if any(p is param for p in group["params"]))
        shard = shard_of(param)
        values = shard.get_high_precision_init_val() if isinstance(shard, QuantizedTensor) else None
        master = torch.empty(shard.shape, dtype=torch.float32, device=shard.device)
        self._state_of(group, param, laid_like(param, master))
        if needs_master(shard, group):
            master.copy_(values_of(shard) if values is None else values)
            self.state[param]["master"] = laid_like(param, master)

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """A state by its name in Transformer Engine: "exp_avg", "exp_avg_sq" or "master_param". FP8 is decoded."""
        state = self.state[param]
        if state_name == "exp_avg" and SCALE in state:
            return laid_like(param, first_moment(state))
        return state[state_name.removesuffix("_param")]

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Write a state from a whole tensor or, for a DTensor, from the shard of this rank."""
        if state_name == "exp_avg":
            store_first_moment(self.state[param], shard_of(unscaled_state))
        shard_of(self.get_unscaled_state(param, state_name)).copy_(shard_of(unscaled_state))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        parameters = [p for group in self.param_groups for p in group["params"]] if self.use_decoupled_grad else []
        before = [(p, p.grad, p.grad_dtype) for p in parameters]
        for p in parameters:
            p.grad_dtype, p.grad = None, getattr(p, "decoupled_grad", None)
        try:
            return super().step(closure)
        finally:
            for p, grad, dtype in before:
                p.grad, p.grad_dtype = grad, dtype

    def state_dict(self) -> StateDict:
        """Like that of `duotone.optim.AdamW`, with "master_param" for "master"."""
        state_dict = super().state_dict()
        return state_dict | {
            "state": {at: renamed(saved, "master", MASTER) for at, saved in state_dict["state"].items()}
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Also loads a checkpoint of Transformer Engine, which counts the steps of a group, and one with "master"."""
        steps = {
            at: {"step": group["step"]}
            for group in state_dict["param_groups"]
            if "step" in group
            for at in group["params"]
        }
        states = {at: steps.get(at, {}) | renamed(saved, MASTER, "master") for at, saved in state_dict["state"].items()}
        state_dict = state_dict | {"state": states}
        super().load_state_dict(state_dict)


class FusedSGD(torch.optim.SGD):
    """`torch.optim.SGD`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: object,
    ) -> None:
        _refuse("FusedSGD", options, SGD)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


def _refuse(title: str, options: dict[str, object], allowed: dict[str, Rule]) -> None:
    """UserError for an option that has no counterpart."""
    for name, value in options.items():
        is_harmless, remedy = allowed.get(name, (lambda value: False, "leave it out"))
        if not is_harmless(value):
            raise UserError(f"te.optimizers.{title}({name}={value!r}) has no counterpart in Duotone; {remedy}")
