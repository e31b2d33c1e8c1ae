"""Schedules: which recipe each step gets, fractions of a run, files, and refusals."""

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import duotone
from duotone import recipes
from duotone.errors import RecipeError, UserError
from duotone.recipes import CustomRecipe, Phase, Schedule
from later import Later

dynamo_testing = Later("torch._dynamo.testing")

MXFP8, BF16, NVFP4 = (recipes.load(name) for name in ("mxfp8", "bf16", "nvfp4"))


def three(*starts, **fields):
    return Schedule(tuple(Phase(r, start) for r, start in zip((MXFP8, NVFP4, BF16), starts, strict=False)), **fields)


def starts(schedule):
    return [phase.start for phase in schedule.phases]


def test_each_step_gets_the_recipe_of_the_phase_that_began_last():
    schedule = three(0, 3, 7)
    result = [schedule.at(step) for step in range(10)]
    assert result == [MXFP8] * 3 + [NVFP4] * 4 + [BF16] * 3
    assert schedule.at(10**9) is BF16


def test_within_a_phase_the_recipe_is_the_very_same_object_whatever_was_asked_before():
    schedule = three(0, 3)
    assert {id(schedule.at(step)) for step in (0, 5, 2, 0, 1)} == {id(MXFP8), id(NVFP4)}
    assert schedule.over(100).at(99) is NVFP4 and schedule.phase(3) is schedule.phases[1]


@pytest.mark.parametrize(
    ("fractions", "steps", "expected"),
    [
        ((0, 0.9), 1000, [0, 900]),
        ((0.0, 0.29, 0.7), 100, [0, 29, 70]),
        ((0, 0.07), 100, [0, 7]),
        ((0, 0.9), 6, [0, 5]),
        ((0, 0.99), 2, [0, 1]),
        ((0, 5, 0.5), 100, [0, 5, 50]),
        ((0, 0.5, 60), 100, [0, 50, 60]),
    ],
)
def test_fractions_become_the_nearest_step_and_at_least_the_last_one(fractions, steps, expected):
    schedule = three(*fractions).over(steps)
    assert starts(schedule) == expected and schedule.steps == steps
    assert schedule == three(*fractions, steps=steps) and schedule.over(steps) == schedule
    assert schedule.at(expected[-1]) is schedule.phases[-1].recipe
    assert schedule.at(expected[-1] - 1) is schedule.phases[-2].recipe


def test_fractions_of_a_run_of_unknown_length_name_what_to_call():
    with pytest.raises(UserError, match=r"phases at fractions of the run: call schedule.over\(steps\)"):
        three(0, 0.5).at(0)
    assert three(0.0, 5).at(5) is NVFP4


def test_a_schedule_over_another_length_is_refused():
    with pytest.raises(UserError, match="schedule is over 10 steps; got 20: make it anew"):
        three(0, 0.5, steps=10).over(20)


def test_phases_that_meet_in_a_short_run_are_refused():
    with pytest.raises(RecipeError, match="over 2 steps: two phases start at step 1; train more steps, or take"):
        three(0, 0.6, 0.9).over(2)
    with pytest.raises(RecipeError, match="over 100 steps: a phase at 70 precedes one at 50"):
        three(0, 70, 0.5).over(100)


