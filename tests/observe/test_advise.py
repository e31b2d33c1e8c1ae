"""What `advise` says of each GEMM, against casts that are torch's own, and the recipe that follows."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import duotone
from duotone import observe, recipes
from duotone.errors import RecipeError, UserError
from duotone.observe import operand_samples
from duotone.observe.advice import AdviceRow, conclude, with_pareto_marks
from duotone.observe.candidates import formats_of, load_candidates
from duotone.recipes import QuantizerRole
from duotone.recipes.roles import PLANES_OF_GEMM, TENSOR_TYPES

BATCH = torch.randn(160, 64, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def by_key(advice: observe.Advice) -> dict[tuple[str, str, str], AdviceRow]:
    return {(row.module, row.gemm, row.recipe): row for row in advice.rows}


def in_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast under one scale and back, with torch alone."""
    scale = torch.finfo(dtype).max / x.abs().max()
    return (x * scale).to(dtype).float() / scale


def test_the_errors_are_those_of_products_of_torchs_own_casts() -> None:
    model, e4m3, e5m2 = network(), torch.float8_e4m3fn, torch.float8_e5m2
    rows = by_key(observe.advise(model, BATCH, square, candidates=["fp8-current"]))
    hidden = model[1](model[0](BATCH)).detach()
    gradient = 2 * model[2](hidden).detach() / (160 * 64)
    weight = model[2].weight.detach()
    operands = {"input": (hidden, e4m3), "weight": (weight, e4m3), "grad_output": (gradient, e5m2)}
    pairs = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
    transposes = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}
    for gemm, names in pairs.items():
        exact, cast = [], []
        for name, is_turned in zip(names, transposes[gemm], strict=True):
            x, dtype = operands[name]
            exact.append(x.t() if is_turned else x)
            cast.append(in_fp8(exact[-1], dtype))
        product, decoded = exact[0] @ exact[1].T, cast[0] @ cast[1].T
        expected = 10 * math.log10((product.square().sum() / (decoded - product).square().sum()).item())
        assert rows["2", gemm, "fp8-current"].snr_db == pytest.approx(expected, abs=0.01)
        assert rows["2", gemm, "bf16"].snr_db is None


