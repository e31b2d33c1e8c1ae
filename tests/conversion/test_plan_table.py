"""The value that `duotone.plan` returns: it prints as a table, filters, compares, and goes to JSON and back."""

import json
import pickle

import pytest
import torch
from torch import nn

import duotone
from duotone import Plan, PlanRow, UserError

ROWS = (
    PlanRow("layers.0.fc", "fprop", "mxfp8_e4m3", "mxfp8_e4m3", "kernel one", True, ""),
    PlanRow("layers.0.fc", "dgrad", "mxfp8_e4m3", "nvfp4", "kernel", False, "no native rule"),
    PlanRow("layers.1.fc", "fprop", "identity", "identity", "torch", True, "kept in high precision by a rule"),
    PlanRow("embed", "-", "identity", "identity", "torch", True, "an embedding is a look-up, not a GEMM"),
)
PLAN = Plan(ROWS)


def test_a_plan_is_the_sequence_of_its_rows() -> None:
    assert list(PLAN) == list(ROWS) and len(PLAN) == 4
    assert PLAN[1] == ROWS[1] and PLAN[-1] == ROWS[-1]
    assert PLAN[1:3] == Plan(ROWS[1:3])
    assert ROWS[2] in PLAN and PLAN.index(ROWS[2]) == 2
    assert hash(PLAN) == hash(Plan(ROWS))
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN


def test_a_plan_prints_as_a_table() -> None:
    lines = str(PLAN[:2]).splitlines()
    assert lines == [
        "module       gemm   a           b           kernel      runs      reason",
        "layers.0.fc  fprop  mxfp8_e4m3  mxfp8_e4m3  kernel one  native",
        "layers.0.fc  dgrad  mxfp8_e4m3  nvfp4       kernel      emulated  no native rule",
    ]
    assert str(Plan(())) == "module  gemm  a  b  kernel  runs  reason"
    assert repr(PLAN) == "Plan(4 rows: 1 native, 1 emulated, 2 high precision)"


@pytest.mark.parametrize(
    ("module", "conditions", "left"),
    [
        ("*", {}, [0, 1, 2, 3]),
        ("layers.0.*", {}, [0, 1]),
        ("layers.?.fc", {"gemm": "fprop"}, [0, 2]),
        ("*", {"runs": "native"}, [0]),
        ("*", {"runs": "emulated"}, [1]),
        ("*", {"runs": "high precision"}, [2, 3]),
        ("*", {"reason": "look-up"}, [3]),
        ("layers", {}, []),
    ],
)
def test_filters_leave_the_rows_that_meet_all(module: str, conditions: dict[str, str], left: list[int]) -> None:
    assert PLAN.filter(module, **conditions) == Plan(tuple(ROWS[i] for i in left))


def test_an_unknown_way_to_run_is_an_error() -> None:
    with pytest.raises(UserError, match="runs 'emulate' is unknown; allowed are 'native', 'emulated'"):
        PLAN.filter(runs="emulate")


def test_plans_differ_by_module_and_gemm() -> None:
    changed = PlanRow("layers.0.fc", "dgrad", "mxfp8_e4m3", "mxfp8_e4m3", "kernel", False, "")
    new = PlanRow("head", "-", "identity", "identity", "torch", True, "")
    diff = PLAN.diff(Plan((ROWS[0], changed, ROWS[2], new)))
    assert list(diff) == [(ROWS[1], changed), (ROWS[3], None), (None, new)]
    assert [line.split()[:3] for line in str(diff).splitlines()[1:]] == [
        ["-", "layers.0.fc", "dgrad"],
        ["+", "layers.0.fc", "dgrad"],
        ["-", "embed", "-"],
        ["+", "head", "-"],
    ]
    assert repr(diff) == "PlanDiff(3 rows differ)"
    assert not PLAN.diff(PLAN) and str(PLAN.diff(PLAN)) == "the plans are the same"
    with pytest.raises(UserError, match="diff takes a Plan; got list"):
        PLAN.diff(list(ROWS))


def test_rows_of_one_place_are_compared_in_order() -> None:
    rows = [PlanRow("a rule", "-", "identity", "identity", "torch", True, f"reason {i}") for i in range(3)]
    assert list(Plan((rows[0], rows[1])).diff(Plan((rows[0], rows[2])))) == [(rows[1], rows[2])]
    assert list(Plan((rows[0], rows[0])).diff(Plan((rows[0],)))) == [(rows[0], None)]


def test_a_plan_goes_to_json_and_back() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    assert json.loads(PLAN.to_json())[1]["reason"] == "no native rule"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is no JSON"),
        ("[" * 10**5, "this is no JSON"),
        ("{}", "a plan is a JSON list of rows; got dict"),
        ("[3]", "a row of a plan has module, gemm, a, b, kernel, native, reason; got 3"),
        (json.dumps([{**ROWS[0].to_dict(), "native": 1}]), "a row of a plan has"),
        (json.dumps([{**ROWS[0].to_dict(), "more": ""}]), "a row of a plan has"),
    ],
)
def test_other_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Plan.from_json(text)


def test_a_model_has_a_plan() -> None:
    model = duotone.convert(nn.Sequential(nn.Linear(64, 64), nn.Embedding(3, 3)), "mxfp8")
    plan = duotone.plan(model, dtype=torch.bfloat16)
    assert isinstance(plan, Plan)
    assert {row.a for row in plan.filter("0")} == {"mxfp8_e4m3"}
    assert plan.diff(duotone.plan(model, "bf16", dtype=torch.bfloat16)).pairs[0][1].runs == "high precision"


@pytest.mark.parametrize(("device", "here"), [("cuda", 0), ("cuda:0", 0), ("cuda:3", 0), ("cuda:2", 2)])
@pytest.mark.parametrize("recipe", [None, "fp8-current"])
def test_a_plan_for_a_cuda_device_that_is_not_here_is_refused(monkeypatch, device, here, recipe) -> None:
    """What a GPU would run is unknown without it: a reason that no product exists would be false."""
    model = duotone.convert(nn.Sequential(nn.Linear(64, 64)), "fp8-current", rules=())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    count = f"{here} CUDA devices are here" if here else "no CUDA device is here"
    for name in (device, torch.device(device)):
        with pytest.raises(UserError, match=f"device is '{device}', and {count}; name the GPU to plan for: \"sm90\""):
            duotone.plan(model, recipe, device=name)


def test_a_plan_takes_the_name_of_a_gpu_and_says_its_architecture() -> None:
    model = duotone.convert(nn.Sequential(nn.Linear(64, 64)), "fp8-current", rules=())
    assert duotone.plan(model, device="H100") == duotone.plan(model, device="sm90")
    assert {row.runs for row in duotone.plan(model, device="H100")} == {"native"}
    assert all(row.reason.endswith("on cuda sm80") for row in duotone.plan(model, device="A100"))
    assert all(row.reason.endswith("on cpu") for row in duotone.plan(model))
