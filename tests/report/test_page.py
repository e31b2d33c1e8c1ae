"""The page as text: the right number in the right place, whatever the result holds."""

import json
import math
import os
import re
import stat
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from duotone.errors import UserError
from duotone_lab.report import render, write_report

Result = dict[str, Any]
HOSTILE = "<script>alert('x')</script>\"&"
ODD = (None, math.nan, math.inf, -math.inf, 0.0, 3e38)
BESIDE = ("result.json", "planes.csv")
"""Files that a click opens; the page loads neither."""

VOID = {"meta", "link", "br", "wbr", "col", "input"}


class Page(HTMLParser):
    """The rows of all tables, every element's attributes, and a failure for tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def row(self, name: str) -> list[str]:
        """The first row whose first cell starts with `name`, spaces made equal."""
        clean = ([re.sub(r"\s+", " ", cell).strip() for cell in row] for row in self.rows)
        return next(row for row in clean if row and row[0].startswith(name))

    def charts(self) -> list[str]:
        return [attributes["aria-label"] or "" for _, attributes in self.elements if attributes.get("role") == "img"]


def run_named(result: Result, name: str) -> Result:
    return next(run for run in result["runs"] if run["name"] == name)


def test_the_numbers_of_a_recipe_stand_in_its_own_row(result: Result) -> None:
    run = run_named(result, "nvfp4")
    run |= {"final_train_loss": 2.71828, "final_heldout_loss": 3.14159, "gap_percent": 1.1249}
    run |= {
        "step_ms": 123.4,
        "tokens_per_second": 16596.4,
        "peak_memory_bytes": 3 * 2**30,
        "weight_bytes": 1536,
    }
    run |= {"saved_activation_bytes": 10 * 2**20}
    row = Page(render(result)).row("nvfp4")
    assert row[1:] == [
        *("2.7183", "3.1416", "+1.12 %"),
        *("3.00 GiB", "1.50 KiB", "10.0 MiB", "0 / 48 / 3"),
    ]
    assert re.search(r"nvfp4</th><td>123&nbsp;ms</td><td>16,596</td>", render(result))


def test_the_verdict_ranks_the_recipes_and_names_the_noise_and_the_emulation(result: Result) -> None:
    text = Page(render(result)).text
    assert "mxfp8 cannot be told from bf16 here: within the noise. fp8_current ends 0.21 % above" in text
    assert "hybrid 0.63 % and nvfp4 1.12 %." in text
    assert "perturbed by 1e-6 ends 0.05 % away" in text
    assert "says nothing about hardware that multiplies these formats natively" in text


def test_each_chart_is_an_image_with_a_name(result: Result) -> None:
    page = Page(render(result))
    assert all(attributes.get("role") == "img" for tag, attributes in page.elements if tag == "svg")
    charts = {"Loss over steps": 2, "Gap to bf16": 2, "Gap and speed": 2, "Gap and peak memory": 2}  # wide and narrow
    for start, count in {**charts, "Colour scale of the signal": 1}.items():
        assert sum(label.startswith(start) for label in page.charts()) == count, start
    tables = [attributes.get("aria-label") or "" for _, attributes in page.elements]
    assert sum(label.startswith("Planes of ") for label in tables) == 4
    assert "bf16: all planes are exact" in page.text.replace(" :", ":")


def test_a_cell_shows_every_quantity_of_its_plane(result: Result) -> None:
    entry = run_named(result, "hybrid")["statistics"][7]
    entry |= {"snr_db": 27.3456, "underflow": 0.0123, "saturation": 0.5, "amax": 1234.5, "samples": 17}
    entry |= {"dynamic_range_bits": 21.25, "bias": -0.02, "cosine": 0.999}
    page = render(result)
    title = f"{entry['format']}, underflow 1.2 %, saturation 50.0 %, amax 1,234, samples 17"
    (cells,) = re.findall(rf'<td title="{re.escape(title)}">(.*?)</td>', page)
    values = re.findall(r'<i class="m(\d)[^"]*">([^<]*)</i>', cells)
    assert values == list(zip("0123456", ("27.3", "1.2", "50.0", "21.2", "2.0", "1,000", "–"), strict=True))  # noqa: RUF001


def test_a_kind_of_module_shows_the_worst_of_its_layers_and_each_of_them(result: Result) -> None:
    statistics = run_named(result, "mxfp8")["statistics"]
    weak = next(entry for entry in statistics if (entry["module"], entry["role"]) == ("layers.2.mlp.down", "weight"))
    weak |= {"snr_db": -3.21, "underflow": math.nan}
    page = render(result)
    table = page[page.index("Planes of mxfp8") :]
    kind = table[table.index("layers.*.mlp.down (4)") :]
    assert '<i class="m0 v1">−3.2</i><i class="m1 bad">NaN</i>' in kind[: kind.index("</tr>")]  # noqa: RUF001
    assert "lowest in layers.2.mlp.down: " in kind[: kind.index("</tr>")]
    members = kind[: kind.index("</tbody>")]
    assert [members.count(f"layers.{index}.mlp.down</th>") for index in range(4)] == [1] * 4


def test_gradients_below_the_square_root_of_three_times_their_noise_are_marked(result: Result) -> None:
    for entry, signal in zip(run_named(result, "nvfp4")["statistics"][4:6], (4.7, 4.8), strict=True):
        assert entry["role"] == "grad_output"
        entry["snr_db"] = signal
    page = render(result)
    assert '<i class="m6 bad">1.72</i>' in page and '<i class="m6">1.74</i>' in page


def test_spikes_and_amaxes_that_are_not_finite_are_told(result: Result) -> None:
    assert "delayed scaling:" not in render(result)
    run_named(result, "hybrid")["statistics"][7] |= {"amaxes_skipped": 2, "spikes_clamped": 1}
    page = render(result)
    assert "delayed scaling: 2 amaxes were not finite, 1 were spikes and entered as less; most of them in" in page


def test_a_recipe_keeps_its_colour_in_every_chart_and_table(result: Result) -> None:
    page = render(result)
    for name, colour in (
        ("bf16", "reference"),
        ("bf16 (noise)", "noise"),
        ("fp8_current", "s0"),
        ("hybrid", "s3"),
    ):
        title = re.escape(f"<title>{name}</title>")
        assert set(re.findall(rf'class="line (\w+)"[^>]*>{title}', page)) == {colour}
        if name != "bf16 (noise)":
            assert set(re.findall(rf'<g class="(\w+)"><title>{re.escape(name)} [+−t]', page)) == {colour}  # noqa: RUF001
        assert set(re.findall(rf'class="dot (\w+)"></span>{re.escape(name)}[\n<]', page)) == {colour}


def test_the_plan_gathers_equal_modules_and_marks_high_precision(result: Result) -> None:
    text = render(result)
    page = Page(text)
    row = page.row("layers.{0–3}.attention.qkv")  # noqa: RUF001
    assert row[1:4] == ["fprop", "identity", "identity"]
    assert "51 GEMMs: 0 native, 48 emulated, 3 high precision" in page.text
    assert "the output head stays in high precision by default" in page.text
    highlighted = [attributes for tag, attributes in page.elements if tag == "tr" and attributes.get("class") == "high"]
    assert len(highlighted) == 2 * 6 + 4 * 3


def test_the_recipe_is_shown_as_json(result: Result) -> None:
    run_named(result, "mxfp8")["recipe"] = {
        "name": "mxfp8",
        "rules": [{"match": "*.mlp", "limit": 0.5}],
        "a": None,
    }
    text = render(result)
    blocks = re.findall(r"<pre[^>]*>({.*?)</pre>", text, re.S)
    recipe = json.loads(blocks[3].replace("&#34;", '"'))
    assert recipe == run_named(result, "mxfp8")["recipe"]


def test_hostile_names_are_shown_and_not_run(result: Result) -> None:
    run = run_named(result, "nvfp4")
    run |= {"name": HOSTILE, "recipe": {HOSTILE: HOSTILE}, "error": HOSTILE}
    for entry in run["plan"] + run["statistics"]:
        entry["module"] += HOSTILE
    for row in run["plan"]:
        row |= dict.fromkeys(("a", "b", "kernel", "reason", "gemm"), HOSTILE)
    result["settings"] |= dict.fromkeys(("command", "model", "data"), HOSTILE)
    result["machine"]["processor"] = HOSTILE
    text = render(result)
    page = Page(text)
    assert not any(tag == "script" for tag, _ in page.elements)
    assert HOSTILE in page.text
    assert any(HOSTILE in label for label in page.charts())


def test_a_file_name_that_is_not_utf8_does_not_stop_the_report(result: Result, tmp_path: Path) -> None:
    result["runs"][2]["name"] = "bad\udcff"
    write_report(result, tmp_path / "report.html")
    assert "bad?" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_page_loads_nothing_and_runs_nothing(result: Result) -> None:
    page = Page(render(result))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "video", "audio", "use", "image"}
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("href", "src", "xlink:href", "srcset", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")) or attributes[name] in BESIDE, (tag, name)
    text = render(result)
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {
        f"#{chart}{width}-frame" for chart in ("loss", "gap") for width in ("", "-slim")
    }


def test_a_partial_report_says_so_and_tells_what_did_not_end(result: Result, unstarted: Result) -> None:
    result["partial"] = True
    result["runs"][4]["train_loss"] = result["runs"][4]["train_loss"][:40]
    result["runs"][5] = unstarted
    text = Page(render(result)).text
    assert "Partial report." in text
    assert "nvfp4 stopped at step 40 of 120" in text
    assert "late did not start" in text
    assert Page(render(result)).row("late")[1:] == ["–"] * 7  # noqa: RUF001
    verdict = text[text.index("4 recipes against") : text.index("Yardstick")]
    assert "fp8_current" in verdict
    assert "nvfp4" not in verdict


def test_a_whole_report_has_no_banner(result: Result) -> None:
    text = Page(render(result)).text
    assert "Partial report" not in text
    assert "Not every recipe" not in text


def test_a_diverged_run_is_named_and_marked(result: Result) -> None:
    run = run_named(result, "nvfp4")
    run["train_loss"] = [[step, loss if step < 64 else math.nan] for step, loss in run["train_loss"]]
    run |= {"final_train_loss": math.nan, "final_heldout_loss": math.inf, "gap_percent": math.nan}
    text = render(result)
    page = Page(text)
    assert "nvfp4 diverged: its loss is not a finite number from step 64" in page.text
    assert page.row("nvfp4")[1:4] == ["NaN", "∞", "NaN"]
    assert text.count("<title>nvfp4: not a finite number from step 64</title>") == 4  # in two charts of two widths
    assert any("nvfp4 diverged" in label for label in page.charts())


def test_a_failed_run_shows_its_error(result: Result) -> None:
    result["runs"][3]["error"] = "no memory left"
    assert "mxfp8 failed: no memory left" in Page(render(result)).text


FIELDS = (
    *("final_train_loss", "final_heldout_loss", "gap_percent", "step_ms", "tokens_per_second"),
    *("peak_memory_bytes", "weight_bytes", "saved_activation_bytes"),
)


@pytest.mark.parametrize("turns", [len(ODD), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("odd", ODD)
def test_no_number_of_a_result_can_break_the_page(odd: float | None, turns: int, build: Callable[..., Result]) -> None:
    """All numbers at once, and each alone: values take turns at it, and each of them has its turn in the slow run."""

    def places(result: Result) -> list[tuple[Any, Any]]:
        """Each container with the key of one number, in the reference and in a recipe."""
        results: list[tuple[Any, Any]] = [(result["runs"][1], "gap_percent")]
        for run in (result["runs"][0], result["runs"][2]):
            results += [(run, name) for name in FIELDS]
            results += [
                (point, 1) for name in ("train_loss", "heldout_loss") for point in run[name][:: len(run[name]) - 1]
            ]
            results += [(run["statistics"][0], name) for name in ("snr_db", "underflow", "saturation", "amax")]
        return results

    for index in range(ODD.index(odd) % turns, len(places(build(steps=6, layers=1))), turns):
        result = build(steps=6, layers=1)
        container, key = places(result)[index]
        container[key] = odd
        check_drawing(render(result))
    result = build(steps=6, layers=1)
    for container, key in places(result):
        container[key] = odd
    check_drawing(render(result))


def check_drawing(text: str) -> None:
    """Nothing in a chart is placed at a coordinate that is not a number."""
    names = {
        "x",
        "y",
        "d",
        "cx",
        "cy",
        "x1",
        "x2",
        "y1",
        "y2",
        "r",
        "width",
        "height",
        "points",
        "viewbox",
        "transform",
    }
    for tag, attributes in Page(text).elements:
        for name in names & attributes.keys():
            assert not re.search("nan|inf|none", attributes[name] or "none", re.I), (tag, attributes)


def test_a_result_without_runs_or_with_nothing_but_unstarted_runs_is_a_page(result: Result, unstarted: Result) -> None:
    result["runs"] = []
    assert "There is no reference run" in Page(render(result)).text
    result["runs"] = [unstarted | {"is_reference": True}, unstarted | {"name": "later"}]
    text = Page(render(result)).text
    assert "No run has taken a step" in text
    assert "has no final held-out loss" in text


def test_missing_settings_are_left_out(result: Result) -> None:
    result["settings"], result["machine"] = {"command": None, "noise": None}, {}
    text = Page(render(result)).text
    assert "None" not in text
    assert "Training" not in text


def test_one_step_is_enough_for_a_page(build: Callable[..., Result]) -> None:
    check_drawing(render(build(steps=1, layers=1)))


@pytest.mark.rest
def test_a_large_result_stays_below_one_megabyte_with_everything_in_it(build: Callable[..., Result]) -> None:
    result = build(steps=5000, layers=15)
    for run in result["runs"]:
        for index, row in enumerate(run["plan"]):
            row["reason"] = f"reason {index}: K = 96 is no multiple of the block of 128, so this GEMM is not quantized"
        for entry in run["statistics"]:
            entry["snr_db"] = entry["snr_db"] or 30.0
    text = render(result)
    assert len(text.encode()) < 1_000_000
    assert 'samples 3">' in text
    assert "reason 182:" in text
    assert "layers.14.mlp.down</th>" in text


@pytest.mark.rest
def test_a_model_of_eighty_layers_stays_below_one_megabyte_with_each_layer(build: Callable[..., Result]) -> None:
    result = build(steps=200, layers=80)
    next(e for e in run_named(result, "mxfp8")["statistics"] if e["module"] == "layers.7.mlp.down")["snr_db"] = -3.21
    text = render(result)
    assert len(text.encode()) < 1_000_000
    row = text[text.index("layers.7.mlp.down</th>", text.index("Planes of mxfp8")) :]
    assert ">−3.2</i>" in row[: row.index("</tr>")]  # noqa: RUF001
    assert "layers.*.mlp.down (80)" in text and "tick it to see each" in text


@pytest.mark.rest
def test_a_huge_result_shows_kinds_alone(build: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duotone_lab.report.page.LIMIT_BYTES", 250_000)
    result = build(steps=200, layers=80)
    next(e for e in run_named(result, "mxfp8")["statistics"] if e["module"] == "layers.7.mlp.down")["snr_db"] = -3.21
    text = render(result)
    assert len(text.encode()) < 250_000
    kinds = text[text.index("Planes of mxfp8") :]
    assert ">−3.2</i>" in kinds and "layers.7.mlp.down</th>" not in kinds and "tick it" not in text  # noqa: RUF001


def test_write_report_leaves_the_page_and_nothing_else(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(result, path)
    assert path.read_text(encoding="utf-8") == render(result)
    assert os.listdir(tmp_path) == ["report.html"]
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_failed_write_keeps_the_old_report_and_tells_what_to_do(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write the report .*No space left.*: give a file in"):
        write_report(result, path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_missing_folder_is_one_clear_line(result: Result, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="existing, writable folder") as caught:
        write_report(result, tmp_path / "absent" / "report.html")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []
