"""Low precision in a training loop of your own: convert once, train as before.

python examples/own_training_loop.py
"""

import torch
from torch import nn

import duotone

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).bfloat16()
duotone.convert(model, duotone.recipes.load("mxfp8-fwd-nvfp4-bwd"))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = torch.randn(256, 64, dtype=torch.bfloat16)

for _ in range(50):
    loss = nn.functional.mse_loss(model(data).float(), data.float())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

for row in duotone.plan(model)[:3]:
    print(f"{row.module}.{row.gemm}: {row.a} x {row.b} by {row.kernel!r}")
print(f"loss after 50 steps: {loss.item():.3f}")
