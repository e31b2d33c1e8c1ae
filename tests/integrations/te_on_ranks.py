"""Runs an example of Transformer Engine on this rank: te_on_ranks.py SCRIPT. Without a GPU for each rank, on CPUs.

On CPUs the names of devices and of the backend are replaced in the text, and calls that move to a GPU do nothing.
Ranks write files of equal names, which others read at that time: each file appears whole.
"""

import os
import sys
from pathlib import Path

import torch

from duotone.compat import te

script = Path(sys.argv[1])
text = script.read_text()
sys.path.insert(0, str(script.parent))
te.install()
save = torch.save


def save_whole(value: object, path: str) -> None:
    save(value, part := f"{path}.{os.getpid()}")
    os.replace(part, path)


torch.save = save_whole
if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
    torch.cuda.is_available = lambda: False
    torch.cuda.set_device = torch.cuda.Stream = lambda *_: None
    torch.Tensor.cuda = lambda x: x
    for name, other in {
        '"cuda:0"': '"cpu"',
        'f"cuda:{dist_config.local_rank}"': '"cpu"',
        '"cuda"': '"cpu"',
        '"nccl"': '"gloo"',
        "device_ids=[dist_config.local_rank]": "device_ids=None",
        "output_device=dist_config.local_rank": "output_device=None",
    }.items():
        text = text.replace(name, other)
exec(compile(text, script, "exec"), {"__name__": "__main__"})
