"""What a module may ask of its weights beside the plan: cached planes, and gradients that go elsewhere."""

import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from duotone.errors import MissingPlaneError, UserError
from duotone.linear.cache import WeightCache
from duotone.linear.core import LinearStage
from duotone.linear.layout import LAYOUTS, WHOLE, Layout
from duotone.linear.plane_source import ENCODE_NOW
from duotone.linear.sink import GRADIENT, Deferred, Sink, ToMainGrad, main_grad
from duotone.pipeline.op import KEEPS
from duotone.pipeline.stage import Stage
from duotone.state.amax_mode import AmaxMode, mode_now


def variant(module: Any, stage: Stage, first: bool | None) -> Stage:
    """The stage with this module's caches and sinks; MissingPlaneError where a `main_grad` that it needs is missing."""
    if torch.compiler.is_compiling():  # an export that does not ask Dynamo, which leaves such calls alone
        raise UserError(f"{module.module_name}: {KEEPS}, and cannot be exported: leave them out")
    if module.fuse_wgrad_accumulation and torch.is_grad_enabled():
        for weight in module.weights:
            if weight.requires_grad:
                main_grad(weight)
    is_new = first is True and mode_now() in (AmaxMode.RECORD, AmaxMode.DEFER)  # a recompute is no new microbatch
    key = (stage, first, is_new)
    made = module._variants.get(key)
    if made is None:
        made = module._variants[key] = module.make_variant(*key)
    return made


def linear_variant(module: Any, stage: LinearStage, member: int, first: bool | None, overwrites: bool) -> LinearStage:
    """The stage of the module's `member`-th linear; with `overwrites` the next gradient replaces `main_grad`."""
    plan = stage.plan
    if first is not None and plan.weight.source is ENCODE_NOW:
        cache = _cache(module, member)
        weight = plan.weight.from_cache(cache.refreshed if first else cache.reused, plan.input_grad)
        plan = replace(plan, weight=weight)
    return replace(stage, plan=plan, sink=_sink(module, member, overwrites))


def clear_caches(module: Any) -> None:
    for cache in module.__dict__.get("_caches", {}).values():
        cache.clear()


@torch.no_grad()
def backward_dw(module: Any) -> None:
    """Compute the oldest gradient of each weight that a backward put off."""
    queues = module.__dict__.get("_queues", {})
    if not module.delay_wgrad_compute:
        return
    if not any(weight.requires_grad for weight in module.weights):
        return
    if not any(queues.values()):
        raise MissingPlaneError(
            f"{module.module_name}: no weight gradient waits; call backward_dw once after each backward"
        )
    for member, queue in queues.items():
        if queue:
            product, like, then = queue[0]
            weight = module.weights[member]
            with _without_autocast(weight.device.type):
                gradient = then.take(product, like)
            if gradient is not None and then is GRADIENT:
                gradient = gradient.to(weight.dtype)
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
            queue.popleft()  # once its gradient is in its place
    for hook in module.__dict__.get("_wgrad_hooks", ()):
        hook()


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Products have their dtypes, as in backward."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def _cache(module: Any, member: int) -> WeightCache:
    caches = module.__dict__.setdefault("_caches", {})
    if member not in caches:
        owner = weakref.ref(module)
        caches[member] = WeightCache(lambda: owner().weight_owners(member))  # type: ignore[union-attr]
    return caches[member]


def _sink(module: Any, member: int, overwrites: bool) -> Sink:
    sink: Sink = GRADIENT
    if module.fuse_wgrad_accumulation:
        sink = ToMainGrad(_weight_of(module, member), overwrites)
    if module.delay_wgrad_compute and module.weights[member].requires_grad:
        queue = module.__dict__.setdefault("_queues", {}).setdefault(member, deque())
        module.weights[member].skip_backward_post_hook = True
        sink = Deferred(queue, sink)
    return sink


def _weight_of(module: Any, member: int) -> Any:
    owner = weakref.ref(module)

    def weight() -> Tensor | None:
        alive = owner()
        return None if alive is None else alive.weights[member]

    return weight


def layout(mode: str | None, group: Any, sequence_parallel: bool, tp_size: int = 1) -> Layout:
    """The layout of `parallel_mode` in a process group, whose size a `tp_size` above 1 repeats."""
    if mode not in LAYOUTS:
        raise UserError(f"parallel_mode {mode!r} is unknown; allowed are None, 'column' and 'row'")
    if not isinstance(tp_size, int) or tp_size < 1 or (mode is None and tp_size != 1):
        raise UserError(f"tp_size is {tp_size!r}; it repeats the size of tp_group beside parallel_mode: leave it out")
    if mode is None and sequence_parallel:
        raise UserError("sequence_parallel needs parallel_mode 'column' or 'row'; give one, and its tp_group")
    if mode is not None and group is None:
        raise UserError(
            f"parallel_mode {mode!r} needs a tp_group, also beside tp_size; pass the process group of the "
            "tensor-parallel ranks"
        )
    if mode is not None and tp_size not in (1, group.size()):
        raise UserError(f"tp_size is {tp_size} and tp_group has {group.size()} ranks; leave tp_size out")
    return LAYOUTS[mode](group.group_name, sequence_parallel) if mode else WHOLE


def local_sizes(chosen: Layout, in_features: int, out_features: int, group: Any) -> tuple[int, int]:
    """What this rank holds of in_features and out_features."""
    size = 1 if group is None else group.size()
    whole = {"column": out_features, "row": in_features}.get(chosen.mode or "", size)
    if whole % size:
        raise UserError(f"parallel_mode {chosen.mode!r} cannot split {whole} features over {size} ranks")
    local_in = in_features // size if chosen.mode == "row" else in_features
    return local_in, out_features // size if chosen.mode == "column" else out_features
