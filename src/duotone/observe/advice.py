"""The result of `advise`: a row for each module, GEMM and candidate, and the recipe that follows from them."""

import math
import statistics
import textwrap
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from duotone.observe.candidates import EXACT, REFERENCE, Formats, Gemm, file_text, rules_for
from duotone.recipes import names
from duotone.recipes.builtin import RuleRecipe
from duotone.recipes.recipe import Recipe
from duotone.text import aligned, in_units, shorten

BETTER = 3.0
"""Another format gets a rule for a GEMM only if it gains so many decibels."""

FLOOR = 10 * math.log10(3)
"""Below so many decibels a GEMM stays in high precision: a signal sqrt(3) times its error."""

TITLE = "advised"
WIDTH, NAME = 80, 18
"""The longest line of a table, and of the name of a recipe in it."""

COLUMNS = ("  gemm", "recipe", "SNR dB", "under %", "satur %", "bytes", "speed", "front")
LEGEND = (
    "SNR of the product; shares of the worse operand that underflow and saturate; bytes of both operands. The front: "
    "at least 3 dB less error than all that are as fast, or as small if no speed is known."
)


@dataclass(frozen=True)
class AdviceRow:
    """One GEMM of one module with the formats `a` and `b` that `recipe` gives its operands.

    - `snr_db`: of the product. None if nothing was lost, -inf if a finite product became infinite.
    - `underflow`, `saturation`: shares of the elements of the worse operand, as in `Tap.rows`.
    - `bytes`: of both operands.
    - `speed`: of the linear under the recipe over compiled bf16, None if unknown; `basis` tells how it is known.
    - `is_pareto`: on the front of its GEMM. All other rows of at least the same speed have at least `BETTER` more
      error. If no speed is known, sizes are compared instead.
    """

    module: str
    gemm: str
    recipe: str
    a: str
    b: str
    snr_db: float | None
    underflow: float
    saturation: float
    bytes: int
    speed: float | None
    basis: str
    is_pareto: bool = False

    @property
    def formats(self) -> Formats:
        """The formats of both operands."""
        return self.a, self.b

    @property
    def error(self) -> float:
        """The squared error of the product as a share of its square."""
        return 0.0 if self.snr_db is None else 10 ** (-self.snr_db / 10)

    @property
    def may_pay(self) -> bool:
        """Whether it is quantized, and not known to be slower than bf16."""
        return self.formats != EXACT and (self.speed is None or self.speed >= 1.0)

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of `COLUMNS` without the front."""
        snr = "exact" if self.snr_db is None else f"{self.snr_db:.1f}"
        speed = "unknown" if self.speed is None else f"{self.speed:.2f}" + "*" * (self.basis == "interpolated")
        shares = f"{100 * self.underflow:.2f}", f"{100 * self.saturation:.2f}"
        return f"  {self.gemm}", shorten(self.recipe, NAME), snr, *shares, in_units(self.bytes), speed


def with_pareto_marks(rows: Sequence[AdviceRow]) -> list[AdviceRow]:
    """The rows of one GEMM, with marks. If some speeds are known, an unknown one counts as the lowest."""
    knows_speed = any(row.speed is not None for row in rows)
    costs = [-(row.speed or 0.0) if knows_speed else row.bytes for row in rows]
    front, least = set[int](), math.inf
    for place in sorted(range(len(rows)), key=lambda place: (costs[place], rows[place].error)):
        if rows[place].error < least * 10 ** (-BETTER / 10):
            front.add(place)
            least = rows[place].error
    return [replace(row, is_pareto=place in front) for place, row in enumerate(rows)]


@dataclass(frozen=True)
class Advice:
    """The rows, the recipe that follows, and its file.

    - `errors`: the mean squared error of all GEMMs under each recipe, as a share of their squares.
    - `base`: the recipe with the least error among those that quantize and are not known to be slower than bf16.
    - `recipe`: `base` with rules for the GEMMs that another format suits better. `toml` is its file.
    - `notes`: remarks on the measurement.
    """

    rows: tuple[AdviceRow, ...]
    errors: Mapping[str, float]
    base: str
    recipe: RuleRecipe
    toml: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """JSON-ready; an SNR that is not finite is None."""
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            row["snr_db"] = row["snr_db"] if math.isfinite(row["snr_db"] or 0.0) else None
        notes = list(self.notes)
        return {"base": self.base, "errors": dict(self.errors), "notes": notes, "toml": self.toml, "rows": rows}

    def table(self, all_rows: bool = False) -> str:
        """The rows of the front, or all of them with a mark on the front, below their modules; 80 columns of text."""
        rows = [row for row in self.rows if all_rows or row.is_pareto]
        columns = COLUMNS if all_rows else COLUMNS[:-1]
        cells = [(*row.cells, "*" * row.is_pareto)[: len(columns)] for row in rows]
        head, *lines = aligned([columns, *cells], [column not in COLUMNS[:2] for column in columns])
        text, module = [head], None
        for row, line in zip(rows, lines, strict=True):
            if row.module != module:
                module = row.module
                text.append(shorten(module, WIDTH))
            text.append(line)
        return "\n".join([*text, "", *textwrap.wrap(LEGEND, WIDTH)])

    def __str__(self) -> str:
        return "\n\n".join([self.table(), "\n".join(self.notes), self.toml])


def conclude(
    rows: Sequence[AdviceRow], recipes: Mapping[str, Recipe], slow: Container[str], notes: Sequence[str]
) -> Advice:
    """The advice that follows from the rows of these recipes. Some of these are known to be slower than bf16."""
    errors = {name: statistics.fmean(row.error for row in rows if row.recipe == name) for name in recipes}
    quantized = dict.fromkeys(row.recipe for row in rows if row.formats != EXACT)
    base = min((name for name in quantized if name not in slow), key=lambda name: errors[name], default=REFERENCE)
    trials: dict[Gemm, dict[str, AdviceRow]] = {}
    for row in rows:
        trials.setdefault((row.module, row.gemm), {})[row.recipe] = row
    usual = rules_for({gemm: rows[base].formats for gemm, rows in trials.items()})
    rules = rules_for({gemm: _formats(rows, base) for gemm, rows in trials.items()})
    rules = tuple(rule for rule in rules if rule not in usual)
    recipe = RuleRecipe(title=TITLE, base=recipes[base], rules=rules)
    shown = base if base in names() else recipes[base].to_dict()
    ranking = sorted(quantized, key=lambda name: errors[name])
    means = ", ".join(f"{name} {100 * errors[name]:.3f} %" for name in ranking)
    text = f"base {base}; mean error of the products: {means}"
    return Advice(tuple(rows), errors, base, recipe, file_text(TITLE, rules, shown), (*notes, text))


def _formats(trials: Mapping[str, AdviceRow], base: str) -> Formats:
    """The formats of a GEMM: those of the base, unless they are slow, lose much more than others, or all lose much."""
    usual = trials[base]
    best = min((row for row in trials.values() if row.may_pay), key=lambda row: row.error, default=None)
    if best is None or base == REFERENCE:
        return EXACT
    chosen = best if not usual.may_pay or best.error < usual.error * 10 ** (-BETTER / 10) else usual
    return EXACT if 10 ** (-FLOOR / 10) < chosen.error else chosen.formats
