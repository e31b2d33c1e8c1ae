"""torch.compile(fullgraph=True) of converted models equals eager bit for bit; equal recipes compile once."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import CustomRecipe, HybridQuantizer, IdentityQuantizer, recipes
from duotone.compat import MXFP8Quantizer
from duotone.linear.operand_plan import REENCODE_IN_GRAPH
from duotone.modules.traced_stages import PLANS, template_of
from duotone.recipes import Recipe
from duotone.recipes.builtin import BUILTIN
from later import Later

dynamo_testing = Later("torch._dynamo.testing")

HYBRID = "mxfp8-fwd-nvfp4-bwd"


def factory(role):
    """MXFP8 forward, high-precision backward on what forward multiplied; stateless and of module level."""
    if role is None or role.tensor_type == "grad_output":
        return IdentityQuantizer()
    return HybridQuantizer(
        rowwise_quantizer=MXFP8Quantizer(),
        columnwise_quantizer=IdentityQuantizer(),
        columnwise_source="rowwise_dequantized",
    )


RECIPES: dict[str, Recipe] = {
    **{name: recipes.load(name) for name in BUILTIN},
    HYBRID: recipes.load(HYBRID),
    "custom": CustomRecipe(qfactory=factory),
    "override": recipes.MXFP8BlockScaling(backward_override="dequantized"),
}


TWICE = ("fp8-delayed", "nvfp4")
"""Recipes whose layers draw seeds or roll scales in one order."""


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def step(run, m: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    m.zero_grad()
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in m.parameters()), *(b.clone() for b in m.buffers())]


@pytest.mark.parametrize("name", RECIPES)
def test_a_converted_model_compiles_whole_and_equals_eager(name: str) -> None:
    """Outputs, gradients, seeds and delayed scales of three steps, which stochastic rounding and scaling move.

    Two layers in a graph are compiled under the recipes of `TWICE`, one layer under each of the others. Recipes that
    mix the casts of others are traced alone.
    """
    model = TwoLayers() if name in TWICE else nn.Sequential(nn.Linear(64, 32))
    eager = duotone.convert(model.bfloat16(), RECIPES[name])
    compiled = copy.deepcopy(eager)
    counter = dynamo_testing.CompileCounterWithBackend("aot_eager" if name in BUILTIN else "eager")
    run = torch.compile(compiled, fullgraph=True, backend=counter)
    for _ in range(3):
        x, dy = torch.randn(32, 64).bfloat16(), torch.randn(32, 32).bfloat16()
        for result, want in zip(step(run, compiled, x, dy), step(eager, eager, x, dy), strict=True):
            assert torch.equal(result, want)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("name", "backend", "sizes"),
    [("fp8-delayed", "eager", (64, 1, 33, 128)), ("mxfp8", "aot_eager", (64, 33)), ("nvfp4", "eager", (64, 33))],
    ids=str,
)
def test_batches_of_any_size_share_few_graphs(name: str, backend: str, sizes: tuple[int, ...]) -> None:
    """dynamic=True: numbers of formats are constants of the trace. Sizes that cut a block differently compile again."""
    eager = duotone.convert(nn.Sequential(nn.Linear(64, 32)).bfloat16(), recipes.load(name))
    compiled = copy.deepcopy(eager)
    counter = dynamo_testing.CompileCounterWithBackend(backend)
    run = torch.compile(compiled, fullgraph=True, dynamic=True, backend=counter)
    for rows in sizes:
        x, dy = torch.randn(rows, 64).bfloat16(), torch.randn(rows, 32).bfloat16()
        for result, want in zip(step(run, compiled, x, dy), step(eager, eager, x, dy), strict=True):
            assert torch.equal(result, want)
    assert counter.frame_count <= min(3, len(sizes))


@pytest.mark.parametrize("name", ["fp8-delayed", "nvfp4"])
def test_what_a_compiled_backward_encodes_again_has_the_bits_of_forward(name: str) -> None:
    """With recompute_columnwise a compiled linear keeps its input and no codes; the partitioner computes that again.

    Code may write the input after the call: torch looks for such writes in eager code alone.
    """
    recipe = replace(recipes.load(name), recompute_columnwise=True)
    eager = duotone.convert(nn.Sequential(nn.Linear(64, 32)).bfloat16(), recipe)
    compiled = copy.deepcopy(eager)

    def call(m: nn.Module, x: Tensor) -> Tensor:
        h = x * 1
        y = m(h)
        h.zero_()
        return y

    run = torch.compile(partial(call, compiled), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x, dy = torch.randn(32, 64).bfloat16(), torch.randn(32, 32).bfloat16()
        for result, want in zip(step(run, compiled, x, dy), step(partial(call, eager), eager, x, dy), strict=True):
            assert torch.equal(result, want)
    planner = compiled[0].plans
    start = f"{planner.config}_{getattr(planner.answered, recipe.key)}_{recipe.key}_"
    plans = [template_of(name).stage.plan for name in vars(PLANS) if name.startswith(start)]
    assert plans and all(plan.input.backward is REENCODE_IN_GRAPH for plan in plans)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["bf16", "high precision in backward", "norm"])
def test_gradients_are_those_of_what_a_module_read_before_it_was_written(kind: str, backend: str) -> None:
    """torch's check of versions does not reach an autograd.Function in a graph. Eager code is refused."""
    override = recipes.MXFP8BlockScaling(backward_override="high_precision")
    recipe = override if kind == "high precision in backward" else recipes.load("bf16")
    m = duotone.LayerNormMLP(64, 64, recipe=recipe) if kind == "norm" else duotone.Linear(64, 64, recipe=recipe)

    def call(writes: bool, x: Tensor) -> Tensor:
        h = x * 2
        y = m(h)
        return h.add_(y) if writes else h + y

    x, dy = torch.randn(32, 64), torch.randn(32, 64)
    want = step(partial(call, False), m, x, dy)
    with pytest.raises(RuntimeError, match=r"modified .*inplace"):
        step(partial(call, True), m, x, dy)
    result = step(torch.compile(partial(call, True), fullgraph=True, backend=backend), m, x, dy)
    for one, other in zip(result, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bias", [False, True])
def test_a_model_in_fp32_gets_its_gradients(bias: bool) -> None:
    """torch 2.11 gives zeros where a function returns one tensor twice, as a cast to its own dtype makes it do."""
    eager = duotone.Linear(64, 32, bias=bias, recipe=recipes.load("mxfp8"))
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="eager")
    x, dy = torch.randn(4, 64), torch.randn(4, 32)
    for result, want in zip(step(run, compiled, x, dy), step(eager, eager, x, dy), strict=True):
        assert torch.equal(result, want)


