"""`--parallel` of `train` and `compare`: one run over the processes that torchrun started; the first reports."""

import contextlib
import io
from collections.abc import Iterator

from duotone_lab.cli.interrupt import Interrupt
from duotone_lab.cli.processes import Processes
from duotone_lab.training.config import require_device
from duotone_lab.training.forecast import Parallel
from duotone_lab.training.parallel import ParallelTrainer, agreed, restarts, started


@contextlib.contextmanager
def ranks(layout: Parallel, device: str) -> Iterator[Processes]:
    """Give the ranks, with a process group until the end. The output of all but the first is dropped."""
    require_device(device)
    with contextlib.ExitStack() as stack:
        is_first = stack.enter_context(started(layout, device)) == 0
        if not is_first:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        interrupt = stack.enter_context(Interrupt())
        yield Processes(interrupt, is_first, restarts() > 0, ParallelTrainer, (layout,), agreed)
