"""Which kernels are compiled ahead of time, and for which arguments: one line of `CASES` each.

A type is as in Triton's signatures: "*bf16", "i32", "fp32"; ":16" behind it says that the address or the number is
divisible by 16, as Triton sees most arguments at a launch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from duotone import formats
from duotone.dispatch.casts import _spec, _two_level_cast
from duotone.kernels import (
    activations,
    adamw,
    amax,
    attention,
    attention_backward,
    cast,
    decode,
    decode_nvfp4,
    epilogue,
    grouped,
    norms,
    roll,
    rotary,
    rows,
    segment_blocks,
    segment_cast,
)
from duotone.kernels.attention_backward import BackwardOperands, Operand, Weights
from duotone.kernels.launch import Launch


@dataclass(frozen=True)
class Case:
    """A kernel (a `triton.jit` function, or what holds one as `function`) and how it is compiled.

    Each parameter has a type, or is a constant. `name` is the test's id and the key in budgets.json.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    fusion: bool = True
    """Whether a product and a sum may become one operation."""
    registers: int | None = None

    @property
    def function(self) -> Any:
        return getattr(self.kernel, "function", self.kernel)


NAMES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


def launched(name: str, call: Callable[[], object]) -> list[Case]:
    """What `call` launches on a GPU, as cases: its arguments are CPU tensors, and nothing runs."""
    results: list[Case] = []

    def record(
        launch: Launch, programs: int, tensors: Any, integers: Any = (), floats: Any = (), descriptors: Any = ()
    ) -> None:
        constants = dict(launch.options)
        rest = constants.pop("num_warps"), constants.pop("num_stages"), constants.pop("enable_fp_fusion", True)
        rest = *rest, constants.pop("maxnreg", None)
        arguments = *[TensorDescriptor(*each) for each in descriptors], *tensors, *integers, *floats
        options = dict(zip((p.name for p in launch.function.params), arguments, strict=False))
        any_alignment = {p.name for p in launch.function.params if p.do_not_specialize_on_alignment}
        types = {}
        for key, value in options.items():
            if value is None or (isinstance(value, int) and value == 1):
                constants[key] = value
            elif isinstance(value, torch.Tensor):
                types[key] = f"*{NAMES[value.dtype]}" + ":16" * (key not in any_alignment)
            elif isinstance(value, TensorDescriptor):
                types[key] = f"tensordesc<{NAMES[value.base.dtype]}{value.block_shape}>"
            else:
                types[key] = "fp32" if isinstance(value, float) else "i32" + ":16" * (value % 16 == 0)
        label = f"{name}: {launch.function.__name__}" if results else name
        results.append(Case(label, launch.function, types, constants, *rest))

    with mock.patch.object(Launch, "__call__", record):
        call()
    return results


