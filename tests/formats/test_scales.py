"""Scale rules at every amax that matters, against exact arithmetic and against the reference."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import reference
import torch
from comparison import assert_parts, assert_same, tensor_of
from families import make
from reference import FLT_MAX, LARGEST

from duotone.formats import get
from duotone.formats.scales import divide

E8M0_FORMATS = [
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp4",
    "fp8_e4m3_1x128_e8m0",
    "fp8_e5m2_1x128_e8m0",
]
FP32_FORMATS = ["fp8_e4m3_row", "fp8_e5m2_row", "fp8_e4m3_row_pow2", "fp8_e5m2_row_pow2"]
BLOCK_FORMATS = ["fp8_e4m3_1x128", "fp8_e5m2_1x128", "fp8_e4m3_1x128_fp32", "fp8_e5m2_1x128_fp32"]


def bf16_amaxes() -> reference.Array:
    """All 32768 non-negative bf16, NaN among them, as one column."""
    return np.arange(32768, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)[:, None]


def edge_amaxes() -> reference.Array:
    """fp32: every exponent, with mantissas within two of where some rule changes its mind; as one column."""
    turning = {
        0,
        0x400000,
        0x7FFFFF,
        *(int(np.float32(m).view(np.uint32)) & 0x7FFFFF for m in LARGEST.values()),
    }
    mantissas = sorted({(m + d) & 0x7FFFFF for m in turning for d in range(-2, 3)})
    bits = [exponent << 23 | mantissa for exponent in range(255) for mantissa in mantissas]
    return np.array(bits, np.uint32).view(np.float32)[:, None]


def exact_e8m0(amax: reference.Array, largest: float) -> reference.Array:
    """127 + clamp(ceil(log2(amax/MAX)), -127, 127), exactly, from the fractions and powers of frexp."""
    fraction, power = np.frexp(amax.astype(np.float64))
    largest_fraction, largest_power = np.frexp(largest)
    ceiling = power - largest_power + (fraction > largest_fraction)
    return np.where(amax == 0, 0, np.clip(ceiling, -127, 127) + 127).astype(np.uint8)


AMAXES = {"bf16": (bf16_amaxes, "bfloat16"), "edges": (edge_amaxes, "float32")}


@pytest.mark.parametrize("amaxes", AMAXES)
@pytest.mark.parametrize("name", E8M0_FORMATS)
def test_e8m0_is_the_power_of_two_above_the_exact_ratio(name: str, amaxes: str) -> None:
    """Sole exception: the fp32 successor of MAX * 2^-127, whose denormal product rounds down."""
    build, dtype = AMAXES[amaxes]
    amax, largest = build(), LARGEST[reference.meaning(name).element]
    finite = amax[np.isfinite(amax)][:, None]
    result = get(name).encode(tensor_of(finite, dtype))["scale"].numpy()
    wrong = finite[result != exact_e8m0(finite, largest)]
    exception = np.nextafter(np.float32(largest * 2.0**-127), np.float32(1))
    assert wrong.tolist() == ([float(exception)] if dtype == "float32" else [])
    assert not len(wrong) or int(result[finite == exception][0]) == 0


def test_e8m0_exceptions_are_the_documented_numbers() -> None:
    for element, value in (("e4m3", 2.6331075e-36), ("e5m2", 3.3703776e-34)):
        x = torch.tensor([[value], [value * (1 + 2**-23)], [value * (1 + 2**-22)]])
        assert get(f"mxfp8_{element}").encode(x)["scale"].flatten().tolist() == [0, 1, 1]


def test_e8m0_of_zero_infinite_and_nan_blocks() -> None:
    """NaN is ignored, infinities saturate, and the largest finite value is still 2 under a scale of 2^127."""
    x = torch.zeros(5, 32)
    x[1, :3] = torch.tensor([torch.inf, 1.0, float(FLT_MAX)])
    x[2] = torch.nan
    x[3, :3] = torch.tensor([-torch.nan, 448.0, -1.0])
    x[4, :2] = torch.tensor([-torch.inf, torch.nan])
    parts = get("mxfp8_e4m3").encode(x)
    assert parts["scale"].flatten().tolist() == [0, 254, 0, 127, 254]
    codes = parts["codes"]
    assert codes[1, :4].tolist() == [0x7E, 0x00, 0x40, 0x00]
    assert codes[2].tolist() == [0x7F] * 32
    assert codes[3, :4].tolist() == [0x7F, 0x7E, 0xB8, 0x00]
    assert codes[4, :3].tolist() == [0xFE, 0x7F, 0x00]


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"])
def test_e8m0_never_saturates_a_finite_value(name: str) -> None:
    """The rounded-up scale brings amax to MAX or below, but not below half of it."""
    amax = edge_amaxes()
    fmt, largest = get(name), LARGEST[reference.meaning(name).element]
    parts = fmt.encode(torch.from_numpy(amax))
    scaled = amax.astype(np.float64) * np.exp2(127.0 - parts["scale"].numpy().astype(np.float64))
    exception = amax == np.nextafter(np.float32(largest * 2.0**-127), np.float32(1))
    assert (scaled[~exception] <= largest).all() and (scaled[exception] <= largest * (1 + 2.0**-22)).all()
    normal = (parts["scale"].numpy() > 0) & (parts["scale"].numpy() < 254)
    assert (scaled[normal] > largest / 2).all()


@pytest.mark.parametrize("amaxes", AMAXES)
@pytest.mark.parametrize("name", [*FP32_FORMATS, *BLOCK_FORMATS])
def test_fp32_scales_and_codes_at_every_amax(name: str, amaxes: str) -> None:
    build, dtype = AMAXES[amaxes]
    with np.errstate(invalid="ignore"):  # NaN among the amaxes
        x = reference.as_dtype(np.concatenate([build(), -build() / np.float32(3)], axis=1), dtype)
    assert_parts(get(name).encode(tensor_of(x, dtype)), reference.encode(name, x, dtype), name)


def test_fp32_scale_is_the_correctly_rounded_quotient() -> None:
    """Against fractions: the nearest fp32 to MAX/amax is nearer than both of its neighbours."""
    rng = np.random.default_rng(5)
    amax = rng.uniform(1e-3, 1e3, 400).astype(np.float32)
    for element, largest in (("e4m3", 448), ("e5m2", 57344)):
        stored = get(f"fp8_{element}_row").encode(torch.from_numpy(amax[:, None]))["scale"].flatten().numpy()
        for value, inverse in zip(amax, stored, strict=True):
            scale = nearest_fp32(Fraction(largest) / Fraction(float(value)))
            assert inverse == nearest_fp32(1 / Fraction(float(scale)))


def nearest_fp32(exact: Fraction) -> np.float32:
    guess = np.float32(float(exact))
    near = [guess, np.nextafter(guess, np.float32(0)), np.nextafter(guess, FLT_MAX)]
    return min(near, key=lambda value: abs(Fraction(float(value)) - exact))


def test_constants_are_divided_not_multiplied_by_a_reciprocal() -> None:
    values = torch.from_numpy(np.random.default_rng(6).uniform(0.1, 10, 4096).astype(np.float32))
    want = np.float32(448) / values.numpy()
    assert (want != (np.float32(1) / values.numpy()) * np.float32(448)).any()
    assert_same(divide(448.0, values), want)
    assert_same(divide(values, 1536.0), values.numpy() / np.float32(1536))
    assert_same(divide(values, values.flip(0)), values.numpy() / values.numpy()[::-1])


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_power_of_two_scale_of_a_block_is_the_mx_scale(element: str) -> None:
    """2^ceil(log2(amax/MAX)) both ways, wherever MAX/amax neither overflows nor meets the denormal edge."""
    amax = edge_amaxes()
    block = get(f"fp8_{element}_1x128").encode(torch.from_numpy(amax))["scale"].numpy()
    codes = get(f"mxfp8_{element}").encode(torch.from_numpy(amax))["scale"].numpy()
    inside = amax > LARGEST[element] * 2.0**-126
    assert np.array_equal(block[inside], reference.e8m0_value(codes)[inside])
    assert inside.sum() > 5000


@pytest.mark.parametrize(
    ("dtype", "largest"), [("float32", 3.4028234663852886e38), ("bfloat16", 3.3895313892515355e38)]
)
def test_an_overflowing_scale_becomes_the_largest_of_its_kind(dtype: str, largest: float) -> None:
    """Blocks: of the input's dtype; per tensor and row: FLT_MAX whatever the dtype; powers of two: 2^127."""
    x = torch.full((1, 4), 1e-38).to(getattr(torch, dtype))
    overflow = {
        "1x128_fp32": largest,
        "128x128_fp32": largest,
        "tensor": float(FLT_MAX),
        "row": float(FLT_MAX),
        "1x128": 2.0**127,
        "tensor_pow2": 2.0**127,
        "row_pow2": 2.0**127,
    }
    for suffix, scale in overflow.items():
        stored = get(f"fp8_e4m3_{suffix}").encode(x)["scale"].flatten()
        assert_same(stored, np.array([1 / scale], np.float32), suffix)
    assert int(stored.view(torch.int32)) == 0x00400000


