"""Plans: seeds that no two tensors share, the accumulation of each GEMM, and what is too small for a format."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import duotone
from duotone import CustomRecipe, Quantizer, formats, recipes
from duotone.dispatch import target as targets
from duotone.errors import RecipeError
from duotone.formats import ROW, TENSOR, Block
from duotone.linear import PlanRequest, build_plan
from duotone.linear.plane_source import HIGH_PRECISION
from duotone.modules.base import Call
from duotone.modules.planner import Planner
from duotone.recipes import QuantizerRole, Rule

SR, NEAREST = formats.get("nvfp4_sr"), formats.get("nvfp4")


@pytest.mark.parametrize("stochastic", list(itertools.product([True, False], repeat=3)), ids=str)
def test_every_stochastic_tensor_of_every_step_has_a_seed_of_its_own(stochastic) -> None:
    chosen = dict(zip(("input", "weight", "grad_output"), stochastic, strict=True))

    def factory(role):
        fmt = SR if role is not None and chosen.get(role.tensor_type) else NEAREST
        return Quantizer(fmt, fmt)

    plan = build_plan(PlanRequest(CustomRecipe(qfactory=factory), (), "up", "linear", "cpu", torch.bfloat16))
    seen, seed = [], torch.tensor([10])
    for _ in range(3):
        drawn = seed if plan.seeds else None
        streams = [operand.seeded(drawn).seed for operand in plan.operands.values()]
        assert [stream is not None for stream in streams] == list(stochastic)
        seen += [int(stream) for stream in streams if stream is not None]
        seed = seed + plan.seeds
    assert len(set(seen)) == len(seen) == 3 * sum(stochastic)
    assert seen == list(range(10, 10 + len(seen)))


def setting(recipe, shape: tuple[int, int] | None = (64, 96), **other) -> PlanRequest:
    options = {"rules": (), "name": "up", "module_type": "linear", "device": "sm90", "dtype": torch.bfloat16}
    return PlanRequest(recipe, **{**options, "weight_shape": shape, **other})


def kernels(recipe, **other) -> list[str]:
    return [gemm.rule.name for gemm in build_plan(setting(recipe, **other)).gemms]


FAST, SLOW = "cuBLAS FP8 product, fast accumulation", "cuBLAS FP8 product"
FLAGS = list(itertools.product([True, False], repeat=3))


@pytest.mark.parametrize("name", ["fp8-current", "fp8-rowwise", "fp8-delayed"])
def test_only_fprop_accumulates_fast_unless_the_recipe_says_so(name) -> None:
    recipe = recipes.load(name)
    assert kernels(recipe) == [FAST, SLOW, SLOW]
    for flags in FLAGS:
        fields = dict(zip(("fprop_fast_accum", "dgrad_fast_accum", "wgrad_fast_accum"), flags, strict=True))
        assert kernels(replace(recipe, **fields)) == [FAST if flag else SLOW for flag in flags]


def test_accumulation_changes_no_rule_that_has_no_other() -> None:
    for name in ("fp8-block", "mxfp8", "bf16"):
        slow = replace(recipes.load(name), fprop_fast_accum=False)
        assert kernels(slow) == kernels(recipes.load(name))
    assert kernels(recipes.load("fp8-current"), device="cpu") == ["decode, fp32 product and epilogue"] * 3


def test_wgrad_input_128x128_gives_wgrad_the_pair_of_blocks_of_fprop() -> None:
    plans = [build_plan(setting(recipes.Float8BlockScaling(wgrad_input_128x128=square))) for square in (False, True)]
    blocks = [[(gemm.a.block.name, gemm.b.block.name) for gemm in plan.gemms] for plan in plans]
    assert blocks[0] == [("1x128", "128x128"), ("1x128", "128x128"), ("1x128", "1x128")]
    assert blocks[1] == [("1x128", "128x128")] * 3
    assert {gemm.rule.name for plan in plans for gemm in plan.gemms} == {"cuBLAS FP8 block product"}


SMALL = replace(recipes.load("fp8-current"), min_weight_elements=64 * 96 + 1)


def test_a_weight_below_min_gemm_work_leaves_the_whole_linear_in_bf16() -> None:
    consumer = QuantizerRole("linear", "input", "down")
    boundary = {"output_role": consumer, "grad_input_role": QuantizerRole("linear", "grad_output", "norm")}
    plan = build_plan(setting(SMALL, **boundary))
    operands = plan.operands.values()
    quantizers = [plan.output, plan.grad_input, *[operand.quantizer for operand in operands]]
    assert quantizers == [Quantizer()] * 5 and all(operand.source is HIGH_PRECISION for operand in operands)
    assert {(gemm.rule.name, gemm.reason) for gemm in plan.gemms} == {
        ("torch", "K x N = 96 x 64 = 6144 is below 6145: left in bf16 by min_weight_elements")
    }
    assert build_plan(setting(SMALL, dtype=torch.float16)).fprop.reason.endswith("left in fp16 by min_weight_elements")
    enough = replace(SMALL, min_weight_elements=64 * 96)
    off = replace(SMALL, min_weight_elements=0)
    assert build_plan(setting(enough, **boundary)) == build_plan(setting(off, **boundary)) != plan


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cpu"},
        {"dtype": torch.float32},
        {"shape": None},
        {"weight_held": SMALL(QuantizerRole("linear", "weight"))},
        {"input_held": SMALL(QuantizerRole("linear", "input"))},
    ],
    ids=str,
)
def test_min_gemm_work_does_nothing_where_it_would_not_help(other) -> None:
    assert build_plan(setting(SMALL, **other)) == build_plan(setting(replace(SMALL, min_weight_elements=0), **other))


@pytest.mark.parametrize(("name", "device"), [("mxfp8", "sm90"), ("nvfp4", "sm90"), ("fp8-block", "sm100")])
def test_emulated_products_are_never_left_out(name, device) -> None:
    """One emulated GEMM is enough: a Blackwell has no block product."""
    recipe = recipes.load(name)
    small = replace(recipe, min_weight_elements=10**9)
    assert build_plan(setting(small, device=device)) == build_plan(setting(recipe, device=device))
    mixed = recipes.RuleRecipe(
        rules=(Rule(fprop="fp8_e4m3_tensor", dgrad="fp8_e4m3_tensor", wgrad="mxfp8_e4m3"),), min_weight_elements=10**9
    )
    assert [gemm.rule.native for gemm in build_plan(setting(mixed)).gemms] == [True, True, False]


def test_a_gemm_in_high_precision_beside_native_ones_does_not_keep_them() -> None:
    for recipe in (
        replace(SMALL, backward_override="high_precision"),
        recipes.RuleRecipe(
            rules=(Rule(fprop="fp8_e4m3_row", dgrad="fp8_e4m3_row", wgrad="identity"),),
            min_weight_elements=10**9,
            strict=True,
        ),
    ):
        assert build_plan(setting(replace(recipe, min_weight_elements=0))).fprop.rule.name == FAST
        plan = build_plan(setting(recipe))
        assert {gemm.rule.name for gemm in plan.gemms} == {"torch"}
        assert all("min_weight_elements" in gemm.reason for gemm in plan.gemms)


def test_strict_takes_what_min_gemm_work_leaves_and_still_refuses_what_was_not_asked_for() -> None:
    assert build_plan(setting(replace(SMALL, strict=True))).fprop.rule.name == "torch"
    one_sided = recipes.RuleRecipe(
        rules=(Rule(tensor_type="input", format="fp8_e4m3_row"), Rule(format="identity")),
        strict=True,
        min_weight_elements=10**9,
    )
    with pytest.raises(RecipeError, match="strict: fprop of up pairs fp8_e4m3_row with identity"):
        build_plan(setting(one_sided))


def test_measured_takes_the_entry_of_the_device_and_the_scales(monkeypatch) -> None:
    entries = {((9, 0), TENSOR): 1000, ((9, 0), ROW): 2000, ((9, 0), Block(1, 128)): 3000}
    monkeypatch.setattr(targets, "LEAST_WORK", entries)
    for name, least in (("fp8-current", 1000), ("fp8-delayed", 1000), ("fp8-rowwise", 2000), ("fp8-block", 3000)):
        recipe = replace(recipes.load(name), min_weight_elements="measured")
        below, at = (build_plan(setting(recipe, (least // 10 - less, 10))) for less in (1, 0))
        assert below.fprop.reason == (
            f"K x N = 10 x {least // 10 - 1} = {least - 10} is below {least}: left in bf16 by min_weight_elements"
        )
        assert at == build_plan(setting(recipes.load(name), (least // 10, 10)))
    pair = (Rule(tensor_type="weight", format="fp8_e4m3_row"), Rule(format="fp8_e4m3_tensor"))
    both = recipes.RuleRecipe(rules=pair, min_weight_elements="measured", emulate_mixed=True)
    assert "below 2000" in build_plan(setting(both, (150, 10))).fprop.reason
    unknown = replace(recipes.load("fp8-current"), min_weight_elements="measured")
    assert build_plan(setting(unknown, (1, 1), device="sm120")).fprop.rule.name == FAST


def test_every_scaling_that_hopper_multiplies_has_an_entry() -> None:
    natively = {scaling for capability, scaling in targets.LEAST_WORK if capability == (9, 0)}
    assert natively == {TENSOR, ROW, Block(1, 128)}
    assert all(isinstance(least, int) and least > 0 for least in targets.LEAST_WORK.values())


@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed"])
def test_a_linear_that_is_left_in_bf16_has_the_bits_of_nn_linear(monkeypatch, name) -> None:
    """Built as for CUDA and run here."""
    x, dy = torch.randn(8, 96).bfloat16(), torch.randn(8, 64).bfloat16()
    plain = nn.Linear(96, 64, dtype=torch.bfloat16)
    want = torch.autograd.grad(plain(x), list(plain.parameters()), dy)
    recipe = replace(recipes.load(name), min_weight_elements="measured")
    module = duotone.Linear(96, 64, params_dtype=torch.bfloat16, recipe=recipe)
    module.load_state_dict(plain.state_dict(), strict=False)
    request = Planner.request
    monkeypatch.setattr(Planner, "request", lambda self, *args: replace(request(self, *args), device="sm90"))
    module.forget_plans()
    plan = module.plan_for(x)
    assert "left in bf16" in plan.wgrad.reason and not plan.is_delayed
    y = module(x)
    assert torch.equal(y, plain(x))
    for result, exact in zip(torch.autograd.grad(y, list(module.parameters()), dy), want, strict=True):
        assert torch.equal(result, exact)


@pytest.mark.parametrize(
    "make",
    [
        lambda recipe: duotone.Linear(96, 64, recipe=recipe),
        lambda recipe: duotone.Linear(96, 64, recipe=recipe, parameters_split=("q", "k")),
        lambda recipe: duotone.GroupedLinear(3, 96, 64, recipe=recipe),
        lambda recipe: duotone.GroupedLinear(3, 96, 64, recipe=recipe, single_grouped_weight=True),
    ],
)
def test_a_module_tells_its_plan_the_shape_of_one_weight(make) -> None:
    """A grouped linear that of one expert, whatever the number of rows."""
    module, on_hopper = make(SMALL), Call("sm90", torch.bfloat16)
    assert module.plans.request(SMALL, on_hopper).weight_shape == (64, 96)
    assert "= 6144 is below 6145" in module.plans.plan(SMALL, on_hopper).fprop.reason
    enough = replace(SMALL, min_weight_elements=6144)
    assert module.plans.plan(enough, on_hopper).fprop.rule.name == FAST


def test_quantized_model_init_leaves_weights_plain_that_are_too_small(monkeypatch) -> None:
    request = Planner.request
    monkeypatch.setattr(Planner, "request", lambda self, *args: replace(request(self, *args), device="sm90"))
    for work, kind in ((6145, nn.Parameter), (6144, duotone.QuantizedTensor)):
        with duotone.quantized_model_init(recipe=replace(SMALL, min_weight_elements=work)):
            module = duotone.Linear(96, 64, params_dtype=torch.bfloat16)
        assert type(module.weight) is kind
