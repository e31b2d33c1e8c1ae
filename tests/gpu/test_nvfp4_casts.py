"""On a CUDA device: NVFP4 planes from one cast, decoding in one kernel and the epilogue have the bits of the CPU."""

import itertools

import pytest
import torch
from comparing import awkward_matrix, bits, same
from torch import Tensor

from duotone import formats
from duotone.dispatch import casts, gemms, products
from duotone.dispatch.products import factors
from duotone.dispatch.target import target
from duotone.formats import Factors
from duotone.tensor import Quantizer
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Plane, Usage
from duotone.tensor.plane_encoder import encode_plane

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)

NAMES = [name for name in formats.names() if name.startswith("nvfp4")]
MIXED = [("nvfp4", "nvfp4_rht"), ("nvfp4_sr", "nvfp4_rht_sr"), ("nvfp4_row", "nvfp4_4over6"), ("nvfp4_rht", "nvfp4")]
PAIRS = [*((name, name) for name in NAMES), *MIXED]
SHAPES = [(128, 256), (64, 128), (1, 16), (17, 1), (130, 257), (512, 96), (66, 139), (33, 136), (1, 1)]
USAGES = [Usage(True, True), Usage(True, False), Usage(False, True)]
SEEDS = [0, 1, -1, 0x1234567890ABCDEF]


def context(seed: int, device: str) -> QuantizeContext:
    """Of casts that hide what is not finite: a plane that propagates it has other codes on the two devices."""
    return QuantizeContext(seed=torch.tensor([seed], dtype=torch.int64, device=device), propagate=False)


def encoded(pair: tuple[str, str], x: Tensor, seed: int, usage: Usage = USAGES[0]) -> None:
    """Both planes on the GPU against those of the CPU."""
    quantizer = Quantizer(formats.get(pair[0]), formats.get(pair[1]))
    cpu, cuda = (
        quantizer.encode(x, usage, context(seed, "cpu")),
        quantizer.encode(x.cuda(), usage, context(seed, "cuda")),
    )
    same(cpu.rowwise, cuda.rowwise)
    same(cpu.columnwise, cuda.columnwise)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_one_cast_has_the_bits_of_the_stages(pair, dtype) -> None:
    """Every shape in bf16, the first, a middle and the last in other dtypes: each is compiled anew, for seconds."""
    row, col = (formats.get(name) for name in pair)
    for i, shape in enumerate(SHAPES if dtype is torch.bfloat16 else SHAPES[::4]):
        x = awkward_matrix(*shape, dtype)
        assert casts.one_read(row, col, x.cuda(), True) is not None
        for usage in USAGES if shape in SHAPES[:5:4] else [USAGES[i % 3]]:
            encoded(pair, x, 0x1234567890ABCDEF, usage)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_what_is_not_finite_decodes_to_what_is_not_finite(pair) -> None:
    """Under an infinite amax codes say nothing: values are compared, those that are not finite as one."""
    quantizer = Quantizer(formats.get(pair[0]), formats.get(pair[1]))
    for shape, value in itertools.product(((130, 272), (33, 48)), (torch.nan, torch.inf, 1.0)):
        x = torch.randn(shape)
        x[3, 5], x[20, 40] = value, -value
        seeds = (torch.tensor([7], device=device) for device in ("cpu", "cuda"))
        planes = [quantizer.encode(x.to(seed.device), ctx=QuantizeContext(seed=seed)) for seed in seeds]
        for cpu, cuda in zip(*planes, strict=True):
            values = [plane.dequantize(torch.float32).cpu() for plane in (cpu, cuda)]
            finite = [torch.where(one.isfinite(), one, torch.nan) for one in values]
            assert torch.equal(bits(finite[0]), bits(finite[1]))
            assert torch.equal(bits(cpu.parts["amax"]), bits(cuda.parts["amax"]))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_magnitudes_without_an_infinity(pair) -> None:
    for scale, dtype in itertools.product((1.0, 1e30, 1e-30, 1e-38, 0.0), (torch.bfloat16, torch.float32)):
        x = torch.randn(130, 272) * scale
        x[3, 5], x[64, 200] = torch.nan, -torch.nan
        x[7], x[:, 9] = 0.0, -0.0
        x[16:32, 32:48] *= 1e-6
        encoded(pair, x.to(dtype), 77)


@pytest.mark.parametrize("pair", [p for p in PAIRS if "sr" in p[0]], ids=str)
def test_every_seed_has_its_stream(pair) -> None:
    for seed, shape in itertools.product(SEEDS, ((128, 256), (50, 70))):
        encoded(pair, torch.randn(shape).bfloat16(), seed)


def test_a_column_of_a_square_format_is_that_of_its_own_matrix() -> None:
    """Where codes depend on which matrix is encoded, a columnwise plane alone is encoded and turned."""
    x = torch.randn(70, 90)
    for name in NAMES:
        encoded((name, name), x, 5, Usage(False, True))