def test_fp16_blocks_overflow_to_65504_or_two_to_the_15() -> None:
    """An fp16 amax cannot make MAX/amax overflow; the largest of the dtype is asked for only when it does."""
    x = make("denormals", (4, 130), "float16")
    for name in ("fp8_e5m2_1x128", "fp8_e5m2_1x128_fp32"):
        assert_parts(get(name).encode(tensor_of(x, "float16")), reference.encode(name, x, "float16"), name)


@pytest.mark.parametrize("name", [*FP32_FORMATS, *BLOCK_FORMATS, "fp8_e4m3_tensor", "fp8_e4m3_128x128"])
def test_scale_is_one_where_amax_is_zero_or_infinite(name: str) -> None:
    for value in (0.0, -0.0, torch.inf, -torch.inf, torch.nan):
        parts = get(name).encode(torch.full((1, 3), value))
        assert parts["scale"].flatten().tolist() == [1.0]


# Two levels


def unfolded_scale(x: reference.Array) -> reference.Array:
    """Block scales of `nvfp4_row` in the order that the rule forbids: (amax_b / 6) * S."""
    s = reference.global_scale(reference.amax_of(x, (1,))[:, None], 448.0)
    amax = reference.amax_of(reference.tiles(x, 1, 16), (2, 3))
    return reference.cast((amax / np.float32(6)) * s, "e4m3")


