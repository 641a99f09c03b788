"""Recurrent layers as cuDNN runs them: one operator, with a reserve kept for the backward pass.

On the CPU they are a loop of small operators whose results are kept; cuDNN keeps its input and
output and a *reserve* whose size only its library knows. Here it is the gates' values of every step
and layer and one more value a cell, which is what the backward pass needs. Weights are one flat
buffer, as ``flatten_parameters`` leaves them. Source: ATen/native/cudnn/RNN.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["RNN_KINDS", "cudnn_rnn"]

# Gates of a cell.
RNN_KINDS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def cudnn_rnn(kind: str, input: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:  # noqa: A002
    """Call a recurrent layer with the arguments of ``torch.lstm``, ``torch.gru``, ...

    Packed sequences give their batch sizes as the second argument.
    """
    # (hx, weights, biases, ...) or, packed, (batch_sizes, hx, weights, biases, ...).
    packed = not isinstance(args[2], bool)
    hx, weights, _, layers, _, training, bidirectional = args[1:8] if packed else args[:7]
    batch_first = not packed and bool(args[7])
    states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    directions = 2 if bidirectional else 1
    x = input.transpose(0, 1) if batch_first else input
    shape = (*x.shape[:-1], states[0].shape[-1] * directions)
    cells = x.numel() // x.shape[-1] * layers * directions * states[-1].shape[-1]
    reserve = cells * (RNN_KINDS[kind] + 1) * x.element_size() if training else 0
    results = _CudnnRnn.apply(  # type: ignore[no-untyped-call]
        shape, reserve, len(states), x, *states, *weights
    )
    output, *finals = results
    if batch_first:
        output = output.transpose(0, 1)
    return (output, *finals)


class _CudnnRnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], reserve: int, states: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        output = tensors[0].new_empty(shape)
        finals = tuple(state.new_empty(state.shape) for state in tensors[1 : 1 + states])
        kept = tensors[0].new_empty(reserve, dtype=torch.uint8)
        ctx.save_for_backward(*tensors, output, kept)
        ctx.states = states
        return (output, *finals)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors[:-2]
        first = 1 + ctx.states
        needs = ctx.needs_input_grad[3:]
        grads: list[torch.Tensor | None] = [
            t.new_empty(t.shape) if need else None
            for t, need in zip(tensors[:first], needs[:first], strict=True)
        ]
        weights = tensors[first:]
        if any(needs[first:]):
            flat = weights[0].new_empty(sum(w.numel() for w in weights))
            pieces = flat.split([w.numel() for w in weights])
            grads += [
                piece.view(w.shape) if need else None
                for piece, w, need in zip(pieces, weights, needs[first:], strict=True)
            ]
        else:
            grads += [None] * len(weights)
        return (None, None, None, *grads)
