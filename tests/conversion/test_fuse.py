"""fuse on plain models: what is recognized, the values, and what users do with a model afterwards."""

import copy
import pickle

import pytest
import torch
from blocks import Block, GatedMLP, ZeroCentred, gradients_of, hidden_states, model
from torch import Tensor, nn

import duotone
from duotone.errors import UserError
from duotone.pipeline.autograd import RUNNER

RECIPES = ["bf16", "mxfp8", "fp8-current", "fp8-delayed", "fp8-block", "fp8-rowwise", "nvfp4"]


def error(results: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest relative error of any result, in the Frobenius norm."""
    return max(((results[n].double() - exact[n]).norm() / exact[n].norm()).item() for n in exact)


def pipelines(m: nn.Module, x: Tensor) -> int:
    """How many pipelines one forward runs."""
    count = 0

    def watch(apply, *arguments):
        nonlocal count
        count += 1
        return apply(*arguments)

    with RUNNER.watched(watch):
        m(x)
    return count


def rows(m: nn.Module) -> dict[str, str]:
    return {row.module: row.reason for row in duotone.plan(m) if "fused" in row.reason}


@pytest.mark.parametrize("norm", [ZeroCentred, nn.RMSNorm, nn.LayerNorm, Block.__init__.__defaults__[2]])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_and_gradients_are_as_close_to_float64_as_without_fuse(recipe, norm) -> None:
    """Weights that run as one GEMM may share a scale, so bits differ; what is lost does not grow."""
    x = hidden_states()
    exact = gradients_of(model(norm=norm).double(), x.double())
    plain = error(gradients_of(duotone.convert(model(norm=norm), recipe), x), exact)
    m = duotone.fuse(duotone.convert(model(norm=norm), recipe))
    assert pipelines(m, x) == 2 * (7 if recipe == "fp8-delayed" else 3)
    assert error(gradients_of(m, x), exact) < max(1.25 * plain, 1e-6)


def test_with_scales_of_blocks_the_output_has_the_bits_of_the_unfused_model() -> None:
    m = duotone.convert(model(norm=nn.LayerNorm), "mxfp8")
    x, fused = hidden_states(), duotone.fuse(copy.deepcopy(m))
    assert torch.equal(fused(x), m(x)) and pipelines(fused, x) == 6 and pipelines(m, x) == 14


def test_convert_may_come_first_or_second_and_revert_undoes_both() -> None:
    plain, x = model(), hidden_states()
    after = duotone.convert(duotone.fuse(model()), "nvfp4")
    before = duotone.fuse(duotone.convert(model(), "nvfp4"))
    gradients_after, gradients_before = gradients_of(after, x), gradients_of(before, x)
    assert all(torch.equal(gradients_after[n], gradients_before[n]) for n in gradients_after)
    parameters, kinds = list(after.parameters()), [type(module) for module in plain.modules()]
    duotone.revert(after)
    assert [type(module) for module in after.modules()] == kinds
    assert [vars(part).keys() for part in after.modules()] == [vars(part).keys() for part in plain.modules()]
    assert all(a is b for a, b in zip(after.parameters(), parameters, strict=True))
    assert torch.equal(after(x), plain(x))


def test_without_convert_the_bits_are_those_of_the_plain_model() -> None:
    m, x = duotone.fuse(model()), hidden_states()
    left, right = gradients_of(m, x), gradients_of(model(), x)
    assert all(torch.equal(left[n], right[n]) for n in left)
    assert rows(m)["0.mlp"] == "not fused: gate is not converted"


def test_plan_shows_each_pattern() -> None:
    m = duotone.fuse(duotone.convert(model(1), "mxfp8"))
    assert rows(m) == {
        "0.input_layernorm": "fused: it runs in the pipeline of self_attn.q_proj + k_proj + v_proj",
        "0.post_attention_layernorm": "fused: it runs in the pipeline of mlp",
        "0.mlp": "fused: gate + up, swiglu and down are one pipeline",
    }


def test_parameters_keys_copies_and_pickles_stay() -> None:
    m, x = duotone.convert(model(), "fp8-delayed"), hidden_states()
    keys, parameters = list(m.state_dict()), list(m.parameters())
    duotone.fuse(m)
    assert list(m.state_dict()) == keys and all(a is b for a, b in zip(m.parameters(), parameters, strict=True))
    copies = copy.deepcopy(m), pickle.loads(pickle.dumps(m))
    other = duotone.fuse(duotone.convert(model(), "fp8-delayed"))
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    other.load_state_dict(m.state_dict())
    for step in range(2):
        expected = gradients_of(m, x + step)
        for each in (*copies, other):
            results = gradients_of(each, x + step)
            assert all(torch.equal(results[n], expected[n]) for n in expected)
    assert pipelines(copies[0], x) == pipelines(copies[1], x) == 14


def test_hooks_keep_seeing_the_calls_of_what_they_watch() -> None:
    m, x = duotone.fuse(duotone.convert(model(), "mxfp8")), hidden_states()
    calls = []
    hook = m[0].mlp.up.register_forward_hook(lambda module, inputs, y: calls.append((inputs[0].shape, y.shape)))
    m[1].input_layernorm.register_forward_hook(lambda module, inputs, y: calls.append(type(y)))
    expected = duotone.convert(model(), "mxfp8")(x)
    assert torch.allclose(m(x), expected, rtol=0.02, atol=0.02)
    assert calls == [((2, 16, 64), (2, 16, 96)), Tensor]
    assert rows(m)["0.mlp"] == rows(m)["0.post_attention_layernorm"] == "not fused: up has hooks"
    assert rows(m)["1.input_layernorm"] == "not fused: it has hooks"
    hook.remove()
    assert rows(m)["0.mlp"].startswith("fused")


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp_norm, self.mlp = nn.LayerNorm(32), GatedMLP(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.mlp_norm(x))


class Classic(nn.Module):
    """An MLP whose activation and dropout are children."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.act, self.drop = nn.ReLU(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.act(self.up(x))))


def test_hooks_of_an_activation_and_a_dropout_that_is_on_keep_the_forward_of_the_class() -> None:
    m, x, calls = duotone.fuse(duotone.convert(Classic(), "mxfp8")), hidden_states(), []
    assert rows(m)[""] == "not fused: drop is on"
    m.eval()
    assert rows(m)[""].startswith("fused") and pipelines(m, x) == 1
    hook = m.act.register_forward_hook(lambda module, inputs, y: calls.append(y.shape))
    m(x)
    assert calls == [(2, 16, 96)] and rows(m)[""] == "not fused: act has hooks"
    hook.remove()
    assert pipelines(m, x) == 1


class LowRank(nn.Module):
    """A linear with an adapter."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("first", ["fuse", "adapters"])
def test_adapters_keep_their_part(first: str) -> None:
    m, twin, x = duotone.convert(model(1), "mxfp8"), duotone.convert(model(1), "mxfp8"), hidden_states()
    if first == "fuse":
        duotone.fuse(m)
    for each in (m, twin):
        torch.manual_seed(3)
        each[0].mlp.up = LowRank(each[0].mlp.up)
        each[0].self_attn.q_proj = LowRank(each[0].self_attn.q_proj)
    duotone.fuse(m) if first == "adapters" else None
    left, right = gradients_of(m, x), gradients_of(twin, x)
    assert all(torch.equal(left[n], right[n]) for n in left)
    assert rows(m)["0.mlp"].startswith(f"not fused: up is a {__name__}.LowRank")
    assert rows(m)["0.input_layernorm"].startswith("not fused:") and "LowRank" in rows(m)["0.input_layernorm"]


class Postnorm(nn.Module):
    """The norm is read by a linear and by a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.linear(x)


def test_a_norm_that_is_read_elsewhere_too_gives_its_values_there() -> None:
    torch.manual_seed(0)
    m, x = duotone.convert(Postnorm(), "mxfp8"), hidden_states()
    fused = duotone.fuse(copy.deepcopy(m), blocks=[{"norm": "linear"}])
    left, right = gradients_of(fused, x), gradients_of(m, x)
    assert torch.equal(left["y"], right["y"])
    assert error(left, right) < 1e-6


class Other(nn.Module):
    """The parts of a gated MLP, and other values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


def test_a_pattern_with_other_values_is_left_alone_with_a_row() -> None:
    m, x = duotone.convert(Other(), "mxfp8"), hidden_states()
    y = m(x)
    assert torch.equal(duotone.fuse(m)(x), y)
    values = "its values or gradients are not those of linears and an activation of duotone.ops"
    assert rows(m) == {"": f"not fused: {values}"}


class Own(nn.Module):
    """A block whose names are in no table."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.out = nn.LayerNorm(64), nn.LayerNorm(64), nn.Linear(64, 64)
        self.one, self.two, self.mlp = nn.Linear(64, 64), nn.Linear(64, 64), GatedMLP(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.out(self.one(y) * self.two(y))
        return x + self.mlp(self.between(x))


def test_a_user_names_the_parts_of_a_block() -> None:
    torch.manual_seed(0)
    m, x = duotone.convert(nn.Sequential(Own(), Own()), "mxfp8"), hidden_states()
    expected = gradients_of(m, x)
    duotone.fuse(m)
    unknown = (
        f"not fused: {__name__}.Own is no known block: name what reads its norms in duotone.fuse(model, blocks=[...])"
    )
    assert rows(m)["0.before"] == rows(m)["1.between"] == unknown
    duotone.fuse(m, blocks=[{"before": ["one", "two"]}])
    assert rows(m)["1.before"] == "fused: it runs in the pipeline of one + two"
    assert "0.between" not in rows(m)
    duotone.fuse(m, blocks=[{"before": ("one", "two"), "between": "mlp"}])
    assert rows(m)["0.between"] == "fused: it runs in the pipeline of mlp"
    results = gradients_of(m, x)
    assert torch.equal(results["y"], expected["y"]) and error(results, expected) < 1e-6
    assert pipelines(m, x) == 2 * 3


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({"norm": "linear"}, "blocks is a list of tables"),
        ([{"norm": 3}], "blocks is a list of tables"),
        ([{3: "linear"}], "blocks is a list of tables"),
        ([{}], "blocks is a list of tables"),
        ([{"before": "three"}], r"no module of Own has these norms and readers: {'before': \['three'\]}"),
        ([{"one": "two"}], "no module of Own has these norms"),
    ],
)
def test_blocks_that_no_model_has_are_errors(blocks, words: str) -> None:
    m = Own()
    with pytest.raises(UserError, match=words):
        duotone.fuse(m, blocks=blocks)
    assert type(m.mlp) is GatedMLP


