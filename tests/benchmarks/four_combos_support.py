"""Small stand-ins and made-up results for the tests of the benchmark."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from _four_combos.combos import COMBINATIONS
from _four_combos.model import BERTGRUSentiment
from _four_combos.results import (
    CudaRow,
    CudaSettings,
    DataFacts,
    Machine,
    PredictedRow,
    PredictedSettings,
    Results,
    SavedRow,
    SavedSettings,
    TrainRow,
    TrainSettings,
)

MakeTiny = Callable[..., BERTGRUSentiment]
GIB = 2**30


def saved_row(attention: str, key: str) -> SavedRow:
    return SavedRow(
        attention=attention,
        combination=key,
        marked_trainable=112_241_409,
        with_gradient=111_650_817,
        backbone_without_gradient=199,
        backbone_saved_bytes=1_595_107_328,
        head_saved_bytes=39_854_080,
    )


def train_row(label: str, factor: float, head: str = "same") -> TrainRow:
    return TrainRow(
        label=label,
        combination=label[0],
        backbone_rate=2e-5 if "," in label else 1e-3,
        step_seconds=tuple(factor * seconds for seconds in (9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0)),
        losses=(0.7, 0.6, 0.5, 0.4, 0.3, 0.2, None if label == "d" else 0.1),
        correct=150,
        tested=200,
        standing_bytes=2**20,
        step_peak_bytes=2**20,
        head_sha256=head,
        backbone_tensors=103,
        backbone_tensors_changed=0,
    )


def cuda_row(outcome: str, *peaks: int) -> CudaRow:
    allocated, reserved = peaks or (None, None)
    return CudaRow(
        cap_bytes=11 * GIB,
        attention="eager",
        combination="d" if outcome == "out of memory" else "a",
        outcome=outcome,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
    )


def predicted_row(attention: str, key: str) -> PredictedRow:
    size = GIB * (40 if key == "d" else 4)
    return PredictedRow(
        attention=attention,
        combination=key,
        peak_allocated_bytes=size - GIB,
        peak_reserved_bytes=size,
        safe_bytes=size + GIB // 2,
        fits=key != "d",
        largest_batch=1234 if key != "d" else 31,
    )


def some_results(**changes: object) -> Results:
    made = Results(
        quick=False,
        seed=0,
        machine=Machine(cpu="Some CPU", cores=2, threads=2, system="Linux, x86_64"),
        versions={"python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0"},
        seconds=12.5,
        saved_settings=SavedSettings(batch_size=2, length=512),
        saved=tuple(
            saved_row(attention, c.key) for attention in ("eager", "sdpa") for c in COMBINATIONS
        ),
        data=DataFacts(
            source="somewhere",
            sha256="00",
            rows=10_605,
            dropped_neutral=37,
            dropped_repeated=2,
            train_texts=8_413,
            test_texts=2_153,
            tested_positive=90,
        ),
        train_settings=TrainSettings(batch_size=16, batches=7, test_texts=200),
        train=(
            *(train_row(key, 1.0) for key in "abc"),
            train_row("d", 3.0, "other"),
            train_row("d, BERT 2e-05", 3.0, "third"),
        ),
        cuda_settings=CudaSettings(caps=(11 * GIB, 24 * GIB)),
        cuda=None,
        predicted_settings=PredictedSettings(),
        predicted=tuple(
            predicted_row(attention, c.key) for attention in ("eager", "sdpa") for c in COMBINATIONS
        ),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type] # named by the tests


class WordTokenizer:
    """One token a word, padded to the longest text."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, torch.Tensor]:
        ids = [[1 + sum(map(ord, word)) % 49 for word in text.split()] for text in texts]
        width = max(map(len, ids))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        return {"input_ids": padded, "attention_mask": (padded > 0).long()}


class SilentProgress:
    """Takes note of what it is told."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.notes: list[str] = []
        self.work = 0.0

    def start(self, part: str) -> None:
        self.parts.append(part)

    def advance(self, work: float, note: str) -> None:
        self.work += work
        self.notes.append(note)