def test_bytes_are_those_of_the_planes() -> None:
    rows = by_key(observe.advise(network(), BATCH, square, candidates=["mxfp8", "fp8-current"]))
    assert rows["0", "fprop", "bf16"].bytes == 4 * (160 * 64 + 96 * 64)
    assert rows["0", "fprop", "fp8-current"].bytes == 160 * 64 + 96 * 64 + 2 * 4
    assert rows["0", "wgrad", "mxfp8"].bytes == (96 + 64) * (160 + 160 // 32)


def test_underflow_and_saturation_are_counted_where_they_happen() -> None:
    """One value 2^30 times as large as the others leaves E4M3 no code for them under one scale."""
    x = torch.ones(32, 64)
    x[0, 0] = 2.0**30
    rows = by_key(observe.advise(network(), x, lambda y: y.sum(), candidates=["fp8-current", "mxfp8"]))
    assert rows["0", "fprop", "fp8-current"].underflow == pytest.approx(1 - 1 / (32 * 64))
    assert rows["0", "fprop", "mxfp8"].underflow == pytest.approx(31 / (32 * 64))
    assert rows["0", "fprop", "bf16"].underflow == rows["0", "fprop", "bf16"].saturation == 0.0


def test_a_row_is_on_the_front_if_it_errs_less_than_all_that_are_as_fast() -> None:
    """By 3 dB, as a rule asks for; of equal rows the first is. Without a speed those as small count."""
    row = AdviceRow("m", "fprop", "", "a", "b", 20.0, 0.0, 0.0, 100, 1.0, "measured")
    rows = [
        replace(row, recipe="first"),
        replace(row, recipe="same"),
        replace(row, recipe="louder", snr_db=19.0),
        replace(row, recipe="faster", snr_db=10.0, speed=1.5),
        replace(row, recipe="little better", snr_db=12.9, speed=1.4),
        replace(row, recipe="dominated", snr_db=16.0, bytes=400, speed=0.95),
        replace(row, recipe="unknown", speed=None),
        replace(row, recipe="exact", snr_db=None, bytes=200, speed=0.9),
        replace(row, recipe="smaller", snr_db=-math.inf, bytes=50, speed=0.5),
    ]
    assert [r.recipe for r in with_pareto_marks(rows) if r.is_pareto] == ["first", "faster", "exact"]
    unknown = [replace(each, speed=None) for each in (rows[0], rows[3], rows[-2], replace(rows[-1], snr_db=5.0))]
    assert [r.recipe for r in with_pareto_marks(unknown) if r.is_pareto] == ["first", "exact", "smaller"]


def test_the_table_fits_80_columns_below_the_names_of_modules() -> None:
    row = AdviceRow("m" * 90, "fprop", "r" * 40, "a", "b", -10.5, 1.0, 1.0, 1023 << 30, 1.25, "interpolated")
    rows = (replace(row, is_pareto=True), replace(row, recipe="bf16", snr_db=None, speed=None))
    advice = observe.Advice(rows, {}, "bf16", recipes.load("bf16"), "")
    front, every = (advice.table(all_rows).splitlines() for all_rows in (False, True))
    assert max(map(len, (*front, *every))) <= 80 and front[0].split()[-1] == "speed"
    assert front[1].startswith("mmm") and front[2].split()[0] == "fprop" and front[3] == ""
    assert every[2].endswith("1.25*      *") and every[3].split()[:3] == ["fprop", "bf16", "exact"]
    assert " ".join(front[4:]).startswith("SNR of the product;") and "bytes of both operands" in " ".join(front[4:])


def row_of(recipe: str, gemm: str, snr: float, speed: float | None = None) -> AdviceRow:
    formats = formats_of(recipes.load(recipe), ("m", gemm))
    return AdviceRow("m", gemm, recipe, *formats, snr, 0.0, 0.0, 1, speed, "unknown")


def concluded(*rows: AdviceRow, slow: tuple[str, ...] = ()) -> dict[tuple[str, str], str]:
    names = dict.fromkeys(row.recipe for row in rows)
    advice = conclude(rows, {r.name: r for r in load_candidates("", list(names))}, slow, ())
    return {gemm: formats_of(advice.recipe, ("m", gemm)) for gemm in PLANES_OF_GEMM} | {"base": advice.base}


def test_a_format_of_another_recipe_is_proposed_where_it_gains_three_decibels() -> None:
    usual = {gemm: formats_of(recipes.load("mxfp8"), ("m", gemm)) for gemm in PLANES_OF_GEMM}
    other = {gemm: formats_of(recipes.load("fp8-rowwise"), ("m", gemm)) for gemm in PLANES_OF_GEMM}
    rows = [row_of("bf16", gemm, math.inf) for gemm in PLANES_OF_GEMM]
    rows += [row_of("mxfp8", gemm, 30.0) for gemm in PLANES_OF_GEMM]
    gains = {"fprop": -25.0, "dgrad": 2.9, "wgrad": 3.1}
    rows += [row_of("fp8-rowwise", gemm, 30.0 + gain) for gemm, gain in gains.items()]
    expected = {"fprop": usual["fprop"], "dgrad": usual["dgrad"], "wgrad": other["wgrad"], "base": "mxfp8"}
    assert concluded(*rows) == expected
    assert concluded(*rows, slow=("mxfp8",))["base"] == "fp8-rowwise"
    assert concluded(*rows, slow=("mxfp8", "fp8-rowwise"))["base"] == "bf16"


def test_what_loses_too_much_or_is_slow_stays_in_high_precision() -> None:
    exact = ("identity", "identity")
    rows = [row_of("bf16", gemm, math.inf, 1.0) for gemm in PLANES_OF_GEMM]
    rows += [row_of("mxfp8", "fprop", 4.7), row_of("mxfp8", "dgrad", 4.8), row_of("mxfp8", "wgrad", 30.0, 0.99)]
    result = concluded(*rows)
    assert result["fprop"] == result["wgrad"] == exact != result["dgrad"]


def test_the_rules_load_as_a_file_and_convert_the_model(tmp_path) -> None:
    model = network()
    advice = observe.advise(model, BATCH, square, size=(4096, 8192))
    path = tmp_path / "advised.toml"
    path.write_text(advice.toml)
    recipe = recipes.load(str(path))
    for name, site in (("0", duotone.recipes.roles.ANYWHERE), ("2", duotone.recipes.roles.ANYWHERE)):
        for role in (QuantizerRole("linear", tensor_type, name) for tensor_type in TENSOR_TYPES):
            assert recipe.quantizer(role, site) == advice.recipe.quantizer(role, site)
    duotone.convert(model, recipe, rules=())
    square(model(BATCH)).backward()
    assert f'base = "{advice.base}"' in advice.toml and advice.toml in str(advice)


def test_a_recipe_without_a_name_of_its_own_is_a_base_as_a_table(tmp_path) -> None:
    gradients = recipes.Rule(tensor_type="grad_output", format="mxfp8_e5m2")
    recipe = recipes.RuleRecipe(title="mine", base=recipes.load("mxfp8"), rules=(gradients,))
    advice = observe.advise(network(), BATCH, square, candidates=[recipe])
    path = tmp_path / "advised.toml"
    path.write_text(advice.toml)
    assert advice.base == "mine" and recipes.load(str(path)).base == recipe


def test_speeds_are_those_of_the_measured_table_and_slow_recipes_are_no_base() -> None:
    """Width 4096 makes 64 x 96 a linear of 4096 x 6144; bf16 is faster there than what an H200 emulates."""
    rows = by_key(advice := observe.advise(network(), BATCH, square, size=(4096, 8192)))
    table = observe.speeds.measured()
    assert rows["0", "fprop", "fp8-current"].speed == table.speed("fp8-current", (8192, 4096, 6144)).ratio
    assert rows["0", "fprop", "mxfp8"].speed < 1 and advice.base.startswith("fp8")
    assert "interpolated" in advice.notes[0] and "NVIDIA H200" in advice.notes[0]
    unknown = observe.advise(network(), BATCH, square)
    assert {row.speed for row in unknown.rows} == {None} and "unknown" in unknown.notes[0]


def test_a_step_leaves_no_trace_and_a_converted_model_is_advised_the_same() -> None:
    model = network()
    square(model(BATCH)).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    plain = observe.advise(model, BATCH, square)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, before) for p, before in zip(model.parameters(), gradients, strict=True))
    converted = observe.advise(duotone.convert(model, "nvfp4", rules=()), (BATCH,), square)
    assert converted.rows == plain.rows


