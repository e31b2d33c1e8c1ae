"""Shared test data and switches."""

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import duotone

TESTS = Path(__file__).parent
os.environ["HF_HUB_OFFLINE"] = "1"  # read when Hugging Face's packages are imported: tests use no network
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each process that compiles starts a pool of others
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # what the processor has; else six programs are compiled first
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # garbage is collected as often as set below
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and by all processes that tests start
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))
os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # for the processes that tests start
for device in (torch.cuda, torch.xpu, torch.mtia):  # else torch.manual_seed stores formatted stacks
    if not device.is_available():
        device.manual_seed_all = lambda seed: None
torch._C._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0  # of no use here: it flushes caches
gc.disable()  # until all tests are collected: what imports and collection make stays


def pytest_xdist_auto_num_workers() -> int:
    """One process more than the cores that it may use, because tests also wait for processes that they start."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_finish() -> None:
    """Let the garbage collector leave out what stays: 750,000 objects, over which it walked again and again.

    It runs less often than by default: a tracing compiler makes many objects, and few of them are cycles.
    """
    gc.freeze()
    gc.set_threshold(200_000, 10, 100)
    gc.enable()


QUICK = "not slow and not rest"
"""What `make test` runs: the expression of `addopts` in pyproject.toml."""

REST = {
    "attention/test_compile.py",
    "attention/test_compile_layer.py",
    "attention/test_context_parallel.py",
    "attention/test_parallel.py",
    "cli/test_compare.py",
    "cli/test_damaged_results.py",
    "cli/test_pages.py",
    "cli/test_parallel.py",
    "cli/test_search.py",
    "cli/test_train.py",
    "conversion/test_encoder.py",
    "conversion/test_fuse_models.py",
    "conversion/test_interrupted.py",
    "conversion/test_llama.py",
    "conversion/test_mixtral.py",
    "dispatch/test_inductor.py",
    "distributed",
    "gpu",
    "integrations",
    "kernels/test_compile.py",
    "lab/test_comparison.py",
    "lab/test_forged.py",
    "lab/test_hf.py",
    "lab/test_ledger.py",
    "lab/test_loop.py",
    "linear/test_saved_in_graphs.py",
    "modules/test_after_compile.py",
    "modules/test_compile.py",
    "modules/test_flagged_microbatches.py",
    "modules/test_frames.py",
    "modules/test_graph_options.py",
    "modules/test_graph_regions.py",
    "modules/test_joined_weights.py",
    "modules/test_one_graph.py",
    "observe/test_advise_encoder.py",
    "observe/test_page.py",
    "report/test_browser.py",
    "state/test_traced_plans.py",
    "tensor/test_compiled.py",
    "test_examples.py",
    "test_own_ops.py",
    "test_site.py",
}
"""Folders and files that `make test` leaves out: graphs, ranks, other libraries, pages, whole tools."""

BRIEF = {
    "cli/test_compare.py": {"test_it_leaves_a_report_and_its_numbers_and_ends_with_a_table"},
    "cli/test_search.py": {"test_it_leaves_a_recipe_its_evidence_and_a_report"},
    "cli/test_train.py": {
        "test_it_leaves_checkpoints_and_a_report",
        "test_resume_with_other_settings_is_refused_and_changes_nothing",
    },
    "lab/test_comparison.py": {"test_one_failing_recipe_leaves_the_others"},
    "lab/test_ledger.py": {
        "test_rows_have_the_bytes_counted_by_hand",
        "test_the_peak_of_a_linear_is_predicted_within_five_percent",
        "test_a_ledger_leaves_the_next_step_as_it_would_have_been",
    },
    "lab/test_loop.py": {"test_a_stop_saves_and_the_resumed_run_ends_as_an_uninterrupted_one"},
    "distributed/test_brief.py": {"test_every_check_of_the_worker_passes_on_all_ranks"},
    "test_examples.py": {"test_own_training_loop_trains_and_prints_what_ran"},
}
"""The tests of these files that `make test` runs."""

GRAPHS = re.compile(r"compile|graph|export(s|ed)_program|traced")
"""Names of tests that trace. `make test` runs those of test_kinds_compile.py, and those of the folders of `WHOLE`."""

OFTEN = {"fp8-current", "mxfp8", "nvfp4", "fp8-delayed", "bf16"}
"""The recipes under which `make test` runs a test of many recipes, except in the folders of `WHOLE`."""

WHOLE = {"compat", "dispatch", "formats", "optim", "recipes", "state", "tensor", "tests"}


def is_rest(path: Path, test: str = "") -> bool:
    """Whether `make test` leaves out a test of a file, or without `test` the whole file."""
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    brief = BRIEF.get(name, set())
    return not REST.isdisjoint({name, name.partition("/")[0]}) and test not in brief and not (brief and not test)


def pytest_configure(config: pytest.Config) -> None:
    """A path on the command line runs all its tests, except slow ones. Workers run what their controller does."""
    if hasattr(config, "workerinput"):
        config.option.markexpr = config.workerinput["markexpr"]
    elif config.args_source is pytest.Config.ArgsSource.ARGS and config.option.markexpr == QUICK:
        config.option.markexpr = "not slow"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker which tests to run: it reads `addopts` by itself."""
    node.workerinput["markexpr"] = node.config.option.markexpr


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that `make test` leaves out."""
    return True if config.option.markexpr == QUICK and collection_path.is_file() and is_rest(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out."""
    seldom = set(duotone.recipes.names()) - OFTEN
    for item in items:
        callspec = getattr(item, "callspec", None)
        values = {each for each in callspec.params.values() if isinstance(each, str)} if callspec else set()
        is_graph = GRAPHS.search(item.name) is not None and item.path.name != "test_kinds_compile.py"
        is_whole = item.path.parent.name in WHOLE or not (is_graph or seldom & values)
        if is_rest(item.path, item.name.partition("[")[0]) or not is_whole:
            item.add_marker("rest")


