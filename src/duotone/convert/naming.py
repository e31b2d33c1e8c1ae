"""Names and sites: which module of a model is which, for roles, rules and plans."""

from torch import Tensor, nn

from duotone.recipes.roles import Site


def name_modules(root: nn.Module) -> nn.Module:
    """Give every module below `root` that has roles its full name and place; returns `root`.

    `convert` does this by itself; models built from Duotone's modules call it once, so that rules by name or layer
    apply.
    """
    sites = sites_of(root)
    for name, module in root.named_modules():
        take = getattr(module, "take_name", None)
        if callable(take):
            take(name or type(root).__name__, sites[name])
    return root


def sites_of(root: nn.Module) -> dict[str, Site]:
    """The site of each module by full name: its index in the outermost numbered stack that holds it."""
    modules = dict(root.named_modules())
    sites = {}
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        shape = tuple(weight.shape[-2:]) if isinstance(weight, Tensor) else None
        sites[name] = Site(*_stack(name, modules), shape=shape)
    return sites


def _stack(name: str, modules: dict[str, nn.Module]) -> tuple[int | None, int | None]:
    steps = name.split(".")
    for at, step in enumerate(steps):
        holder = modules.get(".".join(steps[:at]))
        if step.isdigit() and isinstance(holder, nn.ModuleList | nn.Sequential):
            return int(step), len(holder)
    return None, None
