"""Memory traces that were recorded on a GPU: files of allocations, frees and segments in order."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

__all__ = ["FORMAT", "SUFFIX", "read_trace"]

FORMAT = "cuda-caching-allocator-events/1"
SUFFIX = ".json.gz"


def read_trace(path: Path) -> dict[str, Any]:
    """What a file holds.

    Raises:
        ValueError: the file is not of the format.
    """
    with gzip.open(path, "rt") as file:
        trace: dict[str, Any] = json.load(file)
    if trace.get("format") != FORMAT:
        raise ValueError(
            f"{path.name}: expected the format {FORMAT!r}, got {trace.get('format')!r}"
        )
    return trace
