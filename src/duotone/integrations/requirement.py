"""The oldest version of a library that its integration was tried with."""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from duotone.errors import UserError


def require(package: str, oldest: str) -> None:
    """UserError, with the command that installs it, unless the package is here in that version or a newer one.

    A clone on the path, which has no version, passes.
    """
    remedy = f"pip install '{package}>={oldest}'"
    try:
        present = version(package)
    except PackageNotFoundError:
        if find_spec(package) is not None:
            return
        raise UserError(f"duotone.integrations.{package} needs {package}: {remedy}") from None
    if _numbers(present) < _numbers(oldest):
        raise UserError(f"{package} {present} is too old: {remedy}")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
