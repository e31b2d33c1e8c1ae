"""A model with the names that servers know, without any package: attention projections, a gated MLP, a head."""

import torch
from torch import nn

WIDTH, INNER, WORDS = 128, 256, 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, 64, 64))
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=True)
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        mixed = self.q_proj(x) + torch.cat([self.k_proj(x), self.v_proj(x)], dim=-1)
        x = x + self.o_proj(mixed)
        return x + self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("step", torch.tensor(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def toy() -> Toy:
    torch.manual_seed(0)
    return Toy()


TOKENS = torch.arange(64).reshape(2, 32)
