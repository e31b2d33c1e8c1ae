"""Plain weights of which FSDP2 gathers planes: each rank encodes its shard, and the optimizer sees a plain DTensor.

Scales that span the weight are agreed on for all weights of a model in one collective after each write.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from duotone.comm import ShardContext, agree, group_size, require_same
from duotone.comm.pieces import piece_of
from duotone.dispatch.stages import amaxes_of
from duotone.errors import UserError
from duotone.formats import IDENTITY
from duotone.linear.operand_plan import OperandPlan
from duotone.linear.plane_source import STEPS
from duotone.modules import delayed_states
from duotone.modules.base import Call, PlannedModule
from duotone.modules.split_parameters import ONE_WEIGHT, is_split
from duotone.pipeline.op import CAST
from duotone.pipeline.titles import title
from duotone.sharding.dtensors import cuts_of, is_distributed
from duotone.state.region import active_recipe
from duotone.tensor import QuantizedTensor, Quantizer
from duotone.tensor.context import FixedScale, QuantizeContext, Slot
from duotone.tensor.fsdp import BEFORE
from duotone.tensor.gathers import COLUMNWISE, ROWWISE, Gathers, fsdp_groups
from duotone.tensor.plane import Planes, Usage
from duotone.tensor.plane_encoder import encodes_alone
from duotone.tensor.plane_tensor import PlaneTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
SIDES = ROWWISE, COLUMNWISE
READ_AS_IT_IS = "its backward multiplies the weight itself, as backward_override says"
UNLIKE = "would gather different planes", "give all of them the same recipe, in autocast, too"


def gather_quantized(model: nn.Module) -> nn.Module:
    """Let FSDP2 gather the planes of plain weights, which each rank encodes from its shard. The bits stay the same.

    Call it on a model with converted linears or Duotone modules, before or after `fully_shard`, and before the first
    forward. Parameters, gradients, optimizer states and checkpoints stay plain. A weight keeps the formats of its first
    forward. Some weights travel in high precision, with a warning: weights in pieces, packed ones, weights that FSDP2
    cuts along columns, and all under backward_override = "high_precision". UserError if a recipe rounds weights
    stochastically.

    Under torch.autocast planes encode what it casts, if it is on around the call of the sharded model.
    """
    for module in model.modules():
        if isinstance(module, PlannedModule):
            module.sends_planes = True
            send_planes(module)
    return model


def send_planes(module: PlannedModule) -> None:
    """Give the shards of a module's weights their hooks, if it sends planes."""
    if not module.sends_planes:
        return
    if is_split(module):
        module.sends_planes, module.plain_gather = False, f"its weight is in pieces; {ONE_WEIGHT}"
        warnings.warn(f"{title(module)} travels in high precision: {module.plain_gather}", stacklevel=2)
        return
    weight = module.plans.plan(active_recipe() or module.recipe).weight
    names = {id(parameter): name for name, parameter in module.named_parameters(recurse=False)}
    for member, parameter in enumerate(module.weight_parameters):
        if not is_distributed(parameter) or hasattr(parameter._local_tensor, PRE):
            continue
        if weight.quantizer.is_stochastic:
            raise UserError(
                f"{title(module)}: {weight.quantizer} does not encode a weight twice alike; use a recipe "
                "that rounds weights to nearest"
            )
        if reason := _refusal(parameter, weight):
            name, module.plain_gather = f"{title(module)}.{names[id(parameter)]}", reason
            warnings.warn(f"{name} travels in high precision: {reason}", stacklevel=2)
            continue
        SentWeight(module, member, parameter)


def _refusal(parameter: "DTensor", weight: OperandPlan) -> str:
    """Why FSDP2 cannot gather planes of a DTensor's shards, or ""."""
    cuts = cuts_of(parameter)
    if not cuts or cuts[0][1] != 0:
        return f"it lies as {parameter.placements}; planes travel over a mesh that cuts its rows"
    if parameter.dim() != 2:
        return "it is packed"
    shard = parameter._local_tensor
    if shard.device.type not in ("cpu", parameter.device_mesh.device_type):
        return f"its shards are on {shard.device}"
    if any(weight.quantizer.delayed) and not encodes_itself(weight.quantizer):
        return f"{weight.quantizer} gives a delayed scale to something else than the weight"
    return READ_AS_IT_IS if weight.differentiates_original else ""


