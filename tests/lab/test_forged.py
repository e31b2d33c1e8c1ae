"""Checkpoints whose digests fit, but whose content is not what this run would write: one line, and nothing changes."""

import dataclasses
import hashlib
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from duotone import recipes
from duotone.errors import UserError
from duotone_lab.cli.inputs import config_from
from duotone_lab.training import checkpoint, loop, meta, presets
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.trainer import Trainer


@pytest.fixture(scope="module")
def written(tmp_path_factory, text_file, corpus):
    """A config, and the folder of the checkpoint of its second step."""
    config = TrainConfig(presets.get("tiny"), steps=4, seed=1, data=(str(text_file),))
    trainer = Trainer(config, recipes.load("nvfp4"), corpus)
    losses = [[step, trainer.step()] for step in (1, 2)]
    history = {"train_loss": losses, "heldout_loss": [[2, trainer.heldout_loss()]]}
    return config, checkpoint.save(tmp_path_factory.mktemp("run"), trainer.checkpoint(history))


def sign(folder):
    """Digests that fit whatever the files hold now."""
    names = (checkpoint.MODEL, checkpoint.TRAINING, checkpoint.META)
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / checkpoint.DIGESTS).write_text("".join(lines))


@pytest.fixture(scope="module")
def trainer(written, corpus):
    """A trainer that takes nothing over, whatever it is offered."""
    return Trainer(written[0], recipes.load("nvfp4"), corpus)


@pytest.fixture
def copied(written, tmp_path):
    """The config and a copy of the checkpoint to change."""
    config, folder = written
    copy = tmp_path / "checkpoints" / folder.name
    copy.mkdir(parents=True)
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return config, copy


def forge(folder, change, name=checkpoint.TRAINING):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)
    sign(folder)


def forge_meta(folder, change):
    values = json.loads((folder / checkpoint.META).read_text())
    values = change(values) or values
    (folder / checkpoint.META).write_text(values if isinstance(values, str) else json.dumps(values))
    sign(folder)


def bits_of(trainer):
    tensors = {**checkpoint.unique_state(trainer.model)[0], **trainer.checkpoint({}).training}
    return {name: tensor.clone() for name, tensor in tensors.items()}


MOMENT = "exp_avg/layers.0.mlp.down.weight"


@pytest.mark.parametrize(
    ("name", "forged", "words"),
    [
        (MOMENT, torch.zeros(1), r"exp_avg/layers.0.mlp.down.weight is \(1,\) torch.float32 there and \(64, 96\)"),
        (MOMENT, torch.zeros(0), r"is \(0,\) torch.float32 there"),
        (MOMENT, torch.zeros(96, 64), r"is \(96, 64\) torch.float32 there"),
        (MOMENT, torch.zeros(64, 96, dtype=torch.float64), "torch.float64 there and .* torch.float32 here"),
        ("exp_avg_sq/norm.weight", torch.zeros(1), r"exp_avg_sq/norm.weight is \(1,\)"),
        ("master/norm.weight", torch.zeros(1), r"master/norm.weight is \(1,\)"),
        ("step/norm.weight", torch.zeros(2), r"step/norm.weight is \(2,\)"),
        ("step/norm.weight", torch.tensor(torch.nan), "updated more often than the 2 steps"),
        ("step/norm.weight", torch.tensor(-1.0), "updated more often than the 2 steps"),
        ("step/norm.weight", torch.tensor(3.0), "updated more often than the 2 steps"),
        (
            "seeds/layers.0.mlp.down.duotone_seed",
            torch.zeros(2, dtype=torch.int64),
            r"seeds/layers.0.mlp.down.duotone_seed is \(2,\)",
        ),
        ("seeds/layers.0.mlp.down.duotone_seed", torch.zeros(1), r"torch.float32 there and \(1,\) torch.int64 here"),
        ("torch_rng", torch.zeros(3, dtype=torch.uint8), r"torch_rng is \(3,\)"),
        ("torch_rng", torch.full((5056,), 255, dtype=torch.uint8), "torch_rng is no state of a generator"),
        ("exp_avg/other", torch.zeros(1), r"exp_avg/other is \(1,\) torch.float32 there and absent here"),
    ],
)
def test_a_tensor_that_this_run_does_not_have_is_refused_before_anything_changes(copied, trainer, name, forged, words):
    _, folder = copied
    forge(folder, lambda tensors: tensors.update({name: forged}))
    before = bits_of(trainer)
    with pytest.raises(UserError, match=words) as raised:
        trainer.restore(checkpoint.load(folder), folder)
    assert "\n" not in str(raised.value) and "train anew" in str(raised.value)
    after = bits_of(trainer)
    assert trainer.completed == 0 and before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_history_of_amaxes_of_another_length_is_refused(tmp_path, written, corpus):
    """Delayed scaling's buffers are tensors of the model."""
    config, _ = written
    recipe = recipes.DelayedScaling(amax_history_len=4)
    trainer = Trainer(config, recipe, corpus)
    trainer.step()
    path = checkpoint.save(tmp_path, trainer.checkpoint({}))
    name = next(name for name in checkpoint.load(path).model if "history" in name)
    forge(path, lambda tensors: tensors.update({name: tensors[name][:1].clone()}), checkpoint.MODEL)
    with pytest.raises(UserError, match=r"of another model: .*history.* is \(1, \d\) torch.float32 there and \(4, "):
        Trainer(config, recipe, corpus).restore(checkpoint.load(path), path)


