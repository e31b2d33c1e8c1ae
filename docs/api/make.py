"""Write the pages of the reference: one entry for each public name.

python docs/api/make.py
"""

import ast
import importlib
import types
import typing
from collections.abc import Iterator
from pathlib import Path

MODULES = {
    "duotone": "What training code calls. Formats, recipes, statistics, ops and the optimizer have pages of their own.",
    "duotone.formats": "How a matrix is stored in fewer bits.",
    "duotone.recipes": "Which format each tensor gets.",
    "duotone.observe": "What quantization loses.",
    "duotone.ops": "Operations that run as one pipeline in `ops.Sequential`.",
    "duotone.optim": "The optimizer of quantized parameters.",
    "duotone_lab": "What memory a model holds. The command line has [its page](../command-line.md).",
    "duotone.compat.te": "Scripts for [Transformer Engine](../from-te.md).",
    "duotone.compat.torchao": "Scripts for [torchao](../from-torchao.md).",
    "duotone.integrations.transformers": "What surrounds models of transformers, which has to be installed.",
    "duotone.integrations.accelerate": "One line for [Accelerate](../trainers/accelerate.md).",
    "duotone.integrations.lightning": "Plugins for [Lightning and Fabric](../trainers/lightning.md).",
}
READ = {
    "duotone.integrations.torchtitan": "Entries of [torchtitan](../trainers/torchtitan.md), which has to be installed."
}
"""Modules that the site cannot import, because their library is absent: their pages are read from the source."""
SOURCE = Path(__file__).parents[2] / "src"


def names(module: str) -> list[str]:
    """The public names of a module that get an entry on its page: all but modules and aliases of types."""
    source = importlib.import_module(module)
    own = [name for name, value in vars(source).items() if getattr(value, "__module__", "") == module]
    public = {name: getattr(source, name) for name in getattr(source, "__all__", own) if not name.startswith("_")}
    values = {name: value for name, value in public.items() if not isinstance(value, types.ModuleType)}
    return sorted((n for n, value in values.items() if typing.get_origin(value) is None), key=str.lower)


def page(module: str) -> str:
    if module in READ:
        return f"# {module}\n\n{READ[module]}\n" + "".join(_entries(_tree(module), module, "##"))
    entries = [f"::: {module}.{name}\n" for name in names(module)]
    return "\n".join([f"# {module}\n", f"{MODULES[module]}\n", *entries])


def _tree(module: str) -> ast.Module:
    return ast.parse(SOURCE.joinpath(*module.split(".")).with_suffix(".py").read_text())


def _entries(scope: ast.Module | ast.ClassDef, path: str, heading: str) -> Iterator[str]:
    """The public classes and functions of a scope that have a docstring: heading, signature, docstring."""
    for node in scope.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            name = f"{path}.{node.name}"
            if not node.name.startswith("_"):
                code = ast.unparse(node).splitlines()
                signature = next(line for line in code if line.lstrip().startswith(("class ", "def "))).rstrip(":")
                yield f"\n{heading} `{name}` {{#{name}}}\n\n    {signature}\n\n{text}\n"
                if isinstance(node, ast.ClassDef):
                    yield from _entries(node, name, f"{heading}#")


if __name__ == "__main__":
    for module in (*MODULES, *READ):
        Path(__file__).with_name(f"{module.rpartition('.')[2]}.md").write_text(page(module))