@pytest.mark.parametrize("wrong", [nn.Linear, "model", None])
def test_errors_come_before_anything_changes(wrong) -> None:
    with pytest.raises(UserError, match=r"fuse takes a torch\.nn\.Module; got "):
        duotone.fuse(wrong)
    m = model()
    for sample, words in ((3, "sample is a tensor, a tuple or a dict"), (torch.ones(2, 3), "does not run on sample: ")):
        with pytest.raises(UserError, match=words):
            duotone.fuse(m, sample)
    assert {type(part) for part in m.modules()} == {type(part) for part in model().modules()}


def test_a_sample_is_compared_with_the_weights_of_the_model() -> None:
    x = hidden_states()
    for sample in (x, (x,), [x], {"input": x}):
        m = duotone.fuse(duotone.convert(model(), "mxfp8"), sample)
        assert pipelines(m, x) == 6 and m.training


def test_a_model_on_meta_is_fused_too() -> None:
    with torch.device("meta"):
        m = model()
    m = duotone.convert(duotone.fuse(m), "mxfp8")
    assert [row.split(":")[0] for row in rows(m).values()] == ["fused"] * 6
    expected = duotone.fuse(duotone.convert(model(), "mxfp8"))
    m = m.to_empty(device="cpu")
    m.load_state_dict(expected.state_dict())
    assert torch.equal(m(hidden_states()), expected(hidden_states()))