def test_a_name_that_is_tied_to_another_tensor_is_told(copied, trainer):
    _, folder = copied
    forge_meta(folder, lambda values: values.update(aliases={"lm_head.weight": "norm.weight"}))
    with pytest.raises(
        UserError, match=r"lm_head.weight is tied to norm.weight there and tied to embedding.weight here"
    ):
        trainer.restore(checkpoint.load(folder), folder)


def put(path, value):
    *parents, last = path.split(".")

    def change(values):
        for key in parents:
            values = values[key]
        values[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: "[1]", "its layout is not 1"),
        (lambda _: "3", "its layout is not 1"),
        (lambda _: "[" * 100_000, "meta.json is no JSON"),
        (lambda _: '{"layout": ' + "1" * 5000 + "}", "meta.json is no JSON"),
        (lambda _: "\ufeff{}", "its layout is not 1"),
        (put("layout", "1"), "its layout is not 1"),
        (put("step", "2"), "step is no integer"),
        (put("step", -1), "step is no integer"),
        (put("step", True), "step is no integer"),
        (put("step", 10**30), "step is no integer"),
        (put("step", 5), "it is at step 5 of a run of 4"),
        (put("step", 0), "it is at step 0 of a run of 4"),
        (put("aliases", []), "aliases is no table of names"),
        (put("aliases", {"lm_head.weight": 3}), "aliases is no table of names"),
        (lambda values: values.pop("config") and None, "config is absent"),
        (put("config", None), "config is a NoneType, not a dict"),
        (put("config.steps", "4"), "config.steps is a str, not a int"),
        (put("config.more", 1), "config lacks or adds 'more'"),
        (put("config.preset.model.dim", 1.5), "config.preset.model.dim is a float, not a int"),
        (put("config.preset", "tiny"), "config.preset is a str, not a dict"),
        (put("config.data", [3]), "config.data is no list of paths"),
        (put("recipe", "nvfp4"), "recipe is a str, not a dict"),
        (put("data_digest", 7), "data_digest is a int, not a str"),
        (put("history", {}), "history does not have train_loss and heldout_loss alone"),
        (put("history.error", "x"), "history does not have"),
        (put("history.train_loss", {}), "history.train_loss is no list of steps"),
        (put("history.train_loss", [[1]]), "history.train_loss is no list of steps"),
        (put("history.train_loss", [[1, "2"]]), "history.train_loss is no list of steps"),
        (put("history.train_loss", [[2, 1.0], [1, 1.0]]), "history.train_loss is no list of steps"),
        (put("history.train_loss", [[2, 1.0]]), "history.train_loss has 1 of 2 steps"),
        (put("config.seed", -1), "config.seed is -1"),
        (put("history.heldout_loss", [[9, 1.0]]), "history.heldout_loss is no list of steps"),
        (put("history.train_loss", [[1, float("nan")]]), "history.train_loss is no list of steps"),
    ],
)
def test_a_meta_file_that_no_run_writes_is_refused_in_one_line(copied, change, words):
    _, folder = copied
    forge_meta(folder, change)
    with pytest.raises(UserError) as raised:
        meta.require_run(checkpoint.load(folder), folder)
    assert words in str(raised.value) and "\n" not in str(raised.value)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_meta_file_ends_in_a_traceback(written, trainer, data):
    """One value of it, somewhere, is another one; what passes all checks is what the trainer would write itself."""
    folder = written[1]
    content = (folder / checkpoint.META).read_bytes()
    values = json.loads(content)
    here = values
    while True:
        key = data.draw(st.sampled_from(list(here) if isinstance(here, dict) else range(len(here))))
        if not here[key] or not isinstance(here[key], dict | list) or data.draw(st.booleans()):
            here[key] = data.draw(JSON)
            break
        here = here[key]
    try:
        saved = checkpoint.parse_meta(json.dumps(values).encode(), folder)
        forged = dataclasses.replace(
            checkpoint.load(folder), step=saved.pop("step"), aliases=saved.pop("aliases"), meta=saved
        )
        meta.require_run(forged, folder)
        recipes.any_from_dict(saved["recipe"])
        config_from({}, saved["config"])
        trainer.check(forged, folder)
    except UserError as error:
        assert "\n" not in str(error)


def test_what_a_run_writes_passes(copied, corpus):
    config, folder = copied
    saved = checkpoint.load(folder)
    meta.require_run(saved, folder)
    trainer = Trainer(config, recipes.load("nvfp4"), corpus)
    trainer.restore(saved, folder)
    assert trainer.completed == 2
    result = loop.Run("nvfp4", trainer.chosen, **saved.meta["history"])
    again = trainer.checkpoint(result.history)
    assert all(torch.equal(tensor, saved.training[name]) for name, tensor in again.training.items())
    assert result.train_loss == saved.meta["history"]["train_loss"]


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.TRAINING])
def test_tensors_that_no_reader_takes_are_told(copied, name):
    _, folder = copied
    (folder / name).write_bytes(b'\x08\0\0\0\0\0\0\0{"a":[]}')
    sign(folder)
    with pytest.raises(UserError, match=f"{name} is unreadable") as raised:
        checkpoint.load(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["x", "[0]", '[0, "entries", "a", "b", "c", "d"]', '["a", "steps", 1]', "memory"])
def test_observations_that_no_run_writes_are_refused_in_one_line(copied, trainer, name):
    config, folder = copied
    forge(folder, lambda tensors: tensors.update({f"observed/{name}": torch.zeros(2)}))
    with pytest.raises(UserError, match="what it observed") as raised:
        loop.Run("nvfp4", trainer.chosen).resume(Trainer(config, trainer.chosen, trainer.corpus), folder)
    assert "\n" not in str(raised.value)
