"""The peak of live bytes is right where the answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from _four_combos.live import (
    optimizer_tensors,
    peak_during,
    peak_of_events,
    record_events,
    storage_bytes,
)

N = 100_000
FLOAT32 = 4


@pytest.mark.parametrize(
    ("events", "peak"),
    [
        ([], 0),
        ([(1, 10), (1, -10)], 10),
        ([(1, 10), (2, 5), (1, -10), (3, 8), (2, -5)], 15),
        ([(1, 10), (1, -10), (1, 20)], 20),
        ([(9, -50), (1, 10)], 10),
    ],
    ids=["nothing", "one", "overlap", "address used again", "release of something older"],
)
def test_replay(events: list[tuple[int, int]], peak: int) -> None:
    assert peak_of_events(events) == peak


def test_a_known_step_has_exactly_its_peak() -> None:
    """One float64 and one float32 copy are alive together, the first float32 copy no longer."""
    inputs = torch.ones(N)

    def step() -> None:
        first = inputs.neg()
        second = first.neg()
        del first
        second.double()

    assert peak_during(step) == N * FLOAT32 + N * 8


def test_what_was_there_before_is_not_counted() -> None:
    held = [torch.ones(N)]
    assert peak_during(held.clear) == 0


def test_what_an_earlier_measurement_left_does_not_disturb() -> None:
    """The profiler reports its release later; it is no part of the later step."""
    inputs = torch.ones(N)
    held: list[torch.Tensor] = []
    assert peak_during(lambda: held.append(inputs.neg())) == N * FLOAT32

    def step() -> None:
        held.clear()
        inputs.neg()

    assert peak_during(step) == N * FLOAT32


def test_a_training_step_peaks_where_reckoned() -> None:
    """After backward: the gradient of a square layer; besides only single numbers and vectors."""
    width = 300
    layer = nn.Linear(width, width, bias=False)
    inputs = torch.ones(1, width)

    def step() -> None:
        layer(inputs).sum().backward()

    peak = peak_during(step)
    gradient = width * width * FLOAT32
    assert gradient <= peak <= gradient + 4 * width * FLOAT32


def test_events_come_in_pairs_in_order() -> None:
    inputs = torch.ones(N)
    events = record_events(lambda: inputs.neg() is None)
    assert [size for _, size in events] == [N * FLOAT32, -N * FLOAT32]
    assert len({where for where, _ in events}) == 1


def test_storages_count_once() -> None:
    tensor = torch.ones(10)
    assert storage_bytes([tensor, tensor[2:], torch.ones(3)]) == 13 * FLOAT32


def test_optimizer_state_is_found() -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    assert optimizer_tensors(optimizer) == []
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    moments = 2 * (3 * 2 + 2) * FLOAT32
    step_counts = 2 * FLOAT32
    assert storage_bytes(optimizer_tensors(optimizer)) == moments + step_counts
