"""Which stage a group of linears gets: the one that takes all segments at once only where results stay the same."""

from collections import deque
from dataclasses import replace

import pytest
import torch

import duotone
from duotone import recipes
from duotone.dispatch import segment_products, segments
from duotone.dispatch.rule import JoinedOperand
from duotone.linear.core import Calibrating, LinearStage
from duotone.linear.grouped import GroupedStage
from duotone.linear.plan import LinearPlan, PlanRequest
from duotone.linear.plan_builder import build_plan
from duotone.linear.plane_source import WeightCache
from duotone.linear.row_counts import device_splits
from duotone.linear.sink import GRADIENT, Deferred, ToMainGrad
from duotone.modules import GroupedLinear
from duotone.modules.delayed_states import with_slots
from duotone.recipes import Float8BlockScaling
from duotone.state.region import AmaxMode

pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")
from duotone.kernels.segment_cast import Segments

SHAPE = (64, 32)


def plan(name: str = "fp8-rowwise", **options) -> LinearPlan:
    recipe = options.pop("recipe", None) or recipes.load(name)
    setting = PlanRequest(recipe, (), "g", "grouped_linear", options.pop("device", "sm90"), torch.bfloat16, **options)
    return build_plan(setting)


def linears(resolved: LinearPlan, count: int = 3) -> list[LinearStage]:
    if resolved.is_delayed:
        return [LinearStage(with_slots(resolved, ("f", "b"), "", AmaxMode.RECORD, i), GRADIENT) for i in range(count)]
    return [LinearStage(resolved, GRADIENT) for _ in range(count)]


def from_caches(members: list[LinearStage], caches: list[WeightCache], kind: str) -> list[LinearStage]:
    """The linears with weights whose planes a cache keeps."""
    sources = [getattr(cache, kind) for cache in caches]
    plans = [
        replace(one.plan, weight=one.plan.weight.from_cache(source, True))
        for one, source in zip(members, sources, strict=True)
    ]
    return [replace(one, plan=plan) for one, plan in zip(members, plans, strict=True)]


def stage(*args, shape: tuple[int, int] = SHAPE, **options) -> GroupedStage:
    return GroupedStage.of(linears(plan(*args, **options)), shape)


@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed", "fp8-rowwise"])
def test_native_products_of_whole_scales_take_segments(name) -> None:
    for grads in ((True, True), (True, False), (False, True), (False, False)):
        assert stage(name, input_grad=grads[0], weight_grad=grads[1]).is_joint
    assert not stage(name, device="cpu").is_joint
    for shape in ((64, 24), (24, 64), (0, 64)):
        assert not stage(name, shape=shape).is_joint


def test_blocks_of_whole_weights_take_one_launch_or_the_loop() -> None:
    for recipe in (Float8BlockScaling(), Float8BlockScaling(wgrad_input_128x128=True)):
        result = stage(recipe=recipe, shape=(256, 128))
        assert result.is_joint and result.grouped and result.takes_device_splits
        large = stage(recipe=recipe, shape=(4096, 4224))
        assert large.takes_device_splits and not large.is_joint and not large.grouped
        for shape in ((256, 144), (144, 256), (0, 128)):
            assert not stage(recipe=recipe, shape=shape).takes_device_splits
    late = [replace(one, sink=Deferred(deque())) for one in linears(plan("fp8-block"))]
    assert not GroupedStage.of(late, (256, 128)).is_joint
    assert not stage("fp8-block", device="sm100", shape=(256, 128)).is_joint


@pytest.mark.parametrize("name", ["bf16", "fp8-block", "mxfp8", "nvfp4", "mxfp8-fwd-bf16-bwd"])
def test_other_formats_keep_the_loop(name) -> None:
    assert not stage(name).is_joint


def test_options_that_do_more_keep_the_loop() -> None:
    saving = stage("fp8-current", save_original_input=True)
    assert not saving.is_joint
    calibrating = [Calibrating(one, GRADIENT, one) for one in [plan()] * 3]
    assert not GroupedStage.of(calibrating, SHAPE).is_joint


def test_delayed_slots_lie_as_far_apart_as_the_linears_do() -> None:
    members = stage("fp8-delayed").linears
    for i, operands in enumerate(zip(*[one.plan.operands.values() for one in members], strict=True)):
        first, distance = ((0, 4), (2, 4), (0, 2))[i]
        assert [one.context.slots[0].index for one in operands] == [first + n * distance for n in range(3)]
        assert all(one.slot_distance == distance for one in operands)


