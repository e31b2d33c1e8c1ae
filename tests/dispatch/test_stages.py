"""Every backend of the cast stages gives the bits of plain torch, and compiling stays bounded."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from duotone import formats
from duotone.dispatch import stages as dispatch
from duotone.dispatch.compiler import compiler_reason
from duotone.dispatch.stages import CHUNKED, COMPILED
from duotone.formats.elements import PLAIN, Stages
from duotone.formats.geometry import TENSOR

NAMES = [
    "fp8_e4m3_tensor",
    pytest.param("fp8_e5m2_row_pow2", marks=pytest.mark.rest),
    pytest.param("fp8_e4m3_1x128_fp32", marks=pytest.mark.rest),
    pytest.param("fp8_e5m2_128x128", marks=pytest.mark.slow),  # square blocks: nvfp4_16x16 has them too
    "mxfp8_e4m3",
    pytest.param("mxfp8_e5m2_32x32", marks=pytest.mark.slow),
    pytest.param("mxfp6_e3m2", marks=pytest.mark.rest),
    pytest.param("mxfp4", marks=pytest.mark.slow),  # the blocks of MXFP6 with the elements of NVFP4
    "nvfp4_rht_sr",
    pytest.param("nvfp4_16x16", marks=pytest.mark.rest),
    pytest.param(
        "nvfp4_row", marks=pytest.mark.slow
    ),  # the blocks and elements of NVFP4, and amaxes that are not compiled
    "nvfp4_4over6_mse",
]

needs_compiler = pytest.mark.skipif(
    bool(compiler_reason()), reason=f"{compiler_reason()}; `apt-get install g++` provides it"
)


def bits(t: Tensor) -> Tensor:
    """The tensor's bits, with all NaNs of a float made one."""
    t = t.contiguous()
    if t.is_floating_point():
        t = torch.where(torch.isnan(t), torch.full_like(t, torch.nan), t).to(torch.float32)
        return t.reshape(-1).view(torch.int32)
    return t.reshape(-1)


DTYPES = torch.float32, torch.bfloat16


