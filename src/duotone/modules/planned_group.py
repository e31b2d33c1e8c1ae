"""PlannedGroup: the base of modules with several linears under one plan. Each linear takes some rows of one input."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.linear.core import LinearStage
from duotone.linear.grouped import GroupedStage
from duotone.linear.plan import GemmPlan, LinearPlan
from duotone.linear.row_counts import Rows
from duotone.linear.sink import GRADIENT
from duotone.modules.planned import Planned
from duotone.modules.trace_errors import refuse_export
from duotone.pipeline.op import TensorInfo, require_fit
from duotone.pipeline.stage import Stage
from duotone.pipeline.titles import title
from duotone.recipes.roles import QuantizerRole
from duotone.sharding.dtensors import shard_of
from duotone.state import seeds
from duotone.tensor import QuantizedTensor, Quantizer
from duotone.tensor.quantizer import quantizer_of

Splits = Rows | Tensor | Sequence[int]
"""The rows of each linear."""
EXPORTED = (
    "torch.export follows experts only without strict=True and with row counts that are a list of integers; "
    "models of transformers export after duotone.revert(model)"
)


class PlannedGroup(Planned):
    """`num_gemms` linears under one plan. `weights` and `biases` say where their parameters are."""

    module_type = "grouped_linear"
    extra_inputs = 1
    num_gemms: int
    first_gemm = 0
    """The number of the first linear among the linears of all ranks."""

    return_bias = False
    single_grouped_weight = single_grouped_bias = True
    """Whether one packed parameter holds the weights, or the biases, of all experts."""

    @property
    def biases(self) -> tuple[Tensor | None, ...]:
        """The bias of each expert; all None unless a class has biases."""
        return (None,) * self.num_gemms

    def whole_weights(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """`weights` as autograd sees them."""
        return weights

    @property
    def weight_held(self) -> Quantizer | None:
        return self._quantizer_of([shard_of(weight) for weight in self.weights])  # FSDP2 cuts one after the other

    def _quantizer_of(self, weights: Sequence[Tensor]) -> Quantizer | None:
        """The quantizer of all weights, None if they are plain. UserError if they differ."""
        first = quantizer_of(weights[0])
        for i, weight in enumerate(weights):
            quantizer = quantizer_of(weight) if isinstance(weight, QuantizedTensor) else None
            if quantizer != first or weight.dtype is not weights[0].dtype:
                formats = f"{_formats(weight)} where expert 0 has {_formats(weights[0])}"
                raise UserError(f"{title(self)}: the weight of expert {i} is {formats}; hold all experts alike")
        return first

    def link(
        self, signal: TensorInfo, is_first_microbatch: bool | Tensor | None
    ) -> tuple[Stage, TensorInfo, Sequence[Tensor], Sequence[Tensor | None]]:
        if signal.quantizer is not None:
            raise UserError(
                f"{title(self)} takes a plain tensor; got one quantized to {signal.quantizer}: dequantize it"
            )
        weights, biases = self.weights, self.biases
        require_fit(self, signal, weights[0])
        if len(weights) != self.num_gemms:
            raise UserError(f"{title(self)} has weights of {len(weights)} experts for num_gemms {self.num_gemms}")
        if not self.single_grouped_weight:
            self._require_alike("weight", weights, weights[0].shape, weights[0].device)
        checked = biases[:1] if self.single_grouped_bias else biases
        self._require_alike("bias", checked, weights[0].shape[:1], weights[0].device)
        out = weights[0].shape[0]
        trained, quantizer = any([w.requires_grad for w in weights]), self._quantizer_of(weights)
        stage = self.plans.stage(signal, trained, quantizer, weights[0].dtype)
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling and torch.compiler._is_exporting_flag:
            refuse_export(f"{title(self)}: {EXPORTED}")
        if is_first_microbatch is not None or self.fuse_wgrad_accumulation or self.delay_wgrad_compute or compiling:
            stage = self.plans.variant(stage, is_first_microbatch)
        trained = any(p is not None and p.requires_grad for p in (*weights, *biases))
        tracked = torch.is_grad_enabled() and trained
        rows = None if self.layout.sequence_parallel else signal.rows
        if rows is None and compiling:
            raise UserError(f"{title(self)}: sequence_parallel runs in eager code; leave it out of compiled code")
        output = signal._replace(width=out, rows=rows, requires_grad=signal.requires_grad or tracked)
        return stage, output, weights, biases

    def _require_alike(
        self, kind: str, parameters: Sequence[Tensor | None], shape: Sequence[int], device: torch.device
    ) -> None:
        """UserError unless all that are not None have this shape, on this device: kernels only see addresses."""
        if all([p is None or (p.shape == shape and p.device == device) for p in parameters]):
            return
        for i, p in enumerate(parameters):
            if p is not None and (p.shape != shape or p.device != device):
                raise UserError(
                    f"{title(self)}: the {kind} of expert {i} is {tuple(p.shape)} on {p.device}; "
                    f"those of expert 0 ask for {tuple(shape)} on {device}"
                )

    def kernel_of(self, plan: LinearPlan, gemm: GemmPlan) -> tuple[str, str]:
        stage = GroupedStage.of([LinearStage(plan, GRADIENT)] * self.num_gemms, self.weights[0].shape)
        why = "weight gradients are put off" if self.delay_wgrad_compute else stage.why_apart
        if not why:
            return gemm.rule.name.replace("cuBLAS", "grouped"), "one launch for all experts"
        kernel, reason = super().kernel_of(plan, gemm)
        could = gemm.rule.groups_segments(gemm.problem, self.num_gemms)
        return kernel, f"a product for each expert: {why}" if could else reason

    def accept(self, stage: GroupedStage, signal: TensorInfo, extra: Sequence[Splits]) -> Sequence[Splits]:
        (splits,) = extra
        if torch.compiler._is_exporting_flag and not isinstance(splits, list | tuple):
            refuse_export(f"{title(self)}: {EXPORTED}")
        if torch.compiler.is_dynamo_compiling():  # the op checks them
            counts = splits.count() if isinstance(splits, Rows) else splits
            return (counts if isinstance(counts, Tensor) else torch.tensor(counts, dtype=torch.int64, device="cpu"),)
        return (stage.counted(splits, signal.rows, signal.device),)

    def operands(
        self,
        stage: GroupedStage,
        signal: TensorInfo,
        extra: Sequence[Splits],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> Sequence[object]:
        (splits,), dtype = extra, signal.dtype
        if stage.plan.layout.group:
            self.require_same_formats(stage.plan, signal.device)
        if self.return_bias:
            biases = (None,) * self.num_gemms
        weights = self.whole_weights(weights)
        weights = [w if w.dtype is dtype or isinstance(w, QuantizedTensor) else w.to(dtype) for w in weights]
        biases = [b if b is None or b.dtype is dtype else b.to(dtype) for b in biases]
        count = stage.plan.seeds * (self.all_gemms or self.num_gemms)
        seed = seeds.take(getattr(self, seeds.BUFFER), count) if count else None
        if seed is not None and self.first_gemm:
            seed = seed + self.first_gemm * stage.plan.seeds
        return splits, seed, *weights, *biases

    def make_stage(self, linears: list[LinearStage]) -> Stage:
        return GroupedStage.of(linears, self.weights[0].shape)

    def make_variant(self, stage: Stage, first: bool | Tensor | None, overwrites: bool) -> Stage:
        assert isinstance(stage, GroupedStage)
        linears = [self.plans.options.stage(one, i, first, overwrites) for i, one in enumerate(stage.linears)]
        return self.make_stage(linears)

    def refuse_held(self, weight: nn.Parameter) -> None:
        """UserError if a scale or a block of a packed weight would belong to two experts."""
        if not self.single_grouped_weight or not isinstance(weight, QuantizedTensor):
            return
        for dim, plane in enumerate(weight.planes):
            if plane is not None and (plane.spans(dim) or weight.shape[1] % plane.format.alignment[dim]):
                raise UserError(
                    f"{title(self)}: a scale of {plane.format.name} would span experts in one packed weight; "
                    "use separate weights, or a format whose blocks divide out_features"
                )

    def roles_of(self, mode: str) -> dict[str, QuantizerRole | None]:
        """The slots of each expert, `<slot>.<expert>`."""
        slots = super().roles_of(mode).items()
        return {f"{slot}.{i}": role for i in range(self.num_gemms) for slot, role in slots}


def _formats(weight: Tensor) -> str:
    quantizer = quantizer_of(weight)
    if quantizer is None:
        return f"plain {weight.dtype}"
    return "/".join(fmt.name if fmt else "none" for fmt in (quantizer.rowwise, quantizer.columnwise))
