"""What the formats of one GEMM do to the loss, one GEMM at a time, forward and backward apart (SNIP, arXiv 2602.01410).

Forward: the error e of the output raises the loss by about half of e' H e. H is the Gauss-Newton matrix from the
gradients of the tokens, so that a token with the gradient g of the mean over N losses adds N / 2 (g' e)^2. Backward: a
step along a gradient at the angle a from the exact one makes the progress of cos a. Parameters count with their share
of the 1-norm of all gradients, as AdamW moves each at one rate.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.hooks import RemovableHandle

import duotone
from duotone.observe.candidates import EXACT, Gemm, rules_for
from duotone.recipes import HighPrecision, Recipe, RuleRecipe
from duotone_lab.training.gemm_options import Options
from duotone_lab.training.trainer import Trainer


@dataclass(frozen=True)
class Effect:
    """What one GEMM under one recipe costs: `forward` in nats of loss, `backward` as a share of a step's progress.

    Infinite where a number was not finite.
    """

    module: str
    gemm: str
    recipe: str
    forward: float
    backward: float


@dataclass
class Step:
    """One forward and backward: the gradients, and the output of the watched module with its gradient."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    output: Tensor = field(default_factory=lambda: torch.empty(0))
    output_gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    loss: float = 0.0


def effects(trainer: Trainer, options: Options, measured: Sequence[Effect]) -> Iterator[tuple[Effect, float]]:
    """The effect of each option that is not in `measured`, at the weights of the trainer, and the loss under it."""
    finished = {(effect.module, effect.gemm, effect.recipe) for effect in measured}
    exact: dict[str, Step] = {}
    for gemm, choices in options.items():
        module = gemm[0]
        for option in choices:
            if (*gemm, option.recipe) in finished:
                continue
            if module not in exact:
                exact = {module: _step(trainer, HighPrecision(), module)}
            if option.formats == EXACT:
                yield Effect(*gemm, option.recipe, 0.0, 0.0), exact[module].loss
                continue
            trial = _step(trainer, RuleRecipe(rules=rules_for({gemm: option.formats})), module)
            tokens = trainer.config.preset.tokens_per_step
            yield _effect(gemm, option.recipe, exact[module], trial, tokens), trial.loss


def _effect(gemm: Gemm, recipe: str, exact: Step, trial: Step, tokens: int) -> Effect:
    if gemm[1] == "fprop":
        error = trial.output.float() - exact.output.float()
        forward = tokens / 2 * (error * exact.output_gradient.float()).sum(-1).square().sum().item()
        return Effect(*gemm, recipe, _or_infinite(forward), 0.0)
    norms = {name: gradient.abs().sum().item() for name, gradient in exact.gradients.items()}
    lost = sum(norm * _turned(exact.gradients[name], trial.gradients[name]) for name, norm in norms.items())
    return Effect(*gemm, recipe, 0.0, _or_infinite(lost / (sum(norms.values()) or 1.0)))


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _turned(exact: Tensor, trial: Tensor) -> float:
    """1 - cos of the angle between two gradients, 0 for equal ones."""
    return 0.0 if torch.equal(exact, trial) else 1 - F.cosine_similarity(exact.flatten(), trial.flatten(), 0).item()


def _step(trainer: Trainer, recipe: Recipe, module: str) -> Step:
    """A forward and backward under `recipe` on the batch of the next step. The state of the trainer does not change."""
    model, step, seeds = trainer.model, Step(), duotone.rng_state(trainer.model)
    with _watched(trainer, module, step), duotone.autocast(recipe=recipe):
        loss = trainer.loss(trainer.completed)
    loss.backward()
    step.loss = loss.item()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            step.gradients[name] = parameter.grad.float()
            parameter.grad = None
    duotone.load_rng_state(model, seeds)
    return step


def _watched(trainer: Trainer, module: str, step: Step) -> RemovableHandle:
    """Keep the output of the module, and its gradient once backward has run, until the hook is removed."""

    def after(_: torch.nn.Module, args: object, output: Tensor) -> None:
        step.output = output.detach()
        output.register_hook(lambda gradient: setattr(step, "output_gradient", gradient))

    return trainer.model.get_submodule(module).register_forward_hook(after)
