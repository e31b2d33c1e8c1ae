"""One transformer layer three times: from torch's parts, from Transformer Engine's modules, and as its one module."""

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Format

WIDTH, WIDE, HEADS = 64, 128, 4


class Plain(nn.Module):
    """LayerNorm, attention, LayerNorm, MLP, with residual connections; (sequence, batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (HEADS, 3, -1)).permute(3, 1, 2, 0, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        x = x + self.projection(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Modules(nn.Module):
    """The same of `te.LayerNormLinear`, `te.DotProductAttention`, `te.Linear` and `te.LayerNormMLP`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_qkv = te.LayerNormLinear(WIDTH, 3 * WIDTH, eps=1e-5, bias=True)
        self.attention = te.DotProductAttention(HEADS, WIDTH // HEADS, attn_mask_type="causal")
        self.projection = te.Linear(WIDTH, WIDTH, bias=True)
        self.norm_mlp = te.LayerNormMLP(WIDTH, WIDE, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.norm_qkv(inp=x).unflatten(-1, (HEADS, 3, -1)).unbind(-2)
        x = x + self.projection(self.attention(query, key, value, None))
        return x + self.norm_mlp(x)


def whole() -> nn.Module:
    return te.TransformerLayer(
        WIDTH,
        WIDE,
        HEADS,
        layernorm_epsilon=1e-5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layer_type="encoder",
        self_attn_mask_type="causal",
        fuse_qkv_params=True,
    ).eval()


def share(plain: Plain, modules: Modules, layer: nn.Module) -> None:
    """Give all three the parameters of the first."""
    linear, mlp = layer.self_attention.layernorm_qkv, layer.layernorm_mlp
    for kind in ("weight", "bias"):
        setattr(modules.norm_qkv, f"layer_norm_{kind}", getattr(plain.norm1, kind))
        setattr(modules.norm_qkv, kind, getattr(plain.qkv, kind))
        setattr(modules.projection, kind, getattr(plain.projection, kind))
        setattr(linear, f"layer_norm_{kind}", getattr(plain.norm1, kind))
        setattr(linear, kind, getattr(plain.qkv, kind))
        setattr(layer.self_attention.proj, kind, getattr(plain.projection, kind))
        for target in (modules.norm_mlp, mlp):
            setattr(target, f"layer_norm_{kind}", getattr(plain.norm2, kind))
            setattr(target, f"fc1_{kind}", getattr(plain.up, kind))
            setattr(target, f"fc2_{kind}", getattr(plain.down, kind))


def main(enabled: bool) -> list[torch.Tensor]:
    """The outputs of all three."""
    torch.manual_seed(0)
    plain, modules, layer = Plain(), Modules(), whole()
    share(plain, modules, layer)
    x = torch.randn(32, 2, WIDTH)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    for _ in range(2):  # the second step has scales of the first
        with te.fp8_autocast(enabled=enabled, fp8_recipe=recipe):
            outputs = [modules(x), layer.forward(x, attention_mask=None)]
    outputs[1].sum().backward()
    return [plain(x), *outputs]


if __name__ == "__main__":
    print([output.norm().item() for output in main(enabled=True)])
