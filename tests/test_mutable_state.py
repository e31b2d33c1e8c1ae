"""Mutable state of the library: each module-level object that changes, with the reason why it is there."""

import ast
import importlib
import itertools
import types
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.optim import optimizer

import duotone
from duotone.kernels.launch import Kernel, Launch
from duotone.linear.plane_source import STEPS
from duotone.modules.same_recipes import WRAPPED

ROOT = Path(duotone.__file__).parents[1]

PURE = "remembers results of a pure function of its arguments"
LAUNCH = "remembers the launch of a kernel for each set of its constants"
CLASSES = "one subclass for each class, made once so that isinstance and pickles agree"
REGISTRY = "append-only registry, filled at import or by its users"
MACHINE = "asks the machine once"
WAITING = "delayed states that recorded outside of regions, until the backward of their thread ends"
LIMITS = "largest magnitudes by slot on the device, so that a step copies nothing from the host"
GRAPHS = "compiled graphs hold a number or a name; this says what it stands for while that lives"
STACK = "the stack of open regions: one for each thread and async task"

ALLOWED = {
    "attention.low_precision._ALIKE": GRAPHS,
    "attention.low_precision._CONTENTS": "weak: modules of equal formats share the stages of traced calls",
    "comm.collectives.COMPARED": "weak: the numbers of rows that ranks on GPUs compared, so that a step does not wait",
    "comm.collectives.AGREED": "what the ranks of a group agreed on, since a capture cannot ask them",
    "attention.recipe_following._MODULES": GRAPHS,
    "conversion.forwards.planned_class": CLASSES,
    "conversion.patterns.default_epsilon": PURE,
    "conversion.skipped.bypassed_children": PURE,
    "dispatch.casts._CASTS": PURE,
    "dispatch.casts._DECODERS": PURE,
    "dispatch.casts._segment_cast": LAUNCH,
    "dispatch.stages._compile": PURE,
    "dispatch.stages._UNCOMPILED": "whether an enclosing call has too little work for a compiler, for each thread",
    "dispatch.compiler._FAILURES": "why the C++ compiler failed after its probe worked; it is not asked again",
    "dispatch.compiler.cache_folder": MACHINE,
    "dispatch.compiler.probe": MACHINE,
    "dispatch.compiler._refuse_cut_libraries": "the cache of compiled casts is looked at once a process",
    "pipeline.graph_patterns._register": "inductor learns the patterns once a process",
    "dispatch.segment_products._calls_cublas": MACHINE,
    "dispatch.segment_products._grouped_product": LAUNCH,
    "dispatch.segments._TABLES": "row offsets on the device, so that a step with the same splits copies nothing",
    "dispatch.target._built_with": MACHINE,
    "dispatch.target.cuda_target": MACHINE,
    "dispatch.target.has_triton": MACHINE,
    "dispatch.target.runs_kernels": MACHINE,
    "formats.registry._FORMATS": REGISTRY,
    "formats.scaled_format._tiled": PURE,
    "formats.registry._VARIANTS": REGISTRY,
    "integrations.transformers.HOOKS": "the hooks of a schedule, for a training that follows one that raised",
    "linear.plane_source.STEPS": "marks optimizer steps for weight caches: fused optimizers leave no version",
    "modules.quantize_op.STAGES": GRAPHS,
    "modules.quantize_op._NUMBERS": "a name, and so a seed, for each op that nobody named",
    "graph_ops.KERNELS": REGISTRY,
    "pipeline.bound._compiled": PURE,
    "pipeline.autograd.RUNNER": "what runs a pipeline; an observer wraps it while it watches",
    "pipeline.rewrites.RULES": REGISTRY,
    "pipeline.rows.PARTS": GRAPHS,
    "modules.foreign_states.READERS": REGISTRY,
    "modules.same_recipes.WRAPPED": "registers its hook once, with the first module that follows recipes",
    "pipeline.saved_forwards.FORWARDS": GRAPHS,
    "modules.planned._UNNAMED": "a name, and so a seed, for each module that nobody named",
    "recipes.conditions.expression": PURE,
    "recipes.conditions.glob": PURE,
    "recipes.library._shipped": PURE,
    "recipes.recipe._FIRST": "the first of equal recipes, so that equals share a key",
    "recipes.recipe._IN_GRAPHS": GRAPHS,
    "recipes.recipe._RECIPES": GRAPHS,
    "observe.candidates.recipe_of": PURE,
    "lab.report.page._environment": PURE,
    "lab.report.spread._powers_of": PURE,
    "state.frames.FORWARD": "whether the forward that runs in this thread is that of another autograd.Function",
    "state.delayed.STATES": GRAPHS,
    "state.delayed_slot.TRACED": "states whose number a graph holds, which serves no other state",
    "state.history.limits": LIMITS,
    "state.rolling._joined": PURE,
    "state.parameters.STACK": STACK,
    "state.region.STACK": STACK,
    "state.rolling.OTHERS": WAITING,
    "state.rolling.THREADS": WAITING,
    "state.torch_private.CONTEXT_PARALLEL": "holds nothing: guards of graphs read through it what torch has entered",
    "modules.traced_stages.PLANS": GRAPHS,
    "modules.traced_stages._ALIKE": GRAPHS,
    "modules.traced_stages._RECIPES": GRAPHS,
    "modules.answers._ANSWERS": GRAPHS,
    "modules.answers._ANSWER_NUMBERS": GRAPHS,
    "modules.traced_stages._GONE": GRAPHS,
    "attention.low_precision._GONE": GRAPHS,
    "modules.answers._CONTENTS": GRAPHS,
    "modules.traced_stages._OWNERS": GRAPHS,
    "modules.base.RECOMPUTED": GRAPHS,
    "modules.traced_stages._NAMES": GRAPHS,
    "tensor.quantized.OPS": REGISTRY,
    "tensor.quantizer.TRACED": GRAPHS,
}
"""`room.file.name`: the reason. Rooms of `duotone_lab` begin with "lab."."""

