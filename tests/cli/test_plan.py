import pytest


def rows_of(out):
    """(module, gemm) -> the rest of the line."""
    lines = [line.split(None, 2) for line in out.splitlines()[2:]]
    return {(module, gemm): rest for module, gemm, rest in lines}


def test_each_gemm_has_a_row_with_formats_kernel_and_reason(duotone):
    code, out, err = duotone("plan", "--preset", "tiny", "--recipe", "mxfp8-fwd-nvfp4-bwd")
    assert (code, err) == (0, "") and out.splitlines()[0] == "mxfp8-fwd-nvfp4-bwd on cpu, preset tiny, model gpt"
    rows = rows_of(out)
    assert len(rows) == 1 + 2 * 4 * 3 + 3
    assert (
        rows["layers.1.mlp.down", "fprop"].startswith("mxfp8_e4m3") and "emulated" in rows["layers.1.mlp.down", "fprop"]
    )
    assert "nvfp4_rht_sr" in rows["layers.0.attention.qkv", "wgrad"]


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
