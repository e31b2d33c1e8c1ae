"""LayerNormLinear and LayerNormMLP: a norm, and one linear or two with an activation between them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from duotone.comm import SummedOver
from duotone.errors import UserError
from duotone.modules import boundary
from duotone.modules.activation import ActivationOp
from duotone.modules.extra_tensors import MakeExtraOutput
from duotone.modules.foreign_states import translate
from duotone.modules.fused_module import FusedModule, Output
from duotone.modules.linear import Linear
from duotone.modules.norm import NormOp
from duotone.modules.planned import below
from duotone.modules.sequential import Member, is_plain, run_modules
from duotone.modules.split_parameters import fit_pieces
from duotone.modules.weights import materialise
from duotone.pipeline.op import Op, run
from duotone.pipeline.slot_roles import InnerBoundaryRoles
from duotone.pipeline.titles import title
from duotone.recipes.recipe import RecipeLike
from duotone.recipes.roles import QuantizerRole, Site
from duotone.sharding.dtensors import is_distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


HALVES = ("gate", "up")
"""The pieces of fc1 with `split_gate`, in the order of its rows."""


class LayerNormLinear(Linear):
    """Linear over a normalised input. Parameters of the norm are `layer_norm_weight` and `layer_norm_bias`.

    `normalization` is "LayerNorm" or "RMSNorm"; `zero_centered_gamma` lets gamma stand for 1 + gamma. With
    `return_layernorm_output` the normalised input follows the output. All else is Linear's.
    """

    _norm: NormOp | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **linear: Any,
    ) -> None:
        if linear.get("parallel_mode") == "row":
            raise UserError("LayerNormLinear normalises whole rows; use parallel_mode 'column', or a norm and a Linear")
        super().__init__(in_features, out_features, **linear)
        self._norm = norm = NormOp(self, normalization, eps, zero_centered_gamma, "layer_norm_")
        norm.make_parameters(self.in_features, linear.get("params_dtype"), linear.get("device"))
        self._sum_gradients()
        self._ops: tuple[Op, ...] = (norm, MakeExtraOutput(), self) if return_layernorm_output else (norm, self)

    def forward(
        self,
        x: Tensor,
        *,
        is_first_microbatch: bool | Tensor | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Output:
        """(*lead, in_features) -> (*lead, out_features), then the bias and the normalised input if asked for.

        `fp8_output` and `fp8_grad` are those of Linear; the gradient is that of the norm's input.
        """
        if fp8_output or fp8_grad:
            outputs = boundary.run_with_boundary(self._ops, x, is_first_microbatch, self, fp8_output, fp8_grad)
        else:
            outputs = run(self._ops, x, (), is_first_microbatch, self)
        y, *normalised = outputs if isinstance(outputs, tuple) else (outputs,)
        bias = [self.bias] if self.return_bias else []
        return (y, *bias, *normalised) if bias or normalised else y

    def set_tensor_parallel_group(self, tp_group: "ProcessGroup | None") -> None:
        """Communicate in another group from the next forward on."""
        super().set_tensor_parallel_group(tp_group)
        self._sum_gradients()

    def _sum_gradients(self) -> None:
        """With sequence parallelism the norm sees the rows of one rank."""
        assert self._norm is not None
        self._norm.gradients = SummedOver(self.layout.group) if self.layout.sequence_parallel else None

    @property
    def return_layernorm_output(self) -> bool:
        """Whether calls also return what the linear multiplies."""
        return len(self._ops) > 2

    def normalised(self, x: Tensor) -> Tensor:
        """What the linear multiplies: x (*lead, in_features) after the norm."""
        return run(self._ops[:1], x, (), None, self)

    @property
    def pipeline(self) -> tuple[Op, ...] | None:
        more = self.return_bias or self.return_layernorm_output
        return None if more or type(self).forward is not LayerNormLinear.forward else self._ops

    @property
    def distributes(self) -> tuple[str, ...]:
        return () if self.return_layernorm_output else super().distributes

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Like Linear. Styles cut the parameters of the norm with those of the linear: here they become whole again."""
        super().register_parameter(name, self._with_whole_norm(name, param))

    def _with_whole_norm(self, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if not is_distributed(param):
            return param
        if any(placement.is_shard(1) for placement in param.placements):
            raise UserError(f"{title(self)} normalises whole rows; use ColwiseParallel, or a norm and a Linear")
        if self._norm is None or name not in self._norm.names or name not in self.distributes:
            return param  # type: ignore[return-value]
        from duotone.sharding.activation_layout import whole  # loads DTensor

        return nn.Parameter(whole(param), param.requires_grad)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self._norm is not None:  # the constructor of Linear comes here first
            self._norm.reset()


class LayerNormMLP(InnerBoundaryRoles, FusedModule):
    """fc2(activation(fc1(norm(x)))), x (*lead, hidden_size) -> the same shape.

    `activation` is one of `duotone.dispatch.activations.ACTIVATIONS`; gated ones make fc1 twice as wide.
    `normalization` is "LayerNorm" or "RMSNorm", with the parameters `layer_norm_weight` and `layer_norm_bias`. fc1 and
    fc2 are Linear modules whose roles are named `<name>.fc1` and `<name>.fc2`; with `set_parallel_mode` fc1 is column-
    and fc2 row-parallel. With `split_gate` the halves of a gated fc1 are parameters, `fc1.gate_weight` and
    `fc1.up_weight` (and biases), which the styles of `parallelize_module` may cut. With `checkpoint` only the input is
    kept, and backward runs the forward again. State dicts that name `fc1_weight` instead of `fc1.weight` load too, and
    those with the other `split_gate`. UserError for `split_gate` without a gate.
    """

    def __init__(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        zero_centered_gamma: bool = False,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        init_method: Callable[[Tensor], object] | None = None,
        output_layer_init_method: Callable[[Tensor], object] | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        set_parallel_mode: bool = False,
        tp_group: "ProcessGroup | None" = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        checkpoint: bool = False,
        split_gate: bool = False,
        name: str = "",
        recipe: RecipeLike | None = None,
    ) -> None:
        super().__init__()
        self.activation = ActivationOp(activation, activation_params)
        self.checkpoint = checkpoint
        self._norm = NormOp(self, normalization, eps, zero_centered_gamma, "layer_norm_")
        self._norm.make_parameters(hidden_size, params_dtype, device)
        self._norm.gradients = SummedOver.ranks(tp_group if set_parallel_mode and sequence_parallel else None)
        self._head = (self._norm, MakeExtraOutput()) if return_layernorm_output else (self._norm,)
        linear: dict[str, Any] = {"bias": bias, "params_dtype": params_dtype, "device": device, "recipe": recipe}
        linear |= {"tp_group": tp_group if set_parallel_mode else None, "tp_size": tp_size}
        linear |= {"sequence_parallel": sequence_parallel, "fuse_wgrad_accumulation": fuse_wgrad_accumulation}
        linear |= {"delay_wgrad_compute": delay_wgrad_compute}
        names, modes = below(name, ("fc1", "fc2")), ("column", "row") if set_parallel_mode else (None, None)
        first = {**linear, "name": names[0], "parallel_mode": modes[0], "init_method": init_method}
        self.fc1 = self._first(hidden_size, ffn_hidden_size, split_gate, first)
        linear |= {"init_method": output_layer_init_method or init_method, "return_bias": return_bias}
        self.fc2 = Linear(ffn_hidden_size, hidden_size, name=names[1], parallel_mode=modes[1], **linear)
        self._wire(*names)

    def _first(self, width: int, hidden: int, split_gate: bool, linear: dict[str, Any]) -> Linear:
        """What the activation reads. UserError for `split_gate` without a gate."""
        gated = self.activation.gated
        if split_gate and not gated:
            raise UserError(
                f"split_gate is for gated activations, as swiglu; got {self.activation.kind!r}: leave it out"
            )
        fc1 = Linear(width, hidden * (1 + gated), parameters_split=HALVES if split_gate else None, **linear)
        if gated and not split_gate:
            fc1.row_order = "its rows are a gate and what it gates; build the module with split_gate=True"
        return fc1

    @property
    def pipeline(self) -> tuple[Member, ...] | None:
        """The ops that stand for this module in a larger pipeline; None if it does more than they do."""
        more = self.return_bias or self.return_layernorm_output or self.checkpoint
        plain = not more and type(self).forward is LayerNormMLP.forward
        return self.ops if plain and is_plain(self.fc1, self.activation, self.fc2) else None

    @property
    def return_bias(self) -> bool:
        """Whether calls return the bias of fc2 instead of adding it. It may change between calls."""
        return getattr(self.fc2, "return_bias", False)

    @return_bias.setter
    def return_bias(self, returns: bool) -> None:
        self.fc2.return_bias = returns

    @property
    def return_layernorm_output(self) -> bool:
        """Whether calls also return what fc1 multiplies."""
        return len(self._head) > 1

    @property
    def ops(self) -> tuple[Op, ...]:
        """What runs, in order."""
        children = self._modules  # past nn.Module's slow look-up
        return (*self._head, children["fc1"], children["activation"], children["fc2"])  # type: ignore[return-value]

    def forward(self, x: Tensor, *, is_first_microbatch: bool | Tensor | None = None) -> Output:
        """(*lead, hidden_size) -> the same, then the bias of fc2 and the normalised input if they are asked for."""
        if self.checkpoint and torch.is_grad_enabled():
            return checkpoint(self._forward, x, is_first_microbatch, use_reentrant=False)
        return self._forward(x, is_first_microbatch)

    def _forward(self, x: Tensor, is_first_microbatch: bool | Tensor | None) -> Output:
        ops = self.ops
        if is_plain(*ops[-3:]):
            outputs = run(ops, x, (), is_first_microbatch, self)
            y, *normalised = outputs if isinstance(outputs, tuple) else (outputs,)
            bias = [self.fc2.bias] if self.return_bias else []
        else:  # hooks need calls, and a replacement of a linear may be no op
            y, normalised = run_modules(ops, x, (), is_first_microbatch, self)
            bias = [normalised.pop()] if self.return_bias else []
        return (y, *bias, *normalised) if bias or normalised else y

    def take_name(self, name: str, site: Site) -> None:
        """The full name in the model: fc1 and fc2 are below it."""
        self._wire(f"{name}.fc1", f"{name}.fc2")

    def _wire(self, fc1: str, fc2: str) -> None:
        """Tell the linears who consumes the tensors between them."""
        self.fc1.output_quantizer_role = QuantizerRole("linear", "input", fc2)
        self.fc2.grad_input_quantizer_role = QuantizerRole("linear", "grad_output", fc1)

    def set_tensor_parallel_group(self, tp_group: "ProcessGroup") -> None:
        super().set_tensor_parallel_group(tp_group)
        self._norm.set_tensor_parallel_group(tp_group)

    def reset_parameters(self) -> None:
        """Initialize all parameters again. Parameters on meta are materialized."""
        materialise(self)
        self._norm.reset()
        super().reset_parameters()

    @property
    def at_boundary(self) -> tuple[Linear, Linear]:
        return self.fc2, self.fc1

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        translate(state_dict, prefix, ("fc1.", "fc2."))
        for part in ("fc1", "fc2"):
            for kind in ("weight", "bias"):
                old, new = f"{prefix}{part}_{kind}", f"{prefix}{part}.{kind}"
                if old in state_dict and new not in state_dict:
                    state_dict[new] = state_dict.pop(old)
        for kind in ("weight", "bias"):
            fit_pieces(self.fc1, kind, state_dict, f"{prefix}fc1.", HALVES)
        super()._load_from_state_dict(state_dict, prefix, *args)
