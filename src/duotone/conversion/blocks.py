"""The known structures of blocks: which linears and MLPs read which norm, by the names of submodules."""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from duotone.conversion.patterns import norms_of
from duotone.errors import UserError

Block = Mapping[str, Collection[str]]
"""For each norm of a block, the paths of the linears and MLPs that read its output, and that nothing else reads it.

A norm whose output goes elsewhere, as into a residual connection, has none.
"""

_OWNERS = ("self_attn", "attn", "attention", "self_attention", "attn.attention")
_FIRST = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "qkv",
    "c_attn",
    "query_key_value",
)
ATTENTION = tuple(f"{owner}.{linear}" for owner in _OWNERS for linear in (*_FIRST, "Wqkv", "wq", "wk", "wv"))
"""The linears that read the input of an attention, in all libraries. A block has a few of them."""

MLPS = ("mlp", "feed_forward", "ffn", "block_sparse_moe")

BLOCKS: tuple[Block, ...] = (
    # Llama, Mistral, Qwen, Gemma, Granite, StableLM, GPT-NeoX, DeepSeek, and mixtures of experts
    {"input_layernorm": ATTENTION, "post_attention_layernorm": MLPS},
    # Gemma 2 and 3
    {
        "input_layernorm": ATTENTION,
        "post_attention_layernorm": (),
        "pre_feedforward_layernorm": MLPS,
        "post_feedforward_layernorm": (),
    },
    # GLM 4
    {
        "input_layernorm": ATTENTION,
        "post_self_attn_layernorm": (),
        "post_attention_layernorm": MLPS,
        "post_mlp_layernorm": (),
    },
    {"input_layernorm": (*ATTENTION, *MLPS)},  # Phi, Cohere: attention and MLP side by side
    {"ln_1": ATTENTION, "ln_2": MLPS},  # GPT-2, GPT-Neo
    {"ln_1": (*ATTENTION, *MLPS)},  # GPT-J
    {"layer_norm1": ATTENTION, "layer_norm2": MLPS},  # CLIP, SigLIP
    {"layernorm": MLPS},  # the head of SigLIP
    {"layernorm_before": ATTENTION, "layernorm_after": MLPS},  # ViT
    {"norm1": ATTENTION, "norm2": MLPS},  # timm, DINOv2
    {"norm_1": ATTENTION, "norm_2": MLPS},  # MPT
    {"attention_norm": ATTENTION, "ffn_norm": MLPS},  # Meta's Llama, torchtitan
    {"attention_norm": ATTENTION, "mlp_norm": MLPS},
    {"attn_norm": ATTENTION, "mlp_norm": MLPS},  # ModernBERT
    {"mlp_norm": MLPS},  # its first block
    {"ln_attn": ATTENTION, "ln_mlp": MLPS},  # Falcon
    {"layer_norm": (*(f"SelfAttention.{name}" for name in "qkv"), "EncDecAttention.q", "DenseReluDense")},  # T5
    {"q_a_layernorm": ("q_b_proj",), "kv_a_layernorm": ()},  # inside the attention of DeepSeek
    # Norms behind a residual connection, which the next one reads too: OLMo 2, BERT, DistilBERT
    {"post_attention_layernorm": (), "post_feedforward_layernorm": ()},
    {"LayerNorm": ()},
    {"sa_layer_norm": (), "output_layer_norm": ()},
)


def readers(parent: nn.Module, norms: Collection[str], own: Sequence[Block]) -> Block | None:
    """Return what reads each norm of a block, None if the block is not known.

    `norms` are the names of all norms that are children of `parent`. Blocks of the user come first, and may leave out
    norms.
    """
    for block in own:
        if _fits(parent, norms, block):
            return block
    for block in [block for block in BLOCKS if block.keys() == set(norms)]:
        found = {norm: [path for path in paths if _has(parent, path)] for norm, paths in block.items()}
        if any(found.values()) == any(block.values()):
            return found
    return None


def as_blocks(model: nn.Module, blocks: Sequence[Mapping[str, str | Sequence[str]]]) -> tuple[Block, ...]:
    """Return the blocks of a user. UserError if one is no table of names, or if no module has these names."""
    what = 'blocks is a list of tables {norm: names of its readers}, as [{"norm1": ["attn.qkv"], "norm2": "mlp"}]'
    if not isinstance(blocks, Sequence) or not all(isinstance(block, Mapping) and block for block in blocks):
        raise UserError(f"{what}; got {blocks!r}")
    own = [{norm: [paths] if isinstance(paths, str) else paths for norm, paths in each.items()} for each in blocks]
    for block in own:
        names = [
            name for norm, paths in block.items() for name in (norm, *(paths if isinstance(paths, Sequence) else [0]))
        ]
        if not all(isinstance(name, str) for name in names):
            raise UserError(f"{what}; got {block!r} in it")
        if not any(_fits(parent, norms_of(parent), block) for parent in model.modules()):
            raise UserError(f"no module of {type(model).__name__} has these norms and readers: {block!r}")
    return tuple(own)


def _fits(parent: nn.Module, norms: Collection[str], block: Block) -> bool:
    return block.keys() <= set(norms) and all(_has(parent, path) for paths in block.values() for path in paths)


def _has(parent: nn.Module, path: str) -> bool:
    """Whether a path leads to a module."""
    module: nn.Module | None = parent
    for step in path.split("."):
        module = None if module is None else module._modules.get(step)
    return module is not None
