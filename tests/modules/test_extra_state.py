"""`_extra_state` of Transformer Engine: delayed scaling goes on from it, and nothing in it runs code."""

import io
import os
import pickle
import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

import pytest
import torch

import duotone
from duotone.errors import UserError

RECIPE = duotone.DelayedScaling(amax_history_len=4, first_scale_from_amax=False)
LENGTH = 4


class Format(Enum):
    HYBRID = (448, 57344)


@dataclass
class DelayedScaling:
    """Only pickled, under the name of Transformer Engine's class."""

    fp8_format: Format = Format.HYBRID


@pytest.fixture(autouse=True)
def under_the_names_of_transformer_engine(monkeypatch) -> None:
    """Pickles name these classes as Transformer Engine's, which is in no `sys.modules` when they are read."""
    for cls in (Format, DelayedScaling):
        monkeypatch.setattr(cls, "__module__", "transformer_engine.common.recipe")


def states(linears: int = 1, slots: int = 3) -> dict[str, object]:
    """Distinct scales and histories for each slot. The recipe is an object that only Transformer Engine has."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, object] = {"recipe": DelayedScaling(), "extra_fp8_variables": {"num_gemms": linears}}
    for short, count in (("fwd", slots * linears), ("bwd", 2 * linears)):
        state[f"scale_{short}"] = torch.rand(count, generator=generator) + 0.5
        state[f"amax_history_{short}"] = torch.rand(LENGTH, count, generator=generator)
    return state


def pickled(state: dict[str, object], write) -> bytes:
    """What `write(state, file)` writes while the module of the recipe is importable."""
    module, file = ModuleType("transformer_engine.common.recipe"), io.BytesIO()
    module.Format, module.DelayedScaling = Format, DelayedScaling
    names = ("transformer_engine", "transformer_engine.common", module.__name__)
    sys.modules.update(dict.fromkeys(names, module))
    try:
        write(state, file)
    finally:
        for name in names:
            del sys.modules[name]
    return file.getvalue()


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


LAYOUTS = {
    "pickle in a tensor, 2.x": lambda state: as_tensor(pickled(state, pickle.dump)),
    "torch.save in a tensor": lambda state: as_tensor(pickled(state, torch.save)),
    "torch.save in a BytesIO, 1.x": lambda state: io.BytesIO(pickled(state, torch.save)),
    "a dict, 0.x": lambda state: state,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cls", [duotone.Linear, duotone.LayerNormLinear])
def test_scales_and_histories_load_from_each_layout(cls, layout: str) -> None:
    """Both directions of a tensor go on from its one slot there; output and grad_input have no slot here."""
    module, state = cls(32, 16, recipe=RECIPE), states()
    module.load_state_dict({**module.state_dict(), "_extra_state": LAYOUTS[layout](state)})
    with torch.no_grad():  # which records no amax
        module(torch.ones(8, 32))
    loaded_states = duotone.recipe_state(module)
    assert torch.equal(loaded_states["duotone_forward.scale"], state["scale_fwd"][[0, 0, 1, 1]])
    assert torch.equal(loaded_states["duotone_forward.amax_history"], state["amax_history_fwd"][:, [0, 0, 1, 1]])
    assert torch.equal(loaded_states["duotone_backward.scale"], state["scale_bwd"][[0, 0]])


def test_the_next_product_uses_the_scales_that_were_loaded() -> None:
    """By hand: x and w are scaled, rounded to E4M3 and multiplied."""
    module, state = duotone.Linear(32, 16, bias=False, recipe=RECIPE).eval(), states()
    module.load_state_dict({**module.state_dict(), "_extra_state": LAYOUTS["pickle in a tensor, 2.x"](state)})
    x, scales = torch.randn(8, 32), state["scale_fwd"]
    rounded = [(t * s).to(torch.float8_e4m3fn).float() / s for t, s in zip((x, module.weight), scales, strict=False)]
    assert torch.allclose(module(x), rounded[0] @ rounded[1].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [2, 3], ids=["without outputs, 0.2", "with outputs"])
def test_each_linear_of_a_module_gets_its_slots(slots: int) -> None:
    mlp, experts = duotone.LayerNormMLP(32, 16, recipe=RECIPE), duotone.GroupedLinear(2, 32, 16, recipe=RECIPE)
    state = states(2, slots)
    for module in (mlp, experts):
        extra = LAYOUTS["pickle in a tensor, 2.x"](state)
        block = torch.nn.ModuleDict({"block": module})
        block.load_state_dict({**block.state_dict(), "block._extra_state": extra})
    mlp.eval()(torch.ones(8, 32))
    experts.eval()(torch.ones(8, 32), [4, 4])
    forward, backward = state["scale_fwd"], state["scale_bwd"]
    loaded_states = duotone.recipe_state(mlp)
    assert torch.equal(loaded_states["fc1.duotone_forward.scale"], forward[[0, 0, 1, 1]])
    assert torch.equal(loaded_states["fc2.duotone_forward.scale"], forward[[slots, slots, slots + 1, slots + 1]])
    assert torch.equal(loaded_states["fc2.duotone_backward.scale"], backward[[2, 2]])
    loaded_states = duotone.recipe_state(experts)
    assert torch.equal(
        loaded_states["duotone_forward.scale"], forward[[0, 0, 1, 1, slots, slots, slots + 1, slots + 1]]
    )


def test_a_transformer_layer_loads_a_checkpoint_with_extra_states_everywhere() -> None:
    layer = duotone.TransformerLayer(32, 64, 4, recipe=RECIPE, hidden_dropout=0.0)
    at = ("self_attention.core_attention", "self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp")
    linears = {"layernorm_mlp": 2, at[0]: 3}
    extras = {f"{name}._extra_state": states(linears.get(name, 1)) for name in at}
    layer.load_state_dict({**layer.state_dict(), **extras})
    layer.eval()(torch.ones(4, 2, 32))
    want = extras["self_attention.proj._extra_state"]["scale_fwd"][[0, 0, 1, 1]]
    assert torch.equal(duotone.recipe_state(layer)["self_attention.proj.duotone_forward.scale"], want)


def test_attention_in_fp8_goes_on_from_its_scales() -> None:
    """One scale of query, key and value there is that of each here."""
    recipe = duotone.DelayedScaling(amax_history_len=4, fp8_dpa=True, first_scale_from_amax=False)
    module, state = duotone.DotProductAttention(2, 16, recipe=recipe), states(3)
    module.load_state_dict({**module.state_dict(), "_extra_state": state})
    with torch.no_grad():
        module(*torch.randn(3, 8, 1, 2, 16).unbind())
    loaded_states = duotone.recipe_state(module)
    forward, backward = state["scale_fwd"], state["scale_bwd"]
    assert torch.equal(loaded_states["duotone_forward.scale"], forward[[2, 2, 2, 2, 2, 2, 8, 8, 3, 3]])
    assert torch.equal(loaded_states["duotone_backward.scale"], backward[[3, 3, 5, 5]])


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_an_extra_state_runs_no_code(write, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = duotone.Linear(32, 16)
    bad = as_tensor(pickled({**states(), "extra_fp8_variables": Attack()}, write))
    with pytest.raises(UserError, match=r"names posix\.mkdir"):
        module.load_state_dict({**module.state_dict(), "_extra_state": bad})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (as_tensor(b"no pickle"), "9 bytes cannot be read"),
        (as_tensor(pickle.dumps([1, 2])), "is a list"),
        (states(2), "not those of 1 linears"),
        ({**states(), "amax_history_fwd": None}, "forward scales or histories"),
    ],
)
def test_what_is_no_state_of_the_module_is_refused(extra: object, message: str) -> None:
    module = duotone.Linear(32, 16)
    if message.startswith("not"):
        extra["scale_fwd"] = extra["scale_fwd"][:5]
    with pytest.raises(UserError, match=message) as error:
        module.load_state_dict({**module.state_dict(), "_extra_state": extra})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("extra", [None, torch.empty(0, dtype=torch.uint8), {"recipe": None}, io.BytesIO()])
def test_an_extra_state_of_nothing_is_no_obstacle(extra: object) -> None:
    module = duotone.Linear(32, 16)
    module.load_state_dict({**module.state_dict(), "_extra_state": extra})
    assert not duotone.recipe_state(module)
