"""Modules with the arguments and initial weights of Transformer Engine's modules.

Lightning knows modules of Transformer Engine by "transformer_engine.pytorch" in the name of their module.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from duotone import attention, modules
from duotone.attention.heads import token_axis
from duotone.attention.rotary import Angles
from duotone.compat.transformer_engine.context_parallel import (
    Lengths,
    Sequences,
    TokenOrder,
    angles_at,
    require_shares,
)
from duotone.compat.transformer_engine.options import CALLS, Options, by_name
from duotone.compat.transformer_engine.their_arguments import CLASSES, TakesTheirArguments, Tracker, fork, ranks
from duotone.errors import UserError
from duotone.linear.layout import parallel_layout
from duotone.pipeline.titles import title

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TransformerEngineBaseModule(TakesTheirArguments):
    """The base of linears, and of attention with linears inside, for `isinstance`. Each has `reset_parameters`."""


class TakesGroupLater:
    """A linear whose `tp_size` comes without a group is cut at once, and gets its group before its first forward."""

    late: tuple[str, bool] | None = None
    """Its `parallel_mode`, and whether activations outside are shards of their rows."""

    use_bias = property(lambda self: self.bias is not None)

    def prepare_constructor(self, named: Options) -> None:
        """Cut the sizes of this rank if `tp_size` comes without a group."""
        mode, size = named.get("parallel_mode"), named.get("tp_size", 1)
        if mode in CUT and size > 1 and named.get("tp_group") is None:
            cut(named, mode, size)
            self.__dict__["late"] = mode, bool(named.get("sequence_parallel"))
            named["tp_size"] = 1
        super().prepare_constructor(named)  # type: ignore[misc]

    def set_tensor_parallel_group(self, tp_group: "ProcessGroup") -> None:
        """Communicate in this group from the next forward on."""
        if self.late is not None:
            self.layout, self.late = parallel_layout(self.late[0], tp_group, self.late[1]), None
        super().set_tensor_parallel_group(tp_group)  # type: ignore[misc]

    def prepare_call(self, named: Options) -> None:
        """UserError if the group has not come yet."""
        if self.late is not None:
            raise UserError(f"{title(self)} has no tensor-parallel group; call set_tensor_parallel_group first")  # type: ignore[attr-defined]


CUT = {"column": "out_features", "row": "in_features"}


def cut(named: Options, mode: str, size: int) -> None:
    """Divide the cut features by the number of ranks."""
    features, remainder = divmod(named[CUT[mode]], size)
    if remainder:
        raise UserError(f"parallel_mode {mode!r} cannot split {named[CUT[mode]]} features over {size} ranks")
    named[CUT[mode]] = features


class Linear(TakesGroupLater, TransformerEngineBaseModule, modules.Linear):
    """`duotone.Linear` with their arguments."""


class LayerNormLinear(TakesGroupLater, TransformerEngineBaseModule, modules.LayerNormLinear):
    """`duotone.LayerNormLinear` with their arguments."""


class GroupedLinear(TransformerEngineBaseModule, modules.GroupedLinear):
    """`duotone.GroupedLinear` with their arguments."""

    def prepare_constructor(self, named: Options) -> None:
        """Cut each expert without communication: in Transformer Engine the caller communicates."""
        mode, size = named.get("parallel_mode"), ranks(named)
        if mode in CUT and size > 1:
            if named.get("bias", True):
                raise UserError("te.GroupedLinear adds no bias beside parallel_mode; give bias=False")
            cut(named, mode, size)
            named |= {"tp_size": 1, "tp_group": None}
        super().prepare_constructor(named)


class LayerNorm(TakesTheirArguments, modules.LayerNorm):
    """`duotone.LayerNorm` with their arguments."""


class RMSNorm(TakesTheirArguments, modules.RMSNorm):
    """`duotone.RMSNorm` with their arguments."""


ALIASES = {f"{part}_{kind}": (part, kind) for part in ("fc1", "fc2") for kind in ("weight", "bias")}


class LayerNormMLP(TransformerEngineBaseModule, modules.LayerNormMLP):
    """Its parameters can be read and replaced as `fc1_weight` and so on, and a `state_dict` names them so."""

    def state_dict(self, *args: object, **options: object) -> dict[str, object]:
        """Their names for the parameters; those of Duotone load too."""
        state = super().state_dict(*args, **options)
        prefix = str(options.get("prefix", ""))
        for name, (part, kind) in ALIASES.items():
            if f"{prefix}{part}.{kind}" in state:
                state[prefix + name] = state.pop(f"{prefix}{part}.{kind}")
        return state

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        if name in ALIASES:
            part, kind = ALIASES[name]
            return getattr(self._modules[part], kind)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if name in ALIASES:
            part, kind = ALIASES[name]
            setattr(self._modules[part], kind, value)
        else:
            super().__setattr__(name, value)


def drop_unused(named: Options, default: str, layout: str) -> None:
    """Drop masks and lengths that the type of mask does not need, as Transformer Engine does."""
    kind = named.get("attn_mask_type") or default
    if "padding" not in kind and kind != "arbitrary":
        named.pop("attention_mask", None)
    if "padding" not in kind and layout != "thd":
        named.pop("cu_seqlens_q", None)
        named.pop("cu_seqlens_kv", None)


def pop_padded(named: Options) -> tuple[Lengths, Lengths]:
    """Edges of sequences with their padding, of queries and of keys. UserError for those of keys alone."""
    of_queries, of_keys = (named.pop(f"cu_seqlens_{side}_padded", None) for side in ("q", "kv"))
    if of_queries is None and of_keys is not None:
        raise UserError("cu_seqlens_kv_padded comes without cu_seqlens_q_padded; give both")
    return of_queries, of_keys


class SharesSequences:
    """Mixed in before modules with attention, whose sequences may lie over ranks."""

    def set_context_parallel_group(
        self,
        cp_group: "ProcessGroup | None",
        cp_global_ranks: object = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Let the ranks of a group share sequences from the next forward on. None is for one rank.

        Heads travel by all-to-all for every `cp_comm_type`: results do not depend on it. No stream is needed. UserError
        for several groups, and if the ranks do not divide the heads.
        """
        if cp_group is not None and not hasattr(cp_group, "group_name"):
            raise UserError(f"cp_group is {cp_group!r}; give one process group, whose ranks share the sequences")
        name = cp_group.group_name if cp_group is not None and cp_group.size() > 1 else ""
        cores = [core for core in self.modules() if isinstance(core, DotProductAttention)]  # type: ignore[attr-defined]
        for core in cores:
            require_shares(core.num_attention_heads, core.num_gqa_groups, name)
        for core in cores:
            core.cp_group = name