def matrix(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(m, k, dtype=dtype)


def rotary_of(back: bool) -> None:
    heads, angles = torch.empty(2, 64, 3, 16, 128, dtype=torch.bfloat16).unbind(2), torch.empty(64, 128)
    rotary.turn(heads[0], torch.empty(2, 64, 16, 128, dtype=torch.bfloat16), angles, angles, back)


def spec(name: str) -> cast.PlaneSpec:
    """As `duotone.dispatch.casts` describes a format."""
    return _spec(formats.get(name), torch.bfloat16)


def casts(row: str, col: str, m: int, k: int) -> list[Case]:
    kernel = cast.Cast(spec(row), spec(col), row == col and formats.get(row).is_derivable)
    live = torch.zeros(1, dtype=torch.int32) if formats.get(row).is_delayed else None
    scale = torch.ones(1)
    name = f"both planes {row}{'' if row == col else f' and {col}'}{'' if m % 128 == 0 else ', odd sizes'}"
    return launched(name, lambda: kernel(matrix(m, k), (scale, scale), live))


def rewrite(name: str) -> list[Case]:
    """A cast over planes that are there, which a flag turns off."""
    kernel, matrices = cast.Cast(spec(name), spec(name), formats.get(name).is_derivable), matrix(256, 512)
    planes = tuple(
        {"codes": torch.empty_strided(*of[:2], dtype=torch.uint8), "scale": torch.empty_strided(*of[2:4])}
        for of in (cast._buffers(kernel.row, 256, 512), cast._buffers(kernel.col, 512, 256))
        if of is not None
    )
    if kernel.shares_scale:
        planes[1]["scale"] = planes[0]["scale"]
    delayed = (torch.ones(1), None), torch.zeros(1, dtype=torch.int32)
    inputs = delayed if formats.get(name).is_delayed else ()
    return launched(
        f"rewrite of {name}", lambda: kernel.over(matrices, planes, torch.zeros(1, dtype=torch.int32), *inputs)
    )


def on_the_way(fmt: str, act: str, gated: bool) -> list[Case]:
    kernel = cast.Cast(spec(fmt), spec(fmt), formats.get(fmt).is_derivable)
    live = torch.zeros(1, dtype=torch.int32) if formats.get(fmt).is_delayed else None
    wide = matrix(256, 1024 if gated else 512)
    value = activations.value(act, wide, gated)
    slope = activations.gradient(act, matrix(256, 512), wide, gated)
    name = f"{'gated ' * gated}{act} to {fmt}"
    scales = torch.ones(1), None
    return [
        *launched(name, lambda: kernel.produced(value, scales, live)),
        *launched(f"{name}, gradient", lambda: kernel.produced(slope, scales, live)),
    ]


def two_level(row: str, col: str, m: int, k: int) -> list[Case]:
    fmt = formats.get(row)
    result = _two_level_cast(fmt, formats.get(col), row == col and fmt.is_derivable)
    name = f"both planes {row}{'' if row == col else f' and {col}'}{'' if m % 128 == 0 else ', odd sizes'}"
    return launched(name, lambda: result(matrix(m, k), seed=torch.zeros(1, dtype=torch.int64)))


def decode_two_level(name: str, dtype: torch.dtype, scaled: bool, k: int) -> list[Case]:
    parts = formats.get(name).parts(256, k)
    codes, scale, amax = (torch.empty(part.shape, dtype=part.dtype) for part in parts.values())
    kind = f"decode {name}{'' if scaled else ', inner'}{'' if k % 8 == 0 else ', odd sizes'} to {NAMES[dtype]}"
    return launched(kind, lambda: decode_nvfp4.decode(codes, scale, amax if scaled else None, 2688.0, dtype))


def epilogues(rows: int, cols: int, bias: bool, adds: bool = False) -> list[Case]:
    sides = torch.empty(rows), torch.empty(cols)
    add = torch.empty(512, dtype=torch.bfloat16) if bias else None
    y = matrix(256, 512, torch.float32)
    name = f"epilogue of {rows} and {cols} factors{', bias' * bias}{', adding' * adds}"
    out = torch.empty_like(y, dtype=torch.float32 if adds else torch.bfloat16)
    return launched(name, lambda: epilogue.finish(y, *sides, 0.1, add, out, adds))


def decode_scale(name: str) -> torch.dtype:
    dtype = formats.get(name).parts(256, 512)["scale"].dtype
    assert dtype is not None
    return dtype


BOTH = [
    "fp8_e4m3_delayed",
    "fp8_e5m2_tensor",
    "fp8_e4m3_row",
    "fp8_e4m3_1x128",
    "fp8_e4m3_1x128_fp32",
    "fp8_e4m3_128x128",
    "mxfp8_e4m3",
]
SMALL = ["mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"]
CASES = [
    *[case for name in SMALL for case in casts(name, name, 256, 512)],
    *[case for name in SMALL[1:] for case in casts(name, name, 130, 257)],
    *launched("rotary, turned", lambda: rotary_of(False)),
    *launched("rotary, turned back", lambda: rotary_of(True)),
    *launched("rows u8", lambda: rows.contiguous_rows(torch.empty(256, 512, dtype=torch.uint8).t())),
    *[case for name in BOTH for case in casts(name, name, 256, 512)],
    *[case for name in BOTH[:4] + BOTH[-1:] for case in casts(name, name, 130, 257)],
    *casts("fp8_e4m3_1x128", "fp8_e4m3_128x128", 256, 512),
    *[
        case
        for fmt in ("fp8_e4m3_delayed", "fp8_e4m3_1x128", "mxfp8_e4m3")
        for act, gated in (("gelu", False), ("silu", True))
        for case in on_the_way(fmt, act, gated)
    ],
    *launched("gated silu", lambda: activations.materialize(activations.value("silu", matrix(256, 4096), True))),
    *launched("srelu, odd sizes", lambda: activations.materialize(activations.value("srelu", matrix(33, 72), False))),
    *launched(
        "gated silu, gradient",
        lambda: activations.materialize(activations.gradient("silu", matrix(256, 2048), matrix(256, 4096), True)),
    ),
    *launched(
        "gelu, gradient, and its amax",
        lambda: activations.materialize(
            activations.gradient("gelu", matrix(256, 4096), matrix(256, 4096), False), torch.zeros(1, dtype=torch.int32)
        ),
    ),
    *[
        case
        for name in ("mxfp8_e4m3", "fp8_e5m2_row", "fp8_e4m3_128x128")
        for case in launched(
            f"decode {name}",
            lambda name=name: decode.decode(
                spec(name),
                matrix(256, 512, torch.uint8),
                torch.empty(formats.get(name).parts(256, 512)["scale"].shape, dtype=decode_scale(name)),
                torch.bfloat16,
            ),
        )
    ],
    *[
        case
        for length in (16, 1024)
        for case in launched(
            f"roll {length}",
            lambda length=length: roll.roll(
                torch.zeros(4, 4, dtype=torch.int64),
                torch.ones(4),
                length,
                False,
                True,
                8.0,
            ),
        )
    ],
]
FOURS = [
    ("nvfp4", "nvfp4"),
    ("nvfp4", "nvfp4_rht"),
    ("nvfp4_sr", "nvfp4_rht_sr"),
    *[
        (n, n)
        for n in (
            "nvfp4_16x16",
            "nvfp4_16x16_sr",
            "nvfp4_16x16_rht",
            "nvfp4_row",
            "nvfp4_4over6",
            "nvfp4_16x16_4over6_mse",
        )
    ],
]
CASES += [
    *[case for pair in FOURS for case in two_level(*pair, 256, 512)],
    *[case for pair in FOURS[:3] for case in two_level(*pair, 130, 257)],
    *decode_two_level("nvfp4", torch.bfloat16, False, 512),
    *decode_two_level("nvfp4", torch.bfloat16, True, 512),
    *decode_two_level("nvfp4_row", torch.float32, True, 512),
    *decode_two_level("nvfp4", torch.bfloat16, False, 509),
    *epilogues(1, 1, False),
    *epilogues(256, 1, True),
    *epilogues(256, 512, False),
    *epilogues(1, 1, False, True),
]


def in_segments(row: str, col: str, whole: bool, table: bool) -> list[Case]:
    """Eight segments of a matrix, or matrices of their own."""
    kernel = cast.Cast(spec(row), spec(col), row == col and formats.get(row).is_derivable)
    segments = segment_cast.Segments(torch.empty(16, dtype=torch.int32), 8, 256, 256, whole)
    delayed = formats.get(row).is_delayed
    inputs = (torch.ones(1), torch.zeros(1, dtype=torch.int32), 4) if delayed else (None, None, 0)
    where = segment_cast.Table(torch.empty(8, dtype=torch.int64), True) if table else None
    kind = f"{', for grouped products' * whole}{', apart' * table}"
    name = f"segments {row}{'' if row == col else f' and {col}'}{kind}"
    encode = segment_cast.SegmentCast(kernel)
    return launched(name, lambda: encode(matrix(256, 512), segments, inputs, where))


CASES += [
    *in_segments("fp8_e4m3_delayed", "fp8_e4m3_delayed", False, False),
    *in_segments("fp8_e4m3_delayed", "fp8_e4m3_delayed", False, True),
    *in_segments("fp8_e5m2_tensor", "fp8_e5m2_tensor", False, False),
    *in_segments("fp8_e4m3_tensor", "fp8_e4m3_tensor", True, False),
    *in_segments("fp8_e4m3_row", "fp8_e4m3_row", False, False),
    *in_segments("fp8_e4m3_row", "fp8_e4m3_row", True, False),
    *in_segments("fp8_e4m3_row", "fp8_e4m3_row", False, True),
    *launched("ends of segments", lambda: segment_cast.segments_of(torch.zeros(8, dtype=torch.int64), 256)),
]


def in_block_segments(row: str, col: str, table: bool) -> list[Case]:
    """As `in_segments`, in blocks of 128."""
    kernel = cast.Cast(spec(row), spec(col), row == col and formats.get(row).is_derivable)
    segments = segment_cast.Segments(torch.empty(16, dtype=torch.int32), 8, 1024, 1024, not table)
    where = segment_cast.Table(torch.empty(8, dtype=torch.int64), True) if table else None
    encode = segment_blocks.BlockSegmentCast(kernel)
    name = f"segments {row}{'' if row == col else f' and {col}'}{', apart' * table}"
    return launched(name, lambda: encode(matrix(1024, 512), segments, table=where))


CASES += [
    *in_block_segments("fp8_e4m3_1x128", "fp8_e4m3_1x128", False),
    *in_block_segments("fp8_e4m3_1x128", "fp8_e4m3_128x128", False),
    *in_block_segments("fp8_e4m3_128x128", "fp8_e4m3_128x128", True),
]


def grouped_products(first: str, fast: bool, scales: int, square: bool = False) -> list[Case]:
    """y and dw of eight segments, the first operand in E4M3 or E5M2."""
    kernel, lines = grouped.GroupedProduct(fast, scales, square), scales == grouped.LINE.value
    segments = segment_cast.Segments(torch.empty(16, dtype=torch.int32), 8, 256, 1280)
    left, right = formats.get(f"fp8_{first}_tensor").code_dtype, torch.float8_e4m3fn
    assert left is not None
    rows, cols = (torch.ones(8, n) if lines else torch.ones(8, 4)[:, :1] for n in (512, 256))
    of_x = torch.ones(256) if lines else cols
    x, w = matrix(256, 512, left), torch.empty(8, 512, 512, dtype=right)
    dy, xt = matrix(512, 1280, left), matrix(256, 1280, right)
    kind = ("segment", "row", "square block" if square else "block")[scales]
    name = f"{first} per {kind}{', fast' * fast}"
    apart = grouped.Scattered(w[0], 8, 512 * 512, torch.empty(16, dtype=torch.int64))
    bf16, main = torch.bfloat16, torch.empty(8, 512, 256)
    places = segment_cast.Table(torch.arange(8) * 512 * 256, True)
    arguments = dy, xt, (rows, cols), segments, main, places, True
    bias = matrix(8, 512)
    with mock.patch.object(grouped, "_multiprocessors", return_value=132):
        return [
            *launched(f"grouped rows, {name}", lambda: kernel.of_rows(x, w, (of_x, rows), segments, bf16)),
            *launched(f"grouped rows, {name}, bias", lambda: kernel.of_rows(x, w, (of_x, rows), segments, bf16, bias)),
            *launched(f"grouped rows, {name}, apart", lambda: kernel.of_rows(x, apart, (of_x, rows), segments, bf16)),
            *launched(f"grouped columns, {name}", lambda: kernel.of_columns(dy, xt, (rows, cols), segments, bf16)),
            *launched(f"grouped columns, {name}, adding", lambda: kernel.of_columns_into(*arguments)),
        ]


CASES += [
    *grouped_products("e4m3", True, grouped.SEGMENT.value),
    *grouped_products("e5m2", False, grouped.SEGMENT.value),
    *grouped_products("e4m3", True, grouped.LINE.value),
    *grouped_products("e4m3", False, grouped.LINE.value),
    *grouped_products("e4m3", False, grouped.BLOCK.value, True),
    *grouped_products("e4m3", False, grouped.BLOCK.value, False),
    *launched(
        "sums of segments",
        lambda: grouped.sums(matrix(256, 512), segment_cast.Segments(torch.empty(16, dtype=torch.int32), 8, 256, 1280)),
    ),
]


CASES += [case for name in ("fp8_e4m3_delayed", "mxfp8_e4m3") for case in rewrite(name)]


def norm(kind: str, m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> norms.Norm:
    gamma, centred = torch.empty(k, dtype=dtype), kind == "layer norm"
    return norms.Norm(matrix(m, k, dtype), gamma, gamma if centred else None, 1e-5, centred, (m,))


def norm_kernels(kind: str, k: int, dtype: torch.dtype = torch.bfloat16, folds: bool = False) -> list[Case]:
    """Of more rows than a backward has programs; `folds` includes the sum of the partial gradients."""
    name, inputs = f"{kind} {k} {NAMES[dtype]}", norm(kind, 8192, k, dtype)
    rows = torch.empty(8192)
    saved = rows if inputs.centred else None, rows
    needs = True, True, inputs.centred
    return [
        *launched(name, inputs.make),
        *launched(f"{name}, statistics", norm(kind, 8192, k, dtype).measure),
        *launched(f"{name}, statistics and amax", inputs.measure_amax),
        *launched(f"{name}, gradient", lambda: norms.backward(inputs.x, inputs.x, inputs.gamma, *saved, needs))[
            : 1 + folds
        ],
    ]


def normalised(kind: str, fmt: str, m: int, k: int) -> Case:
    """The cast of a norm that is made on the way, without what takes its statistics."""
    kernel = cast.Cast(spec(fmt), spec(fmt), formats.get(fmt).is_derivable)
    live = torch.zeros(1, dtype=torch.int32) if formats.get(fmt).is_delayed else None
    inputs, name = activations.normalised(norm(kind, m, k)), f"{kind} to {fmt}{'' if m % 128 == 0 else ', odd sizes'}"
    result = launched(name, lambda: kernel.produced(inputs, (torch.ones(1), None), live))
    return replace(result[-1], name=name)


ON_THE_WAY = ["fp8_e4m3_delayed", "fp8_e4m3_tensor", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "mxfp8_e4m3"]
CASES += [
    *[case for kind in ("layer norm", "rms norm") for k in (4096, 8192) for case in norm_kernels(kind, k)],
    *norm_kernels("layer norm", 8192, torch.float32, folds=True),
    *norm_kernels("layer norm", 1000),
    *[normalised("layer norm", fmt, 256, 512) for fmt in ON_THE_WAY],
    *[normalised("layer norm", fmt, 130, 272) for fmt in ON_THE_WAY[::2]],
    *[normalised("rms norm", fmt, 256, 512) for fmt in ON_THE_WAY[::2]],
]


def adamw_steps(grad: torch.dtype, out: torch.dtype | None) -> list[Case]:
    """A step of a master, and of a weight in high precision with it."""
    state = (matrix(256, 512, grad), *(matrix(256, 512, torch.float32) for _ in range(3)))
    rounded = None if out is None else matrix(256, 512, out)
    name = f"adamw of {NAMES[grad]} gradients{'' if out is None else f' to {NAMES[out]}'}"
    of_device = f"{name}, captured"
    return [
        *launched(name, lambda: adamw.update(state, RATES, rounded)),
        *launched(of_device, lambda: adamw.update(state, torch.tensor(RATES), rounded)),
    ]


def adamw_planes(name: str, m: int, k: int, live: bool) -> list[Case]:
    """A step that writes both planes under a given scale."""
    fmt = formats.get(name)
    state = (matrix(m, k), *(matrix(m, k, torch.float32) for _ in range(3)))
    codes, scale = matrix(m, k, torch.uint8), torch.ones(1)
    target = adamw.Target(
        *((m, k), fmt.code_dtype, fmt.scale_codec, codes, scale, codes, scale, scale),
        torch.zeros(1, dtype=torch.int32) if live else None,
    )
    label = f"adamw to {name}{', recorded' * live}{'' if m % 128 == 0 else ', odd sizes'}"
    return launched(label, lambda: adamw.update_planes(state, RATES, target))


RATES = (1.0, 0.9, 0.1, 0.99, 0.01, 1e-3, 1.5, 1e-8)
CASES += [
    *adamw_steps(torch.bfloat16, None),
    *adamw_steps(torch.float32, None)[:1],
    *adamw_steps(torch.bfloat16, torch.bfloat16),
    *adamw_planes("fp8_e4m3_delayed", 256, 512, True),
    *adamw_planes("fp8_e5m2_delayed", 256, 512, False),
    *adamw_planes("fp8_e4m3_delayed", 130, 257, True),
]


SPANS, MASK = torch.empty(1, 2, 8192, dtype=torch.int32), torch.empty(2, 1, 4096, 4096, dtype=torch.bool)


def attend(
    heads: int, groups: int, width: int, causal: bool, fast: bool, delayed: bool, masked: bool = False
) -> list[Case]:
    """FP8 attention over 4096 tokens."""
    q, k = (torch.empty(2, 4096, count, width, dtype=torch.float8_e4m3fn) for count in (heads, groups))
    one = torch.ones(1)
    codes, p_scale = (q, k, k.view(groups, width, 2, 4096)), one if delayed else None
    name = (
        f"attention of width {width}{', causal' * causal}{', fast' * fast}{', delayed' * delayed}{', masked' * masked}"
    )
    scales, sight = (one, one, one), (SPANS, MASK) if masked else ()
    options = 0.125, causal, fast, torch.bfloat16
    return launched(name, lambda: attention.attend(codes, scales, p_scale, options, *sight))


def differentiate(name: str, width: int, causal: bool, fast: bool, mix: str, ds: torch.dtype | None) -> list[Case]:
    """Attention's backward over 4096 tokens, with these products in FP8."""
    kind, heads, groups = torch.float8_e4m3fn, 32, 8
    one = torch.ones(1)

    def operand(product: str, count: int, over_tokens: bool = False) -> Operand:
        shape = (count, width, 2, 4096) if over_tokens and product in mix.split() else (2, 4096, count, width)
        return Operand(torch.empty(shape, dtype=kind if product in mix.split() else torch.bfloat16), one)

    operands = BackwardOperands(
        q_row=operand("S", heads), q_col=operand("dK", heads, True), k_row=operand("S", groups),
        k_col=operand("dQ", groups, True), v_row=operand("dP", groups), do_row=operand("dP", heads),
        do_col=operand("dV", heads, True), out=Operand(torch.empty(2, 4096, heads, width, dtype=kind), one),
    )  # fmt: skip
    weights = Weights(kind if "dV" in mix else None, ds, None, one if "delayed" in name else None)
    options = 0.125, causal, fast, torch.bfloat16
    logs = torch.empty(2, heads, 4096)
    sight = (SPANS, MASK) if "masked" in name else ()
    tiles = attention_backward.tiles_for(operands, weights, is_hopper="sm100" not in name)
    _, *cases = launched(
        name, lambda: attention_backward.differentiate(operands, weights, logs, options, *sight, tiles=tiles)
    )
    named = zip(("dK and dV", "dQ"), cases, strict=True)
    return [replace(case, name=f"attention, {what} of width {width}, {name}") for what, case in named]


def prepared() -> object:
    heads = Operand(torch.empty(2, 4096, 32, 128), None)
    return attention_backward.prepared(heads, heads, torch.empty(2, 32, 4096), Weights(None, None, None, None))


CASES += [
    *attend(32, 8, 128, True, True, False),
    *attend(32, 8, 128, True, False, True),
    *attend(16, 16, 64, False, True, False),
    *attend(32, 8, 128, False, True, False, True),
    *launched("attention, D", prepared),
    *differentiate("S and dV in FP8", 128, True, True, "S dV", None),
    *differentiate("all in FP8, delayed", 128, True, True, "S dV dP dQ dK", torch.float8_e5m2),
    *differentiate("high precision", 64, False, False, "", None),
    *differentiate("S and dV in FP8, masked", 128, False, True, "S dV", None),
    *differentiate("all in FP8, masked", 128, False, True, "S dV dP dQ dK", torch.float8_e5m2),
    *differentiate("dS in FP8, queries in bf16, as on sm100", 128, True, True, "S dV", torch.float8_e5m2)[:1],
    *differentiate("dS in FP8, queries in bf16, as on sm100", 256, True, True, "S dV", torch.float8_e5m2)[:1],
]
CASES += launched("amaxes of matrices", lambda: amax.amaxes([matrix(256, 512), matrix(128, 64)]))
CASES += launched("census of a matrix", lambda: amax.tensor_census(matrix(256, 512), torch.empty(3, dtype=torch.int64)))
