"""One model in training: its step, its held-out loss, and its whole state as a checkpoint."""

import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import duotone
from duotone.errors import UserError
from duotone.modules.planned import Planned
from duotone.recipes import Phase, Recipe, Schedule
from duotone_lab.training import checkpoint, meta, model, models
from duotone_lab.training.checkpoint import Checkpoint
from duotone_lab.training.config import TrainConfig, require_device
from duotone_lab.training.data import Corpus
from duotone_lab.training.optimizer import MasterAdamW

SEEDS = "seeds/"
NOTHING: Mapping[str, Tensor] = {}


class Trainer:
    """A bf16 model with fp32 masters under `chosen`, a recipe or a schedule of them.

    On a CPU the same arguments give the same bits, step by step. On CUDA torch's attention adds gradients in no
    fixed order when the context is long, so runs of such a preset agree closely, not to the bit.
    `perturbation` is relative noise on the initial weights. `completed` counts the steps.
    """

    observes = True
    """Whether its runs have statistics and memory."""

    group: object = None
    """The process group that delayed scaling reduces its amaxes over, if any."""

    def __init__(
        self, config: TrainConfig, chosen: Recipe | Schedule, corpus: Corpus, *, perturbation: float = 0.0
    ) -> None:
        require_device(config.device)
        torch.manual_seed(config.seed)
        self.config = config
        self.chosen = chosen
        self.schedule = self._schedule_over(config.steps)
        self.corpus = corpus
        self.device = torch.device(config.device)
        built = models.build(config.model, config.preset, config.seed, perturbation=perturbation).to(self.device)
        self.set_up(built)
        self.completed = 0

    def set_up(self, built: nn.Module) -> None:
        """The model and its optimizer, from an fp32 model on the device."""
        masters = {name: parameter.detach().clone() for name, parameter in built.named_parameters()}
        self.convert(model.to_dtype(built, torch.bfloat16))
        self.optimizer = MasterAdamW(self.model, masters)

    def convert(self, built: nn.Module) -> None:
        """Make it the model, whose linears follow the recipes of all phases."""
        self.model = duotone.convert(built, self.schedule.at(0))
        for phase in reversed(self.schedule.phases):
            self._prepare(phase.recipe)

    def _schedule_over(self, steps: int) -> Schedule:
        """The phases of a run of that many steps."""
        chosen = self.chosen if isinstance(self.chosen, Schedule) else Schedule((Phase(self.chosen, 0),))
        return chosen.over(steps)

    def _prepare(self, recipe: Recipe) -> None:
        """Make the delayed-scaling states of a phase, which its checkpoints hold; raises where it could not run."""
        for module in self.model.modules():
            if isinstance(module, Planned):
                module.plans.prepare(recipe)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the next step."""
        return self.schedule.at(self.completed)

    def step(self, recipe: Recipe | None = None, forward: AbstractContextManager[None] | None = None) -> float:
        """One step, under `recipe` unless None. Its forward runs inside the context `forward`. Returns the loss.

        If the loss is not finite, the weights do not change.
        """
        with forward or nullcontext(), duotone.autocast(recipe=recipe or self.recipe, amax_reduction_group=self.group):
            loss = self.loss(self.completed)
        value = self.mean(loss)
        if math.isfinite(value):
            loss.backward()
            self.optimizer.step(self.config.learning_rate(self.completed))
        self.completed += 1
        return value

    @torch.no_grad()
    def look_again(self, recipe: Recipe) -> None:
        """Run the forward of the newest step again, to record its operands."""
        with duotone.autocast(recipe=recipe):
            self.loss(self.completed - 1)

    def batch(self, completed: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the step after `completed` others."""
        preset = self.config.preset
        return self.corpus.batch(self.config.seed, completed, count=preset.batch, context=preset.model.context)

    def loss(self, completed: int) -> Tensor:
        """The loss of the step after `completed` others, as a tensor with a gradient."""
        tokens, targets = self.batch(completed)
        return self.model(tokens.to(self.device), targets.to(self.device))

    def mean(self, loss: Tensor) -> float:
        """The loss as a number, for which the host waits."""
        return loss.item()

    def plan(self) -> duotone.Plan:
        """What runs in the next step."""
        return duotone.plan(self.model, self.recipe)

    def ranks(self) -> list[str]:
        """Memory and bytes on the wire of each rank, in words, if there are several."""
        return []

    def save(self, folder: Path, history: Mapping[str, object], observed: Mapping[str, Tensor] = NOTHING) -> None:
        """Publish a checkpoint below `folder`; UserError if the disk refuses it."""
        checkpoint.save(folder, replace(self.checkpoint(history), observed=observed))

    @staticmethod
    def newest(folder: Path) -> Path | None:
        """The newest checkpoint below `folder`, None without one."""
        return checkpoint.newest(folder)

    @staticmethod
    def read(path: Path) -> Checkpoint:
        """Read a checkpoint of a run; UserError if it is damaged."""
        saved = checkpoint.load(path)
        meta.require_run(saved, path)
        return saved

    def resume(self, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Restore the checkpoint `path`. Returns the history of its run and what it observed.

        UserError, with nothing changed, if it is damaged or of another run.
        """
        saved = self.read(path)
        self.restore(saved, path)
        return saved.meta["history"], {name: tensor.to(self.device) for name, tensor in saved.observed.items()}

    @torch.no_grad()
    def heldout_loss(self, recipe: Recipe | None = None) -> float:
        """Mean loss in nats over the preset's held-out batches. This does not change the training.

        `recipe` is that of the step that was taken last, unless given.
        """
        preset = self.config.preset
        batches = self.corpus.heldout_batches(preset.heldout_batches, count=preset.batch, context=preset.model.context)
        seeds = duotone.rng_state(self.model)
        with duotone.autocast(recipe=recipe or self.schedule.at(max(0, self.completed - 1))):
            losses = [self.model(tokens.to(self.device), targets.to(self.device)) for tokens, targets in batches]
        duotone.load_rng_state(self.model, seeds)
        return torch.stack(losses).mean().item()

    def checkpoint(self, history: Mapping[str, object]) -> Checkpoint:
        """Everything that the next step depends on, and the `history` of the run so far (JSON-ready)."""
        tensors, aliases = checkpoint.unique_state(self.model)
        training = {**self.optimizer.state(), **self._random_state()}
        return Checkpoint(self.completed, tensors, aliases, training, {**self.meta(), "history": history})

    def meta(self) -> dict[str, object]:
        """The description of the run in a checkpoint, JSON-ready."""
        return {
            "config": self.config.to_dict(),
            "recipe": self.chosen.to_dict(),
            "data_digest": self.corpus.digest,
            "model_digest": self._model_digest,
        }

    def restore(self, saved: Checkpoint, path: Path) -> None:
        """Take over the state of `saved`, which was read from `path`.

        UserError, with nothing changed, unless it has this model, recipe, config and the bytes of this data. Its run
        may have been meant to be shorter or longer, where the same recipes were on so far.
        """
        self.check(saved, path)
        with torch.no_grad():
            state = self.model.state_dict()
            for name, tensor in saved.model.items():
                state[name].copy_(tensor)
        self.optimizer.load_state(saved.training)
        seeds = {name: seed for name, seed in saved.training.items() if name.startswith(SEEDS)}
        duotone.load_rng_state(self.model, {name.removeprefix(SEEDS): seed for name, seed in seeds.items()})
        torch.set_rng_state(saved.training["torch_rng"])
        self.completed = saved.step

    def check(self, saved: Checkpoint, path: Path) -> None:
        """UserError if `restore` cannot take over the state of `saved`."""
        self.require_same_run(saved, path)  # before the tensors, which depend on it
        self._prepare(self.schedule.at(max(0, saved.step - 1)))
        checkpoint.require_same_model(saved, self.model, path)
        self._require_same_state(saved, path)

    @property
    def _model_digest(self) -> str:
        return models.get(self.config.model).digest(self.config.preset)

    def _require_same_phases(self, saved: Checkpoint, path: Path) -> None:
        """UserError if another length of the run puts a step that lies behind under another recipe."""
        if self.config.steps < saved.step:
            raise UserError(f"the checkpoint {path} is at step {saved.step}: give --steps of at least {saved.step}")
        before = self._schedule_over(saved.meta["config"]["steps"])
        step = next((i for i in range(saved.step) if before.at(i).key != self.schedule.at(i).key), None)
        if step is not None:
            raise UserError(
                f"step {step + 1} of the checkpoint {path} was one of {before.at(step).name}, but of a run of "
                f"{self.config.steps} steps it is one of {self.schedule.at(step).name}: leave --steps out, or train "
                "anew under a schedule whose phases start at steps instead of fractions"
            )

    def require_same_run(self, saved: Checkpoint, path: Path) -> None:
        """UserError if a checkpoint has another recipe, config, text or model, or phases that this run would not."""
        self._require_same_phases(saved, path)
        _require_same("recipe", saved.meta.get("recipe"), _as_json(self.chosen.to_dict()), path)
        config = {**self.config.to_dict(), "steps": saved.meta["config"]["steps"]}
        _require_same("config", saved.meta.get("config"), _as_json(config), path)
        since = f"has changed since the checkpoint {path} was made"
        if saved.meta.get("data_digest") != self.corpus.digest:
            raise UserError(f"the data {since}: restore it, or train anew")
        if saved.meta.get("model_digest") != self._model_digest:
            raise UserError(f"{self.config.model} {since}: restore its config.json, or train anew with another --out")

    def _require_same_state(self, saved: Checkpoint, path: Path) -> None:
        checkpoint.require_tensors(saved.training, {**self.optimizer.state_like(), **self._random_state()}, path)
        steps = [tensor.item() for name, tensor in saved.training.items() if name.startswith("step/")]
        if not all(0 <= step <= saved.step for step in steps):
            raise checkpoint.damaged(path, f"a parameter was updated more often than the {saved.step} steps of the run")
        try:
            torch.Generator().set_state(saved.training["torch_rng"])
        except RuntimeError as error:
            raise checkpoint.damaged(path, f"torch_rng is no state of a generator: {error}") from error

    def _random_state(self) -> dict[str, Tensor]:
        """The rounding seeds of the model and the state of torch's generator."""
        seeds = {f"{SEEDS}{name}": seed for name, seed in duotone.rng_state(self.model).items()}
        return {**seeds, "torch_rng": torch.get_rng_state()}


def _require_same(what: str, stored: object, current: object, path: Path) -> None:
    if stored != current:
        raise UserError(
            f"the checkpoint {path} has another {what}: {_difference(stored, current)}; "
            "resume with what it was made with, or train anew with another --out"
        )


def _as_json(value: object) -> Any:
    """`value` as it reads back from a file."""
    return json.loads(json.dumps(value))


def _difference(stored: object, current: object) -> str:
    """The first key that differs, in words."""
    if isinstance(stored, dict) and isinstance(current, dict):
        for key in (*stored, *current):
            if stored.get(key) != current.get(key):
                return f"{key} {_difference(stored.get(key), current.get(key))}"
    return f"{stored!r} there, {current!r} here"
