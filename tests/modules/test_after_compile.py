"""What changes a model after it was compiled: eager's bits in a new graph, or one line that says what to do."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import duotone
from duotone import CustomRecipe, Quantizer, QuantizerRole, recipes
from later import Later

dynamo_testing = Later("torch._dynamo.testing")

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model() -> nn.Module:
    return nn.Sequential(Block()).bfloat16()


def step(m: nn.Module) -> list[Tensor]:
    torch.manual_seed(5)
    x = torch.randn(16, WIDTH).to(next(m.parameters()).dtype).requires_grad_()
    m.zero_grad()
    y = m(x)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, *[p.grad.clone() for p in m.parameters()]]


def to_another_recipe(m: nn.Module) -> None:
    duotone.convert(m, recipes.load("mxfp8"))


def away_and_back(m: nn.Module) -> None:
    values = m.state_dict()
    m.to("meta")
    m.to_empty(device="cpu")
    m.load_state_dict(values)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], int]] = {
    "converted to another recipe": (to_another_recipe, 2),
    "reverted": (duotone.revert, 2),
    "cast": (lambda m: m.float(), 2),
    "moved": (away_and_back, 1),
}


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("change", ["reverted", "cast", slow("converted to another recipe"), slow("moved")])
def test_a_model_that_changes_after_it_was_compiled_has_the_bits_of_eager(change: str) -> None:
    compiled = duotone.convert(model(), recipes.load("fp8-current"))
    eager = copy.deepcopy(compiled)
    counter = dynamo_testing.CompileCounterWithBackend("eager")
    for block in compiled:
        block.compile(backend=counter, fullgraph=True)
    step(compiled), step(eager)
    function, graphs = CHANGES[change]
    function(compiled), function(eager)
    assert all(torch.equal(*both) for both in zip(step(compiled), step(eager), strict=True))
    assert counter.frame_count == graphs


def test_a_reverted_model_that_is_still_held_is_not_asked_for_a_graph() -> None:
    """A cycle, or a variable, may keep what planned it."""
    reverted, compiled = (duotone.convert(model(), recipes.load("fp8-current")) for _ in range(2))
    planners = [block.up.plans for block in reverted]
    duotone.revert(reverted)
    eager = copy.deepcopy(compiled)
    compiled[0].compile(backend="eager", fullgraph=True)
    assert all(torch.equal(*both) for both in zip(step(compiled), step(eager), strict=True))
    assert planners


@pytest.mark.parametrize("how", ["blocks", slow("whole"), slow("wrapped")])
def test_a_model_may_be_compiled_first_and_converted_second(how: str) -> None:
    m = model()
    eager = duotone.convert(copy.deepcopy(m), recipes.load("fp8-current"))
    counter = dynamo_testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(m, backend=counter, fullgraph=True) if how == "wrapped" else m
    for part in {"blocks": list(m), "whole": [m], "wrapped": []}[how]:
        part.compile(backend=counter, fullgraph=True)
    step(compiled)
    assert duotone.convert(compiled, recipes.load("fp8-current")) is compiled
    assert all(torch.equal(*both) for both in zip(step(compiled), step(eager), strict=True))
    assert counter.frame_count == 2


@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed"])
def test_a_model_compiled_after_an_error_has_the_bits_of_eager(name: str) -> None:
    """Dynamo runs such frames eagerly from then on, compiles what they call, and must leave autograd's parts alone."""
    models = [duotone.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)).bfloat16(), name) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with pytest.raises(duotone.UserError, match="reshape the input"):
        torch.compile(models[0], backend="aot_eager")(torch.randn(16, 48).bfloat16())
    expected, result = step(models[0]), step(torch.compile(models[1], backend="aot_eager", fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_a_factory_with_side_effects_is_asked_once_for_each_slot_and_never_by_a_graph() -> None:
    roles: list[object] = []

    def factory(role: QuantizerRole | None) -> Quantizer:
        roles.append(role)
        return recipes.load("fp8-current")(role)

    m = duotone.convert(model(), recipes.load("bf16"))
    eager = copy.deepcopy(m)
    counter = dynamo_testing.CompileCounterWithBackend("eager")
    for block in m:
        block.compile(backend=counter, fullgraph=True)
    recipe = CustomRecipe(qfactory=factory)
    with duotone.autocast(recipe=recipe):
        first, count = step(m), len(roles)
        assert torch.equal(step(m)[0], first[0]) and len(roles) == count > 0
        assert all(torch.equal(*both) for both in zip(first, step(eager), strict=True))
    assert counter.frame_count == 1


class BuildsItsRecipe(nn.Module):
    def __init__(self, build: Callable[[], recipes.Recipe]) -> None:
        super().__init__()
        self.linear, self.build = duotone.Linear(WIDTH, WIDTH), build

    def forward(self, x: Tensor) -> Tensor:
        with duotone.autocast(recipe=self.build()):
            return self.linear(x)


@pytest.mark.parametrize(
    "build",
    [lambda: CustomRecipe(qfactory=lambda role: Quantizer()), lambda: recipes.MXFP8BlockScaling()],
    ids=["lambda", "class"],
)
def test_a_recipe_that_is_built_in_a_graph_is_one_line(build: Callable[[], recipes.Recipe]) -> None:
    m = BuildsItsRecipe(build)
    m.compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="is built in compiled code; build it outside, or give a name"):
        m(torch.randn(4, WIDTH))


def test_a_quantized_weight_is_cast_unless_something_holds_it() -> None:
    recipe = recipes.load("fp8-current")
    m = duotone.convert_parameters(duotone.convert(model(), recipe), recipe)
    eager = copy.deepcopy(m)
    m[0].compile(backend="aot_eager", fullgraph=True)
    before = step(m)
    reference = weakref.ref(m[0].up.weight)  # as parts of compilers keep one
    with pytest.raises(duotone.UserError, match="cast or moved while something holds it, as compiled code does"):
        m.float()
    assert reference() is not None and all(torch.equal(*both) for both in zip(before, step(m), strict=True))
    del reference
    m.float(), eager.float()
    assert all(torch.equal(*both) for both in zip(step(m), step(eager), strict=True))


@pytest.mark.parametrize("place", ["model", "block"])
def test_a_model_that_was_compiled_before_has_its_names_and_seeds(place: str) -> None:
    """Wrappers of torch.compile add to names, by which factories and rules go, and from which seeds follow."""

    def factory(role: QuantizerRole | None) -> Quantizer:
        fmt = duotone.formats.get("nvfp4_sr")
        return Quantizer() if role is not None and role.name.startswith("0.up") else Quantizer(fmt, fmt)

    def wrapped(m: nn.Module) -> nn.Module:
        if place == "model":
            return torch.compile(m, backend="aot_eager")
        m[0] = torch.compile(m[0], backend="aot_eager")
        return m

    torch.manual_seed(0)
    plain = model()
    late = wrapped(copy.deepcopy(plain))
    duotone.convert(plain, CustomRecipe(qfactory=factory))
    duotone.convert(late, CustomRecipe(qfactory=factory))
    assert [row for row in duotone.plan(late) if row.module] == [row for row in duotone.plan(plain) if row.module]
    assert {row.runs for row in duotone.plan(late).filter(gemm="fprop")} == {"high precision", "emulated"}
    early = wrapped(plain)
    for result, want in zip(step(late), step(early), strict=True):
        assert result.equal(want)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_of_a_whole_graph_over_quantized_parameters_runs(way: Callable[[nn.Module], nn.Module]) -> None:
    """Dynamo asked the copy for its weights by code that it then compiled, and so on."""
    m = duotone.convert_parameters(duotone.convert(model(), "mxfp8"), "mxfp8")
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    want = step(m)
    for result, value in zip(step(way(compiled)), want, strict=True):
        assert result.equal(value)


@pytest.mark.parametrize("fault", ["a factory", "the format of a weight"])
def test_a_compiled_call_has_the_error_of_eager_code(fault: str) -> None:
    """Dynamo wrapped it in twenty lines that ask to report a bug to PyTorch, and no handler for it caught them."""
    m = duotone.convert(model(), "mxfp8")
    if fault == "the format of a weight":
        duotone.convert_parameters(m, "mxfp8")
    other = CustomRecipe(qfactory=lambda role: None) if fault == "a factory" else recipes.load("nvfp4")
    message = (
        "^qfactory returned None for [^\n]*$" if fault == "a factory" else "^the weight of 0.up is held in [^\n]*$"
    )
    compiled = torch.compile(m, backend="aot_eager")
    for each in (m, compiled):
        with pytest.raises(duotone.RecipeError, match=message), duotone.autocast(recipe=other):
            step(each)
    want = step(m)
    for result, value in zip(step(compiled), want, strict=True):  # the error has left nothing behind
        assert result.equal(value)
    torch.compiler.reset()  # torch runs eagerly what ended in an error
    whole = torch.compile(m, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"^RecipeError: "), duotone.autocast(recipe=other):
        step(whole)


KEEPS_NVFP4 = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 keeps what it traced for NVFP4")


# Other formats have a columnwise plane that is a view.
@pytest.mark.parametrize("recipe", ["mxfp8", pytest.param("nvfp4", marks=KEEPS_NVFP4)])
def test_what_was_traced_over_quantized_parameters_is_freed(recipe: str) -> None:
    """torch never frees the trace of an input with a view in it: the view holds its base outside of Python."""

    def modes() -> dict[int, FakeTensorMode]:
        for _ in range(3):  # what one round frees lets the next one free more
            gc.collect()
        return {id(each): each for each in gc.get_objects() if isinstance(each, FakeTensorMode)}

    before = set(modes())
    traced: list[weakref.ref[FakeTensorMode]] = []
    for _ in range(3):
        m = duotone.convert_parameters(duotone.convert(model(), recipe), recipe)
        step(torch.compile(m, backend="aot_eager"))
        del m
        torch.compiler.reset()
        if not traced:
            traced = [weakref.ref(mode) for at, mode in modes().items() if at not in before]
    modes()
    assert traced and not [mode for mode in traced if mode() is not None]
