"""fuse: norms, linears and activations of a model as pipelines of ops, in place."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from duotone.conversion import forwards
from duotone.conversion.blocks import Block, as_blocks, readers
from duotone.conversion.default_rules import FULL, adapters
from duotone.conversion.fused_modules import (
    FUSED,
    ChainPipeline,
    FusedForward,
    FusedNorm,
    MLPPipeline,
    NormReaders,
    plain_class,
)
from duotone.conversion.naming import named_modules, require_model
from duotone.conversion.patterns import (
    MLP,
    Chain,
    Norm,
    chain_of,
    children_of,
    first_linears,
    is_linear,
    mlp_of,
    norm_of,
    norms_of,
    width_of,
)
from duotone.conversion.trial import NoMatch
from duotone.errors import UserError
from duotone.modules.packed_linear import class_name, pack
from duotone.pipeline.slot_roles import KnownRoles
from duotone.recipes.recipe import Recipe
from duotone.state.autocast_context import autocast

NOTHING = "no norm that linears read and no MLP"
REMEDY = "name what reads its norms in duotone.fuse(model, blocks=[...])"
UNFUSED = "_unfused"
"""The attribute that says why a module with the parts of a pattern is not fused."""

Pipeline = MLPPipeline | ChainPipeline | NormReaders
Groups = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass
class Findings:
    """The modules of a model that run as pipelines, and those that do not, with the reasons."""

    forwards: dict[nn.Module, MLP | Chain] = field(default_factory=dict)
    norms: dict[nn.Module, tuple[Norm, nn.Module, Groups]] = field(default_factory=dict)
    refusals: dict[nn.Module, str] = field(default_factory=dict)

    def starts_with_linear(self, module: nn.Module) -> bool:
        """Whether a module runs as a pipeline whose first op is a linear."""
        pattern = self.forwards.get(module)
        return isinstance(pattern, MLP) or (pattern is not None and is_linear(next(module.children())))


def fuse(
    model: nn.Module,
    sample: Tensor | Sequence[object] | Mapping[str, object] | None = None,
    *,
    blocks: Sequence[Mapping[str, str | Sequence[str]]] = (),
) -> nn.Module:
    """Run norms, linears and activations of a model as the pipelines of `duotone.ops`, in place; return the model.

    Patterns are: linear - activation - linear, gated MLPs, and the norms of known blocks with the linears that read
    them. Norms and MLPs are compared with the ops on random hidden states. Parameters, names and state_dict keys stay.
    A pattern runs fused once its linears are converted, so `convert` may come first or second. `plan` shows each
    pattern, and why one is not fused.

    `sample` is an input of the model, a tuple of its arguments, or a dict of them by name: the model runs on it once,
    and each MLP is also compared with its weights on the hidden states that reach it.

    `blocks` are blocks of your own: the names of norms, and for each the paths of the linears and MLPs that read its
    output, as `{"before": ["attention.q", "attention.k"], "between": "mlp"}`.

    UserError, before anything changes, if `model` is no module, if it does not run on `sample`, or if it has no block
    with the names of one of `blocks`.
    """
    require_model("fuse", model)
    own = as_blocks(model, blocks)
    states = {} if sample is None else _hidden_states(model, sample)
    with torch.inference_mode(False):  # gradients are compared
        findings = _find(model, states, own)
    unfuse(model)
    memories = Counter([p.untyped_storage()._cdata for p in model.parameters() if type(p) is nn.Parameter])
    for module, pattern in findings.forwards.items():
        is_mlp = isinstance(pattern, MLP)
        _change(module, FusedForward, MLPPipeline(module, pattern) if is_mlp else ChainPipeline(module, pattern))
        if is_mlp and len(pattern.first) > 1:
            pack([module.get_submodule(name) for name in pattern.first], memories)
    for module, (norm, parent, groups) in findings.norms.items():
        _change(module, FusedNorm, NormReaders(module, norm, parent, groups))
        for path, names in groups:
            if len(names) > 1:
                pack([parent.get_submodule(path).get_submodule(name) for name in names], memories)
    for module, reason in findings.refusals.items():
        module.__dict__[UNFUSED] = reason
    if not (findings.forwards or findings.norms or findings.refusals):
        warnings.warn(f"fuse found {NOTHING} in {type(model).__name__}, which runs as before", stacklevel=2)
    return model


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`. Parameters do not change."""
    for module in model.modules():
        module.__dict__.pop(UNFUSED, None)
        if FUSED in module.__dict__:  # it goes last, so that a call after an interrupt completes the change
            module.__dict__.pop("_rewritten", None)
            forwards.change_class(module, plain_class(module))
            del module.__dict__[FUSED]


