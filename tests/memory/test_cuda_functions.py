"""Functions that CUDA computes by other operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from freezekit import estimate_memory
from freezekit._memory.cuda_functions import CudaFunctions, attention_backend

HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "mask", "capability", "head", "backend"),
    [
        (torch.float32, False, (8, 0), 64, "efficient"),
        (HALF, False, (8, 0), 64, "flash"),
        (HALF, False, (8, 0), 512, "efficient"),
        (torch.float16, False, (7, 5), 64, "efficient"),
        (HALF, True, (8, 0), 64, "efficient"),
        (HALF, True, (9, 0), 64, "cudnn"),
        (HALF, False, (9, 0), 256, "flash"),
        (HALF, False, (12, 0), 64, "flash"),
        (torch.float64, False, (8, 0), 64, "math"),
    ],
)
def test_which_attention_is_taken(
    dtype: torch.dtype, mask: bool, capability: tuple[int, int], head: int, backend: str
) -> None:
    """By precision, mask, size of the heads and GPU."""
    query = torch.empty(1, 2, 8, head, dtype=dtype)
    assert attention_backend(query, torch.ones(1) if mask else None, capability) == backend


def test_what_a_python_function_calls_is_replaced_too() -> None:
    """MultiheadAttention calls dropout and attention from inside a function of torch's own."""
    attention = nn.MultiheadAttention(64, 4, dropout=0.5, batch_first=True, device="meta")

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
            return out

    estimate = estimate_memory(Block(), torch.empty(2, 16, 64, device="meta"), optimizer=None)
    seen = {found.operation for found in estimate.stream.allocations}
    assert "aten._scaled_dot_product_efficient_attention" in seen
    assert not {operation for operation in seen if "for_cpu" in operation}


def test_dropout_of_attention_weights_keeps_a_byte_an_element() -> None:
    """With weights asked for, dropout goes over a matrix: its mask is one of bytes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, dropout=0.5, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.attention(x, x, x)[0]
            return out

    estimate = estimate_memory(Block(), torch.empty(2, 16, 64), optimizer=None, steps=1)
    dropped = [f for f in estimate.stream.allocations if f.operation == "aten.native_dropout"]
    matrix = 2 * 4 * 16 * 16
    assert sorted(found.nbytes for found in dropped) == [matrix, 4 * matrix]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_have_the_shapes_of_real_ones(
    kind: Any, bidirectional: bool, packed: bool
) -> None:
    """Outputs, final states and gradients are like a real run's, in shape and number."""
    layer = kind(4, 6, num_layers=2, batch_first=True, bidirectional=bidirectional)

    def run() -> list[Any]:
        x = torch.randn(3, 5, 4, requires_grad=True)
        inputs = (
            nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
            if packed
            else x
        )
        output, final = layer(inputs)
        values = output.data if packed else output
        finals = final if isinstance(final, tuple) else (final,)
        grads = torch.autograd.grad(values.sum(), [x, *layer.parameters()])
        return [tuple(t.shape) for t in (values, *finals, *grads)]

    real = run()
    with CudaFunctions():
        assert run() == real


def test_a_frozen_recurrent_layer_has_no_weight_gradients() -> None:
    """Gradients still flow through it to what is below."""
    layer = nn.GRU(4, 6)
    layer.requires_grad_(False)
    x = torch.randn(5, 3, 4, requires_grad=True)
    with CudaFunctions():
        layer(x)[0].sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in layer.parameters())


def test_recurrent_layers_keep_a_reserve() -> None:
    """What cuDNN keeps for the backward pass is one block of bytes, and named as assumed."""
    with torch.device("meta"):
        layer = nn.LSTM(8, 16, batch_first=True)
        inputs = torch.empty(4, 10, 8)
    estimate = estimate_memory(layer, inputs, optimizer=None, steps=1)
    reserve = 4 * 10 * 16 * (4 + 1) * 4
    assert reserve in {found.nbytes for found in estimate.stream.allocations}
    assert any("cuDNN's reserve" in text for text in estimate.assumptions)


def test_cells_are_left_alone() -> None:
    """A single cell is a function of its own."""
    cell = nn.LSTMCell(4, 6)
    with CudaFunctions():
        hidden, _ = cell(torch.zeros(2, 4))
    assert hidden.shape == (2, 6)


def test_dropout_outside_training_is_nothing() -> None:
    """No mask in eval, and none for a probability of zero."""
    x = torch.ones(8)
    with CudaFunctions():
        assert functional.dropout(x, 0.5, training=False) is x
        assert torch.equal(functional.dropout(x, 0.0), x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_is_the_same_the_second_time(reentrant: bool) -> None:
    """What is recomputed in the backward pass calls what CUDA calls, as the forward pass did."""
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def inner(x: torch.Tensor) -> torch.Tensor:
                return functional.dropout(self.linear(x).relu(), 0.5)

            out: Any = checkpoint(inner, self.linear(x), use_reentrant=reentrant)
            return out  # type: ignore[no-any-return]

    estimate = estimate_memory(Block(), torch.zeros(32, 64), optimizer=None, steps=1)
    dropped = [f.phase for f in estimate.stream.allocations if f.operation == "aten.native_dropout"]
    assert set(dropped) == {"forward", "backward"}
