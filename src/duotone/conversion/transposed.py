"""Linears that store their weight as (in_features, out_features), such as the Conv1D of transformers in GPT-2."""

from torch import Tensor, nn

from duotone.errors import UserError
from duotone.modules.linear import PlannedLinear
from duotone.pipeline.titles import title
from duotone.tensor import QuantizedTensor

CLASSES = {"transformers.pytorch_utils.Conv1D"}


class TransposedLinear(PlannedLinear):
    """Mixed in before such a linear, which then follows plans. Its products read a view of the parameter."""

    stored_weight = ""

    @property
    def linear_weight(self) -> Tensor:
        return self.weight.t()

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        view = self.weight.detach().t().requires_grad_(self.weight.requires_grad)
        return (view,)  # type: ignore[return-value]

    @property
    def weight_parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.weight,)

    def weight_owners(self, member: int) -> tuple[nn.Parameter, ...]:
        return (self.weight,)

    def refuse_held(self, weight: nn.Parameter) -> None:
        if isinstance(weight, QuantizedTensor):
            raise UserError(
                f"{title(self)} stores its weight transposed, so it cannot be held quantized; give it "
                "format 'identity' by a rule, or leave the parameters as they are"
            )


def is_transposed(module: nn.Module) -> bool:
    """Whether calls of the module multiply by a weight that is stored transposed, and do nothing else."""
    kinds = [kind for kind in type(module).__mro__ if f"{kind.__module__}.{kind.__qualname__}" in CLASSES]
    return bool(kinds) and type(module).forward is kinds[0].forward