def test_a_sequential_runs_what_neighbours_its_linears_in_their_pipeline() -> None:
    torch.manual_seed(0)
    act = nn.SiLU()
    layers = [nn.LayerNorm(64), nn.Linear(64, 96), act, nn.Linear(96, 64), act, nn.Dropout(0.5), nn.Linear(64, 32)]
    m = nn.Sequential(*layers, nn.Tanh()).eval()
    x, exact = hidden_states(), gradients_of(copy.deepcopy(m).double(), hidden_states().double())
    duotone.convert(m, "mxfp8", rules=())
    y = gradients_of(m, x)
    assert pipelines(m, x) == 3 and error(y, exact) < 0.1
    duotone.fuse(m)
    results = gradients_of(m, x)
    assert pipelines(m, x) == 1 and torch.equal(results["y"], y["y"]) and error(results, y) < 1e-6
    assert rows(m) == {"": "fused: 8 children are one pipeline"} and type(m[:3]) is type(m)
    assert torch.equal(m[:4](x), nn.Sequential(*list(m)[:4])(x))
    m.train()
    assert pipelines(m, x) == 2  # dropout is a call of its own
    duotone.revert(m)
    assert type(m) is nn.Sequential


def test_a_block_compiles_whole_with_eager_bits() -> None:
    eager = duotone.fuse(duotone.convert(FeedForward(), "fp8-current"))
    m, x = copy.deepcopy(eager), hidden_states(2, 8, width=32)
    m.compile(fullgraph=True, backend="aot_eager")
    left, right = gradients_of(m, x), gradients_of(eager, x)
    assert torch.equal(left["y"], right["y"]) and error(left, right) < 1e-6


