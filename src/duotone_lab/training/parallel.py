"""Training over many ranks: `--parallel fsdp=N,tp=M,ep=K` under torchrun."""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import duotone
from duotone import distributed, files
from duotone.errors import UserError
from duotone.modules import MoE
from duotone.modules.planned import Planned
from duotone.recipes import Recipe, Schedule
from duotone.sharding.dtensors import shard_of
from duotone_lab.memory.storages import total_bytes
from duotone_lab.memory.wire import Wire
from duotone_lab.training import checkpoint, meta
from duotone_lab.training.checkpoint import Checkpoint
from duotone_lab.training.comparison import planned
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.data import Corpus
from duotone_lab.training.forecast import COLUMNS, ROWS, Parallel, in_words, plain_gathers, require_experts
from duotone_lab.training.optimizer import BETAS, GRADIENT_NORM, Clipped, decaying
from duotone_lab.training.trainer import NOTHING, Trainer

TIMEOUT = timedelta(minutes=5)


@contextmanager
def started(parallel: Parallel, device: str) -> Iterator[int]:
    """The rank of this process among those that torchrun started, with a process group until the end.

    UserError unless they are as many as `parallel` asks for, and where another rank is lost.
    """
    world = int(os.environ.get("WORLD_SIZE", 0))
    if world != parallel.ranks:
        started_by = f"torchrun started {world}" if world else "this process was not started by torchrun"
        raise UserError(
            f"--parallel {parallel} is for {parallel.ranks} processes, and {started_by}: use "
            f"torchrun --standalone --nproc-per-node {parallel.ranks} -m duotone ..."
        )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))  # type: ignore
    store = dist.PrefixStore(f"start-{restarts()}", store)  # type: ignore  # it outlives a start
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        yield rank
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
            reason = " ".join(str(error).split())[:120]
            raise UserError(
                f"a rank was lost ({reason}); start all again: runs go on from their newest checkpoint"
            ) from None
        raise
    finally:
        dist.destroy_process_group()


