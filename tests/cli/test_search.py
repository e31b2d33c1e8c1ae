import contextlib
import dataclasses
import io
import json
import math
import os
import random
import shutil
import signal

import pytest

from duotone import recipes
from duotone_lab.cli.main import run
from duotone_lab.training import sensitivity
from duotone_lab.training.trainer import Trainer

pytest.importorskip("scipy", reason="pip install 'scipy>=1.11'")


PAGES = ["report.html", "result.json"]


def evidence(folder):
    document = json.loads((folder / "evidence.json").read_text())
    return {key: value for key, value in document.items() if key not in ("command", "machine")}


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    draw = random.Random(0)
    text = tmp_path_factory.mktemp("data") / "words.txt"
    text.write_text(" ".join(draw.choice(["plane", "format", "scale", "block"]) for _ in range(2000)))
    tiny = ["search", "--preset", "tiny", "--steps", "4", "--seeds", "2", "--recipes", "fp8-current"]
    return [*tiny, "--as", "4096x8192", "--data", str(text), "--budget", "speed=1.3"]


@pytest.fixture(scope="module")
def whole(typed, tmp_path_factory):
    """A search that nothing stopped: its folder, exit code, stdout and stderr. Tests change copies of the folder."""
    out, printed, progress = tmp_path_factory.mktemp("whole") / "a", io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(progress):
        code = run([*typed, "--out", str(out)])
    return out, code, printed.getvalue(), progress.getvalue()


def test_it_leaves_a_recipe_its_evidence_and_a_report(whole):
    out, code, text, progress = whole
    document = evidence(out)
    assert code == 0 and sorted(os.listdir(out)) == [
        *("checkpoints", "evidence.json", "planes.csv", "recipe.toml", *PAGES)
    ]
    assert document["predicted"]["speed"] >= 1.3 and len(document["effects"]) == 2 * 4 * 3 * 2
    assert document["speeds"]["gpu"] == "NVIDIA H200" and document["settings"]["goal"] == {
        "kind": "speed",
        "value": 1.3,
    }
    names = [recipe for gemms in document["chosen"].values() for recipe in gemms.values()]
    assert len(names) == 24 and set(names) == {"bf16", "fp8-current"}
    entry = json.loads((out / "result.json").read_text())["runs"][1]
    assert entry["name"] == "searched" and document["measured"]["gap_percent"] == entry["gap_percent"]
    assert document["off_by"] == pytest.approx(document["predicted"]["gap_percent"] - entry["gap_percent"])
    quantized = [r for r in entry["plan"] if {r["a"], r["b"]} != {"identity"}]
    assert len(quantized) == names.count("fp8-current") and recipes.load(str(out / "recipe.toml")).title == "searched"
    text = " ".join(text.split())
    assert document["verdict"] in text and f"24 GEMMs: {names.count(names[0])} as in {names[0]}" in text
    assert "effects of single GEMMs: step 48/48" in progress
    page, ratio = (out / "report.html").read_text(), document["predicted"]["speed"]
    first = f"predicted {ratio:.2f} times as fast as bf16 for linears 4096 wide with 8192 tokens, so speed=1.3 is met;"
    assert "<h1>Use searched on an NVIDIA H200:" in page and first in page and first in text


def test_a_page_for_another_size_claims_no_goal(duotone, whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "a")
    code, text, _ = duotone("report", folder, "--as", "8192x8192")
    assert code == 0 and "linears 8192 wide with 8192 tokens" in " ".join(text.split()) and "is met" not in text


def test_stopped_anywhere_and_resumed_it_ends_with_the_same_evidence(duotone, typed, whole, tmp_path, monkeypatch):
    step, probe, count = Trainer.step, sensitivity._step, iter(range(1000))

    def stop_at(place, *_):
        if next(count) == place:
            os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "parts"
    monkeypatch.setattr(Trainer, "step", lambda self, *a, **k: (stop_at(1), step(self, *a, **k))[1])
    code, _, err = duotone(*typed, "--out", out)
    assert code == 130 and err.splitlines()[-1] == f"Continue with: duotone search --resume --out {out}"
    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(sensitivity, "_step", lambda *a: (stop_at(12), probe(*a))[1])
    code, *_ = duotone("search", "--resume", "--out", out)
    assert code == 130 and 0 < len(evidence(out)["effects"]) < 48 and not (out / "recipe.toml").exists()
    monkeypatch.setattr(sensitivity, "_step", probe)
    monkeypatch.setattr(Trainer, "step", lambda self, *a, **k: (stop_at(18), step(self, *a, **k))[1])
    assert duotone("search", "--resume", "--out", out)[0] == 130 and evidence(out)["measured"] is None
    monkeypatch.setattr(Trainer, "step", step)
    assert duotone("search", "--resume", "--out", out)[0] == 0
    assert evidence(out) == evidence(whole[0])
    assert (out / "recipe.toml").read_text() == (whole[0] / "recipe.toml").read_text()


