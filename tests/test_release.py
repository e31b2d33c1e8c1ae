"""The version is the same wherever it is written, and the changelog has it."""

import re
import tomllib
from pathlib import Path

import duotone

ROOT = Path(__file__).parent.parent


def test_one_version_stands_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert duotone.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0].startswith((f"{version},", "Unreleased"))
    assert any(heading.startswith(f"{version},") for heading in headings)
