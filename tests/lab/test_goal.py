import pytest

from duotone.errors import UserError
from duotone.observe import speeds
from duotone.observe.candidates import load_candidates
from duotone_lab.training.gemm_options import Option, options_of
from duotone_lab.training.goal import Goal, predict

pytest.importorskip("scipy", reason="pip install 'scipy>=1.11'")

NAMES = ("fp8-current", "mxfp8", "nvfp4")
SIZE = (4096, 8192)


@pytest.fixture
def options(config):
    return options_of(config, load_candidates("", NAMES), speeds.measured(), SIZE)


def uniform(options, name):
    return {gemm: next(o for o in choices if o.recipe == name) for gemm, choices in options.items()}


def free(options):
    return {(*gemm, o.recipe): 0.0 for gemm, choices in options.items() for o in choices}


def test_shares_of_bf16_add_up_to_one(options):
    predicted = predict(uniform(options, "bf16"), free(options))
    assert (predicted.speed, predicted.memory) == (pytest.approx(1.0), pytest.approx(1.0))
    assert len(options) == 2 * 4 * 3  # layers, linears and GEMMs; the head is left out


def test_the_speed_of_a_uniform_recipe_is_that_of_the_table(options):
    linears = [(4096, 12288), (4096, 4096), (4096, 12288), (6144, 4096)]  # 64, 96 wide -> 4096, 6144
    expected = speeds.measured().model_speed([("fp8-current", (8192, *linear)) for linear in linears]).ratio
    assert predict(uniform(options, "fp8-current"), free(options)).speed == pytest.approx(expected)


def test_memory_is_inputs_for_wgrad_and_planes_of_quantized_weights(options):
    """One byte for each element and 32 of them with a scale, where bf16 has two bytes and keeps no weight twice."""
    inputs, weights = 8192 * (3 * 4096 + 6144), 4096 * (12288 + 4096 + 12288 + 6144)
    expected = (33 / 32) * (inputs + weights) / (2 * inputs)
    assert predict(uniform(options, "mxfp8"), free(options)).memory == pytest.approx(expected)
    nothing_for_dgrad = {
        gemm: next(o for o in choices if o.recipe == ("bf16" if gemm[1] == "dgrad" else "mxfp8"))
        for gemm, choices in options.items()
    }
    assert predict(nothing_for_dgrad, free(options)).memory == pytest.approx(33 / 64)


def choices(*rows):
    """Options of one GEMM each: recipe, cost in percent, time, memory."""
    options, costs = {}, {}
    for place, group in enumerate(rows):
        gemm = (f"m{place}", "fprop")
        options[gemm] = [Option(name, ("identity", "identity"), time, memory) for name, _, time, memory in group]
        costs |= {(*gemm, name): cost for name, cost, _, _ in group}
    return options, costs


TWO = choices(
    [("bf16", 0.0, 0.5, 0.5), ("a", 0.3, 0.25, 0.1)],
    [("bf16", 0.0, 0.5, 0.5), ("a", 0.1, 0.25, 0.3)],
)


@pytest.mark.parametrize(
    ("goal", "names"),
    [
        (Goal("speed", 1.3), ["bf16", "a"]),
        (Goal("speed", 1.4), ["a", "a"]),
        (Goal("speed", 1.0), ["bf16", "bf16"]),
        (Goal("memory", 0.7), ["a", "bf16"]),
        (Goal("memory", 0.8), ["bf16", "a"]),
        (Goal("gap", 0.2), ["bf16", "a"]),
        (Goal("gap", 0.4), ["a", "a"]),
        (Goal("gap", 0.0), ["bf16", "bf16"]),
    ],
)
def test_each_goal_takes_what_costs_least(goal, names):
    options, costs = TWO
    choice = goal.choose(goal.usable(options, ""), costs)
    assert [option.recipe for option in choice.values()] == names


def test_what_cannot_be_met_is_told_with_what_can():
    options, costs = choices([("bf16", 0.0, 1.0, 1.0), ("a", 1.0, 0.7, 0.3335)])
    with pytest.raises(UserError, match=r"^speed=1.5 cannot be met here: the most is 1.428 times bf16$"):
        Goal("speed", 1.5).usable(options, "here")
    with pytest.raises(UserError, match=r"^memory=0.2 cannot be met here: the least is 0.334 of bf16$"):
        Goal("memory", 0.2).usable(options, "here")
    for goal in (Goal("speed", 1.428), Goal("memory", 0.334)):
        assert [o.recipe for o in goal.choose(goal.usable(options, ""), costs).values()] == ["a"]


def test_options_without_a_known_speed_serve_a_memory_alone():
    options, _ = choices([("bf16", 0.0, 1.0, 1.0), ("a", 1.0, None, 0.5)])
    with pytest.raises(UserError, match=r"no speed is known here, but for some: name a size such as --as 4096x8192"):
        Goal("speed", 1.0).usable(options, "here", "some")
    assert Goal("memory", 0.5).usable(options, "here") == options
    assert predict({("m0", "fprop"): options["m0", "fprop"][1]}, {("m0", "fprop", "a"): 1.0}).speed is None


def test_a_model_too_small_for_the_table_needs_a_named_size(config):
    options = options_of(config, load_candidates("", ["fp8-current"]), speeds.measured(), None)
    exact, quantized = options["layers.0.mlp.down", "wgrad"]
    shares = [64 * 192, 64 * 64, 64 * 192, 96 * 64]
    assert exact.time == pytest.approx(shares[3] / sum(shares) / 2 / 3) and quantized.time is None
