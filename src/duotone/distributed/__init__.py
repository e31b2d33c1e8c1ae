"""Training over many ranks beside torch's own engines. Import it by name; `import duotone` does not."""

from duotone.distributed.checkpoints import async_save, latest, load, save

__all__ = ["async_save", "latest", "load", "save"]
