"""Why a module of a model stays in high precision: the table of all reasons that plans and warnings show."""

from enum import Enum
from typing import NamedTuple


class Reason(Enum):
    """The words of a reason; {} takes a detail."""

    BYPASSED = "its owner uses the weight without calling the module"
    TIED_EMBEDDING = "an embedding is a look-up, and its owner uses the weight as output head without calling a module"
    REPLACED = "its forward was replaced on the instance by {}"
    LAZY = "it has no weight before its first forward; run one, then call duotone.convert again"
    OTHER_FORWARD = "{} has a forward of its own"
    MATRICES = "{} itself; convert covers nn.Linear"
    EXPERTS = "{}"
    OUTPUT_HEAD = "an output head, as {}: kept in high precision unless a rule names it"
    ADAPTER = "a low-rank adapter of rank {}: kept in high precision unless a rule names it"
    NOT_CONVERTED = "not converted"
    LOOK_UP = "an embedding is a look-up, not a GEMM"
    FAST_PATH = "its fast path, which would go around its converted linears in evaluation, is off"
    DECLARED = "{}"


SURPRISING = (Reason.REPLACED, Reason.LAZY)
"""Reasons for which a plain nn.Linear is left alone."""


class Why(NamedTuple):
    """A reason, its detail, and the matrices that a module holds itself."""

    reason: Reason
    detail: object = ""
    matrices: str = ""

    @property
    def text(self) -> str:
        text = self.reason.value.format(self.detail)
        return f"{self.matrices} itself, and {text}" if self.matrices else text
