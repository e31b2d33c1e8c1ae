"""What each case takes of a multiprocessor, and the recorded amounts that it stays within.

`python tests/kernels/budgets.py` records them anew; the difference of budgets.json says what changed.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from cases import CASES, Case
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (90, 100, 120)
FILE = Path(__file__).with_name("budgets.json")
REMEDY = "where that is meant, record it: `python tests/kernels/budgets.py`"


class Use(NamedTuple):
    """Registers and bytes of stack of a thread, bytes of shared memory of a program. Spills go to the stack."""

    registers: int
    stack: int
    shared: int


def build(case: Case, capability: int) -> Any:
    """The case compiled for a GPU that need not exist."""
    names, types, divisible = case.function.arg_names, {}, {}
    assert set(names) == set(case.types) | set(case.constants), case.name
    for i, name in enumerate(names):
        types[name], _, multiple = case.types.get(name, "constexpr").partition(":")
        if multiple:
            divisible[(i,)] = [["tt.divisibility", int(multiple)]]
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(fn=case.function, signature=types, constexprs=constants, attrs=divisible)
    options = {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": case.fusion}
    options |= {} if case.registers is None else {"maxnreg": case.registers}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def measure(compiled: Any) -> Use:
    """What the machine code takes, as the wheel's own cuobjdump reads it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert len(result) == 1, text
    registers, stack, fixed, local = (int(n) for n in result[0])
    return Use(registers, stack + local, fixed + compiled.metadata.shared)  # a launch asks for the latter


def complaint(name: str, capability: int, use: Use, recorded: dict[str, dict[str, list[int]]]) -> str:
    """Where `use` is beyond what is recorded, or ""."""
    budget = recorded.get(name, {}).get(str(capability))
    if budget is None:
        return f"{name} on sm_{capability} has no budget; it takes {text_of(use)}; {REMEDY}"
    if all(amount <= allowed for amount, allowed in zip(use, budget, strict=True)):
        return ""
    return f"{name} on sm_{capability} takes {text_of(use)}, more than its budget of {text_of(Use(*budget))}; {REMEDY}"


def text_of(use: Use) -> str:
    return f"{use.registers} registers, {use.stack} bytes of stack, {use.shared} bytes of shared memory"


def load() -> tuple[str, dict[str, dict[str, list[int]]]]:
    """The Triton that the budgets were recorded with, and the budgets: case -> capability -> `Use`."""
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {"triton": triton.__version__, "cases": {}}
    return recorded["triton"], recorded["cases"]


def record() -> None:
    """Rewrite the file, one line a case."""
    lines = []
    for case in CASES:
        uses = {str(capability): measure(build(case, capability)) for capability in CAPABILITIES}
        lines.append(f"    {json.dumps(case.name)}: {json.dumps(uses)}")
        print(lines[-1].strip(), file=sys.stderr)
    FILE.write_text(f'{{\n  "triton": "{triton.__version__}",\n  "cases": {{\n' + ",\n".join(lines) + "\n  }\n}\n")


if __name__ == "__main__":
    record()
