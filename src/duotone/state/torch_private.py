"""Private names of torch that this room relies on, checked with 2.11 and 2.13, and what each one tells.

A release that drops one of them breaks here, or in tests/state and tests/modules/test_frames.py.
"""

import ctypes
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op, with_effects
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

graph_task_id = torch._C._current_graph_task_id
"""Which backward runs in this thread, -1 outside of any."""

count_nodes: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""How many nodes autograd has made in this thread. A forward without gradients makes none, nor does a backward."""

is_forward_grad_enabled = torch._C._is_fwd_grad_enabled
"""False in inference mode and in the forward of an autograd.Function, and nowhere else in ordinary code."""

_autograd = torch._C._autograd  # type: ignore[attr-defined]
top_saved_hooks = _autograd._top_saved_tensors_default_hooks
pop_saved_hooks = _autograd._pop_saved_tensors_default_hooks
push_saved_hooks = _autograd._push_saved_tensors_default_hooks
"""The stack of hooks for saved tensors: torch shows only its top, and None under an ignored hook."""

PACK_HOOK = "_checkpoint_hook.__init__.<locals>.pack_hook"
"""Qualified name of the hook of a non-reentrant checkpoint. Its closure holds the checkpoint as `frame`."""

UNPACK_HOOK, CHECKPOINT_FILE = "unpack_hook", "checkpoint.py"
"""Where a non-reentrant checkpoint recomputes. Its locals are `frame` and `gid`, the backward that asks."""

ENGINE, COMPILED = "_engine_run_backward", "_functorch"
"""Where the engine is called, below which nothing recomputes; and compiled graphs, which recompute by themselves."""

queue_callback = torch.autograd.Variable._execution_engine.queue_callback
"""Call a function at the end of the outermost backward of this thread."""


def is_asked(node: torch.autograd.graph.Node) -> bool:
    """In a backward: whether it runs a node. torch refuses to tell of a leaf that `torch.autograd.grad` asks for."""
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined,no-any-return]
    except RuntimeError:
        return True


has_thread_object = torch._C._is_key_in_tls
thread_object = torch._C._get_obj_in_tls
"""An object of a thread. torch hands it to the threads of the backwards that this thread starts."""


ENDING = threading.local()
"""What Python destroys as it ends a thread, by the key of an object of the thread."""


class Mark:
    """Lives as long as the thread that made it."""


def set_thread_object(key: str, value: Any) -> Any:
    """Let `thread_object(key)` give `value` in this thread, until it ends, and in those of its backwards. Return it.

    Torch drops its reference as the system ends the thread. Then the interpreter may be gone, and the process aborts.
    """
    ENDING.__dict__[key] = mark = Mark()
    weakref.finalize(mark, getattr(torch._C, "_remove_obj_from_tls", lambda key: None), key)  # torch 2.11 has none
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(key, value)
    if sys.getrefcount(value) == before:  # torch 2.11 takes no reference, but releases one when the thread ends
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return value


@contextmanager
def constants_allowed(x: Tensor) -> Iterator[None]:
    """Let operations of fake tensors like x take real ones, which objects of a user may hold."""
    mode: Any = x.fake_mode  # type: ignore[attr-defined]
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def is_faking() -> bool:
    """Whether tensors are fake: a compiler or an observer only asks for shapes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def real_tensors() -> AbstractContextManager[object]:
    """What is created within is real while torch.export traces, whose fake tensors a module must not keep."""
    return _disable_current_modes() if torch.compiler._is_exporting_flag else nullcontext()


PIPELINES = "torch.distributed.pipelining"
SHAPES = frozenset(("_forward_metadata_inference", "_shape_inference"))
MICROBATCH = frozenset(("forward_one_chunk",))


