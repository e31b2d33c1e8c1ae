"""What convert, revert, plan and convert_parameters refuse, and what they say of a model that has nothing for them."""

import pytest
import torch
from torch import nn

import duotone
from duotone import recipes
from duotone.errors import RecipeError, UserError
from duotone.recipes import Phase, Rule, Schedule

MXFP8, NVFP4 = recipes.load("mxfp8"), recipes.load("nvfp4")
TAKERS = {
    "convert": lambda model: duotone.convert(model, MXFP8),
    "revert": duotone.revert,
    "plan": duotone.plan,
    "convert_parameters": lambda model: duotone.convert_parameters(model, MXFP8),
    "assign_names": duotone.assign_names,
}


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "NoneType"), (nn.Linear, "the class Linear"), ([nn.Linear(4, 4)], "list"), (torch.ones(2), "Tensor")],
    ids=["None", "class", "list", "tensor"],
)
def test_what_is_no_model_is_one_line(taker, value, words) -> None:
    with pytest.raises(UserError, match=f"{taker} takes a torch.nn.Module; got {words}: give the model itself"):
        TAKERS[taker](value)


def test_a_schedule_is_no_recipe_and_the_error_says_what_to_write() -> None:
    """It would stay in its first phase for ever: a model does not know the step."""
    schedule, m = Schedule((Phase(MXFP8, 0), Phase(NVFP4, 2))), stack()
    with pytest.raises(UserError, match=r"schedule.at\(0\), .* duotone.autocast\(recipe=schedule.at\(i\)\)") as raised:
        duotone.convert(m, schedule)
    assert "\n" not in str(raised.value) and type(m[0]) is nn.Linear
    duotone.convert(m, schedule.at(0), schedule=schedule)  # what it says
    for step, formats in enumerate(("mxfp8_e4m3", "mxfp8_e4m3", "nvfp4")):
        with duotone.autocast(recipe=schedule.at(step)):
            assert m[0].plan_for(torch.randn(4, 32)).fprop.a.name == formats


def test_a_schedule_that_starts_otherwise_or_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="recipe nvfp4 is not what schedule schedule starts with"):
        duotone.convert(stack(), NVFP4, schedule=Schedule((Phase(MXFP8, 0),)))
    with pytest.raises(UserError, match=r"schedule is a duotone.recipes.Schedule; got str"):
        duotone.convert(stack(), NVFP4, schedule="mxfp8-then-bf16-fprop")


@pytest.mark.parametrize("rules", [None, Rule(format="identity"), 3], ids=["None", "a rule", "a number"])
def test_rules_that_are_no_sequence_are_one_line(rules) -> None:
    with pytest.raises(UserError, match=r"rules are a sequence of duotone.recipes.Rule; got \w+: give \(\) for none"):
        duotone.convert(stack(), MXFP8, rules)


def test_a_factory_is_asked_for_no_module_that_is_left_alone() -> None:
    names = []

    def factory(role):
        names.append(role.name if role else "")
        return duotone.IdentityQuantizer() if role is None else MXFP8(role)

    m = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2), "linear": nn.Linear(32, 32)})
    duotone.convert(m, duotone.CustomRecipe(qfactory=factory))
    assert set(names) == {"", "linear"}


@pytest.mark.parametrize("recipe", [MXFP8, recipes.load("bf16")], ids=["mxfp8", "bf16"])
def test_a_model_without_anything_to_convert_is_a_warning(recipe) -> None:
    with pytest.warns(UserWarning, match="found nothing to convert: Sequential has no nn.Linear, no experts"):
        duotone.convert(nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)), recipe)


def test_a_scripted_model_has_nothing_to_convert() -> None:
    m = torch.jit.script(stack())
    with pytest.warns(UserWarning, match=r"left alone: 0 \(RecursiveScriptModule holds weight"):
        duotone.convert(m, MXFP8)


def test_a_model_of_which_nothing_follows_the_recipe_is_a_warning() -> None:
    m = nn.Sequential(nn.LSTM(8, 8), nn.Conv2d(3, 3, 3))
    with pytest.warns(UserWarning, match=r"no linear follows recipe mxfp8; left alone: 0 \(LSTM holds .*, and 1 more"):
        duotone.convert(m, MXFP8)
    duotone.convert(m, recipes.load("bf16"))  # which asks for nothing else
    duotone.convert(m, MXFP8, rules=(Rule(format="identity"),))


def test_weights_of_a_model_that_was_not_converted_are_not_passed_over() -> None:
    m = stack()
    with pytest.raises(
        UserError, match=r"nothing in Sequential follows recipes: call duotone.convert\(model, recipe\)"
    ):
        duotone.convert_parameters(m, MXFP8)
    duotone.convert_parameters(duotone.convert(m, MXFP8), MXFP8)
    assert isinstance(m[0].weight, duotone.QuantizedTensor)


