"""A decoder whose training step was recorded on a GPU, allocation by allocation.

The traces (format ``cuda-caching-allocator-events/1``, of a course's public solutions) are of a
plain decoder of 24 layers: RMSNorm, rotary positions, a softmax and an AdamW in single operators.
All that they show of a step is the sizes that the allocator was asked for, in order.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _traces import SUFFIX, read_trace
from freezekit import MemoryEstimate, estimate_memory

__all__ = ["WORKLOADS", "Comparison", "Workload", "compare"]

WIDTH, LAYERS, HEADS, INNER, VOCABULARY, BATCH = 1024, 24, 16, 4096, 10_000, 4
# The solutions' lock file names it.
TORCH = "2.11.0"


@dataclass(frozen=True, slots=True)
class Workload:
    """What a trace is of."""

    length: int
    autocast: torch.dtype | None
    train: bool


WORKLOADS = {
    "wed_inference_amp_s512": Workload(512, torch.bfloat16, train=False),
    "wed_inference_fp32_s128": Workload(128, None, train=False),
    "wed_train_amp_s512": Workload(512, torch.bfloat16, train=True),
    "wed_train_fp32_s128": Workload(128, None, train=True),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A recorded step beside a traced one: counts of allocations, and peaks in bytes."""

    name: str
    recorded: int
    traced: int
    same: int
    measured: int
    estimated: int

    @property
    def exact(self) -> bool:
        """Whether every allocation has the size that was recorded, in the order of the record."""
        return self.recorded == self.traced == self.same


def compare(path: Path) -> Comparison:
    """Trace what a file of ``WORKLOADS`` is of, and compare the last step with it.

    Raises:
        ValueError: not a file of that format, or of another model.
    """
    name = path.name.removesuffix(SUFFIX)
    if name not in WORKLOADS:
        raise ValueError(f"{path}: expected a trace of {', '.join(WORKLOADS)}")
    found = read_trace(path)
    recorded = [size for operation, _, size in found["events"] if operation == "a"]
    estimate = _estimate(WORKLOADS[name])
    traced = _last_step(estimate)
    matches = difflib.SequenceMatcher(None, recorded, traced, autojunk=False)
    return Comparison(
        name,
        len(recorded),
        len(traced),
        sum(block.size for block in matches.get_matching_blocks()),
        found["expected"]["peak_allocated"],
        estimate.peak_allocated,
    )


def _estimate(workload: Workload) -> MemoryEstimate:
    with torch.device("meta"):
        model: nn.Module = Decoder(workload.length)
        ids = torch.empty(BATCH, workload.length, dtype=torch.long)
    if not workload.train:
        model = Inference(model)
    return estimate_memory(
        model,
        ids,
        loss=lambda logits: cross_entropy(logits, ids),
        optimizer=PlainAdamW,
        train=workload.train,
        autocast=workload.autocast,
        steps=3,
        torch_version=TORCH,
    )


def _last_step(estimate: MemoryEstimate) -> list[int]:
    stream = estimate.stream
    last = max(event.step for event in stream.events)
    indices = [e.allocation for e in stream.events if e.is_alloc and e.step == last]
    sizes = (stream.allocations[index].nbytes for index in indices)
    # The allocator keeps no record of what is empty.
    return [size for size in sizes if size]


# -- the model, as its operators show it -----------------------------------------------------------


class Inference(nn.Module):
    """Its model without autograd's records."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> Any:
        """The logits."""
        with torch.inference_mode():
            return self.model(ids)


class Projection(nn.Module):
    """A linear layer without bias, as an einsum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., inputs)`` to ``(..., outputs)``."""
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    """RMSNorm in single operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype; computed in fp32."""
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * (wide * scale)).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions and a softmax in single operators."""

    def __init__(self, angles: nn.Module) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (Projection(WIDTH, WIDTH) for _ in range(4))
        self.angles = angles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, length, width)`` to the same."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (
            each.view(*each.shape[:2], HEADS, -1).transpose(1, 2) for each in (query, key, value)
        )
        query, key = self.angles(query), self.angles(key)
        places = torch.arange(x.shape[1], device=x.device)
        seen = places[:, None] >= places[None]
        mixed = attend(query, key, value, seen[None])
        return self.out(mixed.transpose(1, 2).flatten(2).contiguous())  # type: ignore[no-any-return]


class Angles(nn.Module):
    """Rotary positions of pairs of neighbours."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(2, length, WIDTH // HEADS // 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., length, head)`` turned; both halves of all pairs together."""
        left, right = x.view(*x.shape[:-1], -1, 2).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, : x.shape[-2]].unbind(0)  # type: ignore[index]
        turned = cos * left - sin * right
        return torch.cat((turned, sin * left + cos * right), dim=-1)


class Block(nn.Module):
    """Attention and a gated inner layer, each normed before and added."""

    def __init__(self, angles: nn.Module) -> None:
        super().__init__()
        # (In the order of the recorded one: its optimizer goes through the parameters in theirs.)
        self.attention = Attention(angles)
        self.gate, self.down = Projection(WIDTH, INNER), Projection(INNER, WIDTH)
        self.up = Projection(WIDTH, INNER)
        self.norms = nn.ModuleList([Norm(), Norm()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, length, width)`` to the same."""
        # (What a name holds is in use: the recorded one gives each result a name of its own.)
        attended: torch.Tensor = self.attention(self.norms[0](x))
        between = x + attended
        inner: torch.Tensor = self.inner(self.norms[1](between))
        return between + inner

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """The gated inner layer."""
        return self.down(silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding by indexing, blocks, a norm, a head of its own."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        angles = Angles(length)
        self.blocks = nn.ModuleList([Block(angles) for _ in range(LAYERS)])
        self.norm, self.head = Norm(), Projection(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``(batch, length)`` to logits ``(batch, length, vocabulary)``."""
        x = self.embedding[ids, :]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Attention; what is not ``seen`` has no weight."""
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(WIDTH // HEADS)
    scores = torch.where(seen, scores, -torch.inf)
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x`` by its sigmoid."""
    return x * torch.sigmoid(x)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last dimension."""
    shifted = x - x.max(dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / powers.sum(dim=-1, keepdim=True)


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The mean over all positions."""
    shifted = logits - logits.max(dim=-1, keepdim=True)[0]
    negative = -(shifted - torch.log(torch.exp(shifted).sum(dim=-1, keepdim=True)))
    return negative.gather(-1, ids[..., None]).mean()


class PlainAdamW(torch.optim.Optimizer):
    """AdamW in single operators, each with a new result."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-3, "decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update."""
        for group in self.param_groups:
            rate, (first, second) = group["lr"], group["betas"]
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad.data
                # The recorded one makes zeros for its defaults at every step.
                mean = state.get("mean", torch.zeros_like(gradient))
                square = state.get("square", torch.zeros_like(gradient))
                mean = first * mean + ((1 - first) * gradient)
                square = second * square + ((1 - second) * torch.square(gradient))
                parameter.data -= rate * mean / (torch.sqrt(square) + group["eps"])
                parameter.data -= rate * group["decay"] * parameter.data
                state["mean"], state["square"] = mean, square