def test_equal_recipes_that_are_different_objects_do_not_recompile() -> None:
    m = duotone.convert(nn.Sequential(nn.Linear(64, 32)).bfloat16(), recipes.load("bf16"))
    counter = dynamo_testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(m, fullgraph=True, backend=counter)
    x = torch.randn(32, 64).bfloat16()
    outputs = []
    for recipe in (recipes.Float8CurrentScaling(), recipes.Float8CurrentScaling(), recipes.load("fp8-current")):
        with duotone.autocast(recipe=recipe):
            outputs.append(run(x))
    assert counter.frame_count == 1 and torch.equal(outputs[0], outputs[2])
    with duotone.autocast(recipe=recipes.Float8CurrentScaling(fp8_format="E5M2")):
        assert not torch.equal(run(x), outputs[0])
    assert counter.frame_count == 2


@pytest.mark.parametrize("kind", ["new", "copy"])
def test_later_models_share_the_graphs_of_regions_around_earlier_ones(kind: str) -> None:
    """Under a recipe that is not their own; Dynamo gives up after 8 graphs."""
    torch._dynamo.reset()
    counter = dynamo_testing.CompileCounterWithBackend("eager")
    first = duotone.convert(TwoLayers().bfloat16(), recipes.load("bf16"), ())
    x = torch.randn(32, 64).bfloat16()
    for _ in range(3):
        other = copy.deepcopy(first) if kind == "copy" else TwoLayers().bfloat16()
        m = duotone.convert(other, recipes.load("bf16"), ()) if kind == "new" else other
        for name in ("fp8-current", "mxfp8"):
            with duotone.autocast(recipe=name):
                torch.compile(m, backend=counter, fullgraph=True)(x)
    assert counter.frame_count == 2


