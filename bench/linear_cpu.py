"""How much slower than bf16 nn.Linear is an emulated linear, forward and backward, on this CPU?

python bench/linear_cpu.py [RECIPE ...] [--eager]      --eager: casts as on a machine without a C++ compiler
"""

import argparse
import statistics

import torch

import duotone
from _timing import ratio, record, turns
from duotone.dispatch import stages

M, K, N = 2048, 512, 2048


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=["mxfp8"])
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    if options.eager:
        stages.compiler_reason = lambda: "asked for"  # type: ignore[assignment]
    torch.manual_seed(0)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(M, N, dtype=torch.bfloat16)

    def step(layer: torch.nn.Module):
        def run() -> None:
            x.grad = None
            layer.zero_grad()
            layer(x).backward(dy)

        return run

    def layer() -> torch.nn.Module:
        return torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16)

    candidates = {"bf16 nn.Linear": step(layer())}
    for name in options.recipes:
        candidates[name] = step(duotone.convert(layer(), duotone.recipes.load(name)))
    seconds = turns(candidates)
    for name in candidates:
        record(
            "linear forward+backward on CPU",
            candidate=name,
            shape=[M, K, N],
            compiled_casts=stages.compiled_casts(),
            milliseconds=round(statistics.median(seconds[name]) * 1e3, 3),
            ratio_to_bf16=round(ratio(seconds, name, "bf16 nn.Linear"), 3),
        )


if __name__ == "__main__":
    main()
