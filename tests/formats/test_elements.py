"""Element codecs against two that were written elsewhere: ml_dtypes, through `reference.cast`, and gfloat."""

import gfloat
import ml_dtypes
import numpy as np
import pytest
import reference
import torch
from comparison import assert_same
from gfloat import formats as gf
from reference import BITS, LARGEST, NAN_CODE

from duotone.formats import elements

NAMES = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2")
GFLOAT = {
    "e4m3": gf.format_info_ocp_e4m3,
    "e5m2": gf.format_info_ocp_e5m2,
    "e2m1": gf.format_info_ocp_e2m1,
    "e2m3": gf.format_info_ocp_e2m3,
    "e3m2": gf.format_info_ocp_e3m2,
}


def all_bf16() -> reference.Array:
    return np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def all_fp16() -> reference.Array:
    return np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)


def finite_values(name: str) -> reference.Array:
    values = reference.values_of(name)
    return np.unique(values[np.isfinite(values)]).astype(np.float32)


def edges(name: str) -> reference.Array:
    """fp32: every value, every midpoint of neighbours and of the overflow, one ulp to either side of each."""
    values = finite_values(name)
    beyond = values[-1] + (values[-1] - values[-2])
    values = np.concatenate([[-beyond], values, [beyond]]).astype(np.float32)
    middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    at = np.concatenate([values, middle])
    near = [np.nextafter(at, np.float32(to)) for to in (np.inf, -np.inf)]
    extreme = np.array([np.inf, -np.inf, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 0.0, -0.0], np.float32)
    return np.concatenate([at, *near, extreme]).astype(np.float32)


INPUTS = {"all_bf16": lambda name: all_bf16(), "all_fp16": lambda name: all_fp16(), "edges": edges}


def gfloat_codes(name: str, v: reference.Array) -> reference.Array:
    info, out = GFLOAT[name], np.full(v.shape, NAN_CODE[name], np.uint8)
    finite = ~np.isnan(v)
    rounded = gfloat.round_ndarray(info, v[finite].astype(np.float64), gfloat.RoundMode.TiesToEven, sat=True)
    out[finite] = gfloat.encode_ndarray(info, rounded)
    return out


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", NAMES)
def test_encode_equals_ml_dtypes_saturated_with_one_nan_code(name: str, inputs: str) -> None:
    v = INPUTS[inputs](name)
    assert_same(elements.ELEMENTS[name].encode(torch.from_numpy(v)), reference.cast(v, name))


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", NAMES)
def test_encode_equals_gfloat_in_saturating_mode(name: str, inputs: str) -> None:
    v = INPUTS[inputs](name)
    assert_same(elements.ELEMENTS[name].encode(torch.from_numpy(v)), gfloat_codes(name, v))


