"""Delayed scaling in modules: who records, who rolls and how often, and what becomes of the state."""

import copy
import io
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes
from duotone.errors import UserError
from duotone.formats import get
from duotone.recipes import CustomRecipe, DelayedScaling, DelayedScalingRequest
from duotone.state import delayed_slot, rolling
from duotone.state.delayed import DelayedState
from duotone.state.delayed_slot import DelayedSlot
from duotone.state.region import Recording, outermost_region
from duotone.state.rolling import pending, roll
from duotone.tensor import History, QuantizedTensor, Quantizer

RECIPE = DelayedScaling(amax_history_len=4)
MX = recipes.load("mxfp8")
BF16 = recipes.load("bf16")
E4M3, E5M2 = get("fp8_e4m3_delayed"), get("fp8_e5m2_delayed")
CURRENT = get("fp8_e4m3_tensor")


def model(recipe=RECIPE, layers: int = 1) -> nn.Sequential:
    return duotone.convert(nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)]), recipe, ())


def states(m: nn.Module) -> dict[str, DelayedState]:
    return {name: s for name, s in m.named_modules() if isinstance(s, DelayedState)}


def values(m: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in m.state_dict().items() if "duotone_" in k}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def rolls(monkeypatch) -> list[str]:
    """ "f" for each roll of a forward state, "b" for each of a backward state."""
    seen: list[str] = []
    once = DelayedState.end_step

    def counted(self, *scales):
        seen.append("f" if self.scale.numel() == 4 else "b")
        once(self, *scales)

    monkeypatch.setattr(DelayedState, "end_step", counted)
    return seen


@pytest.fixture(autouse=True)
def _nothing_stays_pending():
    pending().backward.clear()
    yield
    assert outermost_region() is None and (pending().end is None or pending().end() is None)


def x(requires_grad: bool = True, scale: float = 1.0) -> Tensor:
    return (torch.randn(8, 16) * scale).requires_grad_(requires_grad)


# Who rolls, and when


def test_forward_rolls_once_at_the_exit_of_the_outermost_region(rolls) -> None:
    """core 71: nested regions and several calls inside are one step."""
    m = model(BF16)
    with duotone.autocast(recipe=RECIPE):
        y = m(x())
        with duotone.autocast(recipe=RECIPE):
            y = y + m(x())
            with duotone.autocast(enabled=False):
                m(x())
        assert rolls == []
    assert rolls == ["f"]
    y.sum().backward()
    assert rolls == ["f", "b"]


def test_outside_of_regions_the_end_of_backward_rolls_both(rolls) -> None:
    """core 71."""
    m = model()
    loss = m(x()).sum() + m(x()).sum()
    assert rolls == []
    loss.backward()
    assert sorted(rolls) == ["b", "f"]


def test_a_region_that_holds_the_backward_rolls_forward_at_its_end(rolls) -> None:
    """core 71."""
    m = model()
    with duotone.autocast(recipe=RECIPE):
        m(x()).sum().backward()
        assert rolls == ["b"]
    assert rolls == ["b", "f"]


def test_what_a_recompute_records_rolls_with_the_backward_that_it_runs_in(rolls) -> None:
    """core 71: not with a region around or inside of it."""
    m = model(BF16)

    def body(t: Tensor) -> Tensor:
        with duotone.autocast(recipe=RECIPE):
            t = m(t)
        assert rolls == []
        with duotone.autocast(recipe=RECIPE):
            return m(t)

    with duotone.autocast(recipe=RECIPE):
        y = checkpoint(m, x(), use_reentrant=True)
        y.sum().backward()
        assert sorted(rolls) == ["b", "f"]
    assert len(rolls) == 2
    rolls.clear()
    y = checkpoint(body, x(), use_reentrant=True)
    y.sum().backward()
    assert sorted(rolls) == ["b", "f"]


