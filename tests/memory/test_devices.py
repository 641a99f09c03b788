"""The table of GPUs, and finding one by its name."""

from __future__ import annotations

import pytest

from freezekit._memory.devices import GPUS, budget_bytes, find_gpu

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA GeForce RTX 2080 Ti", "NVIDIA GeForce RTX 2080 Ti"),
        ("rtx 3060", "NVIDIA GeForce RTX 3060"),
        ("RTX_4090", "NVIDIA GeForce RTX 4090"),
        ("T4", "Tesla T4"),
        ("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("H200", "NVIDIA H200"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("V100 32GB", "Tesla V100-SXM2-32GB"),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
        # Two that are alike in all that is told of them.
        ("A100 80GB", "NVIDIA A100-SXM4-80GB"),
    ],
)
def test_names(name: str, found: str) -> None:
    """With or without the maker's words, in any case; or by what no other one has."""
    assert find_gpu(name).name == found


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("A100", "'A100' may be any of NVIDIA A100-PCIE-40GB, NVIDIA A100-SXM4-40GB, NVIDIA"),
        ("RTX 6000", "may be any of NVIDIA RTX 6000 Ada Generation, NVIDIA RTX PRO 6000"),
        ("H100 SXM", "unknown GPU 'H100 SXM'; near names: NVIDIA H100 PCIe, NVIDIA H100 80GB"),
        # Never the 5070 Ti for it.
        ("RTX 5070", "unknown GPU 'RTX 5070'; near names: NVIDIA GeForce RTX 5070 Ti"),
        ("GTX 9999", "near names: "),
        ("Voodoo", r"unknown GPU 'Voodoo' \(or give its memory, such as '11GiB'\)"),
    ],
)
def test_unknown_names(name: str, hint: str) -> None:
    """Several or none: the near ones are named."""
    with pytest.raises(ValueError, match=hint):
        find_gpu(name)


def test_every_gpu_is_found_by_its_own_name() -> None:
    """And has less memory than its nominal size, but not much."""
    for gpu in GPUS:
        assert find_gpu(gpu.name) is gpu
        assert gpu.capability >= (6, 0)
        assert GIB < gpu.memory < 200 * GIB


def test_budgets() -> None:
    """A GPU's name, a size, or bytes."""
    assert budget_bytes("RTX 2080 Ti") == find_gpu("RTX 2080 Ti").memory
    assert budget_bytes("11GiB") == budget_bytes(11 * GIB) == 11 * GIB
