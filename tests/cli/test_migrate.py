"""`duotone migrate`: a table or JSON, exit code 1 where a call is refused."""

import json

SCRIPT = """import transformer_engine.pytorch as te
layer = te.Linear(768, 768)
te.get_ub("qkv")
"""


def test_uses_are_a_table_and_a_refused_one_is_exit_code_1(duotone, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    code, out, err = duotone("migrate", path)
    title, head, linear, overlap = out.splitlines()
    assert (code, err) == (1, "") and title.endswith("script.py: 2 uses, 1 refused")
    assert head.split() == "line use after install() in a script of Duotone".split()
    assert linear.split()[:3] == ["2", "Linear", "runs"] and "duotone.Linear" in linear
    assert overlap.split()[:3] == ["3", "get_ub", "refused"] and "leave it out" in overlap


def test_rows_are_json_and_what_runs_is_exit_code_0(duotone, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.rpartition("te.get")[0])
    code, out, _ = duotone("migrate", path, "--json")
    (row,) = json.loads(out)
    assert code == 0 and row["line"] == 2 and row["call"] == "Linear" and row["after_install"] == "runs"
    path.write_text("print(1)")
    assert duotone("migrate", path)[:2] == (0, f"{path} uses nothing of Transformer Engine\n")


def test_what_is_no_script_is_one_line(refused, tmp_path):
    assert "cannot be read" in refused("migrate", tmp_path / "missing.py")
    path = tmp_path / "broken.py"
    path.write_text("def (")
    assert "is no Python" in refused("migrate", path)


def test_scripts_are_read_in_their_own_encoding(duotone, refused, tmp_path):
    path = tmp_path / "script.py"
    for head, encoding in (("", "utf-8-sig"), ("# -*- coding: latin-1 -*-\n# \xe9\n", "latin-1")):
        path.write_text(head + SCRIPT.rpartition("te.get")[0], encoding=encoding)
        code, out, err = duotone("migrate", path)
        assert (code, err) == (0, "") and "1 uses, 0 refused" in out
    path.write_bytes(b"# -*- coding: none-such -*-\n")
    assert "cannot be read: unknown encoding" in refused("migrate", path)
