"""Linear: nn.Linear whose three GEMMs follow a plan."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.linear.core import LinearStage
from duotone.modules import boundary, delayed_states, distributed_linear
from duotone.modules.planned import Planned
from duotone.modules.split_parameters import Splits, is_split, pieces, share_buffer, split_parameters, whole_of
from duotone.modules.weights import initialise, keep_initialiser, quantize_weights
from duotone.pipeline.autograd import Outputs
from duotone.pipeline.op import Op, TensorInfo, require_fit, run
from duotone.pipeline.stage import Stage
from duotone.recipes.recipe import RecipeLike
from duotone.sharding.dtensors import is_distributed
from duotone.sharding.layout import local_sizes, parallel_layout
from duotone.state import seeds
from duotone.state.autocast_context import HIGH_PRECISION
from duotone.tensor import QuantizedTensor
from duotone.tensor.quantizer import quantizer_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from duotone.sharding.activation_layout import ActivationLayout

LOCAL = (nn.Parameter, QuantizedTensor)
"""Types of weights that are no DTensors."""


class PlannedLinear(Planned):
    """Lets an nn.Linear follow plans. Mixed in before nn.Linear, or before a subclass that inherits its forward.

    Parameters, their names and the state_dict stay nn.Linear's.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    module_type = "linear"
    return_bias = False
    stored_weight = "weight"
    """The parameter that is the weight (out_features, in_features). "" if `linear_weight` computes it."""

    def forward(
        self,
        x: Tensor,
        *,
        is_first_microbatch: bool | Tensor | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Outputs:
        """(*lead, in_features) -> (*lead, out_features). With `return_bias` the bias follows and is not added.

        `is_first_microbatch` keeps the planes of the weight: True encodes them, False uses the planes that were kept.
        It may be a tensor of one element on the weight's device. The host does not read it.
        `fp8_output` makes the output a quantized tensor, `fp8_grad` the gradient of the input. Their formats are
        those that the recipe gives `output_quantizer_role` and `grad_input_quantizer_role`.
        """
        if fp8_output or fp8_grad:
            y = boundary.run_with_boundary((self,), x, is_first_microbatch, self, fp8_output, fp8_grad)
        else:
            y = run((self,), x, (), is_first_microbatch, self)
        return (y, self.bias) if self.return_bias else y

    @property
    def pipeline(self) -> tuple[Op, ...] | None:
        return (self,) if type(self).forward is PlannedLinear.forward and not self.return_bias else None

    @property
    def linear_weight(self) -> Tensor:
        """The weight that calls multiply by: (out_features, in_features)."""
        return self.weight

    def link(
        self, info: TensorInfo, is_first_microbatch: bool | Tensor | None
    ) -> tuple[Stage, TensorInfo, Tensor, Tensor | None]:
        weight: Tensor | None = self._parameters.get(self.stored_weight)  # past nn.Module's slow look-up
        layout = bias = None
        is_pieces = weight is None and is_split(self)
        if weight is None and not is_pieces:
            weight = self.linear_weight  # a parametrization computes it at each read
        owner = self.weight_owners(0)[0] if is_pieces else weight
        if type(owner) not in LOCAL and is_distributed(owner):
            layout, weight, bias = distributed_linear.local_operands(self, info.layout)
        else:
            if weight is None:
                weight = self.linear_weight
            if not self.return_bias:
                bias = self._parameters["bias"] if "bias" in self._parameters else self.bias
        require_fit(self, info, weight, bias)
        quantizer = quantizer_of(weight) if isinstance(weight, QuantizedTensor) else None
        is_joined = type(weight) is not nn.Parameter
        stage = self.plans.stage(info, weight.requires_grad, quantizer, weight.dtype, layout, is_joined)
        if is_first_microbatch is not None or self.fuse_wgrad_accumulation or self.delay_wgrad_compute:
            stage = self.plans.variant(stage, is_first_microbatch)
        tracked = info.requires_grad
        if not tracked and torch.is_grad_enabled():
            tracked = weight.requires_grad or (bias is not None and bias.requires_grad)
        rows = None if self.layout.sequence_parallel else info.rows
        output = TensorInfo(info.device, info.dtype, weight.shape[0], rows, tracked, None, info.index)
        return stage, output, weight, bias

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if not is_distributed(param):
            return
        delayed_states.save(self)  # torch's styles would treat a submodule of a linear as a linear
        self.forget_plans()
        if is_split(self):
            share_buffer(self)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        if self.saved_states and any(map(is_distributed, self._parameters.values())):
            self.plans.prepare(self.recipe)  # states that `register_parameter` put aside
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def output_layout(self, x: "ActivationLayout") -> "ActivationLayout":
        return distributed_linear.placed(self, x).output

    @property
    def distributes(self) -> tuple[str, ...]:
        is_plain = self.layout.mode is None and not self.return_bias and bool(self.stored_weight)
        return tuple(self._parameters) if is_plain and not isinstance(self.weight_owners(0)[0], QuantizedTensor) else ()

    def operands(
        self, stage: LinearStage, info: TensorInfo, extra: Sequence[object], weight: Tensor, bias: Tensor | None
    ) -> Sequence[Tensor | None]:
        dtype, plan = info.dtype, stage.plan
        if plan.layout.group:
            self.require_same_formats(plan, info.device)
        if weight.dtype is not dtype and not isinstance(weight, QuantizedTensor):  # planes are cast where they are read
            weight = weight.to(dtype)
        if bias is not None and bias.dtype is not dtype:
            bias = bias.to(dtype)
        count = plan.seeds
        return weight, bias, seeds.take(getattr(self, seeds.BUFFER), count) if count else None


class Linear(PlannedLinear, nn.Linear):
    """nn.Linear with a recipe. Without a recipe only `autocast` quantizes.

    - `params_dtype` and `device`: torch's defaults if None. On "meta", call `to_empty`, then `reset_parameters`.
    - `init_method` fills the weight in place. `return_bias` returns the bias instead of adding it.
    - `parameters_split` names pieces of out_features, equal ones or of these sizes. Each becomes a parameter
      `<name>_weight`.
    - `parallel_mode` "column" splits out_features over the ranks of `tp_group`, "row" in_features; `tp_size` may
      repeat its size. `sequence_parallel` keeps activations outside as shards of their rows.
    - `fuse_wgrad_accumulation` adds weight gradients to `weight.main_grad`. `delay_wgrad_compute` leaves them to
      `backward_dw`. `save_original_input` keeps the input itself for backward and encodes it there.
    """

    def __init__(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        parameters_split: Splits = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], object] | None = None,
        name: str = "",
        recipe: RecipeLike | None = None,
        parallel_mode: str | None = None,
        tp_group: "ProcessGroup | None" = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        layout = parallel_layout(parallel_mode, tp_group, sequence_parallel, tp_size)
        local_in, local_out = local_sizes(layout, in_features, out_features, tp_group)
        if parameters_split is not None and (fuse_wgrad_accumulation or delay_wgrad_compute):
            raise UserError(
                "parameters_split gives its gradients to autograd; leave it out to accumulate or delay them"
            )
        keep_initialiser(self, init_method)
        super().__init__(local_in, local_out, bias=bias, device=device, dtype=params_dtype)
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = fuse_wgrad_accumulation, delay_wgrad_compute
        self.save_original_input = save_original_input
        self.layout = layout
        self.adopt(recipe or HIGH_PRECISION, (), name)
        split_parameters(self, parameters_split, out_features)
        quantize_weights(self)

    def reset_parameters(self) -> None:
        """Fill the parameters anew, as at construction; a quantized weight is written in its formats."""
        initialise(self, None if is_split(self) else super().reset_parameters)

    def weight_owners(self, member: int) -> tuple[nn.Parameter, ...]:
        return pieces(self, "weight") if is_split(self) else super().weight_owners(member)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias") and is_split(self) and name not in self._parameters:
            return whole_of(self, name)
        return super().__getattr__(name)


class BasicLinear(Linear):
    """A linear without a bias."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        if options.pop("bias", False):
            raise UserError("BasicLinear has no bias; use Linear, or put ops.Bias behind it")
        super().__init__(in_features, out_features, bias=False, **options)
