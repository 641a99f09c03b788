"""Code that asks for data: a trace goes on, and says what it assumed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import library as operators
from torch import nn

from freezekit import estimate_memory
from freezekit._memory.shadow import Shadow
from freezekit._memory.stand_ins import batch_norm, batch_norm_backward, grouped_product, place
from freezekit.errors import TraceError


class Asking(nn.Module):
    """A layer, and something that depends on data."""

    def __init__(self, ask: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.ask(self.linear(x))
        return result


SIZED = {
    "nonzero": lambda x: x[x.sum(-1).nonzero().squeeze(-1)],
    "mask": lambda x: x[x > 0],
    "mask of rows": lambda x: x[x[:, 0] > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x * x.round().unique().numel(),
    "unique with inverse": lambda x: x * x.round().unique(return_inverse=True)[1],
    "unique rows": lambda x: x + x.detach().round().unique(dim=0),
    "unique_consecutive": lambda x: x * x.unique_consecutive().numel(),
    "repeat_interleave": lambda x: x.repeat_interleave(x[:, 0].long(), 0),
    "bincount": lambda x: x * torch.bincount(x.argmax(-1)).sum(),
    "bincount of weights": lambda x: x * torch.bincount(x.argmax(-1), x.detach().sum(-1)).sum(),
    "where": lambda x: x[torch.where(x[:, 0] > 0)[0]],
}


@pytest.mark.parametrize("name", SIZED)
def test_sizes_are_as_large_as_can_be(name: str) -> None:
    """No such operator ends a trace, and the report says how many there were."""
    estimate = estimate_memory(Asking(SIZED[name]), torch.zeros(6, 4), steps=2)
    assert any("size depends on data" in text for text in estimate.assumptions)
    assert estimate.mode == "train"


def test_a_mask_selects_everything() -> None:
    """Planning is for the largest result."""
    masked = estimate_memory(
        Asking(lambda x: x[x[:, 0] > 0] * 2), torch.zeros(4096, 4), optimizer=None, steps=1
    )
    selected = [f.nbytes for f in masked.stream.allocations if f.operation == "aten.index"]
    assert selected == [4096 * 4 * 4]


def _refuse(why: str) -> torch.Tensor:
    raise ValueError(why)


VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "item": lambda x: x * x.max().item(),
    "if": lambda x: x if not (x > 0).all() else x.new_empty(()).expand(0),
    "int": lambda x: x[: 5 + int(x.detach().flatten().argmax())],
    "equal": lambda x: x if not torch.equal(x, x.flip(0)) else x.new_empty(()).expand(0),
    "all": lambda x: x if (x < 9).all() else _refuse("no!"),
    "numpy": lambda x: x * float(x.detach().numpy().sum()),
    "asarray": lambda x: x * np.asarray(x.detach()).shape[0],
    "tensor": lambda x: x * torch.tensor([x.detach().sum(), 2.0]).sum(),
    "as_tensor": lambda x: x * torch.as_tensor([[x.detach().max()], [x.detach().min()]]).sum(),
    "text": lambda x: x * len(f"{x.detach().sum():.2f}"),
    "tolist": lambda x: x * x.flatten()[:1].tolist()[0],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_have_stand_ins(name: str) -> None:
    """``.item()``, ``if tensor``, ``tolist`` and NumPy go on, without a real run."""
    estimate = estimate_memory(Asking(VALUES[name]), torch.empty(6, 4, device="meta"))
    assert estimate.peak_allocated > 0
    assert any("reads from tensors" in text for text in estimate.assumptions)


def test_parts_whose_sizes_are_data_are_even() -> None:
    """Tokens go to experts as a router says; as many to each is the stand-in, and none is lost."""

    def route(x: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(x.argmax(-1), minlength=4).tolist()  # (as many bins as asked for)
        return torch.cat([part * 2 for part in x.split(counts)])  # type: ignore[no-untyped-call]

    estimate = estimate_memory(Asking(route), torch.empty(4098, 4, device="meta"))
    made = [f.nbytes for f in estimate.stream.allocations if f.operation == "aten.mul"]
    assert made[:4] == [rows * 4 * 4 for rows in (1025, 1025, 1024, 1024)]
    assert any("4 value(s) that the code reads" in text for text in estimate.assumptions)
    # A mistake of the code stays one.
    wrong = Asking(lambda x: torch.cat(torch.split(x, [1, 2])))
    with pytest.raises(TraceError, match="split_with_sizes expects split_sizes to sum exactly"):
        estimate_memory(wrong, torch.empty(4098, 4, device="meta"))


class Experts(nn.Module):
    """Each is called by its number, for the tokens that it has."""

    def __init__(self, mask: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.bool) -> None:
        super().__init__()
        self.mask = mask
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleDict({f"expert_{number}": nn.Linear(4, 4) for number in range(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.mask(nn.functional.one_hot(self.router(x).argmax(-1), num_classes=3).T)
        out = torch.zeros_like(x)
        for number in (mask.sum(-1) > 0).nonzero():
            (rows,) = torch.where(mask[int(number)])
            out = out.index_add(0, rows, self.experts[f"expert_{number[0]}"](x[rows]))
        return out


def test_a_loop_over_what_is_not_zero_meets_everything() -> None:
    """Every expert runs and gets a gradient, called by its number or its number's text."""
    estimate = estimate_memory(Experts(), torch.zeros(6, 4), steps=2)
    sizes = [
        (found.module, found.nbytes)
        for found in estimate.stream.allocations
        if found.category == "gradients" and found.step == 0
    ]
    assert {module for module, _ in sizes} == {f"experts.expert_{number}" for number in range(3)}


