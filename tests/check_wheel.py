"""A script: what the wheel of this tree holds, how large it is, and that it runs without Triton and a C++ compiler.

python tests/check_wheel.py dist/duotone-*.whl
"""

import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LARGEST = 1_000_000
"""Bytes. The library is text; a file that does not belong there would show."""

RUN = """
import sys
sys.modules["triton"] = None
import torch, duotone, duotone_lab
assert duotone.__file__.startswith(sys.argv[1]), duotone.__file__
for recipe in ("nvfp4", "mxfp8"):
    model = duotone.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), recipe, rules=())
    x = torch.randn(32, 64, requires_grad=True)
    model(x).sum().backward()
wanted, x.grad = x.grad, None
torch.compile(model, fullgraph=True, backend="aot_eager")(x).sum().backward()
assert torch.equal(x.grad, wanted), "a compiled gradient differs"
before = [p.clone() for p in model.parameters()]
duotone.optim.AdamW(model.parameters(), lr=0.1).step()
assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before)), "a parameter did not move"
assert duotone_lab.ledger(model, lambda: model(x).sum()).predicted_peak > 0, "the ledger predicts nothing"
print(f"duotone {duotone.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
print(f"{len(duotone.recipes.names())} recipes, {len(duotone.formats.names())} formats")
"""


def check(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        source = {p for p in (ROOT / "src").rglob("*") if p.is_file() and p.suffix != ".pyc"}
        expected = {p.relative_to(ROOT / "src").as_posix() for p in source}
        assert inside == expected, f"the wheel differs from src in {sorted(inside ^ expected)[:5]}"
        assert wheel.stat().st_size <= LARGEST, f"{wheel.stat().st_size} bytes, above {LARGEST}"
        with tempfile.TemporaryDirectory() as folder:
            archive.extractall(folder)
            version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
            assert (Path(folder) / f"duotone-{version}.dist-info").is_dir(), f"not of version {version}"
            environment = {**os.environ, "PYTHONPATH": folder, "CXX": "/nonexistent", "PYTHONWARNINGS": "ignore"}
            subprocess.run([sys.executable, "-c", RUN, folder], check=True, env=environment, cwd=folder)
    print(f"{wheel.name}: {len(inside)} files, {wheel.stat().st_size // 1000} kB")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
