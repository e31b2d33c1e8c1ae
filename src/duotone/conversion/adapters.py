"""Low-rank adapters beside a linear (LoRA): small products of a trained few parameters, told apart by structure."""

from collections.abc import Iterator, Mapping

from torch import nn

STEPS = ("lora_A", "lora_B", "lora_a", "lora_b", "lora_down", "lora_up")
"""What libraries call the two linears of an adapter, or what holds them."""

PEFT = "peft.tuners."
FULL = ("base_layer", "modules_to_save", "original_module")
"""What PEFT's layers hold besides adapters: linears of the model."""

LOW = 4
"""How many times a rank fits into the sizes of the linear beside it, at least."""

Linears = dict[str, nn.Linear]


def adapters(model: nn.Module) -> dict[str, str]:
    """The linears of low-rank adapters by full name, with their rank."""
    modules = dict(model.named_modules())
    linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    found = {name for name in linears if set(STEPS) & set(name.split("."))}
    for owner, own in _by_owner(linears, modules).items():
        found |= set(_beside_their_product(own))
        if type(modules[owner]).__module__.startswith(PEFT):
            found |= {name for name, linear in own.items() if _is_low(linear) and not set(FULL) & set(name.split("."))}
    ranks = {name: min(linear.in_features, linear.out_features) for name, linear in linears.items()}
    return {name: f"a low-rank adapter of rank {rank}" for name, rank in ranks.items() if name in found}


def _by_owner(linears: Linears, modules: Mapping[str, nn.Module]) -> dict[str, Linears]:
    """The linears of each module that holds some, directly or in lists and dictionaries."""
    owners: dict[str, Linears] = {}
    for name, linear in linears.items():
        owner = name.rpartition(".")[0]
        while owner and isinstance(modules[owner], nn.ModuleDict | nn.ModuleList):
            owner = owner.rpartition(".")[0]
        if not isinstance(modules[owner], nn.ModuleDict | nn.ModuleList | nn.Sequential):
            owners.setdefault(owner, {})[name] = linear
    return owners


def _beside_their_product(own: Linears) -> Iterator[str]:
    """Two linears (in, rank) and (rank, out) of a module that holds one of (in, out) too."""
    sizes = {(linear.in_features, linear.out_features) for linear in own.values()}
    for down_name, down in own.items():
        for up_name, up in own.items():
            rank, product = down.out_features, (down.in_features, up.out_features)
            if rank == up.in_features and LOW * rank <= min(product) and product in sizes:
                yield from (down_name, up_name)


def _is_low(linear: nn.Linear) -> bool:
    small, large = sorted((linear.in_features, linear.out_features))
    return LOW * small <= large
