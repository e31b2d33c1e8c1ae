"""On a CUDA device: linears over row segments have the bits of separate linears, or one product and their values."""

import contextlib
import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

import duotone
from duotone import formats, recipes
from duotone.dispatch import segments as native
from duotone.dispatch.casts import segment_cast
from duotone.kernels.grouped import GroupedProduct
from duotone.linear import grouped
from duotone.linear.grouped import GroupedStage
from duotone.recipes import DelayedScaling, Float8BlockScaling
from duotone.tensor import Quantizer
from duotone.tensor.plane import Usage

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="no CUDA device that converts to FP8; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="grouped products of FP8 are used on compute capability 9.0",
)
K, N = 256, 128
CUDA = {"device": "cuda", "params_dtype": torch.bfloat16}
SPLITS = [[128, 256, 384], [130, 0, 70], [17, 1, 24], [0, 0, 64], [48, 16, 0]]
SEGMENTED = ["fp8-current", "fp8-delayed", "fp8-rowwise"]
ON_DEVICE = {
    **{name: recipes.load(name) for name in SEGMENTED},
    # a first scale is measured, and the host looks once whether it is there
    "fp8-delayed": DelayedScaling(first_scale_from_amax=False),
    "delayed E4M3": DelayedScaling(fp8_format="E4M3", first_scale_from_amax=False),
    "fp8-block": recipes.load("fp8-block"),
    "fp8-block, square": Float8BlockScaling(wgrad_input_128x128=True, power_of_two_scales=False),
    "rowwise, fast": recipes.load(str(Path(__file__).parents[2] / "bench/recipes/fp8-rowwise-fast.toml")),
}
PAIRS = [
    ("fp8_e4m3_tensor", "fp8_e4m3_tensor"),
    ("fp8_e5m2_tensor", "fp8_e4m3_tensor"),
    ("fp8_e4m3_tensor_pow2", "fp8_e4m3_tensor_pow2"),
    ("fp8_e4m3_row", "fp8_e4m3_row"),
    ("fp8_e4m3_row", "fp8_e5m2_tensor"),
]


def bits(t: Tensor) -> Tensor:
    t = t.detach().contiguous()
    return torch.where(t.isnan(), torch.nan, t).float().view(torch.int32) if t.is_floating_point() else t


def same(results: list, others: list) -> None:
    assert len(results) == len(others)
    for i, (a, b) in enumerate(zip(results, others, strict=True)):
        assert (a is None) == (b is None), i
        assert a is None or (a.shape == b.shape and torch.equal(bits(a), bits(b))), i


def close(results: list, others: list) -> None:
    for i, (a, b) in enumerate(zip(results, others, strict=True)):
        assert a.isfinite().all() and (a - b).norm() <= 1e-2 * b.norm() + 1e-6, i


