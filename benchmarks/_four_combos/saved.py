"""Part 1: what autograd saves for backward, and who receives a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from _four_combos.combos import COMBINATIONS, Combination, apply
from _four_combos.model import (
    BERTGRUSentiment,
    check_tutorial_counts,
    count_trainable,
    count_with_gradient,
    tutorial_model,
)
from _four_combos.progress import Progress
from _four_combos.results import SavedRow, SavedSettings


class SavedStorages:
    """Context manager that notes each storage that autograd saves inside it.

    Storages of ``model``'s parameters and buffers are left out: they are there anyway. A storage
    is identified by its address, which is unique while the graph that saved it is alive; read
    ``bytes_by_address`` before running backward.

    Known limit: what a custom ``autograd.Function`` keeps as a plain attribute of its context is
    not seen. Neither part of the model has one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.bytes_by_address: dict[int, int] = {}
        self._own = {address(tensor) for tensor in own_tensors(model)}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)

    def _pack(self, tensor: Tensor) -> Tensor:
        where = address(tensor)
        if where not in self._own:
            self.bytes_by_address[where] = tensor.untyped_storage().nbytes()
        return tensor

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)


def own_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the model's parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


def address(tensor: Tensor) -> int:
    """Return the address of the tensor's storage, the same for every view of it."""
    return tensor.untyped_storage().data_ptr()


def measure(
    model: BERTGRUSentiment, combination: Combination, attention: str, input_ids: Tensor
) -> SavedRow:
    """Run one forward and one backward pass of ``combination`` and count.

    As in the tutorial, no attention mask is passed. A storage that both parts save counts as the
    head's: the head needs it in every combination.
    """
    apply(combination, model)
    marked = count_trainable(model)
    with SavedStorages(model) as by_backbone:
        features = model.features(input_ids)
    with SavedStorages(model) as by_head:
        logits = model.classify(features)
    head = by_head.bytes_by_address
    backbone = {k: v for k, v in by_backbone.bytes_by_address.items() if k not in head}
    loss = binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
    torch.autograd.backward(loss)
    row = SavedRow(
        attention=attention,
        combination=combination.key,
        marked_trainable=marked,
        with_gradient=count_with_gradient(model),
        backbone_without_gradient=sum(p.grad is None for p in model.bert.parameters()),
        backbone_saved_bytes=sum(backbone.values()),
        head_saved_bytes=sum(head.values()),
    )
    model.zero_grad(set_to_none=True)
    return row


def run(settings: SavedSettings, seed: int, progress: Progress) -> tuple[SavedRow, ...]:
    """Measure the four combinations on the tutorial's model at its true size.

    Raises:
        RuntimeError: the trainable counts are not those that the tutorial prints.
    """
    rows = []
    for attention in settings.attentions:
        torch.manual_seed(seed)
        model = tutorial_model(attention)
        shape = (settings.batch_size, settings.length)
        input_ids = torch.randint(0, model.bert.config.vocab_size, shape)
        for combination in COMBINATIONS:
            row = measure(model, combination, attention, input_ids)
            check_tutorial_counts(row.marked_trainable, requires_grad=combination.requires_grad)
            rows.append(row)
            progress.advance(work(settings, combination), f"{combination.key} with {attention}")
    return tuple(rows)


# For the progress bar: about the seconds that two cores take.


def work(settings: SavedSettings, combination: Combination) -> float:
    """Estimate one measurement's work."""
    tokens = settings.batch_size * settings.length
    return 0.5 + tokens * (0.012 if combination.learns else 0.004)


def total_work(settings: SavedSettings) -> float:
    """Estimate the whole part's work, in the unit of :func:`work`."""
    return len(settings.attentions) * sum(work(settings, each) for each in COMBINATIONS)
