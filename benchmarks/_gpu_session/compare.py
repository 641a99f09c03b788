"""Records of a session against what is predicted for the same configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BOUNDS", "misses"]

# How far the prediction may be from the measured, by kind of model: allocated, reserved.
BOUNDS = {"transformer": (0.01, 0.03), "cnn": (0.03, 0.06)}
_CNNS = frozenset({"resnet50", "resnet101", "convnext", "mobilenet"})


def misses(record: Mapping[str, Any], predicted: Mapping[str, Any]) -> list[str]:
    """What is further from the measured than it may be; nothing if all is near."""
    family = "cnn" if record["config"]["model"] in _CNNS else "transformer"
    found = []
    for name, bound in zip(("allocated", "reserved"), BOUNDS[family], strict=True):
        measured = record[f"max_{name}"]
        error = predicted[name] / measured - 1
        if abs(error) > bound:
            found.append(
                f"{record['key']}: {name} {predicted[name]:,} predicted, {measured:,} measured "
                f"({100 * error:+.1f} %, bound {100 * bound:.0f} %)"
            )
    return found
