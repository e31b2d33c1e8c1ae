"""Output heads: the projections to a vocabulary or to classes, without running the model, which may be on meta."""

import re
from collections import Counter
from collections.abc import Mapping

from torch import nn

NAMES = ("lm_head", "output_head", "output", "head", "embed_out", "unembed", "to_logits", "classifier", "score")
"""What the last linear of a whole model is called where it is its head."""

PARTS = ("attention", "attn", "mlp", "feedforward", "ffn")
"""How names of parts of a layer end: one that is all that a model holds is a part still, and no wrapper of a model."""


def heads(model: nn.Module) -> dict[str, str]:
    """Output heads by full name, with the evidence. They include embeddings that serve as heads."""
    modules = dict(model.named_modules())
    return _named(model) | _sized(modules) | _tied(modules) | _declared(modules)


def _declared(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """What `get_output_embeddings` of any module returns (Hugging Face's name). A wrapper of adapters contains it."""
    finders = (getattr(module, "get_output_embeddings", None) for module in modules.values())
    declared = {id(getattr(head, "base_layer", head)) for head in [find() for find in finders if callable(find)]}
    return {name: "get_output_embeddings() gives it" for name, module in modules.items() if id(module) in declared}


def _tied(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    embeddings = {id(module.weight): name for name, module in modules.items() if isinstance(module, nn.Embedding)}
    linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    owners = {name: embeddings.get(id(module._parameters.get("weight"))) for name, module in linears.items()}
    return {name: f"its weight is that of {owner}" for name, owner in owners.items() if owner is not None}


def _sized(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Linears with as many outputs as an embedding has entries.

    If a linear also has so many inputs, the number is a width of the model too. Then only the last linear counts, and
    only for the largest embedding. Linears at the same place of several layers are no heads.
    """
    entries = {module.num_embeddings: name for name, module in modules.items() if isinstance(module, nn.Embedding)}
    linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    widths = {module.in_features for module in linears.values()}
    sized = [name for name, module in linears.items() if module.out_features in entries]
    at_place, result = Counter(_place(name) for name in sized), {}
    for name in sized:
        outputs = linears[name].out_features
        last = name == next(reversed(linears)) and outputs == max(entries)
        if last or (outputs not in widths and at_place[_place(name)] == 1):
            result[name] = f"it has {outputs} outputs, as many as {entries[outputs]} has entries"
    return result


def _place(name: str) -> str:
    """The name without the numbers of the layers that contain it."""
    return re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name)


def _named(model: nn.Module) -> dict[str, str]:
    """The last linear registered directly in the root, or in its only wrapper, where it is called as heads are."""
    name, root = _unwrapped(model)
    linears = [child for child, module in root.named_children() if isinstance(module, nn.Linear)]
    if not linears or linears[-1] not in NAMES or name.lower().endswith(PARTS):
        return {}
    full = f"{name}.{linears[-1]}" if name else linears[-1]
    return {full: f"it is the last linear of the model and is called {linears[-1]}"}


def _unwrapped(model: nn.Module) -> tuple[str, nn.Module]:
    """The module inside of wrappers (DistributedDataParallel, a compiled module...), which hold one module each."""
    name, root = "", model
    while True:
        children = [(child, module) for child, module in root.named_children() if _holds_parameters(module)]
        is_model = any(True for _ in root.parameters(recurse=False))
        if is_model or len(children) != 1 or isinstance(children[0][1], nn.Linear):
            return name, root
        child, root = children[0]
        name = f"{name}.{child}" if name else child


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