def test_a_delayed_region_around_compiled_code_rolls_once_at_its_end() -> None:
    recipe = recipes.DelayedScaling(amax_history_len=4)
    eager = duotone.convert(TwoLayers().bfloat16(), recipe)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x, dy = torch.randn(32, 64).bfloat16(), torch.randn(32, 32).bfloat16()
        outcomes = []
        for call, m in ((run, compiled), (eager, eager)):
            with duotone.autocast(recipe=recipe):
                y = call(x)
            after_region = m.up.duotone_forward.scale.clone()
            y.backward(dy)
            outcomes.append([y, after_region, *m.buffers()])
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_evaluation_under_no_grad_compiles_whole() -> None:
    m = duotone.convert(nn.Sequential(nn.Linear(64, 32)).bfloat16(), recipes.load("nvfp4"))
    run = torch.compile(m, fullgraph=True, backend="aot_eager")
    x = torch.randn(32, 64).bfloat16()
    with torch.no_grad():
        assert torch.equal(run(x), m(x))


def test_a_compiled_checkpoint_under_delayed_scaling_equals_eager() -> None:
    """The recompute inside a compiled backward uses the scale of its forward and records nothing."""
    recipe = recipes.DelayedScaling(amax_history_len=8)
    eager = duotone.convert(TwoLayers().bfloat16(), recipe)
    compiled = copy.deepcopy(eager)

    def checkpointed(m: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(m, x, use_reentrant=False)

    run = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
    for step_number in range(1, 4):
        x, dy = torch.randn(32, 64).bfloat16(), torch.randn(32, 32).bfloat16()
        outcomes = []
        for call, m in ((run, compiled), (checkpointed, eager)):
            m.zero_grad()
            with duotone.autocast(recipe=recipe):
                y = call(m, x.clone().requires_grad_())
            y.backward(dy)
            outcomes.append([y, *(p.grad.clone() for p in m.parameters()), *(b.clone() for b in m.buffers())])
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
        assert (compiled.up.duotone_forward.amax_history[:, 0] > 0).sum() == step_number


@torch._dynamo.config.patch(recompile_limit=2)  # Dynamo gives up after as many variants
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_many_layers_that_keep_weights_are_a_graph_for_each_flag() -> None:
    options = {"params_dtype": torch.bfloat16, "recipe": recipes.load("fp8-delayed")}
    layers = nn.ModuleList([duotone.Linear(32, 32, **options) for _ in range(3)])

    def model(x: Tensor, first: bool) -> Tensor:
        for layer in layers:
            x = layer(x, is_first_microbatch=first)
        return x

    counter = dynamo_testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    for first in (True, False, True):
        run(x, first).sum().backward()
    assert counter.frame_count == 2


@pytest.mark.parametrize("arguments", [{"is_first_microbatch": True}, {}], ids=str)
def test_what_keeps_tensors_between_calls_is_not_exported(arguments: dict) -> None:
    m = duotone.Linear(32, 32, delay_wgrad_compute=not arguments, recipe=recipes.load("mxfp8"))
    with pytest.raises(duotone.UserError, match="keep tensors between calls, and cannot be exported: leave them out"):
        torch.export.export(m, (torch.randn(16, 32),), arguments, strict=bool(arguments))


@pytest.mark.parametrize(("strict", "splits"), [(False, "tensor"), (True, "tensor"), (True, "list")])
def test_experts_are_not_exported_unless_their_rows_are_constants(strict: bool, splits: str) -> None:
    m, x = duotone.GroupedLinear(2, 32, 32, recipe=RECIPES["fp8-current"]), torch.randn(32, 32)
    counts = [12, 20] if splits == "list" else torch.tensor([12, 20])
    with torch.no_grad():
        assert torch.equal(torch.export.export(m, (x, [12, 20])).module()(x, [12, 20]), m(x, [12, 20]))
        with pytest.raises(duotone.UserError, match=r"experts only without strict=True and with row counts .* list"):
            torch.export.export(m, (x, counts), strict=strict)


def test_experts_with_a_router_are_not_exported() -> None:
    m = duotone.convert(duotone.MoE(32, 32, 2, top_k=1), "fp8-current", ())
    with torch.no_grad(), pytest.raises(duotone.UserError, match=r"experts only without strict=True"):
        torch.export.export(m, (torch.randn(32, 32),))


@pytest.mark.parametrize("strict", [False, True])
def test_a_weight_in_pieces_is_exported(strict: bool) -> None:
    m, x = duotone.Linear(32, 64, parameters_split=("q", "k"), recipe=RECIPES["mxfp8"]), torch.randn(32, 32)
    with torch.no_grad():
        assert torch.equal(torch.export.export(m, (x,), strict=strict).module()(x), m(x))


EXPORTED = [("fp8-current", True), ("fp8-block", False), ("mxfp8", True), ("nvfp4", False), ("fp8-delayed", True)]
OTHERS = [pytest.param(recipe, not tracked, marks=pytest.mark.slow) for recipe, tracked in EXPORTED]


@pytest.mark.parametrize(("recipe", "tracked"), EXPORTED + OTHERS)
def test_an_exported_program_takes_batches_of_any_size(recipe: str, tracked: bool) -> None:
    """At 512 rows and more, eager casts are compiled by themselves, which is no guard of the program."""
    model = duotone.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), recipe, ()).eval()
    rows = {0: torch.export.Dim("rows", min=2, max=4096)}
    with torch.set_grad_enabled(tracked):
        program = torch.export.export(model, (torch.randn(64, 64),), dynamic_shapes=(rows,)).module()
    for count in (2, 77, 512, 1024):
        x = torch.randn(count, 64)
        assert torch.equal(program(x), model(x))


