"""Plain weights of which FSDP2 gathers planes: each rank encodes its shard, and the optimizer sees a plain DTensor.

Scales that span the weight are agreed on for all weights of a model in one collective after each write.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from duotone.dispatch.stages import amaxes_of
from duotone.errors import UserError
from duotone.linear.operand_plan import OperandPlan
from duotone.linear.plane_source import STEPS
from duotone.pipeline.op import is_distributed
from duotone.planned.split_parameters import is_split
from duotone.planned.traced_stages import Call
from duotone.state.region import active_recipe
from duotone.tensor import QuantizeContext, QuantizedTensor, Quantizer
from duotone.tensor.fsdp import BEFORE
from duotone.tensor.gathers import COLUMNWISE, ROWWISE, Gathers, fsdp_groups
from duotone.tensor.plane import Planes, Usage
from duotone.tensor.plane_tensor import PlaneTensor
from duotone.tensor.shards import AnsweredShard, AskingShard, agree, ask, spans

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

    from duotone.planned.planned import Planned

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def gather_quantized(model: nn.Module) -> nn.Module:
    """Let FSDP2 gather the planes of plain weights, which each rank encodes from its shard. The bits stay the same.

    For converted linears and Duotone modules, before or after `fully_shard`, and before the first forward. Parameters,
    gradients, optimizer states and checkpoints stay plain. A weight keeps the formats of its first forward. Some travel
    as they are, with a warning: weights in pieces, packed ones, and those whose shards are uneven, cut blocks, are
    offloaded to the CPU or are spread over a second mesh. UserError if a recipe rounds weights stochastically or scales
    them by their history.
    """
    for module in model.modules():
        if hasattr(module, "sends_planes"):
            module.sends_planes = True  # type: ignore[assignment]
            send_planes(module)  # type: ignore[arg-type]
    return model


def send_planes(module: "Planned") -> None:
    """Give the shards of a module's weights their hooks, if it sends planes."""
    if not module.sends_planes:
        return
    if is_split(module):
        warnings.warn(f"{module.module_name} travels in high precision: its weight is in pieces", stacklevel=2)
        module.sends_planes = False
        return
    weight = module.plans.plan(active_recipe() or module.recipe).weight
    for name, parameter in module.named_parameters(recurse=False):
        if not is_distributed(parameter) or not any(parameter is each for each in module.weight_parameters):
            continue
        shard = parameter._local_tensor
        if hasattr(shard, PRE):
            continue
        if weight.quantizer.is_stochastic or any(weight.quantizer.delayed):
            raise UserError(
                f"{module.module_name}: {weight.quantizer} does not encode a weight twice alike; use another recipe, "
                "or quantized parameters (duotone.convert_parameters)"
            )
        if reason := _refusal(parameter, shard, weight):
            warnings.warn(f"{module.module_name}.{name} travels in high precision: {reason}", stacklevel=2)
            continue
        sent = SentWeight(module, shard)
        setattr(shard, PRE, sent)
        setattr(shard, POST, sent.after_gather)