def test_a_gap_of_zero_is_bf16(duotone, typed, tmp_path):
    code, text, _ = duotone(*typed[:-2], "--max-gap", "0%", "--seeds", "1", "--out", tmp_path / "a")
    assert code == 0 and "24 GEMMs: 24 as in bf16" in text
    assert evidence(tmp_path / "a")["measured"]["gap_percent"] == 0.0


def test_bad_input_is_one_line_before_anything_is_trained(refused, typed, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "__init__", None)
    bare, out = typed[:-2], ["--out", tmp_path / "a"]
    assert "a search needs one goal: --budget speed=1.3" in refused(*bare, *out)
    assert "a search needs one goal" in refused(*typed, "--max-gap", "0.2%", *out)
    for wrong in ("speed", "speed=0", "speed=-1", "gap=1", "memory=all"):
        assert f"--budget {wrong} is no goal" in refused(*bare, "--budget", wrong, *out)
    assert "--max-gap x is no goal" in refused(*bare, "--max-gap", "x", *out)
    text = refused(*bare, "--budget", "speed=9", *out)
    assert "speed=9 cannot be met on an NVIDIA H200 for linears 4096 wide with 8192 tokens: the most is 1.4" in text
    assert "the least is 0.5" in refused(*bare, "--budget", "memory=0.1", *out)
    limits = "but for linears from 4096 x 4096 with 8192 tokens to 8192 x 28672 with 8192 tokens"
    text = refused(*bare, "--as", "64x128", "--budget", "speed=1.1", *out)
    assert "no speed is known" in text and limits in text
    alone = refused("search", "--recipes", "bf16", "--budget", "speed=1.1", *out)
    assert "bf16 alone leaves nothing to choose: name another recipe with --recipes" in alone
    assert "cannot read" in refused("search", "--resume", *out)
    assert "takes the settings of the search" in refused("search", "--resume", "--seeds", "2", *out)
    assert "search takes each recipe once, and 'mxfp8' comes twice" in refused(
        *typed, "--recipes", "mxfp8", "mxfp8", *out
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "evidence.json").write_text('{"settings": {}, "effects": []}')
    assert "is not the evidence of a search (settings lacks or adds 'config')" in refused("search", "--resume", *out)
    assert "holds a search: continue it with `duotone search --resume`" in refused(*typed, *out)
    tiny = ("--preset", "tiny", "--steps", "2", "--recipes", "bf16")
    assert "holds a search" in refused("compare", *tiny, *out)


def test_a_comparison_removes_a_search_but_no_recipe_of_the_user(duotone, tmp_path):
    tiny = ("compare", "--preset", "tiny", "--steps", "1", "--recipes", "bf16")
    for folder, files in (("users", ["recipe.toml"]), ("search", ["recipe.toml", "evidence.json"])):
        (tmp_path / folder).mkdir()
        for name in files:
            (tmp_path / folder / name).write_text("{}")
        (tmp_path / folder / "checkpoints" / "step-00000050").mkdir(parents=True)
    assert duotone(*tiny, "--out", tmp_path / "users")[0] == 0
    assert sorted(os.listdir(tmp_path / "users")) == ["checkpoints", "planes.csv", "recipe.toml", *PAGES]
    assert len(os.listdir(tmp_path / "users" / "checkpoints")) == 1
    assert duotone(*tiny, "--force", "--out", tmp_path / "search")[0] == 0
    assert sorted(os.listdir(tmp_path / "search")) == ["checkpoints", "planes.csv", *PAGES]
    assert os.listdir(tmp_path / "search" / "checkpoints") == []


def test_a_format_under_which_the_loss_is_not_finite_is_never_chosen(duotone, typed, tmp_path, monkeypatch):
    measure = sensitivity._effect

    def broken(gemm, recipe, *steps):
        effect = measure(gemm, recipe, *steps)
        is_bad = gemm == ("layers.0.mlp.gate_up", "fprop")
        return dataclasses.replace(effect, forward=sensitivity._or_infinite(math.nan)) if is_bad else effect

    monkeypatch.setattr(sensitivity, "_effect", broken)
    code, *_ = duotone(*typed[:-2], "--max-gap", "90%", "--seeds", "1", "--out", tmp_path / "a")
    document = evidence(tmp_path / "a")
    assert code == 0 and [e["forward"] for e in document["effects"] if e["forward"] is None] == [None]
    assert document["chosen"]["layers.0.mlp.gate_up"] == {
        "fprop": "bf16",
        "dgrad": "fp8-current",
        "wgrad": "fp8-current",
    }
    assert document["uniform"]["fp8-current"]["gap_percent"] is None


def test_evidence_with_other_effects_is_refused(refused, whole, tmp_path):
    path = shutil.copytree(whole[0], tmp_path / "a") / "evidence.json"
    document = json.loads(path.read_text())
    for wrong in ([3], [{"module": "a"}], [{**document["effects"][0], "forward": "none"}]):
        path.write_text(json.dumps({**document, "effects": wrong}))
        assert "is not the evidence of a search (an effect" in refused("search", "--resume", "--out", tmp_path / "a")
