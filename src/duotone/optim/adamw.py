"""AdamW whose quantized parameters have fp32 masters, from which it writes their codes and scales."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from duotone.capture import is_capturing
from duotone.errors import MissingPlaneError, UserError
from duotone.optim.checks import check_apart, check_dtypes, check_group, check_saved, check_step
from duotone.optim.master import Mark, adopt_writes, initial_master, is_computed, stored_dtypes
from duotone.optim.moments import (
    CODES,
    MOMENTS,
    SCALE,
    change_first_moment,
    first_moment,
    laid_like,
    store_first_moment,
)
from duotone.optim.update import Group, Numbers, Saved, State, numbers_of, write
from duotone.sharding.dtensors import is_distributed, shard_of
from duotone.tensor import QuantizedTensor
from duotone.tensor.writes import write_all


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), as `torch.optim.AdamW`.

    - Plain parameters are updated by torch's functions, and their moments have their dtype.
    - Quantized parameters, and with `master_weights` those in bf16 and fp16, have moments and a master in fp32. The
      step updates the master. The parameter becomes `parameter.copy_(master)`: rounded to its dtype or, if it is
      quantized, encoded to each of its planes by its quantizer.
    - Parameters and their buffers stay the same objects. If other code writes a parameter between two steps, its master
      follows, except where its rounded value is what the parameter holds: a swap that is taken back loses nothing.
      A write to a plain parameter through `.data` leaves no trace and is written back over: use
      `with torch.no_grad(): parameter.copy_(...)`.
    - If a parameter is a DTensor, each rank updates its shard, and the state is DTensors with the same placement. Ranks
      agree on scales that span shards in one collective for all parameters.
    - `params` are tensors, named tensors or groups; `lr`, `betas`, `eps` and `weight_decay` are as in torch.
    - The state of a parameter is `step`, `exp_avg`, `exp_avg_sq` and perhaps `master`, of the parameter's shape.
    - `moment_dtype` says how `exp_avg` is stored: torch.float32, torch.bfloat16 or torch.float8_e4m3fn. Plain
      parameters in fp32, bf16 and fp16 follow it too; others refuse it. Every step computes in fp32.
    - FP8 has an fp32 scale for 128 elements of a row, `exp_avg_scale` (*lead, K / 128). With `betas[0]` above 0.93 an
      element may stay where its neighbours decide the scale. Parameters of fewer than two dimensions have fp32, and
      those that ranks cut inside of these 128.
    - `exp_avg_sq` is fp32 then: bf16 rounds `v * 0.999` back to `v`, and FP8 keeps no element far below the largest.
    - `master_dtype` is torch.float32 or torch.bfloat16. With None a step starts from the parameter's own values.
    - `capturable`: a CUDA graph may hold a step. The first step comes before the capture.

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
        moment_dtype: torch.dtype | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        defaults |= {"master_weights": master_weights, "capturable": capturable}
        dtypes = {"moment_dtype": moment_dtype, "master_dtype": master_dtype}
        defaults |= {name: None if dtype is None else str(dtype) for name, dtype in dtypes.items()}
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
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; returns the loss of `closure`, if given.

        All checks come before anything is written. Raises UserError if a gradient is sparse or a plane rounds
        stochastically without a seed, MissingPlaneError if a quantized parameter cannot be written.
        """
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling and closure is None and self._init_group():
            return self._step(None)
        if not compiling and "torch._dynamo" not in sys.modules:
            return self._step(closure)
        from duotone.state.uncompiled import call_with_masters  # loads the compiler

        return call_with_masters(AdamW._step, self, closure)  # type: ignore[no-any-return]

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        if is_capturing() and not all(group["capturable"] for group in self.param_groups):
            raise MissingPlaneError(
                "AdamW makes the numbers of a step on the host, so no CUDA graph can hold it; "
                "give it capturable=True, or step outside"
            )
        for group in self.param_groups:
            check_dtypes(group)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for group, parameters in groups:
            for parameter in parameters:
                check_step(parameter, group)
        computed = [(group, [p for p in ps if is_computed(p, self.state[p], group)]) for group, ps in groups]
        check_apart([p for _, ps in computed for p in ps], self._marks)
        for group, parameters in groups:
            self._update_plain(group, [p for p in parameters if not is_computed(p, self.state[p], group)])
        for group, parameters in computed:
            for p in parameters:
                self._prepare(group, p)
        try:
            self._write(computed)
        finally:  # masters follow other code by now, and must not follow what Ctrl-C leaves half written
            self._marks.update((p, Mark.of(p)) for _, ps in computed for p in ps)  # pieces of a weight share a version
        return loss

    def _write(self, computed: list[tuple[Group, list[Tensor]]]) -> None:
        """Update masters, and write the parameters from them."""
        encoded: list[tuple[QuantizedTensor, Tensor]] = []
        for group, parameters in computed:
            for p, of in zip(parameters, numbers_of(group, [self.state[p]["step"] for p in parameters]), strict=True):
                master, shard = self._update(p, of), shard_of(p)
                encoded += [(shard, master)] if master is not None and isinstance(shard, QuantizedTensor) else []
        write_all(encoded, by_training=True)

    def _init_group(self) -> bool:
        """Whether a graph may hold the step. If so, the state of all groups exists.

        Dynamo never traces this method. It reads the state once, after the first call, so one call creates all of it.
        """
        pairs = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        try:
            for group in self.param_groups:
                check_dtypes(group)
            for group, parameter in pairs:
                check_step(parameter, group)
        except UserError:
            return False  # the step outside of graphs raises it
        if any(is_computed(p, self.state.get(p, {}), group) for group, p in pairs):
            return False
        for group, parameter in pairs:
            self._state_of(group, parameter, parameter)
        return True

    def _update_plain(self, group: Group, parameters: list[Tensor]) -> None:
        states = [self._state_of(group, p, p) for p in parameters]
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
            capturable=group["capturable"] and any(p.is_cuda for p in parameters),
            beta1=beta1,
            beta2=beta2,
            **{name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")},
        )
        torch.autograd.graph.increment_version([p for p in parameters if is_distributed(p)])

    def _prepare(self, group: Group, parameter: Tensor) -> None:
        """Give the state of a parameter its dtypes and, if it is stored, a master. Count the step."""
        state, mark, shard = self.state[parameter], self._mark_of(parameter), shard_of(parameter)
        stored = stored_dtypes(parameter, state, group)
        if isinstance(shard, QuantizedTensor) and (
            mark is None or mark.is_load or mark.shows_write(Mark.of(parameter))
        ):
            shard.fit_slots()  # a tensor that shares its planes, and has no slots, may have written them
        if "master" not in stored:
            state.pop("master", None)
        elif "master" not in state:
            state["master"] = laid_like(parameter, initial_master(shard, stored["master"]))
        elif mark is not None:
            adopt_writes(parameter, shard_of(state["master"]), mark)
        if "step" not in state:
            like = torch.empty(shard.shape, device=parameter.device)
            self._state_of(group, parameter, laid_like(parameter, like), torch.float32)
        for name, dtype in stored.items():  # moments may be from before the parameter had a master, or from torch
            if state[name].dtype == dtype and shard_of(state[name]).is_contiguous():
                continue
            if name == "exp_avg":
                change_first_moment(state, parameter, dtype)
            else:
                state[name] = laid_like(parameter, shard_of(state[name]).to(dtype).contiguous())
        self._state_of(group, parameter, parameter)["step"] += 1

    def _mark_of(self, parameter: Tensor) -> Mark | None:
        """The mark of a parameter, or of a new one that may have the state of one that left the groups.

        None for one without a state, or whose state a script filled.
        """
        mark = self._marks.get(parameter)
        if mark is None and self._marks.keys() - {p for each in self.param_groups for p in each["params"]}:
            return Mark.of_another(parameter)
        return mark

    @torch.no_grad()
    def _present_state(self) -> defaultdict[Tensor, Any]:
        """The state, in which masters follow what other code wrote since the last step.

        Those of the optimizer stay as they are until the next step: a script may save while other weights are swapped
        in, and then swap them back.
        """
        present = self.state.copy()
        for parameter, state in self.state.items():
            mark = self._mark_of(parameter) if "master" in state else None
            if mark is not None and mark.shows_write(Mark.of(parameter)):
                present[parameter] = {**state, "master": state["master"].clone()}
                adopt_writes(parameter, shard_of(present[parameter]["master"]), mark)
        return present

    def _update(self, parameter: Tensor, numbers: Numbers) -> Tensor | None:
        """Update the master. Returns it if the parameter has still to be encoded from it, together with others."""
        state, shard, first = self.state[parameter], shard_of(parameter), first_moment(self.state[parameter])
        master = shard_of(state["master"]) if "master" in state else initial_master(shard)
        step = State(gradient(parameter), first, shard_of(state["exp_avg_sq"]), master)
        is_written = write(shard, step, numbers)
        store_first_moment(state, first)
        if not is_written and isinstance(shard, QuantizedTensor) and shard.context.shard is None:
            write_all([(shard, master)], by_training=True)
            is_written = True
        if is_distributed(parameter):
            torch.autograd.graph.increment_version(parameter)
        return None if is_written else master

    def _state_of(self, group: Group, parameter: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Saved:
        state, device = self.state[parameter], parameter.device if group["capturable"] else torch.device("cpu")
        if "step" not in state:
            zeros = partial(torch.zeros_like, like, dtype=dtype, memory_format=torch.preserve_format)
            moments, step = {name: zeros() for name in MOMENTS}, torch.zeros((), dtype=torch.float32, device=device)
            state.update(moments, step=step)  # all or none, should Ctrl-C come
        if state["step"].device != device:
            state["step"] = state["step"].to(device)
        return state

    def state_dict(self) -> StateDict:
        """Like torch's. A master follows what other code wrote since the last step, as the parameter does."""
        state, self.state = self.state, self._present_state()
        try:
            return super().state_dict()
        finally:
            self.state = state

    def __getstate__(self) -> StateDict:
        return {**super().__getstate__(), "state": self._present_state()}

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
            master = {name: value for name, value in saved.items() if name == "master"}
            stored = stored_dtypes(parameter, master, group) if is_computed(parameter, master, group) else {}
            for name in {*MOMENTS, "master", SCALE}.intersection(saved):
                dtype = stored.get(name, torch.float32) if stored or name == SCALE else state[name].dtype
                if name == "exp_avg" and CODES in (saved[name].dtype, dtype):  # the next step changes it
                    dtype = saved[name].dtype
                state[name] = saved[name].to(parameter.device, dtype, copy=True)
            device = parameter.device if group["capturable"] else None
            state["step"] = torch.tensor(float(saved["step"]), dtype=torch.float32, device=device)
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
        self._marks = {p: Mark.of(p, is_load=True) for p, of in self.state.items() if "master" in of}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def gradient(parameter: Tensor) -> Tensor:
    """The gradient. For a DTensor, that of this rank's shard."""
    grad = parameter.grad
    assert grad is not None
    if is_distributed(grad) and is_distributed(parameter) and grad.placements != parameter.placements:
        return grad.redistribute(placements=parameter.placements).to_local()
    return shard_of(grad)


class FusedAdam(AdamW):
    """Adam: `AdamW` with a `weight_decay` of 0 by default, as Apex and Transformer Engine name it."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)
