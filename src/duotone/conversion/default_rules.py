"""Output heads, adapters and routers of experts, which the default rules of convert keep in high precision.

`Reason` lists all reasons why a module stays in high precision, as plans and warnings show them.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from torch import nn

from duotone.conversion.experts import holds_experts
from duotone.conversion.naming import named_modules, sites_of
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import ANYWHERE, TENSOR_TYPES, QuantizerRole, Site
from duotone.recipes.rules import OUTPUT_HEAD, Rule


class Reason(Enum):
    """The text of a reason. {} stands for a detail."""

    BYPASSED = "its owner uses the weight without calling the module"
    TIED_EMBEDDING = "an embedding is a look-up, and its owner uses the weight as output head without calling a module"
    REPLACED = "its forward was replaced on the instance by {}"
    LAZY = "it has no weight before its first forward; run one, then call duotone.convert again"
    OTHER_FORWARD = "{} has a forward of its own"
    MATRICES = "{} itself; convert covers nn.Linear"
    EXPERTS = "{}"
    OUTPUT_HEAD = "an output head, as {}: kept in high precision unless a rule names it"
    ADAPTER = "a low-rank adapter of rank {}: kept in high precision unless a rule names it"
    ROUTER = "a router of experts, beside {}: kept in high precision unless a rule names it"
    NOT_CONVERTED = "not converted"
    LOOK_UP = "an embedding is a look-up, not a GEMM"
    FAST_PATH = "its fast path, which would go around its converted linears in evaluation, is off"
    DECLARED = "{}"


SURPRISING = (Reason.REPLACED, Reason.LAZY)
"""Reasons for which a plain nn.Linear is left alone."""


class Why(NamedTuple):
    """A reason, its detail, and the matrices that a module holds itself."""

    reason: Reason
    detail: object = ""
    matrices: str = ""

    @property
    def text(self) -> str:
        """The reason in words."""
        text = self.reason.value.format(self.detail)
        return f"{self.matrices} itself, and {text}" if self.matrices else text


STEPS = ("lora_A", "lora_B", "lora_a", "lora_b", "lora_down", "lora_up")
"""Names that libraries give the two linears of an adapter, or modules that contain them."""

PEFT = "peft.tuners."
FULL = ("base_layer", "modules_to_save", "original_module")
"""Names of linears in PEFT's layers that belong to the model and not to an adapter."""

LOW = 4
"""The sizes of the linear beside an adapter are at least this many times its rank."""

Linears = dict[str, nn.Linear]


def adapters(model: nn.Module) -> dict[str, int]:
    """The rank of each linear of a low-rank adapter, by full name."""
    modules = dict(named_modules(model))
    linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    low_rank = {name for name in linears if set(STEPS) & set(name.split("."))}
    for owner, parts in _by_owner(linears, modules).items():
        low_rank |= set(_beside_their_product(parts))
        if type(modules[owner]).__module__.startswith(PEFT):
            adapted = [n for n in parts if not set(FULL) & set(n.split("."))]
            low_rank |= {n for n in adapted if LOW * min(_sizes(parts[n])) <= max(_sizes(parts[n]))}
    return {name: min(_sizes(linear)) for name, linear in linears.items() if name in low_rank}


def _sizes(linear: nn.Linear) -> tuple[int, int]:
    return linear.in_features, linear.out_features


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
    """Two linears (in, rank) and (rank, out) of a module that also holds a linear (in, out)."""
    sizes = set(map(_sizes, linears.values()))
    for down_name, down in linears.items():
        for up_name, up in linears.items():
            rank, product = down.out_features, (down.in_features, up.out_features)
            if rank == up.in_features and LOW * rank <= min(product) and product in sizes:
                yield from (down_name, up_name)


ROUTER = re.compile("router", re.IGNORECASE)
"""Part of the name, or of the class, of a router of experts."""

GATE = re.compile(r"(^|(experts?|shared|moe|topk|noisy|w)_)(gates?|gating|wg)(?!_?(proj|up|act))", re.IGNORECASE)
"""Part of the name of a router that other modules may have too. The gate of a gated MLP is `gate_proj` or `gate_up`."""

EXPERT = re.compile("expert", re.IGNORECASE)


def routers(model: nn.Module) -> dict[str, str]:
    """Find the linears that choose or weigh experts. Returns what is beside each one, by its full name.

    A router has a name for it, or is in a module with such a name, and experts are beside it. Beside a gate these are
    siblings. Beside a router they may also be inside a sibling.
    """
    modules, result = dict(named_modules(model)), dict[str, str]()
    for name, module in modules.items():
        if not isinstance(module, nn.Linear):
            continue
        steps = name.split(".")
        for at, step in enumerate(steps):
            owner, below = modules[".".join(steps[:at])], ".".join(steps[at + 1 :])
            experts = None if EXPERT.search(below) else _experts_beside(owner, step, module.out_features)
            if experts is not None:
                result[name] = experts
    return result


