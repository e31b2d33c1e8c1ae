"""What a plane is: element codecs, block geometry, scale rules, and encode and decode in plain torch."""

from duotone.formats import catalog as catalog
from duotone.formats import elements as elements
from duotone.formats.format import Format as Format
from duotone.formats.format import ScaledFormat as ScaledFormat
from duotone.formats.identity import IDENTITY as IDENTITY
from duotone.formats.parts import Factors as Factors
from duotone.formats.parts import Parts as Parts
from duotone.formats.parts import PartSpec as PartSpec
from duotone.formats.registry import get as get
from duotone.formats.registry import names as names
from duotone.formats.registry import register as register
from duotone.formats.registry import with_floor as with_floor
