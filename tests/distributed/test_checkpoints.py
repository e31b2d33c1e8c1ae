"""Distributed checkpoints on four gloo processes; checkpoint_worker.py holds the checks. One test starts them."""

import signal
import sys
from pathlib import Path

import pytest
import torch
from launching import HERE, folder_of, launch, names

from duotone.distributed import checkpoints, latest, load, save
from duotone.errors import UserError

WORKER = "checkpoint_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures) -> None:
    assert not [text for text in (failures(WORKER, one) for one in names(WORKER)) if text]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch tells of one process
def test_a_rank_that_dies_in_a_save_of_the_background_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """The other rank is told in less than the timeout of its group. One process goes on from what two saved."""
    text = launch(["killed_worker.py"], tmp_path, dies={1: -signal.SIGKILL})
    folder = folder_of("killed_worker.py", tmp_path)
    assert len(text["told"]) == 1
    assert latest(folder) == folder / "step-1"
    sys.path.insert(0, str(HERE))
    from killed_worker import network

    m, want = network(), network()
    with torch.no_grad():
        m[0].weight.zero_()
    load(folder / "step-1", m)
    assert torch.equal(m[0].weight.dequantize(), want[0].weight.dequantize())


def test_states_whose_names_end_alike_stay_apart() -> None:
    """A child that is called `delayed`."""
    sizes = {"q.scale": (1.0, 2.0), "delayed.q.scale": (8.0, 4.0)}
    tensors = {
        f"ranks.{at}.delayed.{key}": torch.tensor([v]) for key, each in sizes.items() for at, v in enumerate(each)
    }
    states = checkpoints._delayed(tensors, "ranks.0.", together=True)
    assert {key: value.item() for key, value in states.items()} == {"q.scale": 1.0, "delayed.q.scale": 4.0}


class Counter(torch.nn.Module):
    """A module of others, with a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"count": 7}

    def set_extra_state(self, state: object) -> None:
        del state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of torch, in one process
def test_what_a_checkpoint_lacks_is_told(tmp_path) -> None:
    m = torch.nn.Sequential(torch.nn.Linear(8, 8))
    save(tmp_path / "x", m)
    optimizer = torch.optim.AdamW(m.parameters())
    m(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(UserError, match=r"^the checkpoint .* has no optimizer; load it without one$"):
        load(tmp_path / "x", m, optimizer)
    assert optimizer.state[m[0].weight]["step"] == 1
    with pytest.warns(UserWarning, match=r"^1\._extra_state is no tensor, so checkpoints do not hold it"):
        save(tmp_path / "y", m.append(Counter()))
