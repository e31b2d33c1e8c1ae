"""PackedLinear: several linears with one input, as one linear. Its weight is their weights, one below the other."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from duotone.linear.core import LinearStage
from duotone.linear.plan import LinearPlan
from duotone.modules.linear import PlannedLinear
from duotone.modules.sequential import is_hooked
from duotone.modules.split_parameters import joined, tensors_of
from duotone.pipeline.op import Op, TensorInfo, require_fit
from duotone.pipeline.stage import Stage
from duotone.recipes.recipe import Recipe
from duotone.sharding.dtensors import is_distributed
from duotone.sharding.layout import WHOLE

Linears = Sequence[PlannedLinear]


class Apart(Exception):
    """The linears have different formats, or delayed scales, so each has to run by itself."""


class PackedLinear(Op):
    """The children `names` of `owner`, (*lead, K) -> (*lead, sum of N). Plan, seeds and states are those of the first.

    Raises Apart when it is linked, if the plans of the others have other formats or delayed scales.
    """

    def __init__(self, owner: nn.Module, names: tuple[str, ...]) -> None:
        self.owner, self.names = owner, names
        self.agreement: tuple[list[Stage], bool] | None = None
        """The stages of the newest call, and whether they are those of one linear."""

    def __getstate__(self) -> dict[str, object]:
        return {"owner": self.owner, "names": self.names, "agreement": None}  # stages belong to this process

    @property
    def linears(self) -> Linears:
        """The linears in the order of their outputs."""
        children = self.owner._modules
        return tuple(children[name] for name in self.names)  # type: ignore[misc]

    def link(
        self, info: TensorInfo, is_first_microbatch: bool | Tensor | None
    ) -> tuple[Stage, TensorInfo, Tensor, Tensor | None]:
        linears = self.linears
        trained = any([linear.weight.requires_grad for linear in linears])
        stage = linears[0].plans.stage(info, trained, None, linears[0].weight.dtype, is_joined=True)
        assert isinstance(stage, LinearStage)
        if not self._agree(stage, linears[1:], info, trained):
            raise Apart
        weight = joined([linear.weight for linear in linears])
        bias = joined_biases(linears)
        require_fit(linears[0], info, weight, bias)
        tracked = info.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        output = TensorInfo(info.device, info.dtype, weight.shape[0], info.rows, tracked, None, info.index)
        return stage, output, weight, bias

    def operands(
        self, stage: LinearStage, info: TensorInfo, extra: Sequence[object], weight: Tensor, bias: Tensor | None
    ) -> Sequence[Tensor | None]:
        return self.linears[0].operands(stage, info, extra, weight, bias)

    def split(self, y: Tensor) -> Sequence[Tensor]:
        """The output of each linear. They are copies: one that is saved for backward must not keep the others alive."""
        sizes = [linear.weight.shape[0] for linear in self.linears]
        return torch.split_with_sizes_copy(y, sizes, -1)  # type: ignore[no-any-return]

    def why_apart(self, recipe: Recipe | None) -> str:
        """Why linears that can be in a pipeline run one by one, or "". `recipe` is that of an enclosing autocast."""
        return why_not_packed(self) or why_apart(
            [linear.plans.plan(recipe or linear.recipe) for linear in self.linears]
        )

    def _agree(self, stage: LinearStage, others: Linears, info: TensorInfo, trained: bool) -> bool:
        stages = [
            stage,
            *(linear.plans.stage(info, trained, None, linear.weight.dtype, is_joined=True) for linear in others),
        ]
        if self.agreement is not None and self.agreement[0] == stages:
            return self.agreement[1]
        agree = not why_apart([each.plan for each in stages])
        if not torch.compiler.is_dynamo_compiling():
            self.agreement = stages, agree
        return agree


def joined_biases(linears: Linears) -> Tensor | None:
    """The biases one after the other, zeros for a linear without one; None if no linear has one."""
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    filled = [
        linear.weight.detach().new_zeros(linear.weight.shape[0]) if bias is None else bias
        for linear, bias in zip(linears, biases, strict=True)
    ]
    return joined(filled)


def why_apart(plans: Sequence[LinearPlan]) -> str:
    """Why linears with these plans run one by one, or ""."""
    if any(plan.is_delayed for plan in plans):
        return "each linear has delayed scales of its own"
    decisive = {
        tuple([(one.quantizer, one.source, one.backward, one.stream) for one in plan.operands.values()])
        for plan in plans
    }
    return "" if len(decisive) == 1 else "the linears have different formats"


def why_not_in_pipeline(linear: nn.Module | None) -> str:
    """Why a module cannot run in a pipeline as the linear that it is, or ""."""
    if not isinstance(linear, PlannedLinear):
        return "is not converted" if isinstance(linear, nn.Linear) else f"is a {class_name(linear)}"
    if type(linear).forward is not PlannedLinear.forward or "forward" in linear.__dict__:
        return "has another forward"
    if "parametrizations" in linear._modules:
        return "is parametrized"
    if linear.return_bias:
        return "returns its bias"
    weight = tensors_of(linear, "weight").get("weight")
    if type(weight) not in PLAIN and is_distributed(weight):
        return "is spread over a mesh, under FSDP between forwards only"
    if linear._compiled_call_impl is not None:
        return "is compiled by itself"
    return "has hooks" if is_hooked(linear) else ""


def class_name(module: nn.Module | None) -> str:
    """With the module of Python that defines the class: libraries have linears of the same name."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def why_not_packed(packed: PackedLinear) -> str:
    """Why linears that can be in a pipeline cannot run as one, or ""."""
    for name, linear in zip(packed.names, packed.linears, strict=True):
        weight, bias = (tensors_of(linear, kind).get(kind) for kind in ("weight", "bias"))
        if not linear.stored_weight:
            return f"{name} stores its weight transposed"
        if not is_dense(weight) or not (bias is None or is_dense(bias)):
            return f"{name} holds a {type(weight).__name__}"
        if linear.fuse_wgrad_accumulation or linear.delay_wgrad_compute or linear.save_original_input:
            return f"{name} has options of its backward"
        if linear.layout != WHOLE:
            return f"{name} is spread over ranks"
    return ""


