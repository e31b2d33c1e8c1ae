"""On a CUDA device: norms made by kernels are those of float64, and a cast makes the same bits on its way."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import formats, recipes
from duotone.dispatch.norms import NORMS, WIDEST
from duotone.tensor import Quantizer
from duotone.tensor.context import LOCAL, QuantizeContext, Slot
from duotone.tensor.plane import Usage, encode_once

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
EPS = 1e-5
KINDS = ["LayerNorm", "RMSNorm"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (1, 4096), (64, 256), (33, 72), (5, 1000), (300, 4096), (2, 3, 96), (7, WIDEST), (20000, 128), (96,)]
FORMATS = [
    "fp8_e4m3_delayed",
    "fp8_e4m3_tensor",
    "fp8_e4m3_tensor_pow2",
    "fp8_e4m3_row",
    "fp8_e4m3_1x128",
    "fp8_e5m2_128x128",
    "mxfp8_e4m3",
    "nvfp4",
]


def inputs_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """x with a mean, gamma around 1, and beta for LayerNorm."""
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    x, gamma, beta = (torch.randn(size, device="cuda", generator=generator) for size in (shape, shape[-1:], shape[-1:]))
    return (x * 3 + 1).to(dtype), (1 + gamma / 4).to(dtype), beta.to(dtype) if kind == "LayerNorm" else None


def exact(kind: str, x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    """In float64."""
    centred = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    y = y if gamma is None else y * gamma
    return y if beta is None else y + beta


def same(a: Tensor, b: Tensor) -> None:
    """Bit for bit, NaN included."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen's norms are out of reach."""

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("ATen")

    for cls in (NORMS[kind].__class__ for kind in KINDS):
        monkeypatch.setattr(cls, "forward", refuse)
        monkeypatch.setattr(cls, "backward", refuse)


def by_kernels(kind: str, x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> tuple[Tensor, ...]:
    """y, and what backward needs."""
    from duotone.kernels.norms import Norm

    norm = Norm(x.reshape(-1, x.shape[-1]).contiguous(), gamma, beta, EPS, NORMS[kind].centred, x.shape[:-1])
    return norm.make().view(x.shape), *norm.saved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("kernels_only")
def test_norms_are_those_of_float64(kind, shape, dtype) -> None:
    x, gamma, beta = inputs_of(kind, shape, dtype)
    dy = torch.randn(shape, device="cuda").to(dtype)
    y, *saved = by_kernels(kind, x, gamma, beta)
    output = NORMS[kind].backward_of_produced(dy, x, gamma, beta, saved, (True, True, beta is not None))
    leaves = [t.double().requires_grad_() for t in (x, gamma, *([] if beta is None else [beta]))]
    want = exact(kind, leaves[0], leaves[1], None if beta is None else leaves[2])
    gradients = torch.autograd.grad(want, leaves, dy.double())
    # One rounding to the dtype, and fp32 sums over a row or over the rows.
    step, rows = torch.finfo(dtype).eps, x.numel() // shape[-1]
    assert y.dtype is dtype and y.shape == x.shape
    assert all(one.dtype is torch.float32 and one.shape == (*shape[:-1], 1) for one in saved)
    torch.testing.assert_close(y.double(), want.detach(), rtol=step, atol=step + 1e-5)
    slopes = gradients[0].abs().amax().item()  # large for a row of one element, whose variance is 0
    torch.testing.assert_close(output[0].double(), gradients[0], rtol=2 * step, atol=step + 1e-4 * (1 + slopes))
    for result, right in zip(output[1:], gradients[1:], strict=False):
        assert result.dtype is dtype and result.shape == right.shape
        torch.testing.assert_close(result.double(), right, rtol=step, atol=1e-5 * rows**0.5 * 8 + step)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("kernels_only")
def test_without_parameters_and_from_strided_tensors(kind) -> None:
    x = torch.randn(96, 40, device="cuda").t()
    y, *saved = by_kernels(kind, x, None, None)
    torch.testing.assert_close(y.double(), exact(kind, x.double(), None, None), rtol=1e-5, atol=1e-5)
    dx, dgamma, dbeta = NORMS[kind].backward_of_produced(
        torch.ones((), device="cuda").expand(40, 96), x, None, None, saved, [True] * 3
    )
    leaf = x.double().requires_grad_()
    (want,) = torch.autograd.grad(exact(kind, leaf, None, None).sum(), leaf)
    torch.testing.assert_close(dx.double(), want, rtol=1e-4, atol=1e-5)
    assert dgamma is None and dbeta is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("kernels_only")
def test_only_the_gradients_that_are_asked_for_are_made(kind) -> None:
    x, gamma, beta = inputs_of(kind, (300, 64), torch.bfloat16)
    _, *saved = by_kernels(kind, x, gamma, beta)
    everything = NORMS[kind].backward_of_produced(x, x, gamma, beta, saved, (True, True, True))
    for needs in ((True, False, True), (False, True, False), (True, False, False), (False, True, True)):
        for result, full, need in zip(
            NORMS[kind].backward_of_produced(x, x, gamma, beta, saved, needs), everything, needs, strict=True
        ):
            assert (result is None) == (full is None or not need)
            if result is not None:
                same(result, full)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("kernels_only")
def test_rows_with_nan_and_infinities_harm_no_other_row(kind, dtype) -> None:
    x, gamma, beta = inputs_of(kind, (64, 256), dtype)
    clean, *_ = by_kernels(kind, x, gamma, beta)
    x[3, 5], x[4, 7], x[5, 0], x[6] = torch.nan, torch.inf, -torch.inf, 0.0
    y, *saved = by_kernels(kind, x, gamma, beta)
    want = exact(kind, x.double(), gamma.double(), None if beta is None else beta.double())
    assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y[7:], clean[7:]) and torch.equal(y[:3], clean[:3])
    dx, dgamma, _ = NORMS[kind].backward_of_produced(torch.ones_like(x), x, gamma, beta, saved, (True, True, True))
    assert dx[7:].isfinite().all() and dx[3].isnan().all() and dgamma.isnan().any()


