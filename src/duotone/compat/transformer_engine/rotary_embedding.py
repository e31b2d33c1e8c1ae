"""RotaryPositionEmbedding with the arguments and the shape of Transformer Engine's."""

from torch import Tensor

from duotone import attention
from duotone.compat.transformer_engine.options import refuse


class RotaryPositionEmbedding(attention.RotaryPositionEmbedding):
    """forward(max_seq_len, offset=0) -> angles in fp32 (max_seq_len, 1, 1, width), for heads in "sbhd".

    The width is that part of `dim` which `rotary_percent` names.
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        refuse(
            "RotaryPositionEmbedding",
            seq_len_interpolation_factor=seq_len_interpolation_factor,
            pretrained_max_position_embeddings=pretrained_max_position_embeddings,
            interleaved=interleaved,
        )
        super().__init__(int(dim * rotary_percent), rotary_base)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        return super().forward(max_seq_len, offset)[:, None, None]
