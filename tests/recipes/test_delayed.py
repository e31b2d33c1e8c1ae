"""Delayed scaling: the built-in recipe, requests of factories, and the agreement of a module's slots."""

import pickle
import re

import pytest
import torch

from duotone import recipes
from duotone.errors import RecipeError
from duotone.formats import get
from duotone.recipes import CustomRecipe, DelayedScaling, DelayedScalingRequest, QuantizerRole, check_requests
from duotone.tensor import History, Quantizer
from duotone.tensor.history import LARGEST_MARGIN

INPUT, WEIGHT, GRAD = (QuantizerRole("linear", kind, "a") for kind in ("input", "weight", "grad_output"))


def newest(history):
    return history[-1]


def half(amax, scale, fp8_max, history):
    return scale / 2


@pytest.mark.parametrize(
    ("fp8_format", "forward", "backward"),
    [("HYBRID", "e4m3", "e5m2"), ("E4M3", "e4m3", "e4m3"), ("E5M2", "e5m2", "e5m2")],
)
def test_delayed_scaling_gives_both_planes_the_element_of_the_role_and_its_history(fp8_format, forward, backward):
    recipe = DelayedScaling(fp8_format=fp8_format, margin=1, amax_history_len=4, amax_compute_algo="most_recent")
    history = History(1, 4, "most_recent")
    for role, element in ((INPUT, forward), (WEIGHT, forward), (GRAD, backward), (None, forward)):
        fmt = get(f"fp8_{element}_delayed")
        assert recipe(role) == Quantizer(fmt, fmt, history=history)
        assert recipe(role).delayed == (True, False)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_delayed_scaling_refuses_a_backward_override(override):
    with pytest.raises(RecipeError, match=f"backward_override is '{override}'; delayed scaling allows None only"):
        DelayedScaling(backward_override=override)


@pytest.mark.parametrize("make", [DelayedScaling, DelayedScalingRequest])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp8_format": "E3M4"}, "fp8_format 'E3M4' is unknown; allowed are 'HYBRID', 'E4M3', 'E5M2'"),
        ({"margin": 0.5}, "margin is 0.5; it must be an integer"),
        (
            {"margin": 40},
            "margin is 40; a scale of MAX 2^-margin / amax would flush every value to zero: give an integer",
        ),
        ({"margin": -100000}, "margin is -100000; a scale of MAX 2^-margin / amax would saturate every value: give"),
        ({"amax_history_len": 0}, "amax_history_len is 0; it must be an integer of at least 1"),
        ({"amax_compute_algo": "min"}, "amax_compute_algo 'min' is unknown; allowed are max, most_recent"),
        ({"scaling_factor_compute_algo": "half"}, "scaling_factor_compute_algo is 'half'; leave it out"),
        ({"reduce_amax": 1}, "reduce_amax is 1; allowed are true and false"),
    ],
)
def test_wrong_parameters_are_refused_at_construction(make, fields, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        make(**fields)


def test_functions_show_by_name_and_are_not_read_back():
    recipe = DelayedScaling(amax_compute_algo=newest, scaling_factor_compute_algo=half)
    document = recipe.to_dict()
    assert document["amax_compute_algo"].endswith("test_delayed.newest")
    assert document["scaling_factor_compute_algo"].endswith("test_delayed.half")
    with pytest.raises(RecipeError, match="leave it out, or give a function, which only Python can") as raised:
        recipes.from_dict(document)
    assert "\n" not in str(raised.value)
    assert DelayedScaling(amax_compute_algo=max).to_dict()["amax_compute_algo"] == "builtins.max"


def test_it_is_a_value_with_all_fields():
    recipe = DelayedScaling(margin=2, amax_history_len=16, reduce_amax=False)
    assert pickle.loads(pickle.dumps(recipe)) == recipe != DelayedScaling()
    assert recipes.from_dict(recipe.to_dict()) == recipe


def test_a_request_becomes_the_quantizer_of_the_built_in_recipe():
    """hybrid 84: a request is delayed scaling in that slot, and other slots stay as they were returned."""

    def factory(role):
        if role == WEIGHT:
            return Quantizer(get("fp8_e4m3_tensor"), get("fp8_e4m3_tensor"))
        return DelayedScalingRequest(margin=1, amax_history_len=8)

    recipe, built_in = CustomRecipe(qfactory=factory), DelayedScaling(margin=1, amax_history_len=8)
    assert recipe(INPUT) == built_in(INPUT) and recipe(GRAD) == built_in(GRAD)
    assert recipe(GRAD).rowwise.name == "fp8_e5m2_delayed"
    assert recipe(WEIGHT) == Quantizer(get("fp8_e4m3_tensor"), get("fp8_e4m3_tensor"))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"margin": 1}, "delayed scaling of input has margin = 0 and of grad_output 1"),
        ({"amax_history_len": 2}, "delayed scaling of input has amax_history_len = 1024 and of grad_output 2"),
        ({"amax_compute_algo": "most_recent"}, "input has amax_compute_algo = 'max' and of grad_output 'most_recent'"),
        ({"reduce_amax": False}, "delayed scaling of input has reduce_amax = True and of grad_output False"),
    ],
)
def test_requests_that_disagree_are_refused_with_the_field_and_both_slots(other, message):
    """hybrid 84: conflicting parameters of requests are an error."""
    quantizers = {
        "input": DelayedScalingRequest().quantizer(INPUT),
        "weight": Quantizer(),
        "grad_output": DelayedScalingRequest(**other).quantizer(GRAD),
    }
    with pytest.raises(RecipeError, match=re.escape(message)) as raised:
        check_requests(quantizers)
    assert "\n" not in str(raised.value)


def test_requests_that_agree_pass_beside_slots_without_a_scale_of_their_own():
    """hybrid 84: requests mix with stateless quantizers."""

    class PlainQuantizer:
        rowwise = columnwise = get("mxfp8_e4m3")

    request = DelayedScalingRequest()
    check_requests(
        {"input": request.quantizer(INPUT), "weight": PlainQuantizer(), "grad_output": request.quantizer(GRAD)}
    )
    check_requests({"input": Quantizer(), "weight": None})
    check_requests({})


def test_the_largest_margin_still_has_codes_and_three_more_have_none():
    """Closed form: E4M3's smallest magnitude is 2^-9, and half of it rounds to 0."""
    largest = 448.0 * 2.0**-LARGEST_MARGIN
    assert largest > 2.0**-9 and 448.0 * 2.0 ** -(LARGEST_MARGIN + 3) < 2.0**-10
    assert torch.tensor([largest, largest / 8]).to(torch.float8_e4m3fn).float().ne(0).tolist() == [True, False]
    for margin in (LARGEST_MARGIN, -LARGEST_MARGIN):
        assert History(margin=margin).margin == margin
