"""The subject `train`: whole training steps of a Llama-like model, whose candidates share parameters and optimizer."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

import duotone
from bench.subjects import head, layer
from bench.timing.case import Candidate, Case, Settings, Shape, Subject, Work, require_multiple, written
from bench.timing.duel import clock_for
from duotone.recipes import Recipe
from duotone_lab.training.model import GPT
from duotone_lab.training.presets import ModelConfig

BASE = "torch bf16, blocks compiled"
HEAD_WIDTH = 128
LEARNING_RATE = 1e-5
HEAD = "lm_head"


class Decoder(GPT):
    """The laboratory's GPT (RMSNorm, rotary attention, SwiGLU) with a vocabulary of any size.

    Its loss adds up `chunk_loss`, so that the logits of all tokens never exist.
    """

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(vocabulary, config.dim)
        self.lm_head = nn.Linear(config.dim, vocabulary, bias=False)
        self.chunk_loss = head.cross_entropy

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        return head.mean_loss(self.norm(x).flatten(0, 1), self.lm_head.weight, targets.flatten(), self.chunk_loss)


@dataclass(frozen=True)
class Bench:
    """A bf16 model, its batch and its optimizer."""

    model: Decoder
    tokens: Tensor
    targets: Tensor
    optimizer: torch.optim.Optimizer

    @staticmethod
    def of(settings: Settings, shape: Shape) -> "Bench":
        count, dim, hidden, layers = shape
        sequence = min(settings.sequence, count)
        heads = max(1, dim // HEAD_WIDTH)
        config = ModelConfig(layers=layers, dim=dim, heads=heads, hidden=hidden, context=sequence, tied=False)
        with torch.device(settings.device):
            model = Decoder(config, settings.vocabulary)
            drawn = torch.randint(settings.vocabulary, (count // sequence, sequence + 1))
        for parameter in model.parameters():
            parameter.data = parameter.data.to(layer.DTYPE)
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        return Bench(model, drawn[:, :-1], drawn[:, 1:], optimizer)

    def twin(self) -> Decoder:
        """Modules of their own over the same parameters."""
        shared = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        return copy.deepcopy(self.model, shared)

    def work(self, model: nn.Module) -> Work:
        """Forward, loss, backward and optimizer step."""

        def step() -> None:
            model(self.tokens, self.targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        def peak_mib() -> float:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / layer.MIB

        return Work(step, amount=self.tokens.numel(), peak_mib=peak_mib if self.tokens.is_cuda else None)


def compile_blocks(model: Decoder) -> Decoder:
    for index, block in enumerate(model.layers):
        model.layers[index] = layer.compile_module(block)
    return compile_loss(model)


def compile_loss(model: Decoder) -> Decoder:
    model.chunk_loss = layer.compile_module(model.chunk_loss)
    return model


def compile_between(model: Decoder) -> Decoder:
    """Compile what lies between the linears, which all blocks share, and leave the modules as they are."""
    for block in cast(list[Any], list(model.layers)):
        block.attention.mix = layer.compile_module(block.attention.mix)
    return compile_loss(model)


def converted(model: Decoder, recipe: Recipe) -> Decoder:
    """The linears of the blocks under a recipe."""
    duotone.convert(model, recipe)
    return model


def fused(model: Decoder, recipe: Recipe) -> Decoder:
    """The same, with norms and MLPs as pipelines."""
    return duotone.fuse(converted(model, recipe))  # type: ignore[return-value]


def of_modules(model: Decoder, recipe: Recipe) -> Decoder:
    """The blocks from LayerNormLinear, Linear and LayerNormMLP over the same parameters; attention stays torch's."""
    for block in model.layers:
        _rebuild(block, recipe)
    duotone.assign_names(model)
    return model


def _rebuild(block: Any, recipe: Recipe) -> None:
    attention, mlp = block.attention, block.mlp
    norms = block.attention_norm, block.mlp_norm
    width, hidden = norms[0].weight.shape[0], mlp.down.weight.shape[1]
    options = {"bias": False, "device": norms[0].weight.device, "params_dtype": layer.DTYPE, "recipe": recipe}
    qkv = duotone.LayerNormLinear(width, 3 * width, normalization="RMSNorm", eps=_eps(norms[0]), **options)
    proj = duotone.Linear(
        width, width, save_original_input=recipe.recompute_columnwise, **options
    )  # attention keeps it
    whole = duotone.LayerNormMLP(
        width, hidden, normalization="RMSNorm", eps=_eps(norms[1]), activation="swiglu", **options
    )
    qkv.layer_norm_weight, qkv.weight = norms[0].weight, attention.qkv.weight
    proj.weight = attention.proj.weight
    whole.layer_norm_weight, whole.fc1.weight, whole.fc2.weight = norms[1].weight, mlp.gate_up.weight, mlp.down.weight
    attention.qkv, attention.proj, block.mlp = qkv, proj, whole
    block.attention_norm = block.mlp_norm = nn.Sequential()  # of nothing: the modules hold the norms


def _eps(norm: nn.RMSNorm) -> float:
    """What torch takes where none was given."""
    return torch.finfo(layer.DTYPE).eps if norm.eps is None else norm.eps


def candidates(settings: Settings, shape: Shape) -> list[Candidate]:
    bench = Bench.of(settings, shape)

    def candidate(name: str, make: Callable[[], nn.Module]) -> Candidate:
        return Candidate(name, lambda: bench.work(make()))

    choices = [
        candidate("torch bf16 eager", bench.twin),
        candidate(BASE, lambda: compile_blocks(bench.twin())),
    ]
    for name in layer.torchao_recipes():
        choices.append(candidate(f"torchao {name}", lambda name=name: compile_blocks(_torchao(bench.twin(), name))))
    for recipe in settings.recipes:
        for form, build in {"converted": converted, "fused": fused, "modules": of_modules}.items():
            model = lambda build=build, recipe=recipe: build(bench.twin(), recipe)  # noqa: E731
            choices.append(candidate(f"{recipe.name}, {form}", model))
            between = lambda model=model: compile_between(model())  # noqa: E731
            choices.append(candidate(f"{recipe.name}, {form}, the rest compiled", between))
            if settings.compiled:
                compiled = lambda model=model: compile_blocks(model())  # noqa: E731
                choices.append(candidate(f"{recipe.name}, {form}, compiled", compiled))
    return choices


def cases(settings: Settings, shape: Shape) -> list[Case]:
    count, dim, *_ = shape
    sequence = min(settings.sequence, count)
    require_multiple("TOKENS", count, sequence)
    require_multiple("WIDTH", dim, HEAD_WIDTH if dim > HEAD_WIDTH else 2)
    return [
        Case(
            f"train, sequences of {sequence}, vocabulary {settings.vocabulary}",
            written(shape),
            BASE,
            clock_for(settings.device),
            lambda: candidates(settings, shape),
            unit="tokens/s",
        )
    ]


def _torchao(model: Decoder, name: str) -> Decoder:
    layer.to_torchao(model, name, module_filter_fn=lambda _, where: where != HEAD)
    return model


TRAIN = Subject(
    "train",
    "Training steps of a Llama-like model: TOKENS a step, WIDTH, HIDDEN of its SwiGLU, LAYERS.",
    ("TOKENS", "WIDTH", "HIDDEN", "LAYERS"),
    {"cuda": ((16384, 2048, 5632, 24), (8192, 4096, 14336, 6)), "cpu": ((128, 64, 128, 2),)},
    cases,
)
