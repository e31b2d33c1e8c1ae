"""Quantized outputs and input gradients, in the formats of the consumer whose role is set."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import CustomRecipe, QuantizedTensor, Quantizer, QuantizerRole, formats, recipes
from duotone.compat import MXFP8Quantizer
from duotone.modules.boundary import BOUNDARY
from duotone.recipes import Rule, RuleRecipe
from duotone.tensor.context import QuantizeContext

E5M2 = formats.get("fp8_e5m2_row")


def factory(role):
    """Another format for whatever a consumer named "next" reads."""
    return Quantizer(E5M2, E5M2) if role is not None and role.name == "next" else MXFP8Quantizer()


@pytest.fixture
def module() -> duotone.Linear:
    return duotone.Linear(64, 32, recipe=CustomRecipe(qfactory=factory), name="this", params_dtype=torch.bfloat16)


def test_the_role_of_a_consumer_decides_the_format_of_the_boundary(module) -> None:
    """hybrid 77, 78."""
    module.output_quantizer_role = QuantizerRole("linear", "input", "next")
    module.grad_input_quantizer_role = QuantizerRole("linear", "grad_output", "next")
    x = torch.randn(16, 64).bfloat16().requires_grad_()
    plain = module(x)
    plain.sum().backward()
    gradient, x.grad = x.grad, None
    y = module(x, fp8_output=True, fp8_grad=True)
    assert isinstance(y, QuantizedTensor) and y.planes.rowwise.format == E5M2
    assert torch.equal(y.dequantize(), Quantizer(E5M2, E5M2).quantize(plain.detach()).dequantize())
    y.sum().backward()
    result = x.grad.dequantize() if isinstance(x.grad, QuantizedTensor) else x.grad
    assert torch.equal(result, Quantizer(E5M2, E5M2).quantize(gradient).dequantize())
    module.output_quantizer_role = QuantizerRole("linear", "input", "other")
    assert module(x, fp8_output=True).planes.rowwise.format.name == "mxfp8_e4m3"


def test_a_boundary_without_a_role_is_a_warning(module) -> None:
    """hybrid 81."""
    x = torch.randn(16, 64).bfloat16()
    with pytest.warns(UserWarning, match=r"this: the output is quantized .* set output_quantizer_role"):
        module(x, fp8_output=True)
    with pytest.warns(UserWarning, match="set grad_input_quantizer_role"):
        module(x, fp8_grad=True)
    module.output_quantizer_role = QuantizerRole("linear", "input", "next")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x, fp8_output=True)
        module(x)


def test_a_quantized_output_is_the_next_modules_input_as_it_is(module) -> None:
    """core 6.1: an input that is quantized already is used as is, its columnwise plane for wgrad."""
    module.output_quantizer_role = QuantizerRole("linear", "input", "following")
    following = duotone.Linear(32, 16, recipe=module.recipe, name="following", params_dtype=torch.bfloat16)
    x = torch.randn(2, 16, 64).bfloat16().requires_grad_()
    quantized = following(module(x, fp8_output=True))
    quantized.sum().backward()
    gradients = [x.grad.clone(), following.weight.grad.clone(), module.weight.grad.clone()]
    x.grad = None
    following.zero_grad(), module.zero_grad()
    plain = following(module(x))
    plain.sum().backward()
    assert torch.equal(quantized, plain)
    for result, want in zip(gradients, (x.grad, following.weight.grad, module.weight.grad), strict=True):
        assert torch.equal(result, want)


POSITIONS = {
    "fp8-current": ("fp8_e4m3_tensor", "fp8_e5m2_tensor"),
    "fp8-delayed": ("fp8_e4m3_delayed", "fp8_e5m2_delayed"),
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "nvfp4": ("nvfp4", "nvfp4_sr"),
}
"""What a recipe gives an output and a grad_input whose consumers are not known: its forward and its backward format."""


@pytest.mark.filterwarnings("ignore:.*consumer that is not known")
@pytest.mark.parametrize("kind", [duotone.Linear, duotone.LayerNormLinear])
@pytest.mark.parametrize("name", POSITIONS)
def test_boundary_slots_without_a_role_go_by_their_position(name, kind) -> None:
    """hybrid 7.3: the gradient of the input has the format of gradients; nvfp4 rounds it stochastically."""
    module = kind(64, 32, recipe=recipes.load(name), name="this", params_dtype=torch.bfloat16)
    x = torch.randn(16, 64).bfloat16().requires_grad_()
    start = duotone.rng_state(module)
    y = module(x, fp8_output=True, fp8_grad=True)
    y.sum().backward()
    quantized, x.grad = x.grad, None
    assert isinstance(quantized, QuantizedTensor)
    assert (y.planes.rowwise.format.name, quantized.planes.rowwise.format.name) == POSITIONS[name]
    duotone.load_rng_state(module, start)
    plain = module(x)
    plain.sum().backward()
    if name == "fp8-delayed":
        return  # the second forward has other scales
    assert torch.equal(y.dequantize(), y.quantizer.quantize(plain.detach()).dequantize())
    seed = start["duotone_seed"] + BOUNDARY
    expected = quantized.quantizer.quantize(x.grad, ctx=QuantizeContext(seed=seed))
    assert torch.equal(quantized.dequantize(), expected.dequantize())


@pytest.mark.filterwarnings("ignore:.*consumer that is not known")
def test_every_forward_rounds_its_boundary_gradient_anew_and_a_recompute_as_its_forward_did() -> None:
    module = duotone.Linear(64, 32, recipe=recipes.load("nvfp4"), name="this")
    x = torch.randn(16, 64).requires_grad_()

    def gradient(call) -> torch.Tensor:
        x.grad = None
        call(x).square().sum().backward()
        return x.grad.dequantize()

    start = duotone.rng_state(module)
    first, second = (gradient(lambda t: module(t, fp8_grad=True)) for _ in range(2))
    assert not torch.equal(first, second)
    for reentrant in (True, False):
        duotone.load_rng_state(module, start)
        recomputed = gradient(
            lambda t, how=reentrant: checkpoint(lambda u: module(u, fp8_grad=True), t, use_reentrant=how)
        )
        assert torch.equal(recomputed, first)


@pytest.mark.filterwarnings("ignore:.*consumer that is not known")
def test_a_boundary_slot_alone_may_be_stochastic() -> None:
    """The seed advances for it where no operand of the linear draws."""
    stochastic = Quantizer(formats.get("nvfp4_sr"), formats.get("nvfp4_sr"))
    recipe = CustomRecipe(qfactory=lambda role: stochastic if role is None else Quantizer())
    module = duotone.Linear(64, 32, recipe=recipe, name="this")
    x = torch.randn(16, 64).requires_grad_()
    outputs = [module(x, fp8_output=True).detach().dequantize() for _ in range(2)]
    assert not torch.equal(*outputs)


@pytest.mark.filterwarnings("ignore:.*consumer that is not known")
@pytest.mark.parametrize("base", [None, recipes.load("mxfp8")])
def test_rules_name_the_output_and_the_gradient_of_the_input(base) -> None:
    """They match the slot of the module that they name, consumer or not; rules for all tensors leave it alone."""
    rules = (
        Rule(module="this", tensor_type="grad_input", format="fp8_e5m2_row"),
        Rule(tensor_type="output", rowwise="fp8_e4m3_row", columnwise="fp8_e4m3_row"),
        Rule(format="mxfp8_e5m2"),
    )
    module = duotone.Linear(64, 32, recipe=RuleRecipe(rules=rules, base=base), name="this")
    x = torch.randn(16, 64).requires_grad_()
    for role in (None, QuantizerRole("linear", "input", "next")):
        module.output_quantizer_role, x.grad = role, None
        y = module(x, fp8_output=True, fp8_grad=True)
        y.sum().backward()
        assert y.planes.rowwise.format.name == "fp8_e4m3_row"
        assert x.grad.planes.rowwise.format.name == "fp8_e5m2_row"
    other = duotone.Linear(64, 32, recipe=module.recipe, name="other")
    unknown = other.plan_for(x).grad_input.rowwise.name
    assert unknown == ("identity" if base is None else "mxfp8_e4m3")
    other.grad_input_quantizer_role = QuantizerRole("linear", "grad_output", "this")
    assert other.plan_for(x).grad_input.rowwise.name == "mxfp8_e5m2"


@pytest.mark.filterwarnings("ignore:.*consumer that is not known")
def test_rules_of_convert_name_boundaries_too_and_are_not_reported() -> None:
    rules = (Rule(module="0", tensor_type="output", format="fp8_e5m2_row"), Rule(module="0", format="mxfp8_e5m2"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = duotone.convert(torch.nn.Sequential(torch.nn.Linear(64, 32)), recipes.load("mxfp8"), rules)
    assert not [row for row in duotone.plan(model) if row.module == "a rule"]
    assert model[0](torch.randn(4, 64), fp8_output=True).planes.rowwise.format.name == "fp8_e5m2_row"
    unmatched = (Rule(module="9", tensor_type="grad_input", format="fp8_e5m2_row"),)
    with pytest.warns(UserWarning, match="matches no tensor of the model"):
        duotone.convert(torch.nn.Sequential(torch.nn.Linear(64, 32)), recipes.load("mxfp8"), unmatched)


@pytest.mark.parametrize("name", ["mxfp8", "fp8-delayed"])
def test_boundaries_are_part_of_one_graph_with_the_bits_of_eager(name) -> None:
    """What a graph quantizes, the next linear of the graph reads as it is."""
    role = {"output": QuantizerRole("linear", "input", "b"), "gradient": QuantizerRole("linear", "grad_output", "a")}

    def chain() -> tuple[duotone.Linear, duotone.Linear]:
        torch.manual_seed(3)
        first, second = (duotone.Linear(64, 64, recipe=name, name=each) for each in "ab")
        first.output_quantizer_role, second.grad_input_quantizer_role = role["output"], role["gradient"]
        return first, second

    def step(run, modules, x):
        leaf = x.clone().requires_grad_()
        run(leaf).square().sum().backward()
        return leaf.grad, *(p.grad.clone() for m in modules for p in m.parameters())

    eager, compiled = chain(), chain()
    run = torch.compile(
        lambda x: compiled[1](compiled[0](x, fp8_output=True), fp8_grad=True), backend="aot_eager", fullgraph=True
    )
    for _ in range(2):
        x = torch.randn(2, 32, 64)
        expected = step(lambda x: eager[1](eager[0](x, fp8_output=True), fp8_grad=True), eager, x)
        assert all(map(torch.equal, step(run, compiled, x), expected))


@pytest.mark.filterwarnings("ignore:.*a consumer that is not known:UserWarning")
def test_boundaries_in_a_checkpoint_of_a_graph_keep_the_seeds_of_their_forwards() -> None:
    """Two forwards wait for their backwards. Nobody named the consumer, which the trace of a checkpoint tells, too."""
    eager = duotone.Linear(64, 32, recipe=recipes.load("nvfp4"), name="a")
    compiled = copy.deepcopy(eager)

    def step(m, how):
        generator = torch.Generator().manual_seed(1)
        leaves = [torch.randn(32, 64, generator=generator).requires_grad_() for _ in range(2)]
        run = how(lambda x: checkpoint(lambda t: m(t, fp8_grad=True), x, use_reentrant=False))
        for loss in [run(leaf).square().sum() for leaf in leaves]:
            loss.backward()
        return [*[leaf.grad for leaf in leaves], *[p.grad for p in m.parameters()], m.duotone_seed]

    result = step(compiled, partial(torch.compile, backend="aot_eager", fullgraph=True))
    assert all(map(torch.equal, result, step(eager, lambda body: body)))


def test_a_graph_reads_a_quantized_input_in_its_formats() -> None:
    """It is not encoded anew in those of the recipe, and a pair that eager code refuses is refused."""
    x = recipes.load("mxfp8")(QuantizerRole("linear", "input")).quantize(torch.randn(32, 64))
    for recipe in (recipes.load("mxfp8"), recipes.Float8CurrentScaling(emulate_mixed=True)):
        module = duotone.Linear(64, 32, recipe=recipe)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True)(x), module(x))
    module = duotone.Linear(64, 32, recipe="fp8-current")
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        with pytest.raises(Exception, match="would multiply input rowwise with weight rowwise"):
            call(x)


@pytest.mark.parametrize("options", [{"is_first_microbatch": True}, {"is_first_microbatch": False}, {}], ids=str)
def test_a_graph_keeps_tensors_between_calls_beside_a_quantized_input(options: dict) -> None:
    """Without `options` the weight gradients go into `main_grad`."""
    x = recipes.load("mxfp8")(QuantizerRole("linear", "input")).quantize(torch.randn(2, 16, 64))
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        module = duotone.Linear(64, 32, recipe="mxfp8", fuse_wgrad_accumulation=not options)
        module.weight.main_grad = torch.zeros(32, 64)
        call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiles else module
        for _ in range(2):
            y = call(x, **options)
            y.square().sum().backward()
        results.append([y, module.weight.main_grad, module.bias.grad, *([module.weight.grad] if options else [])])
    assert all(map(torch.equal, *results)) and (not options) is bool(results[0][1].any())
