"""nn.Modules: names, parameters and tuples of the stages in `ops/`."""

from duotone.modules.conversion import convert_parameters as convert_parameters
from duotone.ops.linear import Linear as Linear
from duotone.ops.naming import name_modules as name_modules
