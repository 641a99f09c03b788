"""Folding numbered names into slices."""

from __future__ import annotations

import pytest

from freezekit._fold import fold_names, slice_text, split_runs


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ()),
        (["weight"], ("weight",)),
        (["layer.0.w", "layer.1.w", "head.w"], ("layer[0:2].w", "head.w")),
        (["layer.0", "layer.1", "layer.2"], ("layer[0:3]",)),
        (["layer.4", "layer.5"], ("layer[4:6]",)),
        (["layer.7"], ("layer.7",)),
        (["layer.0", "layer.2", "layer.4"], ("layer[0:5:2]",)),
        (["layer.0", "layer.2"], ("layer.0", "layer.2")),
        (["layer.0", "layer.1", "layer.3"], ("layer[0:2]", "layer.3")),
        (["layer.2", "layer.0", "layer.1"], ("layer[0:3]",)),
        (["0", "1", "2"], ("[0:3]",)),
        (["0.weight", "1.weight"], ("[0:2].weight",)),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], ("a[0:2].b[0:2]",)),
        (["a.0.0", "a.0.1", "a.1.0", "a.1.1"], ("a[0:2][0:2]",)),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], ("a.0.b[0:2]", "a.1.b.0")),
        (["a.0.x", "a.0.y", "a.1.x", "a.1.y"], ("a[0:2].x", "a[0:2].y")),
        (["a.0", "a.0", "a.1"], ("a[0:2]",)),
        (["z", "a.1", "b", "a.0"], ("z", "a[0:2]", "b")),
        (["layer1.0", "layer2.0"], ("layer1.0", "layer2.0")),
    ],
)
def test_numbered_names_are_folded(names: list[str], folded: tuple[str, ...]) -> None:
    """Alike names in a row become one slice, in the order in which the first one came."""
    assert fold_names(names) == folded


def test_twelve_layers_are_one_line() -> None:
    """What is alike in every layer is told once."""
    names = [f"encoder.layer.{i}.{part}" for i in range(12) for part in ("q.w", "q.b", "k.w")]
    assert fold_names(names) == (
        "encoder.layer[0:12].q.w",
        "encoder.layer[0:12].q.b",
        "encoder.layer[0:12].k.w",
    )


@pytest.mark.parametrize(
    "names",
    [["d.01.w"], ["d.01.w", "d.02.w"], ["d.007"], ["d.1", "d.01"]],
    ids=",".join,
)
def test_a_number_with_leading_zeros_is_a_name(names: list[str]) -> None:
    """``01`` is a key, not the number 1: what is told must name what is there."""
    assert fold_names(names) == tuple(names)


def test_names_may_come_from_any_iterable() -> None:
    """A generator of names is folded as well."""
    assert fold_names(f"a.{i}" for i in range(3)) == ("a[0:3]",)


@pytest.mark.parametrize(
    ("numbers", "runs"),
    [
        ([], []),
        ([3], [[3]]),
        ([0, 1, 2, 7], [[0, 1, 2], [7]]),
        ([7, 0, 2, 1], [[0, 1, 2], [7]]),
        ([0, 2, 4], [[0, 2, 4]]),
        ([0, 2], [[0], [2]]),
        ([0, 1, 3, 4], [[0, 1], [3, 4]]),
        ([1, 4, 7, 10], [[1, 4, 7, 10]]),
    ],
)
def test_numbers_are_split_into_runs(numbers: list[int], runs: list[list[int]]) -> None:
    """Runs are consecutive, or all of one stride."""
    assert split_runs(numbers) == runs


@pytest.mark.parametrize(
    ("run", "text"),
    [([4, 5, 6], "[4:7]"), ([0, 2, 4], "[0:5:2]"), ([3], "[3:4]"), ([1, 4], "[1:5:3]")],
)
def test_a_run_reads_as_a_slice(run: list[int], text: str) -> None:
    """The slice takes the run, as Python reads it."""
    assert slice_text(run) == text
    start, stop, *step = (int(part) for part in text.strip("[]").split(":"))
    assert list(range(start, stop, *step)) == run
