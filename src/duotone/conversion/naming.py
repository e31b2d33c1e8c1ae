"""Names and sites: which module of a model is which, for roles, rules and plans."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from duotone.errors import UserError
from duotone.recipes.roles import Site

WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module"}
"""The child of a module that `torch.compile` or torch's `checkpoint_wrapper` made."""


def require_model(taker: str, value: object) -> None:
    """UserError unless `value` is a model. `taker` names the function in the message."""
    if isinstance(value, type) or not isinstance(value, nn.Module):
        got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise UserError(f"{taker} takes a torch.nn.Module; got {got}: give the model itself")


def require_masters(masters: object) -> None:
    """UserError unless `masters` is a dict of tensors."""
    if not isinstance(masters, Mapping) or not all(isinstance(master, Tensor) for master in masters.values()):
        raise UserError("masters is a dict of tensors by full parameter name; got other values")


def clean(name: str) -> str:
    """A name below a model without what wrappers of torch add: each name in `WRAPPED`."""
    return ".".join(step for step in name.split(".") if step not in WRAPPED)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with their full names, which are those of the model without the wrappers of torch."""
    for name, module in model.named_modules():
        if WRAPPED.isdisjoint(module._modules.keys()):  # of a scripted module it is a list
            yield clean(name), module


def assign_names(root: nn.Module) -> nn.Module:
    """Give every module below `root` that has roles its full name and place; returns `root`.

    `convert` does this by itself; models built from Duotone's modules call it once, so that rules by name or layer
    apply.
    """
    require_model("assign_names", root)
    sites = sites_of(root)
    for name, module in named_modules(root):
        take = getattr(module, "take_name", None)
        if callable(take):
            take(name or type(module).__name__, sites[name])
    return root


def sites_of(root: nn.Module) -> dict[str, Site]:
    """The site of each module by full name: its index in the outermost numbered stack that holds it."""
    modules = dict(named_modules(root))
    sites = {}
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        shape = tuple(weight.shape[-2:]) if isinstance(weight, Tensor) and not is_lazy(weight) else None
        sites[name] = Site(*_stack(name, modules), shape=shape)
    return sites


def _stack(name: str, modules: dict[str, nn.Module]) -> tuple[int | None, int | None]:
    steps = name.split(".")
    for at, step in enumerate(steps):
        holder = modules.get(".".join(steps[:at]))
        if step.isdigit() and isinstance(holder, nn.ModuleList | nn.Sequential):
            return int(step), len(holder)
    return None, None
