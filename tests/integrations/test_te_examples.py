"""Transformer Engine's own examples run unmodified, from a copy outside of this repository.

    TRANSFORMER_ENGINE=path/to/TransformerEngine pytest tests/integrations/test_te_examples.py

Pictures are synthetic. Examples that ask for a GPU run where one is.
"""

import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

CLONE = os.environ.get("TRANSFORMER_ENGINE")
EXAMPLES = Path(CLONE or ".").resolve() / "examples" / "pytorch"
pytestmark = pytest.mark.skipif(
    CLONE is None, reason="TRANSFORMER_ENGINE=path pytest tests/integrations/test_te_examples.py, with a clone of it"
)
MNIST = ["mnist/main.py", "--epochs=1", "--batch-size=16", "--test-batch-size=32", "--log-interval=1", "--dry-run"]
FSDP = ["fsdp/fsdp.py", *"-b 2 -s 32 -n 4 -d 32 -i 2 -k 2".split()]
RUNS = {
    "mnist": [*MNIST, "--use-te"],
    "mnist in fp8": [*MNIST, "--use-fp8"],
    "mnist, inference in fp8": [*MNIST, "--use-fp8-infer"],
    "quantized weights": ["quantized_model_init/main.py"],
    "quantized shards": ["quantized_model_init/fully_shard.py"],
    "fsdp in fp8": [*FSDP, "--layer-type=layernormmlp"],
    "fsdp in mxfp8, recomputed": [*FSDP, "--precision=mxfp8", "--checkpoint-layer=transformerlayer"],
}
ON_CPU = {"mnist"}


class Pictures(torch.utils.data.Dataset):
    """Noise in the shapes of MNIST."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i >= len(self):
            raise IndexError
        return torch.randn(1, 28, 28, generator=torch.Generator().manual_seed(i)), i % 10


@pytest.fixture
def pictures(monkeypatch) -> None:
    """In the place of torchvision, which would download them."""
    module = ModuleType("torchvision")
    module.datasets = SimpleNamespace(MNIST=Pictures)
    module.transforms = SimpleNamespace(Compose=lambda steps: steps, ToTensor=lambda: None, Normalize=lambda *_: None)
    monkeypatch.setitem(sys.modules, "torchvision", module)


@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs_unmodified(te, pictures, name: str, tmp_path, monkeypatch, capsys) -> None:
    if name not in ON_CPU and not torch.cuda.is_available():
        pytest.skip("this example asks for a GPU")
    script, *arguments = RUNS[name]
    for variable, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29741,
    }.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert re.search("loss|peak memory", capsys.readouterr().out.lower())


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_sequences_over_two_ranks_pass_the_tests_of_the_example(layout: str) -> None:
    """Its tests read what its runner wrote to /tmp. Unmodified on two GPUs, else with the names of devices replaced."""
    folder, ranks = EXAMPLES / "transformer", Path(__file__).parent / "te_on_ranks.py"
    for file in Path("/tmp").glob(f"{layout}_*"):
        file.unlink()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(ranks)]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_context_parallel_{layout}.py"]
    subprocess.run([*torchrun, str(folder / f"context_parallel_runner_{layout}.py")], check=True, timeout=300)
    result = subprocess.run(tests, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0 and "skipped" not in result.stdout, result.stdout[-3000:]
