"""`--parallel`: its axes, and what each rank would hold and send in a step of `duotone train`, from sizes alone."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

import duotone
from duotone.errors import UserError
from duotone.formats import IDENTITY, Format
from duotone.modules import MoE
from duotone.modules.planned import Planned
from duotone.modules.sent_weights import encodes_itself
from duotone.observe.candidates import plane_bytes
from duotone.recipes import Recipe
from duotone.tensor import Plane, Quantizer
from duotone_lab.memory.wire import Wire
from duotone_lab.training import models
from duotone_lab.training.config import TrainConfig

AXES = ("fsdp", "tp", "ep")
COLUMNS, ROWS = ("qkv", "gate_up"), ("proj", "down")
"""The linears of a block that are cut by outputs, and by inputs."""


@dataclass(frozen=True)
class Parallel:
    """Ranks along each axis. Ranks of `fsdp` and `ep` have different tokens, those of `tp` share them."""

    fsdp: int = 1
    tp: int = 1
    ep: int = 1

    @staticmethod
    def parse(text: str) -> "Parallel":
        """Parse a text like "fsdp=2,tp=2". UserError if it has another form."""
        parts = [re.fullmatch(r"(fsdp|tp|ep)=([1-9][0-9]{0,5})", part.strip()) for part in text.split(",")]
        names = [part[1] for part in parts if part is not None]
        if len(names) != len(parts) or len(set(names)) != len(names):
            raise UserError(f"--parallel {text!r} is not such as fsdp=4,tp=2,ep=1: name each axis once, with its ranks")
        return Parallel(**{part[1]: int(part[2]) for part in parts if part is not None})

    @property
    def ranks(self) -> int:
        """The number of GPUs."""
        return self.fsdp * self.tp * self.ep

    @property
    def data(self) -> int:
        """The number of ranks with different tokens."""
        return self.fsdp * self.ep

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in AXES if getattr(self, name) > 1) or "fsdp=1"


HIGH_PRECISION = 2, 2, 0
"""Bytes of an element of a parameter in the gathers of forward and backward, and in an exchange before each."""

STATE = 3
"""fp32 tensors of each parameter: its value and two moments."""

FP32, BF16 = 4, 2


@dataclass
class Forecast:
    """Bytes of one rank: the state between steps, and the traffic of a step as `memory.wire.Wire` counts it."""

    parallel: Parallel
    state: float = 0.0
    gathered: float = 0.0
    exchanged: float = 0.0
    reduced: float = 0.0
    counted: set[int] = field(default_factory=set[int])
    plain: Counter[str] = field(default_factory=Counter[str])
    """How many quantized weights travel in high precision, by the reason."""

    def __str__(self) -> str:
        text = f"each of {self.parallel.ranks} ranks: {in_words(self.state, 'parameters and optimizer', self)}"
        plain = (f"{count} weights travel in high precision: {why}" for why, count in self.plain.items())
        return "; ".join([text, *plain])

    def gathers(self, module: nn.Module, p: nn.Parameter, recipe: Recipe, ranks: int) -> tuple[float, float, float]:
        """Bytes of an element of a parameter, as in `HIGH_PRECISION`."""
        if not isinstance(module, Planned) or all(p is not weight for weight in module.weights):
            return HIGH_PRECISION
        quantizer = module.plans.plan(recipe).weight.quantizer
        if why := plain_gathers(self.parallel, [quantizer]):
            if ranks > 1 and quantizer.rowwise != IDENTITY:
                self.plain[why] += 1
            return HIGH_PRECISION
        return _planes(quantizer, p, ranks)

    def parameter(self, p: nn.Parameter, ranks: int, cut: int, gathers: Sequence[float]) -> None:
        """Add a parameter over `ranks` of FSDP2, each with 1/`cut` of it. `gathers`: bytes of an element in each."""
        if id(p) in self.counted:
            return
        self.counted.add(id(p))
        elements = p.numel() / cut
        self.state += STATE * FP32 * elements / ranks
        if ranks > 1:
            self.gathered += sum(gathers) * elements * (ranks - 1) / ranks
            self.reduced += FP32 * elements

    def linear(self, name: str, module: nn.Linear, tokens: int) -> None:
        """The activations of a linear that tensor parallelism cuts; they are whole between linears."""
        tp = self.parallel.tp
        wide, narrow = module.out_features, module.in_features
        outputs, inputs = (wide, narrow) if name.endswith(COLUMNS) else (narrow, wide)
        self.gathered += BF16 * tokens * outputs * (tp - 1) / tp
        self.reduced += BF16 * tokens * inputs


def in_words(size: float, kind: str, traffic: "Forecast | Wire") -> str:
    """What a rank holds, `size` bytes of a kind, and what it sends in a step."""
    sent = [f"{getattr(traffic, what) / 2**20:.2f} MiB {what}" for what in ("gathered", "exchanged", "reduced")]
    return ", ".join([f"{size / 2**20:.1f} MiB of {kind}", *sent]) + " a step"


def require_experts(parallel: Parallel, model: nn.Module, name: str) -> None:
    """UserError if the experts of the model called `name` are to be split over ranks, and it has none."""
    if parallel.ep > 1 and not any(isinstance(module, MoE) for module in model.modules()):
        raise UserError(f"--parallel ep={parallel.ep} needs experts, which {name} lacks: --model moe")


def forecast(config: TrainConfig, recipe: Recipe, parallel: Parallel) -> Forecast:
    """The forecast for the model of `config` under a recipe. Its weights are not allocated.

    UserError if experts are to be split over ranks, and the model has none.
    """
    model = duotone.convert(models.outline(config.model, config.preset), recipe)
    require_experts(parallel, model, config.model)
    result = Forecast(parallel)
    tokens = config.preset.tokens_per_step // parallel.data
    blocks = {id(p) for each in model.modules() if isinstance(each, nn.ModuleList) for p in each.parameters()}
    for name, module in model.named_modules():
        is_cut = parallel.tp > 1 and isinstance(module, nn.Linear) and name.endswith((*COLUMNS, *ROWS))
        if is_cut and isinstance(module, nn.Linear):
            result.linear(name, module, tokens)
        for p in module.parameters(recurse=False):
            in_mixture = parallel.ep > 1 and ".mlp." in f"{name}."
            ranks = parallel.fsdp if in_mixture else parallel.data
            cut = parallel.tp if is_cut else parallel.ep if in_mixture and "router" not in name else 1
            *gathers, moved = result.gathers(module, p, recipe, ranks)
            gathers = gathers if id(p) in blocks else gathers[:1]
            result.parameter(p, ranks, cut, gathers)
            result.exchanged += moved * len(gathers) * p.numel() / ranks
        if isinstance(module, MoE) and parallel.ep > 1:
            rows = tokens * module.router.top_k
            width = module.router.weight.shape[1]
            token = _sent(module.fc1.plans.plan(recipe).input.quantizer.rowwise or IDENTITY, 128, width, 0) * width
            result.exchanged += rows * (token + 3 * BF16 * width) + 8 * module.num_experts
            result.reduced += FP32 * module.router.weight.numel() / parallel.fsdp
    return result


def _planes(quantizer: Quantizer, p: nn.Parameter, ranks: int) -> tuple[float, float, float]:
    """Bytes of an element of a weight in the gathers of forward and backward, and in an exchange before each."""
    rows, columns = p.shape
    row, col = quantizer.rowwise, quantizer.columnwise
    assert row is not None and col is not None
    step = ranks * max(row.alignment[0], col.alignment[1])
    rows = -(-rows // step) * step
    padded = rows / p.shape[0]
    moved = BF16 if rows != -(-p.shape[0] // ranks) * ranks else 0
    first = padded * _sent(row, rows, columns, 0)
    plane = Plane.empty(row, (rows, columns), partial(torch.empty, device="meta"), torch.float32)
    is_derived = row == col and plane.transposed() is not None
    return first, first if is_derived else padded * _sent(col, rows, columns, 1), moved


def plain_gathers(parallel: Parallel, quantizers: Sequence[Quantizer]) -> str:
    """Why FSDP2 gathers a weight in high precision that follows `quantizers` in turn; "" if it gathers planes."""
    if parallel.tp > 1:
        return "tensor parallelism cuts them"
    if len(set(quantizers)) > 1:
        return "a schedule changes their formats"
    if any(quantizer.is_stochastic for quantizer in quantizers):
        return "they round stochastically"
    if any(any(quantizer.delayed) and not encodes_itself(quantizer) for quantizer in quantizers):
        return "their delayed scales are of something else"
    return ""


def _sent(fmt: Format, rows: int, columns: int, dim: int) -> float:
    """Bytes of an element that travel of a plane. Its dimension `dim` has `rows`, whole blocks, and is sharded.

    What does not grow with that dimension stays, such as one scale for all elements.
    """
    shapes = [(count, columns) if dim == 0 else (columns, count) for count in (rows, 2 * rows)]
    once, twice = (plane_bytes(fmt, shape, torch.bfloat16) for shape in shapes)
    return (twice - once) / (rows * columns)
