"""Tiny models, real training steps and comparisons to the bit, for the tests of wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

# The names of Net's backbone, which most tests freeze.
BACKBONE = (
    "backbone.linear.weight",
    "backbone.linear.bias",
    "backbone.norm.weight",
    "backbone.norm.bias",
    "backbone.blocks.0.weight",
    "backbone.blocks.0.bias",
)

Bits = dict[str, torch.Tensor]


class Backbone(nn.Module):
    """Linear layers with statistics of both kinds: with and without parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.blocks(self.norm(self.linear(x)))
        return result


class Net(nn.Module):
    """A backbone to freeze, and a head whose parameters and statistics go on learning."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.backbone(x))
        return result


def make_net() -> Net:
    """A Net whose statistics are no longer those of a fresh BatchNorm."""
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        net(torch.randn(32, 4) * 3 + 1)
    return net


def inputs(like: torch.Tensor | None = None) -> torch.Tensor:
    """A batch that lies far from what the statistics say."""
    batch = torch.randn(8, 4) * 5 - 2
    return batch if like is None else batch.to(like.dtype)


def bits(module: nn.Module) -> Bits:
    """A copy of every parameter and every buffer, also of those that are not saved."""
    tensors: Bits = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    return {name: whole(tensor).clone() for name, tensor in tensors.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values; those of a sharded one from all of its shards."""
    gather: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach()


def moved(before: Bits, module: nn.Module) -> set[str]:
    """Names of the tensors of which a bit differs from ``before``."""
    after = bits(module)
    assert after.keys() == before.keys(), "names are not to change either"
    return {name for name in before if not torch.equal(before[name], after[name])}


def below(names: Iterable[str], *prefixes: str) -> set[str]:
    """Those of the names that lie below one of the prefixes."""
    return {name for name in names if name.startswith(tuple(f"{p}." for p in prefixes))}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """One that moves whatever has a gradient, and whatever it still has a state for."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def train(
    model: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    like: torch.Tensor | None = None,
) -> None:
    """Real training steps, as a training loop makes them: ``train()`` first."""
    if isinstance(model, nn.Module):
        model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model(inputs(like)))
        optimizer.step()


def backward(output: torch.Tensor) -> None:
    """The backward pass of a loss that reaches every output, each with another gradient."""
    torch.autograd.backward(output.pow(2).mean())


def flags(model: nn.Module) -> dict[str, bool]:
    """``requires_grad`` by name, as the model itself has it."""
    return {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}


def without_wrappers(name: str, *parts: str) -> str:
    """The name without a wrapper's components."""
    return ".".join(part for part in name.split(".") if part not in parts)


def numbers(values: Iterable[Any]) -> list[int]:
    """The identities of objects, in order."""
    return [id(value) for value in values]
