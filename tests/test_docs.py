"""Every block of Python in the README and in docs/*.md runs as it is written.

A block has no names but those of its page's preamble here: what the page says is the reader's own.
"""

import importlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from duotone.recipes import load_any

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCKS = [
    (page.relative_to(ROOT).as_posix(), number, code)
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]

MODEL = """
import torch, duotone
from torch import nn
from torch.distributed import group as groups
from torch.distributed.fsdp import fully_shard

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()

def build_model():
    return Model()

recipe = duotone.recipes.load("mxfp8")
model = duotone.convert(build_model(), recipe)
batch, step, group = torch.randn(32, 32), 3, groups.WORLD
batches = [batch.bfloat16() for _ in range(2)]
"""

PREAMBLES = {
    ("docs/training.md", 0): MODEL,
    ("docs/training.md", 2): MODEL,
    ("docs/hopper.md", 0): "import torch\nloss = torch.ones((), requires_grad=True) * 2",
    ("docs/parallel.md", 0): MODEL + "model = build_model()\ndel fully_shard",
    ("docs/parallel.md", 1): MODEL + "torch.set_default_device('meta')\ndel group",
    ("docs/parallel.md", 2): MODEL + "del model, group",
    ("docs/parallel.md", 3): MODEL
    + "model = [None, None, duotone.Linear(32, 32)]\n"
    + "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel",
    ("docs/parallel.md", 4): MODEL
    + "from torch.distributed.device_mesh import init_device_mesh\n"
    + "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module\n"
    + "mesh = init_device_mesh('cpu', (1,))",
    ("docs/parallel.md", 5): "import torch, duotone",
    ("docs/parallel.md", 6): MODEL + "del group",
    ("docs/parallel.md", 7): MODEL + "optimizer = torch.optim.AdamW(model.parameters())",
}

FIRST = ("README.md", "docs/index.md", "docs/tutorial.md")
"""Pages whose code `make test` runs."""

NEEDS = {
    ("docs/attention.md", 2): "transformers",
    ("docs/hugging-face.md", 0): "transformers",
    ("docs/hugging-face.md", 1): "accelerate",
    ("docs/serving.md", 2): "transformers",
    ("docs/trainers/accelerate.md", 0): "accelerate",
    ("docs/trainers/deepspeed.md", 0): "deepspeed",
    ("docs/trainers/lightning.md", 0): "lightning",
    ("docs/trainers/lightning.md", 1): "lightning",
    ("docs/trainers/torchtitan.md", 0): "torchtitan",
}
"""Packages that blocks import, or that what they import needs."""

EXTRAS = {"torchtitan": "titan"}
"""The extra of a package, where it has another name."""

EACH_FOR_ITSELF = {("docs/training.md", 2)}
"""Blocks of which the page says that each paragraph stands for itself."""


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, and no default device after it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.set_default_device(None)
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("page", "number", "code"),
    [
        pytest.param(page, number, code, id=f"{page}-{number}", marks=[] if page in FIRST else pytest.mark.rest)
        for page, number, code in BLOCKS
    ],
)
def test_a_block_runs_as_it_is_written(
    page: str, number: int, code: str, one_rank: None, tmp_path, monkeypatch
) -> None:
    """In a namespace of its own and a folder of its own, and nothing that Duotone warns of."""
    if (page, number) in NEEDS:
        package = NEEDS[page, number]
        pytest.importorskip(package, reason=f"pip install '.[{EXTRAS.get(package, package)}]'")
        if package == "deepspeed":  # it keeps process groups, so another test of this process may have left some
            (tmp_path / "script.py").write_text(code)
            environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "script.py"]
            subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
            return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for part in code.split("\n\n") if (page, number) in EACH_FOR_ITSELF else [code]:
        names: dict[str, object] = {"__name__": "reader"}
        exec(compile(PREAMBLES.get((page, number), ""), f"preamble of {page}", "exec"), names)
        with warnings.catch_warnings():
            if NEEDS.get((page, number)) in ("lightning", "torchtitan", "deepspeed"):
                warnings.simplefilter("ignore")  # their own warnings name many modules
            warnings.filterwarnings("error", module=r"duotone")
            exec(compile(part, f"{page}, block {number}", "exec"), names)


