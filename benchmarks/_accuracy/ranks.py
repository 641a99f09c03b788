"""Rank correlation, which tells whether estimates have the order of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import correlation

__all__ = ["spearman"]


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's coefficient of pairs: 1.0 when both have the same order.

    >>> spearman([(1, 10), (2, 20), (3, 15)])
    0.5
    """
    first, second = (ranks([pair[i] for pair in pairs]) for i in (0, 1))
    return correlation(first, second)


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each value in order; equal values share the mean of their places."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [sum(places[value]) / len(places[value]) for value in values]
