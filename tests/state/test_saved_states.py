"""Delayed scales beside a checkpoint, after their module is gone, and in a CUDA graph."""

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import recipes
from duotone.errors import UserError
from duotone.recipes import DelayedScaling
from duotone.state.delayed import DelayedState

RECIPE = DelayedScaling(amax_history_len=4)
BF16 = recipes.load("bf16")


def model(recipe=RECIPE) -> nn.Sequential:
    return duotone.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), recipe, ())


def train(m: nn.Module, steps: int = 2) -> nn.Module:
    for _ in range(steps):
        with duotone.autocast(recipe=RECIPE):
            y = m(torch.randn(8, 16) * 3)
        y.square().sum().backward()
    return m


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("saved", [False, True], ids=["plain", "with states"])
def test_a_model_on_meta_takes_an_assigned_checkpoint_and_begins_anew_without_states(saved: bool) -> None:
    plain = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    reference = duotone.convert(copy.deepcopy(plain), RECIPE, ())
    if saved:
        train(reference)
    with torch.device("meta"):
        m = model()
    m.load_state_dict(copy.deepcopy((reference if saved else plain).state_dict()), strict=False, assign=True)
    x = torch.randn(8, 16)
    for each in (m, reference):
        each.zero_grad()
        each(x).sum().backward()
    assert torch.equal(m[0].weight.grad, reference[0].weight.grad)
    assert same(dict(m.named_buffers()), dict(reference.named_buffers()))


# recipe_state


def test_recipe_state_brings_a_model_back_to_the_same_bits(tmp_path) -> None:
    source, target = train(model()), model()
    target.load_state_dict({k: v for k, v in source.state_dict().items() if "duotone_" not in k})
    torch.save(duotone.recipe_state(source), tmp_path / "state.pt")
    duotone.load_recipe_state(target, torch.load(tmp_path / "state.pt", weights_only=True))
    assert same(duotone.recipe_state(source), duotone.recipe_state(target)) and len(duotone.recipe_state(source)) == 8
    x = torch.randn(8, 16)
    for _ in range(2):
        assert torch.equal(source(x), target(x))
        source(x).sum().backward(), target(x).sum().backward()


def test_recipe_state_holds_copies() -> None:
    m = train(model())
    before = duotone.recipe_state(m)
    duotone.recipe_state(m)["0.duotone_forward.scale"].zero_()
    assert same(before, duotone.recipe_state(m))


def test_a_state_that_only_autocast_asks_for_waits_for_it() -> None:
    source, target = train(model(BF16)), model(BF16)
    assert duotone.recipe_state(target) == {}
    duotone.load_recipe_state(target, duotone.recipe_state(source))
    assert same(duotone.recipe_state(source), duotone.recipe_state(target))  # also while they wait
    target.load_state_dict({k: v for k, v in source.state_dict().items() if "duotone_" not in k})
    x = torch.randn(8, 16)
    with duotone.autocast(recipe=RECIPE), torch.no_grad():
        assert torch.equal(source(x), target(x))


def test_another_length_of_the_history_keeps_the_newest_entries() -> None:
    source, target = train(model(), 4), model(DelayedScaling(amax_history_len=3))
    duotone.load_recipe_state(target, duotone.recipe_state(source))
    newest = source[0].duotone_forward.amax_history[-2:]
    assert torch.equal(target[0].duotone_forward.amax_history[-2:], newest)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: None, "a dict of tensors; got NoneType"),
        (lambda s: {**s, "2.duotone_forward.scale": torch.ones(4)}, "is no state of the model"),
        (lambda s: {**s, "0.duotone_forward.other": torch.ones(4)}, "is no state of the model"),
        (lambda s: {**s, "0.duotone_forward.scale": 1.0}, "must be an fp32 tensor of 1 dimensions"),
        (lambda s: {**s, "0.duotone_forward.scale": torch.ones(4).half()}, "must be an fp32 tensor of 1 dimensions"),
        (lambda s: {**s, "0.duotone_forward.scale": torch.ones(7)}, "is not whole or has other slots"),
        (lambda s: {**s, "1.duotone_backward.scale": torch.tensor([1.0, float("nan")])}, "positive and finite"),
        (lambda s: {**s, "1.duotone_backward.scale": torch.tensor([1.0, 0.0])}, "positive and finite"),
        (lambda s: {**s, "1.duotone_backward.amax_history": torch.ones(0, 2)}, "is not whole"),
        (lambda s: {k: v for k, v in s.items() if k != "1.duotone_backward.scale"}, "is not whole"),
        (lambda s: {}, "is not whole"),
    ],
)
def test_what_does_not_fit_is_one_error_before_anything_changes(change, match) -> None:
    source, target = train(model()), train(model())
    before = duotone.recipe_state(target)
    with pytest.raises(UserError, match=match) as caught:
        duotone.load_recipe_state(target, change(duotone.recipe_state(source)))
    assert "\n" not in str(caught.value) and same(before, duotone.recipe_state(target))


# After the module is gone


def test_a_backward_works_after_its_module_is_gone() -> None:
    m = train(model())
    twin = copy.deepcopy(m)
    leaves = [torch.randn(8, 16).requires_grad_() for _ in range(2)]
    leaves[1].data.copy_(leaves[0].data)
    losses = [each(leaf).square().sum() for each, leaf in zip((twin, m), leaves, strict=True)]
    layers = [weakref.ref(layer) for layer in m]
    del m
    gc.collect()
    assert [layer() for layer in layers] == [None, None]
    for loss in losses:
        loss.backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_a_quantized_parameter_with_a_delayed_scale_is_written_after_its_module_is_gone() -> None:
    with duotone.quantized_model_init(recipe=RECIPE):
        m = duotone.Linear(16, 16, recipe=RECIPE)
    m(torch.randn(8, 16)).sum().backward()
    weight = m.weight
    values = torch.rand(16, 16) * weight.dequantize().abs().max()
    del m
    gc.collect()
    with torch.no_grad():
        weight.copy_(values)
    smallest = weight.planes[0].parts["scale"].item() * 2.0**-9
    assert torch.allclose(weight.dequantize(), values, rtol=2**-4, atol=smallest)


