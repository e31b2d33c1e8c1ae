import json
import math

from duotone.cli import summary
from duotone.observe.tapped_recipe import FIELDS
from duotone.observe.tapped_recipe import summary as columns


def test_a_number_that_json_does_not_have_loses_no_other(tmp_path):
    result = {"runs": [{"losses": [[1, math.nan], [2, 3.5]], "snr_db": -math.inf, "time": math.inf}]}
    summary.write_numbers(result, tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    assert written == {"runs": [{"losses": [[1, None], [2, 3.5]], "snr_db": None, "time": None}]}


def test_a_plane_that_became_infinite_has_a_row():
    sums = dict.fromkeys(FIELDS, 1.0) | {"noise": math.inf}
    assert columns(list(sums.values()), [1.0, -0.5])["snr_db"] == -math.inf
