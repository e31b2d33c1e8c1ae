import numpy as np
import pytest
import torch

from duotone.errors import UserError
from duotone_lab.training import data, texts


def test_every_byte_is_either_trained_on_or_held_out():
    text = (np.arange(240) % 251).astype(np.uint8)
    train, heldout = data.split(text, 8)
    assert sorted([*train.tolist(), *heldout.tolist()]) == sorted(text.tolist())
    assert not set(train.tolist()) & set(heldout.tolist())


def test_held_out_pieces_are_contiguous_and_spread_over_a_long_corpus():
    size, context = 1_000_000, 64
    marks = (np.arange(size) // (size // 200)).astype(np.uint8)
    train, heldout = data.split(marks, context)
    result = np.unique(heldout.numpy())
    assert result.min() < 40 and result.max() > 160
    assert 0.03 < heldout.numel() / size < 0.07
    assert train.numel() + heldout.numel() == size


@pytest.mark.parametrize("size", [18, 19, 27, 100, 180, 191])
def test_the_shortest_corpora_keep_a_context_on_both_sides(size):
    train, heldout = data.split(np.zeros(size, dtype=np.uint8), 8)
    assert train.numel() >= 9 and heldout.numel() >= 9
    assert train.numel() + heldout.numel() == size


def test_a_batch_is_a_function_of_seed_and_step_alone(corpus):
    first = corpus.batch(3, 7, count=4, context=16)
    corpus.batch(3, 8, count=4, context=16)
    same_batch = corpus.batch(3, 7, count=4, context=16)
    assert all(torch.equal(a, b) for a, b in zip(first, same_batch, strict=True))
    assert not torch.equal(first[0], corpus.batch(3, 8, count=4, context=16)[0])
    assert not torch.equal(first[0], corpus.batch(4, 7, count=4, context=16)[0])


def test_targets_are_the_next_bytes_of_the_training_text(corpus):
    tokens, targets = corpus.batch(0, 0, count=4, context=16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    text = bytes(corpus.train.tolist())
    for row, target in zip(tokens, targets, strict=True):
        assert bytes(row.tolist()) + bytes([int(target[-1])]) in text


def test_batches_reach_the_last_window_and_no_further():
    corpus = data.Corpus((), torch.arange(10, dtype=torch.uint8), torch.arange(10, dtype=torch.uint8), "")
    first_bytes = {int(t[0, 0]) for t, _ in (corpus.batch(0, step, count=1, context=8) for step in range(50))}
    assert first_bytes == {0, 1}
    assert [int(t[0, 0]) for t, _ in corpus.heldout_batches(2, count=1, context=8)] == [0, 1]


def test_the_default_text_is_pythons_own_and_bounded():
    corpus = data.load([], context=32)
    assert 1_000_000 < corpus.size <= texts.DEFAULT_BYTES + 2_000
    assert corpus.digest == data.load([], context=32).digest
    assert b"import" in bytes(corpus.train[:2_000_000].tolist())


def test_files_folders_and_globs_are_read_in_the_order_given(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("B" * 40)
    (tmp_path / "sub" / "a.md").write_text("A" * 40)
    (tmp_path / "z.txt").write_text("Z" * 40)
    (tmp_path / "y.txt").write_text("Y" * 40)
    result = texts.read([str(tmp_path / "z.txt"), str(tmp_path / "sub"), str(tmp_path / "?.txt")])
    assert [text[:1] for text in result] == [b"Z", b"A", b"B", b"Y", b"Z"]


def test_a_folder_leaves_out_binary_empty_and_hidden_files(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".secret").write_text("hidden")
    (tmp_path / "text.txt").write_text("text")
    assert texts.read([str(tmp_path)]) == [b"text"]


def test_a_context_and_its_next_byte_are_the_least_on_each_side(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 18)
    assert data.load([str(path)], context=8).size == 18
    path.write_bytes(b"x" * 17)
    with pytest.raises(UserError, match=r"short.txt is 17 bytes, .* need 18: give more text"):
        data.load([str(path)], context=8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: give a file"),
        (b"text\0text" * 100, "is binary .*: give a file"),
        (None, "no data file matches"),
    ],
)
def test_an_unusable_file_is_named_in_one_line(tmp_path, content, message):
    path = tmp_path / "given.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        data.load([str(path)], context=8)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_a_folder_without_text_is_named(tmp_path):
    with pytest.raises(UserError, match="holds no text file"):
        data.load([str(tmp_path)], context=8)
