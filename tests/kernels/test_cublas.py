"""What `kernels/cublas.py` tells cuBLASLt, without a GPU: its numbers are the header's, and the library takes them."""

import ctypes
import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from duotone.formats import ROW, TENSOR, Block
from duotone.kernels import cublas

LINE, SQUARE = Block(1, 128), Block(128, 128)
HEADERS = [path_of_header for path in sys.path for path_of_header in Path(path).glob("nvidia/*/include/cublasLt.h")]
PRODUCT = "CUBLASLT_MATMUL_DESC_"
CONSTANTS = {
    f"{PRODUCT}TRANSA": cublas.TRANSPOSE_A,
    f"{PRODUCT}A_SCALE_POINTER": cublas.SCALE_A,
    f"{PRODUCT}B_SCALE_POINTER": cublas.SCALE_B,
    f"{PRODUCT}FAST_ACCUM": cublas.FAST,
    f"{PRODUCT}A_SCALE_MODE": cublas.KIND_A,
    f"{PRODUCT}B_SCALE_MODE": cublas.KIND_B,
    "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": cublas.MOST_WORKSPACE,
    **{
        f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{name}_BYTES": n for name, n in zip("ABCD", cublas.ALIGNMENTS, strict=True)
    },
    "CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F": cublas.SCALES[TENSOR],
    "CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F": cublas.SCALES[ROW],
    "CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F": cublas.SCALES[LINE],
    "CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F": cublas.SCALES[SQUARE],
}
A, B = (64, 256, 256, torch.float8_e5m2, ROW, 256), (32, 256, 256, torch.float8_e4m3fn, ROW, 256)
OUT = (64, 32, 32, torch.float32, 256)


@pytest.mark.skipif(not HEADERS, reason="this torch brings no header of cuBLASLt")
def test_numbers_are_those_of_the_header() -> None:
    text = HEADERS[0].read_text()
    assert {name: int(re.search(rf"\b{name} = (\d+)", text)[1]) for name in CONSTANTS} == CONSTANTS  # type: ignore[index]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions of the library that are called, without those that need a GPU."""
    if cublas.library() is None:
        pytest.skip("this torch has not loaded a cuBLASLt of its own")
    names, plain = [], cublas._call

    def call(name: str, *arguments: object, allowed: int = 0) -> int:
        names.append(name)
        return 0 if name == "MatmulAlgoGetHeuristic" else plain(name, *arguments, allowed=allowed)

    monkeypatch.setattr(cublas, "_call", call)
    monkeypatch.setattr(cublas, "_handle", lambda device: ctypes.c_void_p())
    return names


def read(product: cublas._Product, which: int, kind: type) -> int:
    value, written = kind(), ctypes.c_size_t()
    get = cublas.library().cublasLtMatmulDescGetAttribute
    size = ctypes.c_size_t(ctypes.sizeof(value))
    assert get(product.product, which, ctypes.byref(value), size, ctypes.byref(written)) == 0
    assert written.value == ctypes.sizeof(value)
    return value.value


@pytest.mark.parametrize("fast", [False, True])
def test_the_library_takes_a_product_and_holds_what_it_was_told(called, fast) -> None:
    """cuBLAS's A is the second operand."""
    a, b = (*A[:4], LINE, 256), (*B[:4], SQUARE, 256)
    product = cublas._Product(a, b, OUT, fast, 0)
    assert product.algorithm is None  # it found none
    for which, kind, want in (
        (cublas.TRANSPOSE_A, ctypes.c_int32, cublas.TRANSPOSED),
        (cublas.FAST, ctypes.c_int8, fast),
        (cublas.KIND_A, ctypes.c_int32, cublas.SCALES[SQUARE]),
        (cublas.KIND_B, ctypes.c_int32, cublas.SCALES[LINE]),
        (cublas.SCALE_A, ctypes.c_void_p, cublas.ALIGNED),
    ):
        assert read(product, which, kind) == want


def test_descriptors_are_given_back(called) -> None:
    product = cublas._Product(A, B, OUT, False, 0)
    assert called.count("MatmulPreferenceCreate") == called.count("MatmulPreferenceDestroy") == 1
    assert called.count("MatmulDescCreate") == 1 and called.count("MatrixLayoutCreate") == 3
    del product
    gc.collect()
    assert called.count("MatmulDescDestroy") == 1 and called.count("MatrixLayoutDestroy") == 3


def test_a_failure_says_what_failed(called) -> None:
    with pytest.raises(RuntimeError, match=r"^cublasLtMatmulDescSetAttribute failed with cublasStatus_t 7$"):
        cublas._Product(A, B, OUT, False, 0)._set(9999, ctypes.c_int32(0))


def test_the_structure_of_a_result_has_the_size_of_the_library_s() -> None:
    """64 bytes of algorithm, the workspace, a status, a float, four integers."""
    assert ctypes.sizeof(cublas._Heuristic) == 64 + 8 + 4 + 4 + 16
