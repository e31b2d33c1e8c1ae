"""No repr of a public value shows an address, and none of a small value is long."""

import re

import pytest
import torch
from torch import nn

import duotone
import duotone_lab
from duotone import formats, observe, ops, optim, recipes
from duotone.comm import ShardContext
from duotone.linear import LinearPlan

ADDRESS = re.compile(r"0x[0-9a-f]{4,}")
LONG = 650


def linear_plan(recipe: str) -> LinearPlan:
    module = duotone.Linear(32, 32, recipe=recipe)
    return module.plan_for(torch.randn(4, 32))


def bound_handle() -> duotone.Float8Quantizer:
    return duotone.Float8Quantizer(torch.ones(1), torch.zeros(1))


def values() -> dict[str, object]:
    tap = observe.Tap()
    tapped = observe.with_statistics("fp8-delayed", tap)
    model = nn.Sequential(duotone.Linear(32, 32), duotone.LayerNormMLP(32, 32))
    with duotone.autocast(tapped):
        model(torch.randn(4, 32)).sum().backward()
    state = duotone.RecipeState.create("fp8-delayed", mode="forward", num_quantizers=3)
    role = recipes.QuantizerRole("linear", "input", "a")
    tensor = duotone.MXFP8Quantizer().quantize(torch.randn(32, 32))
    return {
        **{f"format {name}": formats.get(name) for name in formats.names()},
        **{f"recipe {name}": recipes.load(name) for name in recipes.names()},
        **{f"schedule {name}": recipes.load_schedule(name) for name in recipes.schedule_names()},
        **{f"linear plan {name}": linear_plan(name) for name in ("bf16", "fp8-delayed", "nvfp4")},
        **{f"handle {i}": handle for i, handle in enumerate(state.make_quantizers())},
        "custom recipe": recipes.CustomRecipe(qfactory=lambda role: duotone.IdentityQuantizer()),
        "recipe with a function": recipes.DelayedScaling(amax_compute_algo=lambda history: history.amax(0)),
        "request with a function": recipes.DelayedScalingRequest(amax_compute_algo=torch.amax),
        "rule": recipes.Rule(module="*.fc", format="identity"),
        "role": role,
        "quantizer": recipes.MXFP8BlockScaling()(role),
        "delayed quantizer": recipes.DelayedScaling()(role),
        "tapped quantizer": tapped(role),
        "handle": duotone.NVFP4Quantizer(with_rht=True),
        "bound handle": bound_handle(),
        "tensor": tensor,
        "planes": tensor.planes,
        "context": duotone.QuantizeContext(ShardContext("dp"), bound_handle().slots),
        "recipe state": state,
        "autocast": duotone.autocast("mxfp8"),
        "offload_activations": duotone.offload_activations(model),
        "quantized_model_init": duotone.quantized_model_init(recipe="mxfp8"),
        "tap": tap,
        "tapped recipe": tapped,
        "gemm plan": linear_plan("mxfp8").fprop,
        "plan": duotone.plan(model),
        "row": duotone.plan(model)[0],
        "difference": duotone.plan(model).diff(duotone.plan(model, "nvfp4")),
        "ledger": duotone_lab.ledger(model, lambda: model(torch.randn(4, 32)).sum()),
        "optimizer": optim.AdamW(model.parameters()),
        "layer": duotone.TransformerLayer(32, 32, 2),
        "experts": duotone.MoE(32, 32, 2),
        "quantize": ops.Quantize(recipe="mxfp8"),
        "activation": ops.SwiGLU(),
    }


VALUES = values()
WHOLE = {"planes", "layer", "experts", "optimizer", "ledger"}
"""Values that show tensors or parts, and so are long."""


@pytest.mark.parametrize("name", VALUES)
def test_no_repr_shows_an_address(name: str) -> None:
    assert not ADDRESS.search(repr(VALUES[name]))
    assert not ADDRESS.search(str(VALUES[name]))


@pytest.mark.parametrize("name", [name for name in VALUES if name not in WHOLE and not name.startswith("linear plan")])
def test_reprs_are_short(name: str) -> None:
    assert len(repr(VALUES[name])) <= LONG


def test_every_public_class_has_a_value_here_or_shows_no_address_by_itself() -> None:
    """A class without a repr of its own would show an address."""
    kinds = [getattr(duotone, name) for name in duotone.__all__]
    for kind in kinds:
        if isinstance(kind, type) and not issubclass(kind, BaseException):
            assert kind.__repr__ is not object.__repr__, kind
