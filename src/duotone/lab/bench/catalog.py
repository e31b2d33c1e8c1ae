"""The subjects by name."""

from duotone.lab.bench.case import Subject
from duotone.lab.bench.cast import CAST
from duotone.lab.bench.grouped import GROUPED
from duotone.lab.bench.host import HOST
from duotone.lab.bench.linear import LINEAR
from duotone.lab.bench.mlp import MLP
from duotone.lab.bench.train import TRAIN

SUBJECTS: dict[str, Subject] = {subject.name: subject for subject in (LINEAR, MLP, GROUPED, CAST, HOST, TRAIN)}