def test_row_counts_stay_on_the_device_where_no_gradient_is_put_off(monkeypatch) -> None:
    assert stage("fp8-rowwise").takes_device_splits and stage("fp8-delayed").takes_device_splits
    weight = torch.nn.Parameter(torch.zeros(SHAPE))
    for sink, stays in ((ToMainGrad(lambda: weight), True), (Deferred(deque()), False)):
        result = GroupedStage.of([replace(one, sink=sink) for one in linears(plan())], SHAPE)
        assert result.is_joint and result.takes_device_splits is stays
        result = GroupedStage.of([replace(one, sink=sink) for one in linears(plan(weight_grad=False))], SHAPE)
        assert result.takes_device_splits
    result = stage(device="sm100")
    assert result.is_joint and not result.takes_device_splits


def test_one_product_takes_all_linears_where_weights_are_small() -> None:
    """Also those that a cache or a quantized parameter has."""
    small, beyond = (4096, 4096), (4096, 4112)
    assert GroupedStage.of(linears(plan()), small).grouped
    assert not GroupedStage.of(linears(plan()), beyond).grouped
    cache = WeightCache(tuple)
    cached = from_caches(linears(plan()), [cache] * 3, "refreshed")
    assert GroupedStage.of(cached, small).grouped and not GroupedStage.of(cached, beyond).grouped
    assert stage(weight_held=plan().weight.quantizer).grouped
    deferred = [replace(one, sink=Deferred(deque())) for one in linears(plan())]
    assert not GroupedStage.of(deferred, small).grouped


class Columns:
    """A grouped product whose gradients (3, 4, 5) are known; it fills places in the order of segments."""

    def __init__(self) -> None:
        self.gradients, self.launches = torch.randn(3, 4, 5), []

    def of_columns(self, a, b, scales, ends, dtype: torch.dtype) -> torch.Tensor:
        return self.gradients.to(dtype)

    def of_columns_into(self, a, b, scales, ends, first: torch.Tensor, outs: list, adds: bool) -> None:
        self.launches.append(adds)
        for out, one in zip(outs, self.gradients, strict=True):
            _ = out.add_(one) if adds else out.copy_(one)


def weights(mains: list, **flags) -> list:
    """A weight for each main_grad, None where there is none; `flags` are attributes of the first."""
    results = [None if main is None else torch.nn.Parameter(torch.zeros(4, 5)) for main in mains]
    for weight, main in zip(results, mains, strict=True):
        if weight is not None:
            weight.main_grad = main
    for name, value in flags.items():
        setattr(results[0], name, value)
    return results


@pytest.fixture
def fill(monkeypatch):
    """Fills the main_grad of weights; the launches of the product that did."""

    def filled(parameters: list, columns: Columns) -> list[bool]:
        monkeypatch.setattr(segment_products, "table", list)
        monkeypatch.setattr(segment_products, "grouped_product", lambda *kind: columns)
        sinks = [ToMainGrad(lambda weight=weight: weight) for weight in parameters]
        group = GroupedStage.of(
            [replace(one, sink=sink) for one, sink in zip(linears(plan()), sinks, strict=True)], SHAPE
        )
        codes, like = torch.zeros(9, 16, dtype=torch.uint8), torch.zeros(1, dtype=torch.bfloat16)
        row = group.plan.wgrad.a
        operands = JoinedOperand(row, codes[:4], codes), JoinedOperand(row, codes[4:], codes)
        where = Segments(torch.zeros(6), 3, 16, 16, grouped=True)
        result = group.weight_gradients(*operands, where, like, [weight is not None for weight in parameters])
        assert result == [None] * 3
        return columns.launches

    return filled


def test_gradients_of_a_group_go_to_their_places_in_one_product(fill) -> None:
    columns = Columns()
    for overwrites in (False, True):
        mains = [torch.full((4, 5), 3.0) for _ in range(3)]
        result = weights(mains, overwrite_main_grad=overwrites)
        versions = [main._version for main in mains]
        fill(result, columns)
        want = columns.gradients + 3
        want[0] = columns.gradients[0] if overwrites else want[0]
        assert all(torch.equal(a, b) for a, b in zip(mains, want, strict=True))
        assert all(main._version > before for main, before in zip(mains, versions, strict=True))
    assert columns.launches == [True, True]


