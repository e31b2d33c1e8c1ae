"""Mixins that let an existing module run as a pipeline of ops. It keeps its parameters, names and hooks.

Each call checks that the parts are still linears under plans, without hooks or adapters. If they are not, or in a trace
that a pipeline cannot follow, the forward of the class runs as before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duotone.conversion.attributes import Attributes, attributes_within
from duotone.conversion.patterns import MLP, Chain, Norm, children_of, epsilon, is_linear
from duotone.conversion.trial import is_dropout
from duotone.errors import UserError
from duotone.modules.activation import ActivationOp
from duotone.modules.norm import NormOp
from duotone.modules.packed_linear import Apart, PackedLinear, is_dense, why_not_in_pipeline, why_not_packed
from duotone.modules.sequential import is_hooked, run_modules
from duotone.numbered import constant_in_traces
from duotone.pipeline.autograd import Outputs, is_transformed
from duotone.pipeline.deferred import Defer, DeferredOutput
from duotone.pipeline.op import Op, is_autocast, run
from duotone.pipeline.stage import Gradients
from duotone.recipes.recipe import Recipe
from duotone.sharding.dtensors import is_distributed
from duotone.state.region import STACK

CHANGED = "has another epsilon than when it was fused"
REPLACED = "was replaced since it was fused"
SET = "has changed since it was fused"
FUSED = "_fused"
"""The attribute of a fused module that holds its pipeline."""


class Fused:
    """Mixed in before the class of a module that `fuse` changed."""

    prefix = "Fused"


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before `fuse` changed it."""
    order = type(module).__mro__
    return order[order.index(Fused) + 1] if Fused in order else order[0]


class MLPPipeline:
    """The whole forward of a module: linears with the same input, an activation and a linear."""

    def __init__(self, owner: nn.Module, pattern: MLP) -> None:
        self.owner, self.pattern = owner, pattern
        self.packed = PackedLinear(owner, pattern.first)
        self.others = {name: child for name, child in children_of(owner).items() if name not in self.linears}
        self.attributes = [("", Attributes(owner, plain_class(owner))), *attributes_within(self.others)]
        self.activation = ActivationOp(pattern.activation)

    @property
    def ops(self) -> tuple[Op, ...]:
        """The first linears (packed if there are several), the activation, the last linear."""
        (name, *more), children = self.pattern.first, self.owner._modules
        first = self.packed if more else children[name]
        return first, self.activation, children[self.pattern.last]  # type: ignore[return-value]

    @property
    def refusal(self) -> str:
        """Why the module runs its own forward, or ""."""
        if self.closed:
            return self.closed
        for name, child in self.others.items():
            if self.owner._modules.get(name) is not child:
                return f"{name} {REPLACED}"
            if is_hooked(child):
                return f"{name} has hooks"
            if is_dropout(child) and child.p and child.training:
                return f"{name} is on"
        return _changed(self.attributes) or (why_not_packed(self.packed) if len(self.pattern.first) > 1 else "")

    @property
    def linears(self) -> tuple[str, ...]:
        """The names of all linears, the last one last."""
        return *self.pattern.first, self.pattern.last

    @property
    def closed(self) -> str:
        """Why the linears cannot be in a pipeline, or ""."""
        return refusal_of(self.owner, self.linears)

    def row(self, recipe: Recipe | None) -> str:
        """The reason in the plan of the module."""
        apart = "" if self.refusal or len(self.pattern.first) == 1 else self.packed.why_apart(recipe)
        if self.refusal or apart:
            return f"not fused: {self.refusal or apart}"
        first = " + ".join(self.pattern.first)
        return f"fused: {first}, {self.pattern.activation} and {self.pattern.last} are one pipeline"

    def run(self, x: Tensor) -> object:
        """The output. Raises `Apart` if the first linears have to run one by one."""
        return run(self.ops, x, (), None, self.owner)