def test_wider_rows_and_other_dtypes_of_parameters_are_for_aten() -> None:
    wide, (x, gamma, beta) = (inputs_of("LayerNorm", shape, torch.half) for shape in ((3, WIDEST + 16), (8, 64)))
    for args in (wide, (x.float(), gamma, beta)):
        assert NORMS["LayerNorm"].produced(*args, EPS) is None
    _, *saved = NORMS["LayerNorm"].forward(*wide, EPS)
    plain = NORMS["LayerNorm"].backward(wide[0], *wide, saved, (True, True, True))
    for a, b in zip(
        NORMS["LayerNorm"].backward_of_produced(wide[0], *wide, saved, (True, True, True)), plain, strict=True
    ):
        same(a, b)


class RecordingSlot(Slot):
    """A scale, and where the cast records the amax."""

    def __init__(self) -> None:
        self.scale = torch.full((1,), 37.5, device="cuda")
        self.live = torch.zeros(1, dtype=torch.int32, device="cuda")

    def place(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.scale, self.live


BOTH = Usage(True, True)
CASES = [
    *[(shape, torch.bfloat16, BOTH) for shape in ((128, 256), (130, 384), (1, 512), (33, 80), (70, 4096), (9, 8192))],
    *[((130, 384), dtype, BOTH) for dtype in DTYPES[1:]],
    *[((130, 384), torch.bfloat16, usage) for usage in (Usage(True, False), Usage(False, True))],
]


@pytest.mark.parametrize(("shape", "dtype", "usage"), CASES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cast_on_the_way_has_the_bits_of_a_cast_after(kind, fmt, shape, dtype, usage) -> None:
    x, gamma, beta = inputs_of(kind, shape, dtype)
    x[0, :3] = torch.tensor([0.0, 3e4, -1e-4])
    if shape[0] > 8:
        x[3, 5], x[4, 7], x[6] = torch.nan, torch.inf, 0.0
    outcome, quantizer = formats.get(fmt), Quantizer(formats.get(fmt), formats.get(fmt))
    slots = [RecordingSlot() if outcome.is_delayed else None for _ in range(2)]
    contexts = [LOCAL if slot is None else QuantizeContext(slots=(slot, slot)) for slot in slots]
    y, *saved = by_kernels(kind, x, gamma, beta)
    outcomes = (outcome if one else None for one in usage)
    after = encode_once(*outcomes, y, contexts[0])
    result = NORMS[kind].produced(x, gamma, beta, EPS)
    on_the_way = quantizer.encode_produced(result, usage, contexts[1])
    assert after is not None and on_the_way is not None
    for a, b in zip(after, on_the_way, strict=True):
        assert (a is None) == (b is None)
        for part in () if a is None else a.parts:
            same(a.parts[part], b.parts[part])
    for a, b in zip(saved, result.saved, strict=True):
        same(a, b)
    if slots[0] is not None:
        assert slots[0].live.item() == slots[1].live.item() > 0


def step(module: nn.Module, x: Tensor, recipe: str) -> list[Tensor]:
    """Outputs, gradients and scales of two steps."""
    results: list[Tensor] = []
    for i in range(2):
        leaf = (x * (1 + i)).requires_grad_()
        with duotone.autocast(recipe=recipes.load(recipe)):
            y = module(leaf)
        outputs = y if isinstance(y, tuple) else (y,)
        total = sum(out.float().square().sum() for out in outputs)
        results += [*(out.detach() for out in outputs), *torch.autograd.grad(total, [leaf, *module.parameters()])]
    return results


def build(kind: str, normalization: str, **more: Any) -> nn.Module:
    torch.manual_seed(3)
    common = {"normalization": normalization, "device": "cuda", "params_dtype": torch.bfloat16, **more}
    if kind == "linear":
        return duotone.LayerNormLinear(256, 384, name="a", **common)
    return duotone.LayerNormMLP(256, 512, activation="swiglu", name="a", **common)


@pytest.mark.parametrize("recipe", recipes.names())
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_step_with_and_without_the_fusion_is_the_same(kind, recipe, monkeypatch) -> None:
    """Bit for bit."""
    from duotone.kernels.activations import materialize

    on_the_way = Quantizer.encode_produced

    def made_first(quantizer: Quantizer, produced: Any, *how: Any) -> Any:
        planes = on_the_way(quantizer, produced, *how)  # records the same amax
        return None if planes is None else quantizer.encode(materialize(produced), *how)

    x = torch.randn(160, 256, device="cuda").bfloat16()
    for normalization in KINDS:
        fused = step(build(kind, normalization), x, recipe)
        monkeypatch.setattr(Quantizer, "encode_produced", made_first)
        apart = step(build(kind, normalization), x, recipe)
        monkeypatch.undo()
        for a, b in zip(fused, apart, strict=True):
            assert a.isfinite().all() and torch.equal(a, b)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_planes_that_backward_makes_again_are_those_of_forward(recipe) -> None:
    x = torch.randn(160, 256, device="cuda").bfloat16()
    for normalization in KINDS:
        results = []
        for again in (False, True):
            torch.manual_seed(3)
            chosen = replace(recipes.load(recipe), recompute_columnwise=again)
            module = duotone.LayerNormMLP(
                256, 512, activation="swiglu", normalization=normalization, device="cuda",
                params_dtype=torch.bfloat16, recipe=chosen, name="a",
            )  # fmt: skip
            of_one = []
            for i in range(2):
                leaf = (x * (1 + i)).requires_grad_()
                y = module(leaf)
                of_one += [y.detach(), *torch.autograd.grad(y.float().square().sum(), [leaf, *module.parameters()])]
            results.append(of_one)
        for a, b in zip(*results, strict=True):
            assert a.isfinite().all() and torch.equal(a, b)


@pytest.mark.parametrize(("recipe", "steps"), [("fp8-delayed", 1), ("fp8-current", 2), ("fp8-block", 2), ("mxfp8", 2)])
def test_the_cast_of_a_linear_computes_the_norm_before_it(recipe, steps, monkeypatch) -> None:
    """No kernel writes the normalised matrix. The first delayed scale needs its amax first: torch's norm runs then."""
    from duotone.kernels.norms import Norm

    writes: list[bool] = []
    plain = Norm._launch

    def watch(self: Any, y: Tensor | None, live: Tensor | None) -> None:
        writes.append(y is not None)
        plain(self, y, live)

    monkeypatch.setattr(Norm, "_launch", watch)
    step(build("linear", "RMSNorm"), torch.randn(160, 256, device="cuda").bfloat16(), recipe)
    assert writes == [False] * steps


def test_identity_takes_aten(monkeypatch) -> None:
    """Nothing is encoded behind that norm."""
    from duotone.kernels.norms import Norm

    monkeypatch.setattr(Norm, "_launch", None)
    module, x = build("linear", "LayerNorm"), torch.randn(160, 256, device="cuda").bfloat16()
    assert module(x).isfinite().all()
    module = duotone.LayerNormLinear(
        256, 384, device="cuda", params_dtype=torch.bfloat16, recipe=recipes.load("fp8-current")
    )
    with pytest.raises(TypeError):
        module(x)
