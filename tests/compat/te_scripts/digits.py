"""Trains a small classifier of images, as a first script for Transformer Engine does; the digits are synthetic."""

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Format

CLASSES, SIDE = 10, 6


class Net(nn.Module):
    def __init__(self, use_te: bool = True) -> None:
        super().__init__()
        linear = te.Linear if use_te else nn.Linear
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.fc1 = linear(4 * SIDE * SIDE, 48)
        self.fc2 = linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv(x)).flatten(1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x)))[:, :CLASSES], dim=1)


def batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each class is a picture of its own under noise."""
    pictures = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    return pictures[labels] + 0.5 * torch.randn(size, 1, SIDE, SIDE, generator=generator), labels


def main(use_fp8: bool = True, steps: int = 30) -> tuple[Net, float, float]:
    """The model, its last loss and how many test pictures it knows."""
    torch.manual_seed(1)
    model = Net()
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        images, labels = batch(32, step + 1)
        optimizer.zero_grad()
        with te.fp8_autocast(enabled=use_fp8, fp8_recipe=recipe):
            output = model(images)
        loss = F.nll_loss(output, labels)
        loss.backward()
        optimizer.step()
    model.eval()
    images, labels = batch(64, 0)
    with torch.no_grad(), te.fp8_autocast(enabled=use_fp8, fp8_recipe=recipe):
        accuracy = (model(images).argmax(1) == labels).float().mean()
    return model, loss.item(), accuracy.item()


if __name__ == "__main__":
    if not te.fp8.check_fp8_support()[0]:
        raise SystemExit("FP8 is not supported here")
    print(main()[1:])