@pytest.mark.parametrize(
    "mask", [lambda m: m, torch.Tensor.bool, lambda m: m > 0, lambda m: m.contiguous() == 1]
)
def test_tokens_are_shared_evenly_by_experts(
    mask: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Of a one-hot mask an expert's part selects its share, not every token."""
    estimate = estimate_memory(Experts(mask), torch.empty(3000, 4, device="meta"), steps=2)
    taken = [
        found.nbytes
        for found in estimate.stream.allocations
        if found.operation == "aten.nonzero" and found.step == 0
    ]
    assert taken == [3 * 8, *[1000 * 8] * 3]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_places_are_those_of_ones(shape: list[int]) -> None:
    """What stands in for nonzero's entries is what it gives where nothing is zero."""
    places = torch.ones(shape).nonzero()
    found = [place(shape, offset) for offset in range(places.numel())]
    assert found == places.flatten().tolist()


def test_a_constant_keeps_its_value() -> None:
    """What the code made of plain numbers is no guess."""
    estimate = estimate_memory(
        Asking(lambda x: x * torch.tensor(3.0).item()), torch.ones(6, 4), optimizer="sgd"
    )
    assert not any("reads from tensors" in text for text in estimate.assumptions)


def test_what_cannot_be_traced_runs_for_real() -> None:
    """An operator without a fake twin: the model runs on the CPU, and the report says so."""
    with operators._scoped_library("freezekit_test", "FRAGMENT") as ours:
        ours.define("mystery(Tensor x) -> Tensor")
        ours.impl("mystery", lambda x: x * 2, "CPU")

        def mystery(x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.ops.freezekit_test.mystery(x.detach())
            return x + found

        model = Asking(mystery)
        weight = model.linear.weight.clone()
        inputs = torch.ones(6, 4)
        estimate = estimate_memory(model, inputs)
        assert any("run for real on the CPU" in text for text in estimate.assumptions)
        assert dict(estimate.breakdown)["optimizer_state"] > 0
        assert torch.equal(model.linear.weight, weight)
        assert model.linear.weight.grad is None
        # Without data there is nothing to run.
        with pytest.raises(TraceError, match="the step failed in the model"):
            estimate_memory(model.to("meta"), inputs.to("meta"))


def test_what_a_stand_in_breaks_runs_for_real() -> None:
    """A value that stands in may be one that the code refuses."""

    def choosy(x: torch.Tensor) -> torch.Tensor:
        if int(x.detach().isfinite().sum()) != 24:
            raise AssertionError("six rows of four, please")
        return x

    model, inputs = Asking(choosy), torch.ones(6, 4)
    found = estimate_memory(model, inputs)
    assert "run for real on the CPU: a trace without data fails (six rows of four, please)" in (
        found.assumptions
    )
    with pytest.raises(TraceError, match="AssertionError: six rows of four, please") as caught:
        estimate_memory(model, inputs.to("meta"))
    assert caught.value.assumed
    # What fails with data, too, is told as it fails then.
    with pytest.raises(TraceError, match="AssertionError: six rows of four, please") as caught:
        estimate_memory(model, torch.ones(5, 4))
    assert not caught.value.assumed


@pytest.mark.parametrize(
    ("a", "b", "grouped"),
    [
        ((12, 8), (3, 8, 16), True),
        ((12, 8), (8, 24), True),
        ((3, 4, 8), (3, 8, 16), False),
        ((3, 4, 8), (8, 12), True),
    ],
    ids=str,
)
def test_grouped_products_have_the_shape_of_real_ones(
    a: tuple[int, ...], b: tuple[int, ...], grouped: bool
) -> None:
    """Also in fp32, which the fake kernel refuses."""
    offsets = torch.tensor([4, 8, 12 if a != (12, 8) or b != (8, 24) else 8], dtype=torch.int32)
    left, right = torch.zeros(a), torch.zeros(b)
    real = torch._grouped_mm(left, right, offs=offsets if grouped else None)
    product = grouped_product((left, right, offsets if grouped else None))
    assert product is not None
    assert product.shape == real.shape


def test_experts_in_fp32_are_estimated() -> None:
    """Their products are grouped; forward and backward."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        vocab_size=64,
    )
    ids = torch.zeros(2, 8, dtype=torch.long)
    estimate = estimate_memory(MixtralForCausalLM(config), {"input_ids": ids, "labels": ids})
    assert dict(estimate.breakdown)["optimizer_state"] > 0


def test_distributions_are_not_asked_about_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """They check their arguments, for which a trace has no values; afterwards they do again."""

    def sample(x: torch.Tensor) -> torch.Tensor:
        return x + torch.distributions.Normal(x, x.exp()).rsample()

    # (Some libraries turn the checks off for good when they are imported.)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    assert estimate_memory(Asking(sample), torch.ones(6, 4)).peak_allocated > 0
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


def test_sparse_gradients_are_their_indices_and_values() -> None:
    """A sparse embedding's gradient is as large as what was looked up."""
    model = nn.Embedding(10_000, 64, sparse=True)
    estimate = estimate_memory(model, torch.zeros(8, 4, dtype=torch.long), optimizer="sgd", steps=1)
    backward = [f.nbytes for f in estimate.stream.allocations if f.phase == "backward"]
    assert max(backward) < 10_000 * 64 * 4


def test_values_are_put_at_a_mask() -> None:
    """Writing through a mask needs no size."""

    def put(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[x[:, 0] > 0] = 1.0
        return y

    assert estimate_memory(Asking(put), torch.ones(6, 4)).peak_allocated > 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 5)])
def test_a_known_batch_norm_is_what_its_decomposition_gives(
    shape: tuple[int, ...], *, training: bool
) -> None:
    """Sizes, strides and dtypes; what is not the plain case is left to the decomposition."""

    def layout(results: tuple[torch.Tensor, ...] | None) -> list[tuple[object, ...]]:
        assert results is not None
        return [(tuple(t.shape), t.stride(), t.dtype) for t in results]

    aten = torch.ops.aten
    shadow = Shadow()
    with shadow.mode:
        x, weight = torch.empty(shape), torch.empty(3)
        args = (x, weight, weight, weight, weight, training, 0.1, 1e-5)
        assert layout(batch_norm(args)) == layout(aten.native_batch_norm(*args))
        _, mean, deviation = aten.native_batch_norm(*args)
        back = (x, x, weight, weight, weight, mean, deviation, training, 1e-5, [True] * 3)
        known = layout(batch_norm_backward(back))
        assert known == layout(aten.native_batch_norm_backward(*back))
        assert batch_norm((x.half(), *args[1:])) is None
        assert batch_norm_backward((*back[:-1], [True, False, False])) is None
