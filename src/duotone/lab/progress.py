"""What a training run tells while it goes on."""


class Progress:
    """Listens to runs; this one says nothing. Steps count from one."""

    def expect(self, runs: int, steps: int) -> None:
        """So many runs follow, each of `steps` steps."""

    def begin(self, name: str, *, steps: int, done: int, tokens_per_step: int, model: str) -> None:
        """A run called `name` starts to train `model`; `done` of its `steps` lie behind it."""

    def note(self, text: str) -> None:
        """Something worth a line of its own: what the run does now, or what went wrong without ending it."""

    def step(self, number: int, loss: float) -> None:
        """A step has ended with this training loss."""

    def end(self) -> None:
        """The run is over, whole or not."""
