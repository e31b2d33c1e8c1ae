"""What `meta.json` of a training run must hold: nothing in a checkpoint is used before it was checked."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from duotone_lab.training import checkpoint, presets
from duotone_lab.training.checkpoint import Checkpoint
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.schema import Losses, fits

CURVES = ("train_loss", "heldout_loss")
LIKE_CONFIG = TrainConfig(presets.get("tiny"), steps=1).to_dict()


def require_run(saved: Checkpoint, path: Path) -> None:
    """UserError unless `meta` has the config, recipe, digests and history of a run, each of its type and range."""
    meta, like = saved.meta, {"config": LIKE_CONFIG, "recipe": {}, "data_digest": "", "model_digest": ""}
    for key, value in like.items():
        wrong = unlike(value, meta.get(key), key) if key in meta else f"{key} is absent"
        if wrong:
            raise checkpoint.damaged(path, f"{checkpoint.META}: {wrong}")
    config, history = meta["config"], meta.get("history")
    wrong = ""
    if not 1 <= saved.step <= config["steps"]:
        wrong = f"it is at step {saved.step} of a run of {config['steps']}"
    elif not all(isinstance(path, str) for path in config["data"]):
        wrong = "config.data is no list of paths"
    elif not isinstance(history, dict) or history.keys() != set(CURVES):
        wrong = f"history does not have {' and '.join(CURVES)} alone"
    elif other := next((name for name in CURVES if not _is_curve(history[name], saved.step)), None):
        wrong = f"history.{other} is no list of steps up to {saved.step} with their losses"
    elif len(history["train_loss"]) != saved.step:
        wrong = f"history.train_loss has {len(history['train_loss'])} of {saved.step} steps"
    elif not 0 <= config["seed"] < 2**63:
        wrong = f"config.seed is {config['seed']}"
    if wrong:
        raise checkpoint.damaged(path, f"{checkpoint.META}: {wrong}")


def unlike(like: object, value: object, name: str) -> str:
    """Where `value` has another type, or a table of the config other keys, than `like`; "" if nowhere."""
    if type(value) is not type(like):
        return f"{name} is a {type(value).__name__}, not a {type(like).__name__}"
    if not isinstance(like, dict) or not isinstance(value, dict) or not like:
        return ""
    if value.keys() != like.keys():
        return f"{name} lacks or adds {min(value.keys() ^ like.keys())!r}"
    return next((wrong for key in like if (wrong := unlike(like[key], value[key], f"{name}.{key}"))), "")


def _is_curve(points: Any, last: int) -> bool:
    """Whether `points` are [step, loss] of rising steps from 1 to `last`, each loss a number or None."""
    return fits(points, Losses) and all(a < b for a, b in pairwise([0, *(step for step, _ in points), last + 1]))