def test_two_backwards_roll_gradients_twice(rolls) -> None:
    """core 71: backward() is the unit, also through one graph and with accumulated gradients."""
    m = model()
    with duotone.autocast(recipe=RECIPE):
        loss = m(x()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert rolls == ["f", "b", "b"]
    for _ in range(2):
        with duotone.autocast(recipe=RECIPE):
            loss = m(x()).sum()
        loss.backward()
    assert rolls[3:] == ["f", "b", "f", "b"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_recorded_and_nothing_rolls(rolls, mode) -> None:
    """core 71: inside of regions and outside."""
    m = model()
    m(x()).sum().backward()
    before = values(m)
    rolls.clear()
    with mode():
        m(x(scale=100))
        with duotone.autocast(recipe=RECIPE):
            m.eval()(x(scale=100))
            checkpoint(m, x(scale=100), use_reentrant=True)
    m(x().detach().requires_grad_(False)).detach()
    pending().backward.clear()
    assert rolls == []
    after = values(m)
    for name in before:
        if name.endswith("scale") or "backward" in name:
            assert torch.equal(before[name], after[name])


def test_evaluation_first_under_inference_mode_does_not_spoil_training(rolls) -> None:
    """core 71, 49: a state that inference mode creates is written in training."""
    m = model(BF16)
    with torch.inference_mode(), duotone.autocast(recipe=RECIPE):
        m(x(False))
    longer = DelayedScaling(amax_history_len=7)
    with torch.inference_mode(), duotone.autocast(recipe=longer):
        m(x(False))
    for _ in range(2):
        with duotone.autocast(recipe=longer):
            y = m(x())
        y.sum().backward()
    assert rolls == ["f", "b"] * 2
    assert m[0].duotone_forward.scale[0] != 1


def test_an_exception_in_forward_rolls_nothing_and_the_next_step_is_fine(rolls) -> None:
    """core 69, 71."""
    m = model()
    with pytest.raises(ZeroDivisionError), duotone.autocast(recipe=RECIPE):
        m(x())
        raise ZeroDivisionError
    assert rolls == []
    with duotone.autocast(recipe=RECIPE):
        y = m(x())
    y.sum().backward()
    assert rolls == ["f", "b"]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t: Tensor) -> Tensor:
        return t.clone()

    @staticmethod
    def backward(ctx, *_: Tensor) -> Tensor:
        raise ZeroDivisionError


@pytest.mark.parametrize("between", [True, False], ids=["forward between", "none between"])
def test_an_exception_in_backward_rolls_nothing_and_the_next_backward_rolls(rolls, between) -> None:
    """core 71: also where the next backward follows at once."""
    m = model()
    with duotone.autocast(recipe=RECIPE):
        spare = m(x()).sum()
        failing = m(Fails.apply(x())).sum()
    rolls.clear()
    with pytest.raises(ZeroDivisionError):
        failing.backward()
    assert rolls == []
    if between:
        with duotone.autocast(recipe=RECIPE):
            spare = m(x()).sum()
    rolls.clear()
    spare.backward()
    assert rolls == ["b"]


def run_checkpointed(kind: str, inside: bool, steps: int = 4) -> tuple[list[Tensor], list[list[str]], nn.Module]:
    torch.manual_seed(5)
    m = model(RECIPE if not inside else BF16, layers=2)
    out, counts = [], []
    for _ in range(steps):
        leaf = x(scale=3.0)
        counts.append([])
        region = duotone.autocast(recipe=RECIPE) if inside else duotone.autocast.__new__(duotone.autocast)
        if inside:
            region.__enter__()
        y = m(leaf) if kind == "none" else checkpoint(m, leaf, use_reentrant=kind == "reentrant")
        if inside:
            region.__exit__(None, None, None)
        m.zero_grad()
        y.square().sum().backward()
        out += [y.detach(), leaf.grad, *[p.grad.clone() for p in m.parameters()]]
    return out, counts, m


@pytest.mark.parametrize("inside", [True, False], ids=["autocast", "outside"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_recompute_changes_no_bit_and_rolls_once(rolls, kind, inside) -> None:
    """core 71, 90: the recompute uses the scales and the recipe of its forward, in every step."""
    expected, _, plain = run_checkpointed("none", inside)
    count = len(rolls)
    rolls.clear()
    result, _, m = run_checkpointed(kind, inside)
    assert len(rolls) == count == 4 * 4
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert same(values(m), values(plain))
    assert all(s.scale[0] != 1 for s in states(m).values())


@pytest.mark.parametrize("kinds", [(True, False), (False, True), (True, True)], ids=str)
def test_nested_recompute_changes_no_bit_and_rolls_once(rolls, kinds) -> None:
    """core 71, 90."""
    outer, inner = kinds

    def run(nested: bool) -> list[Tensor]:
        torch.manual_seed(5)
        m = model(layers=2)

        def body(t: Tensor) -> Tensor:
            return m[1](checkpoint(m[0], t, use_reentrant=inner))

        out = []
        for _ in range(3):
            leaf = x()
            y = checkpoint(body, leaf, use_reentrant=outer) if nested else m(leaf)
            y.square().sum().backward()
            out += [y.detach(), leaf.grad, *values(m).values()]
        return out

    expected = run(False)
    count = len(rolls)
    rolls.clear()
    result = run(True)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert len(rolls) == count


def test_switching_between_plain_and_reentrant_steps_never_uses_old_scales() -> None:
    """core 90: each recompute takes the scale of its own forward, and an evaluation between the two changes nothing."""

    def run(kinds: list[str]) -> list[Tensor]:
        torch.manual_seed(5)
        m, out = model(), []
        for kind in kinds:
            leaf = x(scale=2.0)
            with duotone.autocast(recipe=RECIPE):
                y = m(leaf) if kind == "plain" else checkpoint(m, leaf, use_reentrant=kind == "reentrant")
            if kind == "non-reentrant":
                with torch.no_grad():
                    m.eval()(x(scale=50.0).detach())
                    m.train()
            else:
                torch.randn(8, 16)
            y.square().sum().backward()
            out += [y.detach(), leaf.grad]
        return out

    kinds = ["plain", "reentrant", "non-reentrant", "plain", "non-reentrant", "reentrant", "reentrant"]
    for a, b in zip(run(kinds), run(["plain"] * len(kinds)), strict=True):
        assert torch.equal(a, b)


def test_a_second_backward_through_one_checkpoint_repeats_the_first(rolls) -> None:
    """core 71: scales have rolled in between; the recompute does not see them."""

    def factory(role):
        delayed = role is not None and role.tensor_type in ("input", "weight")
        return Quantizer(E4M3, E4M3, history=History(amax_history_len=3)) if delayed else Quantizer(CURRENT, CURRENT)

    m, leaf = model(BF16), x(scale=5.0)
    with duotone.autocast(recipe=CustomRecipe(qfactory=factory, emulate_mixed=True)):
        y = checkpoint(m, leaf, use_reentrant=False)
    gradients = []
    for _ in range(2):
        m.zero_grad()
        y.square().sum().backward(retain_graph=True)
        gradients.append(m[0].weight.grad)
    assert torch.equal(*gradients) and rolls == ["f"]


# Who decides in backward


def test_a_backward_that_ends_rolls_nothing_of_one_that_runs_in_another_thread(monkeypatch) -> None:
    rolled: list[str] = []
    plain = DelayedState.end_step
    monkeypatch.setattr(
        DelayedState, "end_step", lambda self, *scales: (rolled.append(self.number), plain(self, *scales))
    )
    inside, ended = threading.Event(), threading.Event()
    slow, quick = model(layers=2), model()

    def wait(gradient: Tensor) -> None:
        inside.set()
        assert ended.wait(120)

    def train(m: nn.Sequential, waits: bool) -> None:
        y = m[0](x())
        if waits:
            y.register_hook(wait)
        m[1:](y).sum().backward()

    train(slow, False)
    train(quick, False)
    rolled.clear()
    other = threading.Thread(target=lambda: (train(slow, False), rolled.clear(), train(slow, True)))
    other.start()
    assert inside.wait(120)
    train(quick, False)
    first, of_quick = sorted(rolled), sorted(s.number for s in states(quick).values())
    ended.set()
    other.join()
    assert first == of_quick
    assert sorted(rolled) == sorted(of_quick + [s.number for s in states(slow).values()])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_forward_and_backward_in_different_threads_roll_once(rolls, where) -> None:
    m = model()
    m(x()).sum().backward()
    rolls.clear()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            if where == "forward":
                pool.submit(lambda: m(x()).sum()).result().backward()
            else:
                pool.submit(m(x()).sum().backward).result()
    assert sorted(rolls) == ["b", "b", "f", "f"]


def test_a_region_around_many_steps_warns_and_one_around_a_step_does_not(recwarn) -> None:
    """Scales of forward that never move clip more and more. It was found by its loss alone."""
    m, x = model(), torch.randn(16, 16)
    for _ in range(2 * rolling.MANY_BACKWARDS):
        with duotone.autocast(recipe=RECIPE):
            m(x).sum().backward()
    assert not [each for each in recwarn if "inside of one" in str(each.message)]
    with duotone.autocast(recipe=RECIPE):
        for _ in range(2 * rolling.MANY_BACKWARDS):
            m(x).sum().backward()
    assert len([each for each in recwarn if "inside of one duotone.autocast region" in str(each.message)]) == 1


def test_backward_follows_the_forward_whatever_region_is_active_then() -> None:
    """core 62, 90: a recompute under another region, or under none, has the recipe of its forward."""
    m = model(BF16)
    leaf = x()
    with duotone.autocast(recipe=MX):
        y = m(leaf)
    (expected,) = torch.autograd.grad(y.sum(), leaf)
    for kind in (True, False):
        with duotone.autocast(recipe=MX):
            y = checkpoint(m, leaf, use_reentrant=kind)
        with duotone.autocast(recipe=recipes.load("nvfp4")):
            leaf.grad = None
            y.sum().backward()
        assert torch.equal(leaf.grad, expected)


# The state as a buffer


def trained(recipe=RECIPE, steps: int = 3, region=None) -> nn.Module:
    m = model(recipe)
    for _ in range(steps):
        with duotone.autocast(recipe=region or recipe):
            y = m(x())
        y.sum().backward()
    return m


def test_buffers_keep_their_address_while_training() -> None:
    """core 71; design 4."""
    m = trained()
    before = [b.data_ptr() for s in states(m).values() for b in s.buffers()]
    for _ in range(3):
        m(x()).sum().backward()
    assert before == [b.data_ptr() for s in states(m).values() for b in s.buffers()]


@pytest.mark.parametrize(
    "change", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.float16), lambda m: m.double()]
)
def test_states_stay_fp32(change) -> None:
    """design 4."""
    m = trained()
    before, addresses = values(m), [b.data_ptr() for s in states(m).values() for b in s.buffers()]
    change(m)
    assert all(t.dtype == torch.float32 for t in values(m).values()) and same(before, values(m))
    assert addresses == [b.data_ptr() for s in states(m).values() for b in s.buffers()]


def test_to_empty_from_meta_begins_anew() -> None:
    """core 81 for states."""
    with torch.device("meta"):
        m = model()
    assert all(b.is_meta for b in m.buffers())
    m.to_empty(device="cpu")
    for state in states(m).values():
        assert torch.equal(state.scale, torch.ones_like(state.scale)) and not state.amax_history.any()
    nn.init.normal_(m[0].weight), nn.init.zeros_(m[0].bias)
    m(x()).sum().backward()
    assert m[0].duotone_forward.scale[0] != 1


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("factor", [0.1, 100.0])
def test_quantized_weights_take_values_of_any_size_from_a_checkpoint(steps, factor) -> None:
    """A scale from the weights before would clip them, and they would stay so. The checkpoint's own scale decides."""
    m, source = (duotone.convert_parameters(trained(steps=steps), RECIPE) for _ in range(2))
    weight = torch.randn(16, 16) * factor
    m.load_state_dict({"0.weight": weight}, strict=False)
    # half a step of E4M3, and of its denormals below 2^-6 of 448
    torch.testing.assert_close(m[0].weight.dequantize(), weight, rtol=2**-4, atol=1e-4 * weight.abs().max().item())

    other = duotone.convert_parameters(trained(steps=steps), RECIPE)
    other.load_state_dict({**other.state_dict(), "0.weight": weight})
    for each in (m, other):  # torch completes a state_dict with the model's own states, too
        with torch.no_grad():
            each[0].weight.copy_(weight)  # as an optimizer writes
        atol = 2e-3 * weight.abs().max().item()
        torch.testing.assert_close(each[0].weight.dequantize(), weight, rtol=2**-4, atol=atol)

    source.load_state_dict({"0.weight": weight}, strict=False)
    source(x()).sum().backward()
    saved = {name: v.dequantize() if name == "0.weight" else v for name, v in source.state_dict().items()}
    later = duotone.convert_parameters(trained(steps=steps), RECIPE)
    later.load_state_dict(saved)
    assert torch.equal(later[0].weight.dequantize(), source[0].weight.dequantize())
    assert same(values(later), values(source))


def test_a_load_of_infinity_or_of_another_shape_leaves_the_scales() -> None:
    m = duotone.convert_parameters(trained(), RECIPE)
    before, weight = values(m), m[0].weight.detach().dequantize().clone()
    weight[0, 0] = math.inf
    m.load_state_dict({**m.state_dict(), "0.weight": weight})
    assert torch.equal(m[0].duotone_forward.scale, before["0.duotone_forward.scale"])
    assert torch.equal(m[0].weight.dequantize()[1:], weight[1:])
    before = values(m)
    with pytest.raises(RuntimeError, match="size mismatch"):
        m.load_state_dict({"0.weight": torch.ones(8, 16)}, strict=False)
    assert same(values(m), before)


def test_stateless_recipes_have_no_keys() -> None:
    """core 77: an nn.Linear checkpoint loads unchanged, and back."""
    m, plain = model(MX), nn.Sequential(nn.Linear(16, 16))
    assert list(m.state_dict()) == list(plain.state_dict())
    m.load_state_dict(plain.state_dict())
    plain.load_state_dict(m.state_dict())
    delayed = trained()
    assert len(delayed.state_dict()) == 6
    assert list(duotone.convert(delayed, MX, ()).state_dict()) == list(plain.state_dict())
    delayed = trained()
    assert list(duotone.convert_parameters(delayed, BF16).state_dict()) == list(plain.state_dict())
    delayed(x()).sum().backward()
    assert list(duotone.revert(trained()).state_dict()) == list(plain.state_dict())


def test_checkpoints_with_and_without_state_load_both_ways() -> None:
    """core 77, strict."""
    source = trained()
    target = model()
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    target.load_state_dict(saved, strict=True)
    assert same(values(target), values(source))
    leaf = x()
    for m in (source, target):
        m.zero_grad()
    y = [m(leaf) for m in (source, target)]
    assert torch.equal(*y)
    for each in y:
        each.sum().backward()
    assert torch.equal(source[0].weight.grad, target[0].weight.grad)
    assert same(values(target), values(source))

    plain = {k: v * 100 for k, v in saved.items() if "duotone" not in k}
    fresh = model()
    for m in (target, fresh):
        m.load_state_dict(plain, strict=True)  # scales of other weights would clip these
    with torch.no_grad():
        assert torch.equal(target(leaf), fresh(leaf))
    assert same(values(target), values(fresh))

    stateless = model(MX)
    before = dict(saved)
    stateless.load_state_dict(saved, strict=True)
    assert saved.keys() == before.keys()
    assert list(stateless.state_dict()) == list(plain)


def test_a_state_that_only_autocast_asks_for_is_loaded_before_its_first_forward() -> None:
    """core 77: a model under autocast has no state when its checkpoint arrives."""
    source = trained(BF16, region=RECIPE)
    target = model(BF16)
    target.load_state_dict(source.state_dict(), strict=True)
    assert not states(target)
    leaf = x()
    with duotone.autocast(recipe=RECIPE):
        assert torch.equal(target(leaf), source(leaf))
    assert same(values(target), values(source))
    third = model(BF16)
    third.load_state_dict(source.state_dict())
    moved = copy.deepcopy(third)
    with duotone.autocast(recipe=RECIPE), torch.no_grad():
        assert torch.equal(moved(leaf), source(leaf))


@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_checkpoint_of_another_history_length_keeps_the_newest_entries(length) -> None:
    """core 73, 77."""
    source = trained(steps=5)
    target = model(DelayedScaling(amax_history_len=length))
    target.load_state_dict(source.state_dict())
    loaded, reference = target[0].duotone_forward, source[0].duotone_forward
    saved = min(length, 4) - 1
    assert loaded.amax_history.shape[0] == length and torch.equal(loaded.scale, reference.scale)
    assert saved == 0 or torch.equal(loaded.amax_history[-saved:], reference.amax_history[-saved:])


def test_a_checkpoint_of_other_slots_is_refused() -> None:
    """core 77."""
    m = model()
    bad = m.state_dict()
    bad["0.duotone_forward.scale"] = torch.ones(7)
    with pytest.raises(RuntimeError, match="size mismatch"):
        m.load_state_dict(bad)


def test_a_longer_history_mid_training_keeps_scales_and_entries() -> None:
    """core 73: recipes of two lengths in turn, each from its cached plan."""
    m = model(BF16)
    long, short = DelayedScaling(amax_history_len=6), DelayedScaling(amax_history_len=3, margin=1)
    for recipe in (long, short, long, short):
        before = m[0].duotone_forward.scale.clone() if states(m) else None
        newest = m[0].duotone_forward.amax_history[-1].clone() if states(m) else None
        with duotone.autocast(recipe=recipe):
            y = m(x())
            state = m[0].duotone_forward
            assert state.history.margin == recipe.margin and len(state.amax_history) == recipe.amax_history_len
            if before is not None:
                assert torch.equal(state.scale, before) and torch.equal(state.amax_history[-1], newest)
        y.sum().backward()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_a_state_of_its_own(duplicate) -> None:
    """core 77; nothing live in pickles."""
    source = trained()
    result = duplicate(source)
    assert same(values(result), values(source))
    before = values(source)
    leaf = x(scale=9.0)
    y = result(leaf)
    y.sum().backward()
    assert same(before, values(source)) and not same(before, values(result))
    source(leaf).sum().backward()
    assert same(values(result), values(source))


# Calibration


@pytest.mark.parametrize("gradients", [True, False])
def test_calibration_computes_in_high_precision_and_scales_a_later_evaluation(gradients) -> None:
    """core 76."""
    m = model(BF16).bfloat16()
    data = [x(False, 5.0).bfloat16() for _ in range(3)]
    for t in data:
        with duotone.autocast(enabled=False):
            expected = m(t)
        with (
            torch.set_grad_enabled(gradients),
            duotone.autocast(enabled=False, calibrating=True, recipe=RECIPE),
        ):
            assert torch.equal(m(t), expected)
    state = m[0].duotone_forward
    largest = torch.stack([t.abs().max() for t in data]).max().float()
    maximum = torch.tensor(448.0)
    assert state.scale[0] == maximum / largest and state.scale[2] == maximum / m[0].weight.abs().max().float()
    quantizer = RECIPE(duotone.QuantizerRole("linear", "input"))
    with torch.no_grad(), duotone.autocast(recipe=RECIPE):
        y = m(data[0])
    exact = torch.nn.functional.linear(data[0], m[0].weight, m[0].bias)
    assert (y - exact).abs().max() < 0.1 * exact.abs().max() and not torch.equal(y, exact)
    assert quantizer.delayed == (True, False)


def test_calibration_asks_a_factory_once_and_leaves_recomputes_alone(rolls) -> None:
    """core 63, 76."""
    calls = []

    def factory(role):
        calls.append(role)
        return DelayedScalingRequest(amax_history_len=3)

    m = model(BF16)
    recipe = CustomRecipe(qfactory=factory)
    for _ in range(3):
        with duotone.autocast(enabled=False, calibrating=True, recipe=recipe):
            y = checkpoint(m, x(), use_reentrant=False)
        y.sum().backward()
    assert len(calls) == 5 and rolls == ["f"] * 3


# One direction of a hybrid

DIRECTIONS = {
    "row": Quantizer(E4M3, CURRENT, history=History(amax_history_len=3)),
    "col": Quantizer(CURRENT, E4M3, history=History(amax_history_len=3)),
    "both": Quantizer(E4M3, E5M2, history=History(amax_history_len=3)),
}


@pytest.mark.parametrize("kind", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_delayed_scaling_in_a_single_direction(kind, direction) -> None:
    """hybrid 84: the slot of the direction moves, no other one does, and both planes are as by themselves."""
    chosen = DIRECTIONS[direction]

    def factory(role):
        is_delayed = role is not None and role.tensor_type == kind
        return chosen if is_delayed else Quantizer(CURRENT, CURRENT)

    m = model(CustomRecipe(qfactory=factory, emulate_mixed=True))
    for _ in range(3):
        m(x(scale=3.0)).square().sum().backward()
    base = {"input": 0, "weight": 2, "grad_output": 0}[kind]
    scales = torch.cat([m[0].duotone_forward.scale, m[0].duotone_backward.scale])
    rolled_slots = {i for i, s in enumerate(scales.tolist()) if s != 1}
    offset = base + (4 if kind == "grad_output" else 0)
    expected = {"row": {offset}, "col": {offset + 1}, "both": {offset, offset + 1}}[direction]
    assert rolled_slots == expected
    if direction == "both":
        row, col = (scales[i] for i in sorted(expected))
        assert torch.allclose(col / row, torch.tensor(57344 / 448))


def test_slots_that_disagree_are_refused_before_anything_changes() -> None:
    """hybrid 84: the message quotes the field and the slots."""

    def factory(role):
        length = 5 if role is not None and role.tensor_type == "weight" else 3
        return DelayedScalingRequest(amax_history_len=length)

    m = nn.Sequential(duotone.Linear(16, 16), duotone.Linear(16, 16))
    before = [dict(layer.__dict__) for layer in m]
    weights = [layer.weight for layer in m]
    with pytest.raises(duotone.RecipeError, match=r"amax_history_len = 3.*weight 5"):
        duotone.convert_parameters(m, CustomRecipe(qfactory=factory))
    assert [layer.weight for layer in m] == weights and not states(m)
    assert all(a.__dict__["recipe"] == b["recipe"] for a, b in zip(m, before, strict=True))
    assert not isinstance(m[0].weight, QuantizedTensor)


def test_a_changed_role_keeps_the_buffers() -> None:
    """hybrid 79."""
    m = trained()
    before = [b.data_ptr() for s in states(m).values() for b in s.buffers()]
    m[0].output_quantizer_role = duotone.QuantizerRole("linear", "input", "next")
    m(x()).sum().backward()
    assert before == [b.data_ptr() for s in states(m).values() for b in s.buffers()]


def test_modules_do_not_outlive_their_use() -> None:
    """core 5.3: states are held weakly, and a dead module takes its pending amax along."""
    m = model()
    m(x())
    assert pending().backward
    del m
    other = model()
    other(x()).sum().backward()
    assert not pending().backward


def test_what_a_failed_region_recorded_does_not_reach_later_scales() -> None:
    """A batch that is skipped after an exception leaves scales and histories as they were."""
    recipe = DelayedScaling(amax_history_len=4)
    module = duotone.convert(nn.Sequential(nn.Linear(64, 64)), recipe, rules=())
    twin = copy.deepcopy(module)
    x = torch.randn(8, 64)
    with pytest.raises(ZeroDivisionError), duotone.autocast(recipe=recipe):
        module(x * 1e4)
        raise ZeroDivisionError
    for m in (module, twin):
        with duotone.autocast(recipe=recipe):
            m(x).sum().backward()
    for result, want in zip(module.buffers(), twin.buffers(), strict=True):
        assert torch.equal(result, want)


def test_a_scale_on_another_device_than_its_tensor_is_one_clear_error() -> None:
    state = DelayedState(4, History())
    with pytest.raises(UserError, match="on cpu and what it scales on meta") as caught:
        DelayedSlot(state.number, 0).place(torch.empty(4, 4, device="meta"))
    assert "\n" not in str(caught.value)


# The first step


def one_step(m: nn.Module, recipe, scale: float = 1.0) -> list[Tensor]:
    torch.manual_seed(3)
    leaf = x()
    with duotone.autocast(recipe=recipe):
        y = m(leaf)
    (y.square().sum() * scale).backward()
    return [y.detach(), leaf.grad, m[0].weight.grad]


@pytest.mark.parametrize("how", ["plain", "reentrant", "non-reentrant"])
def test_the_first_step_is_that_of_current_scaling(how) -> None:
    """Also of gradients that a scale of 1 would flush to zero; where a checkpoint recomputes, too."""
    m = model(BF16)
    twin, high = copy.deepcopy(m), copy.deepcopy(m)
    body = m if how == "plain" else Checkpointed(m, how == "reentrant")
    result = one_step(body, RECIPE, 2.0**-20)
    for a, b in zip(result, one_step(twin, recipes.Float8CurrentScaling(), 2.0**-20), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(result, one_step(high, BF16, 2.0**-20), strict=True):
        assert (a - b).norm() < 0.1 * b.norm()


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def __getitem__(self, index: int) -> nn.Module:
        return self.inner[index]

    def forward(self, t: Tensor) -> Tensor:
        return checkpoint(self.inner, t, use_reentrant=self.reentrant)


def test_off_the_first_step_has_a_scale_of_1() -> None:
    """As Transformer Engine has it."""
    m = model(BF16)
    leaf = x()
    with duotone.autocast(recipe=DelayedScaling(amax_history_len=4, first_scale_from_amax=False)):
        y = m(leaf)
        assert (m[0].duotone_forward.scale == 1).all()
    decoded = (t.to(torch.float8_e4m3fn).float() for t in (leaf.detach(), m[0].weight.detach()))
    assert torch.allclose(y, torch.nn.functional.linear(*decoded, m[0].bias), rtol=1e-5, atol=1e-6)


def slot_of(state: DelayedState, index: int = 0) -> DelayedSlot:
    state.largest = [448.0] * state.scale.numel()
    return DelayedSlot(state.number, index)


def test_one_step_has_one_scale_and_later_steps_measure_nothing_before_they_cast(monkeypatch) -> None:
    state = DelayedState(2, History(amax_history_len=3))
    slot, measured = slot_of(state), []
    monkeypatch.setattr(delayed_slot, "amax_of", lambda t: measured.append(t) or t.abs().amax().reshape(1))
    scales = [slot.place(torch.full((2, 2), value))[0].item() for value in (7.0, 14.0)]
    assert scales == [64.0, 64.0] and len(measured) == 2
    state.amax_history[0, 0] = 14.0
    roll({Recording(state.number, "", False)})
    scale, live = slot.place(torch.full((2, 2), 7.0))
    assert scale.item() == 32.0 and live is not None and len(measured) == 2
    assert state.scale[1] == 1


def test_an_expert_without_rows_makes_the_host_look_ever_more_seldom(monkeypatch) -> None:
    """A look waits for the device."""
    m, looked, steps = duotone.ops.GroupedLinear(2, 16, 16, bias=False), [], []
    settle = rolling.settle

    def counting(states) -> None:
        states = list(states)
        waiting = [s for s in states if s.started]
        settle(states)
        looked.extend(len(steps) for s in waiting if not s.started)

    monkeypatch.setattr(rolling, "settle", counting)
    for number in range(1, 10):
        steps.append(number)
        with duotone.autocast(recipe=RECIPE):
            y = m(x(), [8, 0])
        y.sum().backward()
    assert set(looked) == {1, 2, 4, 8}
    with duotone.autocast(recipe=RECIPE):
        assert m(x(scale=1e-6), [0, 8]).any()


@pytest.mark.parametrize("first", [0.0, float("inf"), float("nan")])
def test_a_slot_that_has_met_nothing_usable_takes_its_scale_from_what_it_meets_next(first) -> None:
    """Zero-initialized layers hand zero gradients to those before them in the first step."""
    state = DelayedState(1, History(amax_history_len=3))
    slot = slot_of(state)
    assert slot.scale_for(torch.full((2, 2), first)).item() == 1.0
    roll({Recording(state.number, "", False)})
    assert slot.scale_for(torch.full((2, 2), 7.0)).item() == 64.0
    roll({Recording(state.number, "", False)})
    assert slot.scale_for(torch.full((2, 2), 3.5)).item() == 64.0


def test_an_evaluation_before_training_scales_by_its_own_amax_and_keeps_nothing() -> None:
    m = model(BF16)
    t = x(False, 1e-4)
    with torch.no_grad(), duotone.autocast(recipe=recipes.Float8CurrentScaling()):
        expected = m(t)
    with torch.no_grad(), duotone.autocast(recipe=RECIPE):
        assert torch.equal(m(t), expected)
    assert (m[0].duotone_forward.scale == 1).all() and not m[0].duotone_forward.amax_history.any()


@pytest.mark.parametrize("field", ["scale", "amax_history"])
def test_a_slot_with_a_scale_or_a_history_from_a_checkpoint_is_not_new(field) -> None:
    state = DelayedState(1, History(amax_history_len=3))
    saved = {"scale": torch.ones(1), "amax_history": torch.zeros(3, 1)}
    saved[field][-1] = 2.0
    state.load_state_dict(saved)
    assert slot_of(state).scale_for(torch.full((2, 2), 7.0)).item() == saved["scale"].item()


def capturing(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    """Let the library believe that a CUDA graph is captured, or not."""
    for module in ("rolling", "region", "delayed"):
        monkeypatch.setattr(f"duotone.state.{module}.is_capturing", lambda: value)


def test_a_capture_inside_of_an_older_region_is_refused(monkeypatch) -> None:
    """Its replays would leave the rolling to the end of a region that is over."""
    m = duotone.Linear(32, 32, recipe=DelayedScaling())
    x = torch.randn(32, 32, requires_grad=True)
    with duotone.autocast(recipe=DelayedScaling()), pytest.raises(UserError, match="older than the capture"):
        capturing(monkeypatch, True)
        m(x)
    capturing(monkeypatch, False)
    pending().backward.clear()


def test_a_backward_warns_of_amaxes_that_a_graph_recorded_without_its_backward(monkeypatch) -> None:
    m = duotone.Linear(32, 32, recipe=DelayedScaling())
    x = torch.randn(32, 32, requires_grad=True)
    m(x).sum().backward()
    capturing(monkeypatch, True)
    y = m(x)
    capturing(monkeypatch, False)
    with pytest.warns(UserWarning, match="its replays move no scale"):
        y.sum().backward()


def test_a_captured_backward_rolls_what_the_capture_recorded_alone(monkeypatch) -> None:
    """What eager code recorded before waits for the next backward outside of the capture."""
    first, second = (duotone.Linear(32, 32, recipe=DelayedScaling()) for _ in range(2))
    x = torch.randn(32, 32, requires_grad=True)
    for m in (first, second):
        m(x).sum().backward()
    first(x * 2)
    before = first.duotone_forward.scale.clone()
    capturing(monkeypatch, True)
    second(x * 4).sum().backward()
    capturing(monkeypatch, False)
    assert torch.equal(first.duotone_forward.scale, before)
    assert second.duotone_forward.amax_history[-1, 0] == x.abs().max() * 4
    second(x).sum().backward()
    assert first.duotone_forward.amax_history[-1, 0] == x.abs().max() * 2
