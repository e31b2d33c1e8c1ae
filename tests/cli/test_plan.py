import re

import pytest

from duotone.formats import TENSOR


def paragraphs(out):
    """The lines below the title, with notes and advice in one line each."""
    table, is_advised, advice = out.split("\n", 1)[1].partition("\nmodules with ")
    lines = table.replace("\n   ", " ").splitlines()
    return [*lines, f"modules with {advice}".replace("\n", " ").strip()] if is_advised else lines


def rows_of(out):
    """(module, gemm) -> the rest of the line, and its note."""
    notes = dict(line.split("  ", 1) for line in paragraphs(out) if line[0].isdigit())
    rows = [re.fullmatch(r"(\S+) +(\S+) +(.*) +(\d+)", line) for line in paragraphs(out) if not line[0].isdigit()]
    return {(row[1], row[2]): f"{row[3]} {notes[row[4]]}" for row in rows if row}


def test_each_gemm_has_a_row_with_formats_kernel_and_reason(duotone):
    code, out, err = duotone("plan", "--preset", "tiny", "--recipe", "mxfp8-fwd-nvfp4-bwd")
    assert (code, err) == (0, "") and out.splitlines()[0] == "mxfp8-fwd-nvfp4-bwd on cpu, preset tiny, model gpt"
    rows = rows_of(out)
    assert len(rows) == 1 + 2 * (4 * 3 + 2) + 3  # two products of attention in each block
    assert (
        rows["layers.1.mlp.down", "fprop"].startswith("mxfp8_e4m3") and "emulated" in rows["layers.1.mlp.down", "fprop"]
    )
    assert "nvfp4_rht_sr" in rows["layers.0.attention.qkv", "wgrad"]


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-block", "nvfp4-linear-fp8-dpa"])
def test_a_terminal_of_80_columns_holds_the_table_and_a_file_has_whole_names(duotone, recipe, monkeypatch):
    out = duotone("plan", "--preset", "tiny", "--recipe", recipe)[1]
    assert {("layers.0.attention.qkv", "fprop"), ("layers.1.mlp.down", "wgrad")} <= rows_of(out).keys()
    assert recipe != "mxfp8" or max(map(len, out.splitlines())) <= 80
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    table = re.sub(r"\x1b\[[0-9;]*m", "", duotone("plan", "--preset", "tiny", "--recipe", recipe)[1])
    assert max(map(len, table.splitlines())) <= 80 and "kept in high precision by a rule" in table


def test_what_stays_in_high_precision_says_why(duotone):
    rows = rows_of(duotone("plan", "--preset", "tiny")[1])
    assert "high precision" in rows["embedding", "-"] and "not a GEMM" in rows["embedding", "-"]
    assert "high precision" in rows["lm_head", "dgrad"] and "rule" in rows["lm_head", "dgrad"]


INPUT_ONLY = '[[rules]]\ntensor_type = "input"\nformat = "mxfp8_e4m3"\n'
ONE_SIDED = INPUT_ONLY + '[[rules]]\nformat = "identity"\n'


def test_strict_makes_an_unasked_fallback_an_error(duotone, refused, tmp_path):
    path = tmp_path / "one-sided.toml"
    path.write_text(ONE_SIDED)
    assert duotone("plan", "--preset", "tiny", "--recipe", path)[0] == 0
    assert "strict: fprop of layers.0.attention.qkv" in refused(
        "plan", "--preset", "tiny", "--recipe", path, "--strict"
    )


def test_strict_refuses_a_tensor_that_no_rule_matches(duotone, refused, tmp_path):
    path = tmp_path / "unmatched.toml"
    path.write_text(INPUT_ONLY)
    assert duotone("plan", "--preset", "tiny", "--recipe", path)[0] == 0
    message = refused("plan", "--preset", "tiny", "--recipe", path, "--strict")
    assert "no rule of recipe unmatched matches" in message and "tensor_type=weight" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "mxfp9"], "'mxfp9' is unknown"),
        (["--preset", "huge"], "unknown preset 'huge': choose one of demo, tiny, small"),
        (["--device", "cuda"], "no CUDA device is available here"),
        (["--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_what_does_not_exist_is_refused(refused, monkeypatch, arguments, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert message in refused("plan", *arguments)


ADVICE = "modules with a K x N too small for {} to pay on this device: 8; min_weight_elements"


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", "fp8-block"])
def test_a_line_below_the_table_says_where_bf16_would_be_faster(duotone, recipe):
    code, out, err = duotone("plan", "--preset", "tiny", "--arch", "sm90", "--recipe", recipe)
    *table, advice = paragraphs(out)
    assert (code, err) == (0, "") and advice.startswith(ADVICE.format(recipe))
    assert sum("native" in line for line in table) == 2 * 4 * 3 and "min_weight_elements" not in "".join(table)


def test_the_advice_concerns_modules_below_the_entry_alone(duotone, monkeypatch):
    arguments = ("plan", "--preset", "tiny", "--arch", "sm90", "--recipe", "fp8-current")
    sizes = set()
    for least in (1, 10**4, 10**9):
        monkeypatch.setattr("duotone.dispatch.target.LEAST_WORK", {((9, 0), TENSOR): least})
        last = paragraphs(duotone(*arguments)[1])[-1]
        sizes.add(int(last.split(": ")[1].split(";")[0]) if "min_weight_elements" in last else 0)
    assert {0, 8} < sizes and len(sizes) == 3


@pytest.mark.parametrize("work", ['"measured"', "5"])
def test_a_recipe_that_sets_min_gemm_work_gets_reasons_instead_of_advice(duotone, tmp_path, work):
    path = tmp_path / "mine.toml"
    path.write_text(f'recipe = "fp8-current"\nmin_weight_elements = {work}\n')
    rows = rows_of(duotone("plan", "--preset", "tiny", "--arch", "sm90", "--recipe", path)[1])
    assert not any(module == "modules" for module, _ in rows)
    left = [gemm for gemm, rest in rows.items() if "left in bf16 by min_weight_elements" in rest]
    assert len(left) == (2 * 4 * 3 if work == '"measured"' else 0)
    assert all("high precision" in rows[gemm] for gemm in left)


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_what_runs_emulated_or_in_bf16_gets_no_advice(duotone, recipe):
    assert "min_weight_elements" not in duotone("plan", "--preset", "tiny", "--arch", "sm90", "--recipe", recipe)[1]


@pytest.mark.parametrize(("arch", "runs"), [("sm80", "emulated"), ("sm90", "emulated"), ("sm100", "native")])
def test_an_architecture_that_is_not_here_can_be_planned_for(duotone, monkeypatch, arch, runs):
    """On a laptop: neither a GPU nor a torch that was built for one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    code, out, err = duotone("plan", "--preset", "tiny", "--arch", arch, "--recipe", "mxfp8")
    assert (code, err) == (0, "") and f"on {arch}" in out
    assert sum(runs in line for line in out.splitlines()) == 2 * 4 * 3


def test_an_unknown_architecture_is_refused(refused):
    assert "unknown architecture 'hopper'; write sm" in refused("plan", "--arch", "hopper")
    assert "no GPU has the architecture 'sm42'; known are sm70" in refused("plan", "--arch", "sm42")


def test_a_cpu_gets_no_advice(duotone):
    assert "min_weight_elements" not in duotone("plan", "--preset", "tiny", "--recipe", "fp8-current")[1]