def test_states_die_with_their_module_and_its_graphs() -> None:
    m = train(model())
    refs = [weakref.ref(s) for s in m.modules() if isinstance(s, DelayedState)]
    del m
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


# CUDA graphs


def test_a_build_for_cuda_without_a_driver_trains(monkeypatch) -> None:
    """Such a build, which pip installs by default, raises where it is asked about the present stream."""

    def no_driver() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", no_driver, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    train(model())


def test_an_evaluation_may_be_captured_anywhere(monkeypatch) -> None:
    """It records nothing."""
    m = train(model())
    before = duotone.recipe_state(m)
    with duotone.autocast(recipe=RECIPE), torch.no_grad():
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
        m(torch.randn(8, 16))
    assert same(before, duotone.recipe_state(m))


def quantized_linear() -> nn.Module:
    with duotone.quantized_model_init(recipe=RECIPE):
        return duotone.Linear(32, 32, bias=False, recipe=RECIPE)


@pytest.mark.parametrize(
    "write", [lambda w, x: w.copy_(x), lambda w, x: w.zero_().add_(x), lambda w, x: w.data.copy_(x)]
)
def test_values_that_are_written_before_the_first_step_get_a_scale_of_their_own(write) -> None:
    """Far above and far below the first ones, as initializers and pretrained values are.

    After the first step the scale of the history stays, unless it would clip.
    """
    torch.manual_seed(0)
    for factor in (2.0**-12, 2.0**6):
        m, values = quantized_linear(), torch.randn(32, 32) * factor
        with torch.no_grad():
            m(torch.randn(4, 32))
            write(m.weight, values)
            assert torch.allclose(m.weight.dequantize(), values, rtol=2**-4, atol=factor * 2.0**-6)
        m(torch.randn(4, 32)).sum().backward()
        scale = m.duotone_forward.scale[2].item()
        with torch.no_grad():
            write(m.weight, values * 0.5)
            assert m.duotone_forward.scale[2] == scale
            write(m.weight, values * 64)
        assert torch.allclose(m.weight.dequantize(), values * 64, rtol=2**-4, atol=factor * 64 * 2.0**-6)
        assert m.duotone_forward.scale[2] < scale


def test_a_loaded_history_is_that_of_the_values_beside_it() -> None:
    """So a write after the load takes its scale, as in the run that was saved."""
    m, other = quantized_linear(), quantized_linear()
    m(torch.randn(4, 32)).sum().backward()
    other.load_state_dict(m.state_dict())
    with torch.no_grad():
        for each in (m, other):
            each.weight.mul_(0.3)
    assert same(duotone.recipe_state(m), duotone.recipe_state(other))
    assert torch.equal(m.weight.dequantize(), other.weight.dequantize())


WEIGHTS_ALONE = recipes.RuleRecipe(
    rules=(
        recipes.Rule(tensor_type="weight", format="fp8_e4m3_delayed"),
        recipes.Rule(format="fp8_e4m3_tensor"),
    )
)


@pytest.mark.parametrize("recipe", [WEIGHTS_ALONE, DelayedScaling()], ids=["weights alone", "all tensors"])
@pytest.mark.parametrize("in_region", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_between_a_write_and_a_backward_continues_bit_for_bit(recipe, in_region, duplicate) -> None:
    """Amaxes of the write roll at the next backward. Those of a copy rolled one step later."""
    model = duotone.convert_parameters(duotone.convert(nn.Sequential(nn.Linear(32, 32)), recipe, ()), recipe)
    draws, x = torch.Generator().manual_seed(0), torch.randn(32, 32)

    def step(model: nn.Module, write: Tensor) -> dict[str, Tensor]:
        with duotone.autocast(recipe=recipe) if in_region else nullcontext():
            y = model(x)
        y.square().sum().backward()
        states = duotone.recipe_state(model)
        with torch.no_grad():
            model[0].weight.copy_(write)  # type: ignore[index]
        return {**states, **duotone.rng_state(model), "weight": model[0].weight.dequantize()}  # type: ignore[index]

    for _ in range(3):
        step(model, torch.randn(32, 32, generator=draws))
    twin = duplicate(model)
    for _ in range(3):
        write = torch.randn(32, 32, generator=draws) * 3
        one, other = step(model, write), step(twin, write)
        assert all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_checkpoint_in_half_precision_gives_gradients(dtype: torch.dtype, assign: bool) -> None:
    """Scales of small gradients are infinite in fp16, and the first steps gave NaN and zeros."""
    torch.manual_seed(0)
    x = torch.randn(32, 64)

    def gradients(m: nn.Module) -> list[torch.Tensor]:
        m.zero_grad()
        (m(x).square().mean() / 100).backward()
        return [p.grad.float() for p in m.parameters()]

    m = duotone.convert(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), "fp8-delayed", rules=())
    gradients(m)
    saved = {name: tensor.to(dtype) for name, tensor in m.state_dict().items()}
    loaded = copy.deepcopy(m)
    loaded.load_state_dict(saved, assign=assign)
    plain = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    plain.load_state_dict({name: saved[name].float() for name in plain.state_dict()})
    loaded.float()
    for gradient, expected in zip(gradients(loaded), gradients(plain), strict=True):
        assert (gradient - expected).norm() < 0.15 * expected.norm()  # E5M2 rounds by up to 1/8
