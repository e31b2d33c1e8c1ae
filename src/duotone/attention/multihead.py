"""MultiheadAttention: projections to heads, attention, and the projection back."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from duotone.attention.dot_product import DotProductAttention
from duotone.attention.heads import KINDS, Heads, check_layout, groups_of, head_norm, head_width
from duotone.attention.kv_cache import KVCache
from duotone.attention.masks import Masks, Window, mask_type
from duotone.attention.recipe_following import FollowsRecipes
from duotone.attention.rotary import Angles, Rotation, apply_rotary_pos_emb
from duotone.errors import UserError, one_of
from duotone.modules import LayerNormLinear, Linear
from duotone.modules.fused_module import ModuleGroup
from duotone.modules.trace_errors import refuse_export
from duotone.numbered import ByName
from duotone.pipeline.slot_roles import InnerBoundaryRoles
from duotone.pipeline.titles import title
from duotone.recipes.recipe import Recipe, RecipeLike, drop_dead
from duotone.recipes.roles import QuantizerRole
from duotone.sharding.dtensors import is_distributed
from duotone.state.torch_private import in_context_parallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Init = Callable[[Tensor], object]
Rotary = Angles | tuple[Angles, Angles]
PROJECTIONS = {
    "self": ((("qkv", "qkv"), ("layernorm_qkv", "layernorm_linear_qkv"), KINDS),),
    "cross": (
        (("query_layer", "query_layer"), ("layernorm_query", "layernorm_linear_q"), KINDS[:1]),
        (("key_value", "key_value"), None, KINDS[1:]),
    ),
}
"""Each projection by attribute and role name, without a norm and with one, and the kinds of its outputs."""


class MultiheadAttention(InnerBoundaryRoles, FollowsRecipes, ModuleGroup):
    """Attention over hidden states; arguments after the heads are keyword-only, names and defaults as in
    Transformer Engine.

    `attention_type` "self" projects hidden states by `qkv` (`layernorm_qkv` behind a norm), "cross" by `query_layer`
    (`layernorm_query`) and the encoder's output by `key_value`. With `fuse_qkv_params` each is one parameter, whose
    rows go by group (`qkv_weight_interleaved`) or by kind; without, one for each kind. `qk_norm_type` "RMSNorm",
    "LayerNorm" or "L2Normalization" norms each head of queries and keys, behind the rotary embedding unless
    `qk_norm_before_rope`. `set_parallel_mode` splits the heads over the ranks of `tp_group`.
    """

    def __init__(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        kv_channels: int | None = None,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        input_layernorm: bool = False,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        attention_type: str = "self",
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        softmax_scale: float | None = None,
        fuse_qkv_params: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        qkv_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        set_parallel_mode: bool = False,
        tp_group: "ProcessGroup | None" = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        recipe: RecipeLike | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        count, width = num_attention_heads, head_width(hidden_size, num_attention_heads, kv_channels)
        whole = Heads(count, groups_of(count, num_gqa_groups), width, fuse_qkv_params and qkv_weight_interleaved)
        self.heads = whole.over(tp_group.size() if set_parallel_mode and tp_group is not None else 1)
        self.attention_type, self.qk_norm_before_rope = attention_type, qk_norm_before_rope
        both: dict[str, Any] = {"bias": bias, "params_dtype": params_dtype, "device": device, "recipe": recipe}
        both |= {"sequence_parallel": sequence_parallel, "fuse_wgrad_accumulation": fuse_wgrad_accumulation}
        both |= {"tp_group": tp_group if set_parallel_mode else None, "tp_size": tp_size}
        modes = ("column", "row") if set_parallel_mode else (None, None)
        column = {**both, "init_method": init_method, "parallel_mode": modes[0]}
        row = {**both, "init_method": output_layer_init_method or init_method, "parallel_mode": modes[1]}
        norm: dict[str, Any] = {"eps": layernorm_epsilon, "normalization": normalization}
        norm["zero_centered_gamma"] = zero_centered_gamma
        norm["return_layernorm_output"] = self._returns_norm = input_layernorm and return_layernorm_output
        self._add_projections(hidden_size, whole, column, norm if input_layernorm else {}, fuse_qkv_params, name)
        place = {"params_dtype": params_dtype, "device": device, "tp_group": both["tp_group"]}  # ranks have other heads
        self.q_norm, self.k_norm = (head_norm(qk_norm_type, width, qk_norm_eps, **place) for _ in ("query", "key"))
        core: dict[str, Any] = {"attn_mask_type": attn_mask_type, "window_size": window_size, "recipe": recipe}
        core |= {"attention_dropout": attention_dropout, "softmax_scale": softmax_scale, "qkv_format": qkv_format}
        core |= {"num_gqa_groups": self.heads.groups, "name": below(name, "core_attention")}
        self.core_attention = DotProductAttention(self.heads.count, width, **core)
        self.proj = Linear(count * width, hidden_size, return_bias=return_bias, name=below(name, "proj"), **row)

    @property
    def qkv_format(self) -> str:
        """The order of dimensions of inputs and outputs, which may change between calls."""
        return self.core_attention.qkv_format

    @qkv_format.setter
    def qkv_format(self, layout: str) -> None:
        self.core_attention.qkv_format = check_layout(layout)

    @property
    def return_layernorm_output(self) -> bool:
        """Whether calls also return what the projections multiply."""
        return self._returns_norm

    def _add_projections(
        self, hidden_size: int, heads: Heads, linear: dict[str, Any], norm: dict[str, Any], fused: bool, name: str
    ) -> None:
        one_of("attention_type", self.attention_type, PROJECTIONS)
        self._projections = []
        for plain, normed, kinds in PROJECTIONS[self.attention_type]:
            attribute, role = normed if norm and normed else plain
            sizes = heads.sizes(kinds)
            options = {**linear, "parameters_split": sizes if len(kinds) > 1 and not fused else None}
            features = hidden_size, sum(sizes.values())
            if norm and normed:
                projection = LayerNormLinear(*features, name=below(name, role), **options, **norm)
            else:
                projection = Linear(*features, name=below(name, role), **options)
            if fused and len(kinds) > 1 and not heads.interleaved:
                projection.row_order = "its rows go by kind; leave fuse_qkv_params and qkv_weight_interleaved out"
            setattr(self, attribute, projection)
            self._projections.append(attribute)

    @property
    def recipe(self) -> Recipe:
        """The recipe outside of any autocast."""
        return self.core_attention.recipe

    @property
    def at_boundary(self) -> tuple[Linear, Linear]:
        """`proj`, and the projections of the hidden states."""
        return self.proj, self.projections[0]

    @property
    def projections(self) -> list[Any]:
        """The projections of hidden states and, for cross attention, of the encoder's output."""
        return [self._modules[name] for name in self._projections]

    def forward(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        encoder_output: Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        is_first_microbatch: bool | Tensor | None = None,
        rotary_pos_emb: Rotary | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        kv_cache: KVCache | None = None,
    ) -> Any:
        """(s, b, hidden), (b, s, hidden) or packed (t, hidden), as `qkv_format` -> the same, in the parameters' dtype.

        A tuple with the bias of `proj` where `return_bias` is set, then the output of the norm where that is returned.
        `encoder_output` is for cross attention, in the same layout. `rotary_pos_emb` are angles (positions, width) or
        their `Rotation`, or a pair for queries and keys; behind a `kv_cache` they are those of the new tokens. Masks,
        `cu_seqlens` and `kv_cache` are those of `DotProductAttention`.
        UserError if they, shapes or dtypes do not fit.
        """
        if (encoder_output is None) != (self.attention_type == "self"):
            raise UserError("encoder_output is for attention_type 'cross', which needs it; 'self' takes none")
        recipe, _ = self.recipe_of_call(self.recipe)
        masking: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
        masking |= {"attn_mask_type": attn_mask_type, "window_size": window_size}
        if attention_mask is not None or cu_seqlens_q is not None:
            self._check_masking(recipe, hidden_states, encoder_output, attention_mask, masking)
        output, gradient = self._boundary(recipe, rotary_pos_emb is not None)
        query, key, value, *normed = self._project((hidden_states, encoder_output), is_first_microbatch, output)
        angles = rotary_pos_emb
        if angles is None or isinstance(angles, Tensor | Rotation):
            angles = (angles, angles)
        query = self._place(query, self.q_norm, angles[0], cu_seqlens_q)
        key = self._place(key, self.k_norm, angles[1], cu_seqlens_q if encoder_output is None else cu_seqlens_kv)
        mixed = self.core_attention(query, key, value, attention_mask, kv_cache=kv_cache, **masking)
        out = self.proj(mixed, is_first_microbatch=is_first_microbatch, fp8_grad=gradient)
        out, *others = out if isinstance(out, tuple) else (out,)
        return (out, *others, *normed) if others or normed else out

    def takes_lengths(self, attn_mask_type: str | None) -> bool:
        """Whether a call with this type of mask, or with that of the module, takes `cu_seqlens`."""
        kind = mask_type(attn_mask_type or self.core_attention.attn_mask_type)
        return kind.padding or self.qkv_format == "thd"

    def _check_masking(
        self, recipe: Recipe, hidden: Tensor, encoder: Tensor | None, mask: Masks, masking: dict[str, Any]
    ) -> None:
        """Refuse a mask that does not fit before a projection moves a seed or a delayed scale."""
        if self.proj.layout.sequence_parallel or hidden.dim() != len(self.qkv_format) - 1 or is_distributed(hidden):
            return  # only the projections know the gathered length, or refuse the input
        heads, width = self.heads.count, self.core_attention.channels[0]
        inputs = (hidden, hidden if encoder is None else encoder)
        probes = [x.new_empty(()).expand(*x.shape[:-1], heads, width) for x in inputs]
        _, ranks = self.core_attention.over_ranks(recipe, probes[0], probes[1], self.qkv_format)
        lengths = masking["cu_seqlens_q"], masking["cu_seqlens_kv"]
        kind_and_window = self.core_attention.masking(masking["attn_mask_type"], masking["window_size"])
        self.core_attention.visible((probes[0], probes[1]), mask, lengths, self.qkv_format, *kind_and_window, ranks)

    def _boundary(self, recipe: Recipe, is_turned: bool) -> tuple[bool, bool]:
        """Whether projections encode query, key and value, and whether `proj` encodes the gradient of its input.

        Nothing may change heads on their way, and each tensor has one scale.
        """
        if not recipe.fp8_mha:  # guards must not read a value that belongs to one layer
            return False, False
        output, gradient = getattr(self._crossing, recipe.key, (False, False))
        # Ranks that share a sequence agree on the scales of their keys when attention encodes them.
        output = output and not is_turned and not in_context_parallel()
        if output and torch.compiler._is_exporting_flag:
            refuse_export("torch.export takes no quantized heads: give a recipe with fp8_dpa in the place of fp8_mha")
        # No trace makes quantized gradients. Attention then encodes the gradient itself, to the same codes.
        return output, gradient and not torch.compiler.is_dynamo_compiling()

    def _crosses(self, recipe: Recipe) -> tuple[bool, bool]:
        if not self.core_attention.requested(recipe):
            return False, False
        formats = self.core_attention.formats(recipe)
        changes = self.q_norm is not None or recipe.dpa_center_keys or recipe.dpa_rotate or self.heads.interleaved
        return not changes and formats.crosses("query"), formats.crosses("do")

    def _project(
        self, inputs: tuple[Tensor | None, ...], first: bool | Tensor | None, fp8_output: bool
    ) -> list[Tensor]:
        """Query, key and value, then the output of the norm if it is returned."""
        heads, normed = [], []
        for project, x, (*_, kinds) in zip(self.projections, inputs, PROJECTIONS[self.attention_type], strict=False):
            y = project(x, is_first_microbatch=first, fp8_output=fp8_output)
            if isinstance(y, tuple):
                y, *normed = y
            local = self.heads.of_features(y.shape[-1], kinds)
            if local is not self.heads:
                self._check_norms()
            heads += local.split(y, kinds)
        return heads + normed

    def _check_norms(self) -> None:
        """UserError if gradients of a norm of heads would miss the heads of other ranks."""
        for norm in (self.q_norm, self.k_norm):
            if norm is not None and not all(map(is_distributed, norm.parameters())):
                axis = len(self.qkv_format) - 2
                raise UserError(
                    f"{title(self.core_attention)}: each rank has some of the heads, and q_norm and k_norm have "
                    f"plain parameters; give both SequenceParallel(sequence_dim={axis}, use_local_output=True)"
                )

    def _place(self, heads: Tensor, norm: nn.Module | None, angles: Angles | None, cu_seqlens: Tensor | None) -> Tensor:
        """Norm and turn heads, in the order that `qk_norm_before_rope` says."""
        if norm is not None and self.qk_norm_before_rope:
            heads = norm(heads)
        if angles is not None:
            heads = apply_rotary_pos_emb(heads, angles, self.qkv_format, cu_seqlens)
        return heads if norm is None or self.qk_norm_before_rope else norm(heads)

    def keeps_high_precision(self, recipe: Recipe) -> bool:
        return self.core_attention.keeps_high_precision(recipe)

    def share(self, recipe: Recipe) -> None:
        self.prepare_recipe(recipe)
        self.core_attention.share(recipe)

    def is_shared(self, recipe: Recipe) -> bool:
        return self.core_attention.is_shared(recipe)

    def prepare_recipe(self, recipe: Recipe) -> None:
        """If the recipe asks for attention in low precision, give each neighbour the consumers of its tensors."""
        core = self.core_attention
        names = self.projections[0].module_name, core.module_name, self.proj.module_name
        neighbours = recipe.key, names if core.requested(recipe) else None
        if neighbours != self._neighbours:
            self._neighbours = neighbours
            self._set_neighbours(*neighbours)
        core.prepare_recipe(recipe)
        if recipe.fp8_mha and not hasattr(self._crossing, recipe.key):
            drop_dead(vars(self._crossing))
            setattr(self._crossing, recipe.key, self._crosses(recipe))

    def _set_neighbours(self, recipe: str, names: tuple[str, ...] | None) -> None:
        if names is None:
            for module in (*self.projections, self.proj, self.core_attention):
                module.set_consumers(recipe)
            return
        source, core, sink = names
        for linear in self.projections:
            linear.set_consumers(recipe, output=QuantizerRole("dpa", "qkv", core))
        self.proj.set_consumers(recipe, gradient=QuantizerRole("dpa", "do", core))
        ends = QuantizerRole("linear", "input", sink), QuantizerRole("linear", "grad_output", source)
        self.core_attention.set_consumers(recipe, *ends)

    def forget(self) -> None:
        super().forget()
        self._crossing = ByName()
        self._neighbours: tuple[str, tuple[str, ...] | None] = "", None
        """The key of the last recipe and, where it asks for low precision, the names of the neighbours."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key not in ("_crossing", "_neighbours")}


def below(name: str, child: str) -> str:
    """The name of a child; without a name the child chooses one."""
    return f"{name}.{child}" if name else ""
