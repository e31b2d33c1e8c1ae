"""FP8 products by cuBLASLt itself, which torch has loaded. Unlike torch's, they may be added to stored values.

cuBLAS stores matrices by columns. Its A is our second operand, its B our first, and its result is the transpose of ours
in the same memory. Numbers are those of cublasLt.h of CUDA 12.9 and 13.
"""

import ctypes
import functools
import os
import threading
import weakref
from ctypes import c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from typing import NamedTuple

import torch
from torch import Tensor

from duotone.formats import ROW, TENSOR, Block

TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
"""cudaDataType."""
SCALES = {TENSOR: 0, ROW: 3, Block(1, 128): 4, Block(128, 128): 5}
"""cublasLtMatmulMatrixScale_t, by the block of an fp32 scale."""
COMPUTE_32F, TRANSPOSED = 68, 1
TRANSPOSE_A, SCALE_A, SCALE_B, FAST, KIND_A, KIND_B = 3, 17, 18, 25, 31, 32
"""Attributes of a product (cublasLtMatmulDescAttributes_t)."""
MOST_WORKSPACE, ALIGNMENTS = 1, (5, 6, 7, 8)
"""What the heuristic is told (cublasLtMatmulPreferenceAttributes_t); alignments of A, B, C and D."""

WORKSPACE = 32 << 20
"""Bytes of workspace that an algorithm may ask for: as many as torch allows on Hopper, so both take the same one."""
ALIGNED = 256
"""Bytes of alignment. No algorithm asks for more."""
REMEMBERED = 1024
OLDEST = 120900
"""The version that brought scales per row and per block."""
NOT_SUPPORTED = 15
"""cublasStatus_t: no algorithm takes the product."""

ZERO, ONE = c_float(0.0), c_float(1.0)


Shape = tuple[int, int, int, torch.dtype, str, int]
"""What an algorithm depends on: rows, columns, stride, dtype, the block of a scale, alignment."""
Place = tuple[int, int, int, torch.dtype, int]
"""The same of a result: rows, columns, stride, dtype and alignment. It has no scale."""


class Side(NamedTuple):
    """An operand: FP8 codes (M, K), K next to each other, their decode scales as cuBLAS reads them, and the block
    of one scale."""

    codes: Tensor
    scale: Tensor
    kind: Block

    def shape(self) -> Shape:
        """What an algorithm depends on."""
        rows, cols = self.codes.shape
        return rows, cols, max(self.codes.stride(0), cols), self.codes.dtype, self.kind, _alignment(self.codes)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """cuBLASLt as torch has loaded it. None if torch has it in another library, or one older than `OLDEST`."""
    name = f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        loaded = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # not loaded; no such flags on Windows
        return None
    if loaded.cublasLtGetVersion() < OLDEST:
        return None
    loaded.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
    return loaded


def _call(name: str, *arguments: object, allowed: int = 0) -> int:
    status = getattr(library(), f"cublasLt{name}")(*arguments)
    if status not in (0, allowed):
        raise RuntimeError(f"cublasLt{name} failed with cublasStatus_t {status}")
    return status


def _created(name: str, *arguments: object) -> c_void_p:
    handle = c_void_p()
    _call(f"{name}Create", ctypes.byref(handle), *arguments)
    return handle


@functools.cache
def _handle(device: int) -> c_void_p:
    """The handle of the device, which has to be the current one. Threads share it."""
    return _created("")


