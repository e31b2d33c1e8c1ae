"""RecipeState: one class for all recipes, quantizers by slot, shared delayed scales."""

import re

import pytest
import torch

import duotone
from duotone import recipes
from duotone.compat import RecipeState
from duotone.formats import get
from duotone.recipes import CustomRecipe, DelayedScaling, DelayedScalingRequest, QuantizerRole
from duotone.tensor import History, Quantizer

FORWARD = [QuantizerRole("linear", kind, "a") for kind in ("input", "weight", "output")]
BACKWARD = [QuantizerRole("linear", kind, "a") for kind in ("grad_output", "grad_input")]
BUILTIN = ["bf16", "fp8-current", "fp8-rowwise", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
@pytest.mark.parametrize(("mode", "explicit"), [("forward", FORWARD), ("backward", BACKWARD)])
def test_positions_stand_for_roles_that_are_absent(name, count, mode, explicit) -> None:
    """hybrid 82: also layouts of two slots, a None in the list, and a tensor type of a module that nobody knows."""
    recipe = recipes.load(name)
    roles = [explicit[i % len(explicit)] for i in range(count)]
    expected = [
        h.value for h in RecipeState.create(recipe, mode=mode, num_quantizers=count, roles=roles).make_quantizers()
    ]
    assert expected == [recipe(role) for role in roles]
    for inputs in (None, [None] * count, [QuantizerRole("conv", "what")] * count):
        state = RecipeState.create(recipe, mode=mode, num_quantizers=count, roles=inputs)
        assert [h.value for h in state.make_quantizers()] == expected


def test_attention_types_fall_back_by_position() -> None:
    """hybrid 7.3: a tensor type that no linear has is no signal, and the slot decides."""
    forward = [
        QuantizerRole("dpa", "qkv", "a"),
        QuantizerRole("dpa", "qkv", "a"),
        QuantizerRole("", "", "a.dpa_output"),
    ]
    backward = [QuantizerRole("dpa", kind, "a") for kind in ("do", "do", "dp", "dp")]
    for name in BUILTIN:
        recipe = recipes.load(name)
        for mode, roles, explicit in (("forward", forward, FORWARD), ("backward", backward, BACKWARD * 2)):
            state = RecipeState.create(recipe, mode=mode, num_quantizers=len(roles), roles=roles)
            assert [handle.value for handle in state.make_quantizers()] == [recipe(role) for role in explicit], name


def test_a_tensor_that_a_linear_does_not_have_is_refused() -> None:
    """A typo does not fall back in silence."""
    with pytest.raises(ValueError, match="a linear has no tensor 'wieght'"):
        RecipeState.create(recipes.load("mxfp8"), mode="forward", roles=[QuantizerRole("linear", "wieght")])


def test_square_blocks_of_mxfp8_need_a_weight_of_a_linear() -> None:
    """hybrid 7.3: no fall-back by position."""
    recipe = recipes.MXFP8BlockScaling(weight_2d=True)
    state = RecipeState.create(recipe, mode="forward", num_quantizers=3)
    assert {handle.value.rowwise.name for handle in state.make_quantizers()} == {"mxfp8_e4m3"}
    for module_type in ("linear", "grouped_linear"):
        assert recipe(QuantizerRole(module_type, "weight")).rowwise.name == "mxfp8_e4m3_32x32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "sideways"}, "mode 'sideways' is unknown; allowed are 'forward' and 'backward'"),
        ({"mode": "forward", "num_quantizers": 3, "roles": FORWARD[:2]}, "2 roles for 3 quantizers"),
        ({"mode": "forward", "num_quantizers": -1}, "num_quantizers is -1"),
    ],
)
def test_arguments_that_do_not_fit_are_a_value_error(arguments, message) -> None:
    """hybrid 82."""
    with pytest.raises(ValueError, match=re.escape(message)):
        RecipeState.create(recipes.load("mxfp8"), **arguments)
    with pytest.raises(ValueError, match="takes a recipe or its name; got int"):
        RecipeState.create(8, mode="forward")


def test_a_factory_that_returns_none_is_a_value_error_with_its_slot() -> None:
    """hybrid 83."""
    recipe = CustomRecipe(qfactory=lambda role: None)
    with pytest.raises(ValueError, match=r"returned None for .*tensor_type=weight.*IdentityQuantizer"):
        RecipeState.create(recipe, mode="forward", roles=FORWARD[1:2])


