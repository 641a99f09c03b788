"""Records of a session: one JSON object a line, appended after every configuration."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from _gpu_session.configs import Config

__all__ = ["SCHEMA", "append", "keys_done", "new_record", "read"]

SCHEMA = "freezekit.benchmarks.gpu_session/1"


def new_record(config: Config, *, dry_run: bool, device: str) -> dict[str, Any]:
    """What every record begins with: settings and versions."""
    import transformers

    return {
        "schema": SCHEMA,
        "key": config.key,
        "dry_run": dry_run,
        "device": device,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": torch.version.cuda,
            "cudnn": _cudnn_version(),
        },
        "config": dataclasses.asdict(config),
    }


def _cudnn_version() -> int | None:
    if not torch.cuda.is_available():
        return None
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version


def append(path: Path, record: dict[str, Any]) -> None:
    """Write one line and make sure that it is on the disk: an early end loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; a last line that was cut off is left out.

    Raises:
        ValueError: a line that is no record.
    """
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                return
            raise ValueError(f"{path}, line {number}: no JSON") from None
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            raise ValueError(f"{path}, line {number}: expected the schema {SCHEMA!r}")
        yield record


def keys_done(path: Path) -> set[str]:
    """Configurations that need not be run again: they ran, or ran out of memory."""
    return {record["key"] for record in read(path) if record["outcome"] in ("ran", "out of memory")}
