"""Write the pages of the reference: one entry for each public name.

python docs/api/make.py
"""

import importlib
import types
import typing
from pathlib import Path

MODULES = {
    "duotone": "What training code calls. Formats, recipes, statistics, ops and the optimizer have pages of their own.",
    "duotone.formats": "How a matrix is stored in fewer bits.",
    "duotone.recipes": "Which format each tensor gets.",
    "duotone.observe": "What quantization loses, and what memory it holds.",
    "duotone.ops": "Operations that run as one pipeline in `ops.Sequential`.",
    "duotone.optim": "The optimizer of quantized parameters.",
    "duotone.compat.te": "Scripts for [Transformer Engine](../from-te.md).",
    "duotone.compat.torchao": "Scripts for [torchao](../from-torchao.md).",
    "duotone.integrations.transformers": "What surrounds models of transformers, which has to be installed.",
    "duotone.integrations.accelerate": "One line for [Accelerate](../trainers.md).",
    "duotone.integrations.lightning": "Plugins for [Lightning and Fabric](../trainers.md).",
}


def names(module: str) -> list[str]:
    """The public names of a module that get an entry on its page: all but modules and aliases of types."""
    public = vars(importlib.import_module(module))
    chosen = public.get("__all__") or [n for n, value in public.items() if getattr(value, "__module__", "") == module]
    values = {n: public[n] for n in chosen if not n.startswith("_") and not isinstance(public[n], types.ModuleType)}
    return sorted((n for n, value in values.items() if typing.get_origin(value) is None), key=str.lower)


def page(module: str) -> str:
    entries = [f"::: {module}.{name}\n" for name in names(module)]
    return "\n".join([f"# {module}\n", f"{MODULES[module]}\n", *entries])


if __name__ == "__main__":
    for module in MODULES:
        Path(__file__).with_name(f"{module.rpartition('.')[2]}.md").write_text(page(module))
