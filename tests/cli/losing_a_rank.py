"""`duotone` on a rank of torchrun. The last rank is killed in step 4, and after a restart in the save of step 4."""

import os
import signal
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from duotone.dispatch import stages
from duotone_lab.cli.main import main
from duotone_lab.training.parallel import ParallelTrainer

step, write = ParallelTrainer.step, FileSystemWriter.write_data
IS_LAST = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
START = os.environ["TORCHELASTIC_RESTART_COUNT"]


def step_or_die(self: ParallelTrainer, *arguments: Any, **options: Any) -> float:
    if IS_LAST and START == "0" and self.completed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *arguments, **options)


def write_or_die(self: FileSystemWriter, *arguments: Any, **options: Any) -> Any:
    if IS_LAST and START == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, *arguments, **options)


if __name__ == "__main__":
    stages.COMPILE_FROM = 1 << 30  # plain casts, with the same bits
    ParallelTrainer.step, FileSystemWriter.write_data = step_or_die, write_or_die  # type: ignore[method-assign]
    main()
