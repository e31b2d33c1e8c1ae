"""Functions of Transformer Engine around modules: autocast, what a GPU can do, checkpoints, offload, graphs."""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from duotone.capture import is_capturing
from duotone.compat.transformer_engine import recipe as their
from duotone.compat.transformer_engine.options import NO_OVERLAP, refuse
from duotone.dispatch.target import Version, target
from duotone.errors import UserError
from duotone.pipeline.offload import offload_activations
from duotone.recipes.recipe import Recipe
from duotone.state import autocast as duotone_autocast
from duotone.state import quantized_model_init as duotone_model_init
from duotone.state.autocast_context import HIGH_PRECISION, active_recipe, active_region
from duotone.state.parameters import construction

Result = TypeVar("Result")
HOPPER, BLACKWELL, WORKSTATION = (9, 0), (10, 0), (12, 0)


def capability() -> Version | None:
    """The capability of the GPU that modules are built on. None without a GPU: then every format runs emulated."""
    return target("cuda").arch if torch.cuda.is_available() else None


def get_default_recipe() -> Recipe:
    """The default recipe: MXFP8 on Blackwell, current scaling on its workstation GPUs, else delayed scaling."""
    arch = capability() or HOPPER
    if arch >= WORKSTATION:
        return their.Float8CurrentScaling()
    return their.MXFP8BlockScaling() if arch >= BLACKWELL else their.DelayedScaling()


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: object = None,
) -> duotone_autocast:
    """Amaxes of delayed scaling are reduced over all ranks if no group is given."""
    group = amax_reduction_group
    if group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
    chosen = recipe or get_default_recipe()
    return duotone_autocast(bool(enabled), calibrating=calibrating, recipe=chosen, amax_reduction_group=group)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: object = None,
) -> duotone_autocast:
    """`duotone.autocast` with the arguments of the older function of Transformer Engine."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> duotone_model_init:
    """`duotone.quantized_model_init`, with Transformer Engine's default recipe if none is passed."""
    chosen = recipe or get_default_recipe()
    return duotone_model_init(
        bool(enabled), recipe=chosen, preserve_high_precision_init_val=preserve_high_precision_init_val
    )


def _check(least: Version, what: str) -> Callable[[], tuple[bool, str]]:
    def check() -> tuple[bool, str]:
        arch = capability()
        fits = arch is None or arch >= least
        return (
            fits,
            "" if fits else f"{what} needs compute capability {least[0]}.{least[1]}; here it would run emulated",
        )

    return check


def _availability(check: Callable[[], tuple[bool, str]]) -> Callable[..., bool | tuple[bool, str]]:
    def is_available(return_reason: bool = False) -> bool | tuple[bool, str]:
        return check() if return_reason else check()[0]

    return is_available


check_fp8_support = _check((8, 9), "FP8")
check_fp8_block_scaling_support = _check(HOPPER, "FP8 block scaling")
check_mxfp8_support = _check(BLACKWELL, "MXFP8")
check_nvfp4_support = _check(BLACKWELL, "NVFP4")
is_fp8_available = _availability(check_fp8_support)
is_fp8_block_scaling_available = _availability(check_fp8_block_scaling_support)
is_mxfp8_available = _availability(check_mxfp8_support)
is_nvfp4_available = _availability(check_nvfp4_support)
is_bf16_available = _availability(_check((0, 0), "BF16"))


def get_device_compute_capability() -> Version:
    """The compute capability of the current GPU, as (9, 0); (0, 0) without a GPU."""
    return capability() or (0, 0)


class Manager(type):
    """The class of `FP8GlobalStateManager`: AttributeError for names without a counterpart."""

    def __getattr__(cls, name: str) -> None:
        raise AttributeError(
            f"{cls.__name__}.{name} has no counterpart in Duotone; enter te.autocast, whose states belong to modules"
        )


class FP8GlobalStateManager(metaclass=Manager):
    """Questions about the enclosing autocast."""

    is_fp8_available = staticmethod(check_fp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)

    @staticmethod
    def reset() -> None:
        """Does nothing: regions end by themselves, and states belong to modules."""

    @staticmethod
    def reduce_and_update_fp8_tensors(forward: bool = True) -> None:
        """Does nothing: scales roll when a region ends and after its backward, in replays of CUDA graphs too."""

    @staticmethod
    def fp8_graph_capturing() -> bool:
        """Whether a CUDA graph is being captured."""
        return is_capturing()

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether an open `autocast` asks for low precision."""
        recipe = active_recipe()
        return recipe is not None and recipe != HIGH_PRECISION

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Whether the innermost `autocast` calibrates."""
        region = active_region()
        return region is not None and region.calibrating is not None

    @staticmethod
    def with_fp8_parameters() -> bool:
        """Whether modules that are built now hold quantized parameters."""
        region = construction()
        return region is not None and region.enabled

    @staticmethod
    def with_high_precision_init_val() -> bool:
        """Whether quantized parameters that are built now also keep their first values in high precision."""
        region = construction()
        return region is not None and region.enabled and region.preserve_high_precision_init_val

    @staticmethod
    def get_fp8_group() -> object:
        """The group in which amaxes are reduced. None without a group."""
        region = active_region()
        if region is None or not region.group:
            return None
        return torch.distributed.distributed_c10d._resolve_process_group(region.group)  # type: ignore[arg-type]

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """The recipe of the innermost `autocast`, else the default one."""
        recipe = active_recipe()
        return get_default_recipe() if recipe is None or recipe == HIGH_PRECISION else recipe


