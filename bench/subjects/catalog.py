"""The subjects by name."""

from bench.subjects.attention import ATTENTION
from bench.subjects.cast import CAST
from bench.subjects.grouped import GROUPED
from bench.subjects.host import HOST
from bench.subjects.linear import LINEAR
from bench.subjects.mlp import MLP
from bench.subjects.train import TRAIN
from bench.timing.case import Subject

SUBJECTS: dict[str, Subject] = {
    subject.name: subject for subject in (LINEAR, MLP, GROUPED, ATTENTION, CAST, HOST, TRAIN)
}
