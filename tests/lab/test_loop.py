import dataclasses

import pytest
import torch

from duotone import files, recipes
from duotone.errors import UserError
from duotone_lab.training import checkpoint, loop
from duotone_lab.training.loop import Progress, Run, Saving, points
from duotone_lab.training.trainer import Trainer


class Recorder(Progress):
    def __init__(self):
        self.events = []

    def begin(self, name, *, steps, completed, tokens_per_step, model):
        self.events.append(("begin", name, steps, completed, tokens_per_step, model))

    def note(self, text):
        self.events.append(("note", text))

    def step(self, number, loss):
        self.events.append(("step", number, loss))

    def end(self):
        self.events.append(("end",))

    @property
    def steps(self):
        return [event[1] for event in self.events if event[0] == "step"]

    @property
    def notes(self):
        return [event[1] for event in self.events if event[0] == "note"]


def make(config, corpus, recipe="mxfp8", **changes):
    return Trainer(dataclasses.replace(config, **changes), recipes.load(recipe), corpus)


def train(trainer, name, *, history=None, **options):
    run = Run(name, trainer.chosen, **(history or {}))
    loop.train(trainer, run, **options)
    return run


def test_observed_steps_give_the_same_bits_as_plain_ones(config, corpus):
    plain = make(config, corpus, "nvfp4")
    result = train(make(config, corpus, "nvfp4"), "nvfp4")
    assert [[number, plain.step()] for number in range(1, 7)] == result.train_loss
    assert result.final_heldout_loss == plain.heldout_loss()


def test_a_result_has_every_module_and_plane(config, corpus):
    result = train(make(config, corpus, "nvfp4", steps=8), "nvfp4")
    planes = {(row["module"], row["role"], row["plane"]) for row in result.observed["statistics"]}
    assert len(planes) == len(result.observed["statistics"]) == 2 * 4 * 3 * 2
    assert all(row["samples"] == 4 and 5 < row["snr_db"] < 40 for row in result.observed["statistics"])
    assert {row["module"] for row in result.observed["plan"]} >= {"embedding", "lm_head", "layers.1.mlp.down"}
    assert result.memory.weight_bytes == sum(p.nbytes for p in make(config, corpus).model.parameters())
    assert result.memory.peak_bytes > result.memory.saved_activation_bytes > 0
    assert result.step_ms > 0
    assert [step for step, _ in result.heldout_loss] == [2, 4, 6, 8]


def test_the_final_training_loss_is_the_mean_of_the_last_ten():
    result = Run("bf16", recipes.load("bf16"), train_loss=[[step, float(step)] for step in range(1, 21)])
    assert result.final_train_loss == 15.5
    assert Run("bf16", recipes.load("bf16"), train_loss=[[1, 2.0], [2, None]]).final_train_loss is None
    assert Run("bf16", recipes.load("bf16")).final_train_loss is None


def test_progress_hears_of_every_step_and_the_compile(config, corpus):
    heard = Recorder()
    train(make(config, corpus), "mxfp8", progress=heard)
    assert heard.events[0] == ("begin", "mxfp8", 6, 0, 128, "gpt") and heard.events[-1] == ("end",)
    assert heard.steps == [1, 2, 3, 4, 5, 6]
    assert heard.notes[0] in ("first step: compiling casts", "first step: casts in plain torch")


def test_a_run_without_casts_does_not_speak_of_them(config, corpus):
    heard = Recorder()
    train(make(config, corpus, "bf16"), "bf16", progress=heard)
    assert heard.notes == ["first step"]


def test_a_stop_saves_and_the_resumed_run_ends_as_an_uninterrupted_one(tmp_path, config, corpus):
    whole = train(make(config, corpus, "nvfp4"), "nvfp4")
    heard = Recorder()
    stopped = train(
        make(config, corpus, "nvfp4"),
        "nvfp4",
        saving=Saving(tmp_path, 100),
        progress=heard,
        should_stop=lambda: len(heard.steps) == 4,
    )
    assert stopped.stopped and heard.steps == [1, 2, 3, 4] and stopped.heldout_loss[-1][0] == 4
    path = checkpoint.latest(tmp_path)
    assert path.name == "step-00000004"
    resumed = make(config, corpus, "nvfp4")
    saved = checkpoint.load(path)
    resumed.restore(saved, path)
    result = train(resumed, "nvfp4", history=saved.meta["history"], saving=Saving(tmp_path, 100))
    assert result.train_loss == whole.train_loss
    assert result.heldout_loss == whole.heldout_loss
    assert checkpoint.latest(tmp_path).name == "step-00000006"