def test_an_exported_program_may_be_compiled() -> None:
    """Blocks are ragged: without `formats.geometry.crop` inductor would drop the rest of a row."""
    model = duotone.convert(nn.Sequential(nn.Linear(40, 24)), "mxfp8", ()).eval()
    x = torch.randn(32, 40)
    program = torch.export.export(model, (x,), strict=False).module()
    assert torch.equal(torch.compile(program)(x), model(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("tracked", [False, True], ids=["no_grad", "grad"])
def test_an_exported_program_evaluates_under_delayed_scaling(strict: bool, tracked: bool) -> None:
    """It records no amax in the training of its model, and its scales fit weights that were written since."""
    model, x = nn.Sequential(duotone.Linear(64, 32, recipe="fp8-delayed")), torch.randn(16, 64)
    for _ in range(3):
        model(x).sum().backward()
    with torch.set_grad_enabled(tracked):
        program = torch.export.export(model.eval(), (x,), strict=strict).module()
    state = model[0].duotone_forward
    before = state.amax_history.clone()
    program(8 * x)
    assert torch.equal(state.amax_history, before)
    with torch.no_grad():
        model[0].weight.mul_(4)
        assert torch.equal(program(x), model(x))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8-delayed"])
def test_an_exported_program_takes_batches_of_sequences(recipe: str) -> None:
    model = duotone.convert(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), recipe, ()).eval()
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    program = torch.export.export(model, (torch.randn(3, 16, 32),), dynamic_shapes=(batch,)).module()
    for count in (2, 5):
        x = torch.randn(count, 16, 32)
        assert torch.equal(program(x), model(x))


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "mxfp8"])
def test_a_strict_program_holds_the_operations_of_one_that_is_not(recipe: str) -> None:
    """Dynamo sees one call for neighbouring stages, and torch traces what they run. No op of Duotone hides them."""
    parts = duotone.RMSNorm(64), duotone.Linear(64, 64, recipe=recipe), duotone.ops.GELU()
    model, x, programs = duotone.ops.Sequential(*parts), torch.randn(16, 64), []
    with torch.no_grad():
        for strict in (False, True):
            program = torch.export.export(model, (x,), strict=strict)
            assert torch.equal(program.module()(x), model(x))
            names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
            # Eager code, which a program that is not strict follows, marks outputs without a second derivative.
            programs.append(names - {"aten.detach.default", "aten.empty.memory_format"})
    assert programs[0] == programs[1]
    assert {name for name in programs[0] if "row" in name} == set()


@pytest.mark.parametrize(("norm", "strict", "tracked"), [("RMSNorm", False, False), ("LayerNorm", True, True)])
def test_a_norm_and_its_linear_are_exported_before_their_first_step(norm: str, strict: bool, tracked: bool) -> None:
    """The delayed states are created in the trace, and the module trains with them afterwards."""
    m = duotone.LayerNormLinear(32, 64, normalization=norm, recipe=recipes.load("fp8-delayed")).eval()
    x = torch.randn(16, 32)
    with torch.set_grad_enabled(tracked):
        program = torch.export.export(m, (x,), strict=strict).module()
    assert torch.equal(program(x), m(x))
    m.train()(100 * x).sum().backward()
    m.eval()
    assert m.duotone_forward.scale[0] < 1e3 and torch.equal(program(x), m(x))


