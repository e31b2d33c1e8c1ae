"""Entries for other libraries: one file for each, which imports its library. Nothing else imports these files."""

__all__: list[str] = []
