"""The results as plain values, and their JSON. Bytes and seconds, never formatted text."""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

SCHEMA = "freezekit.benchmarks.four_combos/2"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSettings:
    """What part 1 runs."""

    batch_size: int
    length: int
    attentions: tuple[str, ...] = ("eager", "sdpa")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRow:
    """Part 1: one combination with one attention."""

    attention: str
    combination: str
    marked_trainable: int
    """Elements of all parameters with ``requires_grad=True``."""
    with_gradient: int
    """Elements of all parameters that hold a gradient after backward."""
    backbone_without_gradient: int
    """Parameter tensors of the backbone that hold none."""
    backbone_saved_bytes: int
    head_saved_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Bytes saved for backward by both parts."""
        return self.backbone_saved_bytes + self.head_saved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What part 2 runs."""

    batch_size: int
    batches: int
    test_texts: int
    attention: str = "sdpa"
    warmup: int = 2
    """First steps left out of the timing."""
    learning_rate: float = 1e-3
    """Adam's default, for all parameters, as in the tutorial."""
    small_backbone_rate: float = 2e-5
    """The backbone's rate in the run that is added to the four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """The text of part 2."""

    source: str
    sha256: str
    rows: int
    dropped_neutral: int
    dropped_repeated: int
    train_texts: int
    """Texts on the training side of the split; a run draws its batches from them."""
    test_texts: int
    """Texts on the other side; a run is tested on the first of them."""
    tested_positive: int
    """Positive texts among those that a run is tested on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """Part 2: one run."""

    label: str
    combination: str
    backbone_rate: float
    step_seconds: tuple[float, ...]
    """Each step's time, warm-up steps included."""
    losses: tuple[float | None, ...]
    """Each step's training loss; null where it was not a finite number."""
    correct: int
    tested: int
    standing_bytes: int
    """Parameters, buffers, optimizer state and batch: alive before the measured step."""
    step_peak_bytes: int
    """Largest sum of bytes that the measured step held besides."""
    head_sha256: str
    """Hash of the trained head's bits."""
    backbone_tensors: int
    backbone_tensors_changed: int
    """Parameter tensors of the backbone with any bit changed by training."""

    @property
    def peak_bytes(self) -> int:
        """The peak of live tensor bytes during a step."""
        return self.standing_bytes + self.step_peak_bytes

    @property
    def accuracy(self) -> float:
        """The share of tested texts that came out right."""
        return self.correct / self.tested


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSettings:
    """What part 3 runs, where there is a CUDA device."""

    caps: tuple[int, ...]
    """Limits of the process's device memory, in bytes."""
    batch_size: int = 128
    length: int = 512
    steps: int = 2
    attentions: tuple[str, ...] = ("eager", "sdpa")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaRow:
    """Part 3: one combination with one attention under one cap."""

    cap_bytes: int
    attention: str
    combination: str
    outcome: str
    """``"ran"``, ``"out of memory"`` or ``"cap above device"``."""
    peak_allocated_bytes: int | None
    """``torch.cuda.max_memory_allocated``; null unless it ran."""
    peak_reserved_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaPart:
    """Part 3 on one device."""

    device: str
    total_bytes: int
    rows: tuple[CudaRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSettings:
    """What part 4 estimates, on any machine."""

    batch_size: int = 128
    length: int = 512
    budget_bytes: int = 11 * 2**30
    """The card's memory, the CUDA context included."""
    attentions: tuple[str, ...] = ("eager", "sdpa")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRow:
    """Part 4: one combination with one attention."""

    attention: str
    combination: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    safe_bytes: int
    """What to plan with: reserved, and what is not known."""
    fits: bool
    largest_batch: int
    """Of the same length, on the same card; 0 if not even one text fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it ran. Nothing that tells whose machine it is."""

    cpu: str
    cores: int
    threads: int
    system: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that one run of the benchmark found."""

    quick: bool
    seed: int
    machine: Machine
    versions: dict[str, str]
    seconds: float
    """The whole run's time, imports included."""
    saved_settings: SavedSettings
    saved: tuple[SavedRow, ...]
    data: DataFacts
    train_settings: TrainSettings
    train: tuple[TrainRow, ...]
    cuda_settings: CudaSettings
    cuda: CudaPart | None
    """Null where there is no CUDA device: not measured."""
    predicted_settings: PredictedSettings
    predicted: tuple[PredictedRow, ...]


def to_json(results: Results) -> str:
    """Serialise, with the schema's name and version first."""
    content = {"schema": SCHEMA, **dataclasses.asdict(results)}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> Results:
    """Read what :func:`to_json` wrote.

    Raises:
        ValueError: another schema, or a field that is missing, unknown or of another type.
    """
    content = json.loads(text)
    schema = content.pop("schema", None) if isinstance(content, dict) else None
    if schema != SCHEMA:
        message = f"expected the schema {SCHEMA!r}, found {schema!r}"
        raise ValueError(message)
    return decode(Results, content, "results")


def write(results: Results, path: Path) -> None:
    """Write beside ``path`` first and move into place, so that no reader sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(to_json(results), encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def decode(kind: type[T], value: Any, where: str) -> T:
    """Turn parsed JSON into ``kind``: a dataclass, a tuple, a dict, an optional or a plain type."""
    result: Any
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        result = _decode_dataclass(kind, value, where)
    elif origin is types.UnionType:
        inner = next(each for each in arguments if each is not type(None))
        result = None if value is None else decode(inner, value, where)
    elif origin is tuple:
        items = _expect(list, value, where)
        result = tuple(decode(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(items))
    elif origin is dict:
        pairs = _expect(dict, value, where).items()
        result = {k: decode(arguments[1], v, f"{where}[{k!r}]") for k, v in pairs}
    elif kind is float and type(value) is int:
        result = float(value)
    else:
        result = _expect(kind, value, where)
    return typing.cast("T", result)


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    found = _expect(dict, value, where)
    hints = typing.get_type_hints(kind)
    if found.keys() != hints.keys():
        odd = ", ".join(sorted(found.keys() ^ hints.keys()))
        message = f"{where}: missing or unknown: {odd}"
        raise ValueError(message)
    return kind(**{k: decode(hints[k], v, f"{where}.{k}") for k, v in found.items()})


def _expect(kind: type[T], value: Any, where: str) -> T:
    # type() and not isinstance(): True is no integer here.
    if type(value) is not kind:
        message = f"{where}: expected {kind.__name__}, found {type(value).__name__}"
        raise ValueError(message)
    return value
