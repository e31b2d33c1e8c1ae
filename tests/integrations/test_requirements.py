"""A library that is absent or too old is named in one line, before anything of it is imported."""

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import duotone
from duotone.integrations import requirement

PACKAGES = {
    "transformers": ("5", "4.57.1"),
    "accelerate": ("1.1", "1.0.1"),
    "lightning": ("2.5", "2.4.0"),
    "torchtitan": ("0.3", "0.2.1"),
}


def run(package: str) -> None:
    """The file anew, under another name. It has no package where these errors are raised."""
    path = Path(requirement.__file__).with_name(f"{package}.py")
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "again"})


@pytest.mark.parametrize("package", PACKAGES)
def test_an_old_or_absent_package_is_one_line(package: str, monkeypatch) -> None:
    oldest, older = PACKAGES[package]
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # an import is an error now
    remedy = f"pip install '{package}>={oldest}'$"
    monkeypatch.setattr(requirement, "version", lambda name: older)
    with pytest.raises(duotone.UserError, match=f"^{package} {older} is too old: {remedy}"):
        run(package)
    monkeypatch.setattr(requirement, "version", absent)
    with pytest.raises(duotone.UserError, match=f"^duotone.integrations.{package} needs {package}: {remedy}"):
        run(package)


def absent(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize("present", ["2.5.0", "2.5.0.post0", "2.10", "3.0.0rc1", "2.6.0+cpu"])
def test_newer_versions_pass(present: str, monkeypatch) -> None:
    monkeypatch.setattr(requirement, "version", lambda name: present)
    requirement.require("lightning", "2.5")


def test_a_clone_without_a_version_passes(monkeypatch) -> None:
    monkeypatch.setattr(requirement, "version", absent)
    requirement.require("torch", "99")
