"""Compilers that fail, write garbage or hang, damaged caches, and folders of others: plain torch with one warning."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from duotone import formats
from duotone.dispatch import compiler, stages
from duotone.dispatch.stages import CompiledStages
from later import Later

inductor = Later("torch._inductor")

CXX = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(CXX is None, reason="no C++ compiler; `apt-get install g++` provides it")


@pytest.fixture(autouse=True)
def unknown(monkeypatch) -> Iterator[None]:
    """Nothing is known of the compiler before a test, and nothing of what it was told afterwards."""
    monkeypatch.setattr(compiler, "_FAILURES", [])
    caches = (compiler.probe, compiler.cache_folder)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def fake(tmp_path: Path, script: str) -> str:
    path = tmp_path / "fake-cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


FAKES = {
    "fails": ("echo internal error >&2; exit 1", "does not build a shared library: internal error"),
    "writes garbage": ('while [ "$1" != -o ]; do shift; done; echo garbage > "$2"', "does not load"),
    "sleeps": ("exec sleep 600", "timed out after"),
}


@pytest.mark.parametrize("name", FAKES)
def test_a_compiler_that_does_not_work_leaves_plain_torch_and_one_warning(name, tmp_path, monkeypatch) -> None:
    script, reason = FAKES[name]
    monkeypatch.setattr(compiler, "PATIENCE", 0.5)
    with inductor.config.patch({"cpp.cxx": (None, fake(tmp_path, script))}):
        with pytest.warns(RuntimeWarning, match="casts on the CPU run in plain torch") as caught:
            assert reason in compiler.compiler_reason()
        assert len(caught) == 1
        assert stages.stages_for(torch.empty(256, 256)) is stages.CHUNKED  # and warns no more
        assert not stages.compiled_casts()


def test_no_compiler_at_all_is_a_reason_without_a_warning() -> None:
    with inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert "no-such-compiler is not on the path" in compiler.compiler_reason()


def test_a_full_disk_runs_the_plain_cast_and_no_other_compiled_one(monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", full)
    monkeypatch.setattr(compiler, "probe", lambda: "")
    monkeypatch.setattr("duotone.dispatch.stages._compile", _fresh_compile())
    fmt, x = formats.get("mxfp8_e4m3"), torch.randn(96, 160)
    torch._dynamo.reset()
    with pytest.warns(RuntimeWarning, match="inductor failed with OSError: .*No space left") as caught:
        parts = fmt.encode(x, stages=CompiledStages())
    assert len(caught) == 1 and "No space left" in compiler.compiler_reason()
    for name, part in fmt.encode(x).items():
        assert torch.equal(parts[name], part)
    torch._dynamo.reset()


def _fresh_compile():
    return stages._compile.__wrapped__


def test_the_cache_folder_is_the_users_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiler.FOLDER, raising=False)
    folder = Path(compiler.cache_folder())
    assert folder == tmp_path / "duotone" / "inductor" and folder.stat().st_mode & 0o777 == 0o700
    with compiler._own_cache():
        assert os.environ[compiler.FOLDER] == str(folder)
    assert compiler.FOLDER not in os.environ


def test_a_cache_folder_that_the_user_names_is_taken(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(compiler.FOLDER, str(tmp_path / "mine"))
    assert compiler.cache_folder() == str(tmp_path / "mine")


def test_folders_that_others_own_or_write_are_not_used(tmp_path, monkeypatch) -> None:
    """Neither named folder is one's own: a new one, which nobody knew of before."""
    cache_folder = tmp_path / "named"
    cache_folder.mkdir()
    cache_folder.chmod(0o777)
    monkeypatch.setenv(compiler.FOLDER, str(cache_folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert compiler.cache_folder() == str(tmp_path / "cache" / "duotone" / "inductor")
    compiler.cache_folder.cache_clear()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    folder = Path(compiler.cache_folder())
    assert tmp_path not in folder.parents and folder.stat().st_mode & 0o777 == 0o700 and not list(folder.iterdir())


TWICE = """
import os, sys
from pathlib import Path
import torch
import torch._inductor.compile_fx
from torch._inductor import cpu_vec_isa
from duotone.dispatch.stages import COMPILED

del cpu_vec_isa.supported_vec_isa_list[:3]  # one instruction set of each kind of processor is enough
for size in (None, 3000):
    for library in Path(sys.argv[1]).rglob("*.so"):
        library.write_bytes(library.read_bytes()[:size])
    if not os.fork():
        x = torch.randn(64, 64)
        print(torch.equal(COMPILED.amax(x.view(1, 64, 1, 64)), x.abs().amax().view(1, 1)), flush=True)
        os._exit(0)
    os.wait()
    print("next process", file=sys.stderr, flush=True)
"""


@needs_compiler
@pytest.mark.rest
def test_a_damaged_library_in_the_cache_is_one_warning(tmp_path) -> None:
    """A process fills the cache; the libraries are cut short; the next one computes the same."""
    names = {"PYTHONPATH": os.pathsep.join(sys.path), compiler.FOLDER: str(tmp_path), "CXX": str(CXX)}
    names |= {"TORCHINDUCTOR_VEC_ISA_OK": ""}  # libraries of this question are damaged as well
    names |= {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}  # which take seconds, and there are two small loops
    names |= {"CUDA_VISIBLE_DEVICES": ""}  # Dynamo asks a GPU for its random state, which no fork may do
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", TWICE, str(tmp_path)]
    run = subprocess.run(command, env={**os.environ, **names}, capture_output=True, text=True, check=False)
    assert run.stdout == "True\nTrue\n", run.stderr
    warned = [part.count("casts on the CPU run in plain torch") for part in run.stderr.split("next process")]
    assert warned == [0, 1, 0], run.stderr


def test_a_library_that_another_process_takes_away_is_no_failure(tmp_path) -> None:
    """Between the listing of a shared cache and the look at a file. A link to nothing stands for it."""
    (tmp_path / "gone.so").symlink_to(tmp_path / "nothing")
    compiler._refuse_cut_libraries.__wrapped__(str(tmp_path))


def test_the_folder_that_torch_names_by_itself_is_none_that_the_user_named(monkeypatch, tmp_path) -> None:
    """Importing parts of inductor puts the name of a shared temporary folder into the environment."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.cache_folder.__wrapped__() == str(tmp_path / "duotone" / "inductor")
