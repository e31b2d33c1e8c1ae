"""The options of tensor parallelism: `parallel_mode`, `tp_group`, `tp_size` and `sequence_parallel`."""

from typing import TYPE_CHECKING

from duotone.errors import UserError
from duotone.linear.layout import LAYOUTS, WHOLE, Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def parallel_layout(
    mode: str | None, group: "ProcessGroup | None", sequence_parallel: bool, tp_size: int = 1
) -> Layout:
    """The layout of `parallel_mode` in a process group, whose size a `tp_size` above 1 repeats."""
    if mode not in LAYOUTS:
        raise UserError(f"parallel_mode {mode!r} is unknown; allowed are None, 'column' and 'row'")
    if not isinstance(tp_size, int) or tp_size < 1 or (mode is None and tp_size != 1):
        raise UserError(f"tp_size is {tp_size!r}; it repeats the size of tp_group beside parallel_mode: leave it out")
    if mode is None:
        if sequence_parallel:
            raise UserError("sequence_parallel needs parallel_mode 'column' or 'row'; give one, and its tp_group")
        return WHOLE
    if group is None:
        raise UserError(
            f"parallel_mode {mode!r} needs a tp_group, also beside tp_size; pass the process group of the "
            "tensor-parallel ranks"
        )
    if tp_size not in (1, group.size()):
        raise UserError(f"tp_size is {tp_size} and tp_group has {group.size()} ranks; leave tp_size out")
    return LAYOUTS[mode](group.group_name, sequence_parallel)


def local_sizes(layout: Layout, in_features: int, out_features: int, group: "ProcessGroup | None") -> tuple[int, int]:
    """What this rank holds of in_features and out_features."""
    size = 1 if group is None else group.size()
    whole = {"column": out_features, "row": in_features}.get(layout.mode or "", size)
    if whole % size:
        raise UserError(f"parallel_mode {layout.mode!r} cannot split {whole} features over {size} ranks")
    local_in = in_features // size if layout.mode == "row" else in_features
    return local_in, out_features // size if layout.mode == "column" else out_features
