"""Part 3: the tutorial's step on a CUDA device whose memory is capped.

The device is an argument, so that everything but the step itself is tested without one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Protocol

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from _four_combos.combos import COMBINATIONS, Combination, apply
from _four_combos.model import BERTGRUSentiment, tutorial_model
from _four_combos.progress import Progress
from _four_combos.results import CudaPart, CudaRow, CudaSettings

RAN = "ran"
OUT_OF_MEMORY = "out of memory"
CAP_ABOVE_DEVICE = "cap above device"


class Device(Protocol):
    """What part 3 needs of a device."""

    name: str
    total_bytes: int
    out_of_memory: type[BaseException]

    def limit(self, fraction: float) -> None:
        """Let this process have at most ``fraction`` of the device's memory."""

    def clear(self) -> None:
        """Give cached memory back and begin new peaks."""

    def peaks(self) -> tuple[int, int]:
        """Return the peak allocated and the peak reserved bytes since :meth:`clear`."""


class CudaDevice:
    """The current CUDA device."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties()
        self.name: str = properties.name
        self.total_bytes: int = properties.total_memory
        self.out_of_memory: type[BaseException] = torch.OutOfMemoryError

    def limit(self, fraction: float) -> None:
        torch.cuda.set_per_process_memory_fraction(fraction)

    def clear(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


Step = Callable[[Combination, str, CudaSettings], None]
"""Does the step of one combination with one attention; raises when memory runs out."""


def tutorial_step(combination: Combination, attention: str, settings: CudaSettings) -> None:
    """Train the tutorial's model for a few steps on the current CUDA device.

    Two steps at least show the peak: in the first, Adam's state is not there yet.
    """
    with torch.device("cuda"):
        model = tutorial_model(attention)
    train_steps(model, combination, settings, "cuda")
    torch.cuda.synchronize()


def train_steps(
    model: BERTGRUSentiment, combination: Combination, settings: CudaSettings, device: str
) -> None:
    """Train ``model`` for a few steps on random tokens, with Adam over all parameters."""
    shape = (settings.batch_size, settings.length)
    input_ids = torch.randint(0, model.bert.config.vocab_size, shape, device=device)
    labels = torch.ones(settings.batch_size, device=device)
    apply(combination, model)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(settings.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = binary_cross_entropy_with_logits(model(input_ids), labels)
        torch.autograd.backward(loss)
        optimizer.step()


def measure(device: Device, settings: CudaSettings, progress: Progress, step: Step) -> CudaPart:
    """Run every combination with every attention under every cap; lift the cap at the end."""
    rows = []
    try:
        for cap, attention, combination in product(
            settings.caps, settings.attentions, COMBINATIONS
        ):
            outcome, peaks = _run_capped(
                device, cap, partial(step, combination, attention, settings)
            )
            rows.append(
                CudaRow(
                    cap_bytes=cap,
                    attention=attention,
                    combination=combination.key,
                    outcome=outcome,
                    peak_allocated_bytes=peaks[0] if peaks else None,
                    peak_reserved_bytes=peaks[1] if peaks else None,
                )
            )
            progress.advance(WORK, f"{combination.key} with {attention}: {outcome}")
    finally:
        device.limit(1.0)
    return CudaPart(device=device.name, total_bytes=device.total_bytes, rows=tuple(rows))


def _run_capped(
    device: Device, cap: int, step: Callable[[], None]
) -> tuple[str, tuple[int, int] | None]:
    if cap > device.total_bytes:
        return CAP_ABOVE_DEVICE, None
    _clear(device)
    device.limit(cap / device.total_bytes)
    # What was reached before memory ran out is no peak: the step never got to its end.
    outcome, peaks = OUT_OF_MEMORY, None
    with suppress(device.out_of_memory):
        step()
        outcome, peaks = RAN, device.peaks()
    # Only now: while the error lives, its traceback holds the step's tensors.
    _clear(device)
    return outcome, peaks


def _clear(device: Device) -> None:
    # Collect first: what a step leaves in reference cycles cannot be given back before.
    gc.collect()
    device.clear()


WORK = 10.0
"""One measurement's work for the progress bar, in the unit of part 2."""


def total_work(settings: CudaSettings) -> float:
    """Estimate the whole part's work."""
    return WORK * len(settings.caps) * len(settings.attentions) * len(COMBINATIONS)