@pytest.mark.parametrize("name", NAMES)
def test_encode_takes_the_nearest_value_and_an_even_code_on_ties(name: str) -> None:
    """By brute force over all values, which no codec is asked about."""
    v = edges(name)
    magnitudes = finite_values(name)
    magnitudes = magnitudes[magnitudes >= 0].astype(np.float64)  # the index is the code
    distance = np.abs(np.minimum(np.abs(v.astype(np.float64)), LARGEST[name])[:, None] - magnitudes)
    nearest = distance == distance.min(axis=1, keepdims=True)
    even = nearest & (np.arange(len(magnitudes)) % 2 == 0)
    code = np.where(even.any(1) & (nearest.sum(1) > 1), even.argmax(1), nearest.argmax(1))
    code = code + np.where(np.signbit(v), 1 << (BITS[name] - 1), 0)
    assert_same(elements.ELEMENTS[name].encode(torch.from_numpy(v)), code.astype(np.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_decode_of_every_code_equals_ml_dtypes_and_gfloat(name: str) -> None:
    codes = np.arange(2 ** BITS[name], dtype=np.uint8)
    result = elements.ELEMENTS[name].decode(torch.from_numpy(codes))
    assert_same(result, reference.values_of(name))
    assert_same(result, gfloat.decode_ndarray(GFLOAT[name], codes.astype(np.int64)))


@pytest.mark.parametrize("name", NAMES)
def test_encode_inverts_decode_on_every_finite_code(name: str) -> None:
    element = elements.ELEMENTS[name]
    codes = torch.arange(2 ** BITS[name], dtype=torch.uint8)
    values = element.decode(codes)
    finite = torch.isfinite(values)
    assert torch.equal(element.encode(values[finite]), codes[finite])
    assert int((~finite).sum()) == {"e4m3": 2, "e5m2": 8}.get(name, 0)


@pytest.mark.parametrize("name", NAMES)
def test_nan_of_either_sign_and_any_payload_becomes_the_nan_code(name: str) -> None:
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    v = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
    assert elements.ELEMENTS[name].encode(v).tolist() == [NAN_CODE[name]] * 6


@pytest.mark.parametrize(
    ("name", "positive", "negative", "zero"),
    [
        ("e4m3", 0x7E, 0xFE, 0x80),
        ("e5m2", 0x7B, 0xFB, 0x80),
        ("e2m1", 7, 15, 8),
        ("e2m3", 31, 63, 32),
        ("e3m2", 31, 63, 32),
    ],
)
def test_overflow_saturates_and_negative_zero_keeps_its_sign(
    name: str, positive: int, negative: int, zero: int
) -> None:
    v = torch.tensor([torch.inf, -torch.inf, 1e38, -1e38, -0.0, 0.0, -1e-44])
    want = [positive, negative, positive, negative, zero, 0, zero]
    assert elements.ELEMENTS[name].encode(v).tolist() == want


def test_e2m1_thresholds_are_those_of_the_table() -> None:
    below = [(0.25, 0), (0.75, 1), (1.25, 2), (1.75, 3), (2.5, 4), (3.5, 5), (5.0, 6)]
    closed = {0.25, 1.25, 2.5, 5.0}
    for threshold, code in below:
        at = torch.tensor([threshold])
        up = torch.nextafter(at, torch.tensor(9.0))
        down = torch.nextafter(at, torch.tensor(0.0))
        want = [code, code if threshold in closed else code + 1, code + 1]
        assert elements.E2M1.encode(torch.cat([down, at, up])).tolist() == want


@pytest.mark.parametrize("inputs", INPUTS)
def test_encode_equals_torch_casts_where_those_are_defined(inputs: str) -> None:
    for element, limit in ((elements.E4M3, 464.0), (elements.E5M2, 61440.0)):  # above, torch 2.11 gives NaN or inf
        v = torch.from_numpy(INPUTS[inputs](element.name))
        v = v[v.abs() < limit]
        assert element.dtype is not None
        assert torch.equal(element.encode(v), v.to(element.dtype).view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_encode_takes_any_shape_and_layout_and_leaves_its_input_alone(name: str) -> None:
    element = elements.ELEMENTS[name]
    base = torch.from_numpy(edges(name)[:96].reshape(2, 4, 12).copy())
    before = base.clone()
    flat = element.encode(base.flatten())
    assert torch.equal(element.encode(base).flatten(), flat)
    assert torch.equal(element.encode(base.transpose(0, 2)).transpose(0, 2).flatten(), flat)
    assert torch.equal(element.encode(base[:, ::2, ::3]), flat.view(2, 4, 12)[:, ::2, ::3])
    assert torch.equal(element.decode(flat.view(2, 48).t()), element.decode(flat).view(2, 48).t())
    assert element.encode(base[:0]).shape == (0, 4, 12)
    assert element.encode(torch.tensor(1.0)).shape == ()
    assert torch.equal(base.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize(("name", "bits"), [("e4m3", 0x3B124925), ("e5m2", 0x37924925), ("e2m1", 0x3E2AAAAB)])
def test_reciprocal_of_the_maximum_is_the_fp32_constant_of_the_rule(name: str, bits: int) -> None:
    value = torch.tensor(elements.ELEMENTS[name].reciprocal.real, dtype=torch.float32)
    assert value.view(torch.int32).item() == bits
    assert float(value) == elements.ELEMENTS[name].reciprocal.real


def test_pairs_put_the_even_element_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 15], [8, 0, 7]], dtype=torch.uint8)
    packed = elements.pack_pairs(codes)
    assert packed.tolist() == [[0x21, 0x0F], [0x08, 0x07]]
    assert elements.unpack_pairs(packed).tolist() == [[1, 2, 15, 0], [8, 0, 7, 0]]


def test_every_byte_unpacks_and_packs_to_itself() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(4, 64)
    pairs = elements.unpack_pairs(every)
    assert pairs.dtype == torch.uint8 and pairs.shape == (4, 128) and int(pairs.max()) == 15
    assert torch.equal(elements.pack_pairs(pairs), every)
    assert elements.pack_pairs(every[:, :0] & 15).shape == (4, 0)
    assert_same(pairs, reference.unpack(every.numpy()))


# Stochastic rounding


def dense_inputs() -> reference.Array:
    """bf16 values up to 16, and every fp32 edge of E2M1."""
    v = all_bf16()
    return np.concatenate([v[(np.abs(v) > 2.0**-14) & (np.abs(v) < 16)][::3], edges("e2m1"), [np.nan, -np.nan]]).astype(
        np.float32
    )


def test_stochastic_rule_equals_the_reference_for_all_bits() -> None:
    v = dense_inputs()
    bits = np.broadcast_to(np.arange(256, dtype=np.uint8), (len(v), 256))
    wide = np.broadcast_to(v[:, None], bits.shape)
    result = elements.E2M1.round_stochastic(torch.from_numpy(wide.copy()), torch.from_numpy(bits.copy()))
    assert_same(result, reference.cast_stochastic(wide, bits))


def test_stochastic_rule_equals_the_reference_on_all_bf16() -> None:
    v = all_bf16()
    for add in (0, 1, 128, 255):
        bits = ((np.arange(len(v)) * 37 + add) % 256).astype(np.uint8)
        result = elements.E2M1.round_stochastic(torch.from_numpy(v), torch.from_numpy(bits))
        assert_same(result, reference.cast_stochastic(v, bits))


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rule_equals_gfloat_on_every_element(name: str) -> None:
    """gfloat rounds up where fraction + bits/256 reaches 1: the same rule, written differently."""
    v = all_bf16()
    v = v[np.isfinite(v)][::2]
    for add in (0, 85, 255):
        bits = ((np.arange(len(v)) * 101 + add) % 256).astype(np.uint8)
        want = gfloat.round_ndarray(
            GFLOAT[name],
            v.astype(np.float64),
            gfloat.RoundMode.StochasticFastest,
            True,
            bits.astype(np.int64),
            8,
        )
        result = elements.ELEMENTS[name].round_stochastic(torch.from_numpy(v), torch.from_numpy(bits))
        assert_same(result, want, f"add {add}")


def test_mean_over_all_bits_is_the_fraction_rounded_down_to_a_256th() -> None:
    """Exactly so, hence a bias between -step/256 and 0: never away from zero."""
    v = all_bf16()
    v = v[(np.abs(v) > 2.0**-10) & (np.abs(v) <= 6)]
    bits = torch.arange(256, dtype=torch.uint8).expand(len(v), 256)
    drawn = elements.E2M1.round_stochastic(torch.from_numpy(v)[:, None].expand(bits.shape), bits)
    mean = drawn.double().mean(1).numpy()
    a = np.abs(v.astype(np.float64))
    step = np.where(a < 2, 0.5, np.where(a < 4, 1.0, 2.0))
    lower = np.floor(a / step) * step
    share = np.floor(256 * (a - lower) / step) / 256
    assert np.array_equal(mean, np.copysign(lower + step * share, v))
    bias = np.abs(mean) - a
    assert (bias <= 0).all() and (bias > -step / 256).all() and bias.min() < 0


def test_representable_values_survive_all_bits() -> None:
    values = torch.from_numpy(finite_values("e2m1"))[:, None].expand(-1, 256)
    bits = torch.arange(256, dtype=torch.uint8).expand(values.shape)
    assert torch.equal(elements.E2M1.round_stochastic(values, bits), values)


def test_stochastic_rule_saturates_and_keeps_the_sign_of_zero() -> None:
    v = torch.tensor([torch.inf, -torch.inf, 7.9, -1e30, torch.nan, -torch.nan, -0.0, -0.1, 5.999])
    low, high = (elements.E2M1.round_stochastic(v, torch.full_like(v, b, dtype=torch.uint8)) for b in (0, 255))
    assert low.tolist() == [6, -6, 6, -6, 6, 6, 0, 0, 4] and high.tolist() == [6, -6, 6, -6, 6, 6, 0, -0.5, 6]
    assert torch.signbit(low).tolist() == [False, True, False, True, False, False, True, True, False]


def test_bits_may_be_of_any_integer_dtype() -> None:
    v = torch.linspace(-7, 7, 512)
    bits = torch.arange(512) % 256
    want = elements.E2M1.round_stochastic(v, bits.to(torch.uint8))
    for dtype in (torch.int16, torch.int32, torch.int64):
        assert torch.equal(elements.E2M1.round_stochastic(v, bits.to(dtype)), want)
