"""Rows of a public table of timm models: device memory by batch size, on an A100 in fp32.

Only growth is compared, in MiB per image between two batch sizes: what a process takes beside its
tensors is the same at both. The script that measured is not published. What the rows show is the
loop of timm's own training script: one copy of optimizer state (SGD with Nesterov momentum),
gradients cleared at the end of a step, and batches that timm's ``PrefetchLoader`` makes on a stream
of its own while the model computes. The allocator does not share blocks between streams, so up to
three batches in fp32 and one in uint8 are held beside what the model takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from freezekit import estimate_memory
from freezekit._memory.allocator import Block, CachingAllocator

__all__ = ["BATCHES", "SlopeRow", "estimate_slope", "read_slope"]

MIB = 1 << 20
BATCHES = (32, 128)
# The table is of 2024: any version that keeps its cuBLAS workspaces.
TORCH = "2.5.0"


@dataclass(frozen=True, slots=True)
class SlopeRow:
    """One model: MiB of device memory for each image more in the batch."""

    model: str
    measured: float


def read_slope(record: Mapping[str, str]) -> SlopeRow:
    """A row of the table, by its column names.

    Raises:
        ValueError: a column is missing or empty.
    """
    low, high = (record.get(f"gpu_mib_bs{batch}") or "" for batch in BATCHES)
    name = record.get("timm_model") or ""
    if not (name and low and high):
        raise ValueError(
            f"expected the columns timm_model, gpu_mib_bs{BATCHES[0]} and gpu_mib_bs{BATCHES[1]}, "
            f"got {dict(record)}"
        )
    return SlopeRow(name, (float(high) - float(low)) / (BATCHES[1] - BATCHES[0]))


def estimate_slope(row: SlopeRow) -> float:
    """Predicted MiB for each image more.

    Raises:
        ValueError: timm has no model of this name.
    """
    model, size = _build(row.model)
    low, high = (_reserved(model, (batch, *size)) for batch in BATCHES)
    return (high - low) / (BATCHES[1] - BATCHES[0]) / MIB


def _build(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    import timm

    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_', maxsplit=1)[0]}*")[:5]
        hint = f"; did you mean one of {', '.join(near)}?" if near else ""
        raise ValueError(f"timm {timm.__version__} has no model {name!r}{hint}")
    try:
        with torch.device("meta"):
            model = timm.create_model(name)
    except (RuntimeError, NotImplementedError):
        # Some compute their widths or tables with tensors' values.
        model = timm.create_model(name)
    return model.train(), tuple(model.default_cfg["input_size"])


def _reserved(model: nn.Module, shape: tuple[int, ...]) -> int:
    labels = torch.empty(shape[0], dtype=torch.long)
    estimate = estimate_memory(
        model,
        torch.empty(shape, device="meta"),
        loss=lambda logits: nn.functional.cross_entropy(logits, labels, label_smoothing=0.1),
        optimizer=_sgd,
        zero_grad="end",
        device="NVIDIA A100-SXM4-40GB",
        torch_version=TORCH,
    )
    images = 4 * torch.Size(shape).numel()
    # The batch that the estimate counts is one of the loader's.
    return estimate.peak_reserved + loader_reserved(images) - _reserved_for([images])


def _sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=2e-5, foreach=True
    )


def loader_reserved(images: int) -> int:
    """Bytes that a stream holds which makes the next batch while two are in use.

    ``images`` is a batch in fp32: it comes as uint8 and is converted, and goes when the loop takes
    the next but one.
    """
    allocator = CachingAllocator()
    batches: list[Block] = []
    for _ in range(4):
        raw, batch = allocator.malloc(images // 4), allocator.malloc(images)
        assert raw is not None
        assert batch is not None
        allocator.free(raw)
        batches.append(batch)
        if len(batches) == 3:
            allocator.free(batches.pop(0))
    return allocator.counters.peak_reserved


def _reserved_for(sizes: Iterable[int]) -> int:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.malloc(size)
    return allocator.counters.peak_reserved
