"""Decoded values, and the factors into which a GEMM takes them apart."""

import numpy as np
import pytest
import reference
import torch
from comparison import assert_same, raw, tensor_of
from families import make
from selection import NAMES, SEED, element_of, seed_of

from duotone.formats import get


@pytest.mark.parametrize("name", NAMES)
def test_decode_rounds_once_to_the_dtype(name: str) -> None:
    for family in ("normal", "spread", "nans", "huge", "tiny", "infinities"):
        x = make(family, (17, 80), "float32", element_of(name))
        parts = get(name).encode(torch.from_numpy(x), seed=seed_of(name))
        values = reference.decode_fp32(name, reference.encode(name, x, seed=SEED))
        for dtype in ("bfloat16", "float16", "float32"):
            result = get(name).decode(parts, getattr(torch, dtype))
            assert result.dtype == getattr(torch, dtype)
            assert_same(result, reference.as_dtype(values, dtype), f"{family} {dtype}")


def random_parts(name: str, rng: np.random.Generator, rows: int, cols: int) -> reference.Arrays:
    """Codes and scales that no encoder need ever have written, NaN codes and negative scales among them."""
    parts = {}
    for key, spec in get(name).parts(rows, cols).items():
        if spec.dtype == torch.uint8:
            top = 2 ** reference.BITS[element_of(name)] if key == "codes" and element_of(name) != "e2m1" else 256
            parts[key] = rng.integers(0, top, spec.shape).astype(np.uint8)
        else:
            parts[key] = np.exp2(rng.uniform(-150, 128, spec.shape)).astype(np.float32)
    return parts


@pytest.mark.parametrize("name", NAMES)
def test_decode_is_the_formula_on_all_codes_and_scales(name: str) -> None:
    rng = np.random.default_rng(4)
    for _ in range(4):
        parts = random_parts(name, rng, 37, 160)
        result = get(name).decode({key: torch.from_numpy(part) for key, part in parts.items()}, torch.float32)
        assert_same(result, reference.decode_fp32(name, parts))


@pytest.mark.parametrize("name", NAMES)
def test_decoded_values_are_near_the_input(name: str) -> None:
    """Without the reference: half a step of the element at the block's amax, a whole one if stochastic."""
    of = reference.meaning(name)
    x = make("normal", (128, 256), "bfloat16")
    fmt = get(name)
    seen = reference.rotate(x) if of.hadamard else x
    decoded = fmt.decode(fmt.encode(tensor_of(x, "bfloat16"), seed=seed_of(name)), torch.float32).numpy()
    amax = reference.amax_of(reference.tiles(seen, of.rows, of.cols), (2, 3))
    limit = reference.spread(amax, of, seen.shape)
    values = np.unique(reference.values_of(of.element)[np.isfinite(reference.values_of(of.element))])
    largest_step = (values[-1] - values[-2]) / values[-1]
    # an E8M0 scale leaves up to a binade unused, an E4M3 scale is off by 2^-4 of itself; a 4 for a 6 by half
    slack = {"fp32": 1, "pow2": 2, "e8m0": 2, "e4m3": 1.2 * (1.5 if of.four_over_six else 1)}[of.scale]
    bound = limit * largest_step * slack * (1 if of.stochastic else 0.5)
    assert (np.abs(decoded - seen) <= bound * 1.001).all()
    assert np.abs(decoded - seen).max() > 0


@pytest.mark.parametrize("name", NAMES)
def test_ceiling_is_what_the_largest_code_decodes_to(name: str) -> None:
    for family in ("normal", "steep", "nans", "zeros"):
        x = make(family, (33, 144), "bfloat16", element_of(name))
        fmt, want = get(name), reference.encode(name, x, "bfloat16", seed=SEED)
        parts = fmt.encode(tensor_of(x, "bfloat16"), seed=seed_of(name))
        largest = reference.cast(np.array([np.inf], np.float32), element_of(name))[0]
        top = np.full_like(want["codes"], largest if element_of(name) != "e2m1" else largest * 17)
        ceiling = fmt.ceiling(parts)
        assert_same(ceiling, reference.decode_fp32(name, {**want, "codes": top}), family)
        decoded = fmt.decode(parts, torch.float32).abs()
        assert (torch.isnan(decoded) | (decoded <= ceiling)).all()


@pytest.mark.parametrize("name", NAMES)
def test_rotate_gives_the_matrix_that_the_codes_stand_for(name: str) -> None:
    x = make("normal", (5, 37))
    result = get(name).rotate(torch.from_numpy(x))
    assert_same(result, reference.rotate(x) if reference.meaning(name).hadamard else x)


# Factors


