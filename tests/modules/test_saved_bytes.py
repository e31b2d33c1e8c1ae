"""What a module saves for backward is what the plans of its linears promise, to the byte."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import ops, recipes
from duotone.formats import IDENTITY, Format
from duotone.linear.operand_plan import OperandPlan

ROWS, WIDTH, OUT = 128, 256, 128
BF16 = torch.bfloat16
OPTIONS = {"params_dtype": BF16, "bias": False}


def plane(fmt: Format, rows: int, cols: int) -> int:
    return sum(math.prod(spec.shape) * (spec.dtype or BF16).itemsize for spec in fmt.parts(rows, cols).values())


def promised(operand: OperandPlan, rows: int, cols: int, is_weight: bool) -> int:
    """Bytes of an operand (rows, cols). A weight that is kept as it is costs nothing more."""
    saved, quantizer = operand.backward, operand.quantizer
    columnwise = saved.quantizes_gradient
    fmt = (quantizer.columnwise if columnwise else quantizer.rowwise) or IDENTITY
    decoded = columnwise and quantizer.columnwise_source != "original"
    if saved.keeps_original or (fmt == IDENTITY and not decoded):
        return 0 if is_weight else 2 * rows * cols
    return plane(fmt, *((cols, rows) if columnwise else (rows, cols)))


def of_linears(*linears: duotone.Linear) -> int:
    total = 0
    for linear in linears:
        plan = linear.plans.plan(linear.recipe)
        total += promised(plan.input, ROWS, linear.in_features, False)
        total += promised(plan.weight, linear.out_features, linear.in_features, True)
    return total


NORM = 2 * ROWS * WIDTH + 2 * ROWS * 2
"""The input, and the mean and the deviation of each row."""
Make = Callable[[recipes.Recipe], nn.Module]
Promise = Callable[[nn.Module], int]
MODULES: dict[str, tuple[Make, Promise]] = {
    "Linear": (lambda recipe: duotone.Linear(WIDTH, OUT, recipe=recipe, **OPTIONS), of_linears),
    "LayerNormLinear": (
        lambda recipe: duotone.LayerNormLinear(WIDTH, OUT, recipe=recipe, **OPTIONS),
        lambda m: NORM + of_linears(m),
    ),
    "LayerNormMLP": (
        lambda recipe: duotone.LayerNormMLP(WIDTH, OUT, activation="swiglu", recipe=recipe, **OPTIONS),
        lambda m: NORM + 2 * ROWS * 2 * OUT + of_linears(m.fc1, m.fc2),
    ),
    "Sequential": (
        lambda recipe: ops.Sequential(
            ops.LayerNorm(WIDTH, dtype=BF16), ops.Linear(WIDTH, OUT, recipe=recipe, **OPTIONS), ops.GELU()
        ),
        lambda m: NORM + of_linears(m[1]) + 2 * ROWS * OUT,
    ),
}


def overridden(name: str, override: str) -> recipes.Recipe:
    return dataclasses.replace(recipes.load(name), backward_override=override)


RECIPES = {name: recipes.load(name) for name in recipes.names()} | {
    f"{name} {override}": overridden(name, override)
    for name in ("bf16", "fp8-current", "fp8-block", "mxfp8", "nvfp4")
    for override in ("high_precision", "dequantized")
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
@pytest.mark.parametrize("kind", MODULES)
def test_a_module_saves_what_its_plan_promises(kind: str, recipe: recipes.Recipe) -> None:
    make, promise = MODULES[kind]
    m, x = make(recipe), torch.randn(ROWS, WIDTH).to(BF16).requires_grad_()
    parameters = {p.untyped_storage()._cdata for p in (*m.parameters(), *m.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = m(x)  # holds what is saved
    assert y.requires_grad and sum(saved.values()) == promise(m)
