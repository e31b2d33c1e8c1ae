"""Column- and row-parallel linears with sequence parallelism against single-process references."""

import contextlib
import copy
import dataclasses
import itertools
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import checks
import torch
import torch.distributed as dist
from checks import check, same
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

import duotone
from duotone import CustomRecipe, Quantizer, formats, recipes
from duotone.distributed import require_same_recipes
from duotone.errors import RecipeError, UserError
from duotone.tensor import LOCAL, Planes
from duotone_lab.memory.wire import Wire

TOKENS, WIDE, NARROW = 64, 128, 96
SEEN: dict[str, Planes] = {}


@dataclass(frozen=True)
class Recording(Quantizer):
    """Keeps the planes that it made under the tensor's type."""

    kind: str = ""

    def encode(self, x, usage=duotone.tensor.BOTH, ctx=LOCAL):  # type: ignore[no-untyped-def]
        SEEN[self.kind] = super().encode(x, usage, ctx)
        return SEEN[self.kind]


def recording(role):  # type: ignore[no-untyped-def]
    if role is None:
        return Quantizer()
    fmt = formats.get("fp8_e5m2_tensor" if role.tensor_type == "grad_output" else "fp8_e4m3_tensor")
    return Recording(fmt, fmt, kind=role.tensor_type)


