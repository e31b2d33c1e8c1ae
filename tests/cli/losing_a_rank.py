"""`duotone` on a rank of torchrun. The last rank dies in step 4 of the first start, as if it was killed."""

import os
import signal
from typing import Any

from duotone.cli.main import main
from duotone.lab.parallel import ParallelTrainer

step = ParallelTrainer.step


def step_or_die(self: ParallelTrainer, *arguments: Any, **options: Any) -> float:
    is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    if is_last and self.done == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *arguments, **options)


if __name__ == "__main__":
    ParallelTrainer.step = step_or_die  # type: ignore[method-assign]
    main()
