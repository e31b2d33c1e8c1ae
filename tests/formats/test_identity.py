"""Identity: the matrix itself."""

import json

import pytest
import torch

from duotone.formats import IDENTITY, get


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_encode_aliases_its_input_and_decode_gives_it_back(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -0.0], [torch.nan, torch.inf]]).to(dtype)
    parts = IDENTITY.encode(x, seed=3, plane="col")
    assert set(parts) == {"codes"} and parts["codes"] is x
    back = IDENTITY.decode(parts, dtype)
    width = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(back.view(width), x.view(width))


def test_decode_casts_to_the_dtype_that_is_asked_for() -> None:
    x = torch.tensor([[1 + 2.0**-9, 3e38]])
    assert torch.equal(IDENTITY.decode(IDENTITY.encode(x), torch.bfloat16), x.bfloat16())


def test_a_strided_matrix_passes_through() -> None:
    x = torch.randn(4, 6)
    for view in (x.t(), x[::2, 1::2], x[:0]):
        assert torch.equal(IDENTITY.decode(IDENTITY.encode(view), torch.float32), view)


def test_the_other_plane_is_a_view() -> None:
    x = torch.randn(4, 6)
    derived = IDENTITY.derive(IDENTITY.encode(x))
    assert torch.equal(derived["codes"], x.t())
    assert derived["codes"].data_ptr() == x.data_ptr()
    assert IDENTITY.is_derivable


def test_factors_are_the_matrix_and_nothing_else() -> None:
    x = torch.randn(4, 6)
    factors = IDENTITY.factors(IDENTITY.encode(x))
    assert factors.values is x and factors.epilogue_scale is None and factors.divisor == 1.0


def test_unrotate_cuts_padding_only() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(IDENTITY.unrotate(x, 5), x[:, :5])


def test_it_is_registered_and_describes_itself_as_json() -> None:
    assert get("identity") is IDENTITY
    assert json.loads(json.dumps(IDENTITY.describe()))["name"] == "identity"
    assert not IDENTITY.is_stochastic and IDENTITY.transform == "" and not IDENTITY.spans(0)
    assert IDENTITY.parts(3, 5)["codes"].shape == (3, 5)
