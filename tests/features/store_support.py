"""A backbone, data, and what a store of them has to hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from freezekit import FeatureDataset, FrozenFeatureExtractor

WIDTH = 6


class Counting(nn.Module):
    """A backbone that counts the samples it is given; features depend on each sample alone."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(4, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(WIDTH, 4, generator=generator))
            self.linear.bias.copy_(torch.randn(WIDTH, generator=generator))
        self._seen = [0]

    def forward(self, x: Tensor) -> Tensor:
        self._seen[0] += len(x)
        result: Tensor = self.norm(self.linear(x))
        return result

    @property
    def seen(self) -> int:
        """Samples so far."""
        return self._seen[0]


class Tokens(nn.Module):
    """A vector per token that depends on the token and the sample's other tokens, by the mask."""

    def __init__(self, *, uses_mask: bool = True, absolute: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(50, WIDTH, generator=generator))
        self.uses_mask = uses_mask
        self.absolute = absolute

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        vectors = self.table[input_ids]
        if self.absolute:
            vectors = vectors + torch.arange(input_ids.shape[1]).view(1, -1, 1)
        if attention_mask is None or not self.uses_mask:
            return vectors + vectors.mean(1, keepdim=True)
        weights = attention_mask.unsqueeze(2).to(vectors.dtype)
        return vectors + (vectors * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)


def make_batches(sizes: Sequence[int] = (4, 4, 4, 4, 4, 3)) -> list[tuple[Tensor, Tensor]]:
    """Batches of (inputs, labels); labels are the samples' places in the data."""
    generator = torch.Generator().manual_seed(7)
    total = sum(sizes)
    inputs = torch.randn(total, 4, generator=generator)
    labels = torch.arange(total)
    parts = (torch.split(tensor, list(sizes)) for tensor in (inputs, labels))
    return list(zip(*parts, strict=True))


def expected(batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The features of all samples, in order, without a store."""
    extractor = FrozenFeatureExtractor(Counting())
    return torch.cat([extractor(inputs) for inputs, _ in batches])


def assert_holds(
    dataset: FeatureDataset, batches: Sequence[tuple[Tensor, Tensor]], *, exact: bool = True
) -> None:
    """Every sample is there once, in order, to the bit, with its label.

    Batches of other sizes round otherwise: ``exact=False``.
    """
    want = expected(batches)
    assert len(dataset) == len(want)
    whole = dataset[:]
    if exact:
        assert torch.equal(whole["features"], want)
    torch.testing.assert_close(whole["features"], want)
    assert whole["labels"].tolist() == list(range(len(want)))
    assert dataset.verify() == ()


def shards_of(directory: Path) -> list[Path]:
    """The shards in a directory, in order."""
    return sorted(directory.glob("shard-*.safetensors"))


def each(values: Sequence[Any]) -> Iterator[Any]:
    """An iterator, which has no length and is used up."""
    yield from values
