"""Where and under what figures were measured, kept as JSON beside them."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import freezekit

__all__ = ["save_figures"]


def save_figures(path: Path, schema: str, **figures: Any) -> None:
    """Write figures with the versions that gave them, beside and then renamed."""
    record = {
        "schema": schema,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "freezekit": freezekit.__version__,
        "cores": os.cpu_count(),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(record, indent=2) + "\n")
    beside.replace(path)
