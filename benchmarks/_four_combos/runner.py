"""One whole run: settings, the parts in order, and their results together."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from _four_combos import cuda, data, machine, predicted, saved, train
from _four_combos.model import BERTGRUSentiment, pretrained
from _four_combos.progress import open_progress
from _four_combos.results import (
    CudaSettings,
    DataFacts,
    PredictedSettings,
    Results,
    SavedSettings,
    TrainSettings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The sizes of all parts."""

    quick: bool
    saved: SavedSettings
    train: TrainSettings
    cuda: CudaSettings
    predicted: PredictedSettings


def full_settings(caps: tuple[int, ...]) -> Settings:
    """Return the sizes of a full run: under ten minutes on two cores."""
    return Settings(
        quick=False,
        saved=SavedSettings(batch_size=2, length=512),
        train=TrainSettings(batch_size=16, batches=70, test_texts=1000),
        cuda=CudaSettings(caps=caps),
        predicted=PredictedSettings(),
    )


def quick_settings(caps: tuple[int, ...]) -> Settings:
    """Return the sizes of a quick run: under two minutes on two cores."""
    return Settings(
        quick=True,
        saved=SavedSettings(batch_size=1, length=128),
        train=TrainSettings(batch_size=8, batches=12, test_texts=100),
        cuda=CudaSettings(caps=caps),
        predicted=PredictedSettings(attentions=("sdpa",)),
    )


def run(
    settings: Settings, data_dir: Path, *, seed: int, console: Console, begun: float
) -> Results:
    """Run all parts.

    Args:
        settings: the sizes.
        data_dir: where the archive with the text lies.
        seed: fixes weights, batches and dropout.
        console: where progress is shown.
        begun: ``time.monotonic()`` when the process began, seconds.

    Raises:
        InputError: the text or the weights are missing or other ones; nothing has run then.
    """
    corpus = data.load(data_dir)
    bert, tokenizer = pretrained(settings.train.attention)
    torch.manual_seed(seed)
    base = BERTGRUSentiment(bert)
    device = cuda.CudaDevice() if torch.cuda.is_available() else None
    total = saved.total_work(settings.saved) + train.total_work(settings.train)
    total += predicted.total_work(settings.predicted)
    if device is not None:
        total += cuda.total_work(settings.cuda)
    with open_progress(console, total) as progress:
        progress.start("1 the tutorial's model")
        saved_rows = saved.run(settings.saved, seed, progress)
        progress.start("2 training on real text")
        train_rows = train.run(base, tokenizer, corpus, settings.train, seed, progress)
        cuda_part = None
        if device is not None:
            progress.start("3 CUDA")
            cuda_part = cuda.measure(device, settings.cuda, progress, cuda.tutorial_step)
        progress.start("4 predicted")
        predicted_rows = predicted.run(settings.predicted, progress)
    return Results(
        quick=settings.quick,
        seed=seed,
        machine=machine.describe(),
        versions=machine.versions(),
        seconds=time.monotonic() - begun,
        saved_settings=settings.saved,
        saved=saved_rows,
        data=_data_facts(corpus, settings.train),
        train_settings=settings.train,
        train=train_rows,
        cuda_settings=settings.cuda,
        cuda=cuda_part,
        predicted_settings=settings.predicted,
        predicted=predicted_rows,
    )


def _data_facts(corpus: data.Corpus, settings: TrainSettings) -> DataFacts:
    tested = corpus.test[: settings.test_texts]
    return DataFacts(
        source=f"{data.SDIST}: {data.INNER}: {data.MEMBER}",
        sha256=data.SDIST_SHA256,
        rows=corpus.rows,
        dropped_neutral=corpus.dropped_neutral,
        dropped_repeated=corpus.dropped_repeated,
        train_texts=len(corpus.train),
        test_texts=len(corpus.test),
        tested_positive=sum(example.positive for example in tested),
    )
