"""`duotone report` of a damaged result: one line and code 2, or a page, in bounded time and memory."""

import copy
import json
import os
import random
import time

import pytest

WRONG = [
    *(None, True, 0, -1, 10**400, 1.5, -1e308, float("nan"), float("inf"), "", "x" * 5000, "\ud800", "2020-13-01"),
    *([], {}, [[]], [None], [[1, 2]], [[64, 64, 10**9]], [{}], {"": None}, {"a": [0, 0]}, [[1, 1.0]] * 2),
]
LIKELY = {
    float: [0.0, -1.0, 1e-99, 1e99, -1e99, 3.4e38, 5e-324],
    int: [0, 1, 2**62, 2**20],
    str: ["", "a\nb", "nvfp4", "columnwise", "layers." + "9" * 3900, "<b>", "2020-01-01", "cuda"],
    bool: [True, False],
}
"""Values of the right type."""


def deep(count: int):
    value = 1
    for _ in range(count):
        value = [value]
    return value


@pytest.fixture(scope="module")
def good(duotone_run):
    """A small result with a run of each kind, and with all optional entries."""
    result = json.loads((duotone_run / "result.json").read_text())
    for run in result["runs"]:
        for key in ("plan", "statistics", "drift", "spreads", "operands", "modules"):
            run[key] = run[key][:3]
        run["products"] = [{"module": "layers.0.mlp.down", "gemm": "fprop", "error": 0.1, "expected": 0.2}]
        run["events"] = [{"step": 1, "text": "a spike"}]
    search = {"recipe": "mxfp8", "kind": "speed", "value": 1.2, "gap_percent": 0.5, "speed": 1.1, "memory": 0.5}
    result["settings"]["size"] = [4096, 8192]
    return [result, result | {"settings": result["settings"] | {"search": search}}]


@pytest.fixture(scope="module")
def duotone_run(tmp_path_factory):
    from duotone_lab.cli.main import run

    folder = tmp_path_factory.mktemp("compared")
    (folder / "text").write_text("planes and formats " * 500)
    options = ["--preset", "tiny", "--recipes", "mxfp8", "--steps", "2", "--data", folder / "text", "--out", folder]
    assert run(["compare", *map(str, options)]) == 0
    return folder


def places(value, path=()):
    """The path of each value, of long lists those of the first and the last."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        if not isinstance(value, list) or key in (0, len(value) - 1):
            yield from places(each, (*path, key))


def changed(document, path, value):
    """A copy with another value."""
    if not path:
        return value
    result = copy.copy(document)
    result[path[0]] = changed(document[path[0]], path[1:], value) if path[1:] else value
    return result


def value_at(document, path):
    for key in path:
        document = document[key]
    return document


def is_sound(duotone, folder, document) -> bool:
    """Whether the command wrote a page. Else it ended with one line and code 2."""
    (folder / "result.json").write_text(json.dumps(document))
    start = time.process_time()
    code, out, err = duotone("report", folder)
    assert time.process_time() - start < 20
    assert code == 0 or (code == 2 and out == "" and err.startswith("duotone: ") and err.count("\n") == 1)
    return code == 0


def damage(good, count: int):
    draw = random.Random(0)
    where = [list(places(document)) for document in good]
    for _ in range(count):
        at = draw.randrange(len(good))
        path = draw.choice(where[at])
        likely = LIKELY.get(type(value_at(good[at], path)), ())
        yield changed(good[at], path, draw.choice(likely if likely and draw.random() < 0.5 else WRONG))


def test_a_changed_value_is_one_line_or_a_page(duotone, good, tmp_path):
    assert all(is_sound(duotone, tmp_path, document) for document in good)
    pages = [is_sound(duotone, tmp_path, document) for document in damage(good, 100)]
    assert 5 < sum(pages) < 80


@pytest.mark.slow
def test_all_values_may_change(duotone, good, tmp_path):
    for document in damage(good, 2000):
        is_sound(duotone, tmp_path, document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("machine", "compiled_casts"), [[1, 2]]),
        (("created",), "yesterday"),
        (("runs", 0, "recipe"), {"rules": deep(60)}),
        (("runs", 0, "recipe"), {"rules": deep(900)}),
        (("settings", "config"), {"a": deep(60)}),
        (("more",), deep(60)),
        (("settings", "linears", "layers.0.attention.qkv"), []),
        (("settings", "linears", "layers.0.attention.qkv"), [0, 0]),
        (("settings", "linears"), [[64, 64]]),
        (("settings", "size"), [4096]),
        (("settings", "seed"), True),
        (("runs", 0, "heldout_loss"), [[1, float("inf")]]),
        (("runs", 0, "train_loss"), [[1.5, 2.0]]),
        (("runs", -1, "drift", 0, "amax"), -1.0),
        (("runs", -1, "products", 0, "expected"), 0.0),
        (("runs", -1, "plan", 0, "module"), "layers." + "9" * 5000),
        (("runs", -1, "spreads", 0, "lowest"), 10**18),
        (("settings", "search", "kind"), "beauty"),
    ],
)
def test_values_without_a_meaning_are_refused(refused, good, path, value, tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(changed(good[1], path, value)))
    assert "is not the result of a comparison or a run" in refused("report", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda result: result["settings"]["search"].update(recipe="of another result"),
        lambda result: [run.update(is_reference=False) for run in result["runs"]],
        lambda result: [run.update(heldout_loss=[[2, 0.0]], final_heldout_loss=0.0) for run in result["runs"]],
        lambda result: [run.update(final_heldout_loss=1e99, gap_percent=-1e99) for run in result["runs"]],
        lambda result: [run.update(train_loss=[[1, 1e99], [2, 1e99]], heldout_loss=[]) for run in result["runs"]],
        lambda result: result["settings"].update(linears={str(at): [64, 64] for at in range(400)}),
        lambda result: result.update(runs=result["runs"] * 20),
    ],
)
def test_values_that_contradict_each_other_give_a_page(duotone, good, change, tmp_path):
    result = copy.deepcopy(good[1])
    change(result)
    assert is_sound(duotone, tmp_path, result)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "result.json").write_text(json.dumps(good[0]))
    code, _, err = duotone("report", tmp_path, tmp_path / "other")
    assert code == 0, err


def test_a_result_that_is_no_file_is_not_read_without_end(refused, tmp_path):
    for name, make in {"device": lambda path: path.symlink_to("/dev/zero"), "pipe": os.mkfifo}.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / "result.json")
        assert "is no file of at most" in refused("report", tmp_path / name)
    (tmp_path / "large").mkdir()
    with open(tmp_path / "large" / "result.json", "wb") as file:
        file.truncate(1 << 40)
    assert "is no file of at most" in refused("report", tmp_path / "large")