def _experts_beside(owner: nn.Module, step: str, outputs: int) -> str | None:
    """Return the path of the experts beside the child `step`, which has so many outputs. None if it is no router."""
    if ROUTER.search(f"{step} {type(owner._modules.get(step)).__name__}"):
        others = owner.named_modules()
    elif GATE.search(step):
        others = owner.named_children()
    else:
        return None
    for path, other in others:
        if path and path.split(".")[0] != step:
            is_list = isinstance(other, nn.ModuleList | nn.ModuleDict) and len(other) == outputs > 1
            if is_list or EXPERT.search(f"{path} {type(other).__name__}"):
                return path
    kind = type(owner).__name__
    return f"the experts of {kind}" if holds_experts(owner) or kind.lower().endswith("moe") else None


NAMES = ("lm_head", "output_head", "output", "head", "embed_out", "unembed", "to_logits", "classifier", "score")
"""Names of the last linear of a whole model if it is the head."""

PARTS = ("attention", "attn", "mlp", "feedforward", "ffn")
"""Ends of names of parts of a layer. Such a part is no wrapper of a model, even if the model has nothing else."""


def heads(model: nn.Module) -> dict[str, str]:
    """Output heads by full name, with the evidence. They include embeddings that serve as heads."""
    modules = dict(named_modules(model))
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
    """The last linear registered directly in the root, or in its only wrapper, if it has the name of a head."""
    root, names = _unwrapped(model), {module: name for name, module in named_modules(model)}
    linears = [(child, module) for child, module in root.named_children() if isinstance(module, nn.Linear)]
    if root not in names or not linears or linears[-1][0] not in NAMES or names[root].lower().endswith(PARTS):
        return {}
    child, head = linears[-1]
    return {names[head]: f"it is the last linear of the model and is called {child}"}


def _unwrapped(root: nn.Module) -> nn.Module:
    """The module inside of wrappers (DistributedDataParallel, a compiled module...), which hold one module each."""
    while not any(True for _ in root.parameters(recurse=False)):
        children = [module for module in root.children() if any(True for _ in module.parameters())]
        if len(children) != 1 or isinstance(children[0], nn.Linear):
            break
        root = children[0]
    return root


@dataclass(frozen=True, kw_only=True)
class KeptRule(Rule):
    """Keeps the modules of these full names in high precision; `why` is the reason that plans show."""

    names: frozenset[str]
    why: str
    format: str | None = "identity"

    def __post_init__(self) -> None:
        """Checks nothing: no user wrote this rule."""

    def matches(self, role: QuantizerRole | None, site: Site = ANYWHERE) -> bool:
        return role is not None and role.name in self.names

    def to_dict(self) -> dict[str, object]:
        """The rule as a table of a recipe file."""
        return {"names": sorted(self.names), "format": self.format}


def with_default_rules(rules: Sequence[Rule], model: nn.Module, recipes: Sequence[Recipe]) -> tuple[Rule, ...]:
    """Return the rules of the user, and after them the default ones. Without any rule there are no default ones.

    The default rules keep output heads, adapters and routers in high precision. They come before any recipe, so a
    module that a recipe names by `module` or `module_regex` gets none for its kind.
    """
    if not rules:
        return ()
    sites, others = sites_of(model), [rule for recipe in recipes for rule in _rules_of(recipe)]
    named = [*OUTPUT_HEAD, *(rule for rule in others if rule.module or rule.module_regex)]
    reasons = {name: Why(Reason.OUTPUT_HEAD, evidence) for name, evidence in heads(model).items()}
    reasons |= {name: Why(Reason.ADAPTER, rank) for name, rank in adapters(model).items()}
    reasons |= {name: Why(Reason.ROUTER, experts) for name, experts in routers(model).items()}
    names: dict[str, set[str]] = {}
    for name, why in reasons.items():
        roles = [QuantizerRole("linear", kind, name) for kind in TENSOR_TYPES]
        if not any(rule.matches(role, sites[name]) for rule in named for role in roles):
            names.setdefault(why.text, set()).add(name)
    in_high_precision = [KeptRule(names=frozenset(group), why=text) for text, group in names.items()]
    return (*rules, *(rule for rule in OUTPUT_HEAD if rule not in rules), *in_high_precision)


def _rules_of(recipe: Recipe) -> Iterator[Rule]:
    """The rules of a recipe, of its base, and of its evaluation recipe."""
    yield from getattr(recipe, "rules", ())
    for other in (getattr(recipe, "base", None), recipe.evaluation):
        if other is not None:
            yield from _rules_of(other)