def test_equal_blocks_that_are_compiled_one_by_one_share_a_graph() -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    m = duotone.fuse(duotone.convert(nn.Sequential(*(FeedForward() for _ in range(3))), "fp8-current"))
    for block in m:
        block.compile(fullgraph=True, backend=backend)
    m(hidden_states(2, 8, width=32).requires_grad_())
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_hidden_states_of_a_norm_without_epsilon_keep_torchs_values(dtype) -> None:
    """Its documentation names the epsilon of the dtype, 2**-7 in bf16; on a CPU torch takes that of fp32."""
    m, x = duotone.convert(model(1, norm=nn.RMSNorm).to(dtype), "mxfp8"), (hidden_states() * 0.02).to(dtype)
    expected = gradients_of(m, x)
    results = gradients_of(duotone.fuse(m), x)
    assert rows(m)["0.input_layernorm"].startswith("fused") and error(results, expected) < 0.03


class UpInHighPrecision(duotone.CustomRecipe):
    """Another format for one of two linears that would run as one."""

    def __init__(self) -> None:
        mxfp8, bf16 = duotone.recipes.load("mxfp8"), duotone.recipes.load("bf16")
        super().__init__(qfactory=lambda role: (bf16 if role and role.name.endswith(("up", "k_proj")) else mxfp8)(role))


@pytest.mark.parametrize("by", ["rules", "autocast"])
def test_linears_of_different_formats_run_one_by_one(by: str) -> None:
    names = (
        duotone.recipes.Rule(module="*.up", format="identity"),
        duotone.recipes.Rule(module="*.k_proj", format="identity"),
    )
    rules = names if by == "rules" else ()
    m = duotone.convert(model(norm=nn.LayerNorm), "mxfp8", rules=rules)
    fused, x = duotone.fuse(copy.deepcopy(m)), hidden_states()
    recipe = duotone.recipes.load("mxfp8") if by == "rules" else UpInHighPrecision()
    with duotone.autocast(recipe):
        left, right = gradients_of(fused, x), gradients_of(m, x)
        assert torch.equal(left["y"], right["y"]) and error(left, right) < 1e-6
        assert pipelines(fused, x) == 2 * 7
    if by == "autocast":
        assert pipelines(fused, x) == 2 * 3