def test_places_that_the_product_cannot_take_are_filled_after_it(fill) -> None:
    """Strided, of another dtype, frozen; all of them."""
    columns, wide = Columns(), torch.full((4, 10), 3.0)
    half = torch.full((4, 5), 3.0, dtype=torch.bfloat16)
    whole = torch.full((4, 5), 3.0)
    assert fill(weights([wide[:, :5], whole, None]), columns) == [True]
    assert fill(weights([half, None, whole]), columns) == [True, True]
    late = torch.full((4, 10), 1.0)[:, ::2]
    assert fill(weights([None, torch.zeros(4, 5), late]), columns) == [True] * 3
    assert torch.equal(late, columns.gradients[2] + 1)
    assert torch.equal(wide, torch.cat([columns.gradients[0] + 3, torch.full((4, 5), 3.0)], 1))
    assert torch.equal(whole, columns.gradients[1] + 3 + columns.gradients[2])
    assert torch.equal(half, (columns.gradients[0] + 3).bfloat16())
    assert fill(weights([wide[:, 5:], torch.zeros(4, 5, dtype=torch.float64), None]), columns) == [True] * 3
    assert torch.equal(wide[:, 5:], columns.gradients[0] + 3)


def test_experts_that_share_a_buffer_are_added_up(fill) -> None:
    """Tied experts in a first microbatch: the first overwrites, the second adds; so do buffers that are one."""
    columns, main = Columns(), torch.full((4, 5), 9.0)
    tied = weights([main] * 3)
    tied = [tied[0]] * 3
    tied[0].duotone_overwrite = True
    fill(tied, columns)
    assert torch.allclose(main, columns.gradients.sum(0), atol=1e-6)
    fill(weights([main] * 3), columns)
    assert torch.allclose(main, 2 * columns.gradients.sum(0), atol=1e-6)


def test_biases_of_some_experts_are_zeros_for_the_others() -> None:
    inputs = [None, torch.ones(4), None]
    assert torch.equal(segment_products.stacked(inputs, 4), torch.tensor([[0.0], [1], [0]]).expand(3, 4))
    assert segment_products.stacked([None, None], 4) is None


def test_segments_are_padded_as_the_kernels_take_them() -> None:
    """Triton is imported late, so the constants are written twice."""
    from duotone.kernels import segments as kernels

    assert (segments.STEP, segments.CHUNK) == (kernels.STEP.value, kernels.CHUNK.value)


def test_the_plan_names_what_multiplies(monkeypatch) -> None:
    recipe = recipes.load("fp8-delayed")
    grouped = ["grouped FP8 product, fast accumulation", "grouped FP8 product", "grouped FP8 product"]
    cublas = [name.replace("grouped", "cuBLAS") for name in grouped]
    for sizes, inputs, want, why in (
        ((64, 32), {}, grouped, "one launch for all experts"),
        ((64, 32), {"bias": True, "fuse_wgrad_accumulation": True}, grouped, "one launch for all experts"),
        ((64, 32), {"delay_wgrad_compute": True}, cublas, "a product for each expert: weight gradients are put off"),
        ((4096, 4112), {}, cublas, f"a product for each expert: a weight has more than {1 << 24} elements"),
        ((64, 40), {}, cublas, "a product for each expert: it takes weights whose sizes are multiples of 16"),
    ):
        m = GroupedLinear(3, *sizes, recipe=recipe, device="meta", **{"bias": False, **inputs})
        rows = duotone.plan(m, device="sm90", dtype=torch.bfloat16)
        assert [row.kernel for row in rows] == want and {row.reason for row in rows} == {why}


def test_tensors_that_calls_share_are_not_those_of_a_captured_graph(monkeypatch) -> None:
    """Or the graph would read addresses that the cache has let go of."""
    monkeypatch.setattr(segments, "is_capturing", lambda: True)
    monkeypatch.setattr(segments, "_TABLES", {})
    results = [segments._remembered((16, 32), torch.int32, torch.device("cpu")) for _ in range(2)]
    assert results[0] is not results[1] and results[0].tolist() == [16, 32] and not segments._TABLES


def test_cached_weights_take_segments() -> None:
    caches = [WeightCache(tuple) for _ in range(3)]
    for kind in ("refreshed", "reused"):
        members = from_caches(linears(plan()), caches, kind)
        assert GroupedStage.of(members, SHAPE).is_joint


def test_modules_on_a_cpu_have_the_loop() -> None:
    recipe = recipes.load("fp8-rowwise")
    m = GroupedLinear(2, 32, 64, bias=False, params_dtype=torch.bfloat16, recipe=recipe)
    m(torch.zeros(4, 32, dtype=torch.bfloat16), torch.tensor([1, 3]))
    assert [one.is_joint for one in m.plans.stages.values()] == [False]


@pytest.mark.parametrize("counts", [torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.zeros(1, 2).int()])
def test_bad_counts_on_the_device_are_one_line(counts) -> None:
    with pytest.raises(Exception, match=r"^m_splits is 2 row counts, .* got \("):
        device_splits(counts, 2)
