"""GroupedLinear: the linears of a mixture's experts, each over its own rows of one input."""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.linear.core import LinearStage
from duotone.linear.grouped import GroupedStage
from duotone.linear.layout import local_sizes, parallel_layout
from duotone.linear.plan import GemmPlan, LinearPlan
from duotone.linear.row_counts import Rows, device_splits, host_splits
from duotone.linear.sink import GRADIENT
from duotone.pipeline.autograd import is_transformed
from duotone.pipeline.op import Op, TensorInfo, info_of, require_fit, run
from duotone.pipeline.stage import Stage
from duotone.planned.output_buffers import check_place, placed_gradient, placed_output
from duotone.planned.planned import Planned, holds_codes
from duotone.planned.split_parameters import tensors_of
from duotone.planned.weights import initialise, keep_initialiser, quantize_weights
from duotone.recipes.recipe import RecipeLike
from duotone.recipes.roles import QuantizerRole
from duotone.state import seeds
from duotone.state.autocast_context import HIGH_PRECISION
from duotone.tensor import QuantizedTensor, Quantizer
from duotone.tensor.quantizer import quantizer_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Splits = Rows | Tensor | Sequence[int]
"""The rows of each linear."""


class PlannedGroup(Planned):
    """`num_gemms` linears under one plan. `weights` and `biases` say where their parameters are."""

    module_type = "grouped_linear"
    extra_inputs = 1
    num_gemms: int
    first_gemm = all_gemms = 0
    """The number of the first linear among those of all ranks, and how many these are; 0 if one rank has all."""

    return_bias = False
    single_grouped_weight = single_grouped_bias = True
    """Whether one packed parameter holds those of all experts."""

    @property
    def biases(self) -> tuple[Tensor | None, ...]:
        return (None,) * self.num_gemms

    def whole_weights(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """`weights` as autograd sees them."""
        return weights

    @property
    def weight_held(self) -> Quantizer | None:
        return self._quantizer_of(self.weights)

    def _quantizer_of(self, weights: Sequence[Tensor]) -> Quantizer | None:
        """The quantizer of all weights, None if they are plain. UserError if they differ."""
        first = quantizer_of(weights[0])
        for i, weight in enumerate(weights):
            quantizer = quantizer_of(weight) if isinstance(weight, QuantizedTensor) else None
            if quantizer != first or weight.dtype is not weights[0].dtype:
                formats = f"{_formats(weight)} where expert 0 has {_formats(weights[0])}"
                raise UserError(f"{self.module_name}: the weight of expert {i} is {formats}; hold all experts alike")
        return first

    def link(
        self, signal: TensorInfo, is_first_microbatch: bool | Tensor | None
    ) -> tuple[Stage, TensorInfo, Sequence[Tensor], Sequence[Tensor | None]]:
        if signal.quantizer is not None:
            raise UserError(
                f"{self.module_name} takes a plain tensor; got one quantized to {signal.quantizer}: dequantize it"
            )
        weights, biases = self.weights, self.biases
        require_fit(self, signal, weights[0])
        if len(weights) != self.num_gemms:
            raise UserError(f"{self.module_name} has weights of {len(weights)} experts for num_gemms {self.num_gemms}")
        if not self.single_grouped_weight:
            self._require_alike("weight", weights, weights[0].shape, weights[0].device)
        checked = biases[:1] if self.single_grouped_bias else biases
        self._require_alike("bias", checked, weights[0].shape[:1], weights[0].device)
        out = weights[0].shape[0]
        stage = self.plans.stage(signal, any([w.requires_grad for w in weights]), self._quantizer_of(weights))
        compiling = torch.compiler.is_dynamo_compiling()
        if is_first_microbatch is not None or self.fuse_wgrad_accumulation or self.delay_wgrad_compute or compiling:
            stage = self.plans.variant(stage, is_first_microbatch)
        trained = any(p is not None and p.requires_grad for p in (*weights, *biases))
        tracked = torch.is_grad_enabled() and trained
        rows = None if self.layout.sequence_parallel else signal.rows
        if rows is None and compiling:
            raise UserError(f"{self.module_name}: sequence_parallel runs in eager code; leave it out of compiled code")
        output = signal._replace(width=out, rows=rows, requires_grad=signal.requires_grad or tracked)
        return stage, output, weights, biases

    def _require_alike(
        self, kind: str, parameters: Sequence[Tensor | None], shape: Sequence[int], device: torch.device
    ) -> None:
        """UserError unless those that are given have this shape, on this device: kernels see addresses."""
        if all([p is None or (p.shape == shape and p.device == device) for p in parameters]):
            return
        for i, p in enumerate(parameters):
            if p is not None and (p.shape != shape or p.device != device):
                raise UserError(
                    f"{self.module_name}: the {kind} of expert {i} is {tuple(p.shape)} on {p.device}; "
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
        if torch.compiler.is_dynamo_compiling():  # the op checks them
            splits = splits.count() if isinstance(splits, Rows) else splits
            return (splits.detach() if isinstance(splits, Tensor) else splits,)  # Dynamo takes no tensor twice
        stays = _leaves_splits(stage, signal)
        if isinstance(splits, Rows):
            fits = splits.experts == self.num_gemms and splits.total == signal.rows
            splits = splits.counts if stays and fits and stage.grouped else splits.splits
        if isinstance(splits, Tensor) and splits.is_cuda and stays:
            return (device_splits(splits, self.num_gemms),)
        return (host_splits(splits, self.num_gemms, signal.rows),)

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
            self.require_alike(stage.plan, signal.device)
        if self.return_bias:
            biases = (None,) * self.num_gemms
        weights = self.whole_weights(weights)
        weights = [w if w.dtype is dtype or holds_codes(w) else w.to(dtype) for w in weights]
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
        """UserError where a scale or a block of a packed weight would belong to two experts."""
        if not self.single_grouped_weight or not isinstance(weight, QuantizedTensor):
            return
        for dim, plane in enumerate(weight.planes):
            if plane is not None and (plane.spans(dim) or weight.shape[1] % plane.format.alignment[dim]):
                raise UserError(
                    f"{self.module_name}: a scale of {plane.format.name} would span experts in one packed weight; "
                    "use separate weights, or a format whose blocks divide out_features"
                )

    def roles_of(self, mode: str) -> dict[str, QuantizerRole | None]:
        """The slots of each expert, `<slot>.<expert>`."""
        slots = super().roles_of(mode).items()
        return {f"{slot}.{i}": role for i in range(self.num_gemms) for slot, role in slots}


class GroupedLinear(PlannedGroup, nn.Module):
    """y_i = x_i w_i^T + b_i for consecutive rows x_i of one input: the values of `num_gemms` separate Linears.

    Their bits too, except on Hopper where one kernel multiplies all experts: its sums run in an order of their own.

    Parameters are `weight0`, `bias0` and so on; with `single_grouped_weight` one `weight` (n, out_features,
    in_features), with `single_grouped_bias` one `bias` (n, out_features). Checkpoints of either kind load into both.
    Other arguments are Linear's. `parallel_mode` splits each expert. With `sequence_parallel` an expert has
    equally many rows on all ranks: "column" gathers them, one rank after the other, and "row" scatters them.
    """

    def __init__(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], object] | None = None,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        parallel_mode: str | None = None,
        tp_group: "ProcessGroup | None" = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        name: str = "",
        recipe: RecipeLike | None = None,
    ) -> None:
        if not isinstance(num_gemms, int) or num_gemms < 1:
            raise UserError(f"num_gemms is {num_gemms!r}; give a whole number, one or more")
        layout = parallel_layout(parallel_mode, tp_group, sequence_parallel, tp_size)
        in_features, out_features = local_sizes(layout, in_features, out_features, tp_group)
        if single_grouped_weight and (fuse_wgrad_accumulation or delay_wgrad_compute):
            raise UserError("single_grouped_weight gives its gradient to autograd; keep separate weights for the rest")
        super().__init__()
        keep_initialiser(self, init_method)
        self.layout = layout
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = fuse_wgrad_accumulation, delay_wgrad_compute
        self.save_original_input = save_original_input
        options = {"dtype": params_dtype, "device": device}
        self._add("weight", (out_features, in_features), single_grouped_weight, options)
        if bias:
            self._add("bias", (out_features,), single_grouped_bias, options)
        self.reset_parameters()
        self.adopt(recipe or HIGH_PRECISION, (), name)
        quantize_weights(self)

    def _add(self, kind: str, shape: tuple[int, ...], packed: bool, options: dict[str, Any]) -> None:
        names = [kind] if packed else [f"{kind}{i}" for i in range(self.num_gemms)]
        for name in names:
            full = (self.num_gemms, *shape) if packed else shape
            self.register_parameter(name, nn.Parameter(torch.empty(full, **options)))

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        m_splits: Splits,
        *,
        is_first_microbatch: bool | Tensor | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """(*lead, in_features) and the rows of each expert -> (*lead, out_features).

        `m_splits` is a list of n integers or an int tensor; they sum to the rows of x, and zeros are allowed. A tensor
        on a GPU is waited for, except on Hopper where all formats are FP8 with scales per tensor, row or block of 128,
        and no gradient is put off: then nothing looks at the sum, and results of rows beyond it are undefined.
        With `return_bias` the biases follow, not added.

        `out` (*lead, out_features) takes the output, which then shares its memory, `dgrad_out`, shaped as x, the
        gradient of x. Both are contiguous and have no gradient. With `out` the counts may sum to less than the rows of
        x: rows beyond keep what they hold in `out` and `dgrad_out`, and without `dgrad_out` have a gradient of zero.
        """
        if out is not None or dgrad_out is not None:
            y = self._run_placed(x, m_splits, is_first_microbatch, out, dgrad_out)
        else:
            y = run((self,), x, (m_splits,), is_first_microbatch, self)
        return (y, list(self.biases)) if self.return_bias else y

    def _run_placed(
        self, x: Tensor, m_splits: Splits, first: bool | Tensor | None, out: Tensor | None, dgrad_out: Tensor | None
    ) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            raise UserError(f"{self.module_name}: out and dgrad_out are the caller's; leave them out of compiled code")
        if self.layout.sequence_parallel:
            raise UserError(f"{self.module_name}: sequence_parallel changes the rows; leave out and dgrad_out")
        signal = info_of(x, self)
        stage, output, *_ = self.link(signal, first)
        assert isinstance(stage, GroupedStage)
        if out is not None:
            check_place("out", out, x, output.dtype, (*x.shape[:-1], self.out_features))
        if dgrad_out is not None:
            check_place("dgrad_out", dgrad_out, x, x.dtype, tuple(x.shape))
        total, counted = x.shape[:-1].numel(), None
        splits = m_splits.splits if isinstance(m_splits, Rows) else m_splits
        if isinstance(splits, Tensor) and splits.is_cuda and _leaves_splits(stage, signal):
            counted = device_splits(splits, self.num_gemms).sum()
        else:
            splits = host_splits(splits, self.num_gemms, total if out is None else None)
            if sum(splits) > total:
                raise UserError(f"m_splits sum to {sum(splits)}, and the input has {total} rows; cover each once")
            total = sum(splits)
        if dgrad_out is None:
            rows = x.reshape(-1, x.shape[-1])[:total]
        else:
            rows = placed_gradient(x, total, dgrad_out, counted)
        y = run((self,), rows, (splits,), first, self)
        if out is None:
            return y.view(*x.shape[:-1], y.shape[-1])  # type: ignore[no-any-return]
        return placed_output(y, out, counted)

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        if not self.single_grouped_weight:
            tensors = tensors_of(self, "weight0")
            return tuple(tensors[f"weight{i}"] for i in range(self.num_gemms))
        if is_transformed():  # torch.func knows no requires_grad_
            return tensors_of(self, "weight")["weight"].unbind(0)  # type: ignore[no-any-return]
        with torch.inference_mode(False), torch.no_grad():
            whole = tensors_of(self, "weight")["weight"]
            members = whole.unbind(0)
        return tuple(w.requires_grad_(whole.requires_grad) for w in members)

    def whole_weights(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        traced = torch.compiler.is_dynamo_compiling()  # which knows no question for inference mode
        members = self.single_grouped_weight and (traced or not torch.is_inference_mode_enabled())
        return tensors_of(self, "weight")["weight"].unbind(0) if members else weights

    @property
    def biases(self) -> tuple[Tensor | None, ...]:
        if not self.use_bias:
            return (None,) * self.num_gemms
        if self.single_grouped_bias:
            return tuple(tensors_of(self, "bias")["bias"].unbind(0))
        tensors = tensors_of(self, "bias0")
        return tuple(tensors[f"bias{i}"] for i in range(self.num_gemms))

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and not self.__dict__.get("single_grouped_weight", True):
            return tensors_of(self, "weight0")["weight0"]
        return super().__getattr__(name)

    def reset_parameters(self) -> None:
        """Fill the parameters anew as so many Linears; those on meta come to the default device first."""
        initialise(self)

    @property
    def weight_parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.weight,) if self.single_grouped_weight else self.weights

    @property
    def pipeline(self) -> tuple[Op, ...] | None:
        return (self,) if type(self).forward is GroupedLinear.forward and not self.return_bias else None

    def weight_owners(self, member: int) -> tuple[nn.Parameter, ...]:
        return (self.weight,) if self.single_grouped_weight else (self.weights[member],)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        if self.all_gemms:
            theirs = set(range(self.all_gemms)).difference(range(self.first_gemm, self.first_gemm + self.num_gemms))
            for kind, i in itertools.product(("weight", "bias"), theirs):
                state_dict.pop(f"{prefix}{kind}{i}", None)
            self._rename(state_dict, prefix, self.first_gemm, 0)
        for kind, packed in (("weight", self.single_grouped_weight), ("bias", self.single_grouped_bias)):
            names = [f"{prefix}{kind}{i}" for i in range(self.num_gemms)]
            whole = f"{prefix}{kind}"
            if packed and all(name in state_dict for name in names):
                state_dict[whole] = _packed(self._parameters[kind], [state_dict.pop(name) for name in names])
            elif not packed and whole in state_dict and state_dict[whole].shape[:1] == (self.num_gemms,):
                state_dict.update(zip(names, state_dict.pop(whole).unbind(0), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._rename(destination, prefix, 0, self.first_gemm)

    def _rename(self, state_dict: dict[str, Tensor], prefix: str, first: int, to: int) -> None:
        """Move the entries of this rank's linears from the numbers `first`... to the numbers `to`..."""
        if first != to:
            for kind in ("weight", "bias"):
                places = [(f"{prefix}{kind}{first + i}", f"{prefix}{kind}{to + i}") for i in range(self.num_gemms)]
                values = {new: state_dict.pop(old) for old, new in places if old in state_dict}
                state_dict.update(values)

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"


@torch.no_grad()
def _packed(like: Tensor | None, members: list[Tensor]) -> Tensor:
    """One tensor of the members, quantized as `like` is; bytes of the same formats stay as they are."""
    if not isinstance(like, QuantizedTensor):
        return torch.stack([m.dequantize() if isinstance(m, QuantizedTensor) else m for m in members])
    whole = like.detach().clone()
    for piece, member in zip(whole.unbind(0), members, strict=True):
        piece.copy_(member)
    return whole


def _leaves_splits(stage: GroupedStage, signal: TensorInfo) -> bool:
    """Whether row counts that lie on the device are left there."""
    return signal.device == "cuda" and stage.takes_device_splits


def _formats(weight: Tensor) -> str:
    held = quantizer_of(weight)
    if held is None:
        return f"plain {weight.dtype}"
    return "/".join(fmt.name if fmt else "none" for fmt in (held.rowwise, held.columnwise))
