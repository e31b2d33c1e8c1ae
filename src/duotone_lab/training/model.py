"""A small byte-level GPT: RMSNorm, rotary attention, SwiGLU, and a head that may be tied to the embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duotone.attention import DotProductAttention, RotaryPositionEmbedding, Rotation, apply_rotary_pos_emb
from duotone.modules import MoE
from duotone_lab.training.presets import ModelConfig

VOCABULARY = 256


class Attention(nn.Module):
    """Causal multi-head attention over (batch, tokens, dim)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.core = DotProductAttention(config.heads, config.dim // config.heads, qkv_format="bshd")
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.proj(self.mix(self.qkv(x), cos, sin))

    def mix(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What lies between the two linears: (batch, tokens, 3 dim) -> (batch, tokens, dim)."""
        batch, tokens, width = qkv.shape
        heads, rotation = self.core.num_attention_heads, Rotation(cos, sin)
        query, key, value = qkv.view(batch, tokens, 3, heads, width // 3 // heads).unbind(2)
        query, key = (apply_rotary_pos_emb(x, rotation, "bshd") for x in (query, key))
        value = value.clone()  # as a view, which backward keeps, it would keep all of qkv
        return self.core(query, key, value)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate) * up), where one matrix makes gate and up."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm transformer layer around the given MLP."""

    def __init__(self, config: ModelConfig, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Next-byte model: forward(tokens, targets), int64 (batch, tokens), gives the mean loss (fp32, nats)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.layers = nn.ModuleList(Block(config, self.mlp(config)) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, VOCABULARY, bias=False)
        if config.tied:
            self.lm_head.weight = self.embedding.weight
        angles = RotaryPositionEmbedding(config.dim // config.heads)(config.context)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @staticmethod
    def mlp(config: ModelConfig) -> nn.Module:
        """What each block has behind its attention."""
        return MLP(config)

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of the next byte, (batch, tokens, 256), in the dtype of the parameters."""
        count = tokens.shape[1]
        cos, sin = self.cos[:count], self.sin[:count]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1).float(), targets.flatten())


class MoEGPT(GPT):
    """The same with a mixture of experts in the place of each MLP, each as wide as that: two of four for a byte."""

    EXPERTS, CHOSEN = 4, 2

    @staticmethod
    def mlp(config: ModelConfig) -> nn.Module:
        return MoE(config.dim, config.hidden, MoEGPT.EXPERTS, top_k=MoEGPT.CHOSEN)


RESIDUAL = ("proj.weight", "down.weight", "fc2.weight")
"""What writes to the residual stream."""


def build(config: ModelConfig, seed: int, *, kind: type[GPT] = GPT) -> GPT:
    """A model with fp32 parameters on the CPU, a function of the arguments alone.

    Matrices are normal with standard deviation 0.02; those that write to the residual stream are smaller by
    sqrt(2 * layers).
    """
    with torch.random.fork_rng(devices=[]):
        model = kind(config)
    generator = torch.Generator().manual_seed(seed)
    residual = (2 * config.layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                scale = residual if any(part in name for part in RESIDUAL) else 1.0
                parameter.normal_(0.0, 0.02 * scale, generator=generator)
    return model


@torch.no_grad()
def perturb(model: nn.Module, seed: int, size: float) -> nn.Module:
    """Multiply every weight by 1 + size * normal noise, in place."""
    noise = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters() if size else ():
        parameter.mul_(1 + size * torch.randn(parameter.shape, generator=noise))
    return model


def to_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters in place, keeping ties; buffers (the rotary tables) stay fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
