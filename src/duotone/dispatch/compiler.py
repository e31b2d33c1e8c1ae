"""Whether and how inductor compiles for this CPU: it needs a working compiler, and a cache folder of this user alone.

If something goes wrong later, casts run in plain torch, with one warning: a full disk, or a damaged library in the
cache.
"""

import atexit
import ctypes
import functools
import logging
import os
import shutil
import struct
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

OPTIONS: dict[str, object] = {"emulate_precision_casts": True}
"""Without it inductor drops round trips through bf16, which changes bits."""

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
PATIENCE = 60.0
"""Seconds after which a compiler counts as one that hangs; building the probe takes less than one."""
WRITING = 5.0
"""Seconds after which another process has finished a library that it writes to the cache."""

_SOURCE = '#include <cmath>\n#include <omp.h>\nextern "C" int f() { return 41 + (omp_get_max_threads() > 0); }\n'
_FAILURES: list[str] = []


def compiler_reason() -> str:
    """Why casts cannot be compiled here, or "" if they can."""
    return _FAILURES[0] if _FAILURES else probe()


@functools.cache
def probe() -> str:
    """Build and load a library, once a process. Warns if there is a compiler that does not work."""
    from torch._inductor import config

    named = config.cpp.cxx
    names = [name for name in ((named,) if isinstance(named, str) else named) if name]
    compiler = next((name for name in names if shutil.which(name)), None)
    if compiler is None:
        return f"the C++ compiler {' or '.join(names)} is not on the path"
    reason = _build_failure(compiler)
    if reason:
        _warn(reason)
    return reason


def _build_failure(compiler: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
        source.write_text(_SOURCE)
        command = [compiler, "-shared", "-fPIC", "-fopenmp", "-o", str(library), str(source)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        except (subprocess.TimeoutExpired, OSError) as error:
            return f"{compiler} does not build a shared library: {error}"
        if result.returncode != 0:
            detail = result.stderr.strip().splitlines()
            return f"{compiler} does not build a shared library: {detail[0] if detail else result.returncode}"
        try:
            answer = ctypes.CDLL(str(library)).f()
        except (OSError, AttributeError) as error:
            return f"{compiler} builds a library that does not load: {error}"
    return "" if answer == 42 else f"{compiler} builds a library that computes {answer} instead of 42"


def _warn(reason: str) -> None:
    warnings.warn(f"casts on the CPU run in plain torch, which is slower: {reason}", RuntimeWarning, stacklevel=2)


def backend(graph: "GraphModule", inputs: "list[Tensor]") -> Callable[..., object]:
    """Inductor for `torch.compile(backend=...)`. If it fails, the graph itself; all further casts then run so too."""
    from torch._dynamo.exc import RestartAnalysis
    from torch._inductor.compile_fx import compile_fx

    if not _FAILURES:
        try:
            with _own_cache():
                _refuse_cut_libraries(cache_folder())
                return compile_fx(graph, inputs, config_patches=OPTIONS)  # type: ignore[return-value]
        except RestartAnalysis:  # no failure: Dynamo traces again and comes back
            raise
        except Exception as error:
            logging.getLogger(__name__).debug("inductor failed", exc_info=True)
            detail = str(error).strip().splitlines()
            _FAILURES.append(f"inductor failed with {type(error).__name__}: {detail[0] if detail else ''}")
            _warn(_FAILURES[0])
    return graph.forward


@functools.cache
def _refuse_cut_libraries(folder: str) -> None:
    """Raise if the cache has an incomplete library: loading it would kill the process."""
    end = time.monotonic() + WRITING
    walk = os.walk(folder)  # folders may go meanwhile
    for library in (os.path.join(at, name) for at, _, names in walk for name in names if name.endswith(".so")):
        while _is_cut(library):
            if time.monotonic() > end:
                raise OSError(f"{library} is cut short; remove it")
            time.sleep(0.05)


def _is_cut(library: str) -> bool:
    """Whether an ELF file of 64 bits ends before its section headers do, which come last."""
    try:
        with open(library, "rb", buffering=0) as file:
            header, length = file.read(64), os.fstat(file.fileno()).st_size
    except FileNotFoundError:  # another process took it away
        return False
    if len(header) < 64 or not header.startswith(b"\x7fELF\x02"):  # to load it is an error
        return False
    (start,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return length < start + size * count


@contextmanager
def _own_cache() -> Iterator[None]:
    """Let inductor write, and load libraries, in `cache_folder()` alone."""
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = cache_folder()
    try:
        yield
    finally:
        if before is None:
            del os.environ[FOLDER]
        else:
            os.environ[FOLDER] = before


@functools.cache
def cache_folder() -> str:
    """A folder for compiled casts that belongs to this user, and that nobody else may write to.

    It is the folder that TORCHINDUCTOR_CACHE_DIR names, else one below XDG_CACHE_HOME (~/.cache). If neither belongs to
    the user alone, it is a new folder, which ends with the process. Torch's default does not count: it is temporary.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    named = os.environ.get(FOLDER, "")
    named = "" if named == os.path.abspath(default_cache_dir()) else named
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    for path in (named, os.path.join(os.path.expanduser(base), "duotone", "inductor")):
        if os.path.isabs(path) and _is_own(path):
            return path
    folder = tempfile.mkdtemp(prefix="duotone_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_own(path: str) -> bool:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.stat(path)
    except OSError:
        return False
    if not hasattr(os, "getuid"):  # Windows, whose temporary folders are the user's own
        return True
    return status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(path, os.W_OK | os.X_OK)
