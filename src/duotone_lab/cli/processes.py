"""The processes of a run: this one alone, or the ranks that torchrun started for `--parallel`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from duotone_lab.cli import run_display
from duotone_lab.cli.interrupt import Interrupt
from duotone_lab.training import outputs
from duotone_lab.training.forecast import Parallel
from duotone_lab.training.loop import Progress
from duotone_lab.training.trainer import Trainer


@dataclass(frozen=True)
class Processes:
    """What a command asks of its processes. The first of them alone prints, locks the folder and writes the report.

    `has_restarted` where torchrun has started them again. `kind` is the class of trainers, which take `layout` before
    their other arguments. `agreed` tells whether any process says yes.
    """

    interrupt: Interrupt
    is_first: bool = True
    has_restarted: bool = False
    kind: type[Trainer] = Trainer
    layout: tuple[Parallel, ...] = ()
    agreed: Callable[[bool], bool] = bool

    @property
    def make(self) -> Callable[..., Trainer]:
        """Make a trainer from a config, a recipe and a corpus."""
        return partial(self.kind, *self.layout)

    def should_stop(self) -> bool:
        """Whether to stop, which all processes answer alike."""
        return self.agreed(self.interrupt())

    def locked(self, folder: Path) -> AbstractContextManager[None]:
        """Make the folder, and use it alone."""
        return outputs.locked(outputs.make_folder(folder)) if self.is_first else nullcontext()

    def display(self) -> AbstractContextManager[Progress]:
        """The display that suits stderr."""
        return run_display.choose() if self.is_first else nullcontext(Progress())


@contextmanager
def processes(parallel: str | None, device: str) -> Iterator[Processes]:
    """Give the processes until the end. Ctrl-C stops all of them after one step."""
    if parallel is None:
        with Interrupt() as interrupt:
            yield Processes(interrupt)
        return
    from duotone_lab.cli import parallel_run

    with parallel_run.ranks(Parallel.parse(parallel), device) as ranks:
        yield ranks
