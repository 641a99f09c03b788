"""Real runs as estimates: on the CPU, and from a CUDA memory snapshot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from freezekit import estimate_memory, measure_memory
from freezekit._memory.snapshot import stream_of_snapshot


def test_a_measured_step_is_the_estimated_one() -> None:
    """On what the CPU does as CUDA would, both say the same, part by part."""
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    inputs = torch.randn(32, 256)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    kept: dict[str, Any] = {}

    def step() -> None:
        optimizer.zero_grad()
        kept["outputs"] = model(inputs)
        kept["loss"] = kept["outputs"].sum()
        kept["loss"].backward()
        optimizer.step()

    estimate = estimate_memory(model, inputs, steps=2)
    measured = measure_memory(step, model=model)
    assert (measured.source, measured.optimizer, measured.mode) == ("cpu", "AdamW", "train")
    expected, found = dict(estimate.breakdown), dict(measured.breakdown)
    for part in ("parameters", "gradients", "optimizer_state"):
        assert found[part] == expected[part]
    assert measured.peak_phase == estimate.peak_phase == "optimizer"
    assert "(measured on CPU)" in str(measured)
    assert {p.phase for p in measured.timeline} >= {"forward", "backward", "optimizer"}
    assert str(estimate.compare(measured))


def test_activations_are_what_the_backward_pass_found() -> None:
    """Kept between the passes, and told by module."""
    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1))
    x = torch.randn(512, 64)
    measured = measure_memory(lambda: model(x).sum().backward(), model=model, steps=1)
    by_module = {
        found.module: found.nbytes
        for found in measured.stream.allocations
        if found.category == "activations" and found.nbytes > 1 << 20
    }
    assert by_module == {"0": 512 * 1024 * 4, "1": 512 * 1024 * 4}


def test_without_a_model_there_is_still_a_peak() -> None:
    """A step alone: what it allocates."""
    measured = measure_memory(lambda: torch.zeros(1 << 20) + 1, steps=1)
    assert measured.peak_allocated == 2 * (4 << 20)
    assert measured.model == "step"


def test_no_step() -> None:
    """Nothing to measure."""
    with pytest.raises(ValueError, match="expected at least one step, got 0"):
        measure_memory(lambda: None, steps=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    """A GPU that is not there is named."""
    with pytest.raises(RuntimeError, match="device='cuda' needs a GPU, and torch sees none"):
        measure_memory(lambda: None, device="cuda")


SNAPSHOT: dict[str, Any] = {
    "segments": [
        {
            "device": 0,
            "address": 1000,
            "total_size": 4096,
            "blocks": [
                {"size": 512, "requested_size": 400, "state": "active_allocated"},
                {"size": 1024, "requested_size": 1024, "state": "active_allocated"},
                {"size": 2560, "requested_size": 0, "state": "inactive"},
            ],
        }
    ],
    "device_traces": [
        [
            {"action": "free_requested", "addr": 5000, "size": 2048},
            {"action": "free_completed", "addr": 5000, "size": 2048},
            {"action": "segment_alloc", "addr": 1000, "size": 4096},
            {"action": "alloc", "addr": 1512, "size": 1024},
            {"action": "alloc", "addr": 5000, "size": 700},
            {"action": "free_completed", "addr": 5000, "size": 700},
        ]
    ],
}


def test_a_snapshot_is_a_stream() -> None:
    """What was there before comes first; then allocations and frees in order."""
    stream = stream_of_snapshot(SNAPSHOT, known={1000: ("parameters", "layer")})
    assert [(a.nbytes, a.phase, a.category) for a in stream.allocations] == [
        (400, "setup", "parameters"),
        (2048, "setup", "temporaries"),
        (1024, "forward", "temporaries"),
        (700, "forward", "temporaries"),
    ]
    assert stream.live_bytes() == [400, 2448, 400, 1424, 2124, 1424]


@pytest.mark.parametrize(
    ("snapshot", "device", "message"),
    [
        (
            {"segments": []},
            0,
            r"not a CUDA memory snapshot: expected .* got \['segments'\]",
        ),
        (SNAPSHOT, 1, r"the snapshot has traces of 1 device\(s\), none of 1"),
    ],
)
def test_what_is_no_snapshot(snapshot: Any, device: int, message: str) -> None:
    """The keys that are there, or the devices."""
    with pytest.raises(ValueError, match=message):
        stream_of_snapshot(snapshot, device)