def test_checkpoints_come_every_k_steps_and_at_the_end(tmp_path, config, corpus):
    train(make(config, corpus, "bf16", steps=7), "bf16", saving=Saving(tmp_path, 3))
    assert [path.name for path in checkpoint.steps(tmp_path)] == [f"step-0000000{step}" for step in (3, 6, 7)]


def test_a_failed_save_is_a_note_and_the_last_one_an_error(tmp_path, config, corpus, monkeypatch):
    real = files.write_synced
    monkeypatch.setattr(files, "write_synced", lambda path, content: _refuse(path, content, real))
    heard = Recorder()
    with pytest.raises(UserError, match=r"step-00000006 .*No space left"):
        train(make(config, corpus, "bf16"), "bf16", saving=Saving(tmp_path, 2), progress=heard)
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-00000002"]
    assert [note[:26] for note in heard.notes if "No space" in note] == ["cannot save the checkpoint"]
    assert heard.steps == [1, 2, 3, 4, 5, 6] and heard.events[-1] == ("end",)


def _refuse(path, content, write):
    if "step-00000002" not in str(path):
        raise OSError(28, "No space left on device")
    write(path, content)


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing(tmp_path, config, corpus):
    trainer = make(config, corpus, "bf16")
    step = trainer.step

    def poisoned(*args, **kwargs):
        if trainer.completed == 2:
            trainer.model.norm.weight.data.fill_(torch.nan)
        return step(*args, **kwargs)

    trainer.step = poisoned
    result = train(trainer, "bf16", saving=Saving(tmp_path, 3))
    assert result.error == "the loss is nan at step 3"
    assert result.observed["events"] == [
        {"step": 3, "text": "the loss is not finite; all operands of recipe formats were"}
    ]
    assert result.train_loss[-1] == [3, None] and result.final_train_loss is None
    assert checkpoint.steps(tmp_path) == []


def test_the_first_operand_that_is_not_finite_is_an_event(config, corpus):
    trainer = make(config, corpus, "mxfp8")
    step = trainer.step

    def poisoned(*args, **kwargs):
        if trainer.completed == 2:
            trainer.model.layers[1].mlp.down.weight.data[5, 7] = -torch.inf
        return step(*args, **kwargs)

    trainer.step = poisoned
    (event,) = train(trainer, "mxfp8").observed["events"]
    assert event["step"] == 3
    assert event["text"].endswith("not finite: weight rowwise of layers.1.mlp.down, 0 NaN and 1 infinite")


def test_a_switch_of_the_schedule_is_an_event(config, corpus):
    schedule = recipes.Schedule((recipes.Phase(recipes.load("mxfp8"), 0), recipes.Phase(recipes.load("bf16"), 2)))
    trainer = Trainer(config, schedule, corpus)
    assert train(trainer, "switch").observed["events"] == [{"step": 3, "text": "the schedule switches to bf16"}]


def test_a_step_that_fails_after_a_stop_is_given_up(tmp_path, config, corpus):
    trainer = make(config, corpus, "bf16")
    trainer.step = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("the compiler was interrupted"))
    result = train(trainer, "bf16", saving=Saving(tmp_path, 1), should_stop=lambda: True)
    assert result.stopped and result.train_loss == [] and checkpoint.steps(tmp_path) == []
    with pytest.raises(RuntimeError, match="the compiler"):
        train(trainer, "bf16")


def test_points_spread_over_the_run_and_end_with_it():
    assert sorted(points(100, 4)) == [25, 50, 75, 100]
    assert sorted(points(2, 3)) == [1, 2]
    assert points(1, 4) == {1}