def test_inputs_that_are_not_contiguous_or_misaligned() -> None:
    x = awkward_matrix(130, 512, torch.bfloat16)
    flat = torch.zeros(130 * 512 + 1, dtype=torch.bfloat16, device="cuda")
    flat[1:] = x.cuda().view(-1)
    misaligned = flat[1:].view(130, 512)
    assert misaligned.data_ptr() % 16
    views = [(x.t(), x.cuda().t()), (x[::2, ::3], x.cuda()[::2, ::3]), (x, misaligned)]
    for (a, b), pair in itertools.product(views, MIXED):
        quantizer = Quantizer(formats.get(pair[0]), formats.get(pair[1]))
        cpu, cuda = quantizer.encode(a, ctx=context(3, "cpu")), quantizer.encode(b, ctx=context(3, "cuda"))
        same(cpu.rowwise, cuda.rowwise)
        same(cpu.columnwise, cuda.columnwise)


def test_a_matrix_beyond_the_first_tiles_of_every_program() -> None:
    x = torch.randn(4096, 2048).bfloat16()
    for pair in MIXED[:2]:
        encoded(pair, x, 11)


@pytest.mark.parametrize("name", NAMES)
def test_decoding_in_one_kernel_has_the_bits_of_the_stages(name) -> None:
    fmt = formats.get(name)
    quantizer = Quantizer(fmt, fmt)
    for shape, scale in itertools.product(SHAPES, (1.0, 1e30)):
        finite = awkward_matrix(*shape, torch.float32).nan_to_num(0.0, 1.0, -1.0) * scale
        cpu = quantizer.encode(finite, ctx=context(9, "cpu"))
        cuda = quantizer.encode(finite.cuda(), ctx=context(9, "cuda"))
        for a, b in ((cpu.rowwise, cuda.rowwise), (cpu.columnwise, cuda.columnwise)):
            assert a is not None and b is not None
            turned = Plane(
                fmt, {n: part.t().contiguous().t() if part.dim() == 2 else part for n, part in b.parts.items()}, b.shape
            )
            for there_plane, dtype in itertools.product((b, turned), (torch.float32, torch.bfloat16, torch.float16)):
                assert torch.equal(bits(there_plane.values(dtype)), bits(a.format.decode(a.parts, dtype))), dtype
                assert torch.equal(bits(factors(there_plane).values), bits(a.format.factors(a.parts).values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(128, 256), (1, 1), (1, 40), (77, 1), (130, 257)], ids=str)
def test_the_epilogue_has_the_bits_of_the_plain_stages(shape, dtype) -> None:
    from duotone.kernels.epilogue import finish

    m, n = shape
    y = torch.randn(m, n) * 1e4
    y.view(-1)[0] = torch.inf
    bias = torch.randn(n, dtype=dtype)
    sides = None, torch.rand(1), 1.0, 1e36, 1e-38  # a number is the size of a factor for each row
    for a, b, divisor, add in itertools.product(sides, sides, (1.0, 2688.0), (None, bias)):
        left = Factors(y, torch.rand(m) * a if isinstance(a, float) else a, divisor)
        right = Factors(y, torch.rand(n) * b if isinstance(b, float) else b, divisor)
        moved = [None if f.epilogue_scale is None else f.epilogue_scale.cuda() for f in (left, right)]
        out = torch.empty_like(y, dtype=dtype, device="cuda")
        result = finish(y.cuda(), *moved, 1.0 / divisor / divisor, None if add is None else add.cuda(), out)
        assert torch.equal(bits(result), bits(products.finish(products.scaled(y, left, right), dtype, add)))


@pytest.mark.parametrize(
    "pair", [("nvfp4", "nvfp4_16x16"), ("nvfp4_row", "nvfp4"), ("nvfp4_rht_sr", "nvfp4_rht")], ids=str
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_the_decoded_operands(pair, bias) -> None:
    first, second = (formats.get(name) for name in pair)
    x, w = torch.randn(130, 272, device="cuda"), torch.randn(66, 272, device="cuda")
    a, b = encode_plane(first, x, context(1, "cuda")), encode_plane(second, w, context(2, "cuda"))
    rule, _ = gemms.choose(gemms.GemmProblem(first, second, target("cuda"), torch.bfloat16))
    add = torch.randn(66, device="cuda") if bias else None
    y = rule.run(a, b, torch.bfloat16, add)
    want = a.values(torch.float32).double() @ b.values(torch.float32).double().t()
    want = want if add is None else want + add.double()
    assert y.dtype is torch.bfloat16 and ((y.double() - want).abs() <= want.abs() * 2.0**-8 + 1e-4).all()
