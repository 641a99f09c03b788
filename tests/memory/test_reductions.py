"""Buffers of CUDA's reductions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from freezekit import estimate_memory
from freezekit._memory.devices import GPUS, Target, find_gpu, target_for
from freezekit._memory.reductions import reduction_workspace

A100 = Target().threads


def workspace(shape: tuple[int, ...], over: list[int] | None, **options: object) -> tuple[int, ...]:
    data = torch.empty(shape, device="meta", **options)  # type: ignore[call-overload]
    return reduction_workspace("aten.sum", (data, over), A100)


def test_as_recorded_on_a_gpu() -> None:
    """RMSNorm's gradient in a trace of torch 2.11: 2,048 rows take a buffer, 512 none."""
    assert workspace((4, 512, 1024), [0, 1]) == (16_777_216, 32)
    assert workspace((4, 128, 1024), [0, 1]) == ()


def test_the_buffer_fills_the_gpu() -> None:
    """Many rows are shared by as many blocks as run at once, whatever the number of results."""
    threads = 108 * 2048
    blocks, results_of_a_block = threads // 128, 128
    for results in (768, 3072):
        grid = results // results_of_a_block
        size, counters = workspace((65_536, results), [0])
        assert (size, counters) == (4 * 128 * 128 * grid * (blocks // grid), 4 * grid)
    half = workspace((65_536, 768), [0], dtype=torch.bfloat16)
    assert half == workspace((65_536, 768), [0])  # sums are kept in fp32


def test_rows_that_lie_together_need_little() -> None:
    """Sums along the rows have a block each; the sum of everything a number for each block."""
    assert workspace((4096, 1024), [1]) == ()
    size, counters = workspace((4096, 1024), None)
    assert 0 < size < 16_384
    assert counters == 4


def test_what_does_not_reduce_takes_nothing() -> None:
    """Other operators, whole numbers, nothing at all."""
    data = torch.empty(65_536, 768, device="meta")
    assert reduction_workspace("aten.mul", (data, data), A100) == ()
    assert workspace((65_536, 768), [0], dtype=torch.int64) == ()
    assert workspace((0, 768), [0]) == ()
    assert workspace((), None) == ()


def test_norms_name_their_dimensions_later() -> None:
    """``linalg_vector_norm(x, 2, dim)``."""
    data = torch.empty(65_536, 768, device="meta")
    found = reduction_workspace("aten.linalg_vector_norm", (data, 2, [0]), A100)
    assert found == workspace((65_536, 768), [0])


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    st.data(),
    st.sampled_from([torch.float32, torch.float16, torch.float64]),
)
def test_laws(shape: list[int], data: st.DataObject, dtype: torch.dtype) -> None:
    """Both sizes are positive or there is none; the order of dimensions to sum does not count."""
    axes = st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True)
    over = data.draw(axes)
    found = workspace(tuple(shape), over, dtype=dtype)
    assert len(found) in (0, 2)
    assert all(size > 0 for size in found)
    assert found == workspace(
        tuple(shape), [axis - len(shape) for axis in reversed(over)], dtype=dtype
    )


def test_very_large_inputs_go_in_halves() -> None:
    """Beyond 2 GiB of addresses the longest dimension is halved, and the buffer with it."""
    large = workspace((1 << 21, 768), [0])
    assert large == workspace((1 << 20, 768), [0]) != ()


def test_a_bias_costs_a_buffer() -> None:
    """The gradient of a bias is a sum over all rows: on a small GPU its buffer is smaller."""
    inputs = torch.empty(65_536, 768, device="meta")
    layer = nn.Linear(768, 768)
    found = {}
    for device in ("NVIDIA GeForce RTX 3060", "NVIDIA A100-SXM4-40GB"):
        estimate = estimate_memory(
            layer, inputs, loss=lambda out: out.square().sum(), device=device, optimizer=None
        )
        sums = [a for a in estimate.stream.allocations if a.operation == "aten.sum workspace"]
        found[device] = max(each.nbytes for each in sums)
    assert [size >> 20 for size in found.values()] == [24, 108]


def test_threads_of_a_gpu() -> None:
    """Multiprocessors times what each holds."""
    known = {"T4": 40 * 1024, "A100-SXM4-40GB": 108 * 2048, "RTX 4090": 128 * 1536}
    for name, threads in known.items():
        assert target_for(name, None, (2, 13)).threads == threads
    assert target_for("cuda", (8, 6), (2, 13)).multiprocessors == 84
    assert target_for("cuda", (5, 2), (2, 13)).multiprocessors == 108
    assert all(10 <= gpu.multiprocessors <= 188 for gpu in GPUS)
    assert find_gpu("RTX 3060").multiprocessors == 28
    with pytest.raises(ValueError, match="unknown GPU 'RTX 9999'"):
        target_for("RTX 9999", None, (2, 13))