ROOMS = ("kernels.",)
"""Each file of kernels remembers launches by their constants, and what cuBLAS answered."""

CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
CONTAINERS = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet, ContextVar, itertools.count)

OPTIONAL = ("accelerate", "lightning", "torchtitan")
"""Packages that files of their names import, skipped if they are not installed."""


def modules() -> Iterator[tuple[str, types.ModuleType, ast.Module]]:
    for path in sorted(ROOT.glob("duotone*/**/*.py")):
        room = path.relative_to(ROOT).parts[1]
        absent = room == "integrations" and path.stem in OPTIONAL and find_spec(path.stem) is None
        if absent or room in ("training", "cli", "__main__.py"):
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name.removeprefix("duotone").lstrip("._"), importlib.import_module(name), ast.parse(path.read_text())


def defined(tree: ast.Module) -> set[str]:
    """The names that a module gives objects of its own: assigned, or decorated functions."""
    targets: list[ast.expr] = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names | {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def changes_by_itself(value: Any) -> bool:
    """Whether an object has state whatever the code does with it: caches, counters, weak tables, instances of ours."""
    if hasattr(value, "cache_info") or isinstance(value, CONTAINERS):
        return True
    kind = type(value)
    if isinstance(value, type | tuple | Kernel | Launch) or not kind.__module__.startswith("duotone"):
        return False
    frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    return not frozen and bool(getattr(value, "__dict__", None))


def changed_names(tree: ast.Module) -> set[str]:
    """Names of the module's scope that its functions rebind, or whose items or attributes any code changes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names |= set(node.names)
        elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            names |= {node.value.id} if isinstance(node.value, ast.Name) else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            names |= {node.func.value.id} if isinstance(node.func.value, ast.Name) else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            names |= {node.args[0].id} if isinstance(node.args[0], ast.Name) else set()
    return names


def homes() -> dict[int, str]:
    """Where each module-level object is defined."""
    return {
        id(vars(module)[name]): f"{file}.{name}".lstrip(".")
        for file, module, tree in modules()
        for name in defined(tree)
        if name in vars(module)
    }


def mutable() -> set[str]:
    names, home = set(), homes()
    for file, module, tree in modules():
        names |= {f"{file}.{n}" for n in defined(tree) if n in vars(module) and changes_by_itself(vars(module)[n])}
        for name in changed_names(tree) & vars(module).keys():
            value = vars(module)[name]
            if not isinstance(value, type | types.FunctionType) and id(value) in home:
                names.add(home[id(value)])
    return {name for name in names if not name.startswith(ROOMS)}


def test_every_object_that_changes_has_a_reason() -> None:
    here = mutable()
    assert here <= ALLOWED.keys(), f"new mutable state: {sorted(here - ALLOWED.keys())}"
    assert here >= ALLOWED.keys(), f"gone, take it from the list: {sorted(ALLOWED.keys() - here)}"


def test_importing_the_library_hooks_into_nothing_of_the_process() -> None:
    """No hook on all optimizers, modules or tensors, and no attribute of torch is replaced."""
    registered = [
        h for h in optimizer._global_optimizer_post_hooks.values() if type(h).__module__.startswith("duotone")
    ]
    assert not registered or STEPS.is_registered
    assert not any("duotone" in str(h) for h in hooks._global_forward_hooks.values())
    registered = [
        h for h in hooks._global_module_registration_hooks.values() if type(h).__module__.startswith("duotone")
    ]
    assert not registered or WRAPPED.is_registered
    for name, value in vars(torch).items():
        assert not str(getattr(value, "__module__", "")).startswith("duotone"), name