@pytest.mark.parametrize("family", ["normal", "normal_and_zeros", "boundary", "steep", "nans", "ties"])
@pytest.mark.parametrize("name", NAMES)
def test_inner_factor_is_exact_in_bf16_and_the_product_of_factors_is_decode(name: str, family: str) -> None:
    """Power-of-two scales: exactly. fp32 scales: decode rounds one product more; NVFP4: four."""
    of, fmt = reference.meaning(name), get(name)
    x = make(family, (33, 144), "bfloat16", of.element)
    parts = fmt.encode(tensor_of(x, "bfloat16"), seed=seed_of(name))
    factors = fmt.factors(parts)
    assert factors.values.dtype == torch.bfloat16 and factors.values.shape == fmt.decode(parts, torch.bfloat16).shape
    arrays_of = {key: part.numpy() for key, part in parts.items()}
    assert_same(factors.values, exact_inner(name, arrays_of), "inner")
    assert (factors.epilogue_scale is None) == (of.scale in ("pow2", "e8m0"))
    whole = factors.values.double().numpy() / factors.divisor
    if factors.epilogue_scale is not None:
        outer = factors.epilogue_scale.double().numpy()
        whole *= outer.reshape(-1, 1) if of.scale == "e4m3" else reference.spread(outer, of, whole.shape)
    decoded = fmt.decode(parts, torch.float32).double().numpy()
    roundings = {"fp32": 1, "pow2": 0, "e8m0": 0, "e4m3": 4}[of.scale]
    finite = np.isfinite(decoded)
    assert np.array_equal(np.isnan(decoded), np.isnan(whole))
    assert (np.abs(whole - decoded)[finite] <= roundings * 1.01 * 2.0**-24 * np.abs(decoded)[finite] + 1e-44).all()
    if not roundings:
        assert np.array_equal(whole[finite], decoded[finite])


def exact_inner(name: str, parts: reference.Arrays) -> reference.Array:
    """value(code) times the scale that has to be inside, in float64, which holds the product."""
    of = reference.meaning(name)
    codes = reference.unpack(parts["codes"]) if of.element == "e2m1" else parts["codes"]
    value = reference.values_of(of.element)[codes].astype(np.float64)
    if of.scale == "e4m3":
        scale = np.repeat(reference.e4m3_value(parts["scale"]).astype(np.float64), 16, axis=1)[:, : value.shape[1]]
        return value * scale
    if of.scale == "fp32":
        return value
    scale = reference.e8m0_value(parts["scale"]) if of.scale == "e8m0" else parts["scale"]
    return value * reference.spread(scale.astype(np.float64), of, value.shape)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"])
def test_inner_factor_is_exact_over_the_whole_range_of_scales_that_bf16_holds(name: str) -> None:
    """E4M3 from 2^-124 to 2^119, E5M2 from 2^-117 to 2^112; others from bf16's lowest bit to its largest."""
    element = element_of(name)
    every = np.arange(2 ** reference.BITS[element], dtype=np.uint8)
    finite = every[np.isfinite(reference.values_of(element))]
    positive = reference.values_of(element)[finite]
    lowest = int(np.log2(positive[positive > 0].min()))
    low, high = -133 - lowest, 127 - int(np.floor(np.log2(reference.LARGEST[element])))
    if element in ("e4m3", "e5m2"):
        assert (low, high) == {"e4m3": (-124, 119), "e5m2": (-117, 112)}[element]
    powers = np.arange(max(low, -127), min(high, 127) + 1)
    line = np.resize(finite, 256 if len(finite) > 32 else 32)
    codes = np.tile(line, (len(powers), 1))
    if element == "e2m1":
        codes = reference.pack(codes)
    scale = np.repeat((powers + 127).astype(np.uint8)[:, None], len(line) // 32, axis=1)
    parts = {"codes": torch.from_numpy(codes), "scale": torch.from_numpy(scale)}
    inner = get(name).factors(parts).values
    exact = reference.values_of(element)[line].astype(np.float64) * np.exp2(powers.astype(np.float64))[:, None]
    assert np.array_equal(inner.double().numpy(), exact)
    assert torch.equal(get(name).decode(parts, torch.bfloat16), inner)


def test_inner_factor_of_nvfp4_is_exact_for_every_code_and_scale() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), (254, 1))
    scales = np.array([s for s in range(256) if s & 0x7F != 0x7F], np.uint8)[:, None]
    parts = {
        "codes": torch.from_numpy(reference.pack(codes)),
        "scale": torch.from_numpy(scales),
        "amax": torch.tensor([3.3]),
    }
    factors = get("nvfp4").factors(parts)
    exact = reference.values_of("e2m1").astype(np.float64) * reference.e4m3_value(scales).astype(np.float64)
    assert np.array_equal(factors.values.double().numpy(), exact)
    assert (
        factors.epilogue_scale is not None
        and torch.equal(factors.epilogue_scale, parts["amax"])
        and factors.divisor == 2688.0
    )


@pytest.mark.parametrize("name", [name for name in NAMES if get(name).code_dtype not in (None, torch.uint8)])
def test_codes_in_the_dtype_of_their_element_mean_what_bytes_mean(name: str) -> None:
    """Casts on a GPU give such codes."""
    fmt = get(name)
    parts = fmt.encode(
        tensor_of(make("spread", (33, 80), "bfloat16", element_of(name)), "bfloat16"), seed=seed_of(name)
    )
    typed = {**parts, "codes": parts["codes"].view(fmt.code_dtype)}
    assert torch.equal(raw(fmt.decode(typed, torch.float32)), raw(fmt.decode(parts, torch.float32)))
    assert torch.equal(fmt.ceiling(typed), fmt.ceiling(parts))
    assert torch.equal(raw(fmt.factors(typed).values), raw(fmt.factors(parts).values))
    derived = fmt.derive(parts), fmt.derive(typed)
    if derived[0] is not None and derived[1] is not None:
        assert torch.equal(derived[1]["codes"].view(torch.uint8), derived[0]["codes"])