def in_pipeline(methods: frozenset[str]) -> bool:
    """Whether one of these methods of a stage of torch's pipelines runs.

    `SHAPES` run its module on values that mean nothing, to learn shapes; `MICROBATCH` is a forward of one. Ask first
    whether anybody imported `PIPELINES`, which costs less.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in methods and frame.f_globals.get("__name__") == f"{PIPELINES}.stage":
            return True
        frame = frame.f_back
    return False


def mark_effect(op: str) -> None:
    """Keep calls of an op in graphs that read none of its outputs, in their order."""
    _register_effectful_op(op, _EffectType.ORDERED)


def call_directly(op: Any, kernel: Callable[..., object]) -> None:
    """Let compiled code call the kernel of an op past torch's dispatcher, which takes a seventh of its host time.

    Where anything looks at ops, such as a trace, a mode, a transform, autograd or a profiler, it still sees the op.
    """
    dispatched: Callable[..., object] = op._op

    def call(x: Tensor, *arguments: Any) -> object:
        is_seen = count_modes() or torch.is_grad_enabled() or is_profiled() or are_transforms_active()
        return (dispatched if is_seen or is_legacy_batched(x) else kernel)(x, *arguments)

    op._op = call


count_modes = torch._C._len_torch_dispatch_stack
are_transforms_active = torch._C._are_functorch_transforms_active
is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor  # type: ignore[attr-defined]
is_profiled = torch._C._autograd._profiler_enabled  # type: ignore[attr-defined]


def define_effects_of(kind: type[Tensor], plain: Callable[[Sequence[Any]], list[Any]]) -> None:
    """Let ops that are marked as effects take tensors of a class. `plain` replaces them in the arguments."""
    with_effects.py_impl(kind)(lambda *arguments: with_effects(*plain(arguments)))


def is_graph_recomputed() -> bool:
    """In a trace: whether the backward of the graph may compute again what is traced now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._functorch import config

    if config.activation_memory_budget < 1 or config.aggressive_recomputation:
        return True
    tracer = InstructionTranslator.current_tx().output.current_tracer
    while tracer.parent is not None and tracer.source_target is not torch.ops.higher_order.tag_activation_checkpoint:
        tracer = tracer.parent
    return tracer.parent is not None


def once(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An op as a trace calls it: a checkpoint in the graph saves its result, and does not run it again."""

    def run(*arguments: object) -> Tensor:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        mode = get_proxy_mode()
        before = 0 if mode is None else len(mode.tracer.graph.nodes)
        result = op(*arguments)
        if mode is not None:
            nodes = mode.tracer.graph.nodes
            for node in itertools.islice(reversed(nodes), len(nodes) - before):
                if node.meta.get("recompute") is not None:
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return result

    return run


def write_in_trace(write: Callable[..., None], *arguments: object) -> None:
    """In a trace: write to objects from outside of a checkpoint, which are written back before it ends."""
    from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as unchecked

    unchecked(write, *arguments)


def specialized(number: float) -> float:
    """In a trace: a number as a constant, with a guard. A dynamic trace has variables for numbers of modules."""
    if not torch.compiler.is_dynamo_compiling():
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(number)  # type: ignore[return-value]


RING = "torch.distributed.tensor.experimental._context_parallel._attention"


def in_context_parallel() -> bool:
    """Whether torch's `context_parallel` has replaced scaled_dot_product_attention."""
    return torch.nn.functional.scaled_dot_product_attention.__module__ == RING


class ContextParallel(ModuleType):
    """torch's `context_parallel` that is entered. Guards read it at each call, as an attribute of a module object.

    A trace must not read the cells of torch's function itself: Dynamo could not run the function afterwards.
    """

    @property
    def order(self) -> str:
        """How chunks of the sequence lie on ranks ("balanced" or "plain"), and the name of the group. "" outside."""
        if not in_context_parallel():
            return ""
        function = torch.nn.functional.scaled_dot_product_attention
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        group = cells["device_mesh"].cell_contents.get_group().group_name
        return f"{'balanced' if sys.modules[RING]._cp_options.enable_load_balance else 'plain'} {group}"


CONTEXT_PARALLEL = ContextParallel("duotone.context_parallel")
