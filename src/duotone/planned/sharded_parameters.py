"""ShardedParameters: what a module does where its parameters become DTensors, by FSDP2 or `parallelize_module`."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from duotone.errors import UserError
from duotone.pipeline.op import is_distributed
from duotone.tensor.fsdp import tell_shards


class ShardedParameters:
    """Mixed in before an nn.Module."""

    _parameters: dict[str, nn.Parameter | None]
    distributes: tuple[str, ...] = ()
    """The parameters that may become DTensors otherwise than by FSDP2."""

    def __setattr__(self, name: str, value: object) -> None:
        """As nn.Module. FSDP2 sets a shard like this where a module has a `__setattr__` that is not nn.Module's."""
        if isinstance(value, nn.Parameter) and is_distributed(value) and name in self.__dict__.get("_parameters", ()):
            self._parameters[name] = value  # type: ignore[assignment]
        else:
            super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module. UserError where a parameter would become a DTensor that has to stay plain."""
        if is_distributed(param) and not is_distributed(self._parameters.get(name)) and name not in self.distributes:
            self._refuse(name)
        super().register_parameter(name, param)  # type: ignore[misc]

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:
        """As nn.Module. FSDP2 calls it as soon as it has replaced a parameter by its shard, which has to know so."""
        tell_shards(self._parameters.values())
        return super().register_load_state_dict_post_hook(hook)  # type: ignore[misc]

    def require_whole(self, weights: Iterable[Tensor]) -> None:
        """UserError where a weight is a DTensor in a forward: FSDP2 has gathered its own by then."""
        if any(is_distributed(weight) for weight in weights):
            self._refuse("weight")

    def _refuse(self, name: str) -> None:
        raise UserError(
            f"{self.__dict__.get('module_name', type(self).__name__)} takes no {name} that is a DTensor; give "
            "parallelize_module plain linears whose weights are whole and not quantized, or leave the module out and "
            "build it with parallel_mode=, tp_group="
        )
