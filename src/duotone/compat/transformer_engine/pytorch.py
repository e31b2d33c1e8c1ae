"""Modules with the arguments and initial weights of Transformer Engine's modules.

Lightning knows modules of Transformer Engine by "transformer_engine.pytorch" in the name of their module.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from duotone import attention, modules
from duotone.attention.heads import check_layout
from duotone.attention.rotary import Angles
from duotone.compat.transformer_engine.context_parallel import (
    Lengths,
    Padded,
    Sequences,
    TokenOrder,
    join_padding,
    place_of,
    require_shares,
)
from duotone.compat.transformer_engine.options import CALLS, Options, by_name
from duotone.compat.transformer_engine.their_arguments import CLASSES, TakesTheirArguments, Tracker, fork, ranks
from duotone.errors import UserError
from duotone.pipeline.titles import title
from duotone.sharding.layout import parallel_layout

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
    join_padding(named, layout)


HEADS = ("query_layer", "key_layer", "value_layer")
COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
ELSEWHERE = "of another process"
"""In the place of the name of a group that was pickled: here that name may mean another group."""


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
        for several groups, for an unknown type, and if the ranks do not divide the heads.
        """
        if cp_group is not None and not hasattr(cp_group, "group_name"):
            got = type(cp_group).__name__
            raise UserError(f"cp_group is of type {got}; give one process group of this rank, as mesh.get_group() does")
        if cp_comm_type not in COMM_TYPES:
            raise UserError(f"cp_comm_type {cp_comm_type!r} is unknown; allowed are {', '.join(map(repr, COMM_TYPES))}")
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

    def __init__(self, *values: object, cp_group: "ProcessGroup | None" = None, **options: object) -> None:
        super().__init__(*values, **options)
        self.set_context_parallel_group(cp_group)

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
        layout = check_layout(named.get("qkv_format") or self.qkv_format)
        drop_unused(named, self.attn_mask_type, layout)
        order = None
        if self.cp_group or isinstance(named.get("cu_seqlens_q"), Padded):
            order = self._collect(named, layout)
        with fork(self.get_rng_state_tracker if self.dropout else None):
            out = super().forward(**named)
        if order is None:
            return out
        assert isinstance(out, Tensor)
        return order.spread(torch.unflatten(out, -1, (-1, self.channels[1])), layout).flatten(-2)

    def _collect(self, named: Options, layout: str) -> TokenOrder:
        """Put heads in the order of attention in the place of those of a call. Returns the order of queries."""
        for name in ("attention_mask", "kv_cache"):
            if named.get(name) is not None:
                raise UserError(
                    f"te.{self.title} takes no {name} beside a cp_group or padded lengths; leave it out, or give "
                    "cu_seqlens and a type of padding"
                )
        missing = [name for name in HEADS if not isinstance(named.get(name), Tensor)]
        if missing:
            raise UserError(f"te.{self.title} takes tensors as {', '.join(HEADS)}; {missing[0]} is missing")
        query, key, value = (named[name] for name in HEADS)
        self._check(layout, query, key, value)
        if self.cp_group == ELSEWHERE:
            raise UserError(f"the cp_group of {title(self)} is {ELSEWHERE}; call set_context_parallel_group")
        require_shares(query.shape[-2], key.shape[-2], self.cp_group)
        lengths = named.get("cu_seqlens_q"), named.get("cu_seqlens_kv")
        order = of_keys = self._order(query, lengths[0], layout)
        if lengths[1] is not None or query.shape[:-2] != key.shape[:-2]:
            of_keys = self._order(key, lengths[1], layout)
        named["query_layer"] = order.collect(query, layout)
        named["key_layer"], named["value_layer"] = (of_keys.collect(x, layout) for x in (key, value))
        for name, one in zip(("cu_seqlens_q", "cu_seqlens_kv"), lengths, strict=True):
            named[name] = one.lengths if isinstance(one, Padded) else one
        return order

    def _order(self, x: Tensor, lengths: Padded | Lengths, layout: str) -> TokenOrder:
        return Sequences.of(x, lengths, layout, *place_of(self.cp_group)).order(self.cp_group)

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        return {**state, "cp_group": ELSEWHERE} if self.cp_group else state

    def __deepcopy__(self, memo: dict[int, object]) -> "DotProductAttention":
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied.cp_group = self.cp_group
        return copied


class MultiheadAttention(SharesSequences, TransformerEngineBaseModule, attention.MultiheadAttention):
    """`duotone.MultiheadAttention` with their arguments."""

    core_attention: DotProductAttention
    is_reordered = False
    """Whether attention takes the tokens of this call in another order than the hidden states have."""

    def prepare_call(self, named: Options) -> None:
        drop_unused(named, self.core_attention.attn_mask_type, self.qkv_format)
        self.is_reordered = bool(self.core_attention.cp_group) or isinstance(named.get("cu_seqlens_q"), Padded)

    def _check_masking(self, *arguments: Any) -> None:
        if not self.is_reordered:
            super()._check_masking(*arguments)

    def _boundary(self, *arguments: Any) -> tuple[bool, bool]:
        return (False, False) if self.is_reordered else super()._boundary(*arguments)

    def _place(self, heads: Tensor, norm: nn.Module | None, angles: Angles | None, cu_seqlens: Any) -> Tensor:
        if angles is not None and self.is_reordered:
            if self.attention_type == "cross":
                raise UserError(
                    f"{title(self.core_attention)}: rotary_pos_emb turns no heads of cross attention beside a cp_group "
                    "or padded lengths; turn them before"
                )
            place = place_of(self.core_attention.cp_group)
            sequences = Sequences.of(heads, cu_seqlens, self.qkv_format, *place)
            angles, cu_seqlens = sequences.angles(angles), sequences.single(self.qkv_format)
        return super()._place(heads, norm, angles, cu_seqlens)


class TransformerLayer(
    SharesSequences, TakesTheirArguments, attention.TransformerLayer, further=(attention.MultiheadAttention,)
):
    """`duotone.TransformerLayer` with their arguments."""

    def prepare_call(self, named: Options) -> None:
        join_padding(named, self.self_attention.qkv_format)


CLASSES |= {cls.__bases__[-1]: cls for cls in (LayerNormMLP, DotProductAttention, MultiheadAttention)}