def test_a_custom_recipe_without_roles_warns_once_per_state() -> None:
    """hybrid 81: and none with roles, where None is a boundary for the factory."""
    seen = []

    def factory(role):
        seen.append(role)
        return Quantizer()

    recipe = CustomRecipe(qfactory=factory)
    with pytest.warns(UserWarning, match="got no roles") as caught:
        state = RecipeState.create(recipe, mode="forward", num_quantizers=3)
        state.make_quantizers()
    assert len(caught) == 1
    assert seen == [QuantizerRole(tensor_type=kind) for kind in ("input", "weight", "output")]
    seen.clear()
    state = RecipeState.create(recipe, mode="forward", num_quantizers=3, roles=[*FORWARD[:2], None])
    for _ in range(3):
        state.make_quantizers()
    assert seen == [*FORWARD[:2], None]


def requests(role):
    return DelayedScalingRequest(amax_history_len=3) if role.tensor_type != "weight" else Quantizer(get("mxfp8_e4m3"))


def test_requests_share_buffers_that_are_views_and_mix_with_stateless_slots() -> None:
    """hybrid 84."""
    state = RecipeState.create(CustomRecipe(qfactory=requests), mode="forward", num_quantizers=3, roles=FORWARD)
    result, again = state.make_quantizers(), state.make_quantizers()
    assert state.scale.shape == (3,) and state.amax_history.shape == (3, 3)
    assert not hasattr(result[1], "scale") and result[1].value == Quantizer(get("mxfp8_e4m3"))
    for i in (0, 2):
        for handle in (result[i], again[i]):
            assert handle.scale.data_ptr() == state.scale[i : i + 1].data_ptr()
            assert handle.amax.data_ptr() == state.amax_history[0, i : i + 1].data_ptr()
    x = torch.randn(8, 16)
    result[0](x)
    again[2].calibrate(x * 3)
    assert state.amax_history[0].tolist() == [x.abs().max(), 0, (x * 3).abs().max()]
    state.roll()
    maximum = torch.tensor(448.0)
    assert torch.equal(
        state.scale, torch.stack([maximum / x.abs().max(), torch.tensor(1.0), maximum / (x * 3).abs().max()])
    )
    assert torch.equal(again[0](x).planes.rowwise.parts["scale"], 1 / state.scale[:1])


def test_histories_update_at_the_end_of_a_region() -> None:
    """hybrid 84: handles take part in what autocast does for modules."""
    state = RecipeState.create(DelayedScaling(amax_history_len=2), mode="forward", num_quantizers=2)
    handle = state.make_quantizers()[0]
    for factor in (1.0, 2.0, 4.0):
        x = torch.randn(4, 16) * factor
        with duotone.autocast(recipe=recipes.load("mxfp8")):
            handle(x)
        assert state.amax_history[1, 0] == x.abs().max() and not state.amax_history[0].any()


def test_two_directions_of_one_slot_have_two_scales() -> None:
    """hybrid 84: the second ones follow after all slots."""
    e4m3, e5m2 = get("fp8_e4m3_delayed"), get("fp8_e5m2_delayed")
    history = History(amax_history_len=2)
    both, col = Quantizer(e4m3, e5m2, history=history), Quantizer(get("fp8_e4m3_tensor"), e5m2, history=history)
    recipe = CustomRecipe(qfactory=lambda role: both if role.tensor_type == "input" else col)
    state = RecipeState.create(recipe, mode="forward", num_quantizers=2, roles=FORWARD[:2])
    first, second = state.make_quantizers()
    x = torch.randn(8, 16)
    first(x), second(x * 2)
    state.roll()
    amax = x.abs().max()
    scales = torch.tensor([448.0, 57344.0, 57344.0]) / torch.stack([amax, amax * 2, amax])
    assert torch.equal(state.scale, scales)
    q = first(x)
    assert torch.equal(q.planes.rowwise.parts["scale"], 1 / scales[:1])
    assert torch.equal(q.planes.columnwise.parts["scale"], 1 / scales[2:])


@pytest.mark.parametrize(
    ("field", "value"),
    [("amax_history_len", 5), ("margin", 1), ("amax_compute_algo", "most_recent"), ("reduce_amax", False)],
)
def test_requests_that_disagree_quote_the_field_and_the_slots(field, value) -> None:
    """hybrid 84."""

    def factory(role):
        return DelayedScalingRequest(**({field: value} if role.tensor_type == "weight" else {}))

    with pytest.raises(ValueError, match=rf"slot 0 \(input\).*{field} = .*slot 1 \(weight\) {value!r}"):
        RecipeState.create(CustomRecipe(qfactory=factory), mode="forward", num_quantizers=2, roles=FORWARD[:2])


def test_the_device_is_where_the_buffers_are() -> None:
    """7.3."""
    state = RecipeState.create(DelayedScaling(), mode="backward", num_quantizers=2, device="meta")
    assert state.scale.is_meta and state.amax_history.shape == (1024, 2)
    assert RecipeState.create(recipes.load("mxfp8"), mode="forward").scale is None
