"""Bytes, counts, shapes and dtypes as short text."""

from __future__ import annotations

import pytest
import torch

from freezekit._format import (
    format_bytes,
    format_count,
    format_dtype,
    format_percent,
    format_tensor,
    plural,
    shorten,
)

KIB, MIB, GIB = 1024, 1024**2, 1024**3


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1023 * KIB, "1,023.0 KiB"),
        (MIB - 1, "1.0 MiB"),
        (MIB, "1.0 MiB"),
        (GIB - 1, "1.0 GiB"),
        (140 * GIB, "140.0 GiB"),
        (1024**4, "1.0 TiB"),
        (1024**5, "1.0 PiB"),
        (3000 * 1024**5, "3,000.0 PiB"),
    ],
)
def test_bytes_are_told_in_powers_of_1024(nbytes: int, text: str) -> None:
    """Units are KiB, MiB and so on, with one decimal; bytes have none."""
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (768, "768"),
        (9_999, "9,999"),
        (10_000, "10.00K"),
        (999_994, "999.99K"),
        (999_995, "1.00M"),
        (109_482_240, "109.48M"),
        (70_553_706_496, "70.55B"),
        (10**12, "1.00T"),
        (10**16, "10,000.00T"),
    ],
)
def test_counts_are_exact_until_they_are_long(count: int, text: str) -> None:
    """Counts below 10,000 are exact; beyond, three or more digits and a unit."""
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "0%"),
        (0, 5, "0%"),
        (5, 5, "100%"),
        (1, 3, "33.3%"),
        (1, 2, "50.0%"),
        (1, 10**9, "<0.1%"),
        (5, 10_000, "0.1%"),
        (4, 10_000, "<0.1%"),
        (10**9 - 1, 10**9, "99.9%"),
    ],
)
def test_shares_never_read_as_nothing_or_all(part: int, whole: int, text: str) -> None:
    """Only nothing reads 0%, and only everything reads 100%."""
    assert format_percent(part, whole) == text


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.float32, "f32"),
        (torch.bfloat16, "bf16"),
        (torch.uint8, "u8"),
        (torch.bool, "bool"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
    ],
    ids=str,
)
def test_dtypes_are_short(dtype: torch.dtype, text: str) -> None:
    """Common dtypes have array libraries' short names, rare ones torch's."""
    assert format_dtype(dtype) == text


@pytest.mark.parametrize(
    ("shape", "text"), [((2, 3), "f32[2,3]"), ((), "f32[]"), ((5,), "f32[5]")], ids=str
)
def test_tensors_are_a_dtype_and_a_shape(shape: tuple[int, ...], text: str) -> None:
    """A tensor reads like ``f32[2,3]``."""
    assert format_tensor(torch.float32, shape) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 tensors"), (1, "1 tensor"), (2, "2 tensors"), (12_345, "12,345 tensors")],
)
def test_nouns_agree_with_their_number(count: int, text: str) -> None:
    """One is singular, all else is plural."""
    assert plural(count, "tensor") == text


def test_irregular_plurals_are_given() -> None:
    """A plural that is not an s is passed in."""
    assert plural(2, "alias", "aliases") == "2 aliases"
    assert plural(1, "alias", "aliases") == "1 alias"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b", "c"], "a, b, c"),
        (["a", "b", "c", "d"], "a, b, c and 1 more"),
        ([str(i) for i in range(2000)], "0, 1, 2 and 1,997 more"),
    ],
    ids=["none", "one", "three", "four", "many"],
)
def test_long_lists_are_shortened(names: list[str], text: str) -> None:
    """Three are named, the others counted."""
    assert shorten(names) == text


def test_how_many_are_named_can_be_said() -> None:
    """The number of names is the caller's to choose."""
    assert shorten(["a", "b", "c"], most=1) == "a and 2 more"
