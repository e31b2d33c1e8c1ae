"""nn.Modules over the linear core."""

from duotone.modules.conversion import convert_parameters as convert_parameters
from duotone.modules.linear import Linear as Linear
from duotone.modules.naming import name_modules as name_modules
