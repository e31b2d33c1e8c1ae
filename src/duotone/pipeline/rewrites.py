"""Rewrite rules: functions of a tuple of stages that replace several stages by one fused stage.

A rule changes speed and memory, never results. Rules for both passes run first, then those of forward and of backward.
Each takes the result of the one before. A fused stage has to stand for the same basic stages in the same order.
"""

from collections.abc import Callable, Sequence

from duotone.errors import UserError
from duotone.pipeline.stage import Stage, Stages

Rule = Callable[[Stages], Stages]


class Registry:
    """The rules by pass. `version` counts changes, so that tuples are rewritten again."""

    def __init__(self) -> None:
        self.rules: dict[str, list[Rule]] = {"both": [], "forward": [], "backward": []}
        self.version = 0


RULES = Registry()


def register_rule(rule: Rule, when: str = "both", *, prepend: bool = False) -> None:
    """Let `rule` rewrite every tuple of stages, for "forward", "backward" or "both"; `prepend` puts it first.

    A fused stage of a rule for "both" may save anything for its backward. A fused stage for a single pass has to save,
    or to read, exactly what its basic stages would.
    """
    if not callable(rule):
        raise UserError(f"a rewrite rule is a function of a tuple of stages; got {type(rule).__name__}")
    if when not in RULES.rules:
        raise UserError(f"a rewrite rule for {when!r} is unknown; allowed are {', '.join(RULES.rules)}")
    RULES.rules[when].insert(0 if prepend else len(RULES.rules[when]), rule)
    RULES.version += 1


def unregister_rule(rule: Rule) -> None:
    """Remove a rule. Nothing happens if it is not registered."""
    for rules in RULES.rules.values():
        if rule in rules:
            rules.remove(rule)
    RULES.version += 1


def rewrite(stages: Stages) -> tuple[Stages, Stages]:
    """The stages of forward and of backward."""
    joint = _apply("both", stages)
    return _apply("forward", joint), _apply("backward", joint)


def _apply(when: str, stages: Stages) -> Stages:
    for rule in RULES.rules[when]:
        rewritten, name = rule(stages), getattr(rule, "__name__", repr(rule))
        if not isinstance(rewritten, Sequence) or not all(isinstance(stage, Stage) for stage in rewritten):
            raise UserError(f"the rewrite rule {name} gave {type(rewritten).__name__}; return a tuple of stages")
        rewritten = tuple(rewritten)
        if _basics(rewritten) != _basics(stages):
            raise UserError(
                f"the rewrite rule {name} turned {_names(stages)} into {_names(rewritten)}, whose basics are others; "
                "a fused stage has to name the stages that it stands for, in order"
            )
        stages = rewritten
    return stages


def _basics(stages: Stages) -> list[Stage]:
    return [basic for stage in stages for basic in stage.basics]


def _names(stages: Stages) -> str:
    return " ".join(type(stage).__name__ for stage in stages) or "nothing"


def replace_pairs(stages: Stages, fuse: Callable[[Stage, Stage], Stage | None]) -> Stages:
    """Replace neighbours a, b by `fuse(a, b)`, from the left; None from `fuse` leaves them."""
    rewritten: list[Stage] = []
    for stage in stages:
        fused = fuse(rewritten[-1], stage) if rewritten else None
        if fused is None:
            rewritten.append(stage)
        else:
            rewritten[-1] = fused
    return tuple(rewritten)
