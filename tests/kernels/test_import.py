"""Triton is for CUDA tensors: work on the CPU imports neither it nor the kernels, where it is installed too."""

import subprocess
import sys


def test_a_linear_on_the_cpu_imports_no_triton() -> None:
    """Tensors too small to be worth compiling; torch's compiler, which larger ones use, imports Triton itself."""
    code = """
import sys, torch, duotone
loaded = lambda: sorted(m for m in sys.modules if m.split(".")[0] == "triton" or m.startswith("duotone.kernels"))
assert not loaded(), loaded()
model = duotone.convert(torch.nn.Linear(64, 32).bfloat16(), duotone.recipes.load("fp8-current"))
x = torch.randn(48, 64, dtype=torch.bfloat16, requires_grad=True)
model(x).sum().backward()
assert type(model) is not torch.nn.Linear and x.grad.any()
assert not loaded(), loaded()
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_rooms_that_need_more_are_imported_when_they_are_read() -> None:
    """`import duotone; duotone.distributed.save` was an AttributeError."""
    code = """
import sys, duotone
late = "duotone.distributed", "duotone.integrations", "torch.distributed.checkpoint", "accelerate"
assert not [name for name in late if name in sys.modules]
assert duotone.distributed.save is sys.modules["duotone.distributed"].save
assert duotone.integrations is sys.modules["duotone.integrations"] and "accelerate" not in sys.modules
assert not hasattr(duotone, "integration") and not hasattr(duotone.integrations, "torchtitan")
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
