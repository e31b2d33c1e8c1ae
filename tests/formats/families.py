"""Families of inputs that formats have to survive, each a function of shape, dtype and element."""

import zlib
from collections.abc import Callable

import ml_dtypes
import numpy as np
from reference import BITS, LARGEST, Array, as_dtype, values_of

Family = Callable[[np.random.Generator, tuple[int, int], str, str], Array]
SMALLEST_EXPONENT = {"float32": -149, "bfloat16": -133, "float16": -24}
LARGEST_EXPONENT = {"float32": 127, "bfloat16": 127, "float16": 15}
MAXIMUM = {"float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38, "float16": 65504.0}
NUMPY_TYPE = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def normal(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    return rng.standard_normal(shape)


def zeros(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    return np.zeros(shape)


def negative_zeros(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    return np.where(rng.random(shape) < 0.5, -0.0, 0.0)


def normal_and_zeros(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    """Signed zeros inside, and whole blocks of them."""
    x = np.where(rng.random(shape) < 0.4, -0.0, rng.standard_normal(shape))
    x[: shape[0] // 2, : shape[1] // 2] *= 0.0
    return x


def constant(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    return np.full(shape, 0.1)


def denormal_corner(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    """Blocks of the input's denormals beside ordinary ones."""
    x = rng.standard_normal(shape)
    corner = x[: max(1, shape[0] // 2), : max(1, shape[1] // 2)]
    corner[:] = rng.integers(-100, 100, corner.shape) * 2.0 ** SMALLEST_EXPONENT[dtype]
    return x


def denormals(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    return rng.integers(-127, 128, shape) * 2.0 ** SMALLEST_EXPONENT[dtype]


def tiny(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    """Around the amax where MAX/amax overflows, rows above and below it."""
    power = np.linspace(-125, -116, shape[0])[:, None] + np.log2(LARGEST[element] / 448.0)
    return rng.standard_normal(shape) * np.exp2(np.maximum(power, SMALLEST_EXPONENT[dtype] + 3.0))


def huge(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    x = rng.standard_normal(shape) * (0.2 * MAXIMUM[dtype])
    x.flat[:: max(1, x.size // 5)] = -MAXIMUM[dtype]
    return np.clip(x, -MAXIMUM[dtype], MAXIMUM[dtype])


def one_infinity(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    x = rng.standard_normal(shape)
    x[shape[0] // 2, shape[1] // 3] = -np.inf
    return x


def infinities(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    """Beside values so large that the largest E8M0 scale leaves something of them."""
    x = rng.choice([-1.0, 0.5, 0.0], shape) * MAXIMUM[dtype]
    return np.where(rng.random(shape) < 0.05, rng.choice([-np.inf, np.inf], shape), x)


def nans(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    """Sprinkled, of both signs, and one row and one corner of nothing else."""
    x = rng.standard_normal(shape)
    x[rng.random(shape) < 0.1] = np.nan
    x[shape[0] // 2] = -np.nan
    x[: shape[0] // 3 + 1, : shape[1] // 2 + 1] = np.nan
    return np.where(rng.random(shape) < 0.5, -x, x)


def all_nan(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    return np.full(shape, np.nan)


def nan_and_infinity(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    return rng.choice([np.nan, np.inf, -np.inf, 1.0, -0.0], shape)


def spread(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    """Every magnitude that the input has, side by side."""
    return rng.standard_normal(shape) * np.exp2(rng.uniform(SMALLEST_EXPONENT[dtype], LARGEST_EXPONENT[dtype], shape))


def steep(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    """Columns fall by powers of two, so that blocks underflow one after another under a common scale."""
    slope = 40.0 if dtype != "float16" else 20.0
    return rng.standard_normal(shape) * np.exp2(-slope * np.arange(shape[1]) / shape[1])


def boundary(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    """Row by row, group of 16 by group, amax is MAX*2^k or its neighbour above or below."""
    groups = -(-shape[1] // 16)
    power = rng.integers(-6, 7, (shape[0], groups))
    power[-1] = 8  # the row of the tensor's amax
    exact = (LARGEST[element] * np.exp2(power - (8.0 if element == "e5m2" else 0.0))).astype(NUMPY_TYPE[dtype])
    away = np.array(np.inf, NUMPY_TYPE[dtype]), np.array(0, NUMPY_TYPE[dtype])
    choice = rng.integers(0, 3, exact.shape)
    near = np.where(choice == 0, exact, np.where(choice == 1, *(np.nextafter(exact, to) for to in away)))
    top = np.repeat(near.astype(np.float64), 16, axis=1)[:, : shape[1]]
    x = top * rng.uniform(-0.95, 0.95, shape)
    x[:, ::16] = top[:, ::16] * rng.choice([-1, 1], top[:, ::16].shape)
    return x


def ties(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    """Values and midpoints of the element, exact in the input, under a block amax of exactly MAX*2^k."""
    values = values_of(element)[: 2 ** (BITS[element] - 1)]
    finite = np.unique(values[np.isfinite(values)])
    middle = (finite[1:] + finite[:-1]) / 2
    x = rng.choice(np.concatenate([middle, finite]), shape) * rng.choice([-1.0, 1.0], shape)
    x[:, ::16] = LARGEST[element]
    return x * np.exp2(rng.integers(-3, 4, (shape[0], 1)))


def ties_under_outlier(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    """As `ties`, with one value that makes the NVFP4 tensor scale a power of two."""
    x = ties(rng, shape, dtype, element)
    x[0, -1] = 2688.0
    return x


def grid(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    """Small integers: 4-over-6 candidates with equal or nearly equal errors."""
    return rng.integers(-6, 7, shape) / 2.0


def few_values(rng: np.random.Generator, shape: tuple[int, int], dtype: str, element: str) -> Array:
    """Zeros and one magnitude in each group of 16: both 4-over-6 candidates are as good."""
    x = rng.choice([-1.0, 0.0, 1.0], shape)
    return x * np.repeat(np.exp2(rng.integers(-2, 3, (shape[0], -(-shape[1] // 16)))), 16, axis=1)[:, : shape[1]]


FAMILIES: dict[str, Family] = {
    family.__name__: family
    for family in (
        normal,
        zeros,
        negative_zeros,
        normal_and_zeros,
        constant,
        denormal_corner,
        denormals,
        tiny,
        huge,
        one_infinity,
        infinities,
        nans,
        all_nan,
        nan_and_infinity,
        spread,
        steep,
        boundary,
        ties,
        ties_under_outlier,
        grid,
        few_values,
    )
}


def make(name: str, shape: tuple[int, int], dtype: str = "float32", element: str = "e2m1") -> Array:
    """fp32 array of a family, holding values of `dtype`; the same for the same arguments."""
    rng = np.random.default_rng(zlib.crc32(f"{name} {shape} {dtype} {element}".encode()))
    with np.errstate(all="ignore"):
        x = FAMILIES[name](rng, shape, dtype, element).astype(np.float32)
        return as_dtype(np.ascontiguousarray(x), dtype)