def test_output_heads_are_left_out_and_frozen_models_have_forward_alone() -> None:
    model = nn.ModuleDict({"body": nn.Linear(32, 32), "lm_head": nn.Linear(32, 8)})
    model.forward = lambda x: model["lm_head"](model["body"](x))
    assert {row.module for row in observe.advise(model, torch.randn(32, 32), square).rows} == {"body"}
    model["body"].requires_grad_(False)
    assert {row.gemm for row in observe.advise(model, torch.randn(32, 32), square).rows} == {"fprop"}


def test_samples_that_do_not_fit_have_fewer_rows_and_the_advice_tells_it() -> None:
    row = 4 * (64 + 96 + 96 + 64)
    advice = observe.advise(network(), BATCH, square, memory=40 * row)
    assert advice.notes[0] == "memory holds 40 of 160 rows of each operand: the statistics are those of fewer rows"
    whole = by_key(observe.advise(network(), BATCH, square))
    for key, few in by_key(advice).items():
        assert few.bytes == whole[key].bytes
        if key[1] != "wgrad" and few.snr_db is not None:  # wgrad sums over the tokens that were sampled
            assert few.snr_db == pytest.approx(whole[key].snr_db, abs=0.5)
    with pytest.raises(UserError, match=r"operands of 2 linears takes 1\.25 KiB, and 1\.00 KiB may be"):
        observe.advise(network(), BATCH, square, memory=1024)


