"""Values that follow of data that was given are no guesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from freezekit import MemoryEstimate, estimate_memory
from freezekit.errors import TraceError

IMAGE = 7


class Reading(nn.Module):
    """Embeds ids, and notes what it reads of them."""

    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.read = read
        self.found: list[Any] = _Shared()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.found.append(self.read(ids))
        out: torch.Tensor = self.embed(ids % 16)
        return out


class _Shared(list[Any]):
    """A list that a copy of the model shares with it."""

    def __deepcopy__(self, memo: object) -> _Shared:
        return self


def assumed(estimate: MemoryEstimate) -> list[str]:
    """What had to be guessed."""
    return [text for text in estimate.assumptions if "depends on data" in text or "reads" in text]


def loops(ids: torch.Tensor) -> list[int]:
    """Shapes written entry by entry, as detection models write those of their levels."""
    shapes = torch.empty((2, 2), dtype=torch.long)
    for level, (height, width) in enumerate([(ids.shape[0], 3), (2, ids.shape[1])]):
        shapes[level, 0], shapes[level, 1] = height, width
    starts = torch.cat([shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]])
    return [int(shapes.prod(1).sum()), *starts.tolist()]


def counts(ids: torch.Tensor) -> list[int]:
    """Sizes of parts that data tells."""
    sizes = torch.bincount(ids.flatten(), minlength=10).tolist()
    return [part.shape[0] for part in torch.split(ids.flatten(), sizes)]


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda ids: int(ids.sum()),
    "how many": lambda ids: int((ids == IMAGE).sum()),
    "if": lambda ids: bool((ids == IMAGE).any()),
    "where": lambda ids: torch.where(ids == IMAGE)[1].tolist(),
    "nonzero": lambda ids: (ids == IMAGE).nonzero().shape,
    "unique": lambda ids: torch.unique(ids).tolist(),
    "counts": counts,
    "float": lambda ids: float((ids.float() / 3).mean()),
    "numpy": lambda ids: ids.numpy().tolist(),
    "text": lambda ids: f"{ids.max()} and {ids.float().mean():.3f}",
    "equal": lambda ids: torch.equal(ids, ids.flip(0)),
    "written": loops,
    "mask": lambda ids: int(torch.ones_like(ids).masked_fill_(ids == IMAGE, 0).cumsum(-1).max()),
    "repeated": lambda ids: ids[0].repeat_interleave(ids[0]).shape,
}


@pytest.mark.parametrize("name", READS)
@given(ids=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=3))
@settings(max_examples=8, deadline=None)
def test_what_follows_of_ids_is_read_as_it_is(name: str, ids: list[list[int]]) -> None:
    """The same in the trace as for real, and nothing is said to be assumed."""
    given_ids = torch.tensor(ids)
    model = Reading(READS[name])
    estimate = estimate_memory(model, given_ids, optimizer="sgd", steps=2)
    assert set(map(repr, model.found)) == {repr(READS[name](given_ids))}
    assert not assumed(estimate)


def test_a_known_mask_selects_what_it_does() -> None:
    """The places of an image's tokens are taken, and no more."""

    class Merging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)

        def forward(self, ids: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
            mask = ids == IMAGE
            embedded = self.embed(ids)
            if embedded[mask].shape[0] != image.shape[0]:
                raise ValueError("image tokens and features differ in number")
            merged: torch.Tensor = embedded.masked_scatter(mask[..., None], image)
            return merged

    ids = torch.tensor([[1, IMAGE, IMAGE, 2], [IMAGE, 3, 4, 5]])
    image = torch.empty(3, 8, device="meta")
    estimate = estimate_memory(Merging(), {"ids": ids, "image": image}, steps=2)
    taken = [f.nbytes for f in estimate.stream.allocations if f.operation == "aten.index"]
    assert set(taken) == {3 * 8 * 4}
    assert not assumed(estimate)
    # Ids without data take all.
    with pytest.raises(TraceError, match="image tokens and features differ in number") as caught:
        estimate_memory(Merging(), {"ids": ids.to("meta"), "image": image})
    assert (
        "give inputs that are whole numbers (ids, masks) with their data"
        in (caught.value.__notes__[0])
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids, x: ids.add_(x.long()),
        lambda ids, x: ids[:1].copy_(x[:1].long()),
        lambda ids, x: ids.random_(0, 9),
        lambda ids, x: torch._foreach_mul_([ids], [x.long()]),
    ],
    ids=["add_", "copy_ to a part", "random_", "foreach"],
)
def test_what_something_unknown_was_written_to_is_unknown(spoil: Callable[..., Any]) -> None:
    """Also where a part of it was written."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ids = torch.arange(6).reshape(2, 3)
            view = ids.T
            x = self.linear(x)
            assert int(view.sum()) == 15
            spoil(ids, x.detach())
            return x * int(view.sum())

    estimate = estimate_memory(Writing(), torch.ones(2, 3), optimizer="sgd", steps=2)
    assert assumed(estimate)


def test_random_numbers_are_unknown() -> None:
    """Another run would draw others."""
    model = Reading(lambda ids: int(torch.randint(0, 5, ids.shape).sum() + ids.sum()))
    assert assumed(estimate_memory(model, torch.tensor([[1, 2]]), optimizer="sgd"))


def test_long_tensors_are_not_followed() -> None:
    """What is followed costs time and memory: a million elements at most."""
    model = Reading(lambda ids: bool(ids.any()))
    ids = torch.ones(1, (1 << 20) + 1, dtype=torch.long)
    assert assumed(estimate_memory(model, ids, optimizer="sgd"))


def test_given_data_is_not_written_to() -> None:
    """A forward that changes its inputs changes a copy; buffers likewise."""

    class Counting(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 4)
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            ids.add_(int(self.seen))
            out: torch.Tensor = self.embed(ids)
            return out

    model, ids = Counting(), torch.tensor([[1, 2]])
    assert not assumed(estimate_memory(model, ids, optimizer="sgd"))
    assert ids.tolist() == [[1, 2]]
    assert int(model.seen) == 0


def test_numbers_that_a_module_keeps_beside_its_buffers_are_known() -> None:
    """A plain attribute is met by the deep copy: its values are data, and no fake tensor's."""

    class Placing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.rand(3))
            self.places = {"default": torch.tensor([[0, 1, 2], [3, 2, 1]])}
            self.found: list[Any] = _Shared()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = self.places["default"].clone()
            places[0, :] += 1
            self.found.append(places.sum().item())
            inside = (places[0] < 4) & (places[1] < 4)
            weight = torch.zeros(4, 4)
            weight[places[0][inside], places[1][inside]] = self.values[inside]
            return x @ weight

    model = Placing()
    estimate = estimate_memory(model, torch.rand(2, 4), optimizer=None, steps=1)
    assert model.found == [0 + 1 + 2 + 3 + 3 + 2 + 1]
    assert assumed(estimate) == []
    assert model.places["default"].tolist() == [[0, 1, 2], [3, 2, 1]]
