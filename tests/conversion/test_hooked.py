"""Modules that other libraries changed before convert: hooked forwards, fast paths, weights read past their linear."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from causal import SIZES
from torch import Tensor, nn

import duotone
from duotone import recipes
from duotone.conversion.skipped import bypassed_children
from duotone.errors import RecipeError
from later import Later

transformers = Later("transformers")

MXFP8 = recipes.load("mxfp8")
NAMES = ["mxfp8", "nvfp4", "fp8-delayed", "fp8-current"]


class Offload:
    """As accelerate's hook: the weights are on meta between calls."""

    execution_device = torch.device("cpu")

    def __init__(self, module: nn.Module) -> None:
        self.weights = dict(module.named_parameters(recurse=False))
        self.calls = 0

    def load(self, module: nn.Module, on_meta: bool) -> None:
        for name, weight in self.weights.items():
            module._parameters[name] = nn.Parameter(weight.to("meta"), weight.requires_grad) if on_meta else weight


def hook(module: nn.Module) -> Offload:
    """As accelerate's `add_hook_to_module`: the forward of before in `_old_forward`, a partial in its place."""
    offload = module._hf_hook = Offload(module)
    module._old_forward = module.forward

    def new_forward(module: nn.Module, *args: object, **named: object) -> Tensor:
        offload.load(module, on_meta=False)
        offload.calls += 1
        y = module._old_forward(*args, **named)
        offload.load(module, on_meta=True)
        return y

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), module._old_forward)
    offload.load(module, on_meta=True)
    return offload


def unhook(module: nn.Module) -> None:
    """As accelerate's `remove_hook_from_module`, which leaves the forward of before on the instance."""
    module._hf_hook.load(module, on_meta=False)
    module.forward = module._old_forward
    del module._old_forward, module._hf_hook


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


@pytest.mark.parametrize("name", NAMES)
def test_linears_under_offloading_hooks_follow_the_recipe(name) -> None:
    m, x = stack(), torch.randn(8, 32)
    plain, twin = m(x), duotone.convert(copy.deepcopy(m), recipes.load(name))
    hooks = [hook(m[0]), hook(m[2])]
    duotone.convert(m, recipes.load(name))
    for _ in range(2):  # with gradients, so that delayed scales move
        y, expected = m(x), twin(x)
        assert torch.equal(y, expected) and not torch.equal(y, plain)
        y.sum().backward()
        expected.sum().backward()
        assert torch.equal(hooks[0].weights["weight"].grad, twin[0].weight.grad)
    assert [one.calls for one in hooks] == [2, 2] and m[0].weight.is_meta
    duotone.revert(m)
    assert torch.equal(m(x), plain) and type(m[0]) is nn.Linear


def test_hooks_can_come_and_go_while_a_model_is_converted() -> None:
    m, x = stack(), torch.randn(8, 32)
    plain, expected = m(x), duotone.convert(copy.deepcopy(m), MXFP8)(x)
    hook(m[0])
    duotone.convert(m, MXFP8)
    unhook(m[0])
    assert torch.equal(m(x), expected)
    hook(m[2])
    assert torch.equal(m(x), expected)
    duotone.revert(m)
    assert torch.equal(m(x), plain)
    unhook(m[2])
    assert torch.equal(m(x), plain)
    assert torch.equal(duotone.convert(m, MXFP8)(x), expected)


def test_experts_under_hooks_follow_the_recipe() -> None:
    torch.manual_seed(0)
    m = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))
    tokens = torch.arange(24).view(2, 12)
    twin = duotone.convert(copy.deepcopy(m), MXFP8)
    experts = m.model.layers[0].mlp.experts
    hook(experts)
    duotone.convert(m, MXFP8)
    assert torch.equal(m(tokens).logits, twin(tokens).logits) and experts._hf_hook.calls == 1
    assert {row.a for row in duotone.plan(m) if row.module.startswith("model.layers.0.mlp.experts.")} == {"mxfp8_e4m3"}
    duotone.revert(m)
    assert torch.equal(m(tokens).logits, duotone.revert(twin)(tokens).logits)


def parallel(module: nn.Module) -> None:
    """As transformers' `tp_plan="auto"`: a closure over the forward of before, around sharded weights."""
    before = module.forward
    module.forward = lambda *args: before(*args)


def test_a_forward_that_another_one_took_the_place_of_is_left_alone_with_a_warning_and_a_row() -> None:
    m, x = stack(), torch.randn(8, 32)
    parallel(m[0])
    parallel(m[2])
    before = m(x)
    with pytest.warns(
        UserWarning, match=r"no linear follows recipe mxfp8; left alone: 0 \(its forward .*, and 1 more; "
    ):
        duotone.convert(m, MXFP8)
    assert torch.equal(m(x), before)
    (reason,) = {row.reason for row in duotone.plan(m)}
    assert "its forward was replaced on the instance by " in reason and reason.endswith("parallel.<locals>.<lambda>")
    with pytest.raises(RecipeError, match="strict: 0 stays in high precision: its forward was replaced"):
        duotone.convert(m, recipes.MXFP8BlockScaling(strict=True))
    m.append(nn.Linear(32, 32))
    with pytest.warns(UserWarning, match="2 of the linears do not follow recipe mxfp8; left alone: 0"):
        duotone.convert(m, MXFP8)