def _refusal(parameter: "DTensor", shard: Tensor, weight: OperandPlan) -> str:
    """Why planes of a DTensor's shards do not travel, or ""."""
    dims = [at for at, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if len(dims) != 1 or not parameter.placements[dims[0]].is_shard(0) or weight.context.shard is not None:
        return f"it lies as {parameter.placements}; planes travel over one mesh that cuts its rows"
    if parameter.dim() != 2:
        return "it is packed"
    if shard.device.type != parameter.device_mesh.device_type:
        return f"its shards are on {shard.device}"
    rows, ranks = parameter.shape[0], parameter.device_mesh.size(dims[0])
    row, col = weight.formats
    step = max(row.alignment[0] if row else 1, col.alignment[1] if col else 1)
    if rows % (ranks * step):
        return f"its {rows} rows over {ranks} ranks do not end on blocks of {step}"
    return ""


class SentWeight:
    """The hooks of one shard (M, K). A call is the one before a gather."""

    __signature__ = BEFORE

    def __init__(self, module: "Planned", shard: Tensor) -> None:
        self.module, self.shard = module, shard
        self.weight: OperandPlan | None = None
        self.gathers = Gathers((None, None), False)
        self.stamp: tuple[int, ...] = ()
        self.is_sent = False
        """Whether a forward has sent it since. The next one measures anew: writes through `.data` leave no version."""
        self.amaxes: dict[Usage, Tensor] = {}
        """The amax of all shards for each plane that needs one, since the writes that `stamp` counts."""
        STEPS.register()

    def __call__(
        self,
        mesh: "DeviceMesh",
        outer_size: object,
        outer_stride: object,
        module: object,
        mp_policy: "MixedPrecisionPolicy",
    ) -> tuple[tuple[Tensor, ...], "SentWeight"]:
        del outer_size, outer_stride, module
        if self.weight is None:
            self.prepare(mp_policy.param_dtype or self.shard.dtype, mesh.get_group().group_name)
        in_forward = torch._C._current_graph_task_id() == -1
        if self.stamp != self.writes or (self.is_sent and in_forward):
            agree_on_amaxes([*self.of_model()])
        self.is_sent |= in_forward
        if not self.gathers.derives:
            self.gathers.keeps_rowwise |= self.module.differentiates_rowwise
        return self.gathers.send(mesh, self.planes, self.amaxes.get(ROWWISE)), self

    def after_gather(
        self,
        outputs: Sequence[Tensor],
        metadata: "SentWeight",
        param_dtype: torch.dtype,
        *,
        out: PlaneTensor | None = None,
    ) -> tuple[PlaneTensor, tuple[Tensor, ...]] | None:
        def whole(planes: Planes) -> PlaneTensor:
            shape = torch.Size((self.shard.shape[0] * self.gathers.count, self.shard.shape[1]))
            assert self.weight is not None
            return QuantizedTensor(planes, self.weight.quantizer, shape, param_dtype)

        return self.gathers.deliver(outputs, out, whole)

    def prepare(self, dtype: torch.dtype, group: str) -> None:
        """Choose the formats, those of the call that gathers first. `group`: the ranks of the shards."""
        call = Call(str(self.shard.device), dtype)
        self.weight = self.module.plans.plan(active_recipe() or self.module.recipe, call).weight
        self.dtype, self.answers = dtype, AnsweredShard(group)
        self.asking, self.answered = (
            replace(self.weight.context, shard=shard) for shard in (AskingShard(""), self.answers)
        )
        self.gathers = Gathers(self.weight.formats, self.weight.quantizer.derives_columnwise)
        self.gathers.find(self.shard)

    @property
    def repeats(self) -> bool:
        """Whether planes encode the shard itself, by Quantizer's own encode."""
        quantizer = self.weight and self.weight.quantizer
        return type(quantizer) is Quantizer and quantizer.columnwise_source == "original"

    @property
    def writes(self) -> tuple[int, ...]:
        """Changes with every write that leaves a version, and every step of an optimizer."""
        param = self.gathers.param
        holders = (self.shard,) if param is None else (self.shard, param.sharded_param)
        return STEPS.count, *[0 if holder.is_inference() else holder._version for holder in holders]

    def of_model(self) -> "Iterator[SentWeight]":
        """This weight and all others under one root of FSDP2."""
        root = None if self.gathers.group is None else self.gathers.group.comm_ctx
        for group in fsdp_groups():
            for param in group.fsdp_params if group.comm_ctx is root else ():
                sent = getattr(param._sharded_local_tensor, PRE, None)
                if isinstance(sent, SentWeight):
                    if sent.weight is None:
                        sent.prepare(param.param_dtype or param.orig_dtype, param.shard_mesh.get_group().group_name)
                    yield sent

    def plane(self, usage: Usage, context: QuantizeContext) -> Planes:
        """The plane that `usage` names, of this shard."""
        assert self.weight is not None
        return self.weight.quantizer.encode(self.shard.detach().to(self.dtype), usage, context)

    def agreed(self, side: Usage) -> Planes:
        """The plane under what all shards agreed on."""
        self.answers.answers[:] = [self.amaxes[side]] if side in self.amaxes else []
        return self.plane(side, self.answered)

    def planes(self, usage: Usage) -> Planes:
        derives = self.gathers.derives
        row = self.agreed(ROWWISE).rowwise if usage.rowwise or derives else None
        if derives and row is not None:
            return Planes(row, row.transposed() if usage.columnwise else None)
        return Planes(row, self.agreed(COLUMNWISE).columnwise if usage.columnwise else None)

    @property
    def sides(self) -> Iterator[Usage]:
        """The planes that are encoded under a scale which spans the shards."""
        row, col = self.gathers.formats
        if row is not None and spans(row, 0):
            yield ROWWISE
        if col is not None and not self.gathers.derives and spans(col, 0 if col.is_derivable else 1):
            yield COLUMNWISE


def agree_on_amaxes(weights: Sequence[SentWeight]) -> None:
    """Measure the amaxes of all weights, and let their shards agree on them at once."""
    measured: list[tuple[SentWeight, Usage, Tensor]] = []
    direct: dict[torch.dtype, list[tuple[SentWeight, Usage]]] = {}
    for weight in weights:
        weight.stamp, weight.is_sent = weight.writes, False
        for side in weight.sides:
            fmt = weight.gathers.formats[0 if side is ROWWISE else 1]
            if fmt is not None and fmt.scales_by_tensor and weight.repeats:
                direct.setdefault(weight.dtype, []).append((weight, side))
                continue
            amax = ask(lambda _, of=weight, side=side: of.plane(side, of.asking))
            assert amax is not None
            measured.append((weight, side, amax))
    for dtype, of_dtype in direct.items():  # rounding keeps the order of magnitudes
        amaxes = torch.cat(amaxes_of([weight.shard.detach() for weight, _ in of_dtype])).to(dtype).to(torch.float32)
        measured += [(weight, side, amax) for (weight, side), amax in zip(of_dtype, amaxes.split(1), strict=True)]
    agreed = agree([weight.answers.group for weight, *_ in measured], [amax for *_, amax in measured])
    for (weight, side, _), amax in zip(measured, agreed, strict=True):
        weight.amaxes[side] = amax