def require_planes(module: PlannedModule, weight: OperandPlan) -> None:
    """UserError if backward multiplies the weight as it is: the ranks gather planes alone."""
    if weight.differentiates_original:
        raise UserError(
            f"{title(module)}: {READ_AS_IT_IS}, and gather_quantized sends planes alone; use "
            "backward_override = 'dequantized', or give the recipe to the model before it is sharded"
        )


class SentWeight:
    """The hooks of one shard (M, K). FSDP2 calls it before a gather."""

    __signature__ = BEFORE

    def __init__(self, module: PlannedModule, member: int, parameter: "DTensor") -> None:
        self.module, self.member = module, member
        self.shard, mesh = parameter._local_tensor, parameter.device_mesh
        self.device = self.shard.device
        """Where planes are encoded: a device of the mesh, also if FSDP2 keeps the shard on the CPU."""
        self.copied: Tensor | None = None
        """FSDP2's copy on that device, until it is encoded."""
        if self.device.type != mesh.device_type:
            self.device = torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
            self.shard.to = self.to  # type: ignore[method-assign]
        self.cuts = [(mesh.get_group(at).group_name, dim) for at, dim in cuts_of(parameter)]
        """The groups of ranks that cut the weight, and the dimension that each cuts. The first one is of FSDP2."""
        self.groups = [group.group_name for group in mesh.get_all_groups()]
        self.weight: OperandPlan | None = None
        self.gathers = Gathers((None, None), False)
        self.stamp: tuple[object, ...] = ()
        self.is_sent = False
        """Whether a forward has sent it since. The next one measures again: writes through `.data` leave no version."""
        self.amaxes: dict[Usage, Tensor] = {}
        """The amax of all shards for each plane that needs one, since the writes that `stamp` counts."""
        self.slots: dict[Usage, tuple[Slot, FixedScale]] = {}
        """The slots of delayed planes, each with its scale in the last forward."""
        STEPS.register()
        setattr(self.shard, PRE, self)
        setattr(self.shard, POST, self.after_gather)

    def __call__(
        self,
        mesh: "DeviceMesh",
        outer_size: torch.Size,
        outer_stride: object,
        module: object,
        mp_policy: "MixedPrecisionPolicy",
    ) -> tuple[tuple[Tensor, ...], "SentWeight"]:
        del outer_stride, module
        if self.weight is None:
            self.prepare(mp_policy.param_dtype or self.shard.dtype, outer_size[0])
            self.require_same_planes()
        in_forward = torch._C._current_graph_task_id() == -1
        if self.stamp != self.writes or (in_forward and (self.is_sent or self.dtype is not self.dtype_now)):
            agree_on_amaxes([*self.of_model()], in_forward)
        if in_forward:
            self.is_sent = True
            for side, (slot, now) in self.slots.items():
                now.scale = slot.upcoming(self.amaxes[side])
        if not self.gathers.derives:
            self.gathers.keeps_rowwise |= self.module.differentiates_rowwise
        source = self.slots[ROWWISE][1].scale if ROWWISE in self.slots else self.amaxes.get(ROWWISE)
        sent = self.gathers.send(mesh, self.planes, source)
        self.copied = None
        if not self.is_even and (param := self.gathers.param) is not None:
            self.padded = param.padded_sharded_param_size
            param.padded_sharded_param_size = self.shard.shape  # else it asks for buffers of the padded shape
        return sent, self

    def to(self, *args: Any, **options: Any) -> Tensor:
        """`Tensor.to` of a shard on the CPU. FSDP2 looks for the hook before a gather at the copy."""
        copy = Tensor.to(self.shard, *args, **options)
        if copy.device == self.device:
            self.copied = copy
            setattr(copy, PRE, self)
        return copy

    @property
    def values(self) -> Tensor:
        """The shard on the device that encodes it."""
        shard = self.shard if self.copied is None else self.copied
        return shard.detach().to(self.device, non_blocking=True)

    def after_gather(
        self,
        outputs: Sequence[Tensor],
        metadata: "SentWeight",
        param_dtype: torch.dtype,
        *,
        out: PlaneTensor | None = None,
    ) -> tuple[PlaneTensor, tuple[Tensor, ...]] | None:
        """FSDP2's hook: the gathered weight, and what to free after its use. None if `out` has the planes."""
        if not self.is_even and (param := self.gathers.param) is not None:
            param.padded_sharded_param_size = self.padded

        def whole(planes: Planes) -> PlaneTensor:
            assert self.weight is not None
            return QuantizedTensor(
                planes, self.weight.quantizer, torch.Size((self.rows, self.shard.shape[1])), param_dtype
            )

        return self.gathers.deliver(outputs, out, whole)

    def prepare(self, dtype: torch.dtype, rows: int) -> None:
        """Choose the formats: those of the first call that gathers. `rows` is the number of rows of the weight."""
        self.gathered_dtype = dtype
        self.dtype = self.dtype_now
        """The dtype from which the last forward encoded the weight."""
        plan = self.module.plans.plan(active_recipe() or self.module.recipe, Call(str(self.device), self.dtype))
        require_planes(self.module, plan.weight)
        self.weight, self.rows = plan.weight.from_cache(plan.weight.source, True), rows
        row, col = self.weight.formats
        self.step = max(row.alignment[0] if row else 1, col.alignment[1] if col else 1)
        ranks = group_size(self.cuts[0][0])
        self.is_even = ranks == 1 or rows % (ranks * self.step) == 0  # one rank pads nothing
        self.gathers = Gathers((row, col), plan.weight.quantizer.derives_columnwise)
        self.gathers.rows = None if self.is_even else rows
        self.gathers.find(self.shard)
        self.amax_cuts = {side: self._cuts_that_share(side) for side in SIDES}
        self.slots, slots = {}, (None, None)
        if any(plan.weight.quantizer.delayed):
            delayed_states.states_for(self.module, plan, self.device)
            slots = delayed_states.weight_context(self.module, plan, self.member).slots
            sent = zip(SIDES, slots, (row, col), strict=True)
            self.slots = {side: (slot, FixedScale(self.shard)) for side, slot, fmt in sent if slot and fmt}
            slots = tuple(self.slots[side][1] if side in self.slots else None for side in SIDES)
        shards = {side: ShardContext(*next(iter(cuts), self.cuts[0])) for side, cuts in self.amax_cuts.items()}
        self.contexts = {side: replace(plan.weight.context, shard=shards[side], slots=slots) for side in SIDES}

    def _cuts_that_share(self, side: Usage) -> list[tuple[str, int]]:
        """The cuts whose ranks agree on an amax before they encode a plane."""
        fmt = self.gathers.formats[0 if side is ROWWISE else 1]
        if fmt is None or (side is COLUMNWISE and self.gathers.derives):
            return []
        turned = side is COLUMNWISE and not fmt.is_derivable
        return [cut for cut in self.cuts if fmt.is_delayed or fmt.spans(1 - cut[1] if turned else cut[1])]

    def require_same_planes(self) -> None:
        """UserError on all ranks if they would gather different planes. The first gather of a model compares them."""
        names: list[str] = []
        for sent in self.of_model():
            formats = (fmt and fmt.name for fmt in sent.gathers.formats)
            names.append(f"{delayed_states.name_on_all_ranks(sent.module)}: {', '.join(map(str, formats))}")
        for group in self.groups:
            require_same(names, self.device, group, UNLIKE)

    @property
    def dtype_now(self) -> torch.dtype:
        """The dtype of a product with the weight: that of torch.autocast, if it is on around the forward of FSDP2."""
        device = self.device.type
        is_cast = self.gathered_dtype in CAST and torch.is_autocast_enabled(device)
        return torch.get_autocast_dtype(device) if is_cast else self.gathered_dtype

    @property
    def writes(self) -> tuple[object, ...]:
        """A value that changes with every write that leaves a version, and with every step of an optimizer."""
        param = self.gathers.param
        holders = (self.shard,) if param is None else (self.shard, param.sharded_param)
        return STEPS.last, *[0 if holder.is_inference() else holder._version for holder in holders]

    def of_model(self) -> "Iterator[SentWeight]":
        """This weight and all others under one root of FSDP2."""
        root = None if self.gathers.group is None else self.gathers.group.comm_ctx
        for group in fsdp_groups():
            for param in group.fsdp_params if group.comm_ctx is root else ():
                sent = getattr(param._sharded_local_tensor, PRE, None)
                if isinstance(sent, SentWeight):
                    if sent.weight is None:
                        sent.prepare(param.param_dtype or param.orig_dtype, param._orig_size[0])
                    yield sent

    @property
    def piece(self) -> Tensor:
        """This rank's rows, which it encodes."""
        values = self.values.to(self.dtype)
        return values if self.is_even else piece_of(values, self.rows, self.step, self.cuts[0][0])

    def plane(self, side: Usage, context: QuantizeContext) -> Planes:
        """The plane that `side` names, of this rank's rows."""
        assert self.weight is not None
        planes = self.weight.quantizer.encode(self.piece, side, context)
        if self.dtype is self.gathered_dtype:
            return planes
        # A plane in high precision has one dtype in all gathers. A call under torch.autocast casts it again.
        each = (p.map(lambda x: x.to(self.gathered_dtype)) if p and p.format == IDENTITY else p for p in planes)
        return Planes(*each)

    def is_measured_whole(self, side: Usage) -> bool:
        """Whether the amax of a plane is the largest magnitude of the weight."""
        fmt = self.gathers.formats[0 if side is ROWWISE else 1]
        assert fmt is not None and self.weight is not None
        return fmt.is_delayed or (fmt.scales_by_tensor and encodes_itself(self.weight.quantizer))

    def amax(self, side: Usage) -> Tensor | None:
        """The amax that all shards have to agree on before this rank's rows are encoded, if it is known."""
        assert self.weight is not None
        if not encodes_alone(self.weight.quantizer):
            return None
        row, col = self.weight.quantizer.shared_amaxes(self.piece, side, self.contexts[side])
        return col if row is None else row

    def agreed(self, side: Usage) -> Planes:
        """The plane that `side` names under what all shards agreed on."""
        amax = self.amaxes.get(side)
        return self.plane(side, replace(self.contexts[side], amaxes=(amax, amax)))

    def planes(self, usage: Usage) -> Planes:
        """The planes of this rank's rows that `usage` names, and a rowwise one that another is derived from."""
        derives = self.gathers.derives
        row = self.agreed(ROWWISE).rowwise if usage.rowwise or derives else None
        if derives and row is not None:
            return Planes(row, row.transposed() if usage.columnwise else None)
        return Planes(row, self.agreed(COLUMNWISE).columnwise if usage.columnwise else None)


