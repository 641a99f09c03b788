"""The largest batch that fits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from freezekit import estimate_memory, max_batch_size

MIB = 1 << 20


def deep() -> nn.Module:
    """An embedding, numbered blocks, a head."""
    with torch.device("meta"):
        return nn.ModuleDict(
            {
                "embed": nn.Linear(64, 256),
                "blocks": nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))),
                "head": nn.Linear(256, 2),
            }
        )


class Net(nn.Module):
    """The parts above, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = deep()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():  # type: ignore[operator]
            x = part(x).relu()
        return x


def rows(size: int) -> torch.Tensor:
    """A batch without data."""
    return torch.empty(size, 64, device="meta")


def test_the_found_size_fits_and_the_next_does_not() -> None:
    """Seen by estimating both."""
    found = max_batch_size(Net(), rows, "1GiB", multiple_of=16)
    assert found.batch_size % 16 == 0
    assert found.next_size is not None
    assert 16 <= found.next_size - found.batch_size <= 0.01 * found.batch_size
    assert estimate_memory(Net(), rows(found.batch_size)).fits("1GiB")
    assert not estimate_memory(Net(), rows(found.next_size)).fits("1GiB")
    assert found.estimate is not None
    assert found.estimate.fits("1GiB")


def test_few_sizes_are_traced_and_all_are_told() -> None:
    """A line through what is known leads there."""
    seen: list[int] = []
    found = max_batch_size(
        Net(), rows, "1GiB", advise=False, progress=lambda p: seen.append(p.batch_size)
    )
    assert sorted(seen) == [point.batch_size for point in found.curve]
    assert len(seen) <= 12
    assert not found.advised
    assert len(set(seen)) == len(seen)


@settings(deadline=None, max_examples=3)
@given(st.tuples(st.integers(700, 3000), st.integers(700, 3000)))
def test_more_memory_holds_no_smaller_batch(budgets: tuple[int, int]) -> None:
    """The result is monotone in the budget."""
    small, large = sorted(budgets)
    sizes = [
        max_batch_size(Net(), rows, size * MIB, multiple_of=1024, advise=False).batch_size
        for size in (small, large)
    ]
    assert sizes[0] <= sizes[1]


def test_what_must_be_frozen_for_the_next_size() -> None:
    """From the front on, and with these frozen it fits."""
    found = max_batch_size(Net(), rows, "1GiB", multiple_of=16)
    assert found.freeze_for_next
    assert found.freeze_for_next[0].startswith("parts.embed")
    model = Net()
    for fqn, parameter in model.named_parameters():
        if fqn.startswith("parts.embed"):
            parameter.requires_grad = False
    assert found.next_size is not None
    assert "would fit with these frozen" in str(found)


def test_no_batch_fits() -> None:
    """Not even the smallest; the report says so and has no estimate."""
    found = max_batch_size(Net(), rows, "601MiB")
    assert (found.batch_size, found.estimate) == (0, None)
    assert "no batch fits into 601.0 MiB" in str(found)


def test_the_limit_ends_the_search() -> None:
    """A size that is allowed to be the largest."""
    found = max_batch_size(Net(), rows, "24GiB", limit=100, multiple_of=8)
    assert (found.batch_size, found.next_size, found.freeze_for_next) == (96, 104, ()) or (
        found.batch_size == 96 and found.next_size is None
    )


def test_the_report_is_a_value() -> None:
    """It survives JSON, with the curve."""
    found = max_batch_size(Net(), rows, "1GiB", multiple_of=512, train=False)
    assert json.loads(json.dumps(found.to_dict()))["curve"][0]["batch_size"] == 512
    assert found.freeze_for_next == ()


@pytest.mark.parametrize("options", [{"multiple_of": 0}, {"limit": 4, "multiple_of": 8}], ids=str)
def test_sizes_below_one(options: Any) -> None:
    """There is no batch of none."""
    with pytest.raises(ValueError, match="expected multiple_of of at least 1 and a limit of at"):
        max_batch_size(Net(), rows, "1GiB", **options)


def test_a_budget_that_is_none() -> None:
    """The nearest GPU is named before anything is traced."""
    with pytest.raises(ValueError, match="unknown GPU 'RTX 3061'; near names: NVIDIA GeForce RTX"):
        max_batch_size(Net(), rows, "RTX 3061")


def test_without_tolerance_the_very_largest_is_found() -> None:
    """It fits, and one row more does not."""
    coarse = max_batch_size(Net(), rows, "1GiB", advise=False)
    exact = max_batch_size(Net(), rows, "1GiB", precision=0, advise=False)
    assert exact.next_size == exact.batch_size + 1
    assert coarse.batch_size <= exact.batch_size <= 1.01 * coarse.batch_size