def awkward(m: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=generator) * torch.exp2(torch.randint(-12, 12, (m, k), generator=generator).float())
    x.view(-1)[::7] = 0.0
    if m > 16:
        x[1, 3], x[2, 5], x[3, 7], x[4] = torch.inf, -torch.inf, torch.nan, 1e-40
    return x.bfloat16().cuda()


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product for each linear, as for large weights."""
    monkeypatch.setattr(grouped, "SMALL", 0)


@pytest.mark.parametrize("how", ["host", "together", "device", "table"])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_casts_of_segments_have_the_bits_of_separate_casts(pair, splits, how) -> None:
    x, (row, col) = awkward(sum(splits), K), (formats.get(name) for name in pair)
    whole, counts = how in ("device", "together"), torch.tensor(splits, device="cuda")
    multiple = native.CHUNK if whole else native.STEP
    segments = native.segments_of(counts if how == "device" else splits, x, whole)
    table = None
    parts = x.split(splits)
    if how == "table":
        parts = [part.clone() for part in parts if part.numel()]
        splits = [n for n in splits if n]
        segments, table = native.segments_of(splits, x), native.table(parts)
    for usage in (Usage(True, True), Usage(True, False), Usage(False, True)):
        used = row if usage.rowwise else None, col if usage.columnwise else None
        result = segment_cast(*used, x, True)(parts[0] if table else x, segments, table=table)
        start = at = 0
        for e, part in enumerate(parts):
            n, p = len(part), native.width(len(part), multiple)
            alone = Quantizer(row, col).encode(part, usage)
            if usage.rowwise:
                assert torch.equal(result.row[start : start + n], alone.rowwise.parts["codes"])
                compare(result.row_scale, alone.rowwise.parts["scale"], row, e, (start if whole else at, n))
            if usage.columnwise:
                codes = result.col[:, at : at + p] if whole else result.col[K * at : K * (at + p)].view(K, p)
                assert torch.equal(codes[:, :n], alone.columnwise.parts["codes"]) and not codes[:, n:].any()
                compare(result.col_scale, alone.columnwise.parts["scale"], col, e, None)
            start, at = start + n, at + p


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("pair", [("1x128", "1x128"), ("1x128_fp32", "128x128_fp32"), ("128x128", "128x128")], ids=str)
def test_casts_of_segments_to_blocks_have_the_bits_of_separate_casts(pair, splits) -> None:
    row, col = (formats.get(f"fp8_e4m3_{name}") for name in pair)
    x = awkward(sum(splits), K)
    segments = native.segments_of(torch.tensor(splits, device="cuda"), x)
    result = segment_cast(row, col, x, True)(x, segments)
    start = at = 0
    for part in x.split(splits):
        n, p = len(part), native.width(len(part), native.CHUNK)
        alone = Quantizer(row, col).encode(part, Usage(True, True)) if n else None
        if alone is not None:
            assert torch.equal(result.row[start : start + n], alone.rowwise.parts["codes"])
            assert torch.equal(result.col[:, at : at + n], alone.columnwise.parts["codes"])
            assert not result.col[:, at + n : at + p].any()
            for stored, plane, fmt, lines in (
                (result.row_scale, alone.rowwise, row, start),
                (result.col_scale, alone.columnwise, col, at),
            ):
                scale, first = plane.parts["scale"], lines * 2 if fmt.block.rows == 1 else at // 128 * 2
                flat = (scale.t() if fmt.block.rows == 1 else scale).reshape(-1)
                same([stored[first : first + flat.numel()]], [flat])
        start, at = start + n, at + p


def compare(stored: Tensor, scale: Tensor, fmt, e: int, rows: tuple[int, int] | None) -> None:
    lines = fmt.block.rows == 1
    result = stored[rows[0] : rows[0] + rows[1]] if lines and rows is not None else stored[e]
    assert lines or not result.data_ptr() % 16, "cuBLAS refuses scales elsewhere"
    same([result], [scale.reshape(-1)])


def group(recipe, count: int = 3, **keywords) -> duotone.GroupedLinear:
    torch.manual_seed(3)
    options = {"bias": False, **CUDA, **keywords}
    return duotone.GroupedLinear(count, K, N, recipe=recipe, name="g", **options)


def inputs(splits: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    rows = sum(splits)
    return torch.randn(rows, K, device="cuda").bfloat16(), torch.randn(rows, N, device="cuda").bfloat16()


def train(m, x: Tensor, dy: Tensor, splits, **call) -> list:
    leaf = x.clone().requires_grad_()
    m.zero_grad()
    y = m(leaf, splits, **call)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad for p in m.parameters())]


def separate(m: duotone.GroupedLinear) -> list[duotone.Linear]:
    results = []
    for i in range(m.num_gemms):
        one = duotone.Linear(K, N, bias=m.use_bias, recipe=m.recipe, name=f"g{i}", **CUDA)
        one.weight = m.weights[i]
        if m.use_bias:
            one.bias = m.biases[i]
        results.append(one)
    return results


def train_each(linears: list[duotone.Linear], x: Tensor, dy: Tensor, splits: list[int]) -> list:
    leaves = [rows.clone().requires_grad_() for rows in x.split(splits)]
    for one in linears:
        one.zero_grad()
    ys = [one(leaf) for one, leaf in zip(linears, leaves, strict=True)]
    for y, grad in zip(ys, dy.split(splits), strict=True):
        y.backward(grad)
    kinds = ("weight", "bias") if linears[0].bias is not None else ("weight",)
    gradients = [getattr(one, kind).grad for kind in kinds for one in linears]
    return [torch.cat(ys).detach(), torch.cat([leaf.grad for leaf in leaves]), *gradients]


def stage_of(m: duotone.GroupedLinear) -> GroupedStage:
    return m.plans.last[1]  # type: ignore[index, return-value]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SEGMENTED)
def test_host_splits_give_the_bits_of_separate_linears(name, bias, apart) -> None:
    """Steps of other splits; outputs, gradients and delayed scales."""
    m = group(recipes.load(name), bias=bias)
    linears = separate(m)
    for step, splits in enumerate(SPLITS):
        x, dy = inputs(splits, step)
        same(train(m, x, dy, splits), train_each(linears, x, dy, splits))
        assert stage_of(m).is_joint
        if name == "fp8-delayed":
            for state, buffer in itertools.product(("duotone_forward", "duotone_backward"), ("scale", "amax_history")):
                each = [getattr(getattr(one, state), buffer) for one in linears]
                same([getattr(getattr(m, state), buffer)], [torch.cat(each, -1)])


@pytest.mark.parametrize("name", SEGMENTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_give_the_bits_of_the_loop(name, dtype, monkeypatch, apart) -> None:
    m = group(recipes.load(name), params_dtype=dtype, bias=True)
    twin = copy.deepcopy(m)
    monkeypatch.setattr(twin, "make_stage", lambda linears: GroupedStage(tuple(linears)))
    x, dy = (t.to(dtype) for t in inputs(SPLITS[1]))
    same(train(m, x, dy, SPLITS[1]), train(twin, x, dy, SPLITS[1]))
    assert stage_of(m).is_joint and not stage_of(twin).is_joint


@pytest.mark.parametrize("name", SEGMENTED)
def test_inputs_of_every_kind_give_the_same(name) -> None:
    """Leading dimensions, strides, no gradient, a packed weight, no rows at all."""
    m = group(recipes.load(name), single_grouped_weight=True)
    x, dy = inputs([40, 0, 24])
    want = train(m, x, dy, [40, 0, 24])
    fresh = group(recipes.load(name), single_grouped_weight=True)
    wide = torch.zeros(64, 2 * K, device="cuda", dtype=torch.bfloat16)
    wide[:, ::2] = x
    result = train(fresh, wide[:, ::2].view(4, 16, K), dy.view(4, 16, N), [40, 0, 24])
    same([result[0].view(64, N), result[1].view(64, K), result[2]], want)
    with torch.no_grad():
        for one in (m, fresh):  # after one step of training each
            assert torch.equal(one(x, [40, 0, 24]), m(x, torch.tensor([40, 0, 24])))
    empty = train(m, x[:0], dy[:0], [0, 0, 0])
    assert empty[0].shape == (0, N) and not empty[2].any()


@pytest.mark.parametrize("name", SEGMENTED)
def test_main_grad_delayed_gradients_and_cached_weights_give_the_bits_of_the_loop(name, monkeypatch, apart) -> None:
    for arguments in ({"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}, {}):
        m = group(recipes.load(name), **arguments)
        twin = copy.deepcopy(m)
        monkeypatch.setattr(twin, "make_stage", lambda linears: GroupedStage(tuple(linears)))
        for one, p in itertools.product((m, twin), range(3)):
            one.weights[p].main_grad = torch.ones(N, K, device="cuda")
        for step, first in enumerate((True, False)):
            x, dy = inputs(SPLITS[1], step)
            results = [train(one, x, dy, SPLITS[1], is_first_microbatch=first) for one in (m, twin)]
            same(*results)
            for one in (m, twin):
                one.backward_dw()
            same([w.main_grad for w in m.weights], [w.main_grad for w in twin.weights])
            same([w.grad for w in m.weights], [w.grad for w in twin.weights])


# --- row counts on the device


@on_hopper
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("name", ON_DEVICE)
def test_device_splits_give_the_values_of_host_splits_without_waiting(name, splits, apart) -> None:
    m, twin = group(ON_DEVICE[name]), group(ON_DEVICE[name])
    for dtype in (torch.int64, torch.int32):
        x, dy = inputs(splits)
        counts = torch.tensor(splits, dtype=dtype, device="cuda")
        want = train(twin, x, dy, splits)
        before = copy.deepcopy(m)
        train(before, x, dy, counts)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = train(m, x, dy, counts)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert stage_of(m).takes_device_splits
        close(result, want)
        assert all(not g.any() for g, n in zip(result[2:], splits, strict=True) if n == 0)
        for state in ("duotone_forward", "duotone_backward") if "delayed" in name else ():
            same(list(getattr(m, state).buffers()), list(getattr(twin, state).buffers()))


@on_hopper
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("name", [*SEGMENTED, "fp8-block"])
def test_biases_are_added_and_get_their_gradients_without_waiting(name, splits, apart) -> None:
    m, twin = group(ON_DEVICE[name], bias=True), group(ON_DEVICE[name], bias=True)
    with torch.no_grad():
        for one, other in zip(m.biases, twin.biases, strict=True):
            one.normal_()
            other.copy_(one)
    x, dy = inputs(splits)
    counts = torch.tensor(splits, device="cuda")
    want = train(twin, x, dy, splits)
    train(copy.deepcopy(m), x, dy, counts)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = train(m, x, dy, counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(result) == 2 + 2 * len(splits)
    close(result, want)
    assert all(not g.any() for g, n in zip(result[5:], splits, strict=True) if n == 0)


@on_hopper
def test_host_splits_do_not_wait_either() -> None:
    m = group(recipes.load("fp8-delayed"))
    x, dy = inputs(SPLITS[1])
    for _ in range(2):  # after the first, the host looks once whether scales are there
        train(m, x, dy, SPLITS[1])
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(m, x, dy, SPLITS[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_hopper
def test_counts_on_the_device_are_waited_for_where_no_grouped_product_takes_them() -> None:
    x, dy = inputs(SPLITS[0])
    counts = torch.tensor(SPLITS[0], device="cuda")
    for recipe, arguments in (
        (recipes.load("fp8-current"), {"delay_wgrad_compute": True}),
        (recipes.load("mxfp8"), {}),
    ):
        m = group(recipe, **arguments)
        same(train(m, x, dy, counts), train(copy.deepcopy(m), x, dy, SPLITS[0]))
        with pytest.raises(duotone.UserError, match="sum to"):
            m(x[:-1], counts)


@on_hopper
def test_rows_beyond_the_counts_do_not_matter_and_none_is_read_beyond_the_input() -> None:
    m = group(ON_DEVICE["fp8-rowwise"])
    x, dy = inputs([130, 0, 70])
    want = train(m, x[:150], dy[:150], [130, 0, 20])
    result = train(m, x, dy, torch.tensor([130, 0, 20], device="cuda"))
    close([result[0][:150], result[1][:150], *result[2:]], want)
    want = train(m, x, dy, [130, 0, 70])
    close(train(m, x, dy, torch.tensor([130, -5, 1 << 20], device="cuda")), want)


@on_hopper
def test_a_captured_call_follows_counts_that_change() -> None:
    m = group(ON_DEVICE["fp8-rowwise"])
    x, _ = inputs([130, 0, 70])
    counts = torch.tensor([130, 0, 70], device="cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            m(x, counts)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = m(x, counts)
        for splits in ([130, 0, 70], [17, 100, 83], [0, 200, 0]):
            counts.copy_(torch.tensor(splits))
            graph.replay()
            close([y], [m(x, splits)])


# --- the product itself


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("pair", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")], ids=str)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("lines", [True, False])
def test_grouped_products_are_those_of_their_segments(lines, fast, pair, dtype) -> None:
    """Random shapes against float64 products of the codes. The tensor cores cut sums to 14 bits every 32 products, and
    slow accumulation leaves them every 128; the result is rounded to its dtype."""
    generator = torch.Generator().manual_seed(7 * lines + 2 * fast)
    codes = [{"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[one] for one in pair]

    def draw(low: int, high: int, step: int = 1) -> int:
        return step * int(torch.randint(low, high, (), generator=generator))

    for _ in range(6):
        count, k, n = draw(1, 9), draw(1, 40, 16), draw(1, 40, 16)
        splits = [draw(0, 3) * draw(0, 200) for _ in range(count)]
        rows = max(sum(splits), 1)
        x, w, dy = (torch.randn(size, device="cuda") for size in ((rows, k), (count, n, k), (rows, n)))
        x[::3], dy[:, ::3] = 0.0, 2.0**-12
        x, w, dy = x.to(codes[0]), w.to(codes[1]), dy.to(codes[0])
        of_rows = [torch.rand(size, device="cuda") + 0.5 for size in ((rows,), (count, n), (count, k))]
        scales = of_rows if lines else [torch.rand(count, 4, device="cuda")[:, :1] + 0.5 for _ in range(3)]
        segments = native.segments_of(torch.tensor(splits, device="cuda"), x)
        product = GroupedProduct(fast, int(lines))
        y = product.of_rows(x, w, (scales[0], scales[1]), segments, dtype)
        inputs = zip((n, k), codes, strict=True)
        wide = [torch.full((size, segments.width), 100.0, device="cuda").to(code) for size, code in inputs]
        start = at = 0
        for rows_here in splits:
            for padded, one in zip(wide, (dy, x), strict=True):
                padded[:, at : at + native.width(rows_here, native.CHUNK)] = 0.0
                padded[:, at : at + rows_here] = one[start : start + rows_here].to(padded.dtype).t()
            start, at = start + rows_here, at + native.width(rows_here, native.CHUNK)
        dw = product.of_columns(*wide, (scales[1], scales[2]), segments, dtype)
        assert y.dtype is dw.dtype is dtype and dw.shape == (count, n, k)
        start = at = 0
        for e, rows_here in enumerate(splits):
            here, end = slice(start, start + rows_here), at + rows_here
            of_x = scales[0][here, None] if lines else scales[0][e]
            near(y[here], x[here], w[e].t(), of_x * scales[1][e], fast)
            near(dw[e], wide[0][:, at:end], wide[1][:, at:end].t(), scales[1][e].view(-1, 1) * scales[2][e], fast)
            start, at = here.stop, at + native.width(rows_here, native.CHUNK)


def near(result: Tensor, a: Tensor, b: Tensor, scale: Tensor, fast: bool) -> None:
    want = (a.double() @ b.double()) * scale.double()
    most = (a.double().abs() @ b.double().abs()) * scale.double()
    summed = most * 2.0**-13 * (a.shape[1] / 32 + 1 if fast else 6)
    rounded = want.abs() * torch.finfo(result.dtype).eps + torch.finfo(result.dtype).smallest_normal
    assert ((result.double() - want).abs() <= summed + rounded).all()


@on_hopper
def test_slow_accumulation_of_grouped_products_keeps_long_sums() -> None:
    """8192 values of one sign: fast accumulation loses percents of such sums, slow one what cuBLAS's does, 9.3e-4."""
    x = torch.rand(256, 8192, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones(1, 4, device="cuda")[:, :1]
    segments = native.segments_of(torch.tensor([256], device="cuda"), x)
    want = x.double() @ x.double().t()
    lost = {
        fast: ((GroupedProduct(fast, 0).of_rows(x, x[None], (one, one), segments, torch.float32) - want) / want)
        for fast in (True, False)
    }
    assert lost[False].abs().max() < 1e-3 and lost[True].mean() < -0.02


@on_hopper
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("name", [*SEGMENTED, "fp8-block"])
def test_small_linears_are_multiplied_together_and_give_the_values_of_separate_ones(name, splits) -> None:
    m = group(recipes.load(name))
    linears = separate(m)
    x, dy = inputs(splits)
    result, want = train(m, x, dy, splits), train_each(linears, x, dy, splits)
    assert stage_of(m).grouped  # type: ignore[attr-defined]
    for one, n in zip(result[2:], splits, strict=True):
        assert n or not one.any()
    close(result, want)
    assert all(not g.any() for g, n in zip(result[2:], splits, strict=True) if n == 0)


@on_hopper
@pytest.mark.parametrize("how", ["cached", "held", "packed"])
@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "fp8-block, square"])
def test_weights_that_are_quantized_already_take_one_launch_with_the_values_of_the_loop(name, how, monkeypatch) -> None:
    """By caches, or as quantized parameters: for each linear, or packed, which takes formats of blocks alone."""
    recipe = ON_DEVICE[name]
    if how == "packed" and "block" not in name:
        pytest.skip("a packed weight would share scales")
    with contextlib.nullcontext() if how == "cached" else duotone.quantized_model_init(recipe=recipe):
        m = group(recipe, single_grouped_weight=how == "packed")
    twin = copy.deepcopy(m)
    monkeypatch.setattr(twin, "make_stage", lambda linears: GroupedStage(tuple(linears)))
    for step, first in enumerate((True, False, False)):
        x, dy = inputs(SPLITS[step], step)
        call = {"is_first_microbatch": first} if how == "cached" else {}
        close(train(m, x, dy, SPLITS[step], **call), train(twin, x, dy, SPLITS[step], **call))
        counts = torch.tensor(SPLITS[step], device="cuda")
        close(train(m, x, dy, counts, **call), train(twin, x, dy, SPLITS[step], **call))
    assert stage_of(m).grouped and not stage_of(twin).is_joint


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scales", ["", "_fp32"])
@pytest.mark.parametrize("square", [True, False])
def test_grouped_products_of_blocks_are_those_of_their_segments(square, scales, dtype) -> None:
    """Codes and scales of the casts, against float64 products of what they decode to."""
    line, wide = (formats.get(f"fp8_e4m3_{block}{scales}") for block in ("1x128", "128x128"))
    splits, k, n = [130, 0, 300, 17, 128], 640, 384
    rows = sum(splits)
    torch.manual_seed(square)
    x, dy, w = (torch.randn(size, device="cuda").bfloat16() for size in ((rows, k), (rows, n), (len(splits) * n, k)))
    x[::3, :200], dy[:, ::5], w[1] = 2.0**-9, 0.0, 0.0
    segments = native.segments_of(torch.tensor(splits, device="cuda"), x)
    weights = native.equal_segments(n, len(splits), w)
    of_x, of_dy, of_w = (
        segment_cast(*pair, t, True)(t, where)
        for pair, t, where in (
            ((line, wide if square else line), x, segments),
            ((line, line), dy, segments),
            ((wide, wide), w, weights),
        )
    )
    fp8 = torch.float8_e4m3fn
    stacked = of_w.row.view(fp8).view(-1, n, k), of_w.row_scale.view(len(splits), -1)
    y = GroupedProduct.of_blocks(True).of_rows(
        of_x.row.view(fp8), stacked[0], (of_x.row_scale, stacked[1]), segments, dtype
    )
    dw = GroupedProduct.of_blocks(square).of_columns(
        of_dy.col.view(fp8), of_x.col.view(fp8), (of_dy.col_scale, of_x.col_scale), segments, dtype
    )
    whole = Usage(True, True)
    parts = zip(x.split(splits), dy.split(splits), w.split(n), y.split(splits), dw, strict=True)
    for part, grad, weight, out, gradient in parts:
        if not len(part):
            assert not gradient.any()
            continue
        a, b = (
            Quantizer(line, wide if square else line).encode(part, whole),
            Quantizer(wide, wide).encode(weight, whole),
        )
        c = Quantizer(line, line).encode(grad, whole)
        one = torch.ones((), device="cuda")
        near(out, decoded(a.rowwise), decoded(b.rowwise).t(), one, False)
        near(gradient, decoded(c.columnwise), decoded(a.columnwise).t(), one, False)