class ChainPipeline:
    """The children of an nn.Sequential in order; neighbouring linears, norms and activations are one pipeline."""

    def __init__(self, owner: nn.Module, parts: Chain) -> None:
        self.owner, self.parts = owner, parts
        self.ops: dict[str, Op] = {}
        self.others = {name: child for name, child in children_of(owner).items() if not is_linear(child)}
        for (name, child), part in zip(children_of(owner).items(), parts, strict=True):
            if isinstance(part, Norm):
                self.ops[name] = NormOp(child, *part)
            elif part is not None:
                self.ops[name] = ActivationOp(part)
        self.attributes = attributes_within({name: child for name, child in self.others.items() if name in self.ops})

    @property
    def refusal(self) -> str:
        """Why the module runs its own forward, or ""."""
        children = children_of(self.owner)
        if len(children) != len(self.parts):
            return "it has other children than before"
        for name, child in children.items():
            reason = "has hooks" if is_hooked(child) else why_not_in_pipeline(child) if is_linear(child) else ""
            op = self.ops.get(name)
            if op is not None and self.others.get(name) is not child:
                reason = REPLACED
            if isinstance(op, NormOp) and epsilon(child) != op.eps:
                reason = CHANGED
            if reason:
                return f"{name} {reason}"
        return _changed(self.attributes)

    closed = refusal

    def row(self, recipe: Recipe | None) -> str:
        """The reason in the plan of the module."""
        return f"not fused: {self.refusal}" if self.refusal else f"fused: {len(self.parts)} children are one pipeline"

    def run(self, x: Tensor) -> object:
        """The output of the children in a row. Dropout that does nothing is left out."""
        members = [
            self.ops.get(name, child)
            for name, child in children_of(self.owner).items()
            if not is_dropout(child) or (child.p and child.training)
        ]
        y, _ = run_modules(members, x, (), None, self.owner)
        return y


class FusedForward(Fused):
    """A module whose whole forward is a pipeline. Shallow copies, as of DataParallel, do not own it."""

    def forward(self, *inputs: Tensor, **options: object) -> object:
        pipeline: MLPPipeline | ChainPipeline | None = self.__dict__.get(FUSED)  # a slice of a Sequential has none
        alone = len(inputs) == 1 and not options and not is_distributed(inputs[0])
        transformed = not torch.compiler.is_dynamo_compiling() and is_transformed()  # torch.func follows plain code
        if pipeline is not None and pipeline.owner is self and alone and not transformed and not pipeline.refusal:
            try:
                return pipeline.run(inputs[0])
            except Apart:
                pass
        return super().forward(*inputs, **options)  # type: ignore[misc]