def restarts() -> int:
    """How often torchrun has started this run again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def agreed(flag: bool) -> bool:
    """Whether any rank asks to stop: all stop after the same step. A rank that handles an error asks nobody."""
    if sys.exc_info()[0] is not None:
        return flag
    answer = torch.tensor([int(flag)])
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer.item())


class ShardedAdamW(Clipped):
    """torch's AdamW on fp32 shards, which FSDP2 gathers in bf16. Gradients are clipped to a total norm of one."""

    def __init__(self, model: nn.Module, ep: DeviceMesh) -> None:
        super().__init__(model)
        self.ep = ep
        spread = mixtures(model) if ep.size() > 1 else []
        self.mixtures = {id(p): "router" in name for m in spread for name, p in m.named_parameters()}
        self.adamw = torch.optim.AdamW(decaying(self.parameters), betas=BETAS)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update. Gradients of experts hold the tokens of all ranks already; those of their router are added up."""
        gradients = {p: shard_of(p.grad) for p in self.parameters.values() if p.grad is not None}
        total = torch.zeros((), dtype=torch.float64)
        for parameter, shard in gradients.items():
            is_router = self.mixtures.get(id(parameter))
            if is_router is not None:
                shard.div_(self.ep.size())
            if is_router:
                dist.all_reduce(shard, group=self.ep.get_group())
            shards = _shards(parameter) * (self.ep.size() if is_router is False else 1)
            total += shard.double().square().sum().cpu() * shards / dist.get_world_size()
        dist.all_reduce(total)
        for shard in gradients.values():
            shard.mul_(min(1.0, GRADIENT_NORM / (total.sqrt().item() + 1e-6)))
        self.update(learning_rate)


def mixtures(model: nn.Module) -> list[MoE]:
    """All mixtures of experts in a model."""
    return [module for module in model.modules() if isinstance(module, MoE)]


class ParallelTrainer(Trainer):
    """A trainer whose batch, parameters and optimizer lie over the ranks of a process group.

    Losses are means over all ranks. They agree with those of one process up to the order of sums.
    """

    observes = False

    def __init__(
        self,
        parallel: Parallel,
        config: TrainConfig,
        chosen: Recipe | Schedule,
        corpus: Corpus,
        *,
        perturbation: float = 0.0,
    ) -> None:
        self.parallel = parallel
        self.wire: Wire | None = None
        super().__init__(config, chosen, corpus, perturbation=perturbation)

    def set_up(self, built: nn.Module) -> None:
        self.part, self.parts = dist.get_rank() // self.parallel.tp, self.parallel.data
        if self.config.preset.batch % self.parts:
            batch = self.config.preset.batch
            raise UserError(f"a batch of {batch} does not divide over {self.parts} ranks: give --batch")
        sizes = (self.parallel.fsdp, self.parallel.ep, self.parallel.tp)
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("fsdp", "ep", "tp"))
        self.group = dist.group.WORLD
        require_experts(self.parallel, built, self.config.model)
        if self.parallel.ep > 1:
            self._spread_experts(built, mesh["ep"])
        self.convert(built)
        recipes = {phase.recipe.key: phase.recipe for phase in self.schedule.phases}.values()
        for linear in [module for module in self.model.modules() if isinstance(module, Planned)]:
            formats = [linear.plans.plan(recipe).weight.quantizer for recipe in recipes]
            if not plain_gathers(self.parallel, formats):
                duotone.gather_quantized(linear)
        blocks = [block for block in self.model.modules() if isinstance(block, nn.ModuleList)]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard = partial(fully_shard, mp_policy=policy)
        for block in (block for each in blocks for block in each):
            if self.parallel.tp > 1:
                parallelize_module(block, mesh["tp"], _styles(block))
            for mixture in mixtures(block) if self.parallel.ep > 1 else ():
                shard(mixture, mesh=mesh["fsdp"])
            shard(block, mesh=mesh["fsdp", "ep"]._flatten("data") if self.parallel.ep > 1 else mesh["fsdp"])
        shard(self.model, mesh=mesh["data"] if self.parallel.ep > 1 else mesh["fsdp"])
        self.optimizer = ShardedAdamW(self.model, mesh["ep"])
        self.first = 0

    def _spread_experts(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Keep this rank's experts of each mixture."""
        for name, whole in [(name, each) for name, each in model.named_modules() if isinstance(each, MoE)]:
            hidden, width = whole.router.weight.shape[1], whole.fc2.in_features
            options = {"top_k": whole.router.top_k, "ep_group": mesh.get_group(), "device": self.device}
            part = MoE(hidden, width, whole.num_experts, **options)
            part.load_state_dict(whole.state_dict())
            model.set_submodule(name, part)

    def loss(self, completed: int) -> Tensor:
        tokens, targets = (each.chunk(self.parts)[self.part].to(self.device) for each in self.batch(completed))
        return self.model(tokens, targets)

    def mean(self, loss: Tensor) -> float:
        """Over all ranks, in fp32 and their order."""
        everywhere = loss.detach().float().clone()
        dist.all_reduce(everywhere)
        return everywhere.item() / dist.get_world_size()

    def step(self, recipe: Recipe | None = None, forward: AbstractContextManager[None] | None = None) -> float:
        if self.wire is not None or self.completed == self.first:
            return super().step(recipe, forward)
        with Wire() as self.wire:
            return super().step(recipe, forward)

    def plan(self) -> duotone.Plan:
        return planned(self.config, self.recipe)

    def save(self, folder: Path, history: Mapping[str, object], observed: Mapping[str, Tensor] = NOTHING) -> None:
        """A checkpoint of all ranks, which observe nothing. The newest three stay."""
        text = json.dumps({**self.meta(), "history": history}).encode()
        extra = {"step": torch.tensor(self.completed), "meta": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        distributed.save(folder / f"step-{self.completed:08d}", self.model, self.optimizer.adamw, extra)
        if dist.get_rank() == 0:
            for old in checkpoint.steps(folder)[: -checkpoint.MOST]:
                files.remove_folder(old)

    @staticmethod
    def newest(folder: Path) -> Path | None:
        return distributed.latest(folder)

    @staticmethod
    def read(path: Path) -> Checkpoint:
        """The step and the description of a run in a checkpoint, without its tensors."""
        extra = distributed.extra(path)
        if {"meta", "step"} - extra.keys():
            raise UserError(f"{path} is no checkpoint of duotone train or compare: give the --out of such a run")
        saved = Checkpoint(int(extra["step"]), {}, {}, {}, json.loads(bytes(extra["meta"].tolist())))
        meta.require_run(saved, path)
        return saved

    def resume(self, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Load a checkpoint; gives the history of its run. UserError, with nothing changed, if it is of another run."""
        saved = self.read(path)
        self.require_same_run(saved, path)
        distributed.load(path, self.model, self.optimizer.adamw)
        self.completed = self.first = saved.step
        return saved.meta["history"], {}

    def ranks(self) -> list[str]:
        """Memory and bytes on the wire of each rank, in words."""
        if self.device.type == "cuda":
            size, kind = torch.cuda.max_memory_allocated(), "peak memory"
        else:
            shards = [*map(shard_of, self.model.parameters()), *self.optimizer.state().values()]
            size, kind = total_bytes(shards), "parameters and optimizer"
        wire = self.wire or Wire()
        texts = [""] * dist.get_world_size()
        dist.all_gather_object(texts, in_words(size, kind, wire))
        return [f"rank {rank}: {text}" for rank, text in enumerate(texts)]


def _shards(parameter: Tensor) -> int:
    """Ranks that hold different parts of a parameter, as its DTensor says."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_shard())


def _styles(block: nn.Module) -> dict[str, ParallelStyle]:
    """Shards of weights; activations stay whole between linears, because q, k, v and gate, up lie side by side."""
    names = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    columns = {name: ColwiseParallel(output_layouts=Replicate()) for name in names if name.endswith(COLUMNS)}
    rows = {name: RowwiseParallel(input_layouts=Replicate()) for name in names if name.endswith(ROWS)}
    return {**columns, **rows}
