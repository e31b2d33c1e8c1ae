"""LowPrecision: the stages of one attention module under each recipe, and how a call runs one."""

import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from duotone.attention.attention_roles import AttentionRoles
from duotone.attention.attention_stage import AttentionStage, Call
from duotone.attention.conditioning import conditioned
from duotone.attention.heads import token_axis
from duotone.attention.masks import UNBOUNDED, Window, spans, whole
from duotone.attention.picks import Pick
from duotone.attention.products import BACKWARD_OPERANDS, FORWARD_OPERANDS, Slots
from duotone.attention.ranks import Ranks
from duotone.formats import IDENTITY
from duotone.modules.delayed_states import BACKWARD_STATE, FORWARD_STATE, agreed_history, largest, state_of
from duotone.modules.row_parts import ShapeSlot
from duotone.modules.traced_stages import MOST_GONE, number_of, numbered, owner_of
from duotone.numbered import ByName, Numbered, constant_in_traces
from duotone.pipeline.autograd import RUNNER, Backward, Refused, is_transformed
from duotone.pipeline.entry import apply_in_graph
from duotone.pipeline.op import is_autocast
from duotone.pipeline.row_call import RowPart, digest_of
from duotone.pipeline.rows import PARTS, Held, Part, Rows
from duotone.recipes.recipe import Recipe, drop_dead, recipe_of
from duotone.state.delayed_slot import DelayedSlot
from duotone.state.region import AMAX_MODES, AmaxMode, mode_now, traced_mode
from duotone.state.rolling import roll_after
from duotone.state.torch_private import specialized
from duotone.tensor.quantizer import TRACED, name_quantizer, quantizer_of


class Alike:
    """Modules whose traced calls under a recipe have the same stages, and so the same graphs."""

    def __init__(self) -> None:
        self.number = _ALIKE.add(self)
        self.modules: weakref.WeakSet[AttentionRoles] = weakref.WeakSet()
        self.names: dict[Hashable, str] = {}
        """The names of the parts of calls."""
        self.traced = ByName()
        """The stages of calls, by these names."""
        weakref.finalize(self, _forget, self.names)

    @staticmethod
    def of(content: Hashable, module: AttentionRoles) -> "Alike":
        """The group of modules with this content; `module` joins it."""
        alike = _CONTENTS[content] = _CONTENTS.get(content) or Alike()
        alike.modules.add(module)
        return alike


def _forget(names: dict[Hashable, str]) -> None:
    """Forget the parts that no module has any more, but for the newest, whose backwards may follow."""
    _GONE.append(names)
    while len(_GONE) > MOST_GONE:
        for name in _GONE.popleft().values():
            del PARTS[name]


_GONE: deque[dict[Hashable, str]] = deque()
"""The newest names of parts that no module has any more."""
_ALIKE: "Numbered[Alike]" = Numbered()
_CONTENTS: "weakref.WeakValueDictionary[Hashable, Alike]" = weakref.WeakValueDictionary()


def _module(number: str) -> AttentionRoles:
    """One of the modules that are alike."""
    return next(iter(_ALIKE[number].modules))


