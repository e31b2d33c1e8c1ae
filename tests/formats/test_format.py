"""Every registered format, bit for bit against the reference, and what holds for all of them."""

import json

import pytest
import reference
import torch
from comparison import assert_equal_parts, assert_parts, assert_same, raw, tensor_of
from families import FAMILIES, make
from selection import DERIVABLE, DTYPES, NAMES, SEED, element_of, seed_of
from torch import Tensor

from duotone.formats import get, names

SHAPES = ((33, 80), (5, 150))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES)
def test_codes_scales_and_decoded_values_equal_the_reference(name: str, family: str) -> None:
    fmt = get(name)
    for dtype in DTYPES:
        for shape in SHAPES:
            x = make(family, shape, dtype, element_of(name))
            given_x = tensor_of(x, dtype)
            before = raw(given_x)
            parts = fmt.encode(given_x, seed=seed_of(name))
            assert torch.equal(raw(given_x), before), "the input was changed"
            want = reference.encode(name, x, dtype, seed=SEED)
            what = f"{dtype} {shape}"
            assert_parts(parts, want, what)
            values = reference.decode_fp32(name, want)
            assert_same(fmt.decode(parts, torch.float32), values, f"{what} decoded")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (2, 3), (17, 31), (16, 32), (130, 129), (32, 33), (3, 257)])
def test_ragged_and_odd_sizes_equal_the_reference(name: str, shape: tuple[int, int]) -> None:
    x = make("spread" if shape == (17, 31) else "normal", shape, "bfloat16")
    parts = get(name).encode(tensor_of(x, "bfloat16"), seed=seed_of(name))
    want = reference.encode(name, x, "bfloat16", seed=SEED)
    assert_parts(parts, want)
    assert_same(get(name).decode(parts, torch.float32), reference.decode_fp32(name, want))


@pytest.mark.parametrize("name", NAMES)
def test_fp16_input_equals_the_reference(name: str) -> None:
    for family in ("normal", "denormals", "huge", "nans", "infinities", "spread"):
        x = make(family, (17, 144), "float16")
        result = get(name).encode(tensor_of(x, "float16"), seed=seed_of(name))
        assert_parts(result, reference.encode(name, x, "float16", seed=SEED), family)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)])
def test_an_empty_matrix_encodes_decodes_and_derives(name: str, shape: tuple[int, int]) -> None:
    fmt = get(name)
    parts = fmt.encode(torch.zeros(shape), seed=seed_of(name))
    specs = fmt.parts(*shape)
    assert {k: (tuple(v.shape), v.dtype) for k, v in parts.items()} == {k: (v.shape, v.dtype) for k, v in specs.items()}
    assert fmt.decode(parts, torch.bfloat16).shape == shape
    assert fmt.factors(parts).values.shape == shape
    derived = fmt.derive(parts)
    assert (derived is None) == (name not in DERIVABLE)
    assert derived is None or fmt.decode(derived, torch.float32).shape == shape[::-1]


@pytest.mark.parametrize("name", names())
def test_part_specs_equal_the_real_buffers(name: str) -> None:
    for shape in ((1, 1), (16, 32), (33, 65), (129, 257), (40, 16)):
        parts = get(name).encode(torch.randn(shape).bfloat16(), seed=seed_of(name))
        specs = get(name).parts(*shape)
        assert list(specs) == list(parts)
        for part, spec in specs.items():
            expected = (spec.shape, spec.dtype or torch.bfloat16)
            assert (tuple(parts[part].shape), parts[part].dtype) == expected, f"{part} of {shape}"


