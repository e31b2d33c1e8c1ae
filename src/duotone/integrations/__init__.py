"""Entries for other libraries: one file for each, which imports its library. Nothing else imports these files."""

from duotone.renamed import keep_old_names

__all__: list[str] = []

keep_old_names({}, globals(), ("accelerate", "lightning", "torchtitan", "transformers"))