def fused_row(module: nn.Module, recipe: Recipe | None) -> str:
    """The reason in the plan of a module that `fuse` examined, or "". `recipe` stands for an enclosing autocast."""
    pipeline: Pipeline | None = module.__dict__.get(FUSED)
    if pipeline is not None:
        return pipeline.row(recipe)
    reason = module.__dict__.get(UNFUSED)
    return f"not fused: {reason}" if reason else ""


def _change(module: nn.Module, mixin: type, pipeline: Pipeline) -> None:
    module.__dict__[FUSED] = pipeline
    forwards.change_class(module, forwards.planned_class(mixin, type(module)))


def _find(model: nn.Module, samples: Mapping[nn.Module, Tensor], own: Sequence[Block]) -> Findings:
    findings, low_rank = Findings(), adapters(model)
    parts = {id(module) for name, module in named_modules(model) if name in low_rank}
    for module in model.modules():
        if forwards.is_replaced(module) or isinstance(module, KnownRoles):  # those of Duotone are pipelines already
            continue
        plain, reason = plain_class(module), _wrapped_parts(module, parts)
        try:
            pattern = chain_of(module, plain) or mlp_of(module, plain, samples.get(module))
        except NoMatch as error:
            pattern, reason = None, str(error)
        if pattern is not None:
            findings.forwards[module] = pattern
        elif reason:
            findings.refusals[module] = reason
    _find_blocks(model, own, findings, parts)
    return findings


def _find_blocks(model: nn.Module, own: Sequence[Block], findings: Findings, parts: set[int]) -> None:
    """Find the norms of known blocks, and those that a linear of another block may read."""
    known, unknown = set[nn.Module](), dict[nn.Module, list[nn.Module]]()
    for parent in model.modules():
        in_chain = parent in findings.forwards and not isinstance(findings.forwards[parent], MLP)
        norms = {} if in_chain or isinstance(parent, KnownRoles) else norms_of(parent)
        block = readers(parent, norms, own)
        if block is None:
            widths = {width_of(linear) for linear in parent.modules() if norms and is_linear(linear)}
            unknown[parent] = [norm for norm in norms.values() if width_of(norm) in widths]
            continue
        known.update(parent.modules())
        for name, paths in block.items():
            if paths and not forwards.is_replaced(norms[name]):
                _find_norm(parent, norms[name], paths, findings, parts)
    for parent, others in reversed(unknown.items()):
        if others and known.isdisjoint(parent.modules()):
            known.update(parent.modules())
            reason = f"{class_name(parent)} is no known block: {REMEDY}"
            findings.refusals |= {norm: reason for norm in others}


def _readers(
    parent: nn.Module, norm: nn.Module, paths: Iterable[str], findings: Findings, parts: set[int]
) -> dict[str, nn.Module]:
    """What reads a norm, by path. An MLP that does not run as a pipeline reads by its first linears."""
    found: dict[str, nn.Module] = {}
    for path in paths:
        module = parent.get_submodule(path)
        is_one = findings.starts_with_linear(module) or _wrapped(module, parts) is not None
        names = () if is_one else first_linears(module, norm)
        found |= {f"{path}.{name}": module.get_submodule(name) for name in names} or {path: module}
    return found


