"""The laboratory's trainer over two or four ranks against one process."""

import contextlib
import functools
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import checks
import torch
import torch.distributed as dist
from checks import check, same

from duotone import recipes
from duotone_lab.cli import main, parallel_run
from duotone_lab.training import comparison, data, presets
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.forecast import Parallel, forecast
from duotone_lab.training.parallel import ParallelTrainer
from duotone_lab.training.trainer import Trainer

WORLD = int(sys.argv[2])
CASES = (
    (Parallel(fsdp=WORLD), "gpt", "fp8-delayed"),
    (Parallel(fsdp=WORLD), "gpt", "mxfp8"),
    (Parallel(fsdp=WORLD // 2, tp=2), "gpt", "mxfp8"),
    (Parallel(fsdp=WORLD // 2, ep=2), "moe", "fp8-current"),
    (Parallel(tp=2, ep=WORLD // 2), "moe", "mxfp8"),
)

HISTORY = {"train_loss": [[1, 0.5], [2, 0.25]], "heldout_loss": []}


def on_one_rank(run: Callable[[], list[Any]]) -> list[Any]:
    """What the first rank computes alone, on all ranks."""
    results = [run() if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(results)
    return results[0]


def losses_of(trainer: Trainer, steps: int = 4) -> list[float]:
    """Of the steps, and the held-out one after them."""
    return [*(trainer.step() for _ in range(steps)), trainer.heldout_loss()]


@functools.cache
def corpus() -> data.Corpus:
    return data.load((), context=presets.get("tiny").model.context)


@functools.cache
def uninterrupted(folder: Path, case: tuple[Parallel, str, str]) -> tuple[ParallelTrainer, list[float]]:
    """A trainer that was saved after two of its four steps, and `losses_of` it."""
    parallel, model, recipe = case
    config = TrainConfig(presets.get("tiny"), steps=4, device=checks.DEVICE, model=model)
    trainer = ParallelTrainer(parallel, config, recipes.load(recipe), corpus())
    losses = [trainer.step(), trainer.step()]
    trainer.save(folder / f"{parallel}-{model}-{recipe}", HISTORY)
    return trainer, [*losses, *losses_of(trainer, 2)]


@check
def losses_are_those_of_one_process_up_to_the_order_of_sums(folder: Path) -> None:
    for case in CASES:
        parallel, _, recipe = case
        trainer, losses = uninterrupted(folder, case)
        config = trainer.config
        one = Trainer(config, recipes.load(recipe), corpus())
        pairs = list(zip(losses, on_one_rank(functools.partial(losses_of, one)), strict=True))
        assert all(abs(result - want) < 4e-3 * want for result, want in pairs), (parallel, pairs)
        assert {row.module for row in trainer.plan()} == {row.module for row in one.plan()}
        assert len(trainer.ranks()) == WORLD
        expected, wire = forecast(config, recipes.load(recipe), parallel), trainer.wire
        assert wire is not None
        for what in ("gathered", "exchanged", "reduced"):
            bytes_of_ranks = torch.tensor(float(getattr(wire, what)))  # a router gives ranks different rows
            dist.all_reduce(bytes_of_ranks)
            result, want = bytes_of_ranks.item() / WORLD, getattr(expected, what)
            assert abs(result - want) <= 0.05 * want, f"{parallel}, {recipe}: {what} {result}, predicted {want}"


@check
def the_command_compares_recipes_over_all_ranks(folder: Path) -> None:
    """`compare --parallel` in these processes. The first rank alone prints, and writes one report.

    One that all ranks leave in the last step of a run goes on from its checkpoint before that step, to equal losses.
    """
    out, again, printed, steps = folder / "compared", folder / "again", io.StringIO(), list[int]()
    step = ParallelTrainer.step

    def dying(self: ParallelTrainer, *arguments: Any, **options: Any) -> float:
        steps.append(self.completed + 1)
        if len(steps) == 6:
            raise LookupError("a bug")
        return step(self, *arguments, **options)

    where = f"--parallel fsdp={WORLD} --device {checks.DEVICE}"
    command = f"compare {where} --preset tiny --steps 3 --seeds 2 --recipes mxfp8 --out"
    with (
        mock.patch.object(parallel_run, "started", lambda *_: contextlib.nullcontext(dist.get_rank())),
        contextlib.redirect_stdout(printed),
    ):
        assert main.run([*command.split(), str(out)]) == 0
        with mock.patch.object(ParallelTrainer, "step", dying):
            with contextlib.suppress(LookupError):
                main.run([*command.split(), str(again), "--save-every", "2"])
            assert main.run([*f"compare --resume --parallel fsdp={WORLD} --out".split(), str(again)]) == 0
    assert steps == [1, 2, 3, 1, 2, 3, 3, *[1, 2, 3] * 2], steps
    assert printed.getvalue().count("Report: ") == 2 * (dist.get_rank() == 0), printed.getvalue()
    dist.barrier()
    result, other = (json.loads((each / "result.json").read_text()) for each in (out, again))
    curves = [
        [(run["train_loss"], run["heldout_loss"], run["repeats"]) for run in each["runs"]] for each in (result, other)
    ]
    assert curves[0] == curves[1] and not (again / "unfinished").exists()
    config = TrainConfig(presets.get("tiny"), steps=3, device=checks.DEVICE)
    runs = comparison.plan_runs(config, [recipes.load("mxfp8")], seeds=2)
    for run in runs:
        run.is_observed = False
    compared = on_one_rank(lambda: comparison.compare(config, runs, corpus(), make=Trainer)["runs"])
    ends = [[entry["final_heldout_loss"] for entry in each] for each in (result["runs"], compared)]
    assert all(abs(output - want) < 4e-3 * want for output, want in zip(*ends, strict=True)), ends
    assert [entry["error"] for entry in result["runs"]] == [None, None] and not result["partial"]
    assert all(
        f"{WORLD} ranks" in str(result) or f"rank {WORLD - 1}" in str(entry["events"]) for entry in result["runs"]
    )


@check
def a_loss_that_is_not_finite_on_one_rank_stops_all(folder: Path) -> None:
    config = TrainConfig(presets.get("tiny"), steps=4, device=checks.DEVICE)
    trainer = ParallelTrainer(Parallel(fsdp=WORLD), config, recipes.load("mxfp8"), corpus())
    forward = trainer.model.forward
    if dist.get_rank():
        trainer.model.forward = lambda *batch: forward(*batch) * float("nan")
    assert math.isnan(trainer.step()) and not trainer.optimizer.state(), "no rank took the step"


@check
def a_resumed_trainer_has_the_bits_of_one_that_went_on(folder: Path) -> None:
    for case in CASES:
        parallel, model, recipe = case
        trainer, losses = uninterrupted(folder, case)
        resumed = ParallelTrainer(parallel, trainer.config, recipes.load(recipe), corpus())
        history, _ = resumed.resume(folder / f"{parallel}-{model}-{recipe}" / "step-00000002")
        assert history == HISTORY and resumed.completed == 2
        assert losses_of(resumed, 2) == losses[2:], parallel
        state, want = resumed.optimizer.state(), trainer.optimizer.state()
        assert state.keys() == want.keys()
        for name, tensor in want.items():
            same(state[name], tensor, f"{parallel}, {name}")


if __name__ == "__main__":
    checks.main("cpu")
