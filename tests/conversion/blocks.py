"""A transformer block with the names of Llama's: an RMSNorm of its own, attention of four linears, a gated MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RootMeanSquare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.variance_epsilon = 1e-5

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class ZeroCentred(RootMeanSquare):
    """As Gemma's: the weight stands for 1 + weight."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1 + self.weight.float())).type_as(hidden_states)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], self.heads, -1)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).reshape(hidden_states.shape)), None


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int = 64, inner: int = 96, norm: type[nn.Module] = RootMeanSquare) -> None:
        super().__init__()
        self.self_attn = Attention(width, 2)
        self.mlp = GatedMLP(width, inner)
        self.input_layernorm, self.post_attention_layernorm = norm(width), norm(width)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(hidden_states=x)
        x = residual + x
        return x + self.mlp(self.post_attention_layernorm(x))


def model(layers: int = 2, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**options) for _ in range(layers)))


def hidden_states(*lead: int, width: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(lead or (2, 16)), width, generator=torch.Generator().manual_seed(1)).to(dtype)


def gradients_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output, the gradient of the input, and that of every parameter by name."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype)).sum().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad.clone() for n, p in model.named_parameters()}
