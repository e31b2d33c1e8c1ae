"""AdamW on fp32 master copies of the parameters of a model that computes in a lower precision."""

import torch
from torch import Tensor, nn

from duotone.errors import UserError

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class MasterAdamW:
    """AdamW over fp32 masters: each step reads the model's gradients and copies the updated masters back.

    `masters` maps the name of each parameter (a tied one once) to its fp32 value. Matrices decay, vectors do
    not; the gradient is clipped to a total norm of one.
    """

    def __init__(self, model: nn.Module, masters: dict[str, Tensor]) -> None:
        self.parameters = dict(model.named_parameters())
        self.masters = {name: nn.Parameter(masters[name].detach().clone()) for name in self.parameters}
        groups = [
            {"params": [m for m in self.masters.values() if m.dim() >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [m for m in self.masters.values() if m.dim() < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, fused=True)

    def step(self, learning_rate: float) -> None:
        """One update from the gradients that the model's parameters hold; they are released."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.masters[name].grad = parameter.grad.float()
                parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters.values(), GRADIENT_NORM)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.adamw.zero_grad()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])

    def state_like(self) -> dict[str, Tensor]:
        """The names in `state` once a step has been taken, each with a tensor of its shape and dtype."""
        step = torch.zeros((), dtype=torch.float32)
        return {
            f"{key}/{name}": step if key == "step" else master.detach()
            for key in ("masters", *MOMENTS)
            for name, master in self.masters.items()
        }

    def state(self) -> dict[str, Tensor]:
        """Masters and moments, uncopied: `masters/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`."""
        tensors = {f"masters/{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            tensors |= {f"{key}/{name}": value for key, value in self.adamw.state.get(master, {}).items()}
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` gave for the same model; UserError, with nothing changed, where it is of another."""
        for name, like in self.state_like().items():
            tensor = tensors.get(name)
            if tensor is None or (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                there = "absent" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise UserError(
                    f"{name} is {there} in the state and {tuple(like.shape)} {like.dtype} in the optimizer; load the "
                    "state of the same model"
                )
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[f"masters/{name}"])
                moments = {key: tensors[f"{key}/{name}"] for key in MOMENTS}
                self.adamw.state[master] = {key: value.clone().to(master.device) for key, value in moments.items()}
