"""The models of the laboratory by name, as `--model` takes them. All give forward(tokens, targets) -> mean loss."""

from dataclasses import dataclass

import torch
from torch import nn

from duotone.errors import UserError
from duotone.observe.operand_samples import linears_of
from duotone_lab.training import model
from duotone_lab.training.hf import HuggingFace
from duotone_lab.training.presets import Preset

DEFAULT = "gpt"
HF = "hf:"


@dataclass(frozen=True)
class Lab:
    """A model of this package, from a ModelConfig. It has the methods of `HuggingFace`."""

    kind: type[model.GPT]
    mlp: str = "SwiGLU"

    def outline(self, preset: Preset) -> nn.Module:
        """The model of a preset, with the weights of the constructor."""
        return self.kind(preset.model)

    def build(self, preset: Preset, seed: int) -> nn.Module:
        """The model of a preset, with weights drawn from a seed."""
        return model.build(preset.model, seed, kind=self.kind)

    def describe(self, preset: Preset) -> str:
        """The sizes of the model in words."""
        sizes, head = preset.model, "tied head" if preset.model.tied else "untied head"
        return f"{sizes.layers} layers of {sizes.dim}, {sizes.heads} heads, {self.mlp} {sizes.hidden}, {head}"

    def digest(self, preset: Preset) -> str:
        """Nothing decides what the model computes besides its name and the preset: ""."""
        return ""


EXPERTS = f"{model.MoEGPT.CHOSEN} of {model.MoEGPT.EXPERTS} experts of SwiGLU"
MODELS = {"gpt": Lab(model.GPT), "moe": Lab(model.MoEGPT, EXPERTS)}


def get(name: str) -> Lab | HuggingFace:
    """The builder of the model called `name`, or hf:PATH_OR_CLASS; UserError if there is none."""
    if name.startswith(HF):
        return HuggingFace(name.removeprefix(HF))
    if name not in MODELS:
        raise UserError(f"unknown model {name!r}: choose one of {', '.join(MODELS)}, or {HF}PATH_OR_CLASS")
    return MODELS[name]


def outline(name: str, preset: Preset) -> nn.Module:
    """The model without weights, on the meta device."""
    with torch.device("meta"):
        return get(name).outline(preset)


def build(name: str, preset: Preset, seed: int, *, perturbation: float = 0.0) -> nn.Module:
    """The model with fp32 parameters on the CPU; `perturbation` is relative noise on its weights."""
    return model.perturb(get(name).build(preset, seed), seed, perturbation)


def describe(name: str, preset: Preset) -> str:
    """The model in one line, which begins with its name."""
    return f"{name}: {get(name).describe(preset)}"


def linear_shapes(name: str, preset: Preset) -> dict[str, tuple[int, int]]:
    """Features in and out of each linear that follows a recipe."""
    linears = linears_of(outline(name, preset)).items()
    return {path: (linear.in_features, linear.out_features) for path, linear in linears}


def parameter_count(name: str, preset: Preset) -> int:
    """Parameters of the model, a tied one once."""
    return sum(parameter.numel() for parameter in outline(name, preset).parameters())
