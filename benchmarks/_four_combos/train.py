"""Part 2: the four combinations trained on real text, from real pretrained weights."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from _four_combos.combos import COMBINATIONS, Combination, apply
from _four_combos.data import Batch, Corpus, held_out_batches, training_batches
from _four_combos.live import optimizer_tensors, peak_during, storage_bytes
from _four_combos.model import BERTGRUSentiment
from _four_combos.progress import Progress
from _four_combos.results import TrainRow, TrainSettings
from _four_combos.saved import own_tensors


@dataclass(slots=True)
class Run:
    """One model in training, with what has been noted so far."""

    label: str
    combination: Combination
    model: BERTGRUSentiment
    backbone_rate: float
    optimizer: torch.optim.Optimizer
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def make_run(
    base: BERTGRUSentiment, combination: Combination, *, head_rate: float, backbone_rate: float
) -> Run:
    """Copy ``base`` and put ``combination`` on it, with Adam over all parameters.

    Frozen parameters are handed to Adam too, as the tutorial does: they have no gradient, and
    Adam passes over them.
    """
    model = copy.deepcopy(base)
    apply(combination, model)
    optimizer = torch.optim.Adam(
        [
            {"params": list(model.bert.parameters()), "lr": backbone_rate},
            {"params": list(model.head_parameters()), "lr": head_rate},
        ]
    )
    same = head_rate == backbone_rate
    label = combination.key if same else f"{combination.key}, BERT {backbone_rate:g}"
    return Run(label, combination, model, backbone_rate, optimizer)


def make_runs(base: BERTGRUSentiment, settings: TrainSettings) -> list[Run]:
    """Make the four runs of the question, and d once more with a small rate for the backbone."""
    rate = settings.learning_rate
    runs = [make_run(base, c, head_rate=rate, backbone_rate=rate) for c in COMBINATIONS]
    small = settings.small_backbone_rate
    return [*runs, make_run(base, COMBINATIONS[-1], head_rate=rate, backbone_rate=small)]


def step(run: Run, batch: Batch) -> Tensor:
    """Do one training step and return the loss, detached."""
    logits = run.model(batch.input_ids, batch.attention_mask)
    loss = binary_cross_entropy_with_logits(logits, batch.labels)
    torch.autograd.backward(loss)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(runs: Sequence[Run], batches: Sequence[Batch], seed: int, progress: Progress) -> None:
    """Train all runs on the same batches, in turns.

    The runs take turns batch by batch, each time with another one first, so that a slow minute of
    the machine hits all alike. Each draws the same dropout: the seed is set before every step.
    """
    for number, batch in enumerate(batches):
        first = number % len(runs)
        for run in (*runs[first:], *runs[:first]):
            torch.manual_seed(seed + number)
            begun = time.perf_counter()
            loss = step(run, batch)
            run.step_seconds.append(time.perf_counter() - begun)
            run.losses.append(loss.item())
            progress.advance(_step_work(run.combination), f"batch {number + 1} of {len(batches)}")


def count_correct(model: BERTGRUSentiment, batches: Iterable[Batch]) -> int:
    """Count the texts that come out right, with dropout off."""
    model.eval()
    correct = 0
    with torch.no_grad():
        for batch in batches:
            positive = model(batch.input_ids, batch.attention_mask) > 0
            correct += int((positive == batch.labels.bool()).sum())
    model.train()
    return correct


def measure_peak(run: Run, batch: Batch) -> tuple[int, int]:
    """Run one more step, instrumented and untimed, and count bytes.

    Returns:
        The bytes alive before the step, and the peak of those that the step held besides.
    """
    standing = [*own_tensors(run.model), *optimizer_tensors(run.optimizer), *batch.tensors()]
    before = storage_bytes(standing)
    return before, peak_during(lambda: step(run, batch))


def bits(tensor: Tensor) -> bytes:
    """Return the tensor's bits, so that NaN equals itself and 0.0 differs from -0.0."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


def head_hash(model: BERTGRUSentiment) -> str:
    """Return the SHA-256 of the head's bits."""
    total = hashlib.sha256()
    for parameter in model.head_parameters():
        total.update(bits(parameter))
    return total.hexdigest()


def count_changed(module: nn.Module, original: nn.Module) -> int:
    """Count the parameter tensors in which any bit differs from ``original``'s."""
    pairs = zip(module.parameters(), original.parameters(), strict=True)
    return sum(bits(now) != bits(then) for now, then in pairs)


def finish(run: Run, base: BERTGRUSentiment, held_out: Sequence[Batch], widest: Batch) -> TrainRow:
    """Test a trained run and turn it into its result. The peak comes last: it trains a step."""
    tested = sum(len(batch.labels) for batch in held_out)
    correct = count_correct(run.model, held_out)
    changed = count_changed(run.model.bert, base.bert)
    hashed = head_hash(run.model)
    standing, peak = measure_peak(run, widest)
    return TrainRow(
        label=run.label,
        combination=run.combination.key,
        backbone_rate=run.backbone_rate,
        step_seconds=tuple(round(seconds, 6) for seconds in run.step_seconds),
        losses=tuple(loss if math.isfinite(loss) else None for loss in run.losses),
        correct=correct,
        tested=tested,
        standing_bytes=standing,
        step_peak_bytes=peak,
        head_sha256=hashed,
        backbone_tensors=sum(1 for _ in run.model.bert.parameters()),
        backbone_tensors_changed=changed,
    )


def run(
    base: BERTGRUSentiment,
    tokenizer: Any,
    corpus: Corpus,
    settings: TrainSettings,
    seed: int,
    progress: Progress,
) -> tuple[TrainRow, ...]:
    """Train, test and measure the four combinations, and d with a small backbone rate.

    ``base`` is what each of them begins with; it stays as it is.
    """
    runs = make_runs(base, settings)
    batches = training_batches(
        corpus.train,
        tokenizer,
        batch_size=settings.batch_size,
        batches=settings.batches,
        seed=seed,
    )
    train(runs, batches, seed, progress)
    progress.start("2 testing and measuring memory")
    held_out = held_out_batches(corpus.test[: settings.test_texts], tokenizer, batch_size=50)
    widest = max(batches, key=lambda batch: batch.input_ids.shape[1])
    rows = []
    for each in runs:
        rows.append(finish(each, base, held_out, widest))
        progress.advance(_finish_work(settings), f"testing {each.label}")
    return tuple(rows)


# For the progress bar: about the seconds that two cores take, as in part 1.


def _step_work(combination: Combination) -> float:
    return 0.7 if combination.learns else 0.3


def _finish_work(settings: TrainSettings) -> float:
    return 2.0 + 0.006 * settings.test_texts


def total_work(settings: TrainSettings) -> float:
    """Estimate the whole part's work."""
    steps = sum(_step_work(c) for c in (*COMBINATIONS, COMBINATIONS[-1]))
    return settings.batches * steps + (len(COMBINATIONS) + 1) * _finish_work(settings)