@dataclass
class NormReaders:
    """A norm, and the linears and fused modules below `parent` that read it.

    `groups` are pairs: the path of an owner, and the names of its linears. Without names the owner is a fused module.
    """

    norm: nn.Module
    pattern: Norm
    parent: nn.Module
    groups: tuple[tuple[str, tuple[str, ...]], ...]

    def __post_init__(self) -> None:
        self.op = NormOp(self.norm, *self.pattern)
        self.attributes = Attributes(self.norm, plain_class(self.norm))
        self.packs = {
            group: PackedLinear(self.parent.get_submodule(group[0]), group[1])
            for group in self.groups
            if len(group[1]) > 1
        }

    @property
    def refusal(self) -> str:
        """Why the norm computes its output by itself, or ""."""
        if is_hooked(self.norm):
            return "it has hooks"
        if epsilon(self.norm) != self.pattern.eps:
            return f"it {CHANGED}"
        if name := self.attributes.changed():
            return f"its {name} {SET}"
        return next((reason for path, names in self.groups if (reason := self._group_refusal(path, names))), "")

    def _group_refusal(self, path: str, names: tuple[str, ...]) -> str:
        owner: nn.Module = self.parent
        for step in path.split(".") if path else ():
            child = owner._modules.get(step)
            is_plain = child is not None and not is_hooked(child) and "forward" not in child.__dict__
            if child is None or not is_plain or child._compiled_call_impl is not None:
                return f"{path} is wrapped, or has hooks"
            owner = child
        if names:
            reason = refusal_of(owner, names)
            return f"{path}.{reason}" if reason and path else reason
        return owner.__dict__[FUSED].closed if isinstance(owner, FusedForward) else f"{path} is not fused"

    def row(self, recipe: Recipe | None) -> str:
        """What a plan says of the norm. Readers with a plus between them are one linear."""
        if self.refusal:
            return f"not fused: {self.refusal}"
        together = {group for group, pack in self.packs.items() if not pack.why_apart(recipe)}
        readers: list[str] = []
        for path, names in self.groups:
            parts = [" + ".join(names)] if (path, names) in together or not names else names
            readers += [f"{path}.{part}" if path and part else path or part for part in parts]
        return f"fused: it runs in the pipeline of {' and '.join(readers)}"

    def takes(self, x: Tensor) -> bool:
        """Whether the norm of this input may run later, in the pipeline of its reader."""
        if not is_dense(x) or not x.is_contiguous() or not x.numel() or is_autocast(x.device.type):
            return False
        if x.is_inference():  # it has no version that would tell of a write
            return False
        if torch.jit.is_tracing() or is_transformed() or self.refusal:  # type: ignore[no-untyped-call]
            return False
        gamma, beta = self.op.parameters()
        same = gamma is None or gamma.dtype is x.dtype
        return same and all(p is None or (is_dense(p) and p.device == x.device) for p in (gamma, beta))

    def defer(self, x: Tensor) -> DeferredOutput:
        """The output of the norm, which its readers compute."""
        return Defer.apply(self, torch.is_grad_enabled(), x, *self.op.parameters())

    def read(
        self, ops: Sequence[Op], x: DeferredOutput, extra: Sequence[object], first: bool | Tensor | None, owner: object
    ) -> Outputs:
        """Run the norm and the ops as one pipeline; linears that read the norm together run as one."""
        if x.is_watched or is_autocast(x.device.type):
            return run(ops, x.view_as(x), extra, first, owner)
        x.is_passed_by = True
        if len(ops) == 1 and first is None:
            packs = (pack for pack in self.packs.values() if any(ops[0] is linear for linear in pack.linears))
            pack = next(packs, None)
            if pack is not None and not why_not_packed(pack):
                call, members = _call_of(ops[0]), set(map(id, pack.linears))  # type: ignore[arg-type]
                try:
                    if not any(other[0] in members for other in x.outputs):
                        parts = pack.split(run((self.op, pack), x.source, (), None, owner))
                        x.outputs.update(zip(map(_call_of, pack.linears), parts, strict=True))
                    if call in x.outputs:  # else it follows another region than the first of them
                        return x.outputs.pop(call)
                except Apart:
                    pass
        return run((self.op, *ops), x.source, extra, first, owner)

    def compute(self, source: Tensor) -> Tensor:
        return plain_class(self.norm).forward(self.norm, source)

    def differentiate(self, dy: Tensor, inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> Gradients:
        stage = self.op.stages[True]
        x, gamma, beta = inputs
        assert x is not None
        return stage.backward(dy, stage.forward(x, gamma, beta)[1], tuple(needs))


def _call_of(linear: nn.Module) -> tuple[object, ...]:
    """All that a call of a linear depends on besides its input: two calls that agree in it have the same output."""
    parameters = [None if p is None else _state_of(p) for p in linear._parameters.values()]
    regions = STACK.regions
    return id(linear), torch.is_grad_enabled(), regions[-1] if regions else None, *parameters


def _state_of(p: Tensor) -> tuple[object, ...]:
    """Which parameter it is, where it lies, whether it is trained, and how often it was written."""
    place = p.untyped_storage()._cdata, p.storage_offset()
    return id(p), *place, p.requires_grad, 0 if p.is_inference() else p._version


class FusedNorm(Fused):
    """A norm that runs in the pipelines of the linears that read it."""

    def forward(self, *inputs: Tensor, **options: object) -> object:
        readers: NormReaders = self.__dict__[FUSED]
        if torch.compiler.is_dynamo_compiling():
            if torch.compiler._is_exporting_flag:
                refuse_strict_export()
        elif readers.norm is self and len(inputs) == 1 and not options and readers.takes(inputs[0]):
            return readers.defer(inputs[0])
        return super().forward(*inputs, **options)  # type: ignore[misc]


@constant_in_traces
def refuse_strict_export() -> None:
    """UserError in a trace of torch.export whose program would not have the bits of eager code."""
    raise UserError("torch.export with strict=True does not follow norms that duotone.fuse fused: leave strict out")


def _changed(attributes: Sequence[tuple[str, Attributes]]) -> str:
    """Why modules of a pipeline are not as they were, or ""."""
    for path, each in attributes:
        if "." in path and is_hooked(each.module):
            return f"{path} has hooks"
        if name := each.changed():
            return f"{path}.{name} {SET}" if path else f"{name} {SET}"
    return ""


def refusal_of(owner: nn.Module, names: Sequence[str]) -> str:
    """Why children of a module cannot be linears of a pipeline, or ""."""
    for name in names:
        reason = why_not_in_pipeline(owner._modules.get(name))
        if reason:
            return f"{name} {reason}"
    return ""
