"""What CUDA's libraries take beside results: each rule's figure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from freezekit import MemoryEstimate, estimate_memory
from freezekit._memory.cuda_rules import (
    cublas_workspace,
    efficient_backward,
    embedding_backward,
    flash_backward,
    index_put,
)

MIB = 1 << 20
AMPERE = 8_519_680


@pytest.mark.parametrize(
    ("capability", "version", "workspace"),
    [
        ((8, 0), (1, 13), (0, True)),
        ((8, 0), (2, 0), (AMPERE, True)),
        ((9, 0), (2, 6), (32 * MIB, True)),
        ((10, 0), (2, 6), (AMPERE, True)),
        ((12, 0), (2, 13), (32 * MIB, True)),
        ((8, 6), (2, 13), (AMPERE, True)),
        ((8, 6), (2, 14), (AMPERE, False)),
        ((9, 0), (2, 14), (32 * MIB, False)),
    ],
)
def test_cublas_workspaces(
    capability: tuple[int, int], version: tuple[int, int], workspace: tuple[int, bool]
) -> None:
    """Their size depends on the GPU, their life on the version of torch."""
    assert cublas_workspace(capability, version) == workspace


def test_kept_and_passing_workspaces() -> None:
    """Two are kept up to torch 2.13; later each product has one for itself."""
    model = nn.Linear(512, 512)
    inputs = torch.zeros(8, 512)
    kept, passing = (
        estimate_memory(model, inputs, torch_version=version) for version in ("2.13.0", "2.14.1")
    )

    def workspaces(estimate: MemoryEstimate) -> list[int]:
        found = estimate.stream.allocations
        return [a.nbytes for a in found if a.operation == "cublas workspace"]

    assert workspaces(kept) == [AMPERE] * 2
    # Forward, and the weight's gradient, in each of three steps.
    assert workspaces(passing) == [AMPERE] * 6
    assert passing.peak_allocated < kept.peak_allocated


def test_flash_attention_backward() -> None:
    """fp32 sums for dq, rows of 128; grouped heads are expanded."""
    query = torch.empty(2, 8, 200, 40, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 2, 200, 40, dtype=torch.bfloat16, device="meta")
    rows, dq = 2 * 8 * 256 * 4, 2 * 256 * 8 * 64 * 4
    assert flash_backward([None, query, query]) == [rows, dq]
    assert flash_backward([None, query, key]) == [rows, dq, *[2 * 200 * 8 * 40 * 2] * 2]


def test_efficient_attention_backward() -> None:
    """Row sums; in half precision fp32 sums for all three gradients."""
    full = torch.empty(2, 8, 100, 64, device="meta")
    rows = 2 * 8 * 128 * 4
    assert efficient_backward([None, full, full]) == [rows]
    half = full.to(torch.float16)
    assert efficient_backward([None, half, half]) == [rows, 3 * full.numel() * 4]


@pytest.mark.parametrize(("count", "temporaries"), [(3072, 0), (3073, 3073 * (4 * 8 + 16 * 4))])
def test_embedding_backward_sorts_many_indices(count: int, temporaries: int) -> None:
    """Up to 3,072 indices there is nothing to sort."""
    gradient = torch.empty(count, 16, device="meta")
    indices = torch.empty(count, dtype=torch.long, device="meta")
    assert sum(embedding_backward([gradient, indices])) == temporaries


def test_values_summed_by_index_are_sorted() -> None:
    """As a trace of torch 2.11 shows: five lists of 512 indices, and a byte; else nothing."""
    into, values = torch.empty(64, 16, device="meta"), torch.empty(512, 16, device="meta")
    indices = [torch.empty(512, dtype=torch.long, device="meta"), None]
    assert index_put([into, indices, values, True]) == [4096] * 5 + [1]
    assert index_put([into, indices, values]) == []


def test_statistics_of_norms_are_in_fp32() -> None:
    """Mean and rstd of a row take 4 bytes each, whatever the dtype of the row."""
    model = nn.LayerNorm(16, dtype=torch.bfloat16)
    estimate = estimate_memory(
        model, torch.zeros(600, 16, dtype=torch.bfloat16), optimizer=None, steps=1
    )
    found = [
        allocation.nbytes
        for allocation in estimate.stream.allocations
        if allocation.operation == "aten.native_layer_norm"
    ]
    assert found == [600 * 16 * 2, 600 * 4, 600 * 4]


def _operations(model: nn.Module, inputs: Any, **options: Any) -> list[str]:
    estimate = estimate_memory(model, inputs, steps=1, **options)
    return [found.operation for found in estimate.stream.allocations]


def test_optimizers_have_cudas_defaults() -> None:
    """A function's optimizer gets foreach as it would on CUDA; fused has no temporaries."""
    model = nn.Linear(64, 64)
    inputs = torch.zeros(4, 64)
    foreach = _operations(model, inputs, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    assert "aten._foreach_sqrt" in foreach
    fused = _operations(model, inputs, optimizer="adamw_fused")
    assert "aten._foreach_sqrt" not in fused
    loop = _operations(
        model, inputs, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False)
    )
    assert "aten._foreach_sqrt" not in loop
