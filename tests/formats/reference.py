"""What every format means, in NumPy, written from the specification and not from the code under test.

float32 arithmetic, element casts by ml_dtypes with saturation and NaN stated here, Philox in Python integers.
Speed only has to allow small matrices.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

FLT_MAX = np.float32(3.4028234663852886e38)
INPUT_MAX = {
    "float32": FLT_MAX,
    "bfloat16": np.float32(3.3895313892515355e38),
    "float16": np.float32(65504.0),
}
ELEMENT_TYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0}
BITS = {"e4m3": 8, "e5m2": 8, "e2m1": 4, "e2m3": 6, "e3m2": 6}
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 7, "e2m3": 31, "e3m2": 31}
PLANE_WORD = {"row": 0, "col": 1}
SIXTH = np.uint32(0x3E2AAAAB).view(np.float32)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
WHOLE = 0


@dataclass(frozen=True)
class Meaning:
    """The fields that a name stands for; `rows` and `cols` of a block, WHOLE for the whole extent."""

    element: str
    rows: int
    cols: int
    scale: str  # "fp32", "pow2", "e8m0" or "e4m3"
    overflow_of_input: bool = False
    hadamard: bool = False
    stochastic: bool = False
    per_row: bool = False
    four_over_six: bool = False
    block_max: float = 448.0
    squared: bool = False


def meaning(name: str) -> Meaning:
    """The fields of a registered name other than `identity`."""
    words = name.split("_")
    if words[0] == "nvfp4":
        square = "16x16" in words
        four = "4over6" in words
        return Meaning(
            "e2m1",
            16 if square else 1,
            16,
            "e4m3",
            hadamard="rht" in words,
            stochastic="sr" in words,
            per_row="row" in words,
            four_over_six=four,
            block_max=256.0 if four and "448" not in words else 448.0,
            squared="mse" in words,
        )
    if words[0].startswith("mxfp"):
        element = "e2m1" if name == "mxfp4" else words[1]
        return Meaning(element, 32 if "32x32" in words else 1, 32, "e8m0")
    rows, cols = {"tensor": (WHOLE, WHOLE), "row": (1, WHOLE), "1x128": (1, 128), "128x128": (128, 128)}[words[2]]
    in_blocks = cols != WHOLE
    scale = words[3] if len(words) > 3 else "pow2" if in_blocks else "fp32"
    return Meaning(words[1], rows, cols, scale, overflow_of_input=in_blocks)


# Elements


def values_of(element: str) -> Array:
    """fp32 value of every code, 2**bits of them."""
    codes = np.arange(2 ** BITS[element], dtype=np.uint8)
    return codes.view(ELEMENT_TYPES[element]).astype(np.float32)


def cast(v: Array, element: str) -> Array:
    """fp32 -> codes: nearest, ties to even, saturating, NaN to one code."""
    limit = np.float32(LARGEST[element])
    is_nan = np.isnan(v)
    finite = np.clip(np.where(is_nan, np.float32(0), v), -limit, limit)
    codes = finite.astype(ELEMENT_TYPES[element]).view(np.uint8)
    return np.where(is_nan, np.uint8(NAN_CODE[element]), codes).astype(np.uint8)


def e4m3_value(codes: Array) -> Array:
    return values_of("e4m3")[codes]


def cast_stochastic(v: Array, bits: Array) -> Array:
    """fp32 and 8 random bits -> E2M1 values."""
    with np.errstate(all="ignore"):
        a = np.abs(v)
        t = np.float32(bits / 256) * _step(a) + a  # the product is exact, so this is one fma
        r = np.minimum(np.floor(t / _step(t)) * _step(t), np.float32(6))
    return np.where(np.isnan(v), np.float32(6), np.copysign(r, v)).astype(np.float32)


def _step(t: Array) -> Array:
    return np.where(t < 2, 0.5, np.where(t < 4, 1.0, 2.0)).astype(np.float32)


def pack(codes: Array) -> Array:
    """Two codes to a byte, the even element in the low nibble; a missing last one is 0."""
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def unpack(packed: Array) -> Array:
    out = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    out[:, 0::2] = packed & 15
    out[:, 1::2] = packed >> 4
    return out


# Random stream


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10: four 32-bit words from a counter of four and a key of two."""
    c, (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = (p1 >> 32 ^ c[1] ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ k1, p0 & 0xFFFFFFFF)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def random_bytes(seed: int, rows: int, cols: int, plane: str) -> Array:
    """8 bits for each element of a plane, counted in row-major order."""
    seed %= 2**64
    out = np.zeros(rows * cols, np.uint8)
    for block in range(-(-rows * cols // 16)):
        counter = (block & 0xFFFFFFFF, block >> 32, PLANE_WORD[plane], 0)
        words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
        for e in range(16 * block, min(16 * block + 16, rows * cols)):
            out[e] = words[e % 16 // 4] >> 8 * (e % 4) & 0xFF
    return out.reshape(rows, cols)


# Hadamard


def rotation() -> Array:
    """R = diag(sign) H16 / 4."""
    h = np.array([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)], np.float32)
    return SIGNS[:, None] * h / np.float32(4)


def rotate(x: Array) -> Array:
    """fp32 -> bf16 values in fp32, width padded to 16: fp32 sums in order, one rounding to bf16."""
    u = as_dtype(x, "bfloat16")
    u = np.pad(u, ((0, 0), (0, -u.shape[1] % 16)))
    matrix = rotation()
    out = np.zeros_like(u)
    with np.errstate(all="ignore"):
        for start in range(0, u.shape[1], 16):
            group = u[:, start : start + 16]
            total = group[:, :1] * matrix[0]
            for i in range(1, 16):
                total = total + group[:, i : i + 1] * matrix[i]
            out[:, start : start + 16] = total
    return as_dtype(out, "bfloat16")


# Scales


def as_dtype(x: Array, dtype: str) -> Array:
    """fp32 values rounded to a dtype and back."""
    with np.errstate(all="ignore"):
        kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
        return x.astype(kind).astype(np.float32)


def tiles(x: Array, rows: int, cols: int) -> Array:
    """(M, K) -> (down, across, rows, cols), missing elements 0."""
    m, k = x.shape
    rows, cols = rows or m, cols or k
    down, across = (-(-m // rows) if rows else 1), (-(-k // cols) if cols else 1)
    out = np.zeros((down, across, rows, cols), x.dtype)
    for i in range(down):
        for j in range(across):
            part = x[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols]
            out[i, j, : part.shape[0], : part.shape[1]] = part
    return out


def untile(t: Array, m: int, k: int) -> Array:
    down, across, rows, cols = t.shape
    out = np.zeros((m, k), t.dtype)
    for i in range(down):
        for j in range(across):
            part = out[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols]
            part[:] = t[i, j, : part.shape[0], : part.shape[1]]
    return out


def amax_of(x: Array, axes: tuple[int, ...]) -> Array:
    """max |x| with NaN ignored, from 0."""
    return np.fmax.reduce(np.abs(x), axis=axes, initial=np.float32(0)).astype(np.float32)


def fp32_scale(amax: Array, largest: float, overflow: np.float32, pow2: bool) -> Array:
    """The encode scale of an amax."""
    with np.errstate(all="ignore"):
        scale = np.float32(largest) / amax
    scale = np.where(np.isinf(scale), overflow, scale).astype(np.float32)
    if pow2:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return np.where((amax == 0) | ~np.isfinite(amax), np.float32(1), scale).astype(np.float32)


def e8m0(amax: Array, largest: float) -> Array:
    """E8M0 codes: amax / MAX rounded up to a power of two."""
    with np.errstate(all="ignore"):
        v = (amax * np.float32(1 / largest)).astype(np.float32)
    bits = v.view(np.uint32)
    exponent, mantissa = (bits >> 23 & 0xFF).astype(int), (bits & 0x7FFFFF).astype(int)
    code = np.where(exponent == 0, mantissa > 0x400000, np.minimum(exponent + (mantissa > 0), 254))
    return np.where(np.isnan(v), 255, np.where(np.isinf(v), 254, code)).astype(np.uint8)


def e8m0_value(codes: Array) -> Array:
    exact = np.ldexp(np.float64(1), codes.astype(int) - 127)
    return np.where(codes == 255, np.nan, exact).astype(np.float32)


def global_scale(g: Array, block_max: float) -> Array:
    """S of an fp32 amax."""
    with np.errstate(all="ignore"):
        s = np.fmin(np.float32(block_max * 6) / g, FLT_MAX)
    return np.where((g == 0) | (s == 0), np.float32(1), s).astype(np.float32)


def fp4_multiplier(code: Array, s: Array) -> Array:
    """q, by which elements are multiplied."""
    with np.errstate(all="ignore"):
        d = np.float32(1) / s
        return np.fmin(np.float32(1) / (e4m3_value(code) * d), FLT_MAX).astype(np.float32)


def choose_four_or_six(blocks: Array, amax: Array, g: Array, s: Array, of: Meaning) -> tuple[Array, Array]:
    """(E4M3 codes, multipliers) of the candidate with the smaller error; a tie goes to 6."""
    with np.errstate(all="ignore"):
        base = (amax / np.float32(6)) * s
        s4 = cast(np.fmin(base * np.float32(1.5), np.float32(448)), "e4m3")
        s6 = cast(np.fmin(base, np.float32(448)), "e4m3")
        e4, e6 = (candidate_error(blocks, code, g, s, of) for code in (s4, s6))
        code = np.where(e4 < e6, s4, s6)
    return code, fp4_multiplier(code, s)


def candidate_error(blocks: Array, code: Array, g: Array, s: Array, of: Meaning) -> Array:
    """Summed error of a grid of (rows, 16) blocks: in order along a row, then by halves over the rows."""
    q, scale = fp4_multiplier(code, s), e4m3_value(code)
    total = np.zeros(blocks.shape[:3], np.float32)
    for i in range(16):
        x = blocks[..., i]
        value = values_of("e2m1")[cast(x * q[..., None], "e2m1")]
        product = (value * scale[..., None]) * g[..., None]
        d = product / np.float32(6 * of.block_max) - x
        total = total + (d * d if of.squared else np.abs(d))
    while total.shape[2] > 1:
        half = total.shape[2] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


# Formats


def encode(
    of: str | Meaning,
    x: Array,
    dtype: str = "float32",
    *,
    scale: Array | None = None,
    amax: Array | None = None,
    seed: int = 0,
    plane: str = "row",
) -> Arrays:
    """fp32 `x` holding values of `dtype` -> codes, scale and, for NVFP4, amax.

    `scale` multiplies x (scalar or one per row); `amax` replaces the one taken from x.
    """
    of = meaning(of) if isinstance(of, str) else of
    if of.hadamard:
        x, dtype = rotate(x), "bfloat16"
    m, k = x.shape
    blocks = tiles(x, of.rows, of.cols)
    block_amax = amax_of(blocks, (2, 3))
    parts: Arrays = {}
    if of.scale == "e4m3":
        multiplier, parts["scale"], parts["amax"] = two_level(x, blocks, block_amax, of, amax)
    elif of.scale == "e8m0":
        code = e8m0(block_amax, LARGEST[of.element])
        multiplier = e8m0_value(254 - code)  # 2^(127-e); e = 255 cannot arise, as NaN is ignored
        parts["scale"] = code
    else:
        if amax is not None:
            block_amax = amax.reshape(block_amax.shape)
        overflow = INPUT_MAX[dtype] if of.overflow_of_input else FLT_MAX
        multiplier = fp32_scale(block_amax, LARGEST[of.element], overflow, of.scale == "pow2")
        if scale is not None:
            multiplier = scale.reshape(multiplier.shape)
        with np.errstate(all="ignore"):
            parts["scale"] = np.float32(1) / multiplier
        if (of.rows, of.cols) == (WHOLE, WHOLE):
            parts["scale"] = parts["scale"].reshape(1)
    with np.errstate(all="ignore"):
        scaled = blocks * multiplier[..., None, None]
    if of.stochastic:
        bits = tiles(random_bytes(seed, m, k, plane), of.rows, of.cols)
        scaled = cast_stochastic(scaled, bits)
    codes = untile(cast(scaled, of.element), m, k)
    return {"codes": pack(codes) if of.element == "e2m1" else codes, **parts}


def two_level(
    x: Array, blocks: Array, block_amax: Array, of: Meaning, amax: Array | None
) -> tuple[Array, Array, Array]:
    """Multipliers (grid), E4M3 codes (M, grid across) and the fp32 amax of NVFP4."""
    m = x.shape[0]
    g = amax_of(x, (1,)) if of.per_row else amax_of(x, (0, 1)).reshape(1)
    if amax is not None:
        g = np.asarray(amax, np.float32).reshape(g.shape)
    on_grid = np.broadcast_to(g[:, None], block_amax.shape)
    s = global_scale(on_grid, of.block_max)
    if of.four_over_six:
        code, multiplier = choose_four_or_six(blocks, block_amax, on_grid, s, of)
    else:
        with np.errstate(all="ignore"):
            code = cast(np.fmin(block_amax * (s * SIXTH), FLT_MAX), "e4m3")
        multiplier = fp4_multiplier(code, s)
    return multiplier, np.repeat(code, of.rows, axis=0)[:m], g


def decode_fp32(of: str | Meaning, parts: Arrays) -> Array:
    """fl(value(code) * factor), one code after the other, as fp32."""
    of = meaning(of) if isinstance(of, str) else of
    codes = unpack(parts["codes"]) if of.element == "e2m1" else parts["codes"]
    value = values_of(of.element)[codes]
    with np.errstate(all="ignore"):
        if of.scale == "e4m3":
            k = np.float32(1 / (6 * of.block_max))
            factor = ((e4m3_value(parts["scale"]) * parts["amax"][:, None]) * k).astype(np.float32)
            factor = np.repeat(factor, 16, axis=1)[:, : value.shape[1]]
        else:
            factor = e8m0_value(parts["scale"]) if of.scale == "e8m0" else parts["scale"]
            factor = spread(factor, of, value.shape)
        return (value * factor).astype(np.float32)


def spread(scale: Array, of: Meaning, shape: tuple[int, ...]) -> Array:
    """A value per block -> a value per element."""
    scale = scale.reshape(-1, 1) if scale.ndim == 1 else scale
    rows, cols = of.rows or shape[0], of.cols or shape[1]
    return np.repeat(np.repeat(scale, rows, axis=0), cols, axis=1)[: shape[0], : shape[1]]


def is_transposable(name: str) -> bool:
    """Whether the columnwise plane is the exact transpose of the rowwise one."""
    of = meaning(name)
    return of.rows == of.cols and not of.hadamard


def names() -> list[str]:
    """Every name that ships, identity excepted."""
    fp8 = [
        f"fp8_{e}_{block}{suffix}"
        for e in ("e4m3", "e5m2")
        for block, suffixes in (
            ("tensor", ("", "_pow2")),
            ("row", ("", "_pow2")),
            ("1x128", ("", "_fp32", "_e8m0")),
            ("128x128", ("", "_fp32")),
        )
        for suffix in suffixes
    ]
    mx = [f"mxfp8_{e}{block}" for e in ("e4m3", "e5m2") for block in ("", "_32x32")]
    plain = [f"nvfp4{b}{r}{s}" for b in ("", "_16x16") for r in ("", "_rht") for s in ("", "_sr")] + ["nvfp4_row"]
    four = [
        f"nvfp4{b}_4over6{top}{error}" for b in ("", "_16x16", "_row") for top in ("", "_448") for error in ("", "_mse")
    ]
    return [*fp8, *mx, "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", *plain, *four]