def test_delayed_scales_stay_those_of_each_linear() -> None:
    """In a run that goes on with fuse, and from a checkpoint without it: one scale for two weights would clamp."""
    m, x = duotone.convert(model(norm=nn.LayerNorm), "fp8-delayed"), hidden_states()
    gradients_of(m, x)
    fused = duotone.fuse(duotone.convert(model(norm=nn.LayerNorm), "fp8-delayed"))
    fused.load_state_dict(m.state_dict())
    for step in range(2):
        left, right = gradients_of(fused, x + step), gradients_of(m, x + step)
        assert torch.equal(left["y"], right["y"]) and error(left, right) < 1e-6
    assert rows(fused)["0.mlp"] == "not fused: each linear has delayed scales of its own"
    assert (
        rows(fused)["0.input_layernorm"]
        == "fused: it runs in the pipeline of self_attn.q_proj and self_attn.k_proj and self_attn.v_proj"
    )


@pytest.mark.parametrize(("mode", "count"), [(torch.no_grad, 6), (torch.inference_mode, 8)])
def test_evaluation_without_gradients(mode, count) -> None:
    """In inference mode the tensors that the model computes have no versions, so their norms are not put off."""
    m, x = duotone.fuse(duotone.convert(model(norm=nn.LayerNorm), "mxfp8")), hidden_states()
    expected = m(x)
    with mode():
        assert torch.equal(m.eval()(x), expected) and pipelines(m, x) == count


class InPlace(FeedForward):
    """Writes to the input of the norm before or after its output is read."""

    early = True

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y = self.mlp_norm(x)
        if self.early:
            x += 1
        z = self.mlp(y)
        x.mul_(2)
        return x + z


def test_a_write_to_the_input_of_a_norm_is_never_read_as_its_input() -> None:
    m, x = duotone.fuse(duotone.convert(InPlace(), "mxfp8")), hidden_states(2, width=32)
    with torch.no_grad(), pytest.raises(UserError, match="the input or a weight of a fused norm was changed in place"):
        m(x)
    late = copy.deepcopy(m)
    late.early = False
    unfused = duotone.convert(duotone.revert(copy.deepcopy(late)), "mxfp8")
    with torch.no_grad():
        assert torch.equal(late(x), unfused(x)) and pipelines(late, x) == 1


WRITES = {
    "setitem": lambda h: h.__setitem__((slice(None), 0), 0.0),
    "mul_": lambda h: h.mul_(0.5),
    "dropout": lambda h: nn.functional.dropout(h, 1.0, training=True, inplace=True),
    "view": lambda h: h.view(-1, 32)[::2].add_(1.0),
    "foreach": lambda h: torch._foreach_mul_([h], 0.5),
    "detached": lambda h: h.detach().mul_(0.5),
    "data": lambda h: h.data.zero_(),
    "other data": lambda h: setattr(h, "data", h.data * 2),
    "data of another norm": lambda h: setattr(h, "data", FeedForward().mlp_norm(-h.detach())),
}


