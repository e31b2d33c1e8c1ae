"""fuse runs a pipeline in the place of a forward. Whatever else that forward does has to happen as before."""

import copy
import functools
import pickle
from abc import ABC

import pytest
import torch
from blocks import hidden_states
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import duotone


class MLP(nn.Module):
    scale, rate, doubles = 1.0, 0.0, False

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(64, 64) for _ in range(3))
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Detached(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x).detach())


class Clamped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.act(self.gate(x)) * self.up(x)).clamp(-1e3, 1e3))


class Stored(MLP):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.act(self.gate(x)) * self.up(x)
        return self.down(self.hidden)


class Region(MLP):
    def forward(self, x: Tensor) -> Tensor:
        with duotone.autocast(enabled=False):
            hidden = self.act(self.gate(x)) * self.up(x)
        return self.down(hidden)


class Decorated(MLP):
    @duotone.autocast(enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Hooked(MLP):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.gate(x)) * self.up(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 2 * gradient)
        return self.down(hidden)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return 3 * dy


class OtherGradient(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(Tripled.apply(self.act(self.gate(x)) * self.up(x)))


class InMethod(MLP):
    def counted(self, hidden: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.counted(self.act(self.gate(x)) * self.up(x)))


def counted(forward):
    @functools.wraps(forward)
    def run(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return forward(self, x)

    return run


class Wrapped(MLP):
    forward = counted(MLP.forward)


class WritesInput(MLP):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.gate(x)) * self.up(x))
        x += 0
        return y


class Cast(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)).float()


class Recorded(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.log, self.statistics, self.count = [], {"largest": []}, torch.zeros(())


class InList(Recorded):
    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x.abs().max().item())
        return self.down(self.act(self.gate(x)) * self.up(x))


class InDict(Recorded):
    def forward(self, x: Tensor) -> Tensor:
        self.statistics["largest"].append(x.abs().max().item())
        return self.down(self.act(self.gate(x)) * self.up(x))


class InTensor(Recorded):
    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.down(self.act(self.gate(x)) * self.up(x))


