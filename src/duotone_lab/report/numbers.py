"""Numbers as a reader wants them: rounded, with a unit, plain about what is missing or not finite."""

import math
import re
from collections.abc import Sequence
from datetime import datetime
from typing import TypeGuard

from duotone.text import in_units
from duotone.text import shorten as shorten

MISSING = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
SPACE = "\N{NO-BREAK SPACE}"


def finite(value: float | None) -> TypeGuard[float]:
    """True for a number that can be drawn: not None, NaN or infinite."""
    return value is not None and math.isfinite(value)


def broken(value: float | None) -> bool:
    """True for a number that is there and is NaN or infinite."""
    return value is not None and not math.isfinite(value)


def number(value: float | None, digits: int = 0, sign: bool = False) -> str:
    """`value` with `digits` decimals and thousands separators; a true minus sign."""
    if value is None:
        return MISSING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else MINUS + "∞"
    text = f"{value:{'+' if sign else ''},.{digits}f}"
    return text.replace("-", MINUS)


def significant(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits."""
    if not finite(value):
        return number(value)
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return number(value, decimals)


def percent(value: float | None, sign: bool = False) -> str:
    """`value`, which is in percent already, with two decimals, or three when it is below a hundredth."""
    if not finite(value):
        return number(value)
    digits = 3 if 0 < abs(value) < 0.01 else 2
    return number(value, digits, sign) + SPACE + "%"


def power(value: float) -> str:
    """`1e-6` rather than `1e-06`."""
    return re.sub(r"e([+-])0", r"e\1", f"{value:g}")


def share(value: float | None) -> str:
    """A share from 0 to 1, in percent without the sign, short enough for a cell."""
    if not finite(value):
        return number(value)
    points = 100.0 * value
    if points == 0:
        return "0"
    return "<0.001" if points < 0.001 else significant(points, 3 if points >= 10 else 2)


def size(count: float | None) -> str:
    """Bytes in the unit that fits."""
    return in_units(round(count)).replace(" ", SPACE) if finite(count) else number(count)


def moment(text: str) -> str:
    """A time in ISO 8601, to the minute."""
    return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M %Z").strip()


def px(value: float) -> str:
    """A coordinate with one decimal: a tenth of a pixel is finer than any screen shows."""
    return f"{round(value, 1):g}"


def listing(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
