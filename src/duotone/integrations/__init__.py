"""What other libraries know of Duotone: a file for each, which imports its library. Nothing else imports these."""

__all__: list[str] = []
