"""Every kernel compiles for the architectures that it is meant for, without a GPU, within its recorded budget."""

import itertools
import re
import sys
import warnings
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

triton = pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")
from budgets import CAPABILITIES, REMEDY, Use, build, complaint, load, measure  # noqa: E402
from cases import CASES, Case  # noqa: E402
from triton import JITFunction  # noqa: E402

RECORDED_WITH, RECORDED = load()
KERNELS = list(dict.fromkeys(case.function for case in CASES))
LIKE_OTHERS = (
    *("both planes nvfp4 and nvfp4_rht, odd sizes", "both planes nvfp4, odd sizes"),  # with stochastic rounding too
    *("both planes nvfp4_16x16_sr", "both planes nvfp4_4over6:"),
    *("both planes mxfp6_e3m2", "both planes mxfp4, odd sizes", "both planes fp8_e4m3_1x128, odd sizes"),
    *("gelu to fp8_e4m3_1x128", "gelu to fp8_e4m3_delayed", "gated silu to mxfp8_e4m3"),
)
"""Beginnings of the names of cases whose choices, one by one and most of them by twos, other quick cases have too."""


def choices(case: Case) -> set[tuple[str, str]]:
    """The choices of a case by twos, and each with itself."""
    launch = {"warps": case.warps, "stages": case.stages, "fusion": case.fusion, "registers": case.registers}
    names = sorted(map(str, {**case.types, **case.constants, **launch}.items()))
    return set(itertools.combinations_with_replacement(names, 2))


def quick_names(kernel: JITFunction) -> list[str]:
    """Cases of a kernel that have, one by one and by twos, the choices of all that are not like others."""
    cases = [case for case in CASES if case.function is kernel and not case.name.startswith(LIKE_OTHERS)]
    quick = {case.name: choices(case) for case in cases}
    for name, twos in list(quick.items()):
        if twos <= set().union(*(others for other, others in quick.items() if other != name)):
            del quick[name]
    return list(quick)


QUICK = {kernel: quick_names(kernel) for kernel in KERNELS}


def build_of(case: Case, capability: int) -> ParameterSet:
    """Quick cases of a kernel take turns with the architectures. Where they are fewer, the last one has the rest."""
    names, turn = QUICK[case.function], CAPABILITIES.index(capability)
    at = names.index(case.name) if case.name in names else -1
    quick = at >= 0 and (turn == at % 3 or (at == len(names) - 1 and turn > at))
    identity = f"{case.name.replace(' ', '-')}-sm_{capability}"
    return pytest.param(case, capability, id=identity, marks=() if quick else pytest.mark.slow)


BUILDS = [build_of(*pair) for pair in itertools.product(CASES, CAPABILITIES)]


def test_each_kernel_has_a_quick_build_for_each_architecture() -> None:
    quick = {(build.values[0].function, build.values[1]) for build in BUILDS if not build.marks}
    assert quick == set(itertools.product(KERNELS, CAPABILITIES))


@pytest.mark.filterwarnings("default:.*budget:UserWarning")
@pytest.mark.parametrize(("case", "capability"), BUILDS)
def test_a_kernel_compiles_and_stays_within_its_budget(case, capability) -> None:
    """Another Triton than the one of the record allocates differently: then it is a warning."""
    module = build(case, capability)
    assert re.findall(r"^\.target (\S+)$", module.asm["ptx"], re.M) == [f"sm_{capability}a"]
    beyond = complaint(case.name, capability, measure(module), RECORDED)
    if beyond and triton.__version__ != RECORDED_WITH:
        warnings.warn(f"Triton {triton.__version__}, not {RECORDED_WITH}: {beyond}", stacklevel=1)
    else:
        assert not beyond, beyond


def test_each_budget_is_that_of_one_case() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(RECORDED) <= set(names), REMEDY


def test_each_kernel_of_these_modules_has_a_case() -> None:
    modules = {sys.modules[case.function.fn.__module__] for case in CASES}
    results = [result for module in modules for name, result in vars(module).items() if name.endswith("_kernel")]
    kernels = {getattr(result, "function", result) for result in results}
    assert kernels == {case.function for case in CASES}


def test_where_a_slot_of_a_history_starts_makes_no_variant_of_a_kernel() -> None:
    """Slots lie 4 bytes apart: x and its weight, in slots 0 and 1, would compile each cast of delayed scales twice."""
    slots = "live", "scale", "row_from", "col_from"
    cases = [case for case in CASES if "live" in case.function.arg_names]
    types = {(case.function.__name__, name): case.types[name] for case in cases for name in slots if name in case.types}
    assert {kernel for kernel, _ in types} == {case.function.__name__ for case in cases}
    assert [slot for slot, kind in types.items() if kind.endswith(":16")] == []


def test_budgets_are_recorded_with_the_triton_that_tests_install() -> None:
    """Or their excess would only be warned of."""
    assert f"triton=={RECORDED_WITH};" in (Path(__file__).parents[2] / "Makefile").read_text()


def test_a_complaint_says_what_is_taken_what_is_allowed_and_how_to_record() -> None:
    recorded = {"a": {"90": [40, 0, 2048]}}
    for within in (Use(40, 0, 2048), Use(8, 0, 0)):
        assert complaint("a", 90, within, recorded) == ""
    for beyond in (Use(41, 0, 2048), Use(40, 8, 2048), Use(40, 0, 2049)):
        text = complaint("a", 90, beyond, recorded)
        assert all(f"{n} " in text for n in (*beyond, 40, 2048)) and text.endswith(REMEDY)
    assert "no budget" in complaint("a", 100, Use(1, 0, 0), recorded)
    assert "no budget" in complaint("b", 90, Use(1, 0, 0), recorded)