def encodes_itself(quantizer: Quantizer) -> bool:
    """Whether planes encode the tensor itself, by Quantizer's own encode."""
    return type(quantizer) is Quantizer and quantizer.columnwise_source == "original"


def agree_on_amaxes(weights: Sequence[SentWeight], in_forward: bool) -> None:
    """Measure the amaxes of all weights, and let their shards agree on them at once."""
    requests: list[tuple[SentWeight, Usage]] = []
    amaxes: list[Tensor] = []
    direct: dict[torch.dtype, list[tuple[SentWeight, Usage]]] = {}
    for weight in weights:
        weight.stamp, weight.is_sent = weight.writes, False
        weight.dtype = weight.dtype_now if in_forward else weight.dtype
        for side in [side for side, cuts in weight.amax_cuts.items() if cuts]:
            if weight.is_measured_whole(side):
                direct.setdefault(weight.dtype, []).append((weight, side))
            elif (amax := weight.amax(side)) is not None:
                requests.append((weight, side))
                amaxes.append(amax)
    for dtype, of_dtype in direct.items():  # rounding keeps the order of magnitudes
        measured = amaxes_of([weight.shard.detach() for weight, _ in of_dtype])
        moved = [amax.to(weight.device) for amax, (weight, _) in zip(measured, of_dtype, strict=True)]
        requests += of_dtype
        amaxes += torch.cat(moved).to(dtype).to(torch.float32).split(1)
    for level in range(2):  # the ranks of FSDP2, then those of `parallelize_module`
        cuts = [weight.amax_cuts[side][level : level + 1] for weight, side in requests]
        places = [at for at, cut in enumerate(cuts) if cut]
        agreed = agree([cuts[at][0][0] for at in places], [amaxes[at] for at in places])
        for at, amax in zip(places, agreed, strict=True):
            amaxes[at] = amax
    for (weight, side), amax in zip(requests, amaxes, strict=True):
        weight.amaxes[side] = amax
    for weight in weights:
        row, col = (weight.amaxes[side] if side in weight.slots else None for side in SIDES)
        weight.gathers.amaxes = row, col
