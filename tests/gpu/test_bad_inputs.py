"""On a CUDA device: awkward and bad inputs give the right result or one clear error, and the module stays usable."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import duotone
from duotone import formats, recipes
from duotone.dispatch import target as targets
from duotone.errors import UserError
from duotone.tensor import Quantizer
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane_encoder import encode_plane

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


class Experts(torch.nn.Module):
    """A grouped linear whose rows are split evenly."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.linear = duotone.GroupedLinear(4, 4096, 4096, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, [x.shape[0] // 4] * 4)


def large(kind: str, name: str) -> torch.nn.Module:
    options = {"device": "cuda", "params_dtype": torch.bfloat16, "recipe": recipes.load(name)}
    torch.manual_seed(3)
    if kind == "mlp":
        return duotone.LayerNormMLP(4096, 8192, activation="swiglu", normalization="RMSNorm", bias=False, **options)
    return Experts(**options) if kind == "experts" else duotone.Linear(4096, 4096, **options)


@pytest.mark.parametrize("kind", ["linear", "mlp", "experts"])
@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-current", "fp8-block"])
def test_out_of_memory_in_a_backward_leaves_the_module_usable(name, kind) -> None:
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    module, twin = large(kind, name), large(kind, name)
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


def pair(data: st.DataObject, m: int, k: int, spread: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A random matrix (m, k) with random strides, on the CPU and on the device."""
    down, across = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    turned = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    shape = (k * down, m * across) if turned else (m * down, k * across)
    x = torch.randn(shape, generator=generator)
    x = (x * torch.exp2(spread * torch.randn(shape, generator=generator))).to(dtype)
    cpu, cuda = (t[::down, ::across] for t in (x, x.cuda()))
    return (cpu.t(), cuda.t()) if turned else (cpu, cuda)


RANDOM = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.integers(1, 300)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@settings(RANDOM, max_examples=30)  # most of them compile kernels, for a second or two
@given(data=st.data())
def test_random_shapes_and_strides_have_the_bits_of_the_plain_stages(dtype, data) -> None:
    fmt = formats.get(data.draw(st.sampled_from(NAMES)))
    cpu, cuda = pair(data, data.draw(SIZES), data.draw(SIZES), data.draw(st.floats(0, 12)), dtype)
    row, col = Quantizer(fmt, fmt).encode(cuda, ctx=QuantizeContext(propagate=False))
    plain = fmt.encode(cpu)
    turned = fmt.derive(plain, cpu.shape[1]) if fmt.is_derivable else fmt.encode(cpu.t(), plane="col")
    assert row is not None and col is not None and turned is not None
    for result, want in ((row.parts, plain), (col.parts, turned)):
        for part, value in want.items():
            output = result[part].cpu()
            assert output.shape == value.shape
            assert torch.equal(output.float().nan_to_num(-1.0), value.float().nan_to_num(-1.0)), (fmt.name, part)
    for plane, parts in ((row, plain), (col, turned)):
        output, want = plane.values(dtype).cpu(), fmt.decode(parts, dtype)
        assert torch.equal(output.nan_to_num(-1.0), want.nan_to_num(-1.0)), fmt.name


@settings(RANDOM, max_examples=60)
@given(data=st.data())
def test_a_linear_of_random_shapes_and_strides_multiplies_what_its_planes_hold(data) -> None:
    """Forward and input gradient against float64 products of the decoded planes."""
    recipe = recipes.load(data.draw(st.sampled_from([name for name in RECIPES if name != "fp8-delayed"])))
    m, k, n = (data.draw(SIZES) for _ in range(3))
    _, x = pair(data, m, k, 1.0, torch.bfloat16)
    module = duotone.Linear(k, n, bias=False, device="cuda", params_dtype=torch.bfloat16, recipe=recipe)
    x = x.detach().requires_grad_()
    y = module(x)
    _, dy = pair(data, m, n, 1.0, torch.bfloat16)
    (dx,) = torch.autograd.grad(y, [x], dy)
    plan = module.plan_for(x)
    rounded = recipe.name == "nvfp4"  # whose gradients are rounded at random
    for result, a, b, gemm in ((y, x.detach(), module.weight, plan.fprop), (dx, dy, module.weight.t(), plan.dgrad)):
        if result is dx and rounded:
            assert result.isfinite().all()
            continue
        left, right = (
            encode_plane(f, t.detach().contiguous()).dequantize(torch.float32) for f, t in ((gemm.a, a), (gemm.b, b))
        )
        exact, size = left.double() @ right.double().t(), left.double().abs() @ right.double().abs().t()
        # bf16's rounding, and Hopper's fast sums: each of up to 300 / 32 steps may lose 2^-11 of what there is.
        assert ((result.double() - exact).abs() <= exact.abs() * 2**-8 + size * 2**-7 + 1e-30).all(), recipe.name


@pytest.fixture
def ampere(monkeypatch):
    """As on compute capability 8.0, where no kernel compiles."""
    cached = targets.cuda_target, targets.runs_kernels
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (8, 0))
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


@pytest.mark.parametrize("name", RECIPES)
def test_a_device_that_does_not_convert_to_fp8_multiplies_what_torch_decodes(name, monkeypatch, ampere) -> None:
    """No native product, and the CPU's planes."""
    module = linear(name)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    assert not any(row.native for row in duotone.plan(module, device="cuda", dtype=torch.bfloat16))
    with no_launches(monkeypatch):
        y, *gradients = step(module, x)
    twin = linear(name).cpu()
    want = step(twin, x.cpu())[0]
    assert all(g.isfinite().all() for g in gradients)
    # The same planes; cuBLAS sums in another order, and bf16 rounds.
    assert ((y.cpu().double() - want.double()).abs() <= want.double().abs() * 2**-7 + 2**-7).all()


@contextlib.contextmanager
def no_launches(monkeypatch) -> Iterator[None]:
    from duotone.kernels import launch

    def refuse(*_: object) -> None:
        raise AssertionError("a kernel was launched")

    with monkeypatch.context() as patch:
        patch.setattr(launch.Launch, "__call__", refuse)
        yield