@pytest.mark.parametrize("step", [-1, 0.5, True, "3"])
def test_a_step_is_an_integer_from_zero_on(step):
    with pytest.raises(UserError, match=re.escape(f"step is {step!r}; give an integer of at least 0")):
        three(0, 3).at(step)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Phase(8, 0), "a phase takes a recipe or its name; got int: use one of the classes of"),
        (lambda: Phase("mxfp9", 0), "recipe 'mxfp9' is unknown; did you mean mxfp8?"),
        (lambda: Phase(MXFP8, 1.0), "a phase starts at 1.0; give a step such as 900, or a fraction"),
        (lambda: Phase(MXFP8, float("nan")), "a phase starts at nan"),
        (lambda: Phase(MXFP8, -1), "a phase starts at -1"),
        (lambda: Phase(MXFP8, True), "a phase starts at True"),
        (lambda: Phase(MXFP8, 0, 1), "convert_parameters is 1; allowed are true and false"),
        (lambda: Schedule(()), "the first phase starts at nothing; it must start at 0"),
        (lambda: three(1, 2), "the first phase starts at 1; it must start at 0"),
        (lambda: three(0, 3, 3), "a phase at 3 precedes one at 3; each must start after the one before it"),
        (lambda: three(0, 0.5, 0.4), "a phase at 0.5 precedes one at 0.4"),
        (lambda: Schedule([Phase(MXFP8, 0)]), "give a tuple of duotone.recipes.Phase"),
        (lambda: three(0, 3, steps=0), "steps is 0; give an integer of at least 1"),
        (lambda: three(0, 3, title=3), "title is 3; it must be a string"),
    ],
)
def test_wrong_schedules_are_refused_at_construction(make, message):
    with pytest.raises(RecipeError, match=re.escape(message)) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_every_recipe_of_a_schedule_can_be_changed():
    strict = three(0, 0.5).map(lambda recipe: type(recipe)(strict=True))
    assert [phase.recipe.strict for phase in strict.phases] == [True, True] and starts(strict) == [0, 0.5]


def test_a_schedule_is_a_value_and_survives_pickle_json_and_toml(tmp_path: Path):
    rules = recipes.RuleRecipe(rules=(recipes.Rule(layer=-1, format="identity"),), base=NVFP4, title="tail")
    phases = (Phase(MXFP8, 0), Phase(rules, 40, convert_parameters=True), Phase(BF16, 0.75))
    for schedule in (Schedule(phases, title="mine"), Schedule(phases, steps=100)):
        assert schedule == Schedule(phases, schedule.steps, schedule.title) != three(0, 3)
        assert hash(schedule) == hash(Schedule(phases, schedule.steps, schedule.title))
        assert pickle.loads(pickle.dumps(schedule)) == schedule
        assert recipes.any_from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule
        path = tmp_path / "written.toml"
        path.write_text(recipes.dumps(schedule))
        assert recipes.load_schedule(str(path)) == schedule