FP8 = CustomRecipe(qfactory=recording)


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    x, dy = torch.randn(TOKENS, WIDE).bfloat16(), torch.randn(TOKENS, NARROW).bfloat16()
    x[TOKENS // 2 :] *= 8  # the shards' own amaxes differ
    dy[TOKENS // 2 :] *= 16
    return x, torch.randn(NARROW, WIDE).bfloat16(), torch.randn(NARROW).bfloat16(), dy


def piece(t: Tensor, dim: int = 0) -> Tensor:
    return t.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def parallel(mode: str, weight: Tensor, bias: Tensor, recipe=FP8, group=None, sequence=True) -> duotone.Linear:  # type: ignore[no-untyped-def]
    m = duotone.Linear(
        WIDE, NARROW, params_dtype=torch.bfloat16, recipe=recipe, parallel_mode=mode,
        tp_group=group or dist.group.WORLD, sequence_parallel=sequence,
    )  # fmt: skip
    with torch.no_grad():
        m.weight.copy_(piece(weight, 0 if mode == "column" else 1))
        m.bias.copy_(piece(bias) if mode == "column" else bias)
    return m


def run(m: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = m(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad, m.weight.grad, m.bias.grad


def reference(weight: Tensor, bias: Tensor | None, x: Tensor, dy: Tensor, recipe=FP8) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    """One shard's layer on whole activations in this process alone."""
    m = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=torch.bfloat16)
    with torch.no_grad():
        m.weight.copy_(weight)
        if bias is not None:
            m.bias.copy_(bias)
    duotone.convert(m, recipe)
    leaf = x.clone().requires_grad_()
    y = m(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad, m.weight.grad


def summed(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum(0)


def near(result: Tensor, exact: Tensor, parts: list[Tensor], what: str) -> None:
    """Within one bf16 rounding (2^-8 relative) for each rank's addition to the sum."""
    bound = 2.0**-8 * torch.stack([p.double().abs() for p in parts]).sum(0) * len(parts)
    worst = ((result.double() - exact).abs() - bound).max()
    assert worst <= 0, f"{what}: {worst} above one rounding per rank"


@check
def column_parallel_with_sequence_parallelism(folder: Path) -> None:
    x, weight, bias, dy = data()
    m = parallel("column", weight, bias)
    y, dx, dw, db = run(m, piece(x), piece(dy, 1))
    fmt = formats.get("fp8_e4m3_tensor")
    whole = fmt.encode(x)
    same(SEEN["input"].rowwise.parts["codes"], piece(whole["codes"]), "input codes")
    same(SEEN["input"].rowwise.parts["scale"], whole["scale"], "input scale")
    want = reference(piece(weight), piece(bias), x, piece(dy, 1))
    same(y, want[0], "output")
    same(dw, want[2], "weight gradient")
    same(db, piece(dy, 1).sum(0), "bias gradient")
    shards = [
        reference(w, None, x, d)[1]
        for w, d in zip(weight.chunk(dist.get_world_size()), dy.chunk(dist.get_world_size(), 1), strict=True)
    ]
    near(dx, piece(summed(shards)), [piece(s) for s in shards], "input gradient")


@check
def a_grouped_linear_is_its_experts_in_parallel(folder: Path) -> None:
    """Each expert has the bits of a parallel Linear on its rows, which other checks compare with one process."""
    world, rows = dist.get_world_size(), (64, 0, 128)
    for name, mode, sequence in itertools.product(
        ("fp8-current", "mxfp8", "fp8-rowwise", "bf16"), ("column", "row"), (True, False)
    ):
        torch.manual_seed(5)
        options = {"parallel_mode": mode, "tp_group": dist.group.WORLD, "sequence_parallel": sequence}
        options |= {"params_dtype": torch.bfloat16, "recipe": name}
        grouped = duotone.GroupedLinear(3, WIDE, NARROW, **options)
        experts = [duotone.Linear(WIDE, NARROW, **options) for _ in rows]
        whole = torch.randn(sum(rows), WIDE).bfloat16(), torch.randn(sum(rows), NARROW).bfloat16()
        x, dy = (list(t.split(rows)) for t in whole)
        of_x, of_dy = (piece, lambda t: piece(t, 1)) if mode == "column" else (lambda t: piece(t, 1), piece)
        x = [of_x(part) if sequence or mode == "row" else part for part in x]
        dy = [of_dy(part) if sequence or mode == "column" else part for part in dy]
        with torch.no_grad():
            for i, expert in enumerate(experts):
                for kind in ("weight", "bias"):
                    getattr(grouped, f"{kind}{i}").copy_(getattr(expert, kind))
        leaf = torch.cat(x).requires_grad_()
        y = grouped(leaf, [len(part) for part in x])
        y.backward(torch.cat(dy))
        parts = [run(expert, *each) for expert, *each in zip(experts, x, dy, strict=True)]
        what = f"{name}, {mode}, {sequence}"
        same(y.detach(), torch.cat([part[0] for part in parts]), f"{what} output")
        same(leaf.grad, torch.cat([part[1] for part in parts]), f"{what} input gradient")
        for i, part in enumerate(parts):
            same(getattr(grouped, f"weight{i}").grad, part[2], f"{what} weight gradient")
            same(getattr(grouped, f"bias{i}").grad, part[3], f"{what} bias gradient")
        assert world * grouped.weight0.numel() == WIDE * NARROW


@check
def grouped_linears_of_two_ranks_compute_what_one_process_does(folder: Path) -> None:
    """Column, then row: sums have another order, and under fp8-current activations have a scale of each rank."""
    rows = [32, 64]
    for name, bound in {"mxfp8": 1e-5, "fp8-block": 1e-5, "bf16": 1e-5, "fp8-current": 0.1}.items():
        torch.manual_seed(6)
        recipe, options = recipes.load(name), {"bias": False}
        up, down = (duotone.GroupedLinear(2, *s, recipe=recipe, **options) for s in ((128, 512), (512, 128)))
        options |= {"tp_group": dist.group.WORLD, "recipe": recipe}
        column = duotone.GroupedLinear(2, 128, 512, parallel_mode="column", **options)
        row = duotone.GroupedLinear(2, 512, 128, parallel_mode="row", **options)
        for i, dim, part, one in ((i, d, p, o) for i in (0, 1) for d, p, o in ((0, column, up), (1, row, down))):
            with torch.no_grad():
                whole = getattr(one, f"weight{i}")
                whole[0, 0] = whole[-1, -1] = 1.0  # the amax of both shards, for scales per tensor
                getattr(part, f"weight{i}").copy_(piece(whole, dim))
        x = torch.randn(sum(rows), 128)
        result, want = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, exact = row(column(result, rows), rows), down(up(want, rows), rows)
        y.sum().backward(), exact.sum().backward()
        for a, b in ((y, exact), (result.grad, want.grad), (column.weight0.grad, piece(up.weight0.grad))):
            distance = (a - b).norm() / b.norm()
            assert distance < bound, (name, distance)


@check
def planes_that_backward_makes_again_are_those_of_forward(folder: Path) -> None:
    """Each rank encodes its shard again, under the scale of all, and gathers the planes as it would have."""
    x, weight, bias, dy = data()
    for name, mode in itertools.product(("fp8-current", "mxfp8"), ("column", "row")):
        inputs = (piece(x), piece(dy, 1)) if mode == "column" else (piece(x, 1), piece(dy))
        plain, lean = recipes.load(name), dataclasses.replace(recipes.load(name), recompute_columnwise=True)
        want = run(parallel(mode, weight, bias, recipe=plain), *inputs)
        for original in (False, True):
            m = parallel(mode, weight, bias, recipe=lean)
            m.save_original_input = original
            for result, right in zip(run(m, *inputs), want, strict=True):
                same(result, right, f"{name}, {mode}, {original}")


@check
def row_parallel_with_sequence_parallelism(folder: Path) -> None:
    x, weight, bias, dy = data()
    world = dist.get_world_size()
    m = parallel("row", weight, bias)
    y, dx, dw, db = run(m, piece(x, 1), piece(dy))
    whole = formats.get("fp8_e5m2_tensor").encode(dy)
    same(SEEN["grad_output"].rowwise.parts["codes"], piece(whole["codes"]), "grad_output codes")
    same(SEEN["grad_output"].rowwise.parts["scale"], whole["scale"], "grad_output scale")
    want = reference(piece(weight, 1), None, piece(x, 1), dy)
    same(dx, want[1], "input gradient")
    same(dw, want[2], "weight gradient")
    parts = [reference(w, None, s, dy)[0] for w, s in zip(weight.chunk(world, 1), x.chunk(world, 1), strict=True)]
    # One rounding more for the bias, which is added once, after the sum.
    near(y, piece(summed(parts)) + bias.double(), [*map(piece, parts), bias.expand_as(y)], "output")
    near(db, dy.double().sum(0), [part.sum(0) for part in dy.chunk(world)], "bias gradient")


@check
def a_gradient_whose_transpose_follows_travels_once(folder: Path) -> None:
    """Bytes that come from the other rank, of those that the gradient has in bf16, and the bits of one process."""
    x, weight, bias, dy = data()
    ways = ((False, True), (True, True), (False, False))
    for (name, most), (waits, needs_dx) in itertools.product(
        (("bf16", 1), ("fp8-current", 0.5), ("fp8-delayed", 0.5), ("fp8-rowwise", 1.03), ("mxfp8", 1.04)), ways
    ):
        recipe = recipes.load(name)
        m, leaf = parallel("row", weight, bias, recipe), piece(x, 1).requires_grad_(needs_dx)
        m.delay_wgrad_compute = waits
        with duotone.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            y = m(leaf)
        with Wire() as wire:
            y.backward(piece(dy))
            if waits:
                m.backward_dw()
        twice = waits and name in ("bf16", "fp8-current", "fp8-delayed")  # a queue holds the rows of this rank
        assert wire.gathered <= most * (1 + twice) * piece(dy).nbytes, (name, waits, wire.gathers)
        if name != "fp8-delayed":
            _, dx, dw = reference(piece(weight, 1), None, piece(x, 1), dy, recipe)
            same(m.weight.grad, dw, f"{name}: weight gradient")
            if needs_dx:
                same(leaf.grad, dx, f"{name}: input gradient")


@check
def without_sequence_parallelism(folder: Path) -> None:
    x, weight, bias, dy = data()
    world = dist.get_world_size()
    y, _, dw, _ = run(parallel("column", weight, bias, sequence=False), x, piece(dy, 1))
    want = reference(piece(weight), piece(bias), x, piece(dy, 1))
    same(y, want[0])
    same(dw, want[2])
    y, dx, _, db = run(parallel("row", weight, bias, sequence=False), piece(x, 1), dy)
    parts = [reference(w, None, s, dy)[0] for w, s in zip(weight.chunk(world, 1), x.chunk(world, 1), strict=True)]
    near(y, summed(parts) + bias.double(), [*parts, bias.expand_as(y)], "output")
    same(dx, reference(piece(weight, 1), None, piece(x, 1), dy)[1])
    same(db, dy.sum(0))


@check
def blocks_reduce_nothing_and_equal_the_gathered_tensor(folder: Path) -> None:
    x, weight, bias, dy = data()
    for name in ("mxfp8", "fp8-rowwise", "nvfp4", "mxfp8-fwd-nvfp4-bwd"):
        recipe = recipes.load(name)
        m = parallel("column", weight, bias, recipe)
        m.duotone_seed.fill_(5)
        y = m(piece(x))
        same(y.detach(), reference(piece(weight), piece(bias), x, piece(dy, 1), recipe)[0], name)


@check
def a_rank_without_rows_takes_part(folder: Path) -> None:
    """core 60."""
    quantizer = Quantizer(formats.get("fp8_e4m3_tensor"), formats.get("nvfp4"))
    x = torch.full((32, 32), float(2 + dist.get_rank())) if dist.get_rank() else torch.empty(0, 32)
    shard = duotone.tensor.QuantizeContext(duotone.comm.ShardContext(dist.group.WORLD.group_name))
    planes = quantizer.encode(x, ctx=shard)
    largest = 1.0 + dist.get_world_size()
    same(planes.rowwise.parts["scale"], formats.get("fp8_e4m3_tensor").encode(torch.full((1, 1), largest))["scale"])
    same(planes.columnwise.parts["amax"], torch.tensor([largest]))


@check
def each_backward_reduces_in_the_group_of_its_forward(folder: Path) -> None:
    """core 56: forward under A, then B, then both backwards."""
    x, weight, bias, dy = data()
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    m = parallel("row", weight, bias)
    leaves = [piece(x, 1).requires_grad_(), piece(x, 1).requires_grad_()]
    under_a = m(leaves[0])
    m.set_tensor_parallel_group(alone)
    under_b = m(leaves[1])
    under_b.backward(dy)
    same(SEEN["grad_output"].rowwise.parts["scale"], formats.get("fp8_e5m2_tensor").encode(dy)["scale"])
    under_a.backward(piece(dy))
    same(SEEN["grad_output"].rowwise.parts["codes"], piece(formats.get("fp8_e5m2_tensor").encode(dy)["codes"]))
    same(leaves[0].grad, leaves[1].grad)


@check
def an_exception_between_forward_and_backward_leaves_nothing(folder: Path) -> None:
    """core 61, 57."""
    x, weight, bias, dy = data()
    m = parallel("column", weight, bias)
    try:
        m(piece(x)[:, :64])
    except UserError:
        pass
    plain = reference(piece(weight), piece(bias), x, piece(dy, 1))
    same(m(piece(x)).detach(), plain[0])
    # The same recipe in a module of one process does not communicate: rank 0 alone runs it.
    if dist.get_rank() == 0:
        reference(piece(weight), piece(bias), x, piece(dy, 1))


@check
def delayed_scaling_takes_the_largest_amax_of_the_group(folder: Path) -> None:
    """core 72: scales equal on all ranks with reduce_amax, local without."""
    rank = dist.get_rank()
    if rank == 0:
        duotone.Linear(32, 32)  # one more module without a name, which this process counts
    for reduce in (True, False):
        m = nn.Linear(32, 32, bias=False)
        duotone.convert(m, recipes.DelayedScaling(reduce_amax=reduce, amax_history_len=2))
        x = torch.full((8, 32), float(1 + rank)).requires_grad_()
        with duotone.autocast(recipe=m.recipe, amax_reduction_group=dist.group.WORLD):
            y = m(x)
        y.backward(torch.full_like(y, float(1 + rank)))
        largest = float(dist.get_world_size() if reduce else 1 + rank)
        same(m.duotone_forward.scale[:1], torch.tensor([448.0]) / largest, "forward")
        same(m.duotone_backward.scale[:1], torch.tensor([57344.0]) / largest, "backward")


@check
def delayed_scaling_under_sequence_parallelism_needs_the_group(folder: Path) -> None:
    """core 72: without a reduction it raises; with it, a step has the bits of the whole tensor at equal scales."""
    x, weight, bias, dy = data()
    recipe = recipes.DelayedScaling(amax_history_len=2)
    for mode, inputs in (("column", piece(x)), ("row", piece(x, 1))):
        m = parallel(mode, weight, bias, recipe)
        try:
            m(inputs)
        except RecipeError as error:
            assert "amax_reduction_group" in str(error), error
        else:
            raise AssertionError("shards were encoded with scales of their own")
    m = parallel("column", weight, bias, recipe)
    whole = nn.Linear(WIDE, m.weight.shape[0], dtype=torch.bfloat16)
    whole.load_state_dict(m.state_dict(), strict=False)
    duotone.convert(whole, recipe)
    for _ in range(3):
        with duotone.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            y = m(piece(x).requires_grad_())
            expected = whole(x.clone().requires_grad_())
        same(m.duotone_forward.scale[:1], whole.duotone_forward.scale[:1], "input scale")
        same(y.detach(), expected.detach(), "output")
        y.backward(piece(dy, 1))
        expected.backward(piece(dy, 1))
        same(m.weight.grad, whole.weight.grad, "weight gradient")


@check
def ranks_with_other_recipes_are_told_at_the_first_step(folder: Path) -> None:
    x, weight, bias, _ = data()
    name = "mxfp8" if dist.get_rank() else "fp8-current"
    m = parallel("column", weight, bias, recipes.load("mxfp8"))
    m(piece(x))
    m = parallel("column", weight, bias, recipes.load(name))
    try:
        m(piece(x))
    except UserError as error:
        text = "rank 0 has fp8_e4m3_tensor", "rank 1 has mxfp8_e4m3"
        assert all(one in str(error) for one in text) and "do not follow the same recipe" in str(error), error
    else:
        raise AssertionError("ranks went on with other recipes")


@check
def models_of_other_recipes_are_told_before_ddp(folder: Path) -> None:
    def converted(recipe: str, *rules: recipes.Rule) -> nn.Module:
        return duotone.convert(nn.Sequential(nn.Linear(WIDE, NARROW), nn.Linear(NARROW, WIDE)), recipe, rules)

    require_same_recipes(converted("mxfp8"))
    m = converted("mxfp8" if dist.get_rank() else "fp8-current")
    try:
        require_same_recipes(m)
    except UserError as error:
        text = "rank 0 has 0: fp8-current", "rank 1 has 0: mxfp8"
        assert all(one in str(error) for one in text) and "do not follow the same recipes" in str(error), error
    else:
        raise AssertionError("ranks went on with other recipes")
    square = recipes.Rule(module="1", tensor_type="weight", format="mxfp8_e4m3_32x32")  # the last linear alone differs
    m = converted("mxfp8", *([square] if dist.get_rank() else []))
    try:
        require_same_recipes(m)
    except UserError as error:
        text = "rank 0 has 1: weight mxfp8_e4m3 ", "rank 1 has 1: weight mxfp8_e4m3_32x32"
        words = str(error).replace(";", " ")
        assert all(one in words for one in text) and len(words) < 250 and "\n" not in words, error
    else:
        raise AssertionError("ranks went on with other formats")


@check
def ddp_compares_the_recipes_of_its_ranks(folder: Path) -> None:
    """In its constructor, over its group. A model without recipes, and a new inner module, cost no collective."""

    def converted(recipe: str) -> nn.Module:
        return duotone.convert(nn.Sequential(nn.Linear(WIDE, NARROW), nn.Linear(NARROW, WIDE)), recipe, ())

    rank, groups = dist.get_rank(), [dist.new_group([each]) for each in range(dist.get_world_size())]
    name = "mxfp8" if rank else "fp8-current"
    with contextlib.suppress(UserError):
        nn.parallel.DistributedDataParallel(converted(name))
        raise AssertionError("ranks went on with other recipes")
    alone = nn.parallel.DistributedDataParallel(converted(name), process_group=groups[rank])
    with Wire() as wire:
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        if rank:
            alone.module = converted("mxfp8")
    assert not wire.reduced, wire
    m = nn.parallel.DistributedDataParallel(converted("mxfp8"))
    m(piece(data()[0]).float()).sum().backward()
    assert m.module[0].weight.grad is not None


PARAMETERS = {
    "margin": 1, "amax_history_len": 8, "amax_compute_algo": "most_recent", "reduce_amax": False,
    "skip_nonfinite_amax": False, "spike_factor": 0.0, "first_scale_from_amax": False,
}  # fmt: skip


@check
def ranks_with_other_delayed_parameters_are_told(folder: Path) -> None:
    """In every comparison of recipes: on request, by both data parallels, by tensor parallelism, by amax groups."""
    _, weight, bias, _ = data()
    x, group = piece(data()[0]), dist.group.WORLD

    def in_amax_group(recipe: recipes.Recipe) -> None:
        m = duotone.Linear(WIDE, NARROW, params_dtype=torch.bfloat16)
        for _ in range(2):
            with duotone.autocast(recipe, amax_reduction_group=group):
                m(x).sum().backward()

    ways = {
        "require_same_recipes": lambda r: require_same_recipes(duotone.convert(nn.Linear(WIDE, NARROW), r, rules=())),
        "ddp": lambda r: nn.parallel.DistributedDataParallel(duotone.convert(nn.Linear(WIDE, NARROW), r, rules=())),
        "fully_shard": lambda r: fully_shard(duotone.convert(nn.Linear(WIDE, NARROW), r, rules=())),
        "column": lambda r: parallel("column", weight, bias, r, sequence=False)(x),
        "row": lambda r: parallel("row", weight, bias, r, sequence=False)(piece(data()[0], 1)),
        "amax group": in_amax_group,
    }
    for (field, value), (way, act), made in itertools.product(PARAMETERS.items(), ways.items(), (True, False)):
        if (field, way) == ("reduce_amax", "amax group"):
            continue  # such a rank takes no part in the reduction
        options = {field: value} if dist.get_rank() else {}
        request = recipes.DelayedScalingRequest(**options)
        recipe = recipes.CustomRecipe(qfactory=lambda role, r=request: r) if made else recipes.DelayedScaling(**options)
        try:
            act(recipe)
        except UserError as error:
            assert field in str(error) and "rank 1 has " in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError(f"{way}: ranks went on with another {field}")


@check
def uneven_rows_are_told_on_all_ranks(folder: Path) -> None:
    """In a forward, with and without sequence parallelism, also where a rank has no row, and in all formats."""
    _, weight, bias, _ = data()
    for name, rows, mode in itertools.product(("mxfp8", "fp8-current", "nvfp4", "bf16"), (64, 0), ("column", "row")):
        for sequence in (True, False):
            if (mode, sequence) == ("column", False):
                continue  # its forward sends nothing: the next check
            m = parallel(mode, weight, bias, recipes.load(name), dist.new_group(), sequence)
            m.weight.requires_grad_(False)  # MXFP8 does not cut blocks of rows
            wide = WIDE // (1 if mode == "column" else dist.get_world_size())
            m(torch.randn(96, wide).bfloat16())
            told_of_rows(m, wide, rows)


@check
def uneven_rows_are_told_in_backward_where_forward_sends_nothing(folder: Path) -> None:
    _, weight, bias, _ = data()
    m = parallel("column", weight, bias, recipes.load("mxfp8"), dist.new_group(), sequence=False)
    told_of_rows(lambda x: m(x).sum().backward(), WIDE, 64)


def told_of_rows(act: Callable[[Tensor], object], wide: int, rows: int) -> None:
    """Expect one error on both ranks where one has 32 rows and the other `rows`.

    On GPUs both numbers must be new to the group: ranks compare each number once.
    """
    try:
        act(torch.randn(rows if dist.get_rank() else 32, wide).bfloat16().requires_grad_())
    except UserError as error:
        text = f"bring uneven rows: rank 0 has 32 rows where rank 1 has {rows}; give all as many, or pad the batch"
        assert text in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"ranks went on with 32 and {rows} rows")


class Branch(nn.Module):
    """The second linear runs where it is asked to, and creates its delayed states then."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.first, self.second = (duotone.Linear(WIDE, WIDE, recipe=recipe, name=name) for name in "ab")

    def forward(self, x: Tensor, runs: bool) -> Tensor:
        y = self.first(x)
        return self.second(y) if runs else y


@check
def ddp_leaves_scales_and_seeds_to_each_rank(folder: Path) -> None:
    """Else each forward would take those of rank 0: the scale 1 of a layer that never ran there, or of smaller data."""
    for recipe in ("fp8-delayed", "nvfp4"):
        alone = Branch(recipe)
        m = nn.parallel.DistributedDataParallel(copy.deepcopy(alone), find_unused_parameters=True)
        for step in range(3):
            x, runs = data()[0].float() * 100.0 ** dist.get_rank(), (step + dist.get_rank()) % 2 == 1
            for each in (m, alone):
                each(x, runs).square().mean().backward()
        for (name, result), want in zip(m.module.named_buffers(), alone.buffers(), strict=True):
            same(result, want, f"{recipe}: {name}")


@check
def ddp_leaves_scales_and_seeds_to_each_rank_of_what_is_converted_in_it(folder: Path) -> None:
    """Its constructor saw no module that follows a recipe. `extra` is a buffer that it still broadcasts."""
    for recipe, inside in itertools.product(("fp8-delayed", "nvfp4"), (True, False)):
        plain = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE))
        plain.register_buffer("extra", torch.zeros(1))
        wrapper = nn.parallel.DistributedDataParallel(plain)
        duotone.convert(plain[0] if inside else wrapper, recipe, rules=())
        alone = copy.deepcopy(plain)
        plain.extra.fill_(dist.get_rank())
        x = data()[0].float() * 100.0 ** dist.get_rank()
        for _ in range(3):
            for m in (wrapper, alone):
                m(x).square().mean().backward()
        for name, want in alone.named_buffers():
            same(plain.get_buffer(name), want, f"{recipe}: {name}")


@check
def ddp_gives_all_ranks_the_planes_of_the_first(folder: Path) -> None:
    """Also where each rank begins with other values: they broadcast values, and encode them alike."""
    for name in ("mxfp8", "fp8-current", "fp8-block", "fp8-delayed", "nvfp4"):
        m = nn.Sequential(nn.Linear(WIDE, WIDE, bias=False)).bfloat16()
        with torch.no_grad():
            m[0].weight.mul_(1.0 + dist.get_rank())
        duotone.convert_parameters(duotone.convert(m, name, ()), recipes.load(name))
        nn.parallel.DistributedDataParallel(m)
        for direction, plane in zip(("row", "col"), m[0].weight.planes, strict=True):
            for part, values in plane.parts.items():
                first = values.view(torch.uint8).clone(memory_format=torch.contiguous_format)
                dist.broadcast(first, 0)
                same(values.view(torch.uint8), first, f"{name}, {direction} {part}")


@check
def gradients_that_autograd_does_not_get_are_told(folder: Path) -> None:
    """Nothing would reduce them over the ranks."""
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        m = nn.Sequential(duotone.Linear(WIDE, WIDE, **{option: True}))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            nn.parallel.DistributedDataParallel(m)
        assert any("reduces no gradient in main_grad" in str(each.message) for each in caught), caught
        with contextlib.suppress(UserError):
            fully_shard(m, mesh=checks.mesh())
            raise AssertionError(f"FSDP2 went on with {option}")


@check
def collectives_write_into_quantized_tensors(folder: Path) -> None:
    """They are sent and received in high precision, and encoded again."""
    mxfp8, world = recipes.load("mxfp8")(None), dist.get_world_size()

    def filled(value: float) -> torch.Tensor:
        return mxfp8.quantize(torch.full((64, 32), value, dtype=torch.bfloat16))

    def expect(write: Callable[[Tensor], object], value: float) -> None:
        for target in (filled(1.0 + dist.get_rank()), nn.Parameter(filled(1.0 + dist.get_rank()))):
            with torch.no_grad():
                write(target)
            for plane in target.planes:
                same(plane.dequantize(torch.float32), torch.full_like(plane.dequantize(torch.float32), value))

    one = torch.ones(64, 32, dtype=torch.bfloat16)
    expect(lambda x: dist.broadcast(x, 1), 2.0)
    expect(lambda x: dist.broadcast(x.view(-1), 1), 2.0)
    expect(lambda x: dist.all_reduce(x, dist.ReduceOp.MAX), world)
    expect(lambda x: dist.all_gather([x, *[one.clone() for _ in range(world - 1)]], 8 * one), 8.0)
    expect(lambda x: dist.reduce_scatter_tensor(x, one.repeat(world, 1)), world)
    expect(lambda x: dist.scatter(x, [4 * one] * world if dist.get_rank() == 0 else None), 4.0)
    with contextlib.suppress(UserError):
        dist.recv(filled(1.0), 0)
        raise AssertionError("nothing was sent")


@check
def inputs_that_are_dtensors_are_refused(folder: Path) -> None:
    mesh = checks.mesh()
    m = nn.Linear(WIDE, NARROW)
    duotone.convert(m, recipes.load("mxfp8"))
    try:
        m(distribute_tensor(torch.randn(4, WIDE), mesh, [Replicate()]))
    except UserError as error:
        assert "to_local" in str(error), error
    else:
        raise AssertionError("a DTensor was taken for a local tensor")


@check
def ranks_round_equal_rows_of_a_gradient_with_different_numbers(folder: Path) -> None:
    """Errors of equal numbers would not average out in sums."""
    torch.manual_seed(0)
    m = duotone.Linear(
        128, 128, bias=False, recipe="nvfp4", parallel_mode="row", tp_group=dist.group.WORLD, sequence_parallel=True
    )
    x, dy = torch.randn(128, 64).repeat(2, 1).requires_grad_(), torch.randn(128, 128)
    m(x).backward(dy)  # the same rows on both ranks
    first, second = x.grad.chunk(2)  # type: ignore[union-attr]
    assert not torch.equal(first, second)


@check
def nothing_live_is_pickled(folder: Path) -> None:
    """core 22, 23, 57."""
    x, weight, bias, dy = data()
    m = parallel("column", weight, bias, recipes.load("fp8-current"))
    run(m, piece(x), piece(dy, 1))
    plan = m.plan_for(piece(x))
    for name, value in (("quantizer", plan.input.quantizer), ("recipe", m.recipe), ("module", m)):
        (folder / f"{name}-{dist.get_rank()}.pkl").write_bytes(pickle.dumps(value))
    quantized = plan.input.quantizer.quantize(piece(x), ctx=plan.input.context)
    (folder / f"tensor-{dist.get_rank()}.pkl").write_bytes(pickle.dumps(quantized))


if __name__ == "__main__":
    checks.main()
