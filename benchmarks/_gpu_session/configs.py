"""What a session runs, the most valuable first. Plain values: they go into the records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

__all__ = ["CONFIGS", "Config"]

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One configuration.

    Attributes:
        part: ``"four"``: a combination of the question; ``"model"``: a training; ``"time"``: how
            long steps take.
        model: a name that ``build.MODELS`` knows; ``"tutorial"`` for the question's own.
        batch: samples.
        length: tokens of a text, or pixels of an image's side.
        combination: of the question, ``"a"`` to ``"d"``.
        frozen: ``"nothing"``, ``"front"``, ``"all but last"``, ``"all but norms"``.
        optimizer: ``"sgd"``, ``"adam"``, ``"adamw"``, ``"adamw_fused"``.
        precision: ``"fp32"``, ``"autocast"`` (bf16) or ``"bf16"`` (all of it).
        attention: ``"eager"`` or ``"sdpa"``.
        checkpointed: whether the encoder's layers are recomputed.
        cap: bytes that the process may reserve; 0 for no bound.
        snapshot: whether the allocator's events are recorded.
    """

    part: str
    model: str
    batch: int
    length: int
    combination: str = ""
    frozen: str = "nothing"
    optimizer: str = "adamw"
    precision: str = "fp32"
    attention: str = "sdpa"
    checkpointed: bool = False
    cap: int = 0
    snapshot: bool = False

    @property
    def key(self) -> str:
        """Its name: alike for alike settings."""
        words = [self.part, self.model, f"{self.batch}x{self.length}", self.combination]
        words += [self.frozen, self.optimizer, self.precision, self.attention]
        words += ["checkpointed"] * self.checkpointed
        words += [f"cap{self.cap // GIB}"] if self.cap else []
        return "/".join(word.replace(" ", "-") for word in words if word)


def _four() -> Iterator[Config]:
    """The question itself, at the tutorial's size; the cards that ran out of memory first."""
    switches = product(("fp32", "autocast"), ("sdpa", "eager"), (11 * GIB, 0, 24 * GIB), "dcba")
    for precision, attention, cap, combination in switches:
        yield Config(
            part="four",
            model="tutorial",
            batch=128,
            length=512,
            combination=combination,
            optimizer="adam",
            precision=precision,
            attention=attention,
            cap=cap,
        )


def _models() -> Iterator[Config]:
    """Some sixty trainings, spread over models, freezing, optimizers and precisions."""
    snapshots = {"bert", "gpt2", "llama", "resnet50", "convnext", "vit"}
    for model, (batch, length) in _SIZES.items():
        yield Config(
            part="model", model=model, batch=batch, length=length, snapshot=model in snapshots
        )
        yield Config(part="model", model=model, batch=max(1, batch // 8), length=length)
        for frozen in ("front", "all but last"):
            yield Config(part="model", model=model, batch=batch, length=length, frozen=frozen)
    for model in ("bert", "gpt2", "vit", "llama", "resnet50"):
        batch, length = _SIZES[model]
        same = {"part": "model", "model": model, "batch": batch, "length": length}
        yield Config(**same, frozen="all but norms")  # type: ignore[arg-type]
        yield Config(**same, precision="autocast", snapshot=model == "bert")  # type: ignore[arg-type]
        yield Config(**same, precision="bf16", snapshot=model == "llama")  # type: ignore[arg-type]
        yield Config(**same, optimizer="sgd")  # type: ignore[arg-type]
    for model in ("bert", "llama"):
        batch, length = _SIZES[model]
        same = {"part": "model", "model": model, "batch": batch, "length": length}
        yield Config(**same, optimizer="adamw_fused")  # type: ignore[arg-type]
        yield Config(**same, optimizer="adam", frozen="front", precision="autocast")  # type: ignore[arg-type]
        yield Config(**same, checkpointed=True, snapshot=model == "bert")  # type: ignore[arg-type]
        yield Config(**same, attention="eager", snapshot=model == "bert")  # type: ignore[arg-type]


# Batch and length (or image side) of each model: some ten GiB each.
_SIZES: dict[str, tuple[int, int]] = {
    "bert": (32, 256),
    "gpt2": (16, 512),
    "llama": (8, 512),
    "t5": (16, 256),
    "vit": (64, 224),
    "resnet50": (64, 224),
    "resnet101": (64, 224),
    "convnext": (64, 224),
    "mobilenet": (128, 224),
    "gru": (64, 256),
}


def _times() -> Iterator[Config]:
    for combination in "abcd":
        yield Config(
            part="time",
            model="tutorial",
            batch=32,
            length=256,
            combination=combination,
            optimizer="adam",
        )
    yield Config(part="time", model="tutorial", batch=32, length=256, combination="cached")
    yield Config(part="time", model="extractor", batch=8, length=128)


CONFIGS: tuple[Config, ...] = (*_four(), *_models(), *_times())
