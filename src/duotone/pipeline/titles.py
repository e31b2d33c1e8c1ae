"""How errors and warnings name a module."""

import sys

from torch import nn

from duotone.numbered import constant_in_traces, never_compiled

PLACES = "torch.nn.modules.module", "duotone."
"""Only frames of these Python modules are searched for a model. To read those of a user would keep their variables."""


def title(owner: object) -> str:
    """The name of a module in messages: its full name in the model, as `assign_names` or a running call tells it.

    Only messages ask for it: in a trace the name of a module would be a guard.
    """
    attributes = getattr(owner, "__dict__", {})
    site = attributes.get("site")
    if (site is None or not site.named) and isinstance(owner, nn.Module) and (path := _path_in_call(id(owner))):
        return path
    return attributes.get("module_name") or ("a module" if owner is None else type(owner).__name__)


@constant_in_traces
@never_compiled
def _path_in_call(module: int) -> str:
    """The name of a module below the outermost model whose call, or function of Duotone, runs; "" if none has it.

    `module`: its `id`. A trace of torch 2.11 takes no module as an argument of a constant function.
    """
    frame, path = sys._getframe(), ""
    while frame is not None:
        is_looked_at = frame.f_globals.get("__name__", "").startswith(PLACES)
        for model in (frame.f_locals.get("self"), frame.f_locals.get("model")) if is_looked_at else ():
            if isinstance(model, nn.Module) and id(model) != module:
                path = next((name for name, child in model.named_modules() if id(child) == module), path)
        frame = frame.f_back
    return path.replace("_orig_mod.", "")
