"""check(batch): two passes are alike to the bit, or the modules that differ are named."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from features.features_support import FunctionalDropout, make_bert, make_convnet, token_batch
from freezekit import FrozenFeatureExtractor
from freezekit.errors import UnrepeatableFeaturesError


def test_sound_backbones_pass() -> None:
    """Batches as a tensor, a tuple and a mapping; with layers, pools and parts."""
    FrozenFeatureExtractor(make_convnet()).check(torch.randn(4, 3, 8, 8))
    FrozenFeatureExtractor(make_convnet(), layers="norm").check((torch.randn(4, 3, 8, 8),))
    FrozenFeatureExtractor(make_bert(), pool="mean", micro_batch_size=2).check(
        token_batch([5, 3, 1])
    )


def test_functional_dropout_is_found_where_it_is() -> None:
    """The module whose own forward drops is named, not those around or after it."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(FunctionalDropout()), nn.Linear(4, 4))
    with pytest.raises(
        UnrepeatableFeaturesError, match=r"arises in: 1\.0\. A functional"
    ) as caught:
        FrozenFeatureExtractor(net).check(torch.randn(2, 4))
    assert caught.value.modules == ("1.0",)


def test_all_that_differ_are_named_once() -> None:
    """Two sources and one that runs twice: two names, in the order in which they run."""
    drop = FunctionalDropout()
    net = nn.Sequential(drop, drop, nn.Linear(4, 4))
    with pytest.raises(UnrepeatableFeaturesError, match=r"arises in: 0\."):
        FrozenFeatureExtractor(net).check(torch.randn(2, 4))


def test_the_root_itself_may_be_the_source() -> None:
    """A backbone that drops in its own forward is named by its class."""
    with pytest.raises(UnrepeatableFeaturesError, match="arises in: FunctionalDropout"):
        FrozenFeatureExtractor(FunctionalDropout()).check(torch.randn(2, 4))


class NumpyNoise(nn.Module):
    """Noise from the generators of Python and NumPy, which torch's seed does not reach."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() + float(np.random.rand())  # noqa: NPY002


def draw() -> tuple[float, float, float]:
    """The next number of each generator."""
    return torch.rand(1).item(), random.random(), float(np.random.rand())  # noqa: NPY002


def seed() -> None:
    """Seed all three."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002


def test_random_generators_are_left_as_they_were() -> None:
    """A check that fails draws numbers, and the user's next numbers are as without it."""
    extractors = [FrozenFeatureExtractor(nn.Sequential(net)) for net in (NumpyNoise(), DROPS)]
    seed()
    expected = draw()
    seed()
    for extractor in extractors:
        with pytest.raises(UnrepeatableFeaturesError, match="arises in: 0"):
            extractor.check(torch.ones(2, 4))
    assert draw() == expected


DROPS = FunctionalDropout()


class Counts(nn.Module):
    """A buffer that every forward moves, also in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + 0 * self.seen


def test_a_buffer_that_a_pass_changes_is_named() -> None:
    """State that moves in eval makes features depend on what was run before."""
    with pytest.raises(UnrepeatableFeaturesError, match=r"changes 1 buffer.*0\.seen") as caught:
        FrozenFeatureExtractor(nn.Sequential(Counts())).check(torch.randn(2, 4))
    assert caught.value.buffers == ("0.seen",)


def test_nan_equals_itself() -> None:
    """Features that are NaN in the same places are alike; the store has a say about NaN."""
    FrozenFeatureExtractor(nn.Identity()).check(torch.full((2, 2), torch.nan))


def test_a_batch_in_another_dimension_is_found() -> None:
    """An RNN with time first is split by time: the parts tell another story than the whole."""
    torch.manual_seed(0)

    class LastState(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.rnn(x)[0]
            return out

    extractor = FrozenFeatureExtractor(LastState(), micro_batch_size=2)
    with pytest.raises(UnrepeatableFeaturesError, match="batch_first=False"):
        extractor.check(torch.randn(6, 2, 4))
    assert extractor.micro_batch_size == 2
