import json

from duotone import recipes


def test_it_prints_the_front_and_rules_that_load(duotone, text_file, tmp_path):
    arguments = ["advise", "--preset", "tiny", "--data", text_file, "--as", "4096x8192"]
    code, text, err = duotone(*arguments, "--recipes", "mxfp8", "fp8-current", "--out", tmp_path / "a.toml")
    assert code == 0 and err == ""
    lines = text.splitlines()
    assert lines[0].startswith("gpt: 2 layers of 64") and lines[2].split()[0] == "gemm"
    assert {line.split()[1] for line in lines if line.startswith("  fprop")} == {"bf16", "fp8-current"}
    assert "layers.0.attention.qkv" in lines and max(map(len, lines)) <= 80
    toml = (tmp_path / "a.toml").read_text()
    assert text.rstrip().endswith(toml.rstrip()) and "NVIDIA H200" in text
    assert recipes.load(str(tmp_path / "a.toml")).base.name == "fp8-current"


def test_json_has_every_row(duotone, text_file):
    code, text, _ = duotone("advise", "--preset", "tiny", "--data", text_file, "--recipes", "mxfp8", "--json")
    document = json.loads(text)
    assert code == 0 and len(document["rows"]) == 8 * 3 * 2 and document["base"] == "mxfp8"
    assert {row["speed"] for row in document["rows"]} == {None}


def test_bad_input_is_one_line(refused, text_file, tmp_path):
    assert "'4096' is no width and tokens: write such as 4096x8192" in refused("advise", "--as", "4096")
    assert "no data file matches" in refused("advise", "--data", tmp_path / "absent.txt")
    assert "is not a folder" in refused("advise", "--data", text_file, "--out", text_file / "a.toml")
    assert "words.txt exists: choose another --out" in refused("advise", "--data", text_file, "--out", text_file)
    assert "mxfp9" in refused("advise", "--preset", "tiny", "--data", text_file, "--recipes", "mxfp9")