def assert_same_bits(fmt: formats.Format, x: Tensor, backend: Stages, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    expected = fmt.encode(x, seed=77, stages=PLAIN)
    result = fmt.encode(x, seed=77, stages=backend)
    for name, part in expected.items():
        assert result[name].shape == part.shape
        assert torch.equal(bits(result[name]), bits(part)), f"{fmt.name} {name}"
    for dtype in dtypes:
        assert torch.equal(bits(fmt.decode(result, dtype, backend)), bits(fmt.decode(expected, dtype, PLAIN)))
    # Products take their order of summation from the strides, so these are part of "the same bits".
    for parts in (result, fmt.derive(result)):
        if parts is not None:
            inner, plain = fmt.factors(parts, backend).values, fmt.factors(parts, PLAIN).values
            assert torch.equal(bits(inner), bits(plain))
            assert inner.stride() == plain.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", formats.names())
def test_chunked_stages_have_the_bits_of_plain_torch(
    name: str, dtype: torch.dtype, awkward: Tensor, monkeypatch
) -> None:
    monkeypatch.setattr("duotone.dispatch.stages.CHUNK", 512)  # many pieces, also a short last one
    x = awkward.to(dtype)
    for view in (x, x.t(), x[1:, :150], x[::2, 3:40]):
        assert_same_bits(formats.get(name), view, CHUNKED)


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_compiled_stages_have_the_bits_of_plain_torch(name: str, awkward: Tensor) -> None:
    """Decoded to the dtypes in turn: each takes a kernel more, and a second to compile."""
    x, turn = awkward.to(torch.bfloat16), formats.names().index(name) % 2
    for view in (x, x.t(), x[1:, :150]):
        assert_same_bits(formats.get(name), view, COMPILED, DTYPES[turn : turn + 1])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", formats.names())
def test_compiled_stages_decode_to_each_dtype(name: str, awkward: Tensor) -> None:
    assert_same_bits(formats.get(name), awkward.to(torch.bfloat16), COMPILED)


@needs_compiler
def test_compiled_stages_have_the_bits_of_plain_torch_on_fp32_input(awkward: Tensor) -> None:
    for name in ("mxfp8_e4m3", "nvfp4_rht_sr"):
        assert_same_bits(formats.get(name), awkward, COMPILED)


@needs_compiler
def test_new_sizes_equal_sizes_and_gradients_compile_no_new_frames() -> None:
    fmt = formats.get("mxfp8_e4m3")
    counters = torch._dynamo.utils.counters["frames"]

    def encode_both(rows: int, cols: int) -> None:
        x = torch.randn(rows, cols, dtype=torch.bfloat16)
        for view in (x, x.t()):
            fmt.decode(fmt.encode(view, stages=COMPILED), torch.bfloat16, COMPILED)

    encode_both(192, 320)
    before = dict(counters)
    for rows, cols in ((512, 512), (1024, 1024), (32 * 32, 64), (64, 1024), (96, 4096), (608, 1280)):
        encode_both(rows, cols)
    weight = torch.nn.Parameter(torch.randn(256, 256, dtype=torch.bfloat16))
    with torch.no_grad():
        fmt.encode(weight, stages=COMPILED)
    fmt.encode(weight, stages=COMPILED)
    assert dict(counters) == before


@needs_compiler
def test_views_with_gaps_compile_no_new_rotation() -> None:
    """Each would take seconds, and Dynamo stops after a few."""
    counters = torch._dynamo.utils.counters["frames"]
    wide = torch.randn(512, 1024).bfloat16()
    for x in (wide, wide.t()):
        COMPILED.rotate(x)
    before = dict(counters)
    for x in (wide[1:, :144], wide[::2, ::4], wide[::2, ::4].t(), wide[:1, :1].expand(256, 256)):
        assert torch.equal(COMPILED.rotate(x), PLAIN.rotate(x))
    assert dict(counters) == before


@needs_compiler
def test_rows_of_a_matrix_that_one_scale_covers_compile_no_new_frames() -> None:
    """However few they are: a last batch, or a sequence of another length."""
    counters = torch._dynamo.utils.counters["frames"]
    before: dict[str, int] = {}
    for rows in (300, 129, 127, 100, 77, 50, 33):
        x = torch.randn(rows, 300)
        assert torch.equal(COMPILED.amax(TENSOR.view(x)), PLAIN.amax(TENSOR.view(x)))
        before = before or dict(counters)
    assert dict(counters) == before


def test_small_tensors_stay_eager_and_large_ones_follow_the_compiler(monkeypatch) -> None:
    small, large = torch.empty(32, 32), torch.empty(256, 256)
    monkeypatch.setattr(dispatch, "compiler_reason", lambda: "")
    assert dispatch.stages_for(small) is PLAIN
    assert dispatch.stages_for(large) is COMPILED
    monkeypatch.setattr(dispatch, "compiler_reason", lambda: "no compiler")
    assert dispatch.stages_for(large) is CHUNKED
    assert dispatch.stages_for(torch.empty(256, 256, device="meta")) is PLAIN


class Recorder(TorchDispatchMode):
    """Counts the operators that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


@needs_compiler
def test_under_a_dispatch_mode_stages_are_eager_because_dynamo_would_give_compiled_ones_up_for_good() -> None:
    x = torch.randn(256, 512, dtype=torch.bfloat16)
    fmt = formats.get("mxfp8_e4m3")
    with Recorder() as recorder:
        assert dispatch.stages_for(x) is CHUNKED
        fmt.encode(x, stages=dispatch.stages_for(x))
    assert recorder.operators > 10
    assert dispatch.stages_for(x) is COMPILED


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "fp8_e5m2_tensor", "nvfp4_rht_sr"])
def test_gradients_without_a_memory_order_are_cast_like_their_copies(name: str) -> None:
    """An expanded tensor, such as the gradient of a sum, and one with gaps in both directions."""
    fmt = formats.get(name)
    wide = torch.randn(512, 1024).bfloat16()
    for x in (torch.ones((), dtype=torch.bfloat16).expand(256, 256), wide[::2, ::4]):
        backend = dispatch.stages_for(x)
        for inputs, plane in ((x, "row"), (x.t(), "col")):
            result = fmt.encode(inputs, seed=3, plane=plane, stages=backend)
            want = fmt.encode(inputs.clone(memory_format=torch.contiguous_format), seed=3, plane=plane)
            assert all(torch.equal(result[part], value) for part, value in want.items())
