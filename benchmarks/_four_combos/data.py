"""Real labelled text: film-review sentences with human ratings, out of a checked archive.

The sentences are part of the data set of Hutto and Gilbert, "VADER: A Parsimonious Rule-based
Model for Sentiment Analysis of Social Media Text" (ICWSM 2014), as shipped in the source
distribution of vaderSentiment 3.3.2.
"""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SDIST = "vaderSentiment-3.3.2.tar.gz"
SDIST_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
MEMBER = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
FETCH = (
    "pip download --no-deps --no-binary vaderSentiment --require-hashes "
    "-r benchmarks/four_combos_data.txt -d"
)
TEST_SHARE = 0.2


class InputError(RuntimeError):
    """What the benchmark reads is missing, or is not what it should be."""


@dataclass(frozen=True, slots=True)
class Example:
    """One text with its label."""

    text: str
    positive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """All examples, split once and for all, and what was left out of them."""

    train: tuple[Example, ...]
    test: tuple[Example, ...]
    rows: int
    dropped_neutral: int
    """Rows rated exactly 0: neither positive nor negative."""
    dropped_repeated: int
    """Rows whose text had already been seen."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded token ids and attention mask, (batch, length), and labels 0. or 1., (batch,)."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three tensors, for counting their bytes."""
        return self.input_ids, self.attention_mask, self.labels


def load(directory: Path, *, sha256: str = SDIST_SHA256) -> Corpus:
    """Check the archive in ``directory``, read the sentences out of it, and split them."""
    return split(*parse(read_member(read_archive(directory, sha256=sha256))))


def read_archive(directory: Path, *, sha256: str) -> bytes:
    """Return the archive's bytes once their hash has been checked.

    Raises:
        InputError: the file is missing, or its SHA-256 is another one.
    """
    path = directory / SDIST
    if not path.is_file():
        message = (
            f"{path} is missing: `nox -s four_combos` fetches it, or by hand: {FETCH} {directory}"
        )
        raise InputError(message)
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        message = f"{path} is not the expected file: SHA-256 expected {sha256}, found {found}"
        raise InputError(message)
    return content


def read_member(archive: bytes) -> str:
    """Read the ratings file out of the tar within the tar, in memory.

    Nothing is extracted to disk, so no name inside the archives can become a path.
    """
    return _regular_file(_regular_file(archive, INNER), MEMBER).decode("utf-8")


def _regular_file(archive: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        try:
            member = tar.getmember(name)
        except KeyError:
            message = f"the archive holds no {name}"
            raise InputError(message) from None
        stream = tar.extractfile(member) if member.isreg() else None
        if stream is None:
            message = f"{name} in the archive is not a regular file"
            raise InputError(message)
        with stream:
            return stream.read()


def parse(text: str) -> tuple[list[Example], int]:
    """Parse rows of id, rating and text, separated by tabs.

    Returns:
        The examples in file order, and how many rows were dropped for a rating of exactly 0.

    Raises:
        InputError: a row is malformed; the message says which.
    """
    examples = []
    neutral = 0
    # Not splitlines(): it also splits at characters that may stand inside a text.
    rows = text.replace("\r\n", "\n").split("\n")
    for number, row in enumerate(rows, start=1):
        if not row:
            continue
        try:
            _, rating_text, sentence = row.split("\t")
            rating = float(rating_text)
        except ValueError:
            message = f"row {number} is not id TAB rating TAB text: {row[:60]!r}"
            raise InputError(message) from None
        if rating == 0:
            neutral += 1
        else:
            examples.append(Example(sentence.strip(), rating > 0))
    return examples, neutral


def split(examples: Sequence[Example], dropped_neutral: int) -> Corpus:
    """Split by a hash of each text, so that the side depends on the text and nothing else.

    The same text, whatever its case and blanks, has one hash and so one side; only its first row
    is kept. Each side is in the hash's order, which is as good as shuffled.
    """
    by_digest: dict[bytes, Example] = {}
    for example in examples:
        same_text = " ".join(example.text.casefold().split())
        by_digest.setdefault(hashlib.sha256(same_text.encode()).digest(), example)
    border = int(TEST_SHARE * 2**32)
    ordered = sorted(by_digest.items())
    test = [example for digest, example in ordered if _head(digest) < border]
    train = [example for digest, example in ordered if _head(digest) >= border]
    return Corpus(
        train=tuple(train),
        test=tuple(test),
        rows=len(examples) + dropped_neutral,
        dropped_neutral=dropped_neutral,
        dropped_repeated=len(examples) - len(by_digest),
    )


def _head(digest: bytes) -> int:
    return int.from_bytes(digest[:4], "big")


def training_batches(
    examples: Sequence[Example], tokenizer: Any, *, batch_size: int, batches: int, seed: int
) -> list[Batch]:
    """Draw ``batches`` batches without repetition, in an order that ``seed`` fixes.

    Raises:
        InputError: there are fewer examples than that.
    """
    wanted = batch_size * batches
    if wanted > len(examples):
        message = (
            f"{batches} batches of {batch_size} need {wanted} texts, there are {len(examples)}"
        )
        raise InputError(message)
    chosen = random.Random(seed).sample(list(examples), wanted)  # noqa: S311 - not for secrets
    return [_encode(chunk, tokenizer) for chunk in _chunks(chosen, batch_size)]


def held_out_batches(
    examples: Sequence[Example], tokenizer: Any, *, batch_size: int
) -> list[Batch]:
    """Batch ``examples`` by length, which spares padding; order does not matter to accuracy."""
    by_length = sorted(examples, key=lambda example: len(example.text))
    return [_encode(chunk, tokenizer) for chunk in _chunks(by_length, batch_size)]


def _chunks(examples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    for start in range(0, len(examples), size):
        yield examples[start : start + size]


def _encode(examples: Sequence[Example], tokenizer: Any) -> Batch:
    encoded = tokenizer(
        [example.text for example in examples],
        padding=True,
        truncation=True,
        max_length=512,
        return_tensors="pt",
    )
    labels = torch.tensor([float(example.positive) for example in examples])
    return Batch(encoded["input_ids"], encoded["attention_mask"], labels)
