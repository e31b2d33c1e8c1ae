"""The subject `host`: host time of forward and backward at sizes whose device work does not count."""

import torch

from bench.subjects import grouped, layer, linear
from bench.timing.case import BASE, Case, Settings, Shape, Subject, Work, require_multiple, written
from bench.timing.duel import HostClock

STEPS = 20
"""Between two synchronisations, so that no queue fills up."""

EXPERTS = 4


def in_bursts(step: layer.ForwardBackward) -> Work:
    """A call is a few steps and, on CUDA, a synchronisation."""

    def call() -> None:
        for _ in range(STEPS):
            step()
        if step.x.is_cuda:
            torch.cuda.synchronize()

    return Work(call, steps=STEPS)


def cases(settings: Settings, shape: Shape) -> list[Case]:
    require_multiple("M", shape[0], EXPERTS)
    splits = [shape[0] // EXPERTS] * EXPERTS
    return [
        Case(
            "host, Linear",
            written(shape),
            BASE,
            HostClock(),
            lambda: linear.candidates(settings, shape, in_bursts),
        ),
        Case(
            f"host, GroupedLinear, {EXPERTS} experts",
            written(shape),
            grouped.base(settings.device),
            HostClock(),
            lambda: grouped.candidates(settings, shape, splits, in_bursts),
        ),
    ]


HOST = Subject(
    "host",
    f"Host time of Linear and of GroupedLinear with {EXPERTS} experts at a tiny shape: M rows, K features to N.",
    ("M", "K", "N"),
    {"cuda": ((512, 128, 128),), "cpu": ((32, 32, 32),)},
    cases,
)