@pytest.mark.parametrize("name", NAMES)
def test_part_specs_say_how_many_rows_an_entry_covers(name: str) -> None:
    """The rows of a shard that ends on a block boundary are the first entries of every part that shards."""
    fmt, x = get(name), torch.from_numpy(make("normal", (256, 48)))
    top = x[:128].clone()
    top[0, 0] = x[0, 0] = 100.0  # both have the same amax
    whole, part = (fmt.encode(each, seed=seed_of(name)) for each in (x, top))
    for key, spec in fmt.parts(256, 48).items():
        covered = spec.rows_per_entry
        assert torch.equal(whole[key] if covered is None else whole[key][: 128 // covered], part[key]), key


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same matrix in other strides."""
    rows, cols = x.shape
    wide = torch.zeros(2 * rows, 3 * cols + 1, dtype=x.dtype)
    wide[::2, 1::3] = x
    offset = torch.zeros(rows + 2, cols + 3, dtype=x.dtype)
    offset[1:-1, 2:-1] = x
    cube = torch.zeros(rows, 2, cols, dtype=x.dtype)
    cube[:, 1] = x
    return {
        "transposed": x.t().contiguous().t(),
        "sliced": wide[::2, 1::3],
        "offset": offset[1:-1, 2:-1],
        "inner": cube[:, 1],
    }


@pytest.mark.parametrize("name", NAMES)
def test_strides_of_the_input_do_not_matter(name: str) -> None:
    fmt = get(name)
    for dtype in DTYPES:
        for shape in ((32, 48), (19, 37)):
            x = tensor_of(make("normal_and_zeros", shape, dtype), dtype)
            want = fmt.encode(x, seed=seed_of(name))
            for layout, same in layouts(x).items():
                before = raw(same)
                assert_equal_parts(fmt.encode(same, seed=seed_of(name)), want, f"{dtype} {shape} {layout}")
                assert torch.equal(raw(same), before)
            column = x[:, :1].expand(-1, 24)
            dense = fmt.encode(column.contiguous(), seed=seed_of(name))
            assert_equal_parts(fmt.encode(column, seed=seed_of(name)), dense, "expanded")


@pytest.mark.parametrize("name", NAMES)
def test_strides_of_the_parts_do_not_matter(name: str) -> None:
    fmt = get(name)
    parts = fmt.encode(torch.from_numpy(make("normal", (32, 64))), seed=seed_of(name))
    want = fmt.decode(parts, torch.float32)
    turned = {key: part.t().contiguous().t() if part.dim() == 2 else part for key, part in parts.items()}
    before = {key: part.clone() for key, part in turned.items()}
    assert torch.equal(fmt.decode(turned, torch.float32), want)
    assert torch.equal(fmt.factors(turned).values, fmt.factors(parts).values)
    for key, part in turned.items():
        assert torch.equal(part, before[key])


@pytest.mark.parametrize("name", NAMES)
def test_surroundings_do_not_change_the_bits(name: str) -> None:
    """Default dtype, autocast, autograd and inference mode."""
    fmt, x = get(name), torch.from_numpy(make("spread", (17, 48)))

    def both(x: Tensor) -> dict[str, Tensor]:
        parts = fmt.encode(x, seed=seed_of(name))
        return {**parts, "decoded": fmt.decode(parts, torch.float32), "inner": fmt.factors(parts).values}

    want = both(x)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        torch.set_default_dtype(dtype)
        try:
            result = both(x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert_bits(result, want, f"default dtype {dtype}")
    with torch.autocast("cpu", torch.bfloat16):
        result = both(x)
    assert_bits(result, want, "autocast")
    with torch.inference_mode():
        result = both(x)
    assert_bits(result, want, "inference")
    result = both(x.clone().requires_grad_())
    assert_bits(result, want, "autograd")


def assert_bits(result: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    for key, tensor in want.items():
        assert result[key].dtype == tensor.dtype and torch.equal(raw(result[key]), raw(tensor)), f"{what}: {key}"


@pytest.mark.parametrize("name", names())
def test_description_is_json_with_the_same_fields_for_all(name: str) -> None:
    described = get(name).describe()
    assert json.loads(json.dumps(described)) == described
    assert list(described) == list(get("nvfp4").describe()) and described["name"] == name


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp8_e4m3_tensor", 8.0),
        ("fp8_e4m3_128x128", 8.002),
        ("fp8_e4m3_1x128_e8m0", 8.0625),
        ("mxfp8_e4m3", 8.25),
        ("mxfp4", 4.25),
        ("nvfp4", 4.5),
        ("nvfp4_rht_sr", 4.5),
    ],
)
def test_description_counts_every_bit(name: str, bits: float) -> None:
    assert get(name).describe()["bits_per_element"] == bits
