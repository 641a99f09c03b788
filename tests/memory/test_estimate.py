"""estimate_memory: exact values, laws, bad input; and nothing of the user's changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import freezekit
from freezekit import estimate_memory
from freezekit._memory.sizes import parse_size
from freezekit.errors import TraceError, UnsupportedModelError

MIB = 1 << 20
WORKSPACE = 8_519_680


def blocks(count: int = 3, width: int = 1024) -> nn.Sequential:
    """Alike blocks on the meta device."""
    with torch.device("meta"):
        made = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]
        return nn.Sequential(*made)


def images(batch: int = 256, width: int = 1024) -> torch.Tensor:
    """A batch without data."""
    return torch.empty(batch, width, device="meta")


def test_a_linear_layer_applied_a_hundred_times() -> None:
    """4044.00390625 MiB, as CUDA was measured to take, and one workspace since torch 2.0."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1024, 1024, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(100):
                x = self.linear(x)
            return x

    inputs = torch.empty(10240, 1024, device="meta")
    # The inputs' 40 MiB, 100 outputs of 40 MiB, weight and bias.
    expected = 101 * 40 * MIB + 4 * MIB + 4096
    assert expected == 4044.00390625 * MIB

    def first(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.detach()[0, 0]  # forward alone, with everything kept

    estimate = estimate_memory(Repeated(), inputs, loss=first, optimizer=None, steps=1)
    assert estimate.peak_allocated == expected + WORKSPACE


def test_no_grad_around_a_frozen_backbone_changes_nothing() -> None:
    """Of the four combinations a, b and c have the same peak, and d has another."""

    class Model(nn.Module):
        def __init__(self, *, no_grad: bool, frozen: bool) -> None:
            super().__init__()
            self.backbone = blocks()
            self.head = nn.Linear(1024, 2, device="meta")
            self.no_grad = no_grad
            if frozen:
                freezekit.freeze(self, "backbone")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.no_grad):
                features = self.backbone(x)
            result: torch.Tensor = self.head(features)
            return result

    peaks = {
        (no_grad, frozen): estimate_memory(
            Model(no_grad=no_grad, frozen=frozen), images(4096), optimizer="sgd"
        ).peak_allocated
        for no_grad in (True, False)
        for frozen in (True, False)
    }
    assert peaks[True, True] == peaks[True, False] == peaks[False, True] < peaks[False, False]


def test_optimizers_have_their_state() -> None:
    """Adam keeps two tensors of the size of the weights, SGD none."""
    model = blocks(1)
    weights = sum(p.nbytes for p in model.parameters())
    state = {
        name: dict(estimate_memory(model, images(), optimizer=name).breakdown)["optimizer_state"]
        for name in ("adamw", "sgd", "sgd_momentum")
    }
    assert state["sgd"] == 0
    assert state["sgd_momentum"] == weights
    assert 2 * weights <= state["adamw"] <= 2 * weights + 2048


def test_workspaces_are_those_of_the_gpu() -> None:
    """Forward and backward have a cuBLAS workspace each; Hopper's are of 32 MiB."""
    for capability, size in (((8, 6), WORKSPACE), ((9, 0), 32 * MIB)):
        estimate = estimate_memory(blocks(), images(), capability=capability)
        workspaces = dict(estimate.breakdown)["workspaces"]
        assert 2 * size <= workspaces < 2 * size + 2 * MIB


def test_dropout_keeps_a_byte_an_element() -> None:
    """CUDA's mask is boolean, the CPU's a float."""
    plain = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Dropout(0.0))
    dropping = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Dropout(0.5))
    kept = [
        dict(estimate_memory(model, torch.empty(4096, 1024), optimizer=None).breakdown)
        for model in (plain, dropping)
    ]
    more = kept[1]["activations"] - kept[0]["activations"]
    assert 4 * MIB <= more < 5 * MIB + 4096 * 1024 * 4


def test_fused_attention_keeps_no_matrix() -> None:
    """With sdpa the weights of length x length are not kept; with eager they are."""
    from transformers import BertConfig, BertModel

    kept = {}
    for attention in ("eager", "sdpa"):
        config = BertConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            attn_implementation=attention,
        )
        ids = torch.zeros(4, 256, dtype=torch.long)
        kept[attention] = estimate_memory(BertModel(config), ids, optimizer=None).peak_allocated
    matrices = 2 * 4 * 4 * 256 * 256 * 4
    assert kept["eager"] - kept["sdpa"] > matrices


