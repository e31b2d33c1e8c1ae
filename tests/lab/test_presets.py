import pytest

from duotone.errors import UserError
from duotone_lab.training import presets


@pytest.mark.parametrize("preset", presets.PRESETS.values(), ids=presets.PRESETS)
def test_every_dimension_fits_blocks_of_32(preset):
    sizes = preset.model
    assert all(size % 32 == 0 for size in (sizes.dim, sizes.hidden, preset.tokens_per_step))
    assert sizes.dim % sizes.heads == 0 and (sizes.dim // sizes.heads) % 2 == 0


def test_the_demonstration_is_as_long_as_promised():
    demo = presets.get("demo")
    assert demo.steps >= 100 and demo.tokens_per_step >= 2048 and demo.learning_rate == 1e-3


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(UserError, match="unknown preset 'huge': choose one of demo, tiny, small"):
        presets.get("huge")
