"""Delayed amaxes over process groups. The second rank is in two groups: with the first, and with the third if it is."""

import datetime
from pathlib import Path

import checks
import torch
import torch.distributed as dist
from checks import check, same
from torch import nn

import duotone
from duotone.errors import UserError
from duotone.recipes import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)
GROUPS: dict[str, dist.ProcessGroup] = {}


def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Ranks {0, 1} and ranks {1, 2}; of two ranks only {1}."""
    if not GROUPS:
        short = datetime.timedelta(seconds=180)
        for name, ranks in (("low", [0, 1]), ("high", [1, 2][: dist.get_world_size() - 1])):
            GROUPS[name] = dist.new_group(ranks, timeout=short)
    return GROUPS["low"], GROUPS["high"]


def layers(recipe: DelayedScaling = RECIPE) -> nn.ModuleDict:
    """A fresh model, whose weights are equal on all ranks."""
    torch.manual_seed(7)
    model = nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in ("a", "b")})
    return duotone.convert(model, recipe, ())


def amaxes(layer: nn.Module) -> tuple[float, float]:
    """The newest amaxes of input and gradient."""
    return layer.duotone_forward.amax_history[-1, 0].item(), layer.duotone_backward.amax_history[-1, 0].item()


def constant(value: float) -> torch.Tensor:
    return torch.full((8, 32), value).requires_grad_()


@check
def each_module_takes_the_largest_amax_of_its_own_group_alone(folder: Path) -> None:
    """Groups whose rank sets differ, in one backward: over all groups, or over the first only, values are others."""
    rank, (low, high), model = dist.get_rank(), groups(), layers()
    met = {"a": {0: 1.0, 1: 2.0}, "b": {1: 3.0, 2: 5.0}}
    for inner in (True, False):
        loss = torch.zeros(())
        for name, group in (("a", low), ("b", high)):
            if rank in met[name]:
                value = met[name][rank] * (1 if inner else 7)
                with duotone.autocast(recipe=RECIPE, amax_reduction_group=group):
                    loss = loss + (model[name](constant(value)) * value).sum()
        loss.backward()
        for name, largest in (("a", 2.0), ("b", 5.0 if dist.get_world_size() > 2 else 3.0)):
            if rank in met[name]:
                expected = largest * (1 if inner else 7)
                assert amaxes(model[name]) == (expected, expected), (name, amaxes(model[name]))


@check
def the_first_scale_is_that_of_the_largest_amax_of_the_group(folder: Path) -> None:
    rank, model = dist.get_rank(), layers()
    with duotone.autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
        y = model["a"](constant(1.0 + rank))
        same(model["a"].duotone_forward.scale[:1], torch.tensor([448.0]) / dist.get_world_size(), "within the step")
    (y * (1.0 + rank)).sum().backward()
    same(model["a"].duotone_backward.scale[:1], torch.tensor([57344.0]) / dist.get_world_size(), "after the step")


@check
def what_is_not_finite_on_one_rank_freezes_no_scale(folder: Path) -> None:
    """The other ranks' amaxes count in that very step."""
    rank = dist.get_rank()
    for bad in (float("inf"), float("nan")):
        model = layers()
        for step in range(3):
            value = bad if step == 1 and rank == 1 else 2.0 ** (step + rank)
            with duotone.autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
                y = model["a"](constant(value))
            y.backward(torch.full_like(y, value))
            largest = 2.0 ** max(step + other for other in range(dist.get_world_size()) if (step, other) != (1, 1))
            same(model["a"].duotone_forward.scale[:1], torch.tensor([448.0]) / largest, f"{bad} {step}")
            same(model["a"].duotone_backward.scale[:1], torch.tensor([57344.0]) / largest, f"{bad} {step} backward")
        skipped = model["a"].duotone_backward.events[0, 0].item()
        assert skipped == int(rank == 1 and bad == float("inf")), skipped  # a NaN is no magnitude


@check
def ranks_that_ran_different_modules_all_raise_and_keep_their_scales(folder: Path) -> None:
    """In forward, in backward, with scales of 1 and later; and the next step is fine."""
    rank = dist.get_rank()
    module = "b" if rank == 1 else "a"
    for recipe in (RECIPE, DelayedScaling(amax_history_len=4, first_scale_from_amax=False)):
        model = layers(recipe)

        def step(name: str, recipe: DelayedScaling = recipe, model: nn.ModuleDict = model) -> None:
            with duotone.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
                y = model[name](constant(1.0 + rank))
            y.sum().backward()

        for warm in (False, True):
            if warm:
                step("a"), step("b")
            before = duotone.recipe_state(model)
            try:
                step(module)
            except UserError as error:
                other = "a" if module == "b" else "b"
                text = str(error)
                assert f"rank {rank} has {module}.duotone_forward" in text and f"{other}.duotone" in text, text
                assert "\n" not in text
            else:
                raise AssertionError("two modules got one scale")
            after = duotone.recipe_state(model)
            assert all(torch.equal(before[key], after[key]) for key in before)
            dist.barrier()
        step("a")
        assert amaxes(model["a"])[0] == dist.get_world_size()


@check
def a_backward_that_differs_raises_on_all_ranks(folder: Path) -> None:
    rank, model = dist.get_rank(), layers()
    for _ in range(2):
        with duotone.autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
            loss = model["a"](constant(1.0)).sum() + model["b"](constant(1.0)).sum()
        loss.backward()
    with duotone.autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
        losses = [model[name](constant(1.0)).sum() for name in ("a", "b")]
    try:
        losses[rank % 2].backward()
    except UserError as error:
        assert "did not record the same amaxes" in str(error)
    else:
        raise AssertionError("two modules got one scale")


if __name__ == "__main__":
    checks.main()
