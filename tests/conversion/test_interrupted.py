"""After an interrupt at any line of `convert` or `revert`, the same call again completes it, and so does the other one.

The tests stop in the functions that change modules, at every third line. By hand, all lines of Duotone were tried: with
STRIDE = 1 and CHANGING = ().
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import duotone
from interrupting import interrupt as interrupt_at
from later import Later

hooks = Later("accelerate.hooks")
transformers = Later("transformers")

STRIDE = 3
CHANGING = (
    *("adopt", "take_name", "release", "change_class", "adopt_experts", "release_experts", "close_fast_paths"),
    *("open_fast_paths", "_change", "unfuse", "convert_by"),
)
interrupt = partial(interrupt_at, functions=CHANGING)


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))


def hooked() -> nn.Module:
    """Accelerate stores the forward of the class in its hook."""
    m = linears()
    hooks.add_hook_to_module(m[0], hooks.AlignDevicesHook(execution_device="cpu"))
    return m


def mlp() -> nn.Module:
    block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return nn.ModuleDict({"block": block})["block"]


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)


def experts() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(vocab_size=64, num_hidden_layers=1, num_local_experts=2, **sizes)
    return transformers.MixtralForCausalLM(config).model.layers[0].mlp.experts


def own() -> nn.Module:
    """A module of Duotone beside a plain one."""
    return nn.Sequential(duotone.Linear(64, 64), nn.Linear(64, 64))


KINDS = {
    "linears": (linears, "mxfp8", {}),
    "delayed": (linears, "fp8-delayed", {}),
    "hooked": (hooked, "mxfp8", {}),
    "parametrized": (lambda: nn.Sequential(weight_norm(nn.Linear(64, 64))), "mxfp8", {}),
    "fused": (mlp, "mxfp8", {"fuse": True}),
    "fast path": (encoder, "mxfp8", {}),
    "experts": (experts, "mxfp8", {}),
    "module of Duotone": (own, "nvfp4", {}),
}
kinds = pytest.mark.parametrize(("build", "recipe", "options"), KINDS.values(), ids=KINDS)


def described(m: nn.Module) -> dict[str, object]:
    """All that convert may change, by the name of the module."""
    orders = {name: [kind.__qualname__ for kind in type(part).__mro__] for name, part in m.named_modules()}
    parts = {name: (orders[name], sorted(vars(part)), sorted(part._buffers)) for name, part in m.named_modules()}
    switches = [getattr(part, "activation_relu_or_gelu", None) for part in m.modules()]
    forwards = [vars(part)[name].__func__ for part in m.modules() for name in ("_old_forward",) if name in vars(part)]
    values = {name: value.shape for name, value in m.state_dict().items()}
    return {"parts": parts, "switches": switches, "forwards": forwards, "values": values}


def places(count: int) -> range:
    return range(1, count + 1, STRIDE)


@kinds
def test_convert_again_completes_an_interrupted_convert(build, recipe, options) -> None:
    def convert(m: nn.Module) -> nn.Module:
        return duotone.convert(m, recipe, (), **options)

    models = [build() for _ in range(2)]
    count = [interrupt(lambda m=m: convert(m), 0) for m in models][1]  # caches are warm then
    whole, plain = convert(build()), duotone.revert(build())
    for at in places(count):
        m = build()
        interrupt(lambda m=m: convert(m), at)
        assert described(convert(m)) == described(whole)
        assert str(duotone.plan(m)) == str(duotone.plan(whole))
        assert described(duotone.revert(m)) == described(plain)


@kinds
def test_revert_again_completes_an_interrupted_revert(build, recipe, options) -> None:
    def converted() -> nn.Module:
        return duotone.convert(build(), recipe, (), **options)

    plain, whole, reverted = duotone.revert(build()), converted(), converted()
    for at in places(interrupt(lambda: duotone.revert(reverted), 0)):
        m = converted()
        interrupt(lambda m=m: duotone.revert(m), at)
        assert described(duotone.revert(m)) == described(plain)
        assert described(duotone.convert(m, recipe, (), **options)) == described(whole)


@kinds
def test_the_other_call_takes_back_what_was_interrupted(build, recipe, options) -> None:
    def converted() -> nn.Module:
        return duotone.convert(build(), recipe, (), **options)

    plain, whole, reverted = duotone.revert(build()), converted(), converted()
    for at in places(interrupt(converted, 0)):
        m = build()
        interrupt(lambda m=m: duotone.convert(m, recipe, (), **options), at)
        assert described(duotone.revert(m)) == described(plain)
    for at in places(interrupt(lambda: duotone.revert(reverted), 0)):
        m = converted()
        interrupt(lambda m=m: duotone.revert(m), at)
        assert described(duotone.convert(m, recipe, (), **options)) == described(whole)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed", "nvfp4"])
def test_an_interrupted_convert_to_another_recipe_is_completed(recipe: str) -> None:
    def again(m: nn.Module) -> nn.Module:
        return duotone.convert(m, recipe, ())

    x, fresh = torch.randn(32, 64), again(linears())
    for before in ("fp8-delayed", "mxfp8"):
        m = duotone.convert(linears(), before, ())
        for at in places(interrupt(lambda m=m: again(m), 0)):
            duotone.convert(m, before, ())
            interrupt(lambda m=m: again(m), at)
            assert described(again(m)) == described(fresh) and str(duotone.plan(m)) == str(duotone.plan(fresh))
            assert torch.isfinite(m(x)).all()


def test_a_hook_never_keeps_the_forward_of_another_class(monkeypatch) -> None:
    """At each line of the change of the class: stored forwards change before it or after it."""
    monkeypatch.setitem(globals(), "STRIDE", 1)
    monkeypatch.setitem(globals(), "CHANGING", ("change_class",))
    for test in (
        test_convert_again_completes_an_interrupted_convert,
        test_revert_again_completes_an_interrupted_revert,
    ):
        test(hooked, "mxfp8", {})
    test_the_other_call_takes_back_what_was_interrupted(hooked, "mxfp8", {})


def test_weights_in_delayed_formats_stay_finite_if_their_interrupted_conversion_is_repeated() -> None:
    """A state that Ctrl-C left without its limits gave the scale 0, so that the weight decoded to NaN."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(32, 32)).bfloat16()
        duotone.convert(m, "mxfp8", ())
        return duotone.convert_parameters(m, "mxfp8")

    where, m = ("state_of", "states_for", "prepare"), model()
    lines = interrupt_at(lambda: duotone.convert_parameters(m, "fp8-delayed"), 0, where)
    expected = m[0].weight.dequantize()
    for at in range(1, lines + 1):
        m = model()
        interrupt_at(lambda m=m: duotone.convert_parameters(m, "fp8-delayed"), at, where)
        duotone.convert_parameters(m, "fp8-delayed")
        assert torch.equal(m[0].weight.dequantize(), expected), at
