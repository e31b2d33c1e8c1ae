"""Low-rank adapters beside a linear (LoRA): two small linears, recognized by their names or by their sizes."""

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


def adapters(model: nn.Module) -> dict[str, int]:
    """The rank of each linear of a low-rank adapter, by full name."""
    modules = dict(model.named_modules())
    linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    low_rank = {name for name in linears if set(STEPS) & set(name.split("."))}
    for owner, parts in _by_owner(linears, modules).items():
        low_rank |= set(_beside_their_product(parts))
        if type(modules[owner]).__module__.startswith(PEFT):
            low_rank |= {n for n, linear in parts.items() if _is_low(linear) and not set(FULL) & set(n.split("."))}
    return {n: min(linear.in_features, linear.out_features) for n, linear in linears.items() if n in low_rank}


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


def _beside_their_product(linears: Linears) -> Iterator[str]:
    """Two linears (in, rank) and (rank, out) of a module that holds one of (in, out) too."""
    sizes = {(linear.in_features, linear.out_features) for linear in linears.values()}
    for down_name, down in linears.items():
        for up_name, up in linears.items():
            rank, product = down.out_features, (down.in_features, up.out_features)
            if rank == up.in_features and LOW * rank <= min(product) and product in sizes:
                yield from (down_name, up_name)


def _is_low(linear: nn.Linear) -> bool:
    small, large = sorted((linear.in_features, linear.out_features))
    return LOW * small <= large
