"""Experts on two ranks against one process that has all experts and all tokens."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checks
import torch
import torch.distributed as dist
from checks import check, same
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import duotone
from duotone import Quantizer, recipes
from duotone.distributed import load, save
from duotone.errors import UserError
from duotone.modules import moe
from duotone.tensor import Usage

WIDTH, EXPERTS, TOKENS = 128, 4, (48, 80)
CASES = ("mxfp8", "fp8-current", "fp8-rowwise", "fp8-block", "nvfp4", "mxfp8-fwd-nvfp4-bwd", "bf16")
LIMITS = {"mxfp8": 0.52, "fp8-current": 0.52, "fp8-rowwise": 0.52, "fp8-block": 0.52, "nvfp4": 0.29}
"""Bytes of a dispatch, of those of bf16 tokens."""


class RoundTrip(torch.autograd.Function):
    """What a dispatch leaves of the tokens, in one process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer) -> Tensor:
        plane = quantizer.encode(x, Usage(True, False)).rowwise
        assert plane is not None
        return plane.dequantize(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@contextmanager
def tokens_sent(quantizer: Quantizer) -> Iterator[None]:
    rows: Callable[[Any, Tensor], Tensor] = moe.Routing.rows
    moe.Routing.rows = lambda self, x: RoundTrip.apply(rows(self, x), quantizer)  # type: ignore
    try:
        yield
    finally:
        moe.Routing.rows = rows  # type: ignore


class Sent(TorchDispatchMode):
    """The bytes of each exchange that starts within."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "all_to_all_single" in str(func):
            self.bytes.append(args[0].numel() * args[0].element_size())
        return func(*args, **(kwargs or {}))


def mixtures(recipe: str, **options: Any) -> tuple[moe.MoE, moe.MoE]:
    """The same mixture over all ranks, and whole."""
    torch.manual_seed(0)
    arguments = (WIDTH, 96, EXPERTS)
    shared = {"params_dtype": torch.bfloat16, "recipe": recipes.load(recipe), "bias": True, "name": "experts"}
    whole = duotone.MoE(*arguments, **shared)
    part = duotone.MoE(*arguments, ep_group=dist.group.WORLD, **shared, **options)
    part.load_state_dict(whole.state_dict())
    return part, whole


def batch(sizes: tuple[int, ...] = TOKENS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    x, dy = torch.randn(sum(sizes), WIDTH).bfloat16(), torch.randn(sum(sizes), WIDTH).bfloat16()
    x[sizes[0] :] *= 4  # the ranks' amaxes differ
    return x, dy


def rows_of_rank(t: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return t.split(sizes)[dist.get_rank()]


def run(m: moe.MoE, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = m(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad  # type: ignore[return-value]


def compare(part: moe.MoE, whole: moe.MoE, sizes: tuple[int, ...] = TOKENS) -> list[int]:
    """The bytes of each exchange of a forward, after all bits were compared."""
    x, dy = batch(sizes)
    with Sent() as sent:
        y, dx = run(part, rows_of_rank(x, sizes), rows_of_rank(dy, sizes))
    with tokens_sent(part.token_quantizer()):
        want = run(whole, x, dy)
    same(y, rows_of_rank(want[0], sizes), "y")
    same(dx, rows_of_rank(want[1], sizes), "dx")
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in part.state_dict(keep_vars=True).items():
        if "router" not in name and "duotone" not in name:
            same(p.grad, gradients[name], name)
    summed = part.router.weight.grad.float()
    dist.all_reduce(summed)
    expected = gradients["router.weight"].float()
    # sums of the ranks and of one process are rounded to bf16, by 2^-9 each, and may cancel
    torch.testing.assert_close(summed, expected, rtol=0, atol=2.0**-7 * expected.abs().max().item())
    return sent.bytes


@check
def experts_of_all_ranks_give_the_bits_of_one_process(folder: Path) -> None:
    for recipe in CASES:
        compare(*mixtures(recipe))


@check
def a_rank_without_tokens_takes_part(folder: Path) -> None:
    for sizes in ((0, 64), (64, 0)):
        compare(*mixtures("fp8-current"), sizes)


@check
def experts_without_tokens_take_part(folder: Path) -> None:
    part, whole = mixtures("mxfp8")
    for m in (part, whole):
        with torch.no_grad():
            m.router.weight.zero_()  # ties go to the first experts, which are those of rank 0
    compare(part, whole)


@check
def a_dispatch_sends_codes_and_scales_alone(folder: Path) -> None:
    for recipe, limit in LIMITS.items():
        counts, dispatch, combine, *backward = compare(*mixtures(recipe))
        plain = 2 * TOKENS[dist.get_rank()] * WIDTH * 2
        assert dispatch <= limit * plain, (recipe, dispatch / plain)
        assert counts == 8 * EXPERTS and len(backward) == 2, (counts, backward)
        assert backward[0] == plain and combine == backward[1], "results and gradients travel in bf16"


@check
def a_capacity_that_holds_all_rows_changes_no_bit(folder: Path) -> None:
    for recipe in ("mxfp8", "fp8-current", "fp8-rowwise", "fp8-block"):
        compare(*mixtures(recipe, ep_capacity=2 * max(TOKENS)))
    compare(*mixtures("fp8-current", ep_capacity=64), (0, 32))


@check
def under_a_capacity_the_host_waits_for_no_count(folder: Path) -> None:
    """And a graph has no break, if it is not torch 2.11 that traces it."""
    x, dy = (rows_of_rank(t, (48, 48)) for t in batch((48, 48)))
    part, _ = mixtures("mxfp8", ep_capacity=96)
    want = run(part, x, dy)
    torch._dynamo.reset()
    whole = not torch.__version__.startswith("2.11")
    for result, eager in zip(run(torch.compile(part, fullgraph=whole, backend="aot_eager"), x, dy), want, strict=True):
        same(result, eager)


@check
def rows_beyond_a_capacity_add_nothing(folder: Path) -> None:
    sizes, capacity = (48, 48), 16
    (part, _), (full, _) = mixtures("bf16", ep_capacity=capacity), mixtures("bf16")
    x, dy = (rows_of_rank(t, sizes) for t in batch(sizes))
    with torch.no_grad():
        _, index = part.router(x)
    size, local = dist.get_world_size(), EXPERTS // dist.get_world_size()
    order = torch.argsort(index.flatten(), stable=True)
    room, stays = [capacity] * size, torch.zeros(index.numel(), dtype=torch.bool)
    for row in order.tolist():  # by expert, as rows lie
        rank = int(index.flatten()[row]) // local
        stays[row], room[rank] = room[rank] > 0, room[rank] - 1
    assert not stays.all() and stays.any()
    router = full.router.forward
    full.router.forward = lambda t: (router(t)[0] * stays.view(index.shape), router(t)[1])  # type: ignore
    for result, want in zip(run(part, x, dy), run(full, x, dy), strict=True):
        torch.testing.assert_close(result, want, rtol=2.0**-7, atol=2.0**-7)


@check
def delayed_scales_ask_for_a_format_of_dispatch(folder: Path) -> None:
    part, _ = mixtures("fp8-delayed")
    x, _ = batch()
    try:
        part(rows_of_rank(x, TOKENS))
    except UserError as error:
        assert "give dispatch_format=" in str(error), error
    else:
        raise AssertionError("tokens were sent under the scales of one rank's experts")
    compare(*mixtures("fp8-delayed", dispatch_format="fp8_e4m3_row"))
    part, whole = mixtures("fp8-delayed", dispatch_format="fp8_e4m3_row")
    with torch.no_grad():  # the largest weight of one expert is not the largest one of those of other ranks
        for i in range(EXPERTS):
            whole.fc1.get_parameter(f"weight{i}").mul_(4.0**i)
    part.load_state_dict(whole.state_dict())
    with duotone.autocast(recipe=recipes.load("fp8-delayed"), amax_reduction_group=dist.group.WORLD):
        compare(part, whole)


@check
def pickles_hold_no_group_and_copies_do(folder: Path) -> None:
    part, _ = mixtures("mxfp8")
    x, _ = batch()
    y = part(rows_of_rank(x, TOKENS))
    same(copy.deepcopy(part)(rows_of_rank(x, TOKENS)), y, "a copy")
    loaded = pickle.loads(pickle.dumps(part))
    assert loaded.ep_group == ""
    try:
        loaded(rows_of_rank(x, TOKENS))
    except UserError as error:
        assert "pass a group of this process" in str(error), error
    loaded.set_expert_parallel_group(dist.group.WORLD)
    same(loaded(rows_of_rank(x, TOKENS)), y, "after a pickle")


@check
def a_checkpoint_numbers_experts_over_all_ranks(folder: Path) -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    part, whole = mixtures("mxfp8")
    compare(part, whole)
    dist.all_reduce(part.router.weight.grad)
    optimizer = torch.optim.AdamW(part.parameters(), foreach=False)
    optimizer.step()
    save(folder / "step-1", part, optimizer)
    load(folder / "step-1", whole, loaded := torch.optim.AdamW(whole.parameters()), group=alone)
    wholes = dict(whole.named_parameters())
    for name, p in part.state_dict(keep_vars=True).items():
        same(wholes[name].detach(), p.detach(), name)
        same(loaded.state[wholes[name]]["exp_avg"], optimizer.state[p]["exp_avg"], f"moment of {name}")
    save(folder / "step-2" / str(dist.get_rank()), whole, loaded, group=alone)
    dist.barrier()  # what rank 0 saved is loaded next
    with torch.no_grad():
        for p in part.parameters():
            p.zero_()
    load(folder / "step-2" / "0", part, optimizer)
    for name, p in part.state_dict(keep_vars=True).items():
        if "router" not in name:
            same(p.detach(), wholes[name].detach(), name)


if __name__ == "__main__":
    checks.main()