def test_what_weights_cannot_become_is_refused_before_anything_changes() -> None:
    """Ties to a module that stays, to another format, and masters that fit no weight."""
    tied = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 32))
    tied[1].weight = tied[0].weight
    duotone.convert(tied, MXFP8, rules=())
    with pytest.raises(UserError, match="weight of 1 is tied to a module that is not converted; keep it in high prec"):
        duotone.convert_parameters(tied, MXFP8)
    pair = stack()
    pair[1].weight = pair[0].weight
    duotone.convert(pair, MXFP8, rules=(Rule(module="1", format="identity"),))
    with pytest.raises(UserError, match="the weight of 1 is tied to one of another format"):
        duotone.convert_parameters(pair, MXFP8)
    plain = duotone.convert(stack(), MXFP8)
    with pytest.raises(UserError, match=r"masters has '7.weight', which is no weight of a converted module"):
        duotone.convert_parameters(plain, MXFP8, masters={"7.weight": torch.zeros(32, 32)})
    with pytest.raises(UserError, match=r"a master of shape \(2, 2\) for the weight of 0, which is \(32, 32\)"):
        duotone.convert_parameters(plain, MXFP8, masters={"0.weight": torch.zeros(2, 2)})
    for masters in ({"0.weight": None}, {"0.weight": plain[0].weight.detach().numpy()}, [plain[0].weight]):
        with pytest.raises(UserError, match="masters is a dict of tensors by full parameter name"):
            duotone.convert_parameters(plain, MXFP8, masters=masters)
    weights = (tied[2].weight, pair[0].weight, plain[0].weight)
    assert not any(isinstance(weight, duotone.QuantizedTensor) for weight in weights)


def test_a_plan_of_a_plain_model_does_not_pass_over_the_recipe() -> None:
    m = stack()
    assert {row.reason for row in duotone.plan(m)} == {"not converted"}
    with pytest.raises(UserError, match=r"nothing in Sequential follows recipes: call duotone.convert"):
        duotone.plan(m, MXFP8)
    assert {row.a for row in duotone.plan(duotone.convert(m, NVFP4), MXFP8)} == {"mxfp8_e4m3"}


def test_a_lazy_linear_waits_for_its_first_forward_and_says_so() -> None:
    m = nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32), nn.LazyConv1d(4, 1))
    with pytest.warns(
        UserWarning, match=r"1 of the linears do not follow recipe mxfp8; left alone: 0 \(it has no weight before"
    ):
        duotone.convert(m, MXFP8)
    assert any(row.module == "0" and "no weight before its first forward" in row.reason for row in duotone.plan(m))
    with pytest.raises(RecipeError, match="strict: 0 stays in high precision: it has no weight before"):
        duotone.convert(m, recipes.MXFP8BlockScaling(strict=True))
    x = torch.randn(4, 16)
    m[:2](x)
    duotone.convert(m, MXFP8)
    assert {row.gemm for row in duotone.plan(m) if row.module == "0"} == {"fprop", "dgrad", "wgrad"}
    assert not torch.equal(m[0](x), nn.functional.linear(x, m[0].weight, m[0].bias))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-delayed", "bf16"])
def test_a_trace_works_in_high_precision_and_is_one_line_elsewhere(name) -> None:
    m, x = duotone.convert(stack(), recipes.load(name)), torch.randn(4, 32)
    longer = torch.randn(6, 32)  # a trace that fixed the rows would be wrong here
    with pytest.raises(
        UserError, match=r"torch.jit.trace cannot record Linear under recipe .*: trace within torch.no_gr"
    ):
        torch.jit.trace(m, x)
    with torch.no_grad(), duotone.autocast(enabled=False):
        assert torch.equal(torch.jit.trace(m, x)(longer), m(longer))
    plain = duotone.revert(m)
    assert torch.equal(torch.jit.trace(plain, x)(longer), plain(longer))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", [duotone.LayerNormMLP, duotone.ops.Sequential])
def test_a_trace_of_modules_that_run_ops_as_one_is_refused_in_one_line(kind: type[nn.Module]) -> None:
    """They call none of their ops as a module."""
    m = duotone.LayerNormMLP(32, 64, recipe=MXFP8)
    m = m if kind is duotone.LayerNormMLP else kind(*m.children())
    x, longer = torch.randn(4, 32), torch.randn(6, 32)
    with pytest.raises(
        UserError, match=r"torch.jit.trace cannot record \w+ under .* use torch.export or torch.compile"
    ):
        torch.jit.trace(m, x)
    with torch.no_grad(), duotone.autocast(enabled=False):
        assert torch.equal(torch.jit.trace(m, x)(longer), m(longer))


def test_an_export_to_onnx_is_refused_in_one_line_before_torch_reports() -> None:
    from torch.onnx._internal.exporter import _capture_strategies, _flags

    def captured(model: nn.Module) -> object:
        return _capture_strategies.TorchExportNonStrictStrategy()(model, (torch.randn(4, 32),), {}, None).exception

    capture = _flags.set_onnx_exporting_flag(captured)
    m = duotone.convert(stack(), recipes.load("mxfp8"))
    with pytest.raises(UserError, match=r"^ONNX has no casts of recipe mxfp8: call duotone.revert.* before[^\n]*$"):
        capture(m)
    with duotone.autocast(enabled=False):
        assert capture(m) is None
    assert capture(duotone.revert(m)) is None and "Linear" in repr(m)
