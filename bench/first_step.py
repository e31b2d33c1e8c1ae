"""Seconds until a first training step is done: torch's own, `import duotone` after it, and one linear of a recipe.

    PYTHONPATH=src python -m bench.first_step > bench/results/DATE-first-step.jsonl

A record for each recipe, in a process of its own with empty caches of compilers. Without a GPU it runs on the CPU.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLONE = Path(__file__).parents[1]
RECIPES = ("bf16", "fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")


def measure(recipe: str) -> dict[str, float]:
    import torch

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    x = torch.randn(1024, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.ones_like(x)
    start = time.perf_counter()
    torch.nn.Linear(1024, 1024, device=device, dtype=torch.bfloat16)(x).backward(dy)  # CUDA, cuBLAS, torch's imports
    if cuda:
        torch.cuda.synchronize()
    of_torch = time.perf_counter() - start
    start = time.perf_counter()
    import duotone
    from duotone import recipes

    imported = time.perf_counter()
    module = duotone.Linear(1024, 1024, device=device, params_dtype=torch.bfloat16, recipe=recipes.load(recipe))
    module(x).backward(dy)
    if cuda:
        torch.cuda.synchronize()
    return {"torch_s": of_torch, "import_s": imported - start, "step_s": time.perf_counter() - imported}


def main() -> None:
    import torch

    from bench.timing.records import emit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for recipe in RECIPES:
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
            command = [sys.executable, "-m", "bench.first_step", recipe]
            process = subprocess.run(command, env=environment, cwd=CLONE, check=True, capture_output=True, text=True)
        emit(device, {"recipe": recipe, **json.loads(process.stdout)})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