SMALL_TENSORS = {"conversion", "formats", "optim", "tensor"}
"""Folders whose tensors gain less from threads than these cost where they wait for each other on a busy machine."""


@pytest.fixture(autouse=True, scope="module")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.path.parent.name in SMALL_TENSORS else before)
    yield
    torch.set_num_threads(before)


COMPILED_CASTS = {"cli", "dispatch", "lab", "observe"}
"""Folders whose casts of large matrices are compiled, as they are for users. tests/dispatch compares the bits."""


@pytest.fixture(autouse=True, scope="module")
def _casts(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        if request.path.parent.name not in COMPILED_CASTS:
            patched.setattr("duotone.dispatch.stages.COMPILE_FROM", 1 << 30)
        yield


@pytest.fixture(autouse=True)
def _fresh_compiler(request: pytest.FixtureRequest) -> None:
    """Let no test see what Dynamo noted in another one.

    Dynamo compiles no frame again in which a compiled call ended in an exception, not even for another model.
    """
    if "torch._dynamo" in sys.modules and request.path.parent.name not in COMPILED_CASTS:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(1234)


@pytest.fixture
def awkward() -> torch.Tensor:
    """fp32 (96, 160) with zeros, denormals, infinities, NaN of both signs, huge and tiny rows."""
    x = torch.randn(96, 160)
    x[3] = 0
    x[4, 8:40] = -0.0
    x[5] *= 1e-40
    x[6] *= 1e-37
    x[7] *= 1e37
    x[8] *= torch.logspace(-20, 20, 160)
    x[9, 5] = float("nan")
    x[9, 6] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN with its sign bit set
    x[10, 7], x[11, 9] = float("inf"), -float("inf")
    x[12, 64:96] = float("nan")
    return x


@pytest.fixture
def te() -> Iterator[ModuleType]:
    """`transformer_engine.pytorch` as scripts import it after `duotone.compat.te.install()`, for one test."""
    compat = import_module("duotone.compat.te")
    compat.install()
    yield import_module("transformer_engine.pytorch")
    sys.meta_path.remove(compat.FINDER)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