class Overwritten(FeedForward):
    """Writes to the output of the norm before it is read."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp_norm(x)
        WRITES[self.write](h)
        return x + self.mlp(h)


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_the_output_of_a_norm_is_what_its_readers_see(write: str, tracked: bool) -> None:
    torch.manual_seed(0)
    m, x = duotone.convert(Overwritten(), "bf16"), hidden_states(2, width=32)
    fused = duotone.fuse(copy.deepcopy(m))
    assert rows(fused)["mlp_norm"].startswith("fused")
    results = []
    for each in (m, fused):
        each.write = write
        with torch.set_grad_enabled(tracked):
            y = each(x)
        results.append([y] + ([*torch.autograd.grad(y.sum(), list(each.parameters()))] if tracked else []))
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("other", [torch.zeros(32, 2, 1), torch.zeros(2, 32).double()])
def test_data_of_another_form_than_the_output_of_a_norm_are_an_error(other: Tensor) -> None:
    m = duotone.fuse(duotone.convert(FeedForward(), "bf16"))
    h = m.mlp_norm(hidden_states(2, width=32))
    with pytest.raises(UserError, match=r"keeps its shape, dtype and device; write h = value, not h\.data"):
        h.data = other
    assert torch.equal(m.mlp(h), m.mlp(nn.functional.layer_norm(hidden_states(2, width=32), (32,))))


class Kept(FeedForward):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.mlp_norm(x)
        return x + self.mlp(h), h


@pytest.mark.parametrize("change", ["step", "data"])
def test_an_output_that_is_read_after_its_weights_changed_is_an_error(change: str) -> None:
    m, x = duotone.fuse(duotone.convert(Kept(), "mxfp8")), hidden_states(2, width=32)
    y, h = m(x)
    early = m(x)[1].detach()
    y.sum().backward()
    if change == "step":
        torch.optim.SGD(m.parameters(), lr=1.0).step()
    else:
        m.mlp_norm.weight.data = torch.zeros(32)
    with pytest.raises(UserError, match=r"a weight of a fused norm was changed .* read the output before"):
        h.sum()
    assert torch.equal(early, nn.functional.layer_norm(x, (32,)))


@pytest.mark.parametrize("request_of", ["register_hook", "retain_grad"])
def test_a_hook_that_would_miss_the_gradients_of_readers_is_an_error(request_of: str) -> None:
    m, x = duotone.fuse(duotone.convert(Kept(), "mxfp8")), hidden_states(2, width=32)
    _, h = m(x)
    arguments = [lambda gradient: None] if request_of == "register_hook" else []
    with pytest.raises(UserError, match=r"register the hook before the output is read, or call duotone\.revert"):
        getattr(h, request_of)(*arguments)


def test_weights_that_others_share_stay_where_they_are() -> None:
    m = model()
    m[1].self_attn.q_proj.weight.data = m[0].self_attn.q_proj.weight.data
    places = [m[layer].self_attn.q_proj.weight.data_ptr() for layer in (0, 1)]
    duotone.fuse(duotone.convert(m, "mxfp8"))
    assert [m[layer].self_attn.q_proj.weight.data_ptr() for layer in (0, 1)] == places
    shared = model().share_memory()
    duotone.fuse(duotone.convert(shared, "mxfp8"))
    assert all(p.is_shared() for p in shared.parameters())


def test_a_linear_of_two_parents_and_tied_weights() -> None:
    def build() -> nn.Sequential:
        m = model(norm=nn.LayerNorm)
        m[1].mlp.down = m[0].mlp.down  # one module, two parents
        m[1].mlp.up.weight = m[0].mlp.up.weight  # one parameter, two modules
        m[1].self_attn.k_proj.weight = m[1].self_attn.q_proj.weight  # in one GEMM
        return m

    m, x = duotone.convert(build(), "mxfp8"), hidden_states()
    fused = duotone.fuse(copy.deepcopy(m))
    left, right = gradients_of(fused, x), gradients_of(m, x)
    assert torch.equal(left["y"], right["y"]) and error(left, right) < 1e-6 and pipelines(fused, x) == 6
    assert fused[1].mlp.up.weight is fused[0].mlp.up.weight


def test_weights_of_one_gemm_lie_side_by_side_and_are_not_copied() -> None:
    m = duotone.fuse(duotone.convert(model(1), "mxfp8"))
    gate, up = m[0].mlp.gate.weight, m[0].mlp.up.weight
    assert up.data_ptr() == gate.data_ptr() + gate.numel() * 4
    assert up.untyped_storage().data_ptr() == gate.untyped_storage().data_ptr()
    separate = copy.deepcopy(m).double().float()  # apart again, and still right
    assert torch.equal(separate(hidden_states()), m(hidden_states()))


def test_under_torch_autocast_a_norm_computes_by_itself() -> None:
    m, x = duotone.convert(model(1, norm=nn.LayerNorm), "mxfp8"), hidden_states()
    with torch.autocast("cpu", torch.bfloat16):
        expected = m(x)
        assert torch.equal(duotone.fuse(m)(x), expected)


def test_convert_can_fuse() -> None:
    m = duotone.convert(model(1), "mxfp8", fuse=True)
    assert len(rows(m)) == 3 and pipelines(m, hidden_states()) == 3


def test_quantized_weights_run_one_by_one_behind_their_norm() -> None:
    m = duotone.convert_parameters(duotone.convert(model(1, norm=nn.LayerNorm), "mxfp8"), "mxfp8")
    fused, x = duotone.fuse(copy.deepcopy(m)), hidden_states()
    assert torch.equal(fused(x), m(x)) and pipelines(fused, x) == 7
    assert rows(fused)["0.mlp"] == "not fused: gate holds a QuantizedTensor"
    assert rows(fused)["0.input_layernorm"].startswith("fused")


def test_derivatives_of_any_order_in_high_precision() -> None:
    plain = FeedForward().double()
    m, x = duotone.fuse(duotone.convert(copy.deepcopy(plain), "bf16")), hidden_states(2, width=32).double()
    for function in (torch.func.grad, torch.func.hessian):
        left, right = (function(lambda row, each=each: each(row).square().sum())(x) for each in (m, plain))
        assert torch.allclose(left, right, rtol=1e-6, atol=1e-8)
    x.requires_grad_()
    penalties = []
    for each in (m, plain):
        (dx,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        each.zero_grad()
        dx.square().sum().backward()
        penalties += [each.mlp.up.weight.grad, each.mlp_norm.weight.grad]
    assert torch.allclose(penalties[0], penalties[2]) and torch.allclose(penalties[1], penalties[3])


def saved_bytes(m: nn.Module, x: Tensor) -> int:
    """Of what a forward keeps for its backward, each piece of memory once."""
    sizes = {}

    def pack(t: Tensor) -> Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = m(x)
    parameters = {p.untyped_storage().data_ptr() for p in m.parameters()}
    assert y.requires_grad
    return sum(size for pointer, size in sizes.items() if pointer not in parameters)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-current", "bf16"])
def test_fuse_keeps_less_for_backward(recipe: str) -> None:
    m, x = duotone.convert(model(), recipe), hidden_states(2, 64)
    unfused = saved_bytes(m, x)
    assert saved_bytes(duotone.fuse(m), x) < unfused


def test_a_shallow_copy_runs_the_forward_of_its_class() -> None:
    m, x = duotone.fuse(duotone.convert(model(1, norm=nn.LayerNorm), "mxfp8")), hidden_states()
    replica = copy.copy(m[0])
    replica._modules = {name: copy.copy(child) for name, child in m[0]._modules.items()}
    assert torch.equal(replica(x), m(x)) and pipelines(replica, x) == 7


def test_modules_of_duotone_stay_as_they_are() -> None:
    m = nn.Sequential(
        duotone.TransformerLayer(64, 128, 2, recipe="mxfp8"),
        duotone.MoE(64, 64, num_experts=2, top_k=1, recipe="mxfp8"),
    )
    kinds, x = [type(part) for part in m.eval().modules()], hidden_states(16, 2)
    y = m(x)
    with pytest.warns(UserWarning, match="fuse found no norm that linears read and no MLP in Sequential"):
        duotone.fuse(m)
    assert torch.equal(m(x), y) and [type(part) for part in m.modules()] == kinds


class Watched(FeedForward):
    """Does something with the norm's output that only autograd sees, and that the source does not show."""

    watch = "nothing"

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.watch != "no_grad"):
            y = self.mlp_norm(x)
        self.watched = WATCHES[self.watch](locals())
        return x + self.mlp(y)


