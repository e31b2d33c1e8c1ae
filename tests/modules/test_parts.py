"""Modules made of others: what is put in their place counts, hooks fire, and no call that failed leaves a trace."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import ops, recipes
from duotone.errors import UserError
from duotone.modules.moe import Routing


class Doubled(nn.Module):
    """A wrapper that is no op."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


def one_by_one(mlp: duotone.LayerNormMLP, x: torch.Tensor) -> torch.Tensor:
    h = nn.functional.layer_norm(x, (32,), mlp.layer_norm_weight, mlp.layer_norm_bias)
    return mlp.fc2(mlp.activation(mlp.fc1(h)))


WRAPS = {"linear": lambda m: duotone.Linear(32, 64), "wrapper": Doubled, "torch": lambda m: nn.Linear(32, 64)}


@pytest.mark.parametrize("name", WRAPS)
def test_a_linear_that_is_replaced_is_the_one_that_runs_and_learns(name) -> None:
    mlp, x = duotone.LayerNormMLP(32, 64), torch.randn(8, 32)
    mlp(x)
    mlp.fc1 = WRAPS[name](mlp.fc1)
    mlp.activation = ops.ReLU()
    y = mlp(x)
    assert torch.equal(y, one_by_one(mlp, x))
    y.sum().backward()
    assert all(p.grad is not None for p in mlp.fc1.parameters())


@pytest.mark.parametrize("kind", ["mlp", "moe", "sequential"])
def test_hooks_on_inner_linears_fire_and_change_no_bit(kind) -> None:
    mlp, moe = duotone.LayerNormMLP(32, 64), duotone.MoE(32, 64, 4)
    module = {"mlp": mlp, "moe": moe, "sequential": ops.Sequential(mlp)}[kind]
    x, calls = torch.randn(8, 32, requires_grad=True), []
    want = module(x)
    (moe if kind == "moe" else mlp).fc1.register_forward_hook(lambda m, a, y: calls.append("forward"))
    (moe if kind == "moe" else mlp).fc2.register_full_backward_hook(lambda m, a, y: calls.append("backward"))
    y = module(x)
    y.sum().backward()
    assert torch.equal(y, want) and calls == ["forward", "backward"]


def fused(**options) -> duotone.Linear:
    m = duotone.Linear(32, 64, fuse_wgrad_accumulation=True, **options)
    m.weight.main_grad = torch.full((64, 32), 100.0)
    return m


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_first_microbatch_overwrites_main_grad_under_recompute(reentrant) -> None:
    m, x = fused(), torch.randn(4, 32, requires_grad=True)
    checkpoint(lambda t: m(t, is_first_microbatch=True), x, use_reentrant=reentrant).sum().backward()
    want = torch.ones(4, 64).t() @ x.detach()
    assert torch.allclose(m.weight.main_grad, want, atol=1e-4)  # fp32 sums of four terms in another order


def test_a_refused_first_microbatch_does_not_overwrite_what_comes() -> None:
    m, x = fused(), torch.randn(4, 32)
    y = m(x, is_first_microbatch=False)
    with pytest.raises(UserError):
        ops.Sequential(m, ops.Linear(32, 8))(x, is_first_microbatch=True)
    y.sum().backward()
    assert m.weight.main_grad.min() > 50  # still there below the gradient, whose elements are sums of four


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_an_optimizer_step_makes_kept_planes_anew(options) -> None:
    m, x = duotone.Linear(32, 64, recipe=recipes.load("mxfp8")), torch.randn(4, 32)
    m(x, is_first_microbatch=True).sum().backward()
    torch.optim.AdamW(m.parameters(), lr=0.5, **options).step()
    assert torch.equal(m(x, is_first_microbatch=False), m(x))