class LowPrecision:
    """Stages by kind of call. They follow from the module and its recipes, so they are not copied or pickled."""

    def __init__(self, module: AttentionRoles) -> None:
        self._module = weakref.ref(module)
        self.number, self.handle = numbered(self)
        self._stages: dict[Call, AttentionStage] = {}
        self.rows: Rows = {}
        """What runs the stages with delayed scales in graphs."""
        self.alike = ByName()
        """By the key of a recipe: the modules whose traced calls have the same stages."""

    @property
    def module(self) -> AttentionRoles:
        """The module, which keeps this object."""
        module = self._module()
        assert module is not None
        return module

    def forget_recipe(self, recipe: str) -> None:
        """Drop the stages of a recipe, by its key."""
        self._stages = {call: stage for call, stage in self._stages.items() if call.recipe != recipe}
        vars(self.alike).pop(recipe, None)

    def share(self, recipe: Recipe) -> None:
        """Let traced calls under the recipe have the stages of all modules that are alike."""
        drop_dead(vars(self.alike))
        content = recipe.key, self.module.formats(recipe), self.module.channels
        setattr(self.alike, recipe.key, Alike.of(content, self.module))

    def run(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        layout: str,
        seen: Tensor | None,
        window: Window,
        recipe: Recipe,
        group: str,
        ranks: Ranks | None,
    ) -> Tensor:
        """Query, key and value in a layout -> the output with heads as one axis.

        `seen` broadcasts to their scores. It is None for a `window` of all keys, or of those up to a query's position.
        `ranks` share the sequence.
        """
        module, device = self.module, heads[0].device.type
        if is_autocast(device):
            heads = tuple(x.to(torch.get_autocast_dtype(device)) for x in heads)  # type: ignore[assignment]
        compiling, tracks = torch.compiler.is_dynamo_compiling(), torch.is_grad_enabled()
        axis, v = token_axis(layout), heads[2]
        q, k = conditioned(recipe, heads[0], heads[1], axis, ranks)
        if ranks is not None and seen is None and window != UNBOUNDED:
            side = whole(ranks.size * q.shape[axis], q.device)
            seen = ranks.local_spans(spans((side, side), window, False), q.shape[axis])
        tracks = tracks and (q.requires_grad or k.requires_grad or v.requires_grad)
        mode = traced_mode() if compiling else mode_now()
        tracks = tracks or mode is AmaxMode.DEFER  # so that the forward uses every delayed scale as the recompute does
        where = recipe.key, str(q.device), group, mode.value, layout
        causal = seen is None and [specialized(side) for side in window] == [-1, 0]
        groups = int(specialized(module.heads_of(q)[1]))
        call = Call(*where, causal, module.dropout, tracks, ranks.name if ranks else "", groups, _scale(module))
        stage = _traced(getattr(self.alike, recipe.key), call, (q, k, v)) if compiling else self.stage(call)
        draws = bool(call.dropout) or stage.is_stochastic
        seed = torch.randint(2**62, (1,), device=q.device) if draws else None
        operands = q, k, v, grouped(seen, call.groups), seed
        if not is_autocast(device):
            return self._apply(stage, operands)
        with torch.autocast(device, enabled=False):
            return self._apply(stage, operands)

    def _apply(self, stage: AttentionStage, operands: tuple[Tensor | None, ...]) -> Tensor:
        stages = (stage,)
        again = Refused(f"{stage.name}: {stage.refusal}")
        if is_transformed():
            again.check()
        if torch.compiler.is_dynamo_compiling():
            return apply_in_graph(stages, (self,), *operands)  # type: ignore[arg-type,return-value]
        out, _ = RUNNER.apply(stages, Backward(stages, again), *operands)
        if stage.rolls_forward_alone and out.requires_grad:
            out.register_hook(roll_after)
        return out  # type: ignore[no-any-return]

    def stage(self, call: Call) -> AttentionStage:
        """The stage of a call, with the states that delayed scaling needs."""
        stage = self._stages.get(call)
        if stage is None:
            drop_dead(self._stages)
            stage = self._stages[call] = build(self.module, call, delayed_slots(self.module, call))
        return stage


def build(module: AttentionRoles, call: Call, slots: Slots) -> AttentionStage:
    """The stage of a call."""
    recipe = recipe_of(call.recipe)
    formats = module.formats(recipe, call.device, call.ranks)
    problem = formats.problem(module.channels, call.dropout, call.device)
    return formats.stage(module.module_name, problem, slots, recipe, call)


def _scale(module: AttentionRoles) -> float:
    """The factor of scores before the softmax, as the module has it now."""
    return specialized(module.channels[0] ** -0.5 if module.softmax_scale is None else module.softmax_scale)


