"""On a CUDA device: awkward and bad inputs give the right result or one clear error, and the module stays usable."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import duotone
from duotone import formats, recipes
from duotone.errors import UserError
from duotone.tensor import Quantizer

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
RECIPES = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
NAMES = [name for name in formats.names() if not name.endswith("delayed") and "_sr" not in name and name != "identity"]


def linear(name: str, k: int = 512, n: int = 384, dtype: torch.dtype = torch.bfloat16) -> duotone.Linear:
    torch.manual_seed(3)
    return duotone.Linear(k, n, device="cuda", params_dtype=dtype, recipe=recipes.load(name))


def step(module: torch.nn.Module, x: Tensor, scale: float = 1.0) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y) * scale)]


@pytest.mark.parametrize("name", RECIPES)
def test_an_input_that_is_not_contiguous_is_as_good_as_its_copy(name) -> None:
    wide = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    for view in (wide[:, ::2], wide[:, 512:], torch.randn(512, 256, device="cuda", dtype=torch.bfloat16).t()):
        for a, b in zip(step(linear(name), view), step(linear(name), view.contiguous()), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(33, 72, 40), (17, 100, 52), (1, 8, 8), (0, 64, 32), (5, 1032, 520)], ids=str)
def test_sizes_that_no_tensor_core_takes(name, shape) -> None:
    m, k, n = shape
    module = linear(name, k, n)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    y, dx, dw, db = step(module, x)
    assert (y.shape, dx.shape, dw.shape, db.shape) == ((m, n), (m, k), (n, k), (n,))
    want = x.double() @ module.weight.double().t() + module.bias.double()
    if m:
        error = (y.double() - want).norm() / want.norm()
        assert error < (0.2 if name == "nvfp4" else 0.06)  # the formats' own: 0.037 for E4M3, 0.13 for E2M1


@pytest.mark.parametrize("name", RECIPES)
def test_an_input_on_another_device_is_one_clear_error(name) -> None:
    module = linear(name)
    x = torch.randn(256, 512, dtype=torch.bfloat16)
    with pytest.raises(UserError, match="cpu") as caught:
        module(x)
    assert "\n" not in str(caught.value)
    assert step(module, x.cuda())[0].isfinite().all()


@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-current", "fp8-block"])
def test_out_of_memory_in_a_backward_leaves_the_module_usable(name) -> None:
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    module, twin = linear(name, 4096, 4096), linear(name, 4096, 4096)
    twin(x)  # as the module's forward whose backward fails
    want = step(twin, x)
    y = module(x.detach().requires_grad_())
    dy = torch.ones_like(y)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            y.backward(dy)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for a, b in zip(step(module, x), want, strict=True):
        assert torch.equal(a, b)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes_and_strides_have_the_bits_of_the_plain_stages(data) -> None:
    fmt = formats.get(data.draw(st.sampled_from(NAMES)))
    m, k = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    down, across = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float16]))
    spread = data.draw(st.floats(0, 12))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(m * down, k * across, generator=generator)
    x = (x * torch.exp2(spread * torch.randn(x.shape, generator=generator))).to(dtype)
    here, there = x[::down, ::across], x.cuda()[::down, ::across]
    if data.draw(st.booleans()):
        here, there = here.t(), there.t()
    row, col = Quantizer(fmt, fmt).encode(there)
    plain = fmt.encode(here)
    turned = fmt.derive(plain, here.shape[1]) if fmt.is_derivable else fmt.encode(here.t(), plane="col")
    assert row is not None and col is not None and turned is not None
    for made, want in ((row.parts, plain), (col.parts, turned)):
        for part, value in want.items():
            got = made[part].cpu()
            assert got.shape == value.shape
            assert torch.equal(got.float().nan_to_num(-1.0), value.float().nan_to_num(-1.0)), (fmt.name, part)