PLANES = {
    "both delayed": {"rowwise": "fp8_e4m3_delayed", "columnwise": "fp8_e5m2_delayed"},
    "columnwise delayed": {"rowwise": "mxfp8_e4m3", "columnwise": "fp8_e4m3_delayed"},
    "high precision and delayed": {"rowwise": "identity", "columnwise": "fp8_e4m3_delayed"},
    "of what forward multiplied": {
        "rowwise": "fp8_e4m3_delayed",
        "columnwise": "fp8_e4m3_delayed",
        "columnwise_source": "rowwise_dequantized",
    },
}


@pytest.mark.parametrize("planes", PLANES)
def test_delayed_scales_that_backward_alone_reads_are_those_of_the_forward(planes: str) -> None:
    """A partitioner puts what backward alone reads into the backward, where an amax is no longer recorded."""
    operands = [recipes.Rule(tensor_type=operand, **PLANES[planes]) for operand in ("input", "weight")]
    gradient = recipes.Rule(tensor_type="grad_output", format="mxfp8_e4m3")
    recipe = recipes.RuleRecipe(rules=(*operands, gradient), emulate_mixed=True)
    eager = duotone.Linear(64, 64, bias=False, recipe=recipe)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for factor in (1, 4):
        x, results = torch.randn(32, 64) * factor, []
        for model, call in ((eager, eager), (compiled, run)):
            leaf = x.clone().requires_grad_()
            gradients = torch.autograd.grad(call(leaf).square().sum(), [leaf, *model.parameters()])
            results.append([*gradients, *(b.clone() for b in model.buffers())])
        assert all(torch.equal(*both) for both in zip(*results, strict=True))


GRADIENT_ALONE = recipes.RuleRecipe(
    rules=(
        recipes.Rule(tensor_type="grad_output", format="mxfp8_e4m3"),
        recipes.Rule(format="fp8_e4m3_delayed"),
    ),
    emulate_mixed=True,
)
"""Delayed scales in forward alone, so that no cast of the backward says when they roll."""


@pytest.mark.parametrize("kind", ["linear", "first microbatch", "grouped", "mlp"])
def test_delayed_scales_of_forward_alone_roll_after_each_compiled_backward(kind: str) -> None:
    options = {"recipe": GRADIENT_ALONE, "bias": False}
    eager = {
        "grouped": lambda: duotone.GroupedLinear(2, 64, 64, **options),
        "mlp": lambda: duotone.LayerNormMLP(64, 64, **options),
    }.get(kind, lambda: duotone.Linear(64, 64, **options))()
    arguments = {"grouped": {"m_splits": [16, 16]}, "first microbatch": {"is_first_microbatch": True}}.get(kind, {})
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    inputs, scales = [torch.randn(32, 64) * factor for factor in (1, 4, 16)], []
    for model, call in ((compiled, run), (eager, eager)):  # eager last: its backwards would roll both
        for x in inputs:
            call(x.clone().requires_grad_(), **arguments).square().sum().backward()
            scales.append(torch.cat([b for name, b in model.named_buffers() if name.endswith("scale")]))
    assert all(torch.equal(*both) for both in zip(scales[:3], scales[3:], strict=True))
    assert not torch.equal(scales[0], scales[1])


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_compiled_copy_writes_quantized_weights_with_scales_that_roll(kind: str) -> None:
    """No op of a graph encodes such a weight. So the backward binds the weights of a copy to the states of the copy."""
    recipe = recipes.RuleRecipe(
        rules=(recipes.Rule(tensor_type="weight", format="fp8_e4m3_delayed"), recipes.Rule(format="mxfp8_e4m3")),
        emulate_mixed=True,
    )
    build = {"linear": duotone.Linear, "mlp": duotone.LayerNormMLP}[kind]
    model = build(64, 64, recipe=recipe, bias=False)
    duotone.convert_parameters(model, recipe)
    inputs, states = torch.randn(4, 32, 64), []
    for compiles in (True, False):  # eager last: its backwards would roll both
        torch._dynamo.reset()
        copied = copy.deepcopy(model)
        run = torch.compile(copied, fullgraph=True, backend="aot_eager") if compiles else copied
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        for x in inputs:
            run(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append([b.clone() for b in copied.buffers()])
    for compiled, eager in zip(states[:4], states[4:], strict=True):
        assert all(map(torch.equal, compiled, eager))
