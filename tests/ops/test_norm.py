"""LayerNorm, RMSNorm and L2Normalization: torch's bits, float64's values."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from duotone import UserError, ops

TORCH = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
NORMS = {"LayerNorm": ops.LayerNorm, "RMSNorm": ops.RMSNorm, "L2Normalization": ops.L2Normalization}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(33, 96), (2, 3, 97), (2, 1, 3, 8), (1, 1), (0, 96), (2, 0, 5), (7,)]


def same(result: Tensor | None, want: Tensor | None) -> None:
    """Equal bit for bit, NaN included."""
    assert (result is None) == (want is None)
    if result is not None and want is not None:
        assert result.shape == want.shape and result.dtype == want.dtype
        assert_close(result, want, rtol=0, atol=0, equal_nan=True)


def pair(kind: str, width: int, dtype: torch.dtype, eps: float = 1e-5) -> tuple[nn.Module, nn.Module]:
    """Our module and torch's, with the same random parameters."""
    norm, torch_norm = NORMS[kind](width, eps=eps, dtype=dtype), TORCH[kind](width, eps=eps, dtype=dtype)
    with torch.no_grad():
        for parameter in torch_norm.parameters():
            parameter.normal_()
    norm.load_state_dict(torch_norm.state_dict())
    return norm, torch_norm


def outcome(module, x: Tensor, dy: Tensor, input_grad: bool = True) -> list[Tensor | None]:
    leaf = x.detach().clone().requires_grad_(input_grad) if x.is_contiguous() else x.detach().requires_grad_(input_grad)
    y = module(leaf)
    if y.requires_grad:
        y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", TORCH)
def test_values_and_gradients_have_the_bits_of_torch(kind, dtype, shape) -> None:
    norm, torch_norm = pair(kind, shape[-1], dtype)
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    for result, want in zip(outcome(norm, x, dy), outcome(torch_norm, x, dy), strict=True):
        same(result, want)


