"""parallelize_module on converted models: DTensor weights against one process."""

import copy
import itertools
from pathlib import Path
from unittest import mock

import checks
import torch
import torch.distributed as dist
from checks import check, close, mesh, refused
from checks import same_product as same
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import duotone
import duotone_lab
from duotone import recipes
from duotone.comm import collectives
from duotone.errors import RecipeError
from duotone.recipes import Recipe, Rule, RuleRecipe

TOKENS = 32
HYBRID = RuleRecipe(rules=(Rule(fprop="mxfp8_e4m3", dgrad="fp8_e4m3_tensor", wgrad="mxfp8_e4m3"),))
RECIPES: dict[str, Recipe] = {**{name: recipes.load(name) for name in recipes.names()}, "hybrid": HYBRID}
SIZES = {"fp8-block": 256}
"""Features, so that shards are whole blocks; 64 for other recipes."""
GRADIENT = duotone.QuantizerRole("linear", "grad_output")
STOCHASTIC = {name for name, recipe in RECIPES.items() if recipe.quantizer(GRADIENT).is_stochastic}
"""Recipes that round gradients stochastically: random numbers go by the place in a shard."""


def piece(t: Tensor, dim: int = 0) -> Tensor:
    return t.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def linear(name: str, out: int | None = None) -> nn.Sequential:
    width = SIZES.get(name, 64)
    out = out or width
    torch.manual_seed(3)
    m = nn.Sequential(nn.Linear(width, out)).bfloat16()
    with torch.no_grad():
        m[0].weight[: out // 2] *= 4  # the shards' own amaxes differ, in both directions
        m[0].weight[:, : width // 2] *= 4
    return duotone.convert(m, RECIPES[name], rules=())


def distribute(m: nn.Module, weight: Placement, bias: Placement) -> None:
    """What styles do, without their hooks."""
    for name, placement in (("weight", weight), ("bias", bias)):
        m.register_parameter(name, nn.Parameter(distribute_tensor(getattr(m, name), mesh(), [placement])))


def run(m: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output and the gradients of x, weight and bias."""
    leaf = x.detach().requires_grad_()
    y = m(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad, m[0].weight.grad, m[0].bias.grad


def data(name: str, out: int | None = None) -> tuple[Tensor, Tensor]:
    width = SIZES.get(name, 64)
    out = out or width
    torch.manual_seed(5)
    x, dy = torch.randn(TOKENS, width).bfloat16(), torch.randn(TOKENS, out).bfloat16()
    x[:, width // 2 :] *= 8
    dy[:, out // 2 :] *= 16
    return x, dy


def near_sum(result: DTensor, want: Tensor, what: str) -> None:
    """A sum over the ranks: one bf16 rounding (2^-8) of each part, and one for each addition."""
    assert result.placements == (Partial(),), f"{what}: {result.placements}"
    parts = [torch.empty_like(want) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, result.to_local().contiguous())
    bound = 2.0**-7 * sum(part.double().abs() for part in parts)
    worst = ((sum(part.double() for part in parts) - want.double()).abs() - bound).max()
    assert worst <= 0, f"{what}: {worst} above the bound"


@check
def columns_equal_one_process(folder: Path) -> None:
    """Output, gradients of weight and bias to the bit; the gradient of the input is a sum over the ranks."""
    for name in RECIPES:
        x, dy = data(name)
        whole = linear(name)
        cut = copy.deepcopy(whole)
        distribute(cut[0], Shard(0), Shard(0))
        want = run(whole, x, dy)
        result = run(cut, distribute_tensor(x, mesh(), [Replicate()]), distribute_tensor(dy, mesh(), [Shard(-1)]))
        assert result[0].placements == (Shard(1),) and result[2].placements == (Shard(0),)
        same(result[0].full_tensor(), want[0], f"{name}: output")
        same(result[3].full_tensor(), want[3], f"{name}: gradient of the bias")
        if name in STOCHASTIC:
            close(result[1].full_tensor(), want[1], 0.3, f"{name}: gradient of the input")
            close(result[2].full_tensor(), want[2], 0.3, f"{name}: gradient of the weight")
        else:
            near_sum(result[1], want[1], f"{name}: gradient of the input")
            same(result[2].full_tensor(), want[2], f"{name}: gradient of the weight")


@check
def rows_equal_one_process(folder: Path) -> None:
    """All gradients to the bit; the output is a sum over the ranks, with the bias once."""
    for name in RECIPES:
        x, dy = data(name)
        whole = linear(name)
        cut = copy.deepcopy(whole)
        distribute(cut[0], Shard(1), Replicate())
        want = run(whole, x, dy)
        result = run(cut, distribute_tensor(x, mesh(), [Shard(1)]), distribute_tensor(dy, mesh(), [Replicate()]))
        near_sum(result[0], want[0], f"{name}: output")
        for at, what in ((1, "input"), (2, "weight"), (3, "bias")):
            same(result[at].full_tensor(), want[at], f"{name}: gradient of the {what}")
        assert [g.placements[0] for g in result[1:]] == [Shard(1), Shard(1), Replicate()]


@check
def both_planes_of_a_shard_agree_in_one_collective(folder: Path) -> None:
    """nvfp4 scales a gradient and its rotated transpose by amaxes of their own, a pair of elements does so too."""
    pair = RuleRecipe(rules=(Rule(fprop="fp8_e4m3_tensor", dgrad="fp8_e5m2_tensor", wgrad="fp8_e5m2_tensor"),))
    x, dy = data("nvfp4")
    for recipe, forward, backward in ((RECIPES["nvfp4"], 1, 1), (pair, 1, 1), (RECIPES["mxfp8"], 0, 0)):
        m = duotone.convert(linear("bf16"), recipe, rules=())
        distribute(m[0], Shard(0), Shard(0))
        m(distribute_tensor(x, mesh(), [Replicate()]))  # the first step compares recipes, too
        with mock.patch.object(collectives, "all_reduce", wraps=collectives.all_reduce) as reduce:
            y = m(distribute_tensor(x, mesh(), [Replicate()]))
            assert reduce.call_count == forward, (recipe.name, reduce.call_count)
            y.backward(distribute_tensor(dy, mesh(), [Shard(1)]))
            assert reduce.call_count == forward + backward, (recipe.name, reduce.call_count)


@check
def whole_weights_take_shards_of_tokens(folder: Path) -> None:
    """Scales of a whole tensor are agreed on, and gradients of parameters are summed over the ranks."""
    for name in ("fp8-current", "mxfp8", "nvfp4-row-scaled-fwd-high-precision-bwd"):
        x, dy = data(name)
        whole = linear(name)
        cut = copy.deepcopy(whole)
        distribute(cut[0], Replicate(), Replicate())
        want = run(whole, x, dy)
        result = run(cut, *(distribute_tensor(t, mesh(), [Shard(0)]) for t in (x, dy)))
        same(result[0].full_tensor(), want[0], f"{name}: output")
        same(result[1].full_tensor(), want[1], f"{name}: gradient of the input")
        for at in (2, 3):
            assert result[at].placements == (Replicate(),)
            close(result[at].to_local(), want[at], 2.0**-7, f"{name}: gradient {at}")


@check
def shards_of_tokens_are_gathered_as_codes(folder: Path) -> None:
    """Tokens keep their order. Sums over them may have another one."""
    for name in ("fp8-current", "fp8-rowwise", "mxfp8", "nvfp4-row-scaled-fwd-high-precision-bwd", "fp8-delayed"):
        for lead, dim in (((2 * TOKENS,), 0), ((2, 2 * TOKENS), 1), ((2 * TOKENS, 2), 0)):
            torch.manual_seed(5)
            x, dy = torch.randn(*lead, 64).bfloat16(), torch.randn(*lead, 64).bfloat16()
            whole = linear(name)
            cut = copy.deepcopy(whole)
            distribute(cut[0], Shard(0), Shard(0))
            want = run(whole, x, dy)
            result = run(cut, distribute_tensor(x, mesh(), [Shard(dim)]), distribute_tensor(dy, mesh(), [Shard(-1)]))
            what = f"{name} {lead}"
            same(result[0].full_tensor(), want[0], f"{what}: output")
            close(result[1].full_tensor(), want[1], 2.0**-7, f"{what}: gradient of the input")
            close(result[2].full_tensor(), want[2], 2.0**-8, f"{what}: gradient of the weight")
            same(result[3].full_tensor(), want[3], f"{what}: gradient of the bias")
            assert result[1].placements == (Shard(dim),) and result[2].placements == (Shard(0),)


@check
def sums_are_scattered_over_tokens(folder: Path) -> None:
    """Codes of the gradient of the output are gathered: those that one process makes."""
    for name in ("fp8-current", "fp8-rowwise", "mxfp8", "nvfp4-row-scaled-fwd-high-precision-bwd", "fp8-delayed"):
        for lead, dim in (((2 * TOKENS,), 0), ((2, 2 * TOKENS), 1), ((2 * TOKENS, 2), -3)):
            torch.manual_seed(5)
            x, dy = torch.randn(*lead, 64).bfloat16(), torch.randn(*lead, 64).bfloat16()
            whole = linear(name)
            cut = copy.deepcopy(whole)
            distribute(cut[0], Shard(1), Replicate())
            cut[0].scatter_dim = dim
            want = run(whole, x, dy)
            rows = Shard(dim % x.dim())
            result = run(cut, distribute_tensor(x, mesh(), [Shard(-1)]), distribute_tensor(dy, mesh(), [rows]))
            what = f"{name} {lead}"
            assert [g.placements[0] for g in result] == [rows, Shard(x.dim() - 1), Shard(1), Replicate()]
            close(result[0].full_tensor(), want[0], 2.0**-7, f"{what}: output")
            same(result[1].full_tensor(), want[1], f"{what}: gradient of the input")
            close(result[2].full_tensor(), want[2], 2.0**-8, f"{what}: gradient of the weight")
            close(result[3].full_tensor(), want[3], 2.0**-7, f"{what}: gradient of the bias")


def network(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, SIZES.get(name, 128)), nn.ReLU(), nn.Linear(SIZES.get(name, 128), 64)).bfloat16()
    return duotone.convert(m, RECIPES[name], rules=())


def train(m: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """The losses of three steps, and the first gradients."""
    torch.manual_seed(1)
    x, y = torch.randn(TOKENS, 64).bfloat16(), torch.randn(TOKENS, 64).bfloat16()
    optimizer, losses, first = torch.optim.SGD(m.parameters(), lr=0.5), [], []
    for _ in range(3):
        loss = ((m(x) - y).float() ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in m.parameters()]
        first = first or [grad.clone() for grad in grads]
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), first


@check
def styles_train_like_one_process(folder: Path) -> None:
    """ColwiseParallel and RowwiseParallel, before or after convert: sums in bf16 are rounded once more."""
    for at, (name, recipe) in enumerate(RECIPES.items()):
        whole = network(name)
        cut = copy.deepcopy(whole)
        if at % 2:
            duotone.revert(cut)
        parallelize_module(cut, mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if at % 2:
            duotone.convert(cut, recipe, rules=())
        (result, grads), (want, want_grads) = train(cut), train(whole)
        close(result, want, 5e-3, f"{name}: losses")
        for i, (g, w) in enumerate(zip(grads, want_grads, strict=True)):
            close(g, w, 0.4 if name in STOCHASTIC else 0.1, f"{name}: gradient {i}")
        for parameter in cut.parameters():
            assert parameter.grad.placements == parameter.placements
        assert cut[0].weight.placements == (Shard(0),) and cut[2].weight.placements == (Shard(1),)


@check
def delayed_scales_are_those_of_the_whole(folder: Path) -> None:
    """Without an amax_reduction_group the group of the mesh reduces."""
    x, dy = data("fp8-delayed")
    for weight, bias, of_x, of_dy in (
        (Shard(0), Shard(0), Replicate(), Shard(1)), (Shard(1), Replicate(), Shard(1), Replicate())
    ):  # fmt: skip
        whole = linear("fp8-delayed")
        cut = copy.deepcopy(whole)
        distribute(cut[0], weight, bias)
        for _ in range(2):
            run(whole, x, dy)
            run(cut, distribute_tensor(x, mesh(), [of_x]), distribute_tensor(dy, mesh(), [of_dy]))
            for state in ("duotone_forward", "duotone_backward"):
                same(getattr(cut[0], state).scale, getattr(whole[0], state).scale, f"{weight}: {state}")
    alone = duotone.convert(linear("bf16"), recipes.DelayedScaling(reduce_amax=False), rules=())
    distribute(alone[0], Shard(0), Shard(0))
    refused(lambda: alone(distribute_tensor(x, mesh(), [Replicate()])), "keep reduce_amax", RecipeError)
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with duotone.autocast(recipe=RECIPES["fp8-delayed"], amax_reduction_group=group):
        refused(lambda: alone(distribute_tensor(x, mesh(), [Replicate()])), "contains the tensor-parallel", RecipeError)


@check
def shards_may_be_uneven_or_empty(folder: Path) -> None:
    """One output feature over two ranks: the second holds nothing and takes part in every reduction."""
    for name in ("fp8-current", "mxfp8", "nvfp4-row-scaled-fwd-high-precision-bwd"):
        for out in (1, 2 * 32 + 1):
            x, dy = data(name, out)
            whole = linear(name, out)
            cut = copy.deepcopy(whole)
            distribute(cut[0], Shard(0), Shard(0))
            want = run(whole, x, dy)
            result = run(cut, distribute_tensor(x, mesh(), [Replicate()]), distribute_tensor(dy, mesh(), [Shard(1)]))
            same(result[0].full_tensor(), want[0], f"{name}: output")
            same(result[2].full_tensor(), want[2], f"{name}: gradient of the weight")


class Block(nn.Module):
    """A norm and an MLP beside a residual stream (batch, tokens, width)."""

    def __init__(self, name: str, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.act = norm, activation
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        with torch.no_grad():
            self.norm.weight.copy_(torch.randn(64))
        duotone.convert(self.bfloat16(), RECIPES[name], rules=())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def sequence_plan(gathers_codes: bool) -> dict[str, ParallelStyle]:
    """What stands around the linears holds shards of tokens. Codes are gathered by the linears, or values by torch."""
    up = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    if gathers_codes:
        up.desired_input_layouts = (Shard(1),)
    down = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return {"norm": SequenceParallel(), "up": up, "down": down}


@check
def sequence_parallel_blocks_equal_one_process(folder: Path) -> None:
    """Norms of torch and of Duotone on shards of tokens; activations of Duotone on shards of features."""
    torch.manual_seed(4)
    x, dy = torch.randn(2, TOKENS, 64).bfloat16(), torch.randn(2, TOKENS, 64).bfloat16()
    for name, codes in itertools.product(("fp8-current", "mxfp8"), (False, True)):
        for norm, act in ((nn.LayerNorm, nn.GELU), (duotone.RMSNorm, duotone.ops.GELU)):
            whole = Block(name, norm(64), act())
            cut = parallelize_module(copy.deepcopy(whole), mesh(), sequence_plan(codes))
            cut.down.scatter_dim = 1 if codes else None
            leaf, shard = x.clone().requires_grad_(), distribute_tensor(x, mesh(), [Shard(1)]).requires_grad_()
            want, result = whole(leaf), cut(shard)
            want.backward(dy)
            result.backward(distribute_tensor(dy, mesh(), [Shard(1)]))
            assert result.placements == shard.grad.placements == (Shard(1),)
            close(result.full_tensor(), want, 1e-2, f"{name}: output")
            close(shard.grad.full_tensor(), leaf.grad, 3e-2, f"{name}: gradient of the input")
            for (key, p), q in zip(cut.named_parameters(), whole.parameters(), strict=True):
                close(p.grad.full_tensor(), q.grad, 3e-2, f"{name}: gradient of {key}")
                assert norm is nn.LayerNorm or p.grad.placements == p.placements


def cut_network(name: str) -> nn.Sequential:
    return parallelize_module(network(name), mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


@check
def shards_draw_random_numbers_of_their_own(folder: Path) -> None:
    """Both ranks hold the same rows of dy and of the weight. Rank 0 rounds like one process."""
    torch.manual_seed(5)
    x, half = torch.randn(TOKENS, 64).bfloat16(), torch.randn(TOKENS, 32).bfloat16()
    alone, cut = linear("nvfp4", 32), linear("nvfp4")
    with torch.no_grad():
        cut[0].weight.copy_(torch.cat([alone[0].weight] * 2))
    distribute(cut[0], Shard(0), Shard(0))
    want = run(alone, x, half)[2]
    dy = distribute_tensor(torch.cat([half, half], 1), mesh(), [Shard(1)])
    first, second = run(cut, distribute_tensor(x, mesh(), [Replicate()]), dy)[2].full_tensor().chunk(2)
    same(first, want, "rank 0")
    assert not torch.equal(second, want)
    close(second, want, 0.3, "rank 1")


@check
def recomputes_microbatches_and_taps_change_no_bit(folder: Path) -> None:
    """A checkpoint recomputes with the seeds and scales of its forward; cached planes are those of the weight."""
    x, _ = data("mxfp8")
    for name in ("fp8-delayed", "nvfp4"):
        plain, again, tapped = (cut_network(name) for _ in range(3))
        tap = duotone.observe.with_statistics(RECIPES[name], duotone.observe.Tap())
        for m, call in (
            (plain, plain),
            (again, lambda t, m=again: checkpoint(m, t, use_reentrant=False)),
            (tapped, tapped),
        ):
            with duotone.autocast(recipe=tap if m is tapped else RECIPES[name]):
                y = call(x.clone().requires_grad_())
            y.float().square().mean().backward()
        for p, q, r in zip(plain.parameters(), again.parameters(), tapped.parameters(), strict=True):
            same(q.grad.to_local(), p.grad.to_local(), f"{name}: checkpoint")
            same(r.grad.to_local(), p.grad.to_local(), f"{name}: tap")
    m = cut_network("fp8-current")
    for first in (True, False, True):
        same(m[2](m[1](m[0](x, is_first_microbatch=first)), is_first_microbatch=first), m(x), f"microbatch {first}")


@check
def models_are_planned_measured_saved_and_reverted(folder: Path) -> None:
    x, _ = data("mxfp8")
    m = cut_network("fp8-delayed")
    keys = network("fp8-delayed").state_dict().keys()
    assert m.state_dict().keys() == keys and any("duotone_forward" in key for key in keys)
    y = m(x)
    assert len(duotone.plan(m)) == len(duotone.plan(network("fp8-delayed")))
    assert duotone_lab.ledger(m, lambda: m(x).float().mean()) is not None
    loaded = cut_network("fp8-delayed")
    loaded.load_state_dict(m.state_dict())
    with torch.no_grad():
        same(copy.deepcopy(loaded)(x), m(x), "a copy of what was loaded")
    duotone.revert(m)
    assert type(m[0]) is nn.Linear and m[0].weight.placements == (Shard(0),)
    close(m(x), y, 0.1, "high precision")


@check
def placements_that_do_not_go_together_are_refused(folder: Path) -> None:
    x, _ = data("mxfp8")
    cut = linear("mxfp8")
    distribute(cut[0], Shard(0), Shard(0))
    refused(lambda: cut(x), "its input is not")
    refused(lambda: cut(distribute_tensor(x, mesh(), [Shard(1)])), "allowed are an input of Shard(-1) with Shard(1)")
    refused(
        lambda: cut(distribute_tensor(x[:7], mesh(), [Shard(0)])),
        "has no dimension 0 before its last that divides over 2 ranks",
    )
    rows = linear("mxfp8")
    distribute(rows[0], Shard(1), Replicate())
    for rows[0].scatter_dim in (0, 1, -1, 2):
        refused(lambda: rows(distribute_tensor(x[:7], mesh(), [Shard(1)])), "before its last that divides over 2 ranks")
    partial = DTensor.from_local(x, mesh(), [Partial()])
    refused(lambda: cut(partial), "Replicate() or Shard(dim)")
    odd = linear("mxfp8")
    distribute(odd[0], Shard(1), Shard(0))
    refused(lambda: odd(distribute_tensor(x, mesh(), [Shard(1)])), "its bias has to be a DTensor of Replicate()")
    refused(lambda: linear("mxfp8")(distribute_tensor(x, mesh(), [Replicate()])), "0 takes local tensors")


@check
def what_cannot_become_dtensors_stays_whole(folder: Path) -> None:
    group = dist.group.WORLD
    quantized = linear("fp8-current")
    duotone.convert_parameters(quantized, RECIPES["fp8-current"])
    for m in (duotone.Linear(64, 64, parallel_mode="column", tp_group=group),):
        before = dict(m.named_parameters())
        refused(lambda m=m: parallelize_module(nn.Sequential(m), mesh(), {"0": ColwiseParallel()}), "DTensor")
        assert dict(m.named_parameters()) == before
    refused(lambda: quantized[0].register_parameter("weight", distribute_tensor(torch.ones(2), mesh())), "DTensor")


if __name__ == "__main__":
    checks.main()