WATCHES = {
    "nothing": lambda scope: None,
    "no_grad": lambda scope: None,
    "hook": lambda scope: scope["y"].register_hook(lambda gradient: 2 * gradient),
    "retain_grad": lambda scope: scope["y"].retain_grad() or scope["y"],
    "leaf": lambda scope: scope["y"].requires_grad_(),
}


@pytest.mark.parametrize("watch", WATCHES)
def test_gradients_stop_and_pass_where_they_do_without_fuse(watch: str) -> None:
    m, x = duotone.convert(Watched(), "mxfp8"), hidden_states(2, width=32)
    if watch == "leaf":
        m.mlp_norm.requires_grad_(False)
    fused = duotone.fuse(copy.deepcopy(m))
    assert rows(fused)["mlp_norm"].startswith("fused")
    gradients = []
    for each in (m, fused):
        each.watch, leaf = watch, x.clone().requires_grad_(watch != "leaf")
        each(leaf).square().sum().backward()
        gradients.append([leaf.grad, each.mlp_norm.weight.grad, each.mlp.up.weight.grad])
        if watch in ("retain_grad", "leaf"):
            gradients[-1].append(each.watched.grad)
            assert each.watched.grad is not None
    for left, right in zip(*gradients, strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.allclose(left, right, rtol=1e-5, atol=1e-6)


def test_fuse_again_and_convert_again() -> None:
    m, x = duotone.fuse(duotone.fuse(duotone.convert(model(), "nvfp4"))), hidden_states()
    assert pipelines(m, x) == 6 and len(rows(m)) == 6
    duotone.convert(m, "mxfp8")
    assert torch.equal(m(x), duotone.convert(model(), "mxfp8", fuse=True)(x))
    assert type(duotone.revert(duotone.fuse(model()))[0].mlp) is GatedMLP


class Halved(nn.LayerNorm):
    """It looks like a norm, and gives half of one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Shared(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def test_norms_of_other_values_and_norms_of_several_modules_run_by_themselves() -> None:
    m, x = duotone.convert(nn.Sequential(Shared(Halved(64))), "mxfp8"), hidden_states()
    expected = m(x)
    duotone.fuse(m, blocks=[{"norm": "linear"}])
    assert rows(m)["0.norm"] == "not fused: its values, or its gradients, are those of no norm of duotone.ops"
    assert torch.equal(m(x), expected)
    norm = nn.LayerNorm(64)
    m = duotone.convert(nn.Sequential(Shared(norm), Shared(norm), Shared(norm)), "mxfp8")
    duotone.fuse(m, blocks=[{"norm": "linear"}])
    assert rows(m)["0.norm"] == "not fused: several modules call it" and type(norm) is nn.LayerNorm


def test_what_changes_after_fuse_runs_as_its_class_says() -> None:
    """A pipeline that went on would leave out hooks, new children and a new epsilon in silence."""

    def chain() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.LayerNorm(64), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)
        return duotone.convert(nn.Sequential(nn.Sequential(*layers)), "mxfp8")

    def hook(inner: nn.Sequential) -> None:
        inner[2].register_forward_hook(lambda module, inputs, y: y + 1)

    changes = {
        "it has other children than before": lambda inner: inner.append(nn.Tanh()),
        "2 has hooks": hook,
        "0 has another epsilon than when it was fused": lambda inner: setattr(inner[0], "eps", 3.0),
    }
    x = hidden_states()
    for reason, change in changes.items():
        plain, fused = chain(), duotone.fuse(chain())
        assert torch.equal(fused(x), plain(x)) and rows(fused)["0"].startswith("fused")
        change(plain[0]), change(fused[0])
        assert rows(fused)["0"] == f"not fused: {reason}"
        assert torch.equal(fused(x), plain(x)), reason
    m = duotone.fuse(duotone.convert(model(1), "mxfp8"))
    m[0].mlp.register_forward_hook(lambda module, inputs, y: 2 * y)
    assert rows(m)["0.post_attention_layernorm"] == "not fused: mlp is wrapped, or has hooks"


@pytest.mark.parametrize(("recipe", "tracked"), [("fp8-current", True), ("nvfp4", False)])
def test_an_exported_program_of_a_fused_model_has_the_bits_of_eager_code(recipe: str, tracked: bool) -> None:
    """q, k and v share the scale of a tensor in it, too, so the bits are not those without fuse."""
    m, x = model(1).bfloat16(), hidden_states().bfloat16()
    plain, fused = duotone.convert(copy.deepcopy(m), recipe), duotone.convert(m, recipe, fuse=True)
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    with torch.set_grad_enabled(tracked):
        program = torch.export.export(fused, (x,), dynamic_shapes=(batch,)).module()
    for inputs in (x, torch.cat([x, -x, 2 * x])):
        assert torch.equal(program(inputs), fused(inputs)) and not torch.equal(fused(inputs), plain(inputs))


def test_a_strict_export_of_a_fused_norm_is_refused() -> None:
    """Dynamo runs q, k and v one by one, under other scales than eager code."""
    m = duotone.convert(model(1), "fp8-current", fuse=True)
    with torch.no_grad(), pytest.raises(UserError, match=r"strict=True does not follow norms .* leave strict out"):
        torch.export.export(m, (hidden_states(),), strict=True)
