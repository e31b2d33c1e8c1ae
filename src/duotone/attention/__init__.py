"""Attention: heads, the projections around them, and whole transformer layers."""

from duotone.attention.dot_product import DotProductAttention
from duotone.attention.kv_cache import KVCache
from duotone.attention.layer import TransformerLayer
from duotone.attention.multihead import MultiheadAttention
from duotone.attention.products import ProductPlan
from duotone.attention.rotary import RotaryPositionEmbedding, Rotation, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention", "KVCache", "MultiheadAttention", "ProductPlan", "RotaryPositionEmbedding", "Rotation",
    "TransformerLayer", "apply_rotary_pos_emb",
]  # fmt: skip
