"""The arithmetic of delayed scaling, bit for bit against an independent reference (numerics 3, core 70)."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import duotone
from duotone.formats import get
from duotone.recipes import DelayedScaling
from duotone.state import history, rolling
from duotone.state.delayed import DelayedState
from duotone.state.delayed_slot import DelayedSlot
from duotone.state.history import resized
from duotone.state.region import AmaxMode
from duotone.tensor import History, QuantizeContext, Quantizer

MAX = {"e4m3": np.float32(448), "e5m2": np.float32(57344)}
DTYPE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
ONE = np.float32(1)
FLT_MAX = np.finfo(np.float32).max


AS_TE = {"skip_nonfinite_amax": False, "spike_factor": 0, "first_scale_from_amax": False}
"""The fields that are off in section 3 of the numerics page."""


@dataclass
class Slot:
    """One slot in NumPy, written from section 3 of the numerics page: fp32, IEEE division."""

    element: str
    length: int
    margin: int = 0
    algorithm: str | Callable = "max"
    scale: np.float32 = ONE
    history: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.history = np.zeros(self.length, np.float32)

    def quantize(self, x: np.ndarray) -> tuple[np.ndarray, np.float32]:
        """Codes and stored inverse scale; the live amax rises."""
        x = x.astype(np.float32)
        finite_or_inf = np.abs(x[~np.isnan(x)])
        if finite_or_inf.size:
            self.history[0] = max(self.history[0], finite_or_inf.max())
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (x * self.scale).astype(np.float32)
        scaled = np.where(np.isnan(scaled), scaled, np.clip(scaled, -MAX[self.element], MAX[self.element]))
        codes = scaled.astype(DTYPE[self.element]).view(np.uint8)
        codes = np.where(np.isnan(scaled), np.uint8(0x7F), codes)
        return codes, np.float32(1) / self.scale

    def roll(self) -> None:
        last = self.history[0]
        if last == 0:
            return
        entries = np.append(self.history[1:], last)
        with np.errstate(invalid="ignore"):
            most = np.fmax.reduce(entries)
        fresh = np.zeros_like(self.history)
        for i in range(1, self.length - 1):
            fresh[i] = self.history[i + 1]
        if self.length > 1:
            fresh[-1] = last
        self.history = fresh
        if callable(self.algorithm):
            amax = np.float32(self.algorithm(entries))
        else:
            amax = most if self.algorithm == "max" else last
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                scale = np.float32(MAX[self.element] * np.float32(2.0**-self.margin)) / amax
            self.scale = np.float32(FLT_MAX if np.isinf(scale) else scale)


LENGTHS = (1, 2, 5)


def steps(seed: int, count: int = 24) -> list[np.ndarray]:
    """Matrices as training has them, and those that it should not have."""
    rng = np.random.default_rng(seed)
    results = []
    for i in range(count):
        x = (rng.standard_normal((4, 32)) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
        if i % 7 == 3:
            x[:] = 0
        if i % 11 == 5:
            x[1, 3] = np.inf
        if i % 5 == 4:
            x[0, 0], x[2, 5] = np.nan, -np.nan
        if i == 12:
            x[:] = np.nan
        if i == 17:
            x *= np.float32(1e-42)
        results.append(x)
    return results


def second_largest(history: torch.Tensor) -> torch.Tensor:
    return history.sort(0).values[-min(2, history.shape[0])]


def second_largest_reference(entries: np.ndarray) -> np.float32:
    return np.sort(entries)[-min(2, entries.size)]


ALGORITHMS = {"max": "max", "most_recent": "most_recent", "callable": (second_largest, second_largest_reference)}


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("margin", [0, 2, -3])
def test_scales_histories_and_codes_follow_the_reference(element, algorithm, length, margin) -> None:
    """core 70: 24 steps of zeros, infinities, NaN and tiny values; slot 1 is skipped at times, slot 2 never used."""
    rule = ALGORITHMS[algorithm]
    compute_algo, of_reference = rule if isinstance(rule, tuple) else (rule, rule)
    parameters = History(margin, length, compute_algo, **AS_TE)
    state = DelayedState(3, parameters)
    fmt = get(f"fp8_{element}_delayed")
    state.largest = [fmt.largest, fmt.largest, 0.0]
    quantizer = Quantizer(fmt, fmt, history=parameters)
    references = [Slot(element, length, margin, of_reference) for _ in range(2)]
    addresses = state.scale.data_ptr(), state.amax_history.data_ptr()
    for step, x in enumerate(steps(length)):
        for slot, reference in enumerate(references):
            if slot == 1 and step % 3 == 1:
                continue
            for part in (x, x / 2) if step % 4 == 2 else (x,):
                context = QuantizeContext(
                    slots=(DelayedSlot(state.number, slot, "", AmaxMode.RECORD), None), propagate=False
                )
                row, col = quantizer.encode(torch.from_numpy(part), ctx=context)
                codes, inverse = reference.quantize(part)
                result = row.parts["codes"].numpy()
                number = ~np.isnan(part)
                assert np.array_equal(result[number], codes[number])
                assert np.array_equal(result[~number] & 0x7F, codes[~number])  # the sign of a NaN is open
                assert np.array_equal(row.parts["scale"].numpy(), [inverse])
                assert torch.equal(col.parts["codes"], row.parts["codes"].t())
                assert torch.equal(col.parts["scale"], row.parts["scale"])
        state.roll()
        for slot, reference in enumerate(references):
            reference.roll()
            assert np.array_equal(state.amax_history[:, slot].numpy(), reference.history)
            assert state.scale[slot].item() == reference.scale
        assert state.scale[2] == 1 and not state.amax_history[:, 2].any()
    assert addresses == (state.scale.data_ptr(), state.amax_history.data_ptr())


def test_a_scale_that_overflows_is_the_largest_fp32() -> None:
    """numerics 3, step 4: 448 / 1e-38 is no fp32."""
    state = DelayedState(1, History(amax_history_len=2))
    state.largest = [448.0]
    state.amax_history[0] = 1e-38
    state.roll()
    assert state.scale.item() == torch.finfo(torch.float32).max


def test_a_scale_rule_of_the_users_own_sees_amax_scale_and_largest() -> None:
    """core 70, callables: slots that met nothing keep their scale whatever the rule says."""

    def rule(amax, scale, fp8_max, history):
        assert history.margin == 1
        return scale / 2 + amax + fp8_max

    state = DelayedState(2, History(1, 4, scaling_factor_compute_algo=rule))
    state.largest = [448.0, 57344.0]
    state.amax_history[0, 0] = 3.0
    state.roll()
    assert state.scale.tolist() == [451.5, 1.0]


@pytest.mark.parametrize(("old", "new"), [(5, 3), (3, 5), (5, 1), (1, 4), (4, 2), (2, 4), (3, 3)])
def test_another_length_keeps_the_live_row_and_the_newest_entries(old, new) -> None:
    """core 73."""
    history = torch.arange(1.0, 2 * old + 1).reshape(old, 2)
    result = resized(history, new)
    saved = min(old, new) - 1
    assert result.shape == (new, 2) and torch.equal(result[0], history[0])
    assert saved == 0 or torch.equal(result[-saved:], history[-saved:])
    assert not result[1 : new - saved].any()


def rolled(column: list[float], scale: float = 1.0, largest: float = 448.0, **fields) -> DelayedState:
    """A state of one slot after a roll of a history that begins with its live amax and ends with its newest entry."""
    state = DelayedState(1, History(amax_history_len=len(column), **fields))
    state.largest = [largest]
    state.amax_history[:, 0] = torch.tensor(column)
    state.scale.fill_(scale)
    state.roll()
    return state


NAN, INF = float("nan"), float("inf")


def column(state: DelayedState) -> list[float]:
    return state.amax_history[:, 0].tolist()


def test_a_nan_in_the_live_row_heals_as_the_numerics_page_says() -> None:
    """Section 3, as in a checkpoint from elsewhere: not zero, so it rolls; row 0 is 0 again; NaN does not count."""
    state = rolled([NAN, 1.0, 2.0], scale=5.0, **AS_TE)
    assert column(state)[:2] == [0.0, 2.0] and np.isnan(column(state)[2]) and state.scale.item() == 224.0
    state.amax_history[0] = 4.0
    state.roll()
    assert state.scale.item() == 112.0 and column(state)[2] == 4.0
    assert rolled([NAN, 1.0, 2.0], scale=5.0, amax_compute_algo="most_recent", **AS_TE).scale.item() == 5.0
    assert rolled([NAN], scale=5.0, **AS_TE).scale.item() == 5.0
    state = rolled([NAN, 1.0, 2.0], scale=5.0)
    assert column(state) == [0.0, 1.0, 2.0] and state.scale.item() == 5.0 and state.events.tolist() == [[1], [0]]


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("algorithm", ["max", "most_recent", second_largest])
def test_an_amax_that_is_not_finite_never_enters_and_freezes_nothing(bad, algorithm) -> None:
    """Not for 1,024 steps: the next step has its scale. Entries of a checkpoint that are not finite do not count."""
    state = rolled([bad, 3.0, 7.0, bad], scale=5.0, amax_compute_algo=algorithm)
    assert state.scale.item() == 5.0 and state.events.tolist() == [[1], [0]] and column(state)[0] == 0.0
    state.amax_history[0] = 3.5
    state.roll()
    amax = {"max": 7.0, "most_recent": 3.5}.get(algorithm, 3.5)
    assert state.scale.item() == 448.0 / amax
    assert column(state) == [0.0, 7.0, 0.0, 3.5] and state.events.tolist() == [[1], [0]]


def test_a_spike_enters_as_a_multiple_of_the_largest_of_the_rest() -> None:
    state = rolled([1e8, 1.0, 7.0], spike_factor=4.0)
    assert column(state) == [0.0, 7.0, 28.0] and state.scale.item() == 16.0 and state.events.tolist() == [[0], [1]]
    state = rolled([28.0, 1.0, 7.0], spike_factor=4.0)
    assert column(state) == [0.0, 7.0, 28.0] and state.events.tolist() == [[0], [0]]
    for first in ([1e8], [1e8, 0.0, 0.0]):  # nothing to compare with
        state = rolled(first, spike_factor=4.0)
        assert state.scale.item() == np.float32(448) / np.float32(1e8) and not state.events.any()
    assert column(rolled([1e8, 1.0, 7.0], spike_factor=0)) == [0.0, 7.0, 1e8]
    assert column(rolled([3e38, 1.0, 1e38], spike_factor=4.0)) == [0.0, np.float32(1e38), np.float32(3e38)]


def test_scales_follow_again_where_larger_amaxes_stay() -> None:
    """A level that grows a thousandfold for good is no spike: each step lets one factor in."""
    state = rolled([1000.0, 1.0, 1.0], spike_factor=16.0)
    for expected in (256.0, 1000.0):
        state.amax_history[0] = 1000.0
        state.roll()
        assert column(state)[-1] == expected


def test_gradients_after_one_infinite_batch_are_those_of_a_run_without_it() -> None:
    """They were all zero for as long as the history is."""
    recipe = DelayedScaling(amax_history_len=8)
    torch.manual_seed(0)
    model = duotone.convert(nn.Sequential(nn.Linear(32, 32)), recipe, ())
    twin = copy.deepcopy(model)
    good = torch.randn(16, 32)
    for m, batches in ((model, (good, None, good, good)), (twin, (good, good, good))):
        for x in batches:
            m.zero_grad()
            with duotone.autocast(recipe=recipe):
                y = m(good if x is None else x)
            y.backward(torch.ones_like(y) * (float("inf") if x is None else 1.0))
    assert model[0].weight.grad.any() and torch.equal(model[0].weight.grad, twin[0].weight.grad)
    assert model[0].duotone_backward.events[0, 0] == 1 and not twin[0].duotone_backward.events.any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("skip_nonfinite_amax", 1),
        ("first_scale_from_amax", None),
        *(("spike_factor", value) for value in (-1, 0.5, 1, INF, NAN, True, "4", None)),
    ],
)
def test_a_field_out_of_range_is_one_clear_error(field, value) -> None:
    with pytest.raises(duotone.RecipeError, match=field) as caught:
        DelayedScaling(**{field: value})
    assert "\n" not in str(caught.value)


def test_a_first_scale_in_a_capture_is_made_of_fills_that_no_cache_keeps(monkeypatch) -> None:
    """A CUDA graph copies nothing from the host, and its memory may be gone for the next state."""
    one = History(margin=-1)
    cached = history.limits((448.0, 57344.0), -1, torch.device("cpu"))
    monkeypatch.setattr(history, "is_capturing", lambda: True)
    monkeypatch.setattr(torch, "tensor", None)
    entries, scale, amax = torch.zeros(4, 2), torch.ones(2), torch.full((2,), 0.5)
    before = history.limits.cache_info()
    assert torch.equal(history.first(entries, scale, amax, [448.0, 57344.0], one), cached / 0.5)
    assert cached.tolist() == [896.0, 114688.0]
    assert history.limits.cache_info() == before


def random_state(slots: int, rule: History, generator: torch.Generator) -> DelayedState:
    """Amaxes with zeros, spikes, infinities and NaN, also in old entries."""
    state = DelayedState(slots, rule)
    state.largest = [(448.0, 57344.0, 0.0)[slot % 3] for slot in range(slots)]
    amaxes = torch.rand(state.amax_history.shape, generator=generator) * 8
    choice = torch.randint(0, 9, amaxes.shape, generator=generator)
    for number, value in enumerate((0.0, float("inf"), float("nan"), 1e30)):
        amaxes[choice == number] = value
    state.amax_history.copy_(amaxes)
    state.scale.copy_(torch.rand(slots, generator=generator) * 100)
    return state


def test_states_that_roll_together_roll_as_each_alone() -> None:
    """Also in the same memory. Rules that differ, and those with a function of the user, roll apart."""
    generator, seen = torch.Generator().manual_seed(3), []

    def largest_of(entries: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(entries.shape))
        return entries.amax(0)

    rules = [
        History(amax_history_len=5),
        History(amax_history_len=5),
        History(amax_history_len=1, spike_factor=0.0),
        History(amax_history_len=5, amax_compute_algo="most_recent", margin=2),
        History(amax_history_len=5, skip_nonfinite_amax=False, spike_factor=0.0),
        History(amax_history_len=5, amax_compute_algo=largest_of),
    ]
    for _ in range(20):
        states = [random_state(slots, rule, generator) for rule in rules for slots in (2, 4, 1)]
        alone = [copy.deepcopy(state) for state in states]
        for state in alone:
            state.roll()
        seen.clear()
        memory = [buffer.data_ptr() for state in states for buffer in state.buffers()]
        rolling.roll_all(states)
        assert seen == [(5, 2), (5, 4), (5, 1)]
        assert memory == [buffer.data_ptr() for state in states for buffer in state.buffers()]
        for state, other in zip(states, alone, strict=True):
            for buffer, want in zip(state.buffers(), other.buffers(), strict=True):
                torch.testing.assert_close(buffer, want, rtol=0, atol=0, equal_nan=True)
            for recompute in (False, True):
                scales, want = (each.scales_of(each.used(recompute)) for each in (state, other))
                assert torch.equal(scales, want)
