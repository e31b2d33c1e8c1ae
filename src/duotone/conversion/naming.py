"""Names and sites: which module of a model is which, for roles, rules and plans."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from duotone.errors import UserError
from duotone.recipes.roles import Site

WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module"}
"""The child of a module that `torch.compile` or torch's `checkpoint_wrapper` made."""

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
"""Classes of torch that hold a whole model as their child `module`, a name that modules of others have too."""


def wrapped_by(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper of torch holds, whose names its parts keep. None if `module` is no wrapper."""
    children = module._modules  # of a scripted module it is no dict
    child = "module" if isinstance(module, WRAPPERS) else next((name for name in WRAPPED if name in children), None)
    return None if child is None else children[child]


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
    """Yield the modules with their full names, which are those of the model without the wrappers of torch."""
    names, wrappers = {"": ""}, set[str]()
    for path, module in model.named_modules():
        owner, _, child = path.rpartition(".")
        if path:
            names[path] = names[owner] if owner in wrappers else f"{names[owner]}.{child}".removeprefix(".")
        if wrapped_by(module) is not None:
            wrappers.add(path)
        else:
            yield names[path], module


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
    """Return the site of each module by full name: its index in the outermost numbered stack that holds it.

    An nn.Sequential that holds one model is no stack: layers are counted inside of it, if there are any.
    """
    modules = dict(named_modules(root))
    sites, outside = {}, _steps_to_model(modules)
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        shape = tuple(weight.shape[-2:]) if isinstance(weight, Tensor) and not is_lazy(weight) else None
        sites[name] = Site(*_stack(name, modules, outside), shape=shape)
    return sites


STACKS = (nn.ModuleList, nn.Sequential)


def _steps_to_model(modules: Mapping[str, nn.Module]) -> int:
    """Return how many nn.Sequential are around the one model that they hold. 0 if it has no stack of layers."""
    around = [""]
    while isinstance(holder := modules.get(around[-1]), nn.Sequential) and len(holder) == 1:
        around.append(".".join(["0"] * len(around)))
    inside = modules.keys() - around[:-1]
    return len(around) - 1 if any(isinstance(modules[name], STACKS) for name in inside) else 0


def _stack(name: str, modules: Mapping[str, nn.Module], outside: int) -> tuple[int | None, int | None]:
    steps = name.split(".")
    for at in range(outside, len(steps)):
        holder = modules.get(".".join(steps[:at]))
        if steps[at].isdigit() and isinstance(holder, STACKS):
            return int(steps[at]), len(holder)
    return None, None