class DotProductAttention(SharesSequences, TakesTheirArguments, attention.DotProductAttention):
    """`duotone.DotProductAttention` with their arguments."""

    get_rng_state_tracker: Tracker | None = None
    cp_group: str = ""
    """The name of the group whose ranks share sequences, or ""."""
    padded: tuple[Lengths, Lengths] = (None, None)
    """Edges of sequences with their padding, of queries and of keys, in a call to the module around this one."""

    def __init__(self, *values: object, cp_group: "ProcessGroup | None" = None, **options: object) -> None:
        super().__init__(*values, **options)
        self.set_context_parallel_group(cp_group)

    @property
    def is_reordered(self) -> bool:
        """Whether attention takes tokens in another order than the module around it has them."""
        return bool(self.cp_group) or self.padded[0] is not None

    def prepare_constructor(self, named: Options) -> None:
        """Divide the heads by the ranks: Transformer Engine takes the heads of all ranks, Duotone those of one."""
        for heads in ("num_attention_heads", "num_gqa_groups"):
            if named.get(heads) is not None:
                named[heads] //= ranks(named)
        for name in ("tp_group", "tp_size", "sequence_parallel", "attention_type"):
            named.pop(name, None)

    def forward(self, *values: object, **options: object) -> object:
        """Weights are dropped by the random numbers of this rank."""
        named = by_name(f"te.{self.title}.forward", CALLS[self.title].split(), values, options)
        layout = named.get("qkv_format") or self.qkv_format
        drop_unused(named, self.attn_mask_type, layout)
        padded = pop_padded(named)
        padded = self.padded if padded[0] is None else padded
        padded = padded if layout == "thd" else (None, None)
        order = None
        if self.cp_group or padded[0] is not None:
            order = self._collect(named, padded, layout)
        with fork(self.get_rng_state_tracker if self.dropout else None):
            out = super().forward(**named)
        if order is None:
            return out
        assert isinstance(out, Tensor)
        return order.spread(torch.unflatten(out, -1, (-1, self.channels[1])), layout).flatten(-2)

    def _collect(self, named: Options, padded: tuple[Lengths, Lengths], layout: str) -> TokenOrder:
        """Put heads in the order of attention in the place of those of a call. Returns the order of queries."""
        for name in ("attention_mask", "kv_cache"):
            if named.get(name) is not None:
                raise UserError(f"te.{self.title} takes no {name} beside a cp_group or padded lengths; give cu_seqlens")
        query, key, value = (named[f"{kind}_layer"] for kind in ("query", "key", "value"))
        order = of_keys = self._order(query, named.get("cu_seqlens_q"), padded[0], layout)
        if named.get("cu_seqlens_kv") is not None or query.shape[:-2] != key.shape[:-2]:
            of_keys = self._order(key, named.get("cu_seqlens_kv"), padded[1], layout)
        named["query_layer"] = order.collect(query, layout)
        named["key_layer"], named["value_layer"] = (of_keys.collect(x, layout) for x in (key, value))
        return order

    def _order(self, x: Tensor, lengths: Lengths, padded: Lengths, layout: str) -> TokenOrder:
        edges = padded if padded is not None or layout != "thd" else lengths
        sequences = Sequences.of(x.shape[token_axis(layout)], x.device, edges, self.cp_group)
        return sequences.order(None if padded is None else lengths)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in super().__getstate__().items() if name != "cp_group"}


