"""Bytes, counts, shapes and dtypes as short text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch

__all__ = [
    "format_bytes",
    "format_count",
    "format_dtype",
    "format_percent",
    "format_tensor",
    "plural",
    "shorten",
]

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_UNITS = ("", "K", "M", "B", "T")

# Short dtype names as in array libraries' own notation: f32[2,3], i64[5].
_DTYPE_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def format_bytes(nbytes: int) -> str:
    """``format_bytes(1536)`` is ``"1.5 KiB"``; units are powers of 1024, one decimal.

    Args:
        nbytes: a number of bytes, zero or more.
    """
    value = float(nbytes)
    for unit in _BYTE_UNITS:
        # 1023.95 would print as "1024.0": the next unit reads better.
        if value < 1023.95 or unit == _BYTE_UNITS[-1]:
            break
        value /= 1024
    return f"{int(value)} B" if unit == "B" else f"{value:,.1f} {unit}"


def format_count(count: int) -> str:
    """``format_count(109_482_240)`` is ``"109.48M"``; exact below 10,000."""
    if count < 10_000:
        return f"{count:,}"
    value = float(count)
    for unit in _COUNT_UNITS:
        if value < 999.995 or unit == _COUNT_UNITS[-1]:
            break
        value /= 1000
    return f"{value:,.2f}{unit}"


def format_percent(part: int, whole: int) -> str:
    """``format_percent(1, 3)`` is ``"33.3%"``; a part that is not nothing never reads 0.0%."""
    if whole == 0 or part == 0:
        return "0%"
    if part == whole:
        return "100%"
    percent = 100 * part / whole
    if percent < 0.05:
        return "<0.1%"
    return f"{min(percent, 99.9):.1f}%"


@cache
def format_dtype(dtype: torch.dtype) -> str:
    """``format_dtype(torch.float32)`` is ``"f32"``; rarer dtypes keep torch's name."""
    return _DTYPE_SHORT.get(dtype, str(dtype).removeprefix("torch."))


def format_tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """``format_tensor(torch.float32, (2, 3))`` is ``"f32[2,3]"``."""
    return f"{format_dtype(dtype)}[{','.join(map(str, shape))}]"


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """``plural(2, "alias", "aliases")`` is ``"2 aliases"``."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def shorten(names: Iterable[str], most: int = 3) -> str:
    """``shorten(["a", "b", "c", "d"])`` is ``"a, b, c and 1 more"``."""
    listed = list(names)
    more = len(listed) - most
    shown = ", ".join(listed[:most])
    return f"{shown} and {more:,} more" if more > 0 else shown
