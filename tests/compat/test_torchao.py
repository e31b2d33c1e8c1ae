"""torchao's configs become recipes: the values of its own Float8Linear, and only the linears that its filter takes."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import duotone
from duotone.compat import torchao
from duotone.errors import UserError

NAMES = [name.value for name in torchao.Float8LinearRecipeName]


@pytest.fixture
def float8_of_torchao():
    return pytest.importorskip("torchao.float8", reason="pip install 'torchao==0.18.0'", exc_type=ImportError)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32, bias=False), nn.Linear(32, 16)).bfloat16()


def run(converted: nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(48, 64, generator=generator).requires_grad_(), torch.randn(48, 32, generator=generator)
    y = converted(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(parameter.grad for parameter in converted.parameters())]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_are_torchaos(float8_of_torchao, name: str) -> None:
    """Its emulation multiplies decoded values; in fp32 only the order of sums differs."""
    plain = nn.Linear(64, 32)
    config = dataclasses.replace(float8_of_torchao.Float8LinearConfig.from_recipe_name(name), emulate=True)
    want = run(float8_of_torchao.convert_to_float8_training(copy.deepcopy(plain), config=config))
    exact = run(copy.deepcopy(plain))
    assert (want[0] - exact[0]).norm() > 0.01 * want[0].norm()
    for settings in (config, name, torchao.Float8LinearConfig.from_recipe_name(name)):
        result = run(torchao.convert_to_float8_training(copy.deepcopy(plain), config=settings))
        for tensor, reference in zip(result, want, strict=True):
            assert (tensor - reference).norm() < 1e-5 * reference.norm()


EXPECTED = {
    "tensorwise": {
        "input": ("fp8_e4m3_tensor_eps1e-12",) * 2,
        "weight": ("fp8_e4m3_tensor_eps1e-12",) * 2,
        "grad_output": ("fp8_e5m2_tensor_eps1e-12",) * 2,
    },
    "rowwise": {kind: ("fp8_e4m3_row_pow2_eps1e-12",) * 2 for kind in ("input", "weight", "grad_output")},
    "rowwise_with_gw_hp": {
        "input": ("fp8_e4m3_row_pow2_eps1e-12", "identity"),
        "weight": ("fp8_e4m3_row_pow2_eps1e-12", "fp8_e4m3_tensor_pow2_eps1e-12"),
        "grad_output": ("fp8_e4m3_row_pow2_eps1e-12", "identity"),
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_each_plane_has_the_format_of_its_cast(name: str) -> None:
    recipe = torchao.recipe_from(torchao.Float8LinearRecipeName(name))
    quantizers = {kind: recipe(duotone.QuantizerRole("linear", kind)) for kind in EXPECTED[name]}
    assert {kind: (q.rowwise.name, q.columnwise.name) for kind, q in quantizers.items()} == EXPECTED[name]
    assert recipe.fprop_fast_accum and not recipe.dgrad_fast_accum and not recipe.wgrad_fast_accum


def test_only_linears_that_the_filter_takes_are_converted() -> None:
    filtered = {}

    def takes(linear: nn.Module, name: str) -> bool:
        filtered[name] = linear
        return name != "0"

    converted = torchao.convert_to_float8_training(model(), module_filter_fn=takes, config="rowwise")
    assert {name: type(linear).__mro__[-3] for name, linear in filtered.items()} == dict.fromkeys("023", nn.Linear)
    formats = {row.module: row.a for row in duotone.plan(converted) if row.gemm == "fprop"}
    assert formats == {"0": "identity", **dict.fromkeys("23", "fp8_e4m3_row_pow2_eps1e-12")}


def test_a_second_call_leaves_the_linears_of_the_first_alone() -> None:
    """torchao swaps what the filter takes: models get several configs, one after the other."""
    converted = torchao.convert_to_float8_training(
        model(), module_filter_fn=lambda _, name: name == "0", config="rowwise"
    )
    torchao.convert_to_float8_training(converted, module_filter_fn=lambda _, name: name == "2")
    formats = {row.module: row.a for row in duotone.plan(converted) if row.gemm == "fprop"}
    expected = {"0": "fp8_e4m3_row_pow2_eps1e-12", "2": "fp8_e4m3_tensor_eps1e-12", "3": "identity"}
    assert formats == expected


def test_experts_and_heads_follow_torchao() -> None:
    """It converts every nn.Linear, heads too, and nothing else."""
    mixed = nn.ModuleDict({"moe": duotone.MoE(32, 64, 2), "lm_head": nn.Linear(32, 96)})
    torchao.convert_to_float8_training(mixed)
    formats = {row.module: row.a for row in duotone.plan(mixed) if row.gemm == "fprop"}
    assert formats["lm_head"].startswith("fp8_e4m3_tensor")
    assert {format for name, format in formats.items() if name.startswith("moe")} == {"identity"}


def test_names_that_look_like_patterns_are_names() -> None:
    odd = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("a[0]", "a0", "b*", "bx")})
    torchao.convert_to_float8_training(odd, module_filter_fn=lambda linear, name: name in ("a0", "bx"))
    formats = {row.module: row.a for row in duotone.plan(odd) if row.gemm == "fprop"}
    assert {name for name, fmt in formats.items() if fmt != "identity"} == {"a0", "bx"}


def test_what_has_no_counterpart_is_named() -> None:
    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    with pytest.raises(UserError, match=r"leave it out, and call duotone.gather_quantized\(model\)"):
        torchao.convert_to_float8_training(model(), config=config)
    with pytest.raises(UserError, match=r"^config is 3, without cast_config_input; give a Float8LinearConfig"):
        torchao.convert_to_float8_training(model(), config=3)
    with pytest.raises(UserError, match="allowed are 'tensorwise', 'rowwise', 'rowwise_with_gw_hp'"):
        torchao.convert_to_float8_training(model(), config="mxfp8")
    with pytest.raises(UserError, match="module_filter_fn is 'x'; give a function"):
        torchao.convert_to_float8_training(model(), module_filter_fn="x")
