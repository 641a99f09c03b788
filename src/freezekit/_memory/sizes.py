"""Sizes as people write them."""

from __future__ import annotations

import re

__all__ = ["parse_size"]

_UNITS = {
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_size(size: str | int) -> int:
    """``parse_size("11GiB")`` is ``11811160064``; GiB are powers of 1024, GB of 1000.

    Args:
        size: bytes, or text with a unit.

    Raises:
        ValueError: not a size; or text that says no unit.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if isinstance(size, str)
        else None
    )
    if match is not None and not match[2]:
        raise ValueError(
            f"{size!r} says no unit: expected a size such as '{match[1]}GiB', or bytes as an int"
        )
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"expected a size such as '11GiB' or a number of bytes, got {size!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])
