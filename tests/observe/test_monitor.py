"""The monitor: the same bits, no wait in a step, lines that agree with taps, and alarms."""

import copy
import json
import math
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import formats, observe, recipes
from duotone.errors import UserError
from duotone.observe.alarms import Alarm, Alarms
from duotone.observe.step_statistics import SAMPLE, StepStatistics
from duotone.tensor import Plane
from duotone.tensor.plane import Planes

BF16 = torch.bfloat16


def mlp(recipe: str = "mxfp8", width: int = 64) -> nn.Module:
    torch.manual_seed(1)
    layers = {"up": nn.Linear(width, 96, dtype=BF16), "down": nn.Linear(96, width, dtype=BF16)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return duotone.convert(model, recipes.load(recipe), rules=())


def train(model: nn.Module, monitor: observe.Monitor | None, steps: int, spoil: int = 0) -> list[Tensor]:
    """Gradients and weights of every step; step number `spoil` has a NaN and two infinities in its input."""
    torch.manual_seed(0)
    optimizer, results = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for number in range(1, steps + 1):
        x = torch.randn(32, 64).to(BF16)
        if number == spoil:
            x[0, 0], x[1, 1], x[2, 2] = math.nan, math.inf, -math.inf
        model(x).square().mean().backward()
        results += [p.grad.clone() for p in model.parameters()]
        if number != spoil:
            optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
    return [*results, *model.parameters()]


def lines(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("recipe", recipes.names())
def test_a_monitored_run_computes_the_same_bits(recipe: str, tmp_path: Path) -> None:
    model = mlp(recipe)
    plain = train(copy.deepcopy(model), None, 4)
    with observe.Monitor(model, tmp_path / "m.jsonl", every=2, on_alarm=lambda alarm: None) as monitor:
        monitored = train(model, monitor, 4)
    assert repr(monitor) == f"Monitor(4 steps, every 2, {len(monitor.alarms)} alarms)"
    assert all(torch.equal(a, b) for a, b in zip(plain, monitored, strict=True))


def test_the_first_step_and_each_multiple_is_written_and_the_last_by_close(tmp_path: Path) -> None:
    path, model = tmp_path / "deep" / "m.jsonl", mlp()
    with observe.Monitor(model, path, every=3) as monitor:
        train(model, monitor, 7)
        assert monitor.steps == 7
    rows = lines(path)
    assert [row["step"] for row in rows if row["role"] == "input" and row["plane"] == "rowwise"] == [1, 1, 3, 3, 6, 6]
    assert list(dict.fromkeys((row["module"], row["role"]) for row in rows)) == [
        *(("up", "input"), ("up", "weight"), ("down", "input"), ("down", "weight")),
        *(("down", "grad_output"), ("up", "grad_output")),
    ]


def test_a_run_that_goes_on_appends_and_counts_on(tmp_path: Path) -> None:
    path, model = tmp_path / "m.jsonl", mlp()
    for start in (0, 10):
        with observe.Monitor(model, path, every=50, start=start) as monitor:
            train(model, monitor, 1)
    assert list(dict.fromkeys(row["step"] for row in lines(path))) == [1, 11]


def test_of_many_modules_each_has_its_errors_measured_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts and amax are of all modules in each step, and what is measured is what all together would give."""
    torch.manual_seed(0)
    model = duotone.convert(nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)]), recipes.load("mxfp8"), rules=())
    seen = {}
    for together in (99, 2):
        monkeypatch.setattr("duotone.observe.step_statistics.TOGETHER", together)
        path = tmp_path / f"{together}.jsonl"
        with observe.Monitor(model, path, every=1) as monitor:
            for step in range(6):
                model(torch.randn(32, 32, generator=torch.Generator().manual_seed(step))).sum().backward()
                monitor.step()
        seen[together] = {(row["step"], row["module"], row["role"], row["plane"]): row for row in lines(path)}
    assert seen[2].keys() == seen[99].keys() and all("amax" in row for row in seen[2].values())
    measured = {key: row for key, row in seen[2].items() if "snr_db" in row}
    assert all(row == seen[99][key] for key, row in measured.items())
    turns = [sorted({module for step, module, *_ in measured if step == number}) for number in range(1, 7)]
    assert sorted(map(len, turns[:3])) == [1, 2, 2] and sorted("".join("".join(part) for part in turns[:3])) == list(
        "01234"
    )
    assert turns[3:] == turns[:3]


def test_an_optimizer_counts_the_steps(tmp_path: Path) -> None:
    path, model = tmp_path / "m.jsonl", mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = observe.Monitor(model, path, every=2, optimizer=optimizer)
    for _ in range(4):
        for _ in range(2):  # microbatches
            model(torch.randn(32, 64).to(BF16)).square().mean().backward()
        optimizer.step()
    monitor.close()
    optimizer.step()
    assert monitor.steps == 4 and list(dict.fromkeys(row["step"] for row in lines(path))) == [1, 2, 4]


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed", "nvfp4", "bf16"])
def test_rows_of_small_operands_agree_with_a_tap(recipe: str, tmp_path: Path) -> None:
    """Everything is sampled where an operand is small, and two microbatches are one row."""
    model, tap, statistics = mlp(recipe), observe.Tap(), StepStatistics()
    recipe_value = recipes.load(recipe)
    for sampler in (tap, statistics):
        torch.manual_seed(3)
        twin = copy.deepcopy(model)
        for _ in range(2):
            with duotone.autocast(recipe=observe.with_statistics(recipe_value, sampler)):
                y = twin(torch.randn(32, 64).to(BF16))
            y.square().mean().backward()
    rows, _ = statistics.send({}).read()
    expected = tap.rows()
    assert [(r["module"], r["role"], r["plane"], r["format"]) for r in rows] == [
        (r["module"], r["role"], r["plane"], r["format"]) for r in expected
    ]
    shared = (
        ("amax", "nan", "inf") if recipe == "bf16" else ("snr_db", "underflow", "saturation", "bias", "cosine", "amax")
    )
    for row, other in zip(rows, expected, strict=True):
        assert {name: row[name] for name in shared} == pytest.approx({name: other[name] for name in shared}, rel=1e-3)


def test_counts_and_amax_are_of_the_whole_operand_and_errors_of_a_sample() -> None:
    torch.manual_seed(0)
    statistics, tap = StepStatistics(), observe.Tap()
    x = torch.randn(1024, 512).to(BF16)
    x[777, 333], x[1000, 5], x[3, 500] = math.nan, math.inf, -math.inf
    linear = duotone.convert(nn.Linear(512, 64, dtype=BF16), recipes.load("mxfp8"), rules=())
    for sampler in (statistics, tap):
        with duotone.autocast(recipe=observe.with_statistics(recipes.load("mxfp8"), sampler)):
            linear(x)
    row, other = statistics.send({}).read()[0][0], tap.rows()[0]
    amax = x.nan_to_num(0, 0, 0).abs().max().item()
    assert (row["nan"], row["inf"]) == (1, 2) == (other["nan"], other["inf"])
    assert row["amax"] == pytest.approx(amax, rel=1e-4) and other["amax"] == amax
    x = x.nan_to_num(0, 30, 30)
    statistics = StepStatistics()
    with duotone.autocast(recipe=observe.with_statistics(recipes.load("mxfp8"), statistics)):
        linear(x)
    row = statistics.send({}).read()[0][0]
    assert row["amax"] == 30 and row["snr_db"] == pytest.approx(31.5, abs=1) and x.numel() > 4 * SAMPLE


@pytest.mark.parametrize("recipe", recipes.names())
def test_no_step_waits_for_the_device(recipe: str, tmp_path: Path, no_synchronisation) -> None:
    model = mlp(recipe)
    monitor = observe.Monitor(model, tmp_path / "m.jsonl", every=2)
    monitor._write = lambda: monitor._sent.popleft()  # what reads comes when the numbers are there
    with no_synchronisation():
        for _ in range(3):
            model(torch.randn(32, 64).to(BF16)).sum().backward()
            monitor.step()
    monitor.close()


def test_numbers_that_are_not_there_yet_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "m.jsonl", mlp()
    monkeypatch.setattr("duotone.observe.step_statistics.Sent.is_there", lambda self: False)
    with observe.Monitor(model, path, every=2) as monitor:
        train(model, monitor, 1)
        assert lines(path) == []
        train(model, monitor, 1)
        assert {row["step"] for row in lines(path)} == {1}
    assert {row["step"] for row in lines(path)} == {1, 2}


def test_a_compiled_model_is_sampled_eager_with_the_same_bits(tmp_path: Path) -> None:
    path, model = tmp_path / "m.jsonl", mlp("fp8-current")
    twin, graphs = copy.deepcopy(model), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    plain = train(twin, None, 5)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with observe.Monitor(compiled, path, every=3) as monitor:
        monitored = train(compiled, monitor, 5)
    assert all(torch.equal(a, b) for a, b in zip(plain, monitored, strict=True))
    assert list(dict.fromkeys(row["step"] for row in lines(path))) == [1, 3] and len(graphs) == 1


def test_compiled_code_without_a_linear_stays_compiled_in_a_sampled_step(tmp_path: Path) -> None:
    """It keeps its memory and speed: a graph runs in each step after the first, which compiles nothing."""
    model, runs = mlp(), []

    def backend(graph, inputs):
        def run(*arguments):
            runs.append(len(runs))
            return graph(*arguments)

        return run

    compiled = torch.compile(torch.square, backend=backend)
    with observe.Monitor(model, tmp_path / "m.jsonl", every=3) as monitor:
        for _ in range(4):
            model(compiled(torch.randn(32, 64).to(BF16))).sum().backward()
            monitor.step()
    assert len(runs) == 3


def test_the_first_elements_that_are_not_finite_are_located(tmp_path: Path) -> None:
    path, model = tmp_path / "m.jsonl", mlp()
    with (
        pytest.warns(
            UserWarning, match=r"^step 4, not finite: up, input rowwise \(and \d+ more\): 1 NaN and 2 infinite"
        ),
        observe.Monitor(model, path, every=2) as monitor,
    ):
        train(model, monitor, 6, spoil=4)
    (alarm,) = monitor.alarms
    assert (alarm.step, alarm.kind, alarm.where) == (4, "not finite", "up, input rowwise")
    assert [line for line in lines(path) if "alarm" in line] == [
        {"step": 4, "alarm": "not finite", "where": alarm.where, "message": alarm.message, "planes": alarm.planes}
    ]


def row(name: str = "a", role: str = "input", **numbers: float) -> dict:
    return {"module": name, "role": role, "plane": "rowwise", "format": "f", "nan": 0, "inf": 0, "amax": 1.0, **numbers}


def kinds(alarms: Alarms, step: int, *rows: dict, dead: tuple[str, ...] = ()) -> list[tuple[str, str, int]]:
    return [(alarm.kind, alarm.where, alarm.planes) for alarm in alarms.check(step, rows, dead)]


def test_a_gradient_below_the_square_root_of_three_times_its_noise_is_an_alarm() -> None:
    grads = [
        row(name, "grad_output", gradient_to_noise=ratio) for name, ratio in (("a", 1.70), ("b", 1.74), ("c", 1.1))
    ]
    assert kinds(Alarms(), 1, *grads) == [("gradient to noise", "c, grad_output rowwise", 2)]


def test_elements_far_above_their_scale_are_an_alarm() -> None:
    rows = [row("a", clipped=0.002, saturation=0.5), row("b", clipped=0.0005, saturation=0.5)]
    assert kinds(Alarms(), 1, *rows) == [("saturation", "a, input rowwise", 1)]


def test_an_amax_eight_times_away_from_its_mean_is_an_alarm_once_a_mean_is_known() -> None:
    alarms = Alarms()
    assert [kinds(alarms, step, row(amax=amax)) for step, amax in enumerate((1.0, 9.0, 1.0))] == [[], [], []]
    steady = Alarms()
    for step in range(4):
        assert kinds(steady, step, row(amax=1.0), row("b", amax=2.0)) == []
    assert kinds(steady, 5, row(amax=7.9), row("b", amax=0.2)) == [("amax drift", "b, input rowwise", 1)]


def test_an_alarm_is_told_again_only_after_a_step_without_it() -> None:
    alarms, bad = Alarms(), row(nan=1)
    assert [len(kinds(alarms, step, each)) for step, each in enumerate((bad, bad, row(), bad))] == [1, 0, 0, 1]


def test_trouble_in_one_part_of_many_modules_is_told_once_and_hides_none_in_another() -> None:
    """Errors are measured in a part of the modules at each step, other numbers in all."""
    alarms = Alarms()

    def at(step: int, sampled: str, clipped: float) -> list[tuple[str, str, int]]:
        return kinds(alarms, step, *(row(name, **({"clipped": clipped} if name == sampled else {})) for name in "ab"))

    assert at(1, "a", 0.5) == [("saturation", "a, input rowwise", 1)]
    assert at(2, "b", 0.5) == [("saturation", "b, input rowwise", 1)]
    assert at(3, "a", 0.5) == at(4, "b", 0.0) == at(5, "a", 0.5) == []
    assert at(6, "b", 0.5) == [("saturation", "b, input rowwise", 1)]


def test_elements_that_are_not_finite_are_told_at_their_origin_alone() -> None:
    alarms, bad = Alarms(), row(nan=1)
    assert kinds(alarms, 1, row(), row("b", nan=1)) == [("not finite", "b, input rowwise", 1)]
    assert kinds(alarms, 2, bad, row("b", nan=1)) == kinds(alarms, 3, bad, row("b")) == []
    assert kinds(alarms, 4, row(), row("b")) == []
    assert kinds(alarms, 5, bad, row("b")) == [("not finite", "a, input rowwise", 1)]


def test_a_delayed_slot_that_meets_nothing_but_zeros_is_dead(tmp_path: Path) -> None:
    model = mlp("fp8-delayed")
    with torch.no_grad():
        model.down.weight.zero_()
    messages: list[Alarm] = []
    with observe.Monitor(model, tmp_path / "m.jsonl", every=2, on_alarm=messages.append) as monitor:
        for _ in range(4):
            model(torch.randn(32, 64).to(BF16)).sum().backward()
            monitor.step()
    (alarm,) = [alarm for alarm in messages if alarm.kind == "dead slot"]
    # The weight is zero, and so is what its layer gives the one before.
    assert (alarm.step, alarm.where, alarm.planes) == (2, "up, grad_output rowwise", 2)


def test_steady_training_raises_no_alarm(tmp_path: Path) -> None:
    for recipe in ("mxfp8", "nvfp4", "fp8-delayed", "fp8-block"):
        model = mlp(recipe)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with observe.Monitor(model, tmp_path / "m.jsonl", every=2) as monitor:
                train(model, monitor, 12)
        assert monitor.alarms == []


def test_trackers_get_the_worst_of_each_role_and_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict] = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(__name__="wandb", run=object(), log=logged.append))
    model = mlp()
    with observe.Monitor(model, tmp_path / "m.jsonl", every=2, to="wandb") as monitor:
        train(model, monitor, 2)
    rows = [row for row in lines(tmp_path / "m.jsonl") if row["step"] == 2]
    worst = min(row["snr_db"] for row in rows if (row["role"], row["plane"]) == ("weight", "columnwise"))
    assert [values["duotone/step"] for values in logged] == [1, 2]
    assert logged[1]["duotone/weight_columnwise/snr_db"] == worst and logged[1]["duotone/alarms"] == 0


def test_tensorboard_gets_scalars(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard: pip install tensorboard"
    )
    model = mlp()
    with observe.Monitor(model, tmp_path / "m.jsonl", every=2, to=["tensorboard"]) as monitor:
        train(model, monitor, 2)
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("duotone/input_rowwise/snr_db")] == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0; give an integer of at least 1"),
        ({"start": -1}, "start is -1"),
        ({"to": "csv"}, "does not know the tracker 'csv'; allowed are tensorboard, wandb, trackio"),
    ],
)
def test_wrong_options_are_refused_before_a_file_exists(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(duotone.UserError, match=message):
        observe.Monitor(mlp(), tmp_path / "m.jsonl", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_is_absent_or_not_open_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(duotone.UserError, match="trackio is not installed: pip install trackio"):
        observe.Monitor(mlp(), tmp_path / "m.jsonl", to="trackio")
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(__name__="wandb", run=None))
    with pytest.raises(duotone.UserError, match=r"call wandb.init\(\)"):
        observe.Monitor(mlp(), tmp_path / "m.jsonl", to="wandb")


@pytest.mark.parametrize("width", [8, 40])
def test_a_transform_is_measured_in_whole_groups(width: int) -> None:
    """Of 40 columns the first 32 are; of 8 there is no whole group, and counts remain."""
    statistics, x = StepStatistics(), torch.randn(16, width, generator=torch.Generator().manual_seed(0))
    fmt = formats.get("nvfp4_rht")
    plane = Plane(fmt, fmt.encode(x), (16, width))
    statistics.take(duotone.QuantizerRole("linear", "input", "a"), x, Planes(plane, None), (None, None))
    (row,), _ = statistics.send({}).read()
    assert row["amax"] == pytest.approx(x.abs().max().item(), rel=1e-4)
    if width == 40:
        error = plane.dequantize(torch.float32)[:, :32] - x[:, :32]
        expected = 20 * math.log10(x[:, :32].norm().item() / error.norm().item())
        assert row["snr_db"] == pytest.approx(expected, abs=1e-3)
    else:
        assert "snr_db" not in row


def test_what_a_monitor_cannot_do_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Monitor takes a torch"):
        observe.Monitor("model", tmp_path / "m.jsonl")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="no module of this model follows a recipe"):
        observe.Monitor(nn.Linear(16, 16), tmp_path / "m.jsonl").close()
    model = duotone.convert(nn.Sequential(nn.Linear(16, 16)), "mxfp8", rules=())
    with pytest.raises(UserError, match=r"cannot write .* \(Is a directory\): make room, or give a file"):
        observe.Monitor(model, tmp_path)
    with observe.Monitor(model, tmp_path / "a.jsonl") as monitor:
        with pytest.raises(UserError, match="sampled already; close the other monitor"):
            observe.Monitor(model, tmp_path / "b.jsonl")
    with pytest.raises(UserError, match="this monitor is closed"):
        monitor.step()