def test_the_model_on_paper_prints_the_table_of_its_page(capsys) -> None:
    (code,) = [code for page, _, code in BLOCKS if page == "docs/many-gpus.md"]
    exec(compile(code, "docs/many-gpus.md", "exec"), {})
    lines = [re.sub(r"'\S+':", "", line) for line in capsys.readouterr().out.splitlines()]  # without names of recipes
    text = (ROOT / "docs/many-gpus.md").read_text()
    rows = re.findall(r"^\| [\d,]+ \| \d+, \d+ \| \d+, \d+ \|$", text, re.MULTILINE)
    numbers = [re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d)", "", row)) for row in rows]
    assert len(rows) == 5 and numbers == [re.findall(r"\d+", line) for line in lines]


def test_recipes_in_toml_load(tmp_path) -> None:
    texts = [text for page in PAGES for text in re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.M | re.S)]
    assert len(texts) > 5
    for at, text in enumerate(texts):
        path = tmp_path / f"{at}.toml"
        path.write_text(text)
        assert load_any(str(path))


def test_preambles_are_for_blocks_that_are_there() -> None:
    assert PREAMBLES.keys() | NEEDS.keys() <= {(page, number) for page, number, _ in BLOCKS}


LONGEST = 30
"""Words of a sentence. A reader who is not a native speaker has to understand it at first sight."""


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page: of its paragraphs, items of lists and cells of tables, without blocks of code."""
    text = re.sub(r"```.*?```|^    .*?$", "", page, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=[-*|#] |\|)|\n(?=\d+\. )|(?<!\\)\|", text):
        words = re.sub(r"`[^`]*`", "x", re.sub(r"\]\([^)]*\)", "]", block))
        yield from re.split(r"(?<=[.!?]) +(?=[A-Z(`*x\[])", " ".join(words.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_sentences_are_short(page: Path) -> None:
    sentence_lengths = ((len(re.findall(r"[\w'%.-]+", sentence)), sentence) for sentence in sentences(page.read_text()))
    assert [sentence for count, sentence in sentence_lengths if count > LONGEST] == []


CITING = [*PAGES, ROOT / "bench" / "NOTES.md"]
FOLDERS = ("", "src", "src/duotone", "docs")
"""Where the paths of pages begin. A record of measurements is cited by the end of its name."""
RECORDS = [path.name for path in (ROOT / "bench" / "results").iterdir()]


def cited(page: Path, pattern: str) -> list[str]:
    """What stands alone between backticks outside of blocks of code and matches the pattern."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [word for word in dict.fromkeys(re.findall(r"`([^`\n]+)`", text)) if re.fullmatch(pattern, word)]


def exists(name: str) -> bool:
    """Whether a dotted name leads to a value. Integrations may need packages that are not installed."""
    module, _, rest = name.partition(".")
    value: object = importlib.import_module(module)
    for part in rest.split("."):
        module = f"{module}.{part}"
        if isinstance(value, ModuleType) and not hasattr(value, part):
            if (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").exists() and "integrations" in module:
                return True
            try:
                importlib.import_module(module)
            except ImportError:
                return False
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


@pytest.mark.parametrize("page", CITING, ids=lambda p: p.name)
def test_what_a_page_cites_exists(page: Path) -> None:
    """Files of this repository, and names of the library."""
    rooms = {path.name for package in ("duotone", "duotone_lab") for path in (ROOT / "src" / package).iterdir()}
    rooms |= {"duotone_lab", "src", "tests", "bench", "docs", "examples"}
    paths = [path for path in cited(page, r"[\w.-]+(/[\w.-]+)+/?") if path.split("/")[0] in rooms]
    assert not [path for path in paths if not any((ROOT / folder / path).exists() for folder in FOLDERS)]
    records = cited(page, r"[\w-]+\.(txt|jsonl)") if page.name in ("NOTES.md", "hopper.md") else []
    assert not [name for name in records if not any(record.endswith(name) for record in RECORDS)]
    assert not [
        name for name in cited(page, r"duotone(_lab)?(?!\.json)(\.\w+)+(\(.*\))?") if not exists(name.split("(")[0])
    ]
