"""The formats that tests run over, by what their names mean."""

import reference

NAMES = reference.names()
STOCHASTIC = [name for name in NAMES if reference.meaning(name).stochastic]
NEAREST = [name for name in NAMES if name not in STOCHASTIC]
DERIVABLE = [name for name in NAMES if reference.is_transposable(name)]
PER_TENSOR_OR_ROW = [name for name in NAMES if reference.meaning(name).cols == reference.WHOLE]
TWO_LEVEL = [name for name in NAMES if reference.meaning(name).scale == "e4m3"]
DTYPES = ("bfloat16", "float32")
SEED = 0x0123_4567_89AB_CDEF


def seed_of(name: str) -> int | None:
    """The seed of this folder for a format that needs one."""
    return SEED if name in STOCHASTIC else None


def element_of(name: str) -> str:
    return reference.meaning(name).element
