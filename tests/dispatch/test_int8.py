"""INT8 per row, added as a user of this code would: an element and a row of the catalog, a rule, and its product.

In the library these would be three files: `formats/elements.py`, `formats/catalog.py` and `dispatch/gemms.py`.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import duotone
from duotone import formats
from duotone.dispatch import casts, gemms
from duotone.dispatch.products import finish
from duotone.dispatch.rule import GemmProblem, GemmRule, Operand
from duotone.dispatch.target import target
from duotone.formats import registry
from duotone.formats.elements import Element
from duotone.formats.geometry import ROW
from duotone.formats.scaled_format import ScaledFormat
from duotone.formats.scales import Fp32Scale
from duotone.recipes import RuleRecipe
from duotone.recipes.rules import Rule
from duotone.tensor.plane_encoder import encode_plane

# --- the element and the row of the catalog


@dataclass(frozen=True)
class Integer(Element):
    """Integers from -max to max, in the two's complement of `dtype`; NaN becomes `nan_code`."""

    def narrow(self, values: Tensor) -> Tensor:
        rounded = torch.round(values.clamp(-self.max, self.max))
        return torch.where(values == values, rounded, float(self.nan_code)).to(torch.int8)

    def widen(self, stored: Tensor) -> Tensor:
        return stored.to(torch.float32)


INT8 = ScaledFormat("int8_row", Integer("int8", 0, 7, -6, 127.0, 127, torch.int8), ROW, Fp32Scale())


# --- the rule and its product


class Int8Product(GemmRule):
    """torch._int_mm of codes on a CPU; sums are exact, the scales of rows follow in fp32."""

    name = "INT8 product"

    def reject(self, problem: GemmProblem) -> str:
        if problem.target.device != "cpu":
            return "it runs on a CPU"
        return "" if problem.elements == (torch.int8, torch.int8) else "it takes INT8 codes"

    def run(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        left, right = (plane.parts["codes"].view(torch.int8) for plane in (a, b))
        y = torch._int_mm(left, right.t()).to(torch.float32)
        return finish(y * a.parts["scale"] * b.parts["scale"].t(), out_dtype, bias)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_FORMATS", {**registry._FORMATS, INT8.name: INT8})


@pytest.fixture
def native(monkeypatch) -> Int8Product:
    rule = Int8Product()
    monkeypatch.setattr(gemms, "RULES", [rule, *gemms.RULES])
    return rule


def recipe(**options) -> RuleRecipe:
    return RuleRecipe(rules=(Rule(**options),))


@pytest.mark.parametrize("device", ["cpu", "sm89", "sm90", "sm100"])
def test_without_a_rule_it_is_emulated_with_a_reason(device) -> None:
    """Not sent to the FP8 product because torch has a dtype for its codes."""
    for other in ("int8_row", "fp8_e4m3_row", "fp8_e4m3_tensor", "mxfp8_e4m3"):
        for pair in (("int8_row", other), (other, "int8_row")):
            problem = GemmProblem(*map(formats.get, pair), target(device), torch.bfloat16)
            rule, reason = gemms.choose(problem)
            assert not rule.native and f"no native rule for {pair[0]} x {pair[1]}" in reason
    linear = duotone.Linear(32, 32, recipe=recipe(format="int8_row"), device="meta")
    rows = duotone.plan(linear, device=device, dtype=torch.bfloat16)
    assert not any(row.native for row in rows) and all("int8_row x int8_row" in row.reason for row in rows)


def test_no_hardware_multiplies_it_with_fp8() -> None:
    """A plan refuses the pair unless it may emulate mixed formats."""
    mixed = (Rule(tensor_type="weight", format="fp8_e4m3_row"), Rule(format="int8_row"))
    linear = duotone.Linear(32, 32, recipe=RuleRecipe(rules=mixed), device="meta")
    with pytest.raises(duotone.RecipeError, match="which no hardware does"):
        duotone.plan(linear, device="sm90", dtype=torch.bfloat16)
    linear = duotone.Linear(32, 32, recipe=RuleRecipe(rules=mixed, emulate_mixed=True), device="meta")
    assert not any(row.native for row in duotone.plan(linear, device="sm90", dtype=torch.bfloat16))


def test_no_kernel_casts_it() -> None:
    assert not casts.can_read_once(INT8, INT8, torch.bfloat16, target("sm90"))
    assert casts.cast_of(INT8, None, torch.bfloat16) is None and casts._decoder(INT8, torch.bfloat16) is None


@pytest.mark.parametrize("shape", [(48, 64), pytest.param((400, 512), marks=pytest.mark.rest)], ids=str)
def test_its_planes_are_those_of_the_plain_stages(shape) -> None:
    x = torch.randn(shape)
    x[0, 3], x[1, 2] = torch.nan, torch.inf
    x[2] = 0.0
    plane = encode_plane(INT8, x)
    plain = INT8.encode(x, propagate=True)
    assert all(torch.equal(plane.parts[name].nan_to_num(7), part.nan_to_num(7)) for name, part in plain.items())
    codes = plane.parts["codes"].view(torch.int8)
    assert codes[3:].abs().amax(1).eq(127).all() and not codes[2].any()


def test_a_native_rule_runs_where_it_says_so(native) -> None:
    torch.manual_seed(0)
    linear = duotone.Linear(64, 32, recipe=recipe(format="int8_row"))
    x = torch.randn(48, 64, requires_grad=True)
    y = linear(x)
    y.sum().backward()
    assert all(row.kernel == "INT8 product" and row.native for row in duotone.plan(linear))
    assert not duotone.plan(linear, device="sm90")[0].native
    left, right = encode_plane(INT8, x.detach()), encode_plane(INT8, linear.weight.detach())
    exact = left.dequantize(torch.float64) @ right.dequantize(torch.float64).t() + linear.bias.detach().double()
    assert torch.allclose(y.double(), exact, atol=1e-5) and x.grad is not None and x.grad.isfinite().all()