def test_experts_of_which_a_library_took_the_forward_are_a_warning_too() -> None:
    m = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))
    experts = m.model.layers[0].mlp.experts
    before = experts.forward
    experts.forward = functools.partial(lambda *args: before(*args))
    with pytest.warns(
        UserWarning, match=r"1 of the linears do not follow .* model.layers.0.mlp.experts \(.* replaced on"
    ):
        duotone.convert(m, MXFP8)
    assert "planned_down_proj" not in dict(experts.named_children())


def encoder(**options: object) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}], ids=["relu", "gelu"])
def test_an_encoder_in_evaluation_runs_its_converted_linears(options, padded) -> None:
    """Against a copy whose fast path torch itself has turned off."""
    m, x = encoder(**options), torch.randn(3, 6, 32)
    mask = torch.arange(6) >= torch.tensor([[6], [4], [5]]) if padded else None
    twin = duotone.convert(copy.deepcopy(m), MXFP8)
    with torch.no_grad():
        before = m(x, src_key_padding_mask=mask)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            expected, high = twin(x, src_key_padding_mask=mask), m(x, src_key_padding_mask=mask)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        duotone.convert(m, MXFP8)
        y = m(x, src_key_padding_mask=mask)
    real = slice(None) if mask is None else ~mask
    assert torch.allclose(y[real], expected[real], atol=1e-5)  # attention keeps its own fast path
    assert (y[real] - high[real]).abs().max() > 1e-3
    rows = {row.module: row.reason for row in duotone.plan(m) if row.gemm == "-"}
    assert "is off" in rows["layers.0"] and "without calling" in rows["layers.0.self_attn.out_proj"]
    duotone.revert(m)
    with torch.no_grad():
        assert torch.equal(m(x, src_key_padding_mask=mask), before)
    assert {name: vars(part).keys() for name, part in m.named_modules()} == {
        name: vars(part).keys() for name, part in encoder(**options).named_modules()
    }


def test_an_encoder_of_which_nothing_is_converted_keeps_its_fast_path() -> None:
    m = nn.ModuleDict({"encoder": encoder(), "other": nn.Linear(32, 32)})
    for layer in m["encoder"].layers:
        for linear in (layer.linear1, layer.linear2):
            parallel(linear)
    with pytest.warns(UserWarning, match="4 of the linears do not follow"):
        duotone.convert(m, MXFP8)
    assert m["encoder"].use_nested_tensor and m["encoder"].layers[0].activation_relu_or_gelu


class Pool(nn.Module):
    """Attention as CLIP's: the function takes the weights of linears that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.c_proj = (nn.Linear(32, 32) for _ in range(4))
        self.after = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = F.multi_head_attention_forward(
            query=x,
            key=x,
            value=x,
            embed_dim_to_check=32,
            num_heads=2,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
            in_proj_weight=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=self.c_proj.weight,
            out_proj_bias=self.c_proj.bias,
            use_separate_proj_weight=True,
            training=self.training,
            need_weights=False,
        )
        return self.after(y.to(self.after.weight.dtype))


class Indirect(Pool):
    """Attention as WavLM's: the function is in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.after.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x) + self.after(x)

    def attend(self, x: Tensor) -> Tensor:
        return F.linear(x, self.q_proj.weight, self.q_proj.bias)


class Calling(Indirect):
    """Calls what the class before it only read."""

    def attend(self, x: Tensor) -> Tensor:
        return self.q_proj(x)


class Filled(nn.Module):
    """Fills a linear that others call."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def _init_weights(self) -> None:
        nn.init.zeros_(self.proj.weight)


class Called(nn.Module):
    """Reads a weight and calls the linear too, by way of a method."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) + self.proj.weight.sum()

    def project(self, x: Tensor) -> Tensor:
        return self.proj(x)


def test_linears_whose_owner_reads_their_weight_are_no_rows_of_low_precision() -> None:
    m, x = nn.ModuleDict({"pool": Pool(), "called": Called()}), torch.randn(5, 2, 32)
    before = m["pool"](x)
    duotone.convert(m, MXFP8)
    rows = {row.module: row for row in duotone.plan(m)}
    for part in ("q_proj", "k_proj", "v_proj", "c_proj"):
        assert rows[f"pool.{part}"].reason == "its owner uses the weight without calling the module"
    assert rows["pool.after"].a == rows["called.proj"].a == "mxfp8_e4m3"
    assert not torch.equal(m["pool"](x), before)
    duotone.revert(m)
    assert torch.equal(m["pool"](x), before)


def test_only_a_weight_that_is_read_and_never_called_counts() -> None:
    assert bypassed_children(nn.MultiheadAttention) == {"out_proj"}
    assert bypassed_children(Pool) == {"q_proj", "k_proj", "v_proj", "c_proj"}
    assert bypassed_children(Indirect) >= {"q_proj"} and "after" not in bypassed_children(Indirect)
    assert (
        bypassed_children(Filled) == bypassed_children(Called) == bypassed_children(nn.TransformerDecoderLayer) == set()
    )