class _Product:
    """A product of one shape: its descriptors and an algorithm. None if cuBLAS has no algorithm."""

    def __init__(self, a: Shape, b: Shape, out: Place, fast: bool, device: int) -> None:
        self.device, self.lock = device, threading.Lock()
        self.product = self._create("MatmulDesc", COMPUTE_32F, TYPES[torch.float32])
        kinds = (KIND_A, c_int32(SCALES[b[4]])), (KIND_B, c_int32(SCALES[a[4]]))
        for which, value in ((TRANSPOSE_A, c_int32(TRANSPOSED)), (FAST, c_int8(fast)), *kinds):
            self._set(which, value)
        for which in (SCALE_A, SCALE_B):
            self._set(which, c_void_p(ALIGNED))  # the heuristic asks for addresses and does not read them
        self.layouts = [
            self._create("MatrixLayout", TYPES[dtype], c_uint64(cols), c_uint64(rows), c_int64(stride))
            for rows, cols, stride, dtype, *_ in (b, a, out)
        ]
        self.algorithm, self.workspace = self._heuristic((b[-1], a[-1], out[-1], out[-1]))

    def __call__(self, a: Side, b: Side, out: Tensor, adds: bool) -> None:
        space = torch.empty(self.workspace, dtype=torch.uint8, device=out.device) if self.workspace else None
        of_b, of_a, of_out = self.layouts
        at, beta = out.data_ptr(), ctypes.byref(ONE if adds else ZERO)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with self.lock:  # from the scales that the descriptor names to the launch that reads it
            self._set(SCALE_A, c_void_p(b.scale.data_ptr()))
            self._set(SCALE_B, c_void_p(a.scale.data_ptr()))
            operands = b.codes.data_ptr(), of_b, a.codes.data_ptr(), of_a, beta, at, of_out, at, of_out
            where = None if space is None else space.data_ptr(), self.workspace, stream
            scaled = _handle(self.device), self.product, ctypes.byref(ONE), *operands
            _call("Matmul", *scaled, ctypes.byref(self.algorithm), *where)

    def _set(self, which: int, value: ctypes._SimpleCData) -> None:
        _call("MatmulDescSetAttribute", self.product, which, ctypes.byref(value), c_size_t(sizeof(value)))

    def _heuristic(self, alignments: tuple[int, ...]) -> tuple[ctypes.Array[c_uint64] | None, int]:
        of_b, of_a, of_out = self.layouts
        shapes = self.product, of_b, of_a, of_out, of_out
        attributes = [(which, c_uint32(n)) for which, n in zip(ALIGNMENTS, alignments, strict=True)]
        preference, heuristic, count = _created("MatmulPreference"), _Heuristic(), c_int()
        try:
            for which, value in ((MOST_WORKSPACE, c_uint64(WORKSPACE)), *attributes):
                size = c_size_t(sizeof(value))
                _call("MatmulPreferenceSetAttribute", preference, which, ctypes.byref(value), size)
            results = 1, ctypes.byref(heuristic), ctypes.byref(count)
            question = _handle(self.device), *shapes, preference
            status = _call("MatmulAlgoGetHeuristic", *question, *results, allowed=NOT_SUPPORTED)
        finally:
            _call("MatmulPreferenceDestroy", preference)
        none = status or not count.value or heuristic.state
        return (None, 0) if none else (heuristic.algorithm, heuristic.workspace)

    def _create(self, name: str, *arguments: object) -> c_void_p:
        handle = _created(name, *arguments)
        weakref.finalize(self, _call, f"{name}Destroy", handle).atexit = False
        return handle


_product = functools.lru_cache(maxsize=REMEMBERED)(_Product)


def _alignment(tensor: Tensor) -> int:
    address = tensor.data_ptr()
    return min(address & -address, ALIGNED)


def multiply(a: Side, b: Side, out: Tensor, fast: bool, adds: bool) -> bool:
    """The product (M, K) by (N, K) written over `out` (M, N), fp32 or bf16, or added to it and rounded once.

    Returns False, and writes nothing, if cuBLASLt has no algorithm for it. K and N are multiples of 16. With scales of
    blocks K is a multiple of 128, and M of 16. `out` is contiguous, at a multiple of 16 bytes.
    """
    device = out.get_device()
    with torch.cuda.device(device):
        of_out = *out.shape, out.stride(0), out.dtype, _alignment(out)
        product = _product(a.shape(), b.shape(), of_out, fast, device)
        if product.algorithm is not None:
            product(a, b, out, adds)
        return product.algorithm is not None
