"""What a backward pass computes into memory that is there: told as where nobody watches.

The truth is the profiler's record of the CPU allocator: it watches without a dispatch mode.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from _accuracy.cpu import CASES as MODELS
from freezekit._memory.events import EventStream
from freezekit._memory.recorder import Recorder

SIDE = 256
SIZE = SIDE * SIDE * 4
ROWS = torch.arange(SIDE).flip(0)

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Doubled(torch.autograd.Function):
    """Its backward is Python code, and adds."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        return gradient * 1 + gradient * 1


def in_parts(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    left, right = y.chunk(2, -1)
    return (left.exp() * left).sum() + (right.exp() * right).sum() + y.sin().sum()


def variance_and_mean(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(y, dim=1)
    return variance.exp().sum() + mean.exp().sum()


def of_python(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    doubled: torch.Tensor = Doubled.apply(y)  # type: ignore[no-untyped-call]
    return (doubled.exp() + y.sin()).sum()


def retained(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y.retain_grad()
    return y.exp().sum() + y.sin().sum()


CASES: dict[str, Loss] = {
    "two uses": lambda y, w: (y.exp() + y.sin()).sum(),
    "three uses": lambda y, w: (y.exp() + y.sin() + y.cos()).sum(),
    "squared": lambda y, w: (y * y).sum(),
    "residual": lambda y, w: ((y + (y @ w).tanh()) @ w).exp().sum(),
    "a gradient that is shared": lambda y, w: (y + y.sin()).sum(),
    "shared by three": lambda y, w: (y * 2 + y + y).sum(),
    "a transposed gradient": lambda y, w: ((y.t() @ w).exp() + y.exp()).sum(),
    "used twice with a weight": lambda y, w: ((y @ w).exp() @ w).exp().sum(),
    "parts": in_parts,
    "retained": retained,
    "gather": lambda y, w: y.gather(1, ROWS[:, None]).exp().sum(),
    "index": lambda y, w: y[ROWS].exp().sum(),
    "index select": lambda y, w: y.index_select(0, ROWS).exp().sum(),
    "masked": lambda y, w: y.masked_select(ROWS[:, None] > 3).exp().sum(),
    "maximum": lambda y, w: (y - y.max(dim=1, keepdim=True)[0]).exp().sum(),
    "scatter": lambda y, w: y.scatter(0, ROWS.repeat(SIDE, 1), w).exp().sum(),
    "logits": lambda y, w: nn.functional.binary_cross_entropy_with_logits(y, w.detach()),
    "variance and mean": variance_and_mean,
    "Python": of_python,
}


def loss_of(make: Loss) -> torch.Tensor:
    x, w = (torch.rand(SIDE, SIDE, requires_grad=True) for _ in range(2))
    return make(x * 1.5, w)


def unwatched(loss: Callable[[], torch.Tensor], least: int = SIZE // 2) -> list[int]:
    """Sizes of what a backward pass (and what makes the loss) allocates, by the profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        loss().backward()  # type: ignore[no-untyped-call]
    assert run.profiler is not None
    found = run.profiler.kineto_results.events()
    return [e.nbytes() for e in found if e.name() == "[memory]" and e.nbytes() >= least]


def watched(make: Loss, mode: AbstractContextManager[Any] | None = None) -> EventStream:
    """What the recorder tells of a forward and a backward pass."""
    recorder = Recorder()
    with mode or nullcontext(), recorder:
        with recorder.during("forward", 0):
            loss = loss_of(make)
        with recorder.during("backward", 0):
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
    return recorder.close()


def in_backward(stream: EventStream) -> list[int]:
    found = [each.nbytes for each in stream.allocations if each.phase == "backward"]
    return [size for size in found if size >= SIZE // 2]


@pytest.mark.parametrize("case", CASES)
def test_as_where_nobody_watches(case: str) -> None:
    """On real tensors the recorder tells of the allocations that the allocator makes."""
    loss = loss_of(CASES[case])
    assert in_backward(watched(CASES[case])) == unwatched(lambda: loss)


def test_a_whole_model_as_where_nobody_watches() -> None:
    """BERT forward and backward: every allocation of a KiB or more, in order."""
    torch.manual_seed(0)
    model, inputs = MODELS["BERT, eager"].make()
    model.train()

    def loss() -> torch.Tensor:
        model.zero_grad()
        found: torch.Tensor = model(**inputs).loss
        return found

    loss().backward()  # type: ignore[no-untyped-call]  # tables are made at first use
    unseen = unwatched(loss, 1024)

    recorder = Recorder()
    for tensor in (*model.parameters(), *model.buffers(), inputs["input_ids"]):
        recorder.note(tensor, "parameters")
    before = recorder.position
    with recorder:
        with recorder.during("forward", 0):
            value = loss()
        with recorder.during("backward", 0):
            value.backward()  # type: ignore[no-untyped-call]
    found = [each.nbytes for each in recorder.close().allocations[before:] if each.nbytes >= 1024]
    assert found == unseen
    assert len(found) > 100


@pytest.mark.parametrize("case", [case for case in CASES if case != "masked"])
def test_fake_tensors_as_real_ones(case: str) -> None:
    """The same of a graph of fake tensors (how many a mask selects is data)."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    assert in_backward(watched(CASES[case], fake)) == in_backward(watched(CASES[case]))


def test_what_is_added_keeps_its_place() -> None:
    """The memory that two gradients share ends once, when the last of them does."""
    stream = watched(CASES["three uses"])
    ended = [event.allocation for event in stream.events if not event.is_alloc]
    assert sorted(ended) == list(range(len(stream.allocations)))
    assert stream.live_bytes()[-1] == 0


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_the_backward_pass_adds_anew() -> None:
    """With ``create_graph`` nothing may be overwritten."""
    x = torch.rand(SIDE, SIDE, requires_grad=True)
    adds = []
    for graph in (False, True):
        y = x * 1.5
        loss = (y.exp() + y.sin()).sum()
        recorder = Recorder()
        with recorder, recorder.during("backward", 0):
            loss.backward(create_graph=graph)  # type: ignore[no-untyped-call]
        x.grad = None
        adds.append([each.operation for each in recorder.close().allocations].count("aten.add"))
    assert adds == [0, 1]