FROM_META = {
    "moe": lambda: duotone.MoE(16, 32, 4),
    "norm": lambda: duotone.RMSNorm(16),
    "bias": lambda: ops.Bias(16),
    "mlp": lambda: duotone.LayerNormMLP(16, 32),
    "layer": lambda: duotone.TransformerLayer(16, 32, 2, hidden_dropout=0.0, attention_dropout=0.0),
}


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
def test_reset_parameters_brings_quantized_weights_and_their_scales_from_meta(recipe: str) -> None:
    with duotone.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        module = duotone.LayerNormMLP(32, 64, device="meta")
        real = duotone.LayerNormMLP(32, 64)
    module.reset_parameters()
    values, codes = module.fc1.weight.get_high_precision_init_val(), module.fc1.weight.dequantize()
    assert not torch.equal(values, codes) and torch.allclose(values, codes, rtol=2**-4, atol=2**-9)
    module.load_state_dict(real.state_dict())
    x = torch.randn(32, 32)
    with duotone.autocast(recipe=recipe):
        assert torch.equal(module(x), real(x))


@pytest.mark.parametrize("name", FROM_META)
def test_reset_parameters_brings_a_module_from_meta(name) -> None:
    with torch.device("meta"):
        module = FROM_META[name]()
    module.reset_parameters()
    assert all(not p.is_meta and p.isfinite().all() and p.abs().max() < 2 for p in module.parameters())
    assert module(torch.randn(4, 1, 16)).isfinite().all()


@pytest.mark.parametrize("experts", [4, 5, 9])
def test_a_routing_counts_the_rows_of_each_expert(experts) -> None:
    index = torch.tensor([[0, 3], [2, 3], [0, 3]])
    routing = Routing.of(index, experts)
    want = tuple((index == e).sum().item() for e in range(experts))
    assert routing.splits == want == tuple(routing.counts.tolist())
    assert (
        Routing.of(index[:0], experts).counts.tolist() == list(Routing.of(index[:0], experts).splits) == [0] * experts
    )
    with pytest.raises(UserError, match="routed to expert 3; there are 2"):
        _ = Routing.of(index, 2).splits


def test_what_a_mixture_cannot_route_is_refused_in_one_line() -> None:
    moe = duotone.MoE(16, 32, 4)
    for x, text in ((torch.tensor(1.0), r"MoE takes \(..., 16\); got \(\)"), (torch.ones(3, 8), r"got \(3, 8\)")):
        with pytest.raises(UserError, match=text):
            moe(x)
    moe.fc1 = duotone.GroupedLinear(8, 16, 64, bias=False)
    with pytest.raises(UserError, match="m_splits needs 8 row counts"):
        moe(torch.ones(3, 16))
    with pytest.raises(UserError, match="tokens on meta are routed nowhere"):
        moe.to("meta")(torch.ones(3, 16, device="meta"))


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_output_of_a_mixture_can_be_written_in_place(top_k: int) -> None:
    moe, x = duotone.MoE(16, 32, 4, top_k=top_k), torch.randn(8, 16)
    expected = torch.autograd.grad((moe(leaf := x.clone().requires_grad_()) * 2).sum(), leaf)[0]
    y = moe(leaf := x.clone().requires_grad_())
    y.mul_(2)
    assert torch.equal(torch.autograd.grad(y.sum(), leaf)[0], expected)


def test_a_role_for_a_part_that_takes_none_is_refused() -> None:
    """What a user put in the place of a linear has no slots."""
    mlp, role = duotone.LayerNormMLP(32, 64), duotone.QuantizerRole("linear", "input", "next")
    mlp.fc2 = nn.Linear(64, 32)
    with pytest.raises(UserError, match="LayerNormMLP has no slot for output_quantizer_role: a Linear stands at its"):
        mlp.output_quantizer_role = role
    assert mlp.output_quantizer_role is None and not hasattr(mlp.fc2, "output_quantizer_role")
    mlp.grad_input_quantizer_role = role
    assert mlp.fc1.grad_input_quantizer_role == role


def test_a_mixture_on_meta_takes_no_memory_and_becomes_real() -> None:
    """core 81: its router too."""
    module = duotone.MoE(32, 64, 4, device="meta")
    assert all(p.is_meta for p in module.parameters())
    module.reset_parameters()
    assert not any(p.is_meta for p in module.parameters())
    assert abs(module.router.weight.std() * 32**0.5 - 1) < 0.4  # 128 values of a deviation of 32 ** -0.5
    assert module(torch.randn(6, 32)).isfinite().all()