def test_a_device_that_runs_out_of_memory_holds_half_as_many_rows(monkeypatch) -> None:
    sample, sizes = operand_samples._sample, []

    def scarce(model, linears, step, rows, device):
        sizes.append(rows)
        if rows > 64:
            raise torch.OutOfMemoryError("full")
        return sample(model, linears, step, rows, device)

    monkeypatch.setattr(operand_samples, "_sample", scarce)
    advice = observe.advise(network(), BATCH, square)
    assert sizes == [256, 128, 64] and advice.notes[0].startswith("memory holds 64 of 160 rows")


@pytest.mark.parametrize("count, rows", [(5, 9), (1000, 256), (1000, 100), (300, 256)])
def test_sampled_rows_are_distinct_and_spread_from_the_first_to_the_last(count: int, rows: int) -> None:
    places = operand_samples.spread_rows(count, rows)
    assert len(places) == len(places.unique()) == min(count, rows) and places.max() < count
    assert places[0] == 0 and (rows < 256 or places[-1] == count - 1)


def test_bad_input_is_one_line() -> None:
    model = network()
    with pytest.raises(UserError, match=r"needs a loss.*got a tensor of shape \(160, 64\): change `loss`"):
        observe.advise(model, BATCH)
    with pytest.raises(UserError, match="got a number without a gradient"):
        observe.advise(model, BATCH, lambda y: y.detach().sum())
    with pytest.raises(UserError, match="advise got no recipes; give at least one"):
        observe.advise(model, BATCH, square, candidates=[])
    with pytest.raises(UserError, match="got dict"):
        observe.advise(model, BATCH, lambda y: {"loss": y})
    with pytest.raises(UserError, match="no linear of the model ran"):
        observe.advise(nn.LayerNorm(64), BATCH, square)
    with pytest.raises(UserError, match=r"takes a torch.nn.Module; got int"):
        observe.advise(3, BATCH, square)
    with pytest.raises(UserError, match="advise takes each recipe once, and 'mxfp8' comes twice"):
        observe.advise(model, BATCH, square, candidates=["mxfp8", "mxfp8"])
    with pytest.raises(RecipeError, match="mxfp9"):
        observe.advise(model, BATCH, square, candidates=["mxfp9"])


@pytest.mark.parametrize(
    ("batch", "words"),
    [(torch.full((4, 16), torch.nan), "met NaN or infinities in the input of 0"), (torch.zeros(0, 16), "met no rows")],
)
def test_a_batch_that_tells_nothing_is_refused(batch: torch.Tensor, words: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with pytest.raises(UserError, match=words):
        observe.advise(model, batch, lambda y: y.square().sum())


@pytest.mark.parametrize("origin", [0, 1, 2])
def test_a_weight_that_is_not_finite_is_named_before_what_follows_from_it(origin: int) -> None:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    with torch.no_grad():
        model[origin].weight[3, 5] = torch.inf
    with pytest.raises(UserError, match=f"met NaN or infinities in the weight of {origin}"):
        observe.advise(model, torch.randn(8, 16), lambda y: y.square().sum())


@pytest.mark.parametrize("size", [(4096,), "4096x8192", (0, 0)])
def test_a_size_is_two_positive_integers(size: object) -> None:
    with pytest.raises(UserError, match="give width and tokens"):
        observe.advise(nn.Linear(16, 16), torch.zeros(4, 16), lambda y: y.sum(), size=size)  # type: ignore[arg-type]


def test_a_model_that_was_compiled_and_ran_is_sampled_eagerly() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    compiled, x = torch.compile(model, backend="eager"), torch.randn(8, 16)
    compiled(x)
    names = {row.module.removeprefix("_orig_mod.") for row in observe.advise(compiled, x, lambda y: y.sum()).rows}
    assert names == {row.module for row in observe.advise(model, x, lambda y: y.sum()).rows}
