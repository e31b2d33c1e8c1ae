"""AdamW whose quantized parameters have fp32 masters, from which it writes their codes and scales."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from duotone.capture import is_capturing
from duotone.errors import MissingPlaneError
from duotone.optim.checks import DTYPES, MOMENTS, check_dtypes, check_group, check_saved, check_step
from duotone.optim.master import Mark, adopt_writes, initial_master, needs_master
from duotone.optim.update import Group, Rates, Saved, State, write
from duotone.pipeline.op import is_distributed
from duotone.tensor import QuantizedTensor
from duotone.tensor.fsdp import shard_of
from duotone.tensor.writes import write_all


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), as `torch.optim.AdamW`.

    - Plain parameters are updated by torch's functions.
    - Quantized parameters, and with `master_weights` those in bf16 and fp16, have moments and a master in fp32. The
      step updates the master. The parameter becomes `parameter.copy_(master)`: rounded to its dtype or, if it is
      quantized, encoded to each of its planes by its quantizer.
    - Parameters and their buffers stay the same objects.
    - Of a DTensor each rank updates its shard, and the state is DTensors that lie alike. Scales that span shards are
      agreed on for all parameters in one collective.
    - `params` are tensors, named tensors or groups; `lr`, `betas`, `eps` and `weight_decay` are as in torch.
    - The state of a parameter is `step`, `exp_avg`, `exp_avg_sq` and perhaps `master`, of the parameter's shape.
    - `moment_dtype` and `master_dtype` say how `exp_avg` and the master of such a parameter are stored, in fp32 or
      bf16. Each step computes in fp32. With `master_dtype=None` it starts from the parameter's own values, and stores
      no master. `exp_avg_sq` is fp32, because bf16 rounds `v * 0.999` back to `v`.

    UserError if a hyperparameter is out of range.
    """

    def __init__(  # noqa: PLR0913 (those of torch, and the dtypes of the state)
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        master_weights: bool = False,
        master_dtype: torch.dtype | None = torch.float32,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        defaults |= {"master_weights": master_weights, "moment_dtype": str(moment_dtype)}
        defaults["master_dtype"] = None if master_dtype is None else str(master_dtype)
        self._marks: dict[Tensor, Mark] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Like torch's. UserError, and nothing is added, if the group cannot be updated."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group |= {key: str(value) for key, value in group.items() if isinstance(value, torch.dtype)}
        try:
            check_group(group)
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the loss of `closure`, if given.

        All checks come before anything is written. Raises UserError where a gradient is sparse or a plane rounds
        stochastically without a seed, MissingPlaneError where a quantized parameter cannot be written.
        """
        if is_capturing():  # a graph would repeat the numbers of one step in every replay
            raise MissingPlaneError(
                "AdamW makes the numbers of a step on the host, so no CUDA graph can hold it; step outside"
            )
        for group in self.param_groups:
            check_dtypes(group)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for parameter in chain.from_iterable(parameters for _, parameters in groups):
            check_step(parameter)
        encoded: list[tuple[Tensor, Tensor]] = []
        for group, parameters in groups:
            mastered = [p for p in parameters if "master" in self.state[p] or needs_master(shard_of(p), group)]
            plain = set(parameters).difference(mastered)
            self._update_plain(group, [p for p in parameters if p in plain])
            steps = [(p, self._update_mastered(group, p)) for p in mastered]
            encoded += [(p, master) for p, master in steps if master is not None]
        shards = [(shard_of(p), master) for p, master in encoded]
        write_all([(shard, master) for shard, master in shards if isinstance(shard, QuantizedTensor)])
        self._marks.update((p, Mark.of(p)) for p, _ in encoded)
        return loss

    def _update_plain(self, group: Group, parameters: list[Tensor]) -> None:
        states = [self._state_of(p, p) for p in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [shard_of(p) for p in parameters],
            [gradient(p) for p in parameters],
            [shard_of(state["exp_avg"]) for state in states],
            [shard_of(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            has_complex=any(p.is_complex() for p in parameters),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            **{name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")},
        )
        torch.autograd.graph.increment_version([p for p in parameters if is_distributed(p)])

    def _update_mastered(self, group: Group, parameter: Tensor) -> Tensor | None:
        """Update the master, of this rank. Returns it if the parameter has still to be encoded from it."""
        state, mark, stored = self.state[parameter], self._marks.get(parameter), stored_dtypes(group)
        if "master" not in stored:
            state.pop("master", None)
        if "master" in state and mark is not None:
            adopt_writes(parameter, shard_of(state["master"]), mark)
        master = state.get("master")
        if master is None:
            master = initial_master(shard_of(parameter), stored.get("master", torch.float32))
        if "master" in stored and "master" not in state:
            state["master"] = laid_like(parameter, master)
        if "step" not in state:
            self._state_of(parameter, laid_like(parameter, shard_of(master)), torch.float32)
        for name, dtype in stored.items():  # moments may be from before the parameter had a master, or from torch
            if state[name].dtype != dtype or not shard_of(state[name]).is_contiguous():
                state[name] = laid_like(parameter, shard_of(state[name]).to(dtype).contiguous())
        state["step"] += 1
        master = shard_of(state["master"]) if "master" in state else master
        first, second = (shard_of(state[name]) for name in MOMENTS)
        step = State(gradient(parameter), first, second, master)
        is_written = write(shard_of(parameter), step, Rates.of(group, state["step"].item()))
        if is_distributed(parameter):
            torch.autograd.graph.increment_version(parameter)
        if is_written:
            self._marks[parameter] = Mark.of(parameter)
        return None if is_written else master

    def _state_of(self, parameter: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Saved:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the host, which computes the numbers of a step
            zeros = partial(torch.zeros_like, like, dtype=dtype, memory_format=torch.preserve_format)
            state.update({name: zeros() for name in MOMENTS})
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Like torch's, but the state beside a master keeps its dtype, so that a resumed run has the same bits.

        A checkpoint of `torch.optim.AdamW` works too: a master that it lacks starts from the parameter. UserError,
        before anything changes, if a shape does not match or a hyperparameter is out of range.
        """
        loaded: StateDict = {}

        def check(_: Optimizer, changed: StateDict) -> None:
            for group in changed["param_groups"]:
                check_group({**self.defaults, **group})
            for _group, parameter, saved in self._saved(changed):
                check_saved(parameter, saved)
            loaded.update(changed)

        with self.register_load_state_dict_pre_hook(check):  # runs after the user's, which may change everything
            super().load_state_dict(state_dict)
        for group, parameter, saved in self._saved(loaded):
            state = self.state[parameter]
            has_master = "master" in saved or needs_master(shard_of(parameter), group)
            stored = stored_dtypes(group)
            for name in {*MOMENTS, "master"}.intersection(saved):
                dtype = stored.get(name, torch.float32) if has_master else state[name].dtype
                state[name] = saved[name].to(parameter.device, dtype, copy=True)
            state["step"] = torch.tensor(float(saved["step"]), dtype=torch.float32)
            if "master" in saved:
                self._marks[parameter] = Mark.of(parameter, is_load=True)

    def _saved(self, state_dict: StateDict) -> Iterator[tuple[Group, Tensor, Saved]]:
        """Each parameter that a state dict has, with its group here and its state there."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            for parameter, number in zip(group["params"], saved["params"], strict=False):
                if number in state_dict["state"]:
                    yield group, parameter, state_dict["state"][number]

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        stored = dict.fromkeys(("moment_dtype", "master_dtype"), str(torch.float32))  # of pickles before these options
        self.defaults, self._marks = {**stored, **self.defaults}, {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def stored_dtypes(group: Group) -> dict[str, torch.dtype]:
    """The dtypes of the stored moments and master, by name, of a parameter that is updated in fp32."""
    names = {"exp_avg": group["moment_dtype"], "exp_avg_sq": str(torch.float32), "master": group["master_dtype"]}
    return {name: DTYPES[dtype] for name, dtype in names.items() if dtype is not None}


def gradient(parameter: Tensor) -> Tensor:
    """The gradient; of a DTensor that of this rank's shard."""
    grad = parameter.grad
    assert grad is not None
    if is_distributed(grad) and is_distributed(parameter) and grad.placements != parameter.placements:
        return grad.redistribute(placements=parameter.placements).to_local()
    return shard_of(grad)


def laid_like(parameter: Tensor, shard: Tensor) -> Tensor:
    """A DTensor of these shards that lies as the parameter; the shard itself if the parameter is no DTensor."""
    if not is_distributed(parameter):
        return shard
    cut, size = (parameter.device_mesh, parameter.placements), parameter.shape
    return type(parameter).from_local(shard, *cut, run_check=False, shape=size, stride=parameter.stride())
