"""Autocast as on CUDA: what is cast, and which casts are kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from freezekit import MemoryEstimate, estimate_memory
from freezekit._memory.autocast import FLOAT32, LOWER_PRECISION, PROMOTED
from freezekit._memory.cuda_functions import CudaFunctions

MIB = 1 << 20
HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda x: functional.linear(x, x), HALF),
        (lambda x: x @ x, HALF),
        (lambda x: torch.einsum("ab,cb->ac", x, x), HALF),
        (lambda x: functional.softmax(x.to(HALF), -1), torch.float32),
        (lambda x: functional.layer_norm(x.to(HALF), (4,)), torch.float32),
        (lambda x: x.to(HALF).sum(), torch.float32),
        (lambda x: functional.cross_entropy(x.to(HALF), x.softmax(-1)), torch.float32),
        (lambda x: functional.relu(x.to(HALF)), HALF),
        (functional.gelu, torch.float32),
        (lambda x: torch.addcmul(x, x.to(HALF), x), torch.float32),
        (lambda x: functional.linear(x.double(), x.double()), torch.float64),
    ],
)
def test_what_is_cast(call: object, dtype: torch.dtype) -> None:
    """Products in half precision, sums and norms in fp32, the rest as it comes."""
    assert callable(call)
    with CudaFunctions(), torch.autocast("cpu", HALF):
        assert call(torch.ones(4, 4)).dtype == dtype


def test_a_models_own_exception_counts() -> None:
    """Inside ``autocast(enabled=False)`` nothing is cast."""
    x = torch.ones(2, 2)
    with CudaFunctions(), torch.autocast("cpu", HALF):
        with torch.autocast("cpu", enabled=False):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == HALF


def test_the_lists_do_not_overlap() -> None:
    """A function is in one list at most."""
    assert not LOWER_PRECISION & FLOAT32
    assert not PROMOTED & (LOWER_PRECISION | FLOAT32)


def test_casts_of_trainable_weights_are_kept_and_of_frozen_ones_not() -> None:
    """Used twice, a trainable weight is cast once; a frozen one at every use."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1024, 1024, bias=False, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(self.linear(x))
            return out

    casts = {}
    for trainable in (True, False):
        model = Twice()
        model.linear.weight.requires_grad_(trainable)
        estimate = estimate_memory(
            model, torch.empty(4, 1024, device="meta"), train=False, autocast=HALF, steps=1
        )
        casts[trainable] = [
            found
            for found in estimate.stream.allocations
            if found.nbytes == 2 * MIB and found.operation == "aten._to_copy"
        ]
    assert len(casts[True]) == 1
    assert len(casts[False]) == 2


def test_no_cast_is_kept_in_inference_mode() -> None:
    """As torch 2.13 has it on the CPU: with ``no_grad`` a weight is cast once, here at each use."""
    weight = nn.Parameter(torch.ones(8, 8))
    rows = torch.ones(4, 8)
    made = []
    for context in (torch.no_grad(), torch.inference_mode()):
        record = profile(activities=[ProfilerActivity.CPU])
        with record as run, context, torch.autocast("cpu", HALF):
            for _ in range(3):
                nn.functional.linear(rows, weight)
        made.append(sum(e.count for e in run.key_averages() if e.key == "aten::_to_copy"))
        functions = CudaFunctions()
        with context, functions, torch.autocast("cpu", HALF):
            results = [functions.autocast._cast_tensor(weight, HALF) for _ in range(3)]
        made.append(len({id(result) for result in results}))
    assert made == [3 + 1, 1, 3 + 3, 3]


def test_the_kept_casts_go_with_the_forward_pass() -> None:
    """They are weights in half precision until autocast ends, not during the backward pass."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    inputs = torch.empty(1, 2048, device="meta")
    plain, cast = (
        estimate_memory(model, inputs, optimizer=None, autocast=dtype, steps=1)
        for dtype in (None, HALF)
    )

    def end_of_forward(estimate: MemoryEstimate) -> int:
        return next(p.end_allocated for p in estimate.timeline if p.phase == "forward")

    # Autograd keeps the cast weights whose input has a gradient: all but the first.
    assert end_of_forward(cast) - end_of_forward(plain) == pytest.approx(24 * MIB, abs=MIB)
    peak = next(p.peak_allocated for p in cast.timeline if p.phase == "forward")
    assert peak - end_of_forward(cast) == pytest.approx(8 * MIB, abs=MIB)


def test_half_precision_halves_what_is_kept() -> None:
    """Activations of products under autocast are half as large."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    inputs = torch.empty(65536, 64, device="meta")
    plain, cast = (
        estimate_memory(model, inputs, optimizer="sgd", autocast=dtype) for dtype in (None, HALF)
    )
    assert 0.4 < cast.peak_allocated / plain.peak_allocated < 0.75