PLAIN = (nn.Parameter, Tensor)


def is_dense(tensor: object) -> bool:
    """Whether a tensor is of no subclass. In a program of torch.export, fake tensors stand for those of the model."""
    return type(tensor) in PLAIN or (torch.compiler._is_exporting_flag and type(tensor) is FakeTensor)


def pack(linears: Sequence[nn.Module], memories: Mapping[int, int]) -> None:
    """Put the weights of linears, and their biases, one after the other in memory, so that `joined` copies nothing.

    The parameters stay the same objects. Nothing moves if some share memory with other processes or parameters, or lie
    on several devices. `memories` says how many parameters of the model lie in each storage, by its address in C++.
    """
    for kind in ("weight", "bias"):
        parameters = [p for linear in linears if (p := linear._parameters.get(kind)) is not None]
        if len(set(parameters)) == len(linears) and all(_is_movable(p, parameters[0], memories) for p in parameters):
            whole = torch.cat([p.detach() for p in parameters])
            for p, piece in zip(parameters, whole.split([p.shape[0] for p in parameters]), strict=True):
                p.data = piece


def _is_movable(p: Tensor, like: Tensor, memories: Mapping[int, int]) -> bool:
    """Whether a parameter has memory that nobody else has, and can lie beside `like`."""
    if type(p) is not nn.Parameter or p.is_meta or not p.is_contiguous():
        return False
    storage = p.untyped_storage()
    alone = storage.nbytes() == p.numel() * p.element_size() and memories[storage._cdata] == 1
    alone = alone and (p.is_cuda or not p.is_shared())  # torch takes all CUDA tensors for shared
    return alone and p.dtype is like.dtype and p.device == like.device and p.shape[1:] == like.shape[1:]
