"""Where a monitor writes: JSON lines, and the trackers that are installed."""

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from duotone.errors import UserError
from duotone.observe.alarms import Alarm
from duotone.observe.step_statistics import Row

Write = Callable[[int, Sequence[Row], Sequence[Alarm]], None]
TRACKERS = ("tensorboard", "wandb", "trackio")
WORST: dict[str, Callable[..., float]] = {
    "snr_db": min,
    "gradient_to_noise": min,
    "underflow": max,
    "saturation": max,
    "clipped": max,
    "amax": max,
    "nan": sum,
    "inf": sum,
}
"""What trackers get of all modules together, for each role and direction."""


class JsonLines:
    """Appends to a file: an object for each row, and one for each alarm."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, step: int, rows: Sequence[Row], alarms: Sequence[Alarm]) -> None:
        told = [
            {"step": step, "alarm": a.kind, "where": a.where, "message": a.message, "planes": a.planes} for a in alarms
        ]
        for line in (*({"step": step, **row} for row in rows), *told):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def overview(rows: Sequence[Row]) -> dict[str, float]:
    """The worst number of any module by "duotone/role direction/quantity"; of NaN and infinite elements the sum."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        for name in WORST:
            if (value := row.get(name)) is not None:
                groups.setdefault(f"duotone/{row['role']}_{row['plane']}/{name}", []).append(float(value))
    return {name: WORST[name.rpartition("/")[2]](values) for name, values in groups.items()}


def tracker(name: str, folder: Path) -> Write:
    """Writes overviews and alarms to the tracker of that name. UserError if it is not installed, or has no open run."""
    if name not in TRACKERS:
        raise UserError(f"a monitor does not know the tracker {name!r}; allowed are {', '.join(TRACKERS)}")
    try:
        module = importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError:
        raise UserError(f"{name} is not installed: pip install {name}, or leave it out of `to`") from None
    return _to_tensorboard(module, folder) if name == "tensorboard" else _to_run(module)


def _to_tensorboard(module: ModuleType, folder: Path) -> Write:
    writer = module.SummaryWriter(str(folder))

    def write(step: int, rows: Sequence[Row], alarms: Sequence[Alarm]) -> None:
        for name, value in overview(rows).items():
            writer.add_scalar(name, value, step)
        for alarm in alarms:
            writer.add_text(f"duotone/alarm/{alarm.kind}", str(alarm), step)
        writer.flush()

    return write


def _to_run(module: ModuleType) -> Write:
    """The open run of Weights & Biases or trackio. Steps are a value, because the run counts steps by itself."""
    if module.__name__ == "wandb" and module.run is None:
        raise UserError("wandb has no open run: call wandb.init() before the monitor is made")

    def write(step: int, rows: Sequence[Row], alarms: Sequence[Alarm]) -> None:
        module.log({"duotone/step": step, "duotone/alarms": len(alarms), **overview(rows)})

    return write
