"""Where the classes and functions of old pickles are now.

A pickle names them by module and attribute. Add a row to `MOVED` for everything that you move or rename, and for
nothing else. Its key is "old.module" for a module that no longer exists, and "old.module:name" for a name that left a
module or was renamed. The new place may be an old one with a row too. `tests/old_files` loads what older commits wrote.
"""

import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch

MOVED = {
    "duotone.comm.shard": "duotone.comm.collectives",
    "duotone.conversion.plan_table": "duotone.conversion.model_plan",
    "duotone.convert.experts": "duotone.conversion.experts",
    "duotone.convert.kept": "duotone.conversion.default_rules",
    "duotone.convert.parameters": "duotone.conversion.parameters",
    "duotone.convert.plan": "duotone.conversion.model_plan",
    "duotone.convert.targets": "duotone.conversion.targets",
    "duotone.dispatch.blackwell": "duotone.dispatch.gemms",
    "duotone.dispatch.gemms:Fp32Epilogue": "duotone.dispatch.products:Fp32Epilogue",
    "duotone.errors:UsageError": "duotone.errors:MissingPlaneError",
    "duotone.linear.backward_operand": "duotone.linear.operand_plan",
    "duotone.linear.cache": "duotone.linear.plane_source",
    "duotone.linear.gemm_plan": "duotone.linear.plan",
    "duotone.linear.gemms": "duotone.linear.plan",
    "duotone.linear.operand": "duotone.linear.plane_source",
    "duotone.linear.plan_request": "duotone.linear.plan",
    "duotone.linear.source": "duotone.linear.operand_plan",
    "duotone.linear.stage": "duotone.pipeline.stage",
    "duotone.modules.layer_norm_linear": "duotone.modules.layer_norm",
    "duotone.modules.layer_norm_mlp": "duotone.modules.layer_norm",
    "duotone.modules.routing": "duotone.modules.moe",
    "duotone.observe.ledger": "duotone.observe.memory_ledger",
    "duotone.observe.tap": "duotone.observe.tapped_recipe",
    "duotone.observe.tapped_recipe:Entry": "duotone.observe.statistics:Entry",
    "duotone.observe.tapped_recipe:Tap": "duotone.observe.statistics:Tap",
    "duotone.ops.again": "duotone.pipeline.second_order",
    "duotone.ops.basic:AddExtraInput": "duotone.ops.extra_tensors:AddExtraInput",
    "duotone.ops.basic:MakeExtraOutput": "duotone.ops.extra_tensors:MakeExtraOutput",
    "duotone.ops.basic:Quantize": "duotone.ops.quantize_op:Quantize",
    "duotone.ops.boundary": "duotone.planned.boundary",
    "duotone.ops.channels": "duotone.pipeline.channels",
    "duotone.ops.collective": "duotone.ops.basic",
    "duotone.ops.consumers": "duotone.pipeline.slot_roles",
    "duotone.ops.grouped": "duotone.planned.grouped_linear",
    "duotone.ops.handover": "duotone.ops.fused_cast",
    "duotone.ops.initialising": "duotone.planned.weights",
    "duotone.ops.linear": "duotone.planned.linear",
    "duotone.ops.op": "duotone.pipeline.op",
    "duotone.ops.options": "duotone.planned.weight_options",
    "duotone.ops.parameters": "duotone.planned.weights",
    "duotone.ops.pipeline": "duotone.pipeline.autograd",
    "duotone.ops.placed": "duotone.planned.output_buffers",
    "duotone.ops.planned": "duotone.planned.planned",
    "duotone.ops.rules": "duotone.pipeline.rewrites",
    "duotone.ops.splitting": "duotone.planned.split_parameters",
    "duotone.ops.states": "duotone.planned.delayed_states",
    "duotone.recipes.zoo": "duotone.compat.factories",
    "duotone.state.delayed:DelayedSlot": "duotone.state.delayed_slot:DelayedSlot",
    "duotone.state.recipe_state": "duotone.compat.recipe_state",
    "duotone.state.traced": "duotone.planned.traced_stages",
    "duotone.state.traced_stages": "duotone.planned.traced_stages",
    "duotone.state.amax_mode": "duotone.state.region",
    "duotone.tensor.traced": "duotone.tensor.traced_quantize",
    "duotone.tensor.vocabulary": "duotone.compat.quantizers",
}

WEIGHTS_ONLY = (
    "duotone.formats.identity:IDENTITY",
    "duotone.formats.registry:get",
    "duotone.tensor.history:History",
    "duotone.tensor.pickling:rebuild",
)
"""What `torch.load(weights_only=True)` reads, under the paths that files have for it."""


def _finder(module: str) -> Callable[[str], object]:
    """The `__getattr__` of an old module."""

    def find(name: str) -> object:
        home = MOVED.get(module)
        path = MOVED.get(f"{module}:{name}") or (home and f"{home}:{name}")
        if path is None or name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return pkgutil.resolve_name(path)

    return find


for _old in sorted(MOVED, key=lambda old: ":" in old):
    _module, _, _name = _old.partition(":")
    _home = import_module(_module) if _name else sys.modules.setdefault(_module, ModuleType(_module))
    vars(_home).setdefault("__getattr__", _finder(_module))
for _path in WEIGHTS_ONLY:
    torch.serialization.add_safe_globals([(pkgutil.resolve_name(_path), _path.replace(":", "."))])
