"""The axes of `--parallel`, and the linears that tensor parallelism cuts."""

import re
from dataclasses import dataclass

from duotone.errors import UserError

AXES = ("fsdp", "tp", "ep")
COLUMNS, ROWS = ("qkv", "gate_up"), ("proj", "down")
"""The linears of a block that are cut by outputs, and by inputs."""


@dataclass(frozen=True)
class Parallel:
    """Ranks along each axis. Ranks of `fsdp` and `ep` have tokens of their own, those of `tp` share them."""

    fsdp: int = 1
    tp: int = 1
    ep: int = 1

    @staticmethod
    def parse(text: str) -> "Parallel":
        """From "fsdp=2,tp=2"; UserError where it is something else."""
        parts = [re.fullmatch(r"(fsdp|tp|ep)=([1-9][0-9]{0,5})", part.strip()) for part in text.split(",")]
        names = [part[1] for part in parts if part is not None]
        if len(names) != len(parts) or len(set(names)) != len(names):
            raise UserError(f"--parallel {text!r} is not such as fsdp=4,tp=2,ep=1: name each axis once, with its ranks")
        parallel = Parallel(**{part[1]: int(part[2]) for part in parts if part is not None})
        if parallel.tp > 1 and parallel.ep > 1:
            raise UserError("--parallel takes tp or ep beside fsdp, not both: leave one out")
        return parallel

    @property
    def ranks(self) -> int:
        return self.fsdp * self.tp * self.ep

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in AXES if getattr(self, name) > 1) or "fsdp=1"