@pytest.mark.parametrize("kind", TORCH)
def test_a_float64_module_computes_in_float64(kind) -> None:
    """An Identity model in float64 is the unquantized model bit for bit."""
    norm, torch_norm = pair(kind, 24, torch.float64)
    x, dy = torch.randn(5, 24, dtype=torch.float64), torch.randn(5, 24, dtype=torch.float64)
    for result, want in zip(outcome(norm, x, dy), outcome(torch_norm, x, dy), strict=True):
        same(result, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", TORCH)
def test_nan_infinity_and_denormals_have_the_bits_of_torch(awkward, kind, dtype) -> None:
    norm, torch_norm = pair(kind, 160, dtype)
    x = awkward.to(dtype)
    for dy in (torch.randn(x.shape).to(dtype), x.flip(0)):
        for module in (norm, torch_norm):
            module.zero_grad()
        for result, want in zip(outcome(norm, x, dy), outcome(torch_norm, x, dy), strict=True):
            same(result, want)


@pytest.mark.parametrize("kind", TORCH)
def test_strided_and_expanded_tensors_have_the_bits_of_torch(kind) -> None:
    x = torch.randn(96, 33).t()
    wide, sliced = torch.randn(33, 192), torch.randn(2, 33, 96).transpose(0, 1)
    for inputs in (x, wide[:, ::2], sliced, torch.randn(96).expand(4, 96)):
        gradients = (
            torch.randn(inputs.shape),
            torch.randn(*inputs.shape[:-1], 192)[..., ::2],
            torch.ones(()).expand(inputs.shape),
        )
        for dy in gradients:
            norm, torch_norm = pair(kind, 96, torch.float32)
            for result, want in zip(outcome(norm, inputs, dy), outcome(torch_norm, inputs, dy), strict=True):
                same(result, want)


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_every_combination_of_gradients_leaves_the_others_as_they_are(kind, needs) -> None:
    module = NORMS[kind](**({} if kind == "L2Normalization" else {"normalized_shape": 24}))
    parameters = list(module.parameters())
    x, dy = torch.randn(5, 24), torch.randn(5, 24)
    everything = outcome(module, x, dy)
    module.zero_grad()
    for parameter, needed in zip(parameters, needs[1:], strict=False):
        parameter.requires_grad_(needed)
    masks = [True, needs[0], *needs[1 : 1 + len(parameters)]]
    for result, want, needed in zip(outcome(module, x, dy, needs[0]), everything, masks, strict=True):
        same(result, want if needed else None)


def reference(kind: str, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Tensor:
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    scale = x.square().sum(-1, keepdim=True) if kind == "L2Normalization" else x.square().mean(-1, keepdim=True)
    y = x * torch.rsqrt(scale + eps)
    y = y if gamma is None else y * gamma
    return y if beta is None else y + beta


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_values_and_gradients_are_float64_autograd_within_a_few_roundings(kind, dtype, zero_centered) -> None:
    """Bound: 8 roundings of the dtype, and 64 of fp32 for the sums, of the largest magnitude in the result."""
    k = 97
    if kind == "L2Normalization":
        module = ops.L2Normalization(eps=1e-3)
    else:
        module = NORMS[kind](k, eps=1e-3, zero_centered_gamma=zero_centered, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    x, dy = torch.randn(2, 9, k).to(dtype), torch.randn(2, 9, k).to(dtype)
    result = outcome(module, x, dy)
    wide = [x.double().requires_grad_(), *(p.detach().double().requires_grad_() for p in module.parameters())]
    gamma = (1 + wide[1] if zero_centered else wide[1]) if len(wide) > 1 else None
    y = reference(kind, wide[0], gamma, wide[2] if len(wide) > 2 else None, 1e-3)
    y.backward(dy.double())
    bound = 8 * torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps
    for rounded, exact in zip(result, [y.detach(), *(t.grad for t in wide)], strict=True):
        assert rounded.dtype == dtype and (rounded.double() - exact).abs().max() <= bound * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", TORCH)
def test_a_zero_centred_gamma_is_one_plus_gamma_in_fp32(kind, dtype) -> None:
    """A tiny gamma in bf16 is not lost, as 1 + gamma rounded to bf16 would be."""
    norm = NORMS[kind](96, zero_centered_gamma=True, dtype=dtype)
    assert not norm.weight.any()
    with torch.no_grad():
        norm.weight.fill_(2.0**-11)
    torch_norm = TORCH[kind](96, eps=1e-5)
    with torch.no_grad():
        torch_norm.weight.copy_(1 + norm.weight.float())
    x, dy = torch.randn(9, 96).to(dtype), torch.randn(9, 96).to(dtype)
    result, want = outcome(norm, x, dy), outcome(torch_norm, x.float(), dy.float())
    for a, b in zip(result, want, strict=True):
        same(a, b.to(dtype))


def test_epsilon_decides_what_a_zero_row_and_a_tiny_row_give() -> None:
    x = torch.zeros(2, 8)
    x[1] = 1e-6
    for kind in TORCH:
        for eps in (1e-12, 1e-5, 1.0):
            norm, torch_norm = pair(kind, 8, torch.float32, eps)
            same(norm(x), torch_norm(x))
    assert not ops.L2Normalization()(torch.zeros(2, 8)).any()


@pytest.mark.parametrize("kind", TORCH)
def test_parameters_names_defaults_and_reset_are_torchs(kind) -> None:
    norm, torch_norm = NORMS[kind](24), TORCH[kind](24)
    assert list(norm.state_dict()) == list(torch_norm.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(norm.parameters(), torch_norm.parameters(), strict=True))
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.fill_(7)
    norm.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(norm.parameters(), torch_norm.parameters(), strict=True))
    meta = NORMS[kind](24, device="meta", params_dtype=torch.bfloat16)
    assert meta.weight.is_meta and meta.weight.dtype == torch.bfloat16


def test_bad_shapes_and_widths_are_one_line() -> None:
    with pytest.raises(UserError, match=r"LayerNorm normalises the last dimension; got \(4, 8\)"):
        ops.LayerNorm((4, 8))
    with pytest.raises(UserError, match=r"RMSNorm takes \(..., 8\); got \(..., 9\)"):
        ops.RMSNorm(8)(torch.zeros(2, 9))
    with pytest.raises(UserError, match="takes a tensor"):
        ops.LayerNorm(8)("x")
