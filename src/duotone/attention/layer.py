"""TransformerLayer: attention and MLP, each behind a norm and beside a residual connection."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.attention.heads import NORMS, check_layout, token_axis
from duotone.attention.kv_cache import KVCache
from duotone.attention.masks import Window
from duotone.attention.multihead import Init, MultiheadAttention, Rotary, below
from duotone.errors import UserError, one_of
from duotone.modules import LayerNormMLP
from duotone.modules.fused_module import ModuleGroup
from duotone.pipeline.slot_roles import InnerBoundaryRoles
from duotone.recipes.recipe import RecipeLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TransformerLayer(InnerBoundaryRoles, ModuleGroup):
    """x + drop(attention(norm(x))), in decoders then + drop(cross attention), then + drop(MLP(norm(x))).

    Arguments after the heads are keyword-only, with the names and defaults of Transformer Engine. `attention` are all
    others of `MultiheadAttention`. UserError for values that are not allowed.

    - `layer_type` "decoder" adds `inter_attention` over the encoder's output.
    - `apply_residual_connection_post_layernorm` adds to the outputs of the norms instead of x.
    - `output_layernorm` moves the first norm behind the layer.
    - `parallel_attention_mlp` runs the MLP on x itself, beside attention.
    - `drop_path_rate` is the probability that a sample skips a branch.
    - `split_gate` is that of `LayerNormMLP`. `layer_number` has no effect.
    """

    def __init__(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Window | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: Window | None = None,
        params_dtype: torch.dtype | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        tp_group: "ProcessGroup | None" = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        split_gate: bool = False,
        attn_input_format: str = "sbhd",
        device: torch.device | str | None = None,
        recipe: RecipeLike | None = None,
        name: str = "",
        **attention: Any,
    ) -> None:
        super().__init__()
        self.hidden_dropout, self.drop_path_rate, self.layer_number = hidden_dropout, drop_path_rate, layer_number
        self.parallel_attention_mlp = parallel_attention_mlp
        self.sample_axis = self._checked_axis(attn_input_format, layer_type)
        norm = {"params_dtype": params_dtype, "device": device, "zero_centered_gamma": zero_centered_gamma}
        shared: dict[str, Any] = {**norm, "normalization": normalization, "bias": bias, "init_method": init_method}
        shared |= {"output_layer_init_method": output_layer_init_method, "tp_group": tp_group, "tp_size": tp_size}
        shared |= {"set_parallel_mode": set_parallel_mode, "sequence_parallel": sequence_parallel, "recipe": recipe}
        shared["fuse_wgrad_accumulation"] = attention.pop("fuse_wgrad_accumulation", False)
        shared["return_layernorm_output"] = apply_residual_connection_post_layernorm
        heads = {**shared, "layernorm_epsilon": layernorm_epsilon, "qkv_format": attn_input_format}
        block: dict[str, Any] = {"attn_mask_type": self_attn_mask_type, "window_size": window_size}
        block |= {"input_layernorm": not output_layernorm, "name": below(name, "self_attention"), "return_bias": False}
        cross: dict[str, Any] = {"attn_mask_type": enc_dec_attn_mask_type, "window_size": enc_dec_window_size}
        cross |= {"attention_type": "cross", "input_layernorm": True, "name": below(name, "inter_attention")}
        attend = partial(MultiheadAttention, hidden_size, num_attention_heads)
        self.self_attention = attend(**block, **heads, **attention)
        self.inter_attention = attend(**cross, **heads, **attention) if layer_type == "decoder" else None
        mlp = {"activation": activation, "activation_params": activation_params, "split_gate": split_gate}
        mlp |= {"eps": layernorm_epsilon, "name": below(name, "layernorm_mlp")}
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, **shared, **mlp)
        last = {"tp_group": tp_group if set_parallel_mode and sequence_parallel else None, "eps": layernorm_epsilon}
        self.layernorm = NORMS[normalization](hidden_size, **norm, **last) if output_layernorm else None

    @property
    def layer_type(self) -> str:
        """ "decoder" with attention over the output of an encoder, "encoder" without."""
        return "encoder" if self.inter_attention is None else "decoder"

    def _checked_axis(self, layout: str, layer_type: str) -> int | None:
        """The axis of samples, None of packed sequences. UserError for what does not go together."""
        axis = None if check_layout(layout) == "thd" else 1 - token_axis(layout)
        one_of("layer_type", layer_type, ("encoder", "decoder"))
        for name in ("hidden_dropout", "drop_path_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; give a probability from 0 to below 1")
        if self.parallel_attention_mlp and layer_type == "decoder":
            raise UserError("parallel_attention_mlp is for layer_type 'encoder'; leave one of them out")
        if self.drop_path_rate and axis is None:
            raise UserError(
                "drop_path_rate drops samples, which packed sequences ('thd') do not have apart; set it to 0"
            )
        return axis

    @property
    def at_boundary(self) -> tuple[LayerNormMLP, MultiheadAttention]:
        return self.layernorm_mlp, self.self_attention

    def forward(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        *,
        self_attn_mask_type: str | None = None,
        window_size: Window | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Window | None = None,
        is_first_microbatch: bool | Tensor | None = None,
        rotary_pos_emb: Rotary | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        kv_cache: KVCache | None = None,
    ) -> Tensor:
        """(s, b, hidden), (b, s, hidden) or packed (t, hidden), as `attn_input_format` -> the same.

        Masks, angles and `cu_seqlens` are those of `MultiheadAttention`; `cu_seqlens_kv` are of the encoder's output. A
        `kv_cache` is for self attention.
        UserError if they, shapes or dtypes do not fit, and for an encoder's output without a decoder.
        """
        if (encoder_output is None) != (self.inter_attention is None):
            raise UserError("encoder_output is for layer_type 'decoder', which needs it; 'encoder' takes none")
        first = {"is_first_microbatch": is_first_microbatch}
        masking = {"attn_mask_type": self_attn_mask_type, "window_size": window_size}
        # with cross attention, lengths may belong to only one of the two
        if self.inter_attention is None or self.self_attention.takes_lengths(self_attn_mask_type):
            masking["cu_seqlens_q"] = cu_seqlens_q
        of_self = {"rotary_pos_emb": rotary_pos_emb, "kv_cache": kv_cache}
        mixed = self.self_attention(hidden_states, attention_mask, **of_self, **masking, **first)
        out = self._add(mixed, hidden_states)
        if self.inter_attention is not None:
            masking = {"attn_mask_type": enc_dec_attn_mask_type, "window_size": enc_dec_window_size}
            masking["cu_seqlens_kv"] = cu_seqlens_kv
            if self.inter_attention.takes_lengths(enc_dec_attn_mask_type):
                masking["cu_seqlens_q"] = cu_seqlens_q
            mixed = self.inter_attention(out, enc_dec_attn_mask, encoder_output, **masking, **first)
            out = self._add(mixed, out)
        beside = self.parallel_attention_mlp
        branch = self.layernorm_mlp(hidden_states if beside else out, **first)
        out = self._add(branch[0] if beside and isinstance(branch, tuple) else branch, out)
        return out if self.layernorm is None else self.layernorm(out)

    def _add(self, branch: Tensor | tuple[Tensor, ...], residual: Tensor) -> Tensor:
        """The residual, or the output of the branch's norm where it comes along, plus the branch after its dropouts."""
        out, residual = branch if isinstance(branch, tuple) else (branch, residual)
        if self.training and self.hidden_dropout:
            out = F.dropout(out, self.hidden_dropout)
        if self.training and self.drop_path_rate:
            shape = [size if axis == self.sample_axis else 1 for axis, size in enumerate(out.shape)]
            stays = torch.rand(shape, device=out.device) >= self.drop_path_rate
            out = out * (stays / (1 - self.drop_path_rate)).to(out.dtype)
        return residual + out
