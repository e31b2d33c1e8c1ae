"""Options of weights that are not part of the plan: cached planes, and gradients that do not go to autograd."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from duotone.errors import MissingPlaneError, UserError
from duotone.linear.core import LinearStage
from duotone.linear.grouped import GroupedStage
from duotone.linear.plane_source import ENCODE_NOW, WeightCache
from duotone.linear.sink import GRADIENT, Deferred, Queue, Sink, ToMainGrad
from duotone.modules.base import PlannedModule
from duotone.pipeline.row_call import RowPart
from duotone.pipeline.stage import AUTOGRAD, ELSEWHERE, ELSEWHERE_WITH_ZEROS
from duotone.pipeline.titles import title


class WeightOptions:
    """The caches and the queues of one module's weights, by the index of the linear. Copies of the module have none."""

    def __init__(self, module: weakref.ref[PlannedModule]) -> None:
        self.module = module
        self.caches: dict[int, WeightCache] = {}
        self.queues: dict[int, Queue] = {}
        self.flag: Tensor | None = None
        """`is_first_microbatch` of the last call, if a tensor."""
        self.hooks: list[Callable[[], None]] = []

    def stage(self, stage: LinearStage, member: int, first: bool | Tensor | None, overwrites: bool) -> LinearStage:
        """The stage of a linear with its cache and sink. With `overwrites` the next gradient replaces `main_grad`."""
        plan = stage.plan
        if first is not None and plan.weight.source is ENCODE_NOW:
            cache = self._cache(member)
            if isinstance(first, Tensor):
                source = cache.flagged(lambda: self.flag)
            else:
                source = cache.refreshed if first else cache.reused
            plan = replace(plan, weight=plan.weight.from_cache(source, plan.input_grad))
        return replace(stage, plan=plan, sink=self._sink(member, overwrites))

    def require_parameters(self) -> None:
        """UserError if gradients are put off, and a weight is computed, so that they would be lost."""
        module = self.module()
        assert module is not None
        if module.delay_wgrad_compute and not all([weight.is_leaf for weight in module.weights]):
            raise UserError(
                f"{title(module)}: delay_wgrad_compute gives gradients to parameters, and this weight is computed, as "
                "by a parametrization; leave the option out"
            )

    def row_part(self, stage: LinearStage | GroupedStage, first: bool | None) -> RowPart:
        """In a trace: how rows name a stage that keeps tensors between calls. `first`: see `Planner.variant`."""
        module = self.module()
        assert module is not None
        fuses, waits = module.fuse_wgrad_accumulation, module.delay_wgrad_compute
        sink = ELSEWHERE if fuses or waits else AUTOGRAD
        is_marked = [fuses and not waits and hasattr(w, "grad_added_to_main_grad") for w in module.weights]
        sinks = [ELSEWHERE_WITH_ZEROS if marked else sink for marked in is_marked]
        of_operands = stage.ordered((AUTOGRAD, AUTOGRAD, sinks, [AUTOGRAD] * len(sinks)))
        return RowPart(f"{stage.name}/{first}", "".join([str(each or AUTOGRAD) for each in of_operands]))

    @torch.no_grad()
    def backward_dw(self, module: PlannedModule) -> None:
        """Compute the oldest delayed gradient of each weight."""
        if not module.delay_wgrad_compute or not any(weight.requires_grad for weight in module.weights):
            return
        if not any(self.queues.values()):
            raise MissingPlaneError(
                f"{title(module)}: no weight gradient waits; call backward_dw once after each backward"
            )
        for member, queue in self.queues.items():
            if queue:
                product, like, then = queue[0]
                weight = module.weights[member]
                device = weight.device.type  # products have the same dtypes as in backward
                with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
                    gradient = then.take(product, like)
                if gradient is not None and then is GRADIENT:
                    gradient = gradient.to(weight.dtype)
                    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
                queue.popleft()  # once its gradient is in its place
        for hook in self.hooks:
            hook()

    def _cache(self, member: int) -> WeightCache:
        if member not in self.caches:
            owner = self.module
            self.caches[member] = WeightCache(lambda: owner().weight_owners(member))  # type: ignore[union-attr]
        return self.caches[member]

    def _sink(self, member: int, overwrites: bool) -> Sink:
        owner = self.module
        module = owner()
        assert module is not None
        sink: Sink = GRADIENT
        if module.fuse_wgrad_accumulation:
            sink = ToMainGrad(lambda: None if (alive := owner()) is None else alive.weights[member], overwrites)
        if module.delay_wgrad_compute and module.weights[member].requires_grad:
            module.weights[member].skip_backward_post_hook = True  # type: ignore[attr-defined]
            sink = Deferred(self.queues.setdefault(member, Queue()), sink)
        return sink