# -- laws --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10)
@given(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)))
def test_freezing_more_never_takes_more(some: set[int], others: set[int]) -> None:
    """Modes fixed, a larger frozen set has no larger estimate."""
    peaks = []
    for frozen in (some, some | others):
        model = blocks(4, width=64)
        for index in frozen:
            model[index].requires_grad_(requires_grad=False)
        peaks.append(estimate_memory(model, images(64, 64)).peak_allocated)
    assert peaks[1] <= peaks[0]


def test_a_larger_batch_takes_more_and_inference_less() -> None:
    """The peak grows with the batch, and without backward pass it is lower."""
    model = blocks()
    peaks = [estimate_memory(model, images(batch)).peak_reserved for batch in (256, 1024, 4096)]
    assert peaks == sorted(set(peaks))
    assert estimate_memory(model, images(4096), train=False).peak_reserved < peaks[-1]


# -- the report --------------------------------------------------------------------------------


def test_the_parts_add_up() -> None:
    """The breakdown's sum is the peak, and the report is a value that survives JSON."""
    estimate = estimate_memory(blocks(), images())
    assert sum(size for _, size in estimate.breakdown) == estimate.peak_allocated
    assert estimate.peak_allocated <= estimate.peak_reserved
    assert json.loads(json.dumps(estimate.to_dict()))["schema"] == "freezekit.MemoryEstimate/1"
    assert max(len(line) for line in str(estimate).splitlines()) <= 100
    assert len(repr(estimate)) < 500


def test_nothing_trainable_is_an_inference_estimate() -> None:
    """With everything frozen there is no backward pass, and the report says so."""
    model = blocks()
    freezekit.freeze(model)
    estimate = estimate_memory(model, images())
    assert (estimate.mode, estimate.optimizer) == ("inference", "")
    assert "nothing is trainable: this is an inference estimate" in estimate.assumptions


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("11GiB", 11 << 30), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9), ("512B", 512), (7, 7)],
)
def test_sizes(size: str | int, nbytes: int) -> None:
    """GiB are powers of 1024, GB of 1000."""
    assert parse_size(size) == nbytes


def test_fits() -> None:
    """A budget is a size."""
    estimate = estimate_memory(blocks(), images())
    assert estimate.fits("1GiB")
    assert not estimate.fits("1MiB")
    # The context is in the budget too.
    assert not estimate.fits(estimate.peak_reserved)


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["11 apples", "GiB", -1, 1.5, True, None], ids=str)
def test_what_is_no_size(size: Any) -> None:
    """A budget that is no size is an error with the value."""
    with pytest.raises(ValueError, match="expected a size such as '11GiB' or a number of bytes"):
        parse_size(size)


def test_a_number_without_a_unit() -> None:
    """It is not taken for bytes: who writes "24" means a card of 24 GiB."""
    with pytest.raises(ValueError, match="'24' says no unit: expected a size such as '24GiB'"):
        parse_size("24")


def test_inputs_that_do_not_fit() -> None:
    """A forward that fails is told with its module, and the cause is chained."""
    with pytest.raises(TraceError, match=r"the step failed in 0\.0 \(forward\): ") as caught:
        estimate_memory(blocks(), torch.empty(4, 5))
    assert caught.value.fqn == "0.0"
    assert caught.value.__cause__ is not None


def test_an_unknown_optimizer() -> None:
    """An optimizer that is not known is an error with the nearest name."""
    with pytest.raises(ValueError, match="unknown optimizer 'adamv'; did you mean 'adam"):
        estimate_memory(blocks(), images(), optimizer="adamv")


def test_a_bad_allocator_setting() -> None:
    """Allocator settings are checked as PyTorch's are."""
    with pytest.raises(ValueError, match="unknown allocator setting 'expandable'"):
        estimate_memory(blocks(), images(), allocator="expandable:True")


def test_no_model() -> None:
    """What is no module is refused as everywhere."""
    with pytest.raises(UnsupportedModelError, match=r"expected a torch\.nn\.Module, got dict"):
        estimate_memory({}, images())  # type: ignore[arg-type]
