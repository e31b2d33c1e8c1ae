"""The files of a search: its evidence as JSON, which it is resumed from, and the recipe."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import duotone
from duotone import files
from duotone.errors import UserError, path_errors
from duotone.observe.candidates import file_text
from duotone.recipes import from_dict
from duotone_lab.training import checkpoint, meta, outputs
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.data import Corpus
from duotone_lab.training.document import digests, machine
from duotone_lab.training.goal import Goal
from duotone_lab.training.searching import CHECKPOINTS, Finding, Search
from duotone_lab.training.sensitivity import Effect

EVIDENCE, RECIPE = "evidence.json", "recipe.toml"
EFFECT = asdict(Effect("", "", "", 0.0, 0.0))
SETTINGS = {
    "config": meta.LIKE_CONFIG,
    "goal": {"kind": "", "value": 0.0},
    "size": [],
    "seeds": 0,
    "recipes": [],
    "digests": {},
}


def write(folder: Path, search: Search, corpus: Corpus, finding: Finding | None = None, *, command: str = "") -> None:
    """Write the evidence so far, and the recipe if there is one. UserError if the disk refuses it."""
    table = search.table
    evidence: dict[str, object] = {
        "duotone": duotone.__version__,
        "command": command,
        "machine": machine(search.config.device),
        "settings": settings(search, corpus),
        "speeds": {"gpu": table.device, "source": table.source, "date": table.date, "where": search.where},
        "effects": [asdict(effect) for effect in search.effects],
    }
    with path_errors("cannot write to", folder, "make room, or choose another --out"):
        if finding is not None:
            chosen: dict[str, dict[str, str]] = {}
            for (module, gemm), option in finding.chosen.items():
                chosen.setdefault(module, {})[gemm] = option.recipe
            measured = finding.measured
            evidence |= {
                "chosen": chosen,
                "predicted": asdict(finding.predicted),
                "uniform": {name: asdict(prediction) for name, prediction in finding.uniform.items()},
                "measured": measured and {key: measured.get(key) for key in ("gap_percent", "gap_margin", "gaps")},
                "off_by": finding.off_by,
                "verdict": finding.verdict,
            }
            text = file_text(finding.recipe.title, finding.recipe.rules)
            files.publish_file(folder / RECIPE, text.encode())
        files.publish_file(folder / EVIDENCE, outputs.json_text(evidence, indent=1).encode())


def remove(folder: Path) -> None:
    """Remove the search in `folder`, with its recipe and checkpoints; the report stays."""
    for path in checkpoint.steps(folder / CHECKPOINTS):
        files.remove_folder(path)
    for name in (RECIPE, EVIDENCE):
        (folder / name).unlink(missing_ok=True)


def settings(search: Search, corpus: Corpus) -> dict[str, object]:
    """Everything that decides the result."""
    return {
        "config": search.config.to_dict(),
        "goal": asdict(search.goal),
        "size": list(search.size or ()),
        "seeds": search.seeds,
        "recipes": [recipe.to_dict() for recipe in search.recipes],
        "digests": digests(search.config, corpus),
    }


def read(path: Path) -> dict[str, Any]:
    """The evidence at `path`, as `write` leaves it. UserError unless it is that of a search."""
    remedy = "search anew with another --out, or --force"
    stored = outputs.read_json(path, "give the --out of a search", remedy)
    evidence: dict[str, Any] = stored if isinstance(stored, dict) else {}
    wrong = "" if evidence is stored else "it is no table"
    wrong = wrong or meta.unlike(SETTINGS, evidence.get("settings"), "settings")
    wrong = wrong or meta.unlike([], evidence.get("effects"), "effects")
    effects = [] if wrong else evidence["effects"]
    for effect in (effect for effect in effects if isinstance(effect, dict)):  # JSON has null for infinite numbers
        effect.update({key: math.inf for key, value in effect.items() if value is None})
    wrong = wrong or next(filter(None, (meta.unlike(EFFECT, effect, "an effect") for effect in effects)), "")
    if wrong:
        raise UserError(f"{path} is not the evidence of a search ({wrong}): {remedy}")
    return evidence


def resumed(path: Path, config: TrainConfig, evidence: dict[str, Any]) -> Search:
    """The search of that evidence with the effects that were measured; `config` is that of its settings."""
    stored = evidence["settings"]
    return Search(
        config,
        Goal(stored["goal"]["kind"], stored["goal"]["value"]),
        [from_dict(recipe, where=str(path)) for recipe in stored["recipes"]],
        (stored["size"][0], stored["size"][1]) if stored["size"] else None,
        stored["seeds"],
        [Effect(**effect) for effect in evidence["effects"]],
    )