def decoded(plane) -> Tensor:
    return plane.dequantize(torch.float32).double()


# --- buffers of the caller


@on_hopper
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("name", ["fp8-current", "fp8-rowwise", "mxfp8"])
def test_results_lie_in_the_buffers_of_the_caller_and_rows_beyond_the_counts_stay(name, where) -> None:
    """core 87: values of a call without buffers; with counts on the device nothing waits for their sum."""
    m = duotone.GroupedLinear(3, K, N, recipe=recipes.load(name), name="g", **CUDA)
    splits, rows = [130, 0, 70], 256
    counts = torch.tensor(splits, device="cuda") if where == "device" else splits
    x, dy = torch.randn(rows, K, **_bf16()), torch.randn(rows, N, **_bf16())
    plain = x[:200].clone().requires_grad_()
    expected = m(plain, splits)
    expected.backward(dy[:200])
    gradients = [p.grad.clone() for p in m.parameters()]
    m.zero_grad()
    out, dgrad_out = torch.full((rows, N), 7.0, **_bf16()), torch.full((rows, K), 7.0, **_bf16())
    leaf = x.clone().requires_grad_()
    if where == "device" and name == "mxfp8":
        with pytest.raises(duotone.UserError, match="sum to"):
            m(leaf, counts, dgrad_out=dgrad_out)  # waits for the counts, and without out they have to cover x
    y = m(leaf, counts, out=out, dgrad_out=dgrad_out)
    y.backward(dy)
    assert y.data_ptr() == out.data_ptr() and leaf.grad.data_ptr() == dgrad_out.data_ptr()
    close([out[:200], dgrad_out[:200], *(p.grad for p in m.parameters())], [expected, plain.grad, *gradients])
    assert bool((out[200:] == 7).all()) and bool((dgrad_out[200:] == 7).all())


def _bf16() -> dict:
    return {"device": "cuda", "dtype": torch.bfloat16}
