"""The command line: thin commands over the library. Torch is imported by a command, not by `--help`."""

__all__: list[str] = []