def delayed_slots(module: AttentionRoles, call: Call) -> Slots:
    """The slots of tensors with delayed scales: two each, in a state of forward and one of backward."""
    formats = module.formats(recipe_of(call.recipe), call.device, call.ranks)
    delayed = formats.delayed()
    if not delayed:
        return {}
    history, mode = agreed_history(delayed), AMAX_MODES[call.mode]
    slots = {}
    for name, tensors in ((FORWARD_STATE, FORWARD_OPERANDS), (BACKWARD_STATE, BACKWARD_OPERANDS)):
        state = state_of(module, name, 2 * len(tensors), history, call.device)
        state.largest = [one for tensor in tensors for one in largest(getattr(formats, tensor))]
        is_backward = name == BACKWARD_STATE
        use = AmaxMode.RECORD if is_backward else mode
        for place, tensor in enumerate(tensors):
            sides = enumerate(getattr(formats, tensor).delayed)
            slots[tensor] = tuple(
                DelayedSlot(state.number, 2 * place + side, call.group, use, is_backward) if is_used else None
                for side, is_used in sides
            )
    return slots  # type: ignore[return-value]


def grouped(seen: Tensor | None, groups: int) -> Tensor | None:
    """A mask that broadcasts to (batch, heads, queries, keys), for scores (batch, groups, heads of a group, ...)."""
    if seen is None or seen.dtype is torch.int32:
        return seen
    seen = seen.view((1,) * (4 - seen.dim()) + seen.shape)
    return seen.unsqueeze(2) if seen.shape[1] == 1 else torch.unflatten(seen, 1, (groups, -1))


def traced_pick(alike: ByName, recipe: Recipe, device: str, dropout: float, ranks: str) -> Pick:
    """`DotProductAttention.pick` in a trace."""
    return _pick(getattr(alike, recipe.key).number, recipe.key, device, dropout, ranks)


@constant_in_traces
def _pick(number: str, recipe: str, device: str, dropout: float, ranks: str) -> Pick:
    return _module(number).pick(recipe_of(recipe), device, dropout, ranks)


def _traced(alike: Alike, call: Call, heads: tuple[Tensor, ...]) -> AttentionStage:
    quantizers = [quantizer_of(x) for x in heads]
    words = tuple(["" if each is None else each.words for each in quantizers])
    return getattr(alike.traced, _name_part(alike.number, str(heads[0].dtype), words, *call))  # type: ignore[no-any-return]


@constant_in_traces
def _name_part(number: str, dtype: str, words: tuple[str, ...], *fields: object) -> str:
    """Let rows hold the stage of a traced call. Returns the name of the part, a constant of the graph.

    `words` are those of the quantizers of query, key and value, "" for one that is not quantized.
    """
    call, alike = Call(*fields), _ALIKE[number]  # type: ignore[arg-type]
    key = call, dtype, words
    if key not in alike.names:
        module = _module(number)
        delayed = module.formats(recipe_of(call.recipe), call.device, call.ranks).delayed().items()
        slots: Any = {name: tuple([ShapeSlot() if each else None for each in q.delayed]) for name, q in delayed}
        stage = build(module, call, slots)
        name = alike.names[key] = f"attention_{number}@{digest_of(stage.words, *key)}"
        operands = zip((stage.query, stage.key, stage.value), words, strict=True)
        like = getattr(torch, dtype.removeprefix("torch."))
        held = [Held(getattr(TRACED, name_quantizer(each)), like) if each else None for each in words]
        PARTS[name] = Part(
            stage,
            of_module=partial(_of_module, call) if stage.has_owner else None,
            of_number=partial(_of_number, call) if stage.has_owner else None,
            held=(*held, None, None),
            sources=(*[operand.may_share or bool(each) for operand, each in operands], True, True),
            keeps_output=stage.out.quantizer.rowwise == IDENTITY,
            is_quantized=True,
            is_home=True,
        )
        setattr(alike.traced, name, replace(stage, row_part=RowPart(name).text))
    return alike.names[key]


def _of_number(call: Call, number: str) -> AttentionStage:
    """The stage of a call of the module of a number."""
    return owner_of(number).stage(call)  # type: ignore[no-any-return]


def _of_module(call: Call, handle: Tensor, is_forward: bool) -> tuple[AttentionStage, Rows]:
    """The stage of a call of the module that a handle names, and where its rows are remembered."""
    owner: LowPrecision = owner_of(number_of(handle))
    return owner.stage(call), owner.rows
