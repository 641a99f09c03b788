"""Part 4: what each combination takes on a GPU, predicted without one."""

from __future__ import annotations

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import freezekit
from _four_combos.combos import COMBINATIONS, Combination, apply
from _four_combos.model import BERTGRUSentiment, tutorial_model
from _four_combos.progress import Progress
from _four_combos.results import PredictedRow, PredictedSettings

# On the scale of the other parts' work: a row takes some ten seconds.
_WORK = 2.0


def total_work(settings: PredictedSettings) -> float:
    """Return the work of this part, for the progress bar."""
    return _WORK * len(settings.attentions) * len(COMBINATIONS)


def run(settings: PredictedSettings, progress: Progress) -> tuple[PredictedRow, ...]:
    """Estimate every combination with every attention; no data is made."""
    rows = []
    for attention in settings.attentions:
        with torch.device("meta"):
            model = tutorial_model(attention)
        for combination in COMBINATIONS:
            rows.append(predict(model, combination, attention, settings))
            progress.advance(_WORK, f"{attention} {combination.key}, predicted")
    return tuple(rows)


def predict(
    model: BERTGRUSentiment, combination: Combination, attention: str, settings: PredictedSettings
) -> PredictedRow:
    """Estimate one combination: Adam, fp32, as the tutorial trains."""
    apply(combination, model)

    def tokens(batch_size: int) -> torch.Tensor:
        return torch.empty(batch_size, settings.length, dtype=torch.long, device="meta")

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))

    estimate = freezekit.estimate_memory(
        model, tokens(settings.batch_size), loss=loss, optimizer="adam"
    )
    largest = freezekit.max_batch_size(
        model, tokens, settings.budget_bytes, advise=False, loss=loss, optimizer="adam"
    )
    return PredictedRow(
        attention=attention,
        combination=combination.key,
        peak_allocated_bytes=estimate.peak_allocated,
        peak_reserved_bytes=estimate.peak_reserved,
        safe_bytes=estimate.safe,
        fits=estimate.fits(settings.budget_bytes),
        largest_batch=largest.batch_size,
    )
