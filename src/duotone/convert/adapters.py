"""Low-rank adapters beside a linear (LoRA): small products of a trained few parameters, told apart by structure."""

from collections.abc import Mapping

from torch import nn

STEPS = ("lora_A", "lora_B", "lora_a", "lora_b", "lora_down", "lora_up")
"""What libraries call the two linears of an adapter, or what holds them."""

PEFT = "peft.tuners."
FULL = ("base_layer", "modules_to_save", "original_module")
"""What PEFT's layers hold besides adapters: linears of the model."""

CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


def adapters(model: nn.Module) -> dict[str, str]:
    """The linears of low-rank adapters by full name, with their rank."""
    modules = dict(model.named_modules())
    linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    return {
        name: f"a low-rank adapter of rank {min(module.in_features, module.out_features)}"
        for name, module in linears.items()
        if set(STEPS) & set(name.split(".")) or (_is_low(module) and _in_layer_of_peft(name, modules))
    }


def _is_low(linear: nn.Linear) -> bool:
    small, large = sorted((linear.in_features, linear.out_features))
    return 4 * small <= large


def _in_layer_of_peft(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the linear is of a layer of PEFT's itself; PEFT is told by its name, and not imported."""
    steps = name.split(".")
    for at in range(len(steps) - 1, 0, -1):
        owner = modules[".".join(steps[:at])]
        if not isinstance(owner, CONTAINERS):
            return type(owner).__module__.startswith(PEFT) and steps[at] not in FULL
    return False