class TakesPadding(SharesSequences):
    """Mixed in before modules around attention. Lengths with padding are for attention alone."""

    def forward(self, *values: object, **options: object) -> object:
        title: str = self.title  # type: ignore[attr-defined]
        named = by_name(f"te.{title}.forward", CALLS[title].split(), values, options)
        padded = pop_padded(named)
        if padded[0] is None:
            return super().forward(**named)  # type: ignore[misc]
        cores = [core for core in self.modules() if isinstance(core, DotProductAttention)]  # type: ignore[attr-defined]
        try:
            for core in cores:
                core.padded = padded
            return super().forward(**named)  # type: ignore[misc]
        finally:
            for core in cores:
                core.padded = (None, None)


class MultiheadAttention(TakesPadding, TransformerEngineBaseModule, attention.MultiheadAttention):
    """`duotone.MultiheadAttention` with their arguments."""

    core_attention: DotProductAttention

    def prepare_call(self, named: Options) -> None:
        drop_unused(named, self.core_attention.attn_mask_type, self.qkv_format)

    def _check_masking(self, *arguments: Any) -> None:
        if not self.core_attention.is_reordered:
            super()._check_masking(*arguments)

    def _boundary(self, *arguments: Any) -> tuple[bool, bool]:
        return (False, False) if self.core_attention.is_reordered else super()._boundary(*arguments)

    def _place(self, heads: Tensor, norm: nn.Module | None, angles: Angles | None, cu_seqlens: Lengths) -> Tensor:
        core, is_packed = self.core_attention, self.qkv_format == "thd"
        if angles is not None and core.is_reordered:
            if self.attention_type == "cross":
                raise UserError(f"{title(self)} turns no heads of cross attention beside a cp_group or padded lengths")
            edges = core.padded[0] if core.padded[0] is not None else cu_seqlens
            tokens = heads.shape[token_axis(self.qkv_format)]
            sequences = Sequences.of(tokens, heads.device, edges if is_packed else None, core.cp_group)
            angles = angles_at(angles, sequences.places()[1])
            cu_seqlens = torch.tensor([0, tokens], device=heads.device) if is_packed else None
        return super()._place(heads, norm, angles, cu_seqlens)


class TransformerLayer(
    TakesPadding, TakesTheirArguments, attention.TransformerLayer, further=(attention.MultiheadAttention,)
):
    """`duotone.TransformerLayer` with their arguments."""


CLASSES |= {cls.__bases__[-1]: cls for cls in (LayerNormMLP, DotProductAttention, MultiheadAttention)}
