import json

from duotone import formats, recipes


def test_every_format_is_listed_with_its_fields(duotone):
    code, out, err = duotone("formats")
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[0].split()[:4] == ["name", "element", "block", "scale"]
    assert [line.split()[0] for line in lines[1:]] == list(formats.names())
    described = formats.get("nvfp4_16x16").describe()
    row = next(line for line in lines if line.split()[0] == "nvfp4_16x16")
    assert all(str(value) in row for value in described.values())


def test_every_recipe_is_listed_with_the_formats_of_its_tensors(duotone):
    code, out, _ = duotone("recipes")
    rows = [line.split("  ") for line in out.split("\n\n")[0].splitlines()[1:]]
    assert code == 0 and [row[0] for row in rows] == recipes.names()
    hybrid = next(line for line in out.splitlines() if line.startswith("mxfp8-fwd-nvfp4-bwd"))
    assert "mxfp8_e4m3 / nvfp4_rht" in hybrid and "nvfp4_sr / nvfp4_rht_sr" in hybrid


def test_every_schedule_is_listed_with_its_phases(duotone):
    _, out, _ = duotone("recipes")
    header, *rows = out.split("\n\n")[1].splitlines()
    assert header.split() == ["schedule", "phases"] and [row.split()[0] for row in rows] == recipes.schedule_names()
    (row,) = (row for row in rows if row.startswith("mxfp8-then-bf16-fprop"))
    assert row.endswith("mxfp8 from 0, mxfp8-bf16-fprop from 0.9")


def test_a_schedule_prints_as_a_file_that_loads_again(duotone, tmp_path):
    for name in recipes.schedule_names():
        code, out, _ = duotone("recipes", name)
        path = tmp_path / f"{name}.json"
        path.write_text(out)
        assert code == 0 and recipes.load_schedule(str(path)) == recipes.load_schedule(name)


def test_a_recipe_prints_as_a_file_that_loads_again(duotone, tmp_path):
    for name in recipes.names():
        code, out, _ = duotone("recipes", name)
        path = tmp_path / f"{name}.json"
        path.write_text(out)
        assert code == 0 and recipes.load(str(path)) == recipes.load(name)
        assert json.loads(out) == json.loads(json.dumps(recipes.load(name).to_dict()))


def test_an_unknown_recipe_is_refused(refused):
    assert "'mxfp9' is unknown" in refused("recipes", "mxfp9")
