import json
import math

from duotone.observe.statistics import FIELDS
from duotone.observe.statistics import summary as columns
from duotone_lab.cli import summary


def test_a_number_that_json_does_not_have_loses_no_other(tmp_path):
    result = {
        "runs": [
            {"name": "a", "statistics": [], "losses": [[1, math.nan], [2, 3.5]], "snr_db": -math.inf, "time": math.inf}
        ]
    }
    summary.write_numbers(result, tmp_path)
    document = json.loads((tmp_path / "result.json").read_text())
    assert document == {
        "runs": [{"name": "a", "statistics": [], "losses": [[1, None], [2, 3.5]], "snr_db": None, "time": None}]
    }


def test_a_plane_that_became_infinite_has_a_row():
    sums = dict.fromkeys(FIELDS, 1.0) | {"noise": math.inf}
    assert columns(list(sums.values()), [1.0, -0.5])["snr_db"] == -math.inf


def test_planes_are_a_table_of_comma_separated_values(tmp_path):
    row = {"module": "a, b", "role": "input", "plane": "rowwise", "snr_db": 31.5, "samples": None}
    runs = [{"name": "x", "statistics": [row]}, {"name": "y", "statistics": [{**row, "bias": 0.5}]}]
    lines = summary.planes_csv({"runs": runs}).splitlines()
    assert lines == [
        "run,module,role,plane,snr_db,samples,bias",
        'x,"a, b",input,rowwise,31.5,,',
        'y,"a, b",input,rowwise,31.5,,0.5',
    ]
