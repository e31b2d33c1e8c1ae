"""Attention: heads, the projections around them, and whole transformer layers."""

from duotone.attention.dot_product import DotProductAttention as DotProductAttention
from duotone.attention.dot_product import ProductPlan as ProductPlan
from duotone.attention.layer import TransformerLayer as TransformerLayer
from duotone.attention.multihead import MultiheadAttention as MultiheadAttention
from duotone.attention.rotary import RotaryPositionEmbedding as RotaryPositionEmbedding
from duotone.attention.rotary import Rotation as Rotation
from duotone.attention.rotary import apply_rotary_pos_emb as apply_rotary_pos_emb