def test_a_file_names_recipes_files_and_tables(tmp_path: Path):
    (tmp_path / "tail.toml").write_text("base = 'nvfp4'\n[[rules]]\nlayer = -1\nformat = 'identity'")
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        [[phases]]
        from = 0
        recipe = "mxfp8"
        [[phases]]
        from = 100
        recipe = "tail.toml"
        convert_parameters = true
        [[phases]]
        from = 0.9
        recipe = {recipe = "nvfp4", disable_rht = true}
        """
    )
    tail = recipes.load(str(tmp_path / "tail.toml"))
    last = recipes.NVFP4BlockScaling(disable_rht=True)
    phases = (Phase(MXFP8, 0), Phase(tail, 100, True), Phase(last, 0.9))
    assert recipes.load_schedule(str(path)) == Schedule(phases, title="mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("phases = []", "a schedule needs [[phases]] with from and recipe; add at least one"),
        ("[[phases]]\nrecipe = 'mxfp8'", "phase 1 has no from; give from = a step or a fraction"),
        ("[[phases]]\nfrom = 0", "phase 1 has no recipe; give"),
        ("[[phases]]\nfrom = 0\nrecipe = 'mxpf8'", "recipe 'mxpf8' is unknown; did you mean mxfp8?"),
        ("[[phases]]\nfrom = 0\nrecipe = 3", "phase 1: recipe is 3; give the name of a recipe, a file, or a table"),
        ("[[phases]]\nfrom = 0\nrecipe = {recipe = 'x'}", "phase 1: recipe: recipe 'x' is unknown"),
        ("[[phases]]\nfrom = '0'\nrecipe = 'mxfp8'", "phase 1: a phase starts at '0'"),
        ("[[phases]]\nfrom = 5\nrecipe = 'mxfp8'", "the first phase starts at 5; it must start at 0"),
        ("[[phases]]\nuntil = 5", "phase 1 has no key 'until'; allowed are from, recipe, convert_parameters"),
        ("strict = true\n[[phases]]\nfrom = 0\nrecipe = 'mxfp8'", "a schedule has no key 'strict'; allowed are name"),
        ("[[phases]]\nfrom = 0\nrecipe = 'wrong.toml'", "refer to each other in a cycle: wrong.toml -> wrong.toml"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=re.escape(message)) as raised:
        recipes.load_schedule(str(path))
    assert "wrong.toml" in str(raised.value) and "\n" not in str(raised.value)


def test_recipes_and_schedules_are_not_taken_for_each_other():
    name = "mxfp8-then-bf16-fprop"
    with pytest.raises(RecipeError, match=f"{name} is a schedule, not a recipe: use duotone.recipes.load_schedule, or"):
        recipes.load(name)
    with pytest.raises(RecipeError, match=r"mxfp8 is a recipe, not a schedule: use duotone\.recipes\.load"):
        recipes.load_schedule("mxfp8")
    assert recipes.load_any("mxfp8") == MXFP8 and recipes.load_any(name) == recipes.load_schedule(name)
    with pytest.raises(RecipeError, match="is a schedule"):
        recipes.from_dict(recipes.load_schedule(name).to_dict())


@pytest.mark.parametrize("name", recipes.schedule_names())
def test_the_schedules_that_ship_load_under_their_names(name):
    schedule = recipes.load_schedule(name)
    assert schedule.name == name and recipes.any_from_dict(schedule.to_dict()) == schedule
    assert len({id(schedule.over(1000).at(step)) for step in range(1000)}) == len(schedule.phases) > 1


def test_the_last_tenth_of_the_shipped_schedule_runs_forward_alone_in_high_precision():
    schedule = recipes.load_schedule("mxfp8-then-bf16-fprop").over(1000)
    assert schedule.at(899) == MXFP8 and schedule.at(900).name == "mxfp8-bf16-fprop"
    results = [
        schedule.at(900)(recipes.QuantizerRole("linear", kind, "a")) for kind in ("input", "weight", "grad_output")
    ]
    planes = [(quantizer.rowwise.name, quantizer.columnwise.name) for quantizer in results]
    assert planes == [("identity", "mxfp8_e4m3"), ("identity", "mxfp8_e4m3"), ("mxfp8_e4m3", "mxfp8_e4m3")]


def test_a_function_may_be_the_recipe_of_a_phase():
    schedule = Schedule((Phase(CustomRecipe(qfactory=recipes.zoo.mxfp8_factory), 0),))
    assert pickle.loads(pickle.dumps(schedule)) == schedule


def test_compiled_code_is_compiled_once_per_phase_and_gives_the_bits_of_eager():
    first, second = (recipes.load(name) for name in ("fp8-current", "fp8-delayed"))
    schedule = Schedule((Phase(first, 0), Phase(second, 2), Phase(BF16, 4)))

    def run(compiled):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(32, 32)).bfloat16()
        duotone.convert(model, schedule.at(0))
        counter = dynamo_testing.CompileCounterWithBackend("aot_eager")
        call = torch.compile(model, backend=counter, fullgraph=True) if compiled else model
        results = []
        for step in range(6):
            x = torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True)
            with duotone.autocast(recipe=schedule.at(step)):
                y = call(x)
            y.square().sum().backward()
            results += [y.detach(), x.grad]
        return results, counter.frame_count

    (result, frames), (expected, _) = run(True), run(False)
    assert frames == 3
    assert all(a.equal(b) for a, b in zip(result, expected, strict=True))