def checkpoint(
    function: Callable[..., Result],
    *args: object,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: "Callable[[], CudaRNGStatesTracker] | None" = None,
    tp_group: object = None,
    use_reentrant: bool = True,
    **kwargs: object,
) -> Result:
    """torch's checkpoint. The recompute has the random states of the tracker that the forward had."""
    refuse("checkpoint", distribute_saved_activations=distribute_saved_activations)
    if get_rng_state_tracker is not None:
        function = _replaying(function, get_rng_state_tracker())
    if use_reentrant:  # torch's takes arguments only by position
        function, kwargs = functools.partial(function, **kwargs), {}
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)  # type: ignore


def _replaying(function: Callable[..., Result], tracker: "CudaRNGStatesTracker") -> Callable[..., Result]:
    """`function`; later calls start from the random states of the first call, and leave all states unchanged."""
    first: list[dict[str, Tensor]] = []

    def call(*args: object, **kwargs: object) -> Result:
        now = tracker.get_states()
        if not first:
            first.append(now)
            return function(*args, **kwargs)
        tracker.set_states(first[0])
        try:
            return function(*args, **kwargs)
        finally:
            tracker.set_states(now)

    return call


def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Does nothing: modules notice that a backward runs their forward."""
    return contextlib.nullcontext()


class _Offload:
    """A context around each layer in turn. Of `layers` layers, the first `count` keep their activations on the host."""

    def __init__(self, count: int, layers: int) -> None:
        self.turns = itertools.cycle([True] * count + [False] * (layers - count))
        self.open: list[contextlib.AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        self.open.append(offload_activations() if next(self.turns) else contextlib.nullcontext())
        self.open[-1].__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.open.pop().__exit__(*exception)


def get_cpu_offload_context(  # noqa: PLR0913 (Transformer Engine's vocabulary)
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: object = None,
) -> tuple[contextlib.AbstractContextManager[object], Callable[[Tensor], Tensor]]:
    """A context for each layer, and a function for its output, which returns it unchanged."""
    if enabled:
        weights, manual = offload_weights, manual_synchronization
        refuse("get_cpu_offload_context", offload_weights=weights, manual_synchronization=manual)
    offloads = enabled and offload_activations
    return _Offload(num_layers, max(model_layers, num_layers)) if offloads else contextlib.nullcontext(), lambda x: x


REGION = {
    "fp8_enabled": "enabled",
    "fp8_calibrating": "calibrating",
    "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group",
}


def make_graphed_callables(
    modules: nn.Module | list[nn.Module] | tuple[nn.Module, ...],
    sample_args: tuple[object, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    **options: Any,
) -> object:
    """torch's graphed callables under an autocast. Without a GPU the modules only run under the autocast."""
    options = {REGION.get(name, name): value for name, value in options.items()}
    enabled, calibrating, recipe, group = (options.pop(name, None) for name in REGION.values())
    refuse("make_graphed_callables", **options)
    modules = tuple(modules) if isinstance(modules, list) else modules
    for module in modules if isinstance(modules, tuple) else (modules,):
        module.forward = autocast(bool(enabled), bool(calibrating), recipe, group)(module.forward)
    if not torch.cuda.is_available():
        return modules
    return torch.cuda.make_graphed_callables(modules, sample_args, num_warmup_iters, allow_unused_input)  # type: ignore


class CudaRNGStatesTracker:
    """Random states of the GPU by name; `fork` draws from one of them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.states_: dict[str, Tensor] = {}

    def get_states(self) -> dict[str, Tensor]:
        """The states by name, uint8."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all states by these."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state that starts from a seed. UserError if the name is taken."""
        if name in self.states_:
            raise UserError(f"the random state {name!r} is there already; choose another name")
        self.states_[name] = _state()
        with self.fork(name):
            torch.cuda.manual_seed(seed) if torch.cuda.is_available() else torch.manual_seed(seed)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw random numbers from the state of this name while the block runs."""
        before = _state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set_state(before)


def _state() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    (torch.cuda.set_rng_state if torch.cuda.is_available() else torch.set_rng_state)(state)


def device_supports_multicast(device: int = -1) -> bool:
    """False: only user buffers use it, which Duotone does not have."""
    return False


def initialize_ub(*_: object, **__: object) -> None:
    """Warns, and does nothing else: there are no user buffers."""
    warnings.warn(f"initialize_ub: {NO_OVERLAP}", stacklevel=2)


def destroy_ub() -> None:
    """Does nothing: there are no user buffers."""


def mark_not_offload(*_: Tensor) -> None:
    """Does nothing: Duotone does not offload single tensors."""


def prepare_te_modules_for_fsdp(_: nn.Module) -> None:
    """Does nothing: what backward needs is not sharded. That costs memory and changes no result."""
