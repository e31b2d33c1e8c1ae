"""How much host time does a linear under the Identity recipe add to F.linear, forward and backward, at 32x32?

python bench/host_time.py
"""

import statistics

import torch
import torch.nn.functional as F

import duotone
from _timing import record, turns


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(32, 32, dtype=dtype)
        x = torch.randn(32, 32, dtype=dtype, requires_grad=True)
        dy = torch.randn(32, 32, dtype=dtype)
        inputs = (x, layer.weight, layer.bias)
        duotone.convert(layer, duotone.recipes.load("bf16"))
        seconds = turns(
            {
                "F.linear": lambda: torch.autograd.grad(F.linear(x, layer.weight, layer.bias), inputs, dy),  # noqa: B023
                "duotone identity": lambda: torch.autograd.grad(layer(x), inputs, dy),  # noqa: B023
            },
            rounds=31,
            repeats=200,
        )
        above = [b - a for a, b in zip(seconds["F.linear"], seconds["duotone identity"], strict=True)]
        record(
            "host time above F.linear, 32x32, forward+backward",
            dtype=str(dtype),
            f_linear_us=round(statistics.median(seconds["F.linear"]) * 1e6, 1),
            above_us=round(statistics.median(above) * 1e6, 1),
        )


if __name__ == "__main__":
    main()