def test_a_sixth_is_folded_into_the_global_scale() -> None:
    """On this data the other order gives other block scales, so equality is no accident."""
    x = make("normal", (512, 1024), "bfloat16")
    result = get("nvfp4_row").encode(tensor_of(x, "bfloat16"))
    want = reference.encode("nvfp4_row", x, "bfloat16")
    differ = unfolded_scale(x) != want["scale"]
    assert 0 < differ.mean() < 0.01
    assert_parts(result, want)
    row = int(differ.any(axis=1).argmax())
    one = x[row : row + 1]
    assert_parts(get("nvfp4").encode(tensor_of(one, "bfloat16")), reference.encode("nvfp4", one, "bfloat16"))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16", "nvfp4_row", "nvfp4_4over6", "nvfp4_16x16_4over6_448"])
def test_elements_of_an_underflowed_block_saturate_and_decode_to_zero(name: str) -> None:
    x = torch.zeros(16, 48)
    x[:, :16] = 1e4
    x[:, 16:32] = torch.tensor([1e-4, -1e-4, 0.0, -0.0]).repeat(4)
    parts = get(name).encode(x)
    scale = parts["scale"]
    assert (scale[:, 0] > 0).all() and (scale[:, 1:] == 0).all()
    codes = torch.stack((parts["codes"] & 15, parts["codes"] >> 4), -1).flatten(1)
    assert codes[:, 16:32].tolist() == [[7, 15, 0, 8] * 4] * 16
    assert codes[:, 32:].tolist() == [[0] * 16] * 16
    decoded = get(name).decode(parts, torch.float32)
    assert (decoded[:, 16:] == 0).all()


@pytest.mark.parametrize(("largest", "code"), [(2.0**-10, 0), (2.0**-10 * 1.01, 1), (2.0**-9, 1), (448.0, 0x7E)])
def test_block_scales_reach_down_to_the_subnormals_of_e4m3(largest: float, code: int) -> None:
    """With g = 2688, S = 1 and a block's scale is its amax / 6."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 2688.0, 6 * largest
    assert get("nvfp4").encode(x)["scale"].tolist() == [[0x7E, code]]


@pytest.mark.parametrize(("g", "block_max", "s"), [(0.0, 448, 1.0), (np.inf, 448, 1.0), (1e-38, 448, None)])
def test_global_scale_of_extreme_amaxes(g: float, block_max: float, s: float | None) -> None:
    x = np.full((1, 16), g, np.float32)
    x[0, 1:] = 0
    want = reference.encode("nvfp4", x)
    result = get("nvfp4").encode(torch.from_numpy(x))
    assert_parts(result, want)
    of_g = reference.global_scale(np.array([g], np.float32), block_max)
    assert float(of_g[0]) == (float(FLT_MAX) if s is None else s)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16", "nvfp4_4over6"])
def test_stored_amax_is_that_of_the_tensor_ignoring_nan(name: str) -> None:
    x = torch.full((16, 32), 0.5)
    x[3, 20], x[4, 4] = -7.25, torch.nan
    assert get(name).encode(x)["amax"].tolist() == [7.25]


def test_stored_amax_is_that_of_each_row() -> None:
    x = torch.tensor([[1.0, -2.0], [torch.nan, 3.0], [0.0, -0.0], [torch.nan, torch.nan]])
    assert get("nvfp4_row").encode(x)["amax"].tolist() == [2.0, 3.0, 0.0, 0.0]


def test_scale_of_a_16x16_block_repeats_over_its_rows() -> None:
    x = make("normal", (37, 40))
    scale = get("nvfp4_16x16").encode(torch.from_numpy(x))["scale"]
    assert scale.shape == (37, 3)
    for top in (0, 16, 32):
        assert (scale[top : top + 16] == scale[top]).all()
    assert len({tuple(row) for row in scale.tolist()}) == 3
