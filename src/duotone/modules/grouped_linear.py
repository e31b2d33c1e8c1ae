"""GroupedLinear: the linears of a mixture's experts, each over its own rows of one input."""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.linear.grouped import GroupedStage
from duotone.linear.row_counts import Rows, device_splits, host_splits
from duotone.modules.output_buffers import check_place, placed_gradient, placed_output
from duotone.modules.planned_group import PlannedGroup, Splits
from duotone.modules.split_parameters import tensors_of
from duotone.modules.weights import initialise, keep_initialiser, quantize_weights
from duotone.pipeline.autograd import is_transformed
from duotone.pipeline.op import Op, info_of, run
from duotone.pipeline.titles import title
from duotone.recipes.recipe import RecipeLike
from duotone.sharding.dtensors import is_distributed, shard_of
from duotone.sharding.layout import local_sizes, parallel_layout
from duotone.state.autocast_context import HIGH_PRECISION
from duotone.tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GroupedLinear(PlannedGroup, nn.Module):
    """y_i = x_i w_i^T + b_i for consecutive rows x_i of one input: the values of `num_gemms` separate Linears.

    It has their bits too, unless one kernel of Hopper multiplies all experts, which sums in another order.

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
        self._has_biases, self.return_bias = bias, return_bias
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

    def forward(
        self,
        x: Tensor,
        m_splits: Splits,
        *,
        is_first_microbatch: bool | Tensor | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """(*lead, in_features) and the rows of each expert -> (*lead, out_features).

        `m_splits` is a list of n integers or an int tensor. They sum to the rows of x, and zeros are allowed. The host
        waits for a tensor on a GPU. It does not wait on Hopper if all formats are FP8 with scales per tensor, row or
        block of 128, and no gradient is put off. Results of rows beyond the sum are then undefined.
        With `return_bias` the biases follow, not added.

        `out` (*lead, out_features) takes the output, which then shares its memory. `dgrad_out`, shaped as x, takes the
        gradient of x. Both are contiguous and have no gradient. With `out` the counts may sum to less than the rows of
        x. Rows beyond keep their values in `out` and `dgrad_out`. Without `dgrad_out` their gradient is zero.
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
            raise UserError(f"{title(self)}: out and dgrad_out are the caller's; leave them out of compiled code")
        if self.layout.sequence_parallel:
            raise UserError(f"{title(self)}: sequence_parallel changes the rows; leave out and dgrad_out")
        signal = info_of(x, self)
        stage, output, *_ = self.link(signal, first)
        assert isinstance(stage, GroupedStage)
        if out is not None:
            check_place("out", out, x, output.dtype, (*x.shape[:-1], self.out_features))
        if dgrad_out is not None:
            check_place("dgrad_out", dgrad_out, x, x.dtype, tuple(x.shape))
        total, counted = x.shape[:-1].numel(), None
        splits = m_splits.splits if isinstance(m_splits, Rows) else m_splits
        if isinstance(splits, Tensor) and splits.is_cuda and stage.leaves_splits(signal.device):
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
            return y.view(*x.shape[:-1], y.shape[-1])
        return placed_output(y, out, counted)

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        if not self.single_grouped_weight:
            tensors = tensors_of(self, "weight0")
            return tuple(tensors[f"weight{i}"] for i in range(self.num_gemms))
        if is_transformed():  # torch.func knows no requires_grad_
            return tensors_of(self, "weight")["weight"].unbind(0)
        with torch.inference_mode(False), torch.no_grad():
            whole = tensors_of(self, "weight")["weight"]
            if is_distributed(whole):  # between passes of FSDP2, a rank has only some experts
                whole = torch.empty((), dtype=whole.dtype, device=shard_of(whole).device).expand(whole.shape)
            members = whole.unbind(0)
        return tuple(w.requires_grad_(whole.requires_grad) for w in members)  # type: ignore

    def whole_weights(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        traced = torch.compiler.is_dynamo_compiling()  # a trace cannot ask about inference mode
        members = self.single_grouped_weight and (traced or not torch.is_inference_mode_enabled())
        return tensors_of(self, "weight")["weight"].unbind(0) if members else weights

    @property
    def use_bias(self) -> bool:
        """Whether each expert has a bias."""
        return self._has_biases

    @property
    def biases(self) -> tuple[Tensor | None, ...]:
        """The bias of each expert, (out_features,); all None without biases."""
        if not self._has_biases:
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
        """Fill the parameters anew, as those of separate Linears. Those on meta come to the default device first."""
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
            others = set(range(self.all_gemms)).difference(range(self.first_gemm, self.first_gemm + self.num_gemms))
            for kind, i in itertools.product(("weight", "bias"), others):
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
        """Rename the entries of this rank's linears: numbers from `first` on become numbers from `to` on."""
        if first != to:
            for kind in ("weight", "bias"):
                places = [(f"{prefix}{kind}{first + i}", f"{prefix}{kind}{to + i}") for i in range(self.num_gemms)]
                values = {new: state_dict.pop(old) for old, new in places if old in state_dict}
                state_dict.update(values)

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"


@torch.no_grad()
def _packed(like: Tensor | None, members: list[Tensor]) -> Tensor:
    """One tensor of the members, quantized like `like`. Members in the same formats keep their bytes."""
    if not isinstance(like, QuantizedTensor):
        return torch.stack([m.dequantize() if isinstance(m, QuantizedTensor) else m for m in members])
    whole = like.detach().clone()
    for piece, member in zip(whole.unbind(0), members, strict=True):
        piece.copy_(member)
    return whole
