"""The four combinations of the question, and how each is put on a model."""

from __future__ import annotations

from dataclasses import dataclass

import freezekit
from _four_combos.model import BERTGRUSentiment


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One way to stop, or not to stop, a backbone from learning."""

    key: str
    no_grad: bool
    """Whether the backbone's forward pass runs under ``torch.no_grad()``."""
    requires_grad: bool
    """Whether the backbone's parameters keep ``requires_grad=True``."""

    @property
    def learns(self) -> bool:
        """Whether the backbone receives gradients: only where nothing stops them."""
        return self.requires_grad and not self.no_grad


COMBINATIONS = (
    Combination(key="a", no_grad=True, requires_grad=False),
    Combination(key="b", no_grad=True, requires_grad=True),
    Combination(key="c", no_grad=False, requires_grad=False),
    Combination(key="d", no_grad=False, requires_grad=True),
)


def apply(combination: Combination, model: BERTGRUSentiment) -> None:
    """Put ``combination`` on ``model``, in place, whatever combination it had before."""
    model.zero_grad(set_to_none=True)
    model.requires_grad_(requires_grad=True)
    if not combination.requires_grad:
        freezekit.freeze(model, "bert")
    model.backbone_no_grad = combination.no_grad
    model.train()