class CountedSiLU(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.silu(x)


class WithCount(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.act = CountedSiLU()


class WithNested(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(CountedSiLU())


class WithChildren(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.SiLU(), nn.Dropout(0.0))


class CalledSiLU(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x)


class WithCall(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.act = CalledSiLU()


class WithMethod(MLP):
    """Its activation is a method."""

    def activate(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.gate(x)) * self.up(x))


class WithProperty(MLP, ABC):
    """Python gives each class that derives from an abstract one members of its own."""

    @property
    def activation(self):
        return self.activate

    def activate(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Casts(MLP):
    """As T5 does."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.gate(x)) * self.up(x)
        if isinstance(self.down.weight, Tensor) and hidden.dtype != self.down.weight.dtype:
            hidden = hidden.to(self.down.weight.dtype)
        return self.down(hidden)


def compare(plain: nn.Module, fused: nn.Module, x: Tensor) -> None:
    """The same bits of the output and of all gradients, and the same gradients that are None."""
    results = []
    for m in (plain, fused):
        torch.manual_seed(1)
        m.zero_grad()
        source = x.clone().requires_grad_()
        y = m(source.clone())
        y.sum().backward()
        results.append([y.detach(), source.grad, *(p.grad for p in m.parameters())])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


EFFECTS = {
    Detached: "its values or gradients are not those",
    Clamped: "its values or gradients are not those",
    OtherGradient: "its values or gradients are not those",
    Cast: "its values or gradients are not those",
    InList: "a call changes InList.log",
    InDict: "a call changes InDict.statistics",
    InTensor: "a call changes InTensor.count",
    Stored: "a call changes Stored.hidden",
    Region: "its forward has a region, torch.autocast or a mode of gradients around a linear",
    Decorated: "its forward has a region, torch.autocast or a mode of gradients around a linear",
    Hooked: "its values or gradients are not those",
    Wrapped: "a call changes Wrapped.calls",
    InMethod: "a call changes InMethod.calls",
    WithCount: "a call changes CountedSiLU.calls",
    WithNested: "a call changes CountedSiLU.calls",
    WithCall: "CalledSiLU has a __call__ of its own",
}


@pytest.mark.parametrize("kind", EFFECTS)
def test_a_forward_that_does_more_than_its_values_show_is_left_alone(kind: type[MLP]) -> None:
    torch.manual_seed(0)
    plain = duotone.convert(kind(), "mxfp8")
    fused = duotone.fuse(copy.deepcopy(plain))
    reason = next(row.reason for row in duotone.plan(fused).filter(reason="not fused"))
    assert reason.startswith(f"not fused: {EFFECTS[kind]}")
    if isinstance(fused, Recorded):  # of the comparison there is no trace
        assert not fused.log and not fused.statistics["largest"] and not fused.count
    compare(plain, fused, 1e3 * hidden_states() if kind is Clamped else hidden_states())
    assert vars(plain).keys() == {name for name in vars(fused) if name != "_unfused"}


def test_a_forward_that_writes_to_its_input_is_left_alone() -> None:
    torch.manual_seed(0)
    plain = duotone.convert(nn.Sequential(WritesInput()), "mxfp8")
    with pytest.warns(UserWarning, match="fuse found no norm that linears read and no MLP"):
        fused = duotone.fuse(copy.deepcopy(plain))
    compare(plain, fused, hidden_states())


def test_the_same_parts_without_effects_are_fused() -> None:
    m = duotone.fuse(duotone.convert(MLP(), "mxfp8"))
    assert "fused: gate + up, swiglu and down are one pipeline" in [row.reason for row in duotone.plan(m)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fuse_compares_gradients_where_they_are_off(mode) -> None:
    with mode():
        m = duotone.fuse(duotone.convert(nn.Sequential(MLP()), "mxfp8"), hidden_states())
    assert "fused: gate + up, swiglu and down are one pipeline" in [row.reason for row in duotone.plan(m)]


class Scaled(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) * self.scale


class Dropped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.act(self.gate(x)) * self.up(x), self.rate, self.training)
        return self.down(hidden)


class Late(MLP):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.gate(x)) * self.up(x)) * getattr(self, "factor", 1.0)
        return self.adapter(y) if hasattr(self, "adapter") else y


class Patched(MLP):
    pass


class Flagged(MLP):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.gate(x)) * self.up(x))
        return 2 * y if self.doubles else y


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class WithSwish(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.act = Swish()


class TanhGELU(nn.Module):
    """As transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.act = functools.partial(nn.functional.gelu, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class WithPartial(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.act = TanhGELU()


def patch(m: nn.Module) -> None:
    Patched.forward = Scaled.forward
    m.scale = 0.5


def exact_gelu(m: nn.Module) -> None:
    m.act.act = functools.partial(nn.functional.gelu, approximate="none")


class Gained(nn.Module):
    """An RMSNorm with a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.gain = nn.Parameter(torch.ones(64)), 1e-6, 1.0

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight * self.gain


class WithGain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp_norm, self.mlp = Gained(), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp_norm(x))


def scaled(block: nn.Module, x: Tensor) -> Tensor:
    """A function of a module file reads what no code of the class names."""
    return block.down(block.act(block.gate(x)) * block.up(x)) * block.scale


def quietly(forward):
    """A decorator that keeps nothing of what it decorates."""

    def run(self, x: Tensor) -> Tensor:
        return forward(self, x)

    return run


class ByFunction(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return scaled(self, x)


class ByClass(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(self, x)


class ByDecorator(ByFunction):
    @quietly
    def forward(self, x: Tensor) -> Tensor:
        return scaled(self, x)


class ByLambda(ByFunction):
    def __init__(self) -> None:
        super().__init__()
        self.factor = lambda block: block.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) * self.factor(self)


class BySpelling(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) * getattr(self, "_".join(("", "scale")), 1.0)


class ByPair(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.half = (1.0, torch.ones(()))  # a name that nn.Module has, too

    def forward(self, x: Tensor) -> Tensor:
        return halved(self, x)


def halved(block: nn.Module, x: Tensor) -> Tensor:
    return block.down(block.act(block.gate(x)) * block.up(x)) * block.half[0] * block.half[1]


class ByMethod(MLP):
    def factor(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return multiplied(self, x)


def multiplied(block: nn.Module, x: Tensor) -> Tensor:
    return block.down(block.act(block.gate(x)) * block.up(x)) * block.factor()


class QuietSwish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    @quietly
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class WithQuietSwish(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(QuietSwish())


class QuietlyGained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.gain = nn.Parameter(torch.ones(64)), 1e-6, 1.0

    @quietly
    def forward(self, x: Tensor) -> Tensor:
        return Gained.forward(self, x)


class WithQuietGain(WithGain):
    def __init__(self) -> None:
        super().__init__()
        self.mlp_norm = QuietlyGained()


def quiet_chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), QuietSwish(), nn.Linear(128, 64))


def swish_chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), Swish(), nn.Linear(128, 64))


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))


CHANGES = {
    "act": (MLP, lambda m: setattr(m, "act", nn.ReLU()), "act was replaced since it was fused"),
    "scale": (Scaled, lambda m: setattr(m, "scale", 0.5), "scale has changed since it was fused"),
    "rate": (Dropped, lambda m: setattr(m, "rate", 0.5), "rate has changed since it was fused"),
    "flag": (Flagged, lambda m: setattr(m, "doubles", True), "doubles has changed since it was fused"),
    "method": (WithMethod, lambda m: setattr(m, "activate", torch.relu), "activate has changed since it was fused"),
    "forward": (MLP, lambda m: setattr(m.act, "forward", torch.relu), "act.forward has changed since it was fused"),
    "attribute of an activation": (WithSwish, lambda m: setattr(m.act, "beta", 3.0), "act.beta has changed since"),
    "partial": (WithPartial, exact_gelu, "act.act has changed since it was fused"),
    "attribute that comes": (Late, lambda m: setattr(m, "factor", 0.5), "factor has changed since it was fused"),
    "child that comes": (Late, lambda m: setattr(m, "adapter", nn.Linear(64, 64)), "adapter has changed since"),
    "forward of the class": (Patched, patch, "forward has changed since"),
    "attribute of a norm": (
        WithGain,
        lambda m: setattr(m.mlp_norm, "gain", 3.0),
        "its gain has changed since",
    ),
    "attribute in a chain": (
        swish_chain,
        lambda m: setattr(m[1], "beta", 3.0),
        "1.beta has changed since",
    ),
    "activation of a chain": (chain, lambda m: m.__setitem__(1, nn.ReLU()), "1 was replaced since it was fused"),
    "linear in a chain": (chain, lambda m: m.__setitem__(1, nn.Linear(128, 128)), "1 was replaced since"),
    "number of a function": (ByFunction, lambda m: setattr(m, "scale", 0.5), "scale has changed since"),
    "number of a class": (ByClass, lambda m: setattr(m, "scale", 0.5), "scale has changed since"),
    "decorator": (ByDecorator, lambda m: setattr(m, "scale", 0.5), "scale has changed since"),
    "lambda": (ByLambda, lambda m: setattr(m, "scale", 0.5), "scale has changed since"),
    "private name that comes": (BySpelling, lambda m: setattr(m, "_scale", 0.5), "_scale has changed since"),
    "tuple": (ByPair, lambda m: setattr(m, "half", (1.0, torch.tensor(0.5))), "half has changed since"),
    "method of an instance": (ByMethod, lambda m: setattr(m, "factor", lambda: 0.5), "factor has changed since"),
    "decorator in an activation": (WithQuietSwish, lambda m: setattr(m.act[0], "beta", 3.0), "act.0.beta has changed"),
    "decorator in a norm": (WithQuietGain, lambda m: setattr(m.mlp_norm, "gain", 3.0), "its gain has changed since"),
    "decorator in a chain": (quiet_chain, lambda m: setattr(m[1], "beta", 3.0), "1.beta has changed since"),
    "child of an activation": (WithQuietSwish, lambda m: setattr(m.act, "0", nn.ReLU()), "act.0 has changed since"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_changes_after_fuse_counts(case: str) -> None:
    kind, change, reason = CHANGES[case]
    torch.manual_seed(0)
    plain = duotone.convert(kind(), "mxfp8")
    fused = duotone.fuse(copy.deepcopy(plain))
    assert any(row.reason.startswith("fused") for row in duotone.plan(fused))
    for m in (plain, fused):
        torch.manual_seed(2)
        change(m)
    compare(plain, fused, hidden_states())
    reasons = [row.reason for row in duotone.plan(fused) if "not fused" in row.reason]
    assert any(each.startswith(f"not fused: {reason}") or "is not converted" in each for each in reasons)


COMPILED = ["attribute that comes", "child that comes", "scale", "number of a function", "number of a class", "tuple"]


@pytest.mark.parametrize("case", COMPILED)
def test_what_changes_after_fuse_counts_in_compiled_code_too(case: str) -> None:
    kind, change, _ = CHANGES[case]
    torch.manual_seed(0)
    plain = duotone.convert(kind(), "mxfp8")
    fused = duotone.fuse(copy.deepcopy(plain))
    compiled = torch.compile(fused, backend="aot_eager")
    assert torch.equal(compiled(hidden_states()), plain(hidden_states()))
    for m in (plain, fused):
        torch.manual_seed(2)
        change(m)
    assert torch.equal(compiled(hidden_states()), plain(hidden_states()))


def test_a_name_that_comes_before_a_compilation_counts_in_it() -> None:
    plain = duotone.convert(BySpelling(), "mxfp8")
    fused = duotone.fuse(copy.deepcopy(plain))
    plain._scale = fused._scale = 0.5
    assert torch.equal(torch.compile(fused, backend="aot_eager")(hidden_states()), plain(hidden_states()))


def test_what_changes_in_a_class_after_fuse_counts(monkeypatch) -> None:
    """In the names that a function reads, as elsewhere."""
    for kind, name, value in ((ByClass, "scale", 0.5), (ByMethod, "factor", lambda self: 0.5)):
        plain = duotone.convert(kind(), "mxfp8")
        fused = duotone.fuse(copy.deepcopy(plain))
        assert torch.equal(fused(hidden_states()), plain(hidden_states()))
        monkeypatch.setattr(kind, name, value)
        compare(plain, copy.deepcopy(fused), hidden_states())
        compare(plain, fused, hidden_states())
        assert f"not fused: {name} has changed since it was fused" in [row.reason for row in duotone.plan(fused)]


def test_names_that_libraries_keep_for_themselves_leave_a_pipeline_fused() -> None:
    """As fully_shard, accelerate and transformers set them, on each module."""
    m = duotone.fuse(duotone.convert(WithSwish(), "mxfp8"))
    for part in m.modules():
        part._is_fsdp_managed_module, part._fsdp_use_orig_params, part._is_hf_initialized = True, True, True
        part._hf_hook, part._old_forward = object(), part.forward
    assert any(row.reason.startswith("fused") for row in duotone.plan(m))


@pytest.mark.parametrize("kind", [ByDecorator, WithQuietSwish, WithQuietGain, quiet_chain])
def test_a_fused_model_whose_decorators_hide_names_is_pickled(kind) -> None:
    """Pickle finds functions by their names, so that the functions of a class must not be in it."""
    m = duotone.fuse(duotone.convert(kind(), "mxfp8"))
    other = pickle.loads(pickle.dumps(m))
    assert torch.equal(other(hidden_states()), m(hidden_states()))
    assert [row.reason for row in duotone.plan(other)] == [row.reason for row in duotone.plan(m)]


def test_activations_in_a_chain_that_do_more_run_by_themselves() -> None:
    plain = duotone.convert(nn.Sequential(nn.Linear(64, 128), CountedSiLU(), nn.Linear(128, 64)), "mxfp8")
    fused = duotone.fuse(copy.deepcopy(plain))
    compare(plain, fused, hidden_states())
    assert fused[1].calls == plain[1].calls == 1


def test_a_fused_copy_stays_fused() -> None:
    """`functools.partial` has no equality, and a copy has another object."""
    for kind in (WithPartial, WithSwish, WithGain, WithMethod, WithChildren, WithProperty, Casts):
        m = copy.deepcopy(duotone.fuse(duotone.convert(kind(), "mxfp8")))
        assert any(row.reason.startswith("fused") for row in duotone.plan(m))


def test_hooks_for_all_modules_see_all_modules() -> None:
    m, calls = duotone.fuse(duotone.convert(nn.Sequential(MLP()), "mxfp8")), []
    hook = register_module_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    m(hidden_states())
    hook.remove()
    assert calls.count("SiLU") == 1


@pytest.mark.parametrize("kind", [WithQuietSwish, quiet_chain])
def test_a_hook_of_any_part_of_an_activation_is_called(kind) -> None:
    plain, calls = duotone.convert(kind(), "mxfp8"), []
    fused = duotone.fuse(copy.deepcopy(plain))
    for m in (plain, fused):
        part = next(part for part in m.modules() if isinstance(part, QuietSwish))
        part.register_forward_hook(lambda module, inputs, y: calls.append(y.shape) or 2 * y)
    compare(plain, fused, hidden_states())
    assert len(calls) == 2
    assert any(row.reason.endswith("has hooks") for row in duotone.plan(fused))


class StraightThrough(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (nn.functional.silu(x) - x).detach()


class Centred(nn.Module):
    """An RMSNorm whose statistics have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps).detach() * self.weight


def test_activations_and_norms_of_other_gradients_run_by_themselves() -> None:
    plain = duotone.convert(nn.Sequential(Centred(), nn.Linear(64, 64), StraightThrough(), nn.Linear(64, 64)), "mxfp8")
    compare(plain, duotone.fuse(copy.deepcopy(plain)), hidden_states())


class OverTokens(nn.Module):
    """An RMSNorm over one dimension of (batch, tokens, width), which for a matrix is the last one if it is 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.eps, self.dim = nn.Parameter(torch.ones(64)), 1e-6, dim

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(self.dim, keepdim=True) + self.eps) * self.weight


class OverSample(nn.Module):
    """A LayerNorm over all dimensions but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(64)), nn.Parameter(torch.zeros(64)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[1:], eps=self.eps) * self.weight + self.bias


class OfMatrices(nn.Module):
    """Another function for tensors of three dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x) if x.dim() == 2 else torch.relu(x)


OTHERS = {
    "tokens": lambda: OverTokens(1),
    "last of three dimensions": lambda: OverTokens(2),
    "sample": OverSample,
}


@pytest.mark.parametrize("norm", OTHERS)
def test_a_norm_over_another_dimension_than_the_last_runs_by_itself(norm: str) -> None:
    torch.manual_seed(0)
    x = hidden_states(2, 4, 8) * torch.rand(2, 4, 8, 1) * 4
    x = x if norm.startswith("last") else x[0]
    layers = OTHERS[norm](), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)
    plain = duotone.convert(nn.Sequential(*layers), "mxfp8")
    compare(plain, duotone.fuse(copy.deepcopy(plain), x), x)
    block = WithGain()
    block.mlp_norm = OTHERS[norm]()
    plain = duotone.convert(block, "mxfp8")
    fused = duotone.fuse(copy.deepcopy(plain))
    compare(plain, fused, x)
    reason = "not fused: its values, or its gradients, are those of no norm of duotone.ops"
    assert reason in [row.reason for row in duotone.plan(fused)]


def test_an_activation_that_differs_for_tensors_of_three_dimensions_runs_by_itself() -> None:
    plain = duotone.convert(nn.Sequential(nn.Linear(64, 64), OfMatrices(), nn.Linear(64, 64)), "mxfp8")
    compare(plain, duotone.fuse(copy.deepcopy(plain)), hidden_states())


class Readers(nn.Module):
    """A norm that two linears read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.q, self.k = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x)
        return self.q(hidden), self.k(hidden)


READERS = [{"norm": ["q", "k"]}]


class InRegion(Readers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x)
        q = self.q(hidden)
        with duotone.autocast(enabled=False):
            return q, self.k(hidden)


class InTorchAutocast(Readers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x)
        q = self.q(hidden)
        with torch.autocast("cpu", torch.bfloat16):
            return q, self.k(hidden)


class Written(Readers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x)
        q = self.q(hidden)
        with torch.no_grad():
            self.k.weight.mul_(2)
        return q, self.k(hidden)


@pytest.mark.parametrize("kind", [Readers, InRegion, InTorchAutocast, Written])
def test_linears_that_run_as_one_follow_what_is_around_each(kind: type[Readers]) -> None:
    """mxfp8 gives them the same bits, one by one or as one."""
    torch.manual_seed(0)
    plain = duotone.convert(kind(), "mxfp8")
    fused = duotone.fuse(copy.deepcopy(plain), blocks=READERS)
    for one, other in zip(plain(hidden_states()), fused(hidden_states()), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


class Changed(Readers):
    """Something about k changes between the calls of q and k."""

    change = "nothing"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x)
        q, other = self.q(hidden), torch.ones(64, 64)
        if self.change == "functional":
            return q, torch.func.functional_call(self.k, {"weight": other}, (hidden,))
        if self.change == "data":
            self.k.weight.data = other
        elif self.change == "parameter":
            self.k.weight = nn.Parameter(other)
        elif self.change == "swap":
            self.q.weight.data, self.k.weight.data = self.k.weight.data, self.q.weight.data
        return q, self.k(hidden)


@pytest.mark.parametrize("change", ["nothing", "functional", "data", "parameter", "swap"])
def test_a_linear_that_runs_with_another_has_the_weight_of_its_own_call(change: str) -> None:
    torch.manual_seed(0)
    plain = duotone.convert(Changed(), "mxfp8")
    fused = duotone.fuse(copy.deepcopy(plain), blocks=READERS)
    plain.change = fused.change = change
    for one, other in zip(plain(hidden_states()), fused(hidden_states()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("change", ["recipe", "evaluation"])
def test_a_linear_that_changes_after_a_forward_leaves_the_others(change: str) -> None:
    torch.manual_seed(0)
    recipe = duotone.recipes.from_dict({"name": "trained", "base": "mxfp8", "evaluation": "bf16"})
    plain, x = duotone.convert(Readers(), recipe), hidden_states()
    fused = duotone.fuse(copy.deepcopy(plain), blocks=READERS)
    for m in (plain, fused):
        m(x)[0].sum().backward()
        if change == "recipe":
            duotone.convert(m.k, "bf16")
        else:
            m.k.eval()
    for one, other in zip(plain(x), fused(x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_of_readers_has_the_bits_of_their_forward(reentrant: bool, recipe: str) -> None:
    """A reentrant checkpoint reads the norm without gradients first, and again as a plain tensor."""
    torch.manual_seed(0)
    m, seen = duotone.fuse(duotone.convert(Readers(), recipe), blocks=READERS), []

    def readers(hidden: Tensor) -> Tensor:
        y = m.q(hidden) + m.k(hidden)
        seen.append(y.detach().clone())
        return y

    x = hidden_states().requires_grad_()
    with set_checkpoint_early_stop(False):
        checkpoint(readers, m.norm(x), use_reentrant=reentrant).sum().backward()
    assert len(seen) == 2 and torch.equal(*seen)
