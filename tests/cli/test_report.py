"""`duotone report`: a page made anew, and two results on one page."""

import json

import pytest

TINY = ["compare", "--preset", "tiny", "--steps", "2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Comparisons of one model that differ in learning rate or in steps and seeds, and one of another model."""
    from duotone_lab.cli.main import run

    root = tmp_path_factory.mktemp("results")
    text = root / "words.txt"
    text.write_text("plane format scale block " * 400)
    arguments = [*TINY, "--data", str(text), "--recipes", "mxfp8", "--seeds", "2"]
    longer = ["--steps", "4", "--seeds", "1"]
    for name, more in {
        "slow": ["--lr", "1e-4"],
        "fast": [],
        "long": longer,
        "moe": ["--model", "moe", "--seeds", "1", "--steps", "1"],
    }.items():
        assert run([*arguments, *more, "--out", str(root / name)]) == 0
    return root


def test_a_page_is_made_anew_from_the_numbers(duotone, folders):
    page = folders / "slow" / "report.html"
    before = page.read_text()
    page.write_text("old")
    code, text, _ = duotone("report", folders / "slow")
    assert code == 0 and page.read_text() == before and f"Report: {page}" in text


def test_two_results_share_a_page_and_a_reference(duotone, folders):
    code, text, _ = duotone("report", folders / "slow", folders / "fast", "--out", folders / "two.html")
    page = (folders / "two.html").read_text()
    assert code == 0 and "learning rate 0.0001 and 0.001" in page and "mxfp8 (fast)" in page
    slow, fast = (json.loads((folders / name / "result.json").read_text()) for name in ("slow", "fast"))
    base = [slow["runs"][0]["final_heldout_loss"], slow["runs"][0]["repeats"][0]["heldout_loss"][-1][1]]
    other = [fast["runs"][1]["final_heldout_loss"], fast["runs"][1]["repeats"][0]["heldout_loss"][-1][1]]
    gap = sum(100 * (loss / reference - 1) for loss, reference in zip(other, base, strict=True)) / 2
    line = next(line for line in text.splitlines() if "mxfp8 (fast)" in line)
    assert f"{gap:+.3f} ±" in line


def test_results_that_were_trained_differently_name_no_recipe(duotone, folders):
    """Another learning rate changes the loss of bf16 as well: the first line must not praise a recipe for it."""
    code, text, _ = duotone("report", folders / "slow", folders / "fast", "--out", folders / "rates.html")
    page, message = (folders / "rates.html").read_text(), " ".join(text.split())
    assert code == 0 and "Confidence: none" in page
    assert all("No recipe is named" in each and "learning rate (0.0001 and 0.001)" in each for each in (page, message))
    other = folders / "warm"
    other.mkdir()
    result = json.loads((folders / "fast" / "result.json").read_text())
    result["settings"]["config"]["preset"]["warmup"] = 1
    (other / "result.json").write_text(json.dumps(result))
    assert "differ in warmup (2 and 1), so" in " ".join(duotone("report", folders / "fast", other)[1].split())
    assert "No recipe is named" not in duotone("report", folders / "fast", folders / "fast")[1]


def test_a_failed_run_takes_no_seed_from_the_others(duotone, folders):
    result = json.loads((folders / "fast" / "result.json").read_text())
    result["runs"][1] |= {"error": "out of memory", "repeats": []}
    (folders / "failed").mkdir()
    (folders / "failed" / "result.json").write_text(json.dumps(result))
    code, text, _ = duotone("report", folders / "fast", folders / "failed", "--out", folders / "seeds.html")
    message = " ".join(text.split())
    assert code == 0 and "mxfp8 (failed) failed: out of memory" in message
    assert "All that did not fail are compared at step 2, the last that they share, under seeds 0, 1, which" in message
    for name in ("mxfp8", "bf16 (failed)"):
        assert any("±" in line and f" {name}  " in line for line in text.splitlines())


def test_results_of_other_lengths_and_seeds_are_compared_where_both_have_a_loss(duotone, folders):
    """At the last held-out step and under the seeds that both have; neither run is called stopped."""
    code, text, _ = duotone("report", folders / "fast", folders / "long", "--out", folders / "lengths.html")
    page, message = (folders / "lengths.html").read_text(), " ".join(text.split())
    fast, longer = (json.loads((folders / name / "result.json").read_text())["runs"] for name in ("fast", "long"))
    losses = [dict(runs[place]["heldout_loss"]) for runs, place in ((fast, 0), (fast, 1), (longer, 0), (longer, 2))]
    step = max(losses[0].keys() & losses[2].keys())
    assert code == 0 and "stopped" not in message and "stopped" not in page and step == 2
    sentence = f"All are compared at step {step}, the last that they share, under seed 0, which all have. Longer runs"
    assert sentence in message and sentence in page and "steps 2 and 4" in page and "result.json</a>" not in page
    names = ("bf16", "mxfp8", "bf16 (long)", "mxfp8 (long)")
    lines = [line for name in names for line in text.splitlines() if line.strip().startswith(f"{name}  ")]
    assert all(f"{each[step]:.4f}" in line for each, line in zip(losses, lines, strict=True)) and "±" not in text
    assert f"{100 * (losses[3][step] / losses[0][step] - 1):+.3f}" in lines[3]


def test_a_page_of_two_is_replaced_only_when_forced(duotone, refused, folders):
    assert duotone("report", folders / "fast", folders / "slow")[0] == 0
    page = folders / "fast" / "against-slow.html"
    assert f"{page} exists" in refused("report", folders / "fast", folders / "slow") and page.exists()
    assert duotone("report", folders / "fast", folders / "slow", "--force")[0] == 0


def test_a_page_is_made_anew_in_its_place_and_replaces_no_other(duotone, refused, folders):
    other = folders / "slow" / "report.html"
    assert duotone("report", folders / "slow", "--out", other)[0] == 0
    before = other.read_bytes()
    assert f"{other} exists" in refused("report", folders / "fast", "--out", other)
    assert other.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{0}/absent"], "cannot read"),
        (["{0}/slow", "{0}/moe"], "differ in their model"),
        (["{0}/bad"], "is no JSON"),
        (["{0}/half"], "is not the result of a comparison or a run"),
        (["{0}/list"], "is not the result of a comparison or a run"),
        (["{0}/count"], "count/result.json is not the result of a comparison or a run"),
        (["{0}/null"], "null/result.json is not the result of a comparison or a run"),
        (["{0}/slow", "{0}/null"], "null/result.json is not the result of a comparison or a run"),
    ],
)
def test_bad_input_is_one_line(refused, folders, arguments, message):
    half = '{"duotone": "", "created": "", "partial": false, "machine": {}, "settings": {}, "runs": [{"name": "a"}]}'
    null = json.loads((folders / "slow" / "result.json").read_text())
    null["runs"][1]["heldout_loss"] = None
    texts = {"bad": "{", "list": "[]", "half": half, "null": json.dumps(null)}
    for name, text in (texts | {"count": json.dumps(null | {"runs": 5})}).items():
        (folders / name).mkdir(exist_ok=True)
        (folders / name / "result.json").write_text(text)
    assert message in refused("report", *(argument.format(folders) for argument in arguments))
