"""Taps: the same bits, and the statistics of what they lost (core 98)."""

import copy
import math
import pickle
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch import nn

import duotone
from duotone import formats, observe, recipes
from duotone.observe.statistics import EXTREMES, FIELDS, measure, summary
from duotone.recipes import Recipe
from duotone.tensor import BOTH, LOCAL, Plane, Quantizer
from duotone.tensor.plane_encoder import encode_plane

BF16 = torch.bfloat16
ROWS = {"module", "role", "plane", "format", "snr_db", "underflow", "saturation", "amax", "dynamic_range_bits"}
ROWS |= {"amaxes_skipped", "spikes_clamped", "bias", "cosine", "nan", "inf"}


def step(m: nn.Module, recipe: recipes.Recipe, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of a copy of `m`."""
    m, leaf = copy.deepcopy(m), x.clone().requires_grad_()
    with duotone.autocast(recipe=recipe):
        y = m(leaf)
    y.backward(dy)
    return [y, leaf.grad, *(p.grad for p in m.parameters())]


def assert_same_bits(m: nn.Module, recipe: recipes.Recipe, store: observe.Tap) -> None:
    x, dy = torch.randn(40, 96).to(BF16), torch.randn(40, 64).to(BF16)
    plain, tapped = step(m, recipe, x, dy), step(m, observe.with_statistics(recipe, store), x, dy)
    assert all(torch.equal(a, b) for a, b in zip(plain, tapped, strict=True))


@pytest.mark.parametrize("name", recipes.names())
def test_a_tapped_recipe_computes_the_same_bits(name: str) -> None:
    """core 65."""
    recipe = recipes.load(name)
    assert_same_bits(duotone.convert(nn.Linear(96, 64, dtype=BF16), recipe), recipe, observe.Tap())


def test_rows_name_module_role_plane_and_format() -> None:
    store = observe.Tap()
    m = duotone.convert(nn.ModuleDict({"proj": nn.Linear(96, 64)}), recipes.load("mxfp8-fwd-nvfp4-bwd"))
    with duotone.autocast(recipe=observe.with_statistics(recipes.load("mxfp8-fwd-nvfp4-bwd"), store)):
        for _ in range(3):
            m["proj"](torch.randn(40, 96).requires_grad_()).square().sum().backward()
    rows = {(row["module"], row["role"], row["plane"]): row for row in store.rows()}
    assert set(rows) == {("proj", r, p) for r in ("input", "weight", "grad_output") for p in ("rowwise", "columnwise")}
    assert all(row["samples"] == 3 and set(row) == ROWS | {"samples"} for row in rows.values())
    assert rows["proj", "weight", "columnwise"]["format"] == "nvfp4"
    # E4M3 keeps 4 significant bits and E2M1 2: about 31 and 20 dB on normal data.
    assert 28 < rows["proj", "input", "rowwise"]["snr_db"] < 34
    assert 17 < rows["proj", "input", "columnwise"]["snr_db"] < 23


def test_a_rule_by_shape_decides_under_a_tap_as_without() -> None:
    recipe = recipes.from_dict(
        {
            "name": "by shape",
            "rules": [{"out_features": "==64", "format": "mxfp8_e4m3"}, {"format": "identity"}],
        }
    )
    store = observe.Tap()
    assert_same_bits(duotone.convert(nn.Linear(96, 64, dtype=BF16), recipe, rules=()), recipe, store)
    assert {row["format"] for row in store.rows()} == {"mxfp8_e4m3"}


def test_a_factory_sees_the_same_roles_under_a_tap() -> None:
    roles: list[duotone.QuantizerRole | None] = []

    def factory(role: duotone.QuantizerRole | None) -> Quantizer:
        roles.append(role)
        return Quantizer()

    recipe = duotone.CustomRecipe(qfactory=factory)
    m = duotone.convert(nn.Linear(96, 64, dtype=BF16), recipe, rules=())
    roles.clear()
    step(m, recipe, torch.randn(8, 96).to(BF16), torch.randn(8, 64).to(BF16))
    plain = list(roles)
    roles.clear()
    step(m, observe.with_statistics(recipe, observe.Tap()), torch.randn(8, 96).to(BF16), torch.randn(8, 64).to(BF16))
    assert plain == roles and None in roles


def test_every_field_of_a_recipe_holds_under_its_tap() -> None:
    common = {"emulate_mixed": True, "fp8_dpa": True, "fprop_fast_accum": False, "wgrad_fast_accum": True}
    recipe = replace(recipes.load("mxfp8"), **common, min_weight_elements="measured", evaluation=recipes.load("nvfp4"))
    store = observe.Tap()
    tapped = observe.with_statistics(recipe, store)
    names = {field.name for field in fields(Recipe)} - {"evaluation"}
    assert {name: getattr(tapped, name) for name in names} == {name: getattr(recipe, name) for name in names}
    assert tapped.alignment == recipe.alignment
    m = duotone.convert(nn.Linear(96, 64, dtype=BF16), recipe, rules=()).eval()
    assert_same_bits(m, recipe, store)
    assert {row["format"].split("_")[0] for row in store.rows()} == {"nvfp4"}


class Doubling(Quantizer):
    """A user-made quantizer: codes of 2x, so that half of what is decoded is noise."""

    def encode(self, x, usage=BOTH, ctx=LOCAL):
        return super().encode(x * 2, usage, ctx)


@dataclass(frozen=True)
class Duck:
    """No subclass of anything, and no more than a quantizer needs."""

    rowwise = formats.get("mxfp8_e4m3")
    columnwise = formats.get("fp8_e5m2_tensor")

    def encode(self, x, usage=BOTH, ctx=LOCAL):
        return Quantizer(self.rowwise, self.columnwise).encode(x, usage, ctx)


@pytest.mark.parametrize(
    ("quantizer", "snr"),
    [(Doubling(formats.get("mxfp8_e4m3"), formats.get("mxfp8_e4m3")), (-0.2, 0.2)), (Duck(), (28, 34))],
)
def test_user_made_quantizers_are_tapped(quantizer: object, snr: tuple[float, float]) -> None:
    recipe = duotone.CustomRecipe(qfactory=lambda role: quantizer, emulate_mixed=True)
    store = observe.Tap()
    assert_same_bits(duotone.convert(nn.Linear(96, 64, dtype=BF16), recipe, rules=()), recipe, store)
    rows = {(row["role"], row["plane"]): row for row in store.rows()}
    assert set(rows) == {(r, p) for r in ("input", "weight", "grad_output") for p in ("rowwise", "columnwise")}
    assert all(snr[0] < row["snr_db"] < snr[1] for (_, plane), row in rows.items() if plane == "rowwise")


def test_delayed_formats_are_judged_by_the_scale_that_they_used() -> None:
    store, recipe = observe.Tap(), recipes.load("fp8-delayed")
    m = duotone.convert(nn.Linear(64, 32, dtype=BF16), recipe, rules=())
    first, second = torch.full((16, 64), 2.0).to(BF16), torch.full((16, 64), 2.0).to(BF16)
    second[0, :4] = 8.0  # over the range that the first step foretold
    for x in (first, second):
        with duotone.autocast(recipe=observe.with_statistics(recipe, store)):
            m(x.requires_grad_()).sum().backward()
    row = next(r for r in store.rows() if (r["role"], r["plane"]) == ("input", "rowwise"))
    assert (row["amax"], row["dynamic_range_bits"], row["samples"]) == (8.0, 2.0, 2)
    assert row["saturation"] == 4 / (2 * 16 * 64)


def numpy_summary(x: torch.Tensor, decoded: torch.Tensor, ceiling: torch.Tensor) -> dict[str, float]:
    """The columns of a row from float64 arrays, written from their definitions."""
    options, values, most = (t.to(torch.float64).numpy() for t in (x, decoded, ceiling))
    nan, inf, ok = np.isnan(options).sum(), np.isinf(options).sum(), np.isfinite(options)
    options, values, most = options[ok], values[ok], most[ok]
    size = np.abs(options[options != 0])
    return {
        "snr_db": 10 * np.log10(np.sum(options**2) / np.sum((options - values) ** 2)),
        "underflow": np.sum((options != 0) & (values == 0)) / size.size,
        "saturation": np.mean(np.abs(options) > most),
        "bias": np.sum(values - options) / np.sum(size),
        "cosine": np.dot(options, values) / np.linalg.norm(options) / np.linalg.norm(values),
        "nan": nan,
        "inf": inf,
        "amax": size.max(),
        "dynamic_range_bits": np.log2(size.max() / size.min()),
    }


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "fp8_e5m2_row", "mxfp8_e4m3", "fp8_e4m3_1x128", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_agree_with_numpy_in_float64(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(48, 256) * torch.logspace(-12, 3, 256)
    x[0, 0], x[1, 3], x[2, :7] = math.nan, -math.inf, 0.0
    x = x.to(dtype)
    fmt = formats.get(name)
    plane = encode_plane(fmt, torch.where(x.isfinite(), x, 0))  # a NaN would take its whole block with it
    sums, extremes = measure(x, plane)
    expected = numpy_summary(x, plane.dequantize(torch.float32), fmt.ceiling(plane.parts)[:, :256])
    assert summary(sums.tolist(), extremes.tolist()) == pytest.approx(expected, rel=1e-12)


def stats(x: torch.Tensor, name: str, **options) -> dict[str, float]:
    fmt = formats.get(name)
    plane = Plane(fmt, fmt.encode(x, **options), tuple(x.shape))
    sums, extremes = (t.tolist() for t in measure(x, plane))
    return {**dict(zip(FIELDS, sums, strict=True)), **summary(sums, extremes)}


def test_underflow_and_saturation_are_counted_on_known_values() -> None:
    x = torch.tensor([[448.0, 2.0**-10, 2.0**-11, 0.0, 1000.0, -500.0]])
    result = stats(x, "fp8_e4m3_tensor", scale=torch.ones(1))
    # 2^-10 ties to even, which is 0, and 2^-11 is below; 1000 and -500 exceed 448.
    assert (result["nonzero"], result["underflowed"], result["saturated"], result["elements"]) == (5, 2, 2, 6)
    assert result["amax"] == 1000.0 and result["dynamic_range_bits"] == math.log2(1000) + 11
    assert result["noise"] == 2.0**-20 + 2.0**-22 + 552.0**2 + 52.0**2
    assert result["signal"] == pytest.approx(x.double().square().sum().item())


def test_elements_that_are_not_finite_are_counted_and_left_out() -> None:
    x = torch.tensor([[1.0, math.nan, math.inf, -2.0, -math.inf]])
    result = stats(x, "fp8_e4m3_tensor", scale=torch.ones(1))
    assert (result["nan"], result["inf"]) == (1, 2)
    assert (result["elements"], result["signal"], result["noise"]) == (2, 5.0, 0.0)
    assert (result["amax"], result["dynamic_range_bits"]) == (2.0, 1.0)


@pytest.mark.parametrize("name", ["mxfp8", "fp8-delayed", "nvfp4", "fp8-block"])
@pytest.mark.parametrize("rows", [0, 4])
def test_empty_batches_and_batches_without_a_number_have_rows(name: str, rows: int) -> None:
    store, recipe = observe.Tap(), recipes.load(name)
    m = duotone.convert(nn.Linear(64, 32, dtype=BF16), recipe, rules=())
    x = torch.full((rows, 64), math.nan, dtype=BF16, requires_grad=True)
    with duotone.autocast(recipe=observe.with_statistics(recipe, store)):
        m(x).sum().backward()
    inputs = [r for r in store.rows() if r["role"] == "input"]
    assert {r["plane"] for r in inputs} == {"rowwise", "columnwise"}
    assert all((r["amax"], r["snr_db"], r["dynamic_range_bits"]) == (0.0, None, None) for r in inputs)


def test_an_exact_plane_has_no_ratio() -> None:
    store = observe.Tap()
    m = duotone.convert(nn.Linear(32, 32), recipes.load("bf16"))
    with duotone.autocast(recipe=observe.with_statistics(recipes.load("bf16"), store)):
        m(torch.randn(4, 32))
    assert all(row["snr_db"] is None and row["underflow"] == row["saturation"] == 0 for row in store.rows())
    assert all(row["dynamic_range_bits"] > 0 for row in store.rows())


def test_the_watch_for_synchronisation_sees_one(no_synchronisation) -> None:
    with pytest.raises(AssertionError, match="waits for the device"), no_synchronisation():
        torch.ones(1).item()


@pytest.mark.parametrize("name", recipes.names())
def test_a_tapped_step_does_not_synchronise(name: str, no_synchronisation) -> None:
    store, recipe = observe.Tap(), recipes.load(name)
    m = duotone.convert(nn.Linear(64, 32, dtype=BF16), recipe, rules=())
    x, dy = torch.randn(32, 64).to(BF16).requires_grad_(), torch.randn(32, 32).to(BF16)
    with no_synchronisation(), duotone.autocast(recipe=observe.with_statistics(recipe, store)):
        for _ in range(2):
            m(x).backward(dy)
    assert len(store.rows()) >= 4 and all(row["samples"] == 2 for row in store.rows())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run pytest tests/observe on one")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["bf16", "fp8-current", "fp8-block", "mxfp8"])
def test_on_cuda_a_tapped_step_does_not_synchronise(name: str) -> None:
    store, recipe = observe.Tap(), recipes.load(name)
    m = duotone.convert(nn.Linear(64, 32, dtype=BF16, device="cuda"), recipe, rules=())
    x, dy = torch.randn(32, 64).to(BF16).cuda().requires_grad_(), torch.randn(32, 32).to(BF16).cuda()

    def run() -> None:
        with duotone.autocast(recipe=observe.with_statistics(recipe, store)):
            m(x).backward(dy)

    run()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(row["samples"] == 2 for row in store.rows())


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "mxfp8_e4m3", "nvfp4", "identity"])
def test_statistics_need_no_data_on_the_host(name: str) -> None:
    x = torch.empty(32, 64, dtype=BF16, device="meta")
    sums, extremes = measure(x, encode_plane(formats.get(name), x))
    assert (
        sums.shape == (len(FIELDS),)
        and extremes.shape == (len(EXTREMES),)
        and sums.device == extremes.device == x.device
    )


def test_a_tapped_recipe_is_a_value_and_its_pickle_leaves_the_store_behind() -> None:
    recipe, store = recipes.load("mxfp8"), observe.Tap()
    one, two = observe.with_statistics(recipe, store), observe.with_statistics(recipe, store)
    assert one == two and hash(one) == hash(two) and one.key == two.key
    assert one != observe.with_statistics(recipe, observe.Tap()) and one != recipe
    role = duotone.QuantizerRole("linear", "input", "a")
    assert one(role) == two(role) and hash(one(role)) == hash(two(role))
    assert pickle.loads(pickle.dumps(one)) == recipe and pickle.loads(pickle.dumps(one(role))) == recipe(role)
    assert copy.deepcopy(one) is one and recipes.from_dict(one.to_dict()) == recipe


def test_parameters_made_under_a_tap_carry_no_store() -> None:
    store = observe.Tap()
    with duotone.quantized_model_init(recipe=observe.with_statistics(recipes.load("mxfp8"), store)):
        m = duotone.Linear(64, 64, params_dtype=BF16)
    assert type(m.weight.quantizer) is Quantizer and store.rows() == []
    with duotone.autocast(recipe=observe.with_statistics(recipes.load("mxfp8"), store)):
        m(torch.randn(32, 64).to(BF16))
    assert {row["role"] for row in store.rows()} == {"input"}  # what the weight was before is gone


@pytest.mark.parametrize(("recipe", "store"), [(8, observe.Tap()), (recipes.load("mxfp8"), [])])
def test_what_is_no_recipe_or_no_store_is_refused(recipe, store) -> None:
    with pytest.raises(duotone.UserError, match=r"with_statistics takes a (recipe or its name; got int|Tap; got list)"):
        observe.with_statistics(recipe, store)


def test_a_tap_counts_amaxes_that_did_not_enter_a_history_as_they_were() -> None:
    """One infinite gradient, then an input that is a spike; also of steps that were not sampled."""
    recipe = recipes.DelayedScaling(amax_history_len=4)
    store, m = observe.Tap(), duotone.convert(nn.ModuleDict({"proj": nn.Linear(16, 16)}), recipe, ())
    for number in range(4):
        x, dy = torch.randn(8, 16), torch.randn(8, 16)
        if number == 1:
            dy[0, 0] = float("inf")
        if number == 2:
            x[0, 0] = 1e8
        with duotone.autocast(recipe=recipe if number == 1 else observe.with_statistics(recipe, store)):
            y = m["proj"](x.requires_grad_())
        y.backward(dy)
    results = {(r["role"], r["plane"]): (r["amaxes_skipped"], r["spikes_clamped"]) for r in store.rows()}
    expected = dict.fromkeys(results, (0, 0)) | {("grad_output", "rowwise"): (1, 0), ("input", "rowwise"): (0, 1)}
    assert results == expected
