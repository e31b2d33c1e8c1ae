"""Rewrite rules: what the shipped ones match, that they change no bit, and rules of users."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import duotone
from duotone import QuantizerRole, UserError, ops, recipes
from duotone.dispatch.norms import RowNorm
from duotone.modules import LayerNormLinear, LayerNormMLP, fused_cast
from duotone.pipeline.op import info_of
from duotone.pipeline.rewrites import RULES, rewrite
from duotone.pipeline.stage import Stage
from duotone.tensor import Quantizer

DTYPE = torch.bfloat16
MX = recipes.load("mxfp8")
DELAYED = [name for name in recipes.names() if recipes.load(name)(QuantizerRole("linear", "input")).history]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = {when: list(rules) for when, rules in RULES.rules.items()}
    yield
    RULES.rules.update(before)
    RULES.version += 1


@contextmanager
def only(*rules) -> Iterator[None]:
    """No rules but these, each with its pass."""
    before = {when: list(result) for when, result in RULES.rules.items()}
    for result in before.values():
        for rule in result:
            ops.unregister_rule(rule)
    for rule, when in rules:
        ops.register_rule(rule, when)
    try:
        yield
    finally:
        RULES.rules.update(before)
        RULES.version += 1


def rows(m: int = 32, k: int = 64) -> Tensor:
    return torch.randn(m, k).to(DTYPE)


def linear(n: int = 64, k: int = 64, **options) -> ops.BasicLinear:
    return ops.BasicLinear(k, n, params_dtype=DTYPE, **{"recipe": MX, **options})


def stages(parts, x: Tensor) -> tuple[Stage, ...]:
    signal, results = info_of(x), []
    for op in parts:
        stage, signal, *_ = op.link(signal, None)
        results.append(stage)
    return tuple(results)


def kinds(parts, x: Tensor | None = None) -> tuple[list[str], list[str]]:
    x = rows() if x is None else x
    forward, backward = rewrite(stages(parts, x.requires_grad_()))
    return [type(s).__name__ for s in forward], [type(s).__name__ for s in backward]


LINEAR, FUSED, BACK = "LinearStage", "CastForward", "CastBackward"
NORM, ACT, OF_NORM = "NormStage", "ActivationStage", "NormBackward"


def test_the_shipped_rules_are_these() -> None:
    assert RULES.rules == {
        "both": [],
        "forward": [fused_cast.cast_forward],
        "backward": [fused_cast.cast_backward, fused_cast.norm_backward],
    }


def test_a_rule_of_a_user_runs_in_compiled_code() -> None:
    seen: list[int] = []

    def rule(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        seen.append(len(stages))
        return stages

    with only((rule, "forward")):
        torch.compile(ops.Sequential(ops.GELU(), linear()), backend="aot_eager", fullgraph=True)(rows())
    assert 2 in seen


@pytest.mark.parametrize(
    ("make", "forward", "backward"),
    [
        (lambda: [ops.LayerNorm(64, dtype=DTYPE), linear()], [FUSED], [OF_NORM]),
        (lambda: [ops.RMSNorm(64, dtype=DTYPE), linear()], [FUSED], [OF_NORM]),
        (lambda: [ops.L2Normalization(), linear()], [FUSED], [OF_NORM]),
        (lambda: [ops.RMSNorm(64, dtype=DTYPE), linear(), ops.GELU(), linear()], [FUSED, FUSED], [OF_NORM, LINEAR]),
        (lambda: [ops.GELU(), linear()], [FUSED], [ACT, LINEAR]),
        (lambda: [linear(), ops.GELU()], [LINEAR, ACT], [BACK]),
        (lambda: [linear(128), ops.SwiGLU(), linear()], [LINEAR, FUSED], [BACK, LINEAR]),
        (lambda: [linear(), ops.GELU(), ops.GELU(), linear()], [LINEAR, ACT, FUSED], [BACK, ACT, LINEAR]),
        # near misses
        (lambda: [ops.GELU(), linear(recipe=recipes.load("bf16"))], [ACT, LINEAR], [ACT, LINEAR]),
        (lambda: [linear(recipe=recipes.load("bf16")), ops.GELU()], [LINEAR, ACT], [LINEAR, ACT]),
        (
            lambda: [ops.GELU(), ops.Identity(), linear()],
            [ACT, "IdentityStage", LINEAR],
            [ACT, "IdentityStage", LINEAR],
        ),
        (lambda: [ops.Bias(64, dtype=DTYPE), linear()], ["BiasStage", LINEAR], ["BiasStage", LINEAR]),
        (lambda: [linear(), ops.RMSNorm(64, dtype=DTYPE)], [LINEAR, NORM], [LINEAR, NORM]),
        (lambda: [ops.GELU(), linear(save_original_input=True)], [ACT, LINEAR], [ACT, LINEAR]),
        (
            lambda: [ops.GELU(), ops.Quantize(recipe=MX), linear()],
            [ACT, "QuantizeStage", LINEAR],
            [ACT, "QuantizeStage", LINEAR],
        ),
    ],
)
def test_a_shipped_rule_fires_on_its_pattern_and_not_on_near_misses(make, forward, backward) -> None:
    """core 101."""
    assert kinds(make()) == (forward, backward)


@pytest.mark.parametrize(
    ("override", "forward", "backward"),
    [
        (None, [LINEAR, FUSED], [BACK, LINEAR]),
        ("dequantized", [LINEAR, FUSED], [LINEAR, ACT, LINEAR]),
        ("high_precision", [LINEAR, ACT, LINEAR], [LINEAR, ACT, LINEAR]),
    ],
)
def test_a_backward_override_forms_what_it_allows_and_a_switch_replans(override, forward, backward) -> None:
    """hybrid 96."""
    parts = [linear(), ops.GELU(), linear()]
    assert kinds(parts) == ([LINEAR, FUSED], [BACK, LINEAR])
    with duotone.autocast(recipe=recipes.MXFP8BlockScaling(backward_override=override)):
        assert kinds(parts) == (forward, backward)
    assert kinds(parts) == ([LINEAR, FUSED], [BACK, LINEAR])


def test_a_quantized_input_and_frozen_weights_are_no_obstacle_and_no_trap() -> None:
    """A frozen weight keeps no input, so the override that keeps originals may hand over; a held input may not."""
    frozen = linear(recipe=recipes.MXFP8BlockScaling(backward_override="high_precision"))
    frozen.weight.requires_grad_(False)
    assert kinds([ops.GELU(), frozen])[0] == [FUSED]
    quantized = MX(QuantizerRole("linear", "input")).quantize(rows())
    assert kinds([linear()], quantized)[0] == [LINEAR]
    with torch.no_grad():
        forward, _ = rewrite(stages([linear(), ops.GELU(), linear()], rows()))
    assert [type(s).__name__ for s in forward] == [LINEAR, FUSED]


def model(kind: str, recipe) -> torch.nn.Module:
    torch.manual_seed(7)
    options = {"params_dtype": DTYPE, "recipe": recipe}
    if kind == "sequential":
        return ops.Sequential(
            ops.RMSNorm(64, dtype=DTYPE, zero_centered_gamma=True),
            ops.Linear(64, 128, name="a", **options),
            ops.SwiGLU(),
            ops.BasicLinear(64, 64, name="b", **options),
            ops.GELU(),
            ops.MakeExtraOutput(),
            ops.SReLU(),
            ops.BasicLinear(64, 96, name="c", **options),
            ops.ClampedSwiGLU(),
            ops.LayerNorm(48, dtype=DTYPE),
            ops.Linear(48, 32, name="d", **options),
        )
    if kind == "LayerNormLinear":
        return LayerNormLinear(64, 48, name="a", normalization="RMSNorm", **options)
    return LayerNormMLP(64, 48, name="m", activation="geglu", **options)


def steps(kind: str, recipe, frozen: tuple[str, ...] = (), input_grad: bool = True) -> list[Tensor]:
    """Outputs, gradients, seeds and scales of two training steps and an evaluation between."""
    m = model(kind, recipe)
    for name, parameter in m.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen) if frozen else True)
    results: list[Tensor] = []
    for step in range(2):
        torch.manual_seed(100 + step)
        x = rows(48).requires_grad_(input_grad)
        with torch.no_grad():
            m(x)
        m.zero_grad()
        y = m(x)
        outputs = y if isinstance(y, tuple) else (y,)
        sum(out.float().square().sum() for out in outputs).backward()
        results += [*(out.detach() for out in outputs), *(p.grad for p in m.parameters() if p.grad is not None)]
        results += [b.clone() for b in m.buffers()] + ([x.grad] if input_grad else [])
    return results


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["sequential", "LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("name", recipes.names())
def test_removing_every_rule_changes_no_bit(name, override, kind) -> None:
    """core 101: outputs, all gradients, seeds and delayed scales."""
    recipe = recipes.load(name)
    if override is not None:
        if name in DELAYED:
            pytest.skip("delayed scaling has no override")
        if recipe.backward_override is not None:
            pytest.skip("the recipe has an override of its own")
        recipe = dataclasses.replace(recipe, backward_override=override)
    expected = steps(kind, recipe)
    with only():
        assert equal(steps(kind, recipe), expected)
    with only((fused_cast.cast_forward, "forward")):  # the backward takes what a fused forward kept
        assert equal(steps(kind, recipe), expected)
    with only((fused_cast.cast_backward, "backward")):
        assert equal(steps(kind, recipe), expected)


@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize(
    "frozen",
    [("weight",), ("bias",), ("fc1.weight",), ("fc1.weight", "fc1.bias", "layer_norm_weight", "layer_norm_bias")],
    ids=str,
)
@pytest.mark.parametrize(
    "recipe",
    [
        MX,
        recipes.load("nvfp4"),
        recipes.MXFP8BlockScaling(backward_override="high_precision"),
        recipes.MXFP8BlockScaling(backward_override="dequantized"),
    ],
    ids=["mxfp8", "nvfp4", "high_precision", "dequantized"],
)
def test_rules_change_no_bit_where_only_some_gradients_are_asked_for(recipe, frozen, input_grad) -> None:
    """hybrid 93: one-sided cases in fused stages."""
    expected = steps("LayerNormMLP", recipe, frozen, input_grad)
    with only():
        assert equal(steps("LayerNormMLP", recipe, frozen, input_grad), expected)


class Unmade:
    """A norm as kernels would make it on the way: its statistics are there once it is encoded."""

    def __init__(self, kernel, x: Tensor, *arguments) -> None:
        self.kernel, self.x, self.arguments = kernel, x, arguments

    def make(self) -> Tensor:
        y, *self.saved = self.kernel.forward(self.x, *self.arguments)
        return y


@pytest.mark.parametrize("encodes", [True, False])
@pytest.mark.parametrize("kind", ["sequential", "LayerNormLinear", "LayerNormMLP"])
def test_a_norm_that_is_made_on_the_way_changes_no_bit(kind, encodes, monkeypatch) -> None:
    """Its statistics reach backward; and where it cannot be encoded, it is made first."""
    expected, norms = steps(kind, MX), []

    def encode(quantizer, norm, usage, ctx):
        norms.append(norm)
        return quantizer.encode(norm.make().reshape(-1, norm.x.shape[-1]), usage, ctx) if encodes else None

    monkeypatch.setattr(RowNorm, "produced", lambda *arguments: Unmade(*arguments))
    monkeypatch.setattr(Quantizer, "encode_produced", encode)
    assert equal(steps(kind, MX), expected)
    assert len(norms) == 4  # two steps and two evaluations, but not where gamma is zero-centred
    assert all(hasattr(norm, "saved") == encodes for norm in norms)


def test_a_normalised_input_that_is_given_out_is_not_made_on_the_way(monkeypatch) -> None:
    monkeypatch.setattr(RowNorm, "produced", lambda *arguments: Unmade(*arguments))
    monkeypatch.setattr(Quantizer, "encode_produced", None)
    for module in (LayerNormLinear, LayerNormMLP):
        y, normalised = module(64, 48, params_dtype=DTYPE, recipe=MX, return_layernorm_output=True)(rows())
        assert normalised.shape == (32, 64) and y.isfinite().all()


# --- rules of users


class Both(Stage):
    """Two stages as one, which keeps something of its own."""

    def __init__(self, first: Stage, second: Stage) -> None:
        self.first, self.second = first, second
        self.log: list[str] = []

    @property
    def basics(self):
        return self.first, self.second

    @property
    def arity(self):
        return (*self.first.arity, *self.second.arity)

    def run(self, x, operands):
        at = sum(self.first.arity)
        y, saved = self.first.forward(x, *operands[:at])
        y, kept_too = self.second.forward(y, *operands[at:])
        self.log.append("forward")
        return y, [(x.detach(), *saved), (("private",), *kept_too)], ()

    def run_backward(self, dy, saved, needs, extra):
        at = sum(self.first.arity)
        self.log.append(saved[1][0][0])
        dx, *second = self.second.backward(dy, saved[1][1:], (True, *needs[at:]))
        dx, *first = self.first.backward(dx, saved[0][1:], (True, *needs[:at]))
        return dx, [*first, *second]


def test_a_rule_for_both_passes_keeps_a_state_of_its_own() -> None:
    """core 102."""
    results: list[Both] = []

    def pair(stages):
        if len(stages) != 2:
            return stages
        results.append(Both(*stages))
        return (results[-1],)

    def run(m) -> list[Tensor]:
        x = rows().requires_grad_()
        m.zero_grad()
        y = m(x)
        y.float().square().sum().backward()
        return [y, x.grad, *(p.grad for p in m.parameters())]

    m = ops.Sequential(ops.RMSNorm(64, dtype=DTYPE), linear())
    torch.manual_seed(2)
    expected = run(m)
    ops.register_rule(pair)
    torch.manual_seed(2)
    assert equal(run(m), expected)
    assert len(results) == 1 and results[0].log == ["forward", "private"]
    torch.manual_seed(2)
    assert equal(run(m), expected) and len(results) == 1  # rewritten once
    ops.unregister_rule(pair)
    torch.manual_seed(2)
    assert equal(run(m), expected) and len(results[0].log) == 4


def test_rules_run_in_order_and_prepended_ones_first() -> None:
    """core 102: both, then the pass; each once per tuple of stages, again only after a change."""
    order: list[str] = []

    def note(name: str):
        return lambda stages: (order.append(name), stages)[1]

    m, x = ops.Sequential(linear(), ops.GELU()), rows().requires_grad_()
    for name, when, first in (
        ("b1", "both", 0),
        ("b2", "both", 0),
        ("b0", "both", 1),
        ("f1", "forward", 0),
        ("f0", "forward", 1),
        ("g", "backward", 0),
    ):
        ops.register_rule(note(name), when, prepend=bool(first))
    m(x)
    m(x)
    assert order == ["b0", "b1", "b2", "f0", "f1", "g"]
    with duotone.autocast(recipe=recipes.load("nvfp4")):
        m(x)
    m(x)
    assert len(order) == 12


@pytest.mark.parametrize("when", ["both", "forward", "backward"])
@pytest.mark.parametrize(
    "rule",
    [lambda stages: stages[:-1], lambda stages: stages[::-1], lambda stages: (*stages, stages[0]), lambda stages: ()],
    ids=["dropped", "reversed", "doubled", "emptied"],
)
def test_a_rule_with_other_basics_is_one_line_and_leaves_everything_as_it_was(rule, when) -> None:
    """core 102: nothing runs, no seed and no amax moves, and after unregister_rule all is as before."""
    m = ops.Sequential(linear(recipe=recipes.load("nvfp4")), ops.GELU(), linear(recipe=recipes.load("fp8-delayed")))
    x = rows()
    m(x)
    before = {name: b.clone() for name, b in m.named_buffers()}
    ops.register_rule(rule, when)
    with pytest.raises(UserError, match="whose basics are others") as error:
        m(x)
    assert "\n" not in str(error.value)
    assert all(torch.equal(b, before[name]) for name, b in m.named_buffers())
    ops.unregister_rule(rule)
    m(x)


def test_a_rule_that_gives_no_stages_is_one_line() -> None:
    ops.register_rule(lambda stages: None)
    with pytest.raises(UserError):
        ops.Sequential(linear())(rows())


def test_an_unknown_pass_is_refused_and_unregistering_a_stranger_is_nothing() -> None:
    with pytest.raises(
        UserError, match=r"a rewrite rule for 'sideways' is unknown; allowed are both, forward, backward"
    ):
        ops.register_rule(lambda stages: stages, "sideways")
    with pytest.raises(UserError, match="a rewrite rule is a function of a tuple of stages; got str"):
        ops.register_rule("fuse")
    ops.unregister_rule(lambda stages: stages)
    assert kinds([ops.GELU(), linear()])[0] == [FUSED]
