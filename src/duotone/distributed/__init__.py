"""Training over many ranks beside torch's own engines. `import duotone` imports it when it is first read."""

from duotone.distributed.checkpoints import async_save, extra, latest, load, save
from duotone.modules.same_recipes import require_same_recipes

__all__ = ["async_save", "extra", "latest", "load", "require_same_recipes", "save"]
