"""`recompute_columnwise`: backward encodes again what forward would have kept, with the same bits and less memory."""

import ctypes
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import duotone
import duotone_lab
from duotone import recipes
from duotone.modules import fused_cast

NAMES = ["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"]


def pair(name: str, make=None) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A module, and the same one that makes its columnwise planes again."""
    make = make or (lambda recipe: duotone.Linear(96, 64, name="m", recipe=recipe, params_dtype=torch.bfloat16))
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        results.append(make(replace(recipes.load(name), recompute_columnwise=again)))
    return results[0], results[1]


def saved(module: torch.nn.Module, x: Tensor) -> int:
    """Bytes that a call keeps, the memory of parameters aside, each storage once."""
    seen: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def look(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own and t.grad_fn is None:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(look, lambda t: t):
        y = module(x)
    del y
    return sum(seen.values())


def gradients(m: torch.nn.Module, x: Tensor, **call) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    m.zero_grad()
    y = m(leaf, **call)
    y.backward(torch.linspace(-1, 2, y.numel()).view_as(y).bfloat16())
    return [y.detach(), leaf.grad, *(p.grad for p in m.parameters())]  # type: ignore[list-item]


def same(results: list[Tensor], others: list[Tensor]) -> None:
    for a, b in zip(results, others, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_same_bits_over_steps(name) -> None:
    plain, lean = pair(name)
    for i in range(3):
        x = torch.randn(40, 96).bfloat16() * 3**i
        same(gradients(plain, x), gradients(lean, x))


@pytest.mark.parametrize("name", ["fp8-delayed", "mxfp8"])
def test_the_weight_is_kept_instead_of_its_columnwise_plane(name) -> None:
    plain, lean = pair(name)
    x = torch.randn(40, 96).bfloat16().requires_grad_()
    assert saved(plain, x) - saved(lean, x) >= 96 * 64


@pytest.mark.parametrize("name", ["fp8-delayed", "nvfp4"])
def test_the_ledger_predicts_the_peak(name) -> None:
    _, lean = pair(name)
    x = torch.randn(40, 96).bfloat16().requires_grad_()
    result = duotone_lab.ledger(lean, lambda: lean(x))
    assert result.predicted_peak == pytest.approx(result.measured_peak, rel=0.05)


def test_forwards_whose_scales_have_moved_are_differentiated_with_their_own() -> None:
    """A region for each forward moves the scales, more than once before the first backward."""
    plain, lean = pair("fp8-delayed")
    results = []
    for m in (plain, lean):
        inputs = [torch.randn(40, 96, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4)]
        leaves = [x.mul_(9**i).requires_grad_() for i, x in enumerate(inputs)]
        outputs, scales = [], []
        for leaf in leaves:
            with duotone.autocast(recipe=m.recipe):
                outputs.append(m(leaf))
            scales.append(m.duotone_forward.scale.tolist())
        assert len({tuple(scale) for scale in scales}) > 2
        for y in outputs[::-1]:
            y.backward(torch.ones_like(y))
        results.append([leaf.grad for leaf in leaves])
    same(*results)


def test_a_recompute_of_a_checkpoint_keeps_what_its_forward_used() -> None:
    plain, lean = pair("fp8-delayed")
    for i in range(3):
        x = torch.randn(40, 96).bfloat16() * 3**i
        results = []
        for m in (plain, lean):
            leaf = x.clone().requires_grad_()
            m.zero_grad()
            with duotone.autocast(recipe=m.recipe):
                y = checkpoint(m, leaf, use_reentrant=False)
            y.backward(torch.ones_like(y))
            results.append([y.detach(), leaf.grad, m.weight.grad])
        same(*results)


def test_planes_that_are_cached_between_microbatches_are_not_made_again() -> None:
    _, lean = pair("mxfp8")
    x = torch.randn(40, 96).bfloat16()
    want = gradients(lean, x)
    same(gradients(lean, x, is_first_microbatch=True), want)
    assert lean.plans.options.caches[0].planes.columnwise is not None
    same(gradients(lean, x, is_first_microbatch=False), want)


def test_a_weight_that_moved_before_its_backward_is_an_error() -> None:
    _, lean = pair("mxfp8")
    y = lean(torch.randn(40, 96).bfloat16().requires_grad_())
    with torch.no_grad():
        lean.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.slow  # tests/modules/test_compile.py has fp8-delayed and nvfp4
@pytest.mark.parametrize("name", ["mxfp8", "fp8-delayed"])
def test_compiled_gives_the_bits_of_eager(name) -> None:
    _, lean = pair(name)
    _, twin = pair(name)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for i in range(2):
        x = torch.randn(40, 96).bfloat16() * 3**i
        same(gradients(compiled, x), gradients(lean, x))


# --- inputs that a producer hands over


def mlp(recipe, **options) -> duotone.LayerNormMLP:
    return duotone.LayerNormMLP(96, 128, name="m", recipe=recipe, params_dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_what_norms_and_activations_hand_over_is_made_again_with_the_same_bits(name, activation) -> None:
    for norm in ("LayerNorm", "RMSNorm"):
        plain, lean = pair(name, lambda recipe: mlp(recipe, normalization=norm, activation=activation))  # noqa: B023
        for i in range(2):
            x = torch.randn(40, 96).bfloat16() * 3**i
            same(gradients(plain, x), gradients(lean, x))


@pytest.mark.parametrize("name", ["fp8-delayed", "mxfp8"])
def test_neither_plane_of_an_mlp_is_kept(name) -> None:
    """Of 40 tokens: the normalised input, 96 wide, and the activation, 128 wide; two weights, the first one gated."""
    plain, lean = pair(name, lambda recipe: mlp(recipe, activation="swiglu"))
    x = torch.randn(40, 96).bfloat16().requires_grad_()
    weights = 96 * 256 + 128 * 96
    assert saved(plain, x) - saved(lean, x) >= weights + 40 * (96 + 128)
    result = duotone_lab.ledger(lean, lambda: lean(x))
    assert result.predicted_peak == pytest.approx(result.measured_peak, rel=0.05)


def test_a_producer_that_keeps_nothing_leaves_the_plane_to_the_linear() -> None:
    """Nothing before the second linear needs a gradient, so only the plane of its input is there for backward."""
    plain, lean = pair("mxfp8", lambda recipe: mlp(recipe, bias=False))
    x = torch.randn(40, 96).bfloat16()
    results = []
    for m in (plain, lean):
        for p in (m.layer_norm_weight, m.layer_norm_bias, m.fc1.weight):
            p.requires_grad_(False)
        y = m(x)
        y.sum().backward()
        results.append([y.detach(), m.fc2.weight.grad])
    same(*results)


@pytest.mark.parametrize("option", ["return_layernorm_output", "zero_centered_gamma"])
def test_options_of_norms_change_nothing(option) -> None:
    plain, lean = pair(
        "fp8-current",
        lambda recipe: duotone.LayerNormLinear(
            96, 64, name="m", recipe=recipe, params_dtype=torch.bfloat16, **{option: True}
        ),
    )
    x = torch.randn(40, 96).bfloat16()
    results = []
    for m in (plain, lean):
        leaf = x.clone().requires_grad_()
        result = m(leaf)
        result = result if isinstance(result, tuple) else (result,)
        sum(t.float().square().sum() for t in result).backward()
        results.append([*(t.detach() for t in result), leaf.grad, *(p.grad for p in m.parameters())])
    same(*results)


OWN_SLOT = recipes.RuleRecipe(
    rules=(
        recipes.Rule(tensor_type="grad_output", format="fp8_e5m2_delayed"),
        recipes.Rule(rowwise="fp8_e4m3_delayed", columnwise="fp8_e5m2_delayed"),
    ),
    emulate_mixed=True,
)


def test_a_columnwise_plane_with_a_delayed_scale_of_its_own_is_made_in_forward() -> None:
    """Nothing but the encoding of forward records its amax."""
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        m = duotone.LayerNormLinear(
            96, 64, name="m", params_dtype=torch.bfloat16, recipe=replace(OWN_SLOT, recompute_columnwise=again)
        )
        steps = [
            gradients(m, torch.randn(40, 96, generator=torch.Generator().manual_seed(i)).bfloat16()) for i in range(3)
        ]
        results.append([*(t for step in steps for t in step), m.duotone_forward.scale])
    assert len(set(results[0][-1].tolist())) > 2
    same(*results)
    m = duotone.Linear(96, 64, name="m", params_dtype=torch.bfloat16, recipe=OWN_SLOT, save_original_input=True)
    with pytest.raises(duotone.RecipeError, match="save_original_input of m: forward alone records"):
        m(torch.zeros(8, 96).bfloat16())


@pytest.mark.parametrize("name", ["fp8-delayed", "mxfp8"])
def test_a_copy_of_the_weight_is_not_kept_instead_of_its_plane(name) -> None:
    plain, lean = pair(name, lambda recipe: duotone.Linear(96, 64, name="m", recipe=recipe))
    x = torch.randn(40, 96).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert saved(lean, x) <= saved(plain, x)
        same([lean(x)], [plain(x)])


@pytest.fixture
def frames_of_python() -> Iterator[None]:
    """Calls as in a process without a trace that failed.

    After one, torch goes on to evaluate frames, and a caller then holds the arguments of a call until it ends.
    """
    python = ctypes.PyDLL(None)
    python._PyInterpreterState_GetEvalFrameFunc.restype = python.PyInterpreterState_Get.restype = ctypes.c_void_p
    interpreter = ctypes.c_void_p(python.PyInterpreterState_Get())
    before = python._PyInterpreterState_GetEvalFrameFunc(interpreter)
    python._PyInterpreterState_SetEvalFrameFunc(interpreter, python._PyEval_EvalFrameDefault)
    yield
    python._PyInterpreterState_SetEvalFrameFunc(interpreter, ctypes.c_void_p(before))


@pytest.mark.usefixtures("frames_of_python")
def test_the_gradient_that_comes_in_goes_before_the_products(monkeypatch) -> None:
    """Between two linears, with a norm before them too: a backward's frames hold what they were given."""
    alive = []

    def watched(self, dy, saved, needs, extra):
        reference = weakref.ref(dy)
        del dy
        alive.append(reference() is not None)
        raise InterruptedError

    monkeypatch.setattr(fused_cast.CastBackward, "run_backward", watched)
    for parts in (
        [duotone.ops.RMSNorm(96), duotone.ops.Linear(96, 64), duotone.ops.GELU(), duotone.ops.Linear(64, 64)],
        [duotone.ops.Linear(96, 64), duotone.ops.GELU(), duotone.ops.Linear(64, 64)],
    ):
        with duotone.autocast(recipe=recipes.load("fp8-block")):
            y = duotone.ops.Sequential(*parts)(torch.randn(40, 96).requires_grad_())
        with pytest.raises(InterruptedError):
            y.sum().backward()
    assert alive == [False, False]


OVERRIDE = replace(recipes.load("mxfp8"), backward_override="high_precision")


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "mxfp8", "nvfp4", OVERRIDE], ids=str)
@pytest.mark.parametrize("keeps", ["planes", "weight"])
def test_other_memory_behind_a_weight_leaves_the_backward_of_an_earlier_forward_alone(recipe, keeps) -> None:
    """`weight.data = value`, as torch.nn.utils.vector_to_parameters does: the gradient was that of the new weight."""
    recipe = recipes.load(recipe) if isinstance(recipe, str) else recipe
    if keeps == "weight" and recipe is not OVERRIDE:
        recipe = replace(recipe, recompute_columnwise=True)
    results = []
    for changes in (False, True):
        torch.manual_seed(0)
        m = duotone.Linear(64, 64, params_dtype=torch.bfloat16, recipe=recipe, name="m")
        x = torch.randn(32, 64).bfloat16().requires_grad_()
        loss = m(x).square().sum()
        if changes:
            m.weight.data = m.weight.detach() * 4
        loss.backward()
        results.append(x.grad)
    assert torch.equal(*results)
