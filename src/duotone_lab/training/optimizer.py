"""AdamW on fp32 masters, as the laboratory uses it: clipped gradients, decay of matrices, state by name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from duotone.optim import AdamW
from duotone.sharding.dtensors import shard_of

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0
STATE = ("master", "step", "exp_avg", "exp_avg_sq")
"""What the state of a parameter holds, and a checkpoint."""


def decaying(parameters: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Groups of an optimizer: matrices decay, vectors do not."""
    named = list(parameters.items())
    groups = [
        {"params": [pair for pair in named if pair[1].dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [pair for pair in named if pair[1].dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Clipped:
    """An optimizer that gets its learning rate with each step. Gradients are clipped to a total norm of one."""

    adamw: torch.optim.Optimizer

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())

    def update(self, learning_rate: float) -> None:
        """One update from gradients that are clipped already; they are released."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.adamw.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Masters and moments of this process, uncopied, such as `exp_avg/NAME`."""
        return {
            f"{key}/{name}": shard_of(value)
            for name, parameter in self.parameters.items()
            for key, value in self.adamw.state.get(parameter, {}).items()
        }


class MasterAdamW(Clipped):
    """`duotone.optim.AdamW` for the parameters of a model. Matrices decay, vectors do not.

    `masters` maps the name of each parameter (a tied one once) to the fp32 value that its master starts from. The
    gradients are clipped in fp32 to a total norm of one.
    """

    def __init__(self, model: nn.Module, masters: dict[str, Tensor]) -> None:
        super().__init__(model)
        self.adamw = AdamW(decaying(self.parameters), betas=BETAS, master_weights=True)
        for name, parameter in self.parameters.items():
            parameter.grad_dtype = None  # so that a bf16 parameter can have an fp32 gradient
            self.adamw.state[parameter]["master"] = masters[name].detach().clone()

    def step(self, learning_rate: float) -> None:
        """One update from the gradients that the model's parameters hold; they are released."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), GRADIENT_NORM)
        self.update(learning_rate)

    def state_like(self) -> dict[str, Tensor]:
        """The names in `state` once a step has been taken, each with a tensor of its shape and dtype."""
        step = torch.zeros((), dtype=torch.float32)
        return {
            f"{key}/{name}": step if key == "step" else self.adamw.state[parameter]["master"]
            for key in STATE
            for name, parameter in self.parameters.items()
        }

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` gave for the same model after a step; UserError if one lacks or does not fit."""
        names = [name for group in self.adamw.param_groups for name in group["param_names"]]
        states = {
            index: {key: tensors[f"{key}/{name}"] for key in STATE if f"{key}/{name}" in tensors}
            for index, name in enumerate(names)
        }
        self.adamw.load_state_dict({**self.adamw.state_dict(), "state": states})
