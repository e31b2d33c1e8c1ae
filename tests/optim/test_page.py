"""docs/optimizer.md: its example runs and learns, its bytes are those of the dtypes and formats."""

import re
from pathlib import Path

import pytest

from duotone import formats

PAGE = (Path(__file__).parents[2] / "docs" / "optimizer.md").read_text()
STATE, GRADIENT = 12, 2
ROWS = {
    "FP8 delayed, both planes": ("fp8_e4m3_delayed", 2, None),
    "FP8 128x128, both planes": ("fp8_e4m3_128x128", 2, 1),
    "MXFP8, both planes": ("mxfp8_e4m3", 2, 1),
    "FP8 current, both planes": ("fp8_e4m3_tensor", 2, 2),
    "NVFP4, both planes": ("nvfp4", 2, 2),
    "NVFP4, rowwise alone": ("nvfp4", 1, 2),
}
"""Format, planes, and how often the cast reads the temporary: None where there is none."""


def test_the_example_runs_and_learns() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert code is not None
    namespace: dict[str, object] = {"losses": []}
    exec(code[1] + "    losses.append(loss.item())\n", namespace)
    losses = namespace["losses"]
    assert len(losses) == 10 and losses[-1] < losses[0]


@pytest.mark.parametrize("row", ROWS)
def test_the_bytes_are_those_of_the_dtypes(row) -> None:
    cells = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} |")).split("|")
    codes, gradient, state, whole, moved = (float(cell) for cell in cells[2:7])
    name, planes, reads = ROWS[row]
    stored = planes * formats.get(name).describe()["bits_per_element"] / 8
    step = GRADIENT + 2 * STATE + stored
    if reads is not None:
        step += 2 + 2 * reads + 2 * stored
    assert (gradient, state) == (GRADIENT, STATE)
    assert codes == pytest.approx(stored, abs=0.006) and whole == pytest.approx(stored + GRADIENT + STATE, abs=0.006)
    assert moved == pytest.approx(step, abs=0.5)
