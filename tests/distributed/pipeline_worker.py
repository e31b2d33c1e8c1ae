"""torch's pipeline schedules against one process that runs the same microbatches one after the other."""

import copy
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import checks
import torch
import torch.distributed as dist
from checks import check, same
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes

WIDTH, ROWS, MICROBATCHES, STEPS = 64, 32, 4, 2
BLOCKS, SINGLE = int(sys.argv[2]), ("1F1B", "GPipe")


class Block(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.recomputes else self.run(x)

    def run(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def network(recipe: str, *, blocks: int = BLOCKS, recomputes: bool = False, quantized: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    m = nn.Sequential(*(Block(recomputes) for _ in range(blocks))).bfloat16()
    duotone.convert(m, recipes.load(recipe), rules=())
    if quantized:
        duotone.convert_parameters(m, recipes.load(recipe))
    return m


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target).float() ** 2).mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    grows = torch.arange(1, MICROBATCHES + 1).repeat_interleave(ROWS)[:, None]
    x = (torch.randn(MICROBATCHES * ROWS, WIDTH) * grows).bfloat16()  # each microbatch has an amax of its own
    return x, torch.randn(MICROBATCHES * ROWS, WIDTH).bfloat16()


def trained(m: nn.Module, parameters: Iterable[nn.Parameter], run: Callable[[int], list[Tensor]]) -> list[Tensor]:
    """Losses and gradients of a few steps of `run`, then the weights, seeds and delayed states of this rank's part."""
    results: list[Tensor] = []
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        results += run(step)
        results += [p.grad.clone() for p in m.parameters()]
        optimizer.step()
    states = {**duotone.rng_state(m), **duotone.recipe_state(m)}
    return [*results, *(value.detach().clone() for value in (*m.parameters(), *states.values()))]


def alone(whole: nn.Sequential, stages: nn.Module, recipe: str, last_first: bool) -> list[Tensor]:
    """What one process gets that runs all stages. Its backwards run in order, or the `last_first`."""

    def run(step: int) -> list[Tensor]:
        losses = []
        with duotone.autocast(recipe=recipes.load(recipe)):
            for x, target in zip(*(each.chunk(MICROBATCHES) for each in batch(step)), strict=True):
                losses.append(loss_of(whole(x), target))
                if not last_first:
                    losses[-1].backward()
            if last_first:
                for loss in reversed(losses):
                    loss.backward()
        for p in whole.parameters():
            p.grad.div_(MICROBATCHES)
        return [loss.detach() for loss in losses] if whole[-1] in stages.modules() else []

    return trained(stages, whole.parameters(), run)


def pipelined(name: str, stages: list[pipelining.PipelineStage], modules: nn.Module, recipe: str) -> list[Tensor]:
    schedule_class = pipelining.schedules.get_schedule_class(name)
    schedule = schedule_class(stages[0] if name in SINGLE else stages, MICROBATCHES, loss_fn=loss_of)

    def run(step: int) -> list[Tensor]:
        x, target = batch(step)
        losses: list[Tensor] = []
        with duotone.autocast(recipe=recipes.load(recipe)):
            schedule.step(*[x] * (dist.get_rank() == 0), target=target, losses=losses)
        return [loss.detach() for loss in losses]

    return trained(modules, modules.parameters(), run)


def pairs(  # type: ignore[no-untyped-def]
    name: str, recipe: str, *, blocks: int = BLOCKS, compiled: bool = False, **options
) -> list[tuple[Tensor, Tensor, str]]:
    """What a schedule gives, and what one process gives. Nothing raises here, where the other rank would wait."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = network(recipe, blocks=blocks, **options)
    reference = copy.deepcopy(whole)
    each = blocks // world if name in SINGLE else 1
    starts = range(rank * each, blocks, world * each)
    parts, count = [whole[at : at + each] for at in starts], blocks // each
    stages = [
        pipelining.PipelineStage(
            part if not compiled else torch.compile(part, backend="aot_eager"),
            start // each,
            count,
            torch.device(checks.DEVICE),
        )
        for part, start in zip(parts, starts, strict=True)
    ]
    result = pipelined(name, stages, nn.ModuleList(parts), recipe)
    want = alone(reference, nn.ModuleList(reference[at : at + each] for at in starts), recipe, name == "LoopedBFS")
    assert len(result) == len(want), (len(result), len(want))
    return [
        (*pair, f"{name}, {recipe}, {at} of {len(result)}") for at, pair in enumerate(zip(result, want, strict=True))
    ]


def compare(cases: Iterable[list[tuple[Tensor, Tensor, str]]]) -> None:
    for result, want, what in itertools.chain(*[*cases]):
        same(result, want, what)


@check
def every_recipe_gives_the_bits_of_one_process(folder: Path) -> None:
    compare(pairs("1F1B", recipe) for recipe in recipes.names())


@check
def every_schedule_gives_the_bits_of_one_process(folder: Path) -> None:
    both = "nvfp4", "fp8-delayed"
    cases = {"GPipe": both, "Interleaved1F1B": both, "LoopedBFS": both[1:]}
    if torch.__version__ >= "2.13":  # zero-bubble schedules of torch 2.11 refuse every autograd.Function
        cases["InterleavedZeroBubble"] = both[:1]
    for name, of_schedule in cases.items():
        blocks = BLOCKS if name in SINGLE else 2 * BLOCKS
        compare(pairs(name, recipe, blocks=blocks) for recipe in of_schedule)


@check
def quantized_parameters_give_the_bits_of_one_process(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch asks for shapes in high precision, of which nobody has to know
        warnings.filterwarnings("ignore", ".*of this update is lost")  # the optimizer keeps no masters
        compare(pairs("1F1B", recipe, quantized=True) for recipe in ("nvfp4", "fp8-delayed"))


@check
def compiled_stages_give_the_bits_of_one_process(folder: Path) -> None:
    compare([pairs("1F1B", "fp8-delayed", compiled=True)])


@check
def recomputed_stages_give_the_bits_of_one_process(folder: Path) -> None:
    compare(pairs("1F1B", recipe, recomputes=True) for recipe in ("nvfp4", "fp8-delayed"))


@check
def delayed_scales_that_a_schedule_would_move_are_warned_of(folder: Path) -> None:
    rank, device = dist.get_rank(), torch.device(checks.DEVICE)
    stage = pipelining.PipelineStage(network("fp8-delayed")[rank], rank, dist.get_world_size(), device)
    x, target = batch(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
        schedule.step(*[x] * (rank == 0), target=target)
    assert any("schedule.step inside duotone.autocast" in str(each.message) for each in caught), caught


if __name__ == "__main__":
    checks.main()