def _find_norm(parent: nn.Module, module: nn.Module, paths: Iterable[str], findings: Findings, parts: set[int]) -> None:
    modules = _readers(parent, module, paths, findings, parts)
    foreign = {p: m for p, m in modules.items() if not is_linear(m) and not findings.starts_with_linear(m)}
    if all(path in foreign and _wrapped(reader, parts) is None for path, reader in modules.items()):
        return
    try:
        norm = norm_of(module, plain_class(module))
    except NoMatch as error:
        findings.refusals[module] = str(error)
        return
    if norm is None:
        return
    if foreign:
        path, reader = next(iter(foreign.items()))
        findings.refusals[module] = f"its output is read by {path}, a {class_name(reader)}"
    elif module in findings.norms or module in findings.refusals:
        findings.norms.pop(module, None)
        findings.refusals[module] = "several modules call it"
    else:
        findings.norms[module] = norm, parent, tuple(_groups(modules))


def _groups(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Groups of linears by the path of their owner, which run as one. A fused MLP has no names."""
    packs: dict[str, list[str]] = {}
    for path, reader in modules.items():
        owner, _, name = path.rpartition(".")
        if is_linear(reader):
            packs.setdefault(owner, []).append(name)
        else:
            yield path, ()
    yield from ((owner, tuple(names)) for owner, names in packs.items())


def _wrapped(module: nn.Module, low_rank: set[int]) -> nn.Linear | None:
    """The linear that an adapter or another wrapper holds, if a module is one."""
    if isinstance(module, nn.Linear | nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return None
    linears = [child for child in module.children() if isinstance(child, nn.Linear) and id(child) not in low_rank]
    others = [one for one in module.modules() if one is not module and one not in linears]
    holds_linear = any(isinstance(getattr(module, name, None), nn.Linear) for name in (*FULL, "_orig_mod"))
    adapted = any(id(one) in low_rank for one in others)
    return linears[0] if len(linears) == 1 and (holds_linear or adapted) else None


def _wrapped_parts(module: nn.Module, low_rank: set[int]) -> str:
    """Why a module with the parts of an MLP is left alone: some of its linears are adapted or wrapped; or ""."""
    children = children_of(module)
    wrapped = {name: child for name, child in children.items() if _wrapped(child, low_rank) is not None}
    linears = [child for child in children.values() if isinstance(child, nn.Linear) and id(child) not in low_rank]
    others = [c for n, c in children.items() if n not in wrapped and not isinstance(c, nn.Linear)]
    if len(linears) + len(wrapped) not in (2, 3) or any(True for child in others for _ in child.parameters()):
        return ""
    if wrapped:
        name, child = next(iter(wrapped.items()))
        return f"{name} is a {class_name(child)} around a linear"
    return "it holds low-rank adapters" if any(id(child) in low_rank for child in children.values()) else ""


def _hidden_states(model: nn.Module, sample: object) -> dict[nn.Module, Tensor]:
    """The first input of each module when the model runs on a sample, in evaluation and in high precision."""
    if not isinstance(sample, Tensor | Sequence | Mapping) or isinstance(sample, str):
        raise UserError(f"sample is a tensor, a tuple or a dict of arguments; got {type(sample).__name__}")
    states: dict[nn.Module, Tensor] = {}

    def observe(module: nn.Module, inputs: tuple[object, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            states.setdefault(module, inputs[0].detach())

    arguments = (sample,) if isinstance(sample, Tensor) else () if isinstance(sample, Mapping) else sample
    modes = {module: module.training for module in model.modules()}
    try:
        with ExitStack() as hooks, torch.no_grad(), autocast(enabled=False):
            for module in modes:
                hooks.enter_context(module.register_forward_pre_hook(observe))
            model.eval()(*arguments, **(sample if isinstance(sample, Mapping) else {}))
    except Exception as error:  # the user's code may raise anything
        reason = str(error).split("\n")[0]
        raise UserError(f"{type(model).__name__} does not run on sample: {type(error).__name__}: {reason}") from None
    finally:
        for module, training in modes.items():
            module.training = training
    return states
