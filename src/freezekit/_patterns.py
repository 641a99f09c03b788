"""The pattern grammar: what a user writes, parsed without looking at a model.

A pattern is one of::

    "encoder.layer.1"              a module's whole subtree, or one parameter
    "encoder.layer[:8].attention"  Python indexing over a container's numbered children
    "encoder.*", "*.bias"          glob: * and ? cross dots
    "re:..." or re.compile(...)    regular expression, full match on a parameter's FQN
    "type:BatchNorm2d" or a class  modules of that class or a subclass, whole subtrees
    callable(fqn, parameter)       whatever it says
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from freezekit.errors import PatternError

__all__ = [
    "ClassPattern",
    "NamePattern",
    "ParsedPattern",
    "Pattern",
    "Patterns",
    "PredicatePattern",
    "RegexPattern",
    "Segment",
    "TypeNamePattern",
    "glob_to_regex",
    "parse_patterns",
]

Predicate: TypeAlias = Callable[[str, nn.Parameter], bool]
Pattern: TypeAlias = str | re.Pattern[str] | type[nn.Module] | Predicate
Patterns: TypeAlias = Pattern | Collection[Pattern]


class Segment(NamedTuple):
    """A dotted name or glob, and the index or slice of its numbered children, if any."""

    name: str
    at: int | slice | None = None

    @property
    def is_glob(self) -> bool:
        """Whether the name is to be matched, not looked up."""
        return "*" in self.name or "?" in self.name


class NamePattern(NamedTuple):
    """A name, a glob, or either with indices: segments that go ever deeper."""

    text: str
    segments: tuple[Segment, ...]


class RegexPattern(NamedTuple):
    """A regular expression over parameter FQNs."""

    text: str
    regex: re.Pattern[str]


class TypeNamePattern(NamedTuple):
    """A class by its name (or a glob of it)."""

    text: str
    name: str


class ClassPattern(NamedTuple):
    """A class of modules."""

    text: str
    cls: type[nn.Module]


class PredicatePattern(NamedTuple):
    """A callable of the user's."""

    text: str
    predicate: Predicate


ParsedPattern: TypeAlias = (
    NamePattern | RegexPattern | TypeNamePattern | ClassPattern | PredicatePattern
)


def parse_patterns(patterns: Patterns, *, allow_empty: bool = False) -> tuple[ParsedPattern, ...]:
    """Parse one pattern or a collection of them; equal ones are kept once.

    Raises:
        PatternError: one of them is malformed or of a wrong type, or there are none.
    """
    if isinstance(patterns, str | re.Pattern | type | nn.Module) or callable(patterns):
        return (_parse(patterns),)
    if isinstance(patterns, dict | bytes | torch.Tensor) or not isinstance(patterns, Collection):
        raise _wrong_type(patterns)
    if not patterns and not allow_empty:
        raise PatternError(patterns, "no pattern at all; '*' stands for everything")
    unique = {p if isinstance(p, str) else id(p): p for p in patterns}
    return tuple(_parse(pattern) for pattern in unique.values())


def glob_to_regex(glob: str) -> str:
    """``*`` and ``?`` match any characters, dots too; everything else is literal."""
    return re.sub(r"\\([*?])", lambda m: ".*" if m[1] == "*" else ".", re.escape(glob))


# -- parsing one -------------------------------------------------------------------------------


def _parse(pattern: object) -> ParsedPattern:
    if isinstance(pattern, str):
        return _parse_text(pattern)
    if isinstance(pattern, re.Pattern):
        if isinstance(pattern.pattern, bytes):
            raise PatternError(pattern, "a regular expression over str is needed, not bytes")
        return RegexPattern(f"re:{pattern.pattern}", pattern)
    if isinstance(pattern, type):
        if issubclass(pattern, nn.Module):
            return ClassPattern(f"type:{pattern.__name__}", pattern)
        reason = f"the class {pattern.__name__} is not an nn.Module"
        raise PatternError(pattern, reason)
    if callable(pattern) and not isinstance(pattern, nn.Module | nn.Parameter):
        name = getattr(pattern, "__qualname__", type(pattern).__qualname__)
        return PredicatePattern(f"{name}(fqn, parameter)", pattern)
    raise _wrong_type(pattern)


def _wrong_type(pattern: object) -> PatternError:
    kind = type(pattern).__name__
    if isinstance(pattern, nn.Module):
        reason = f"got a {kind} module; give its name, or call this on the module itself"
        return PatternError(kind, reason)
    if isinstance(pattern, nn.Parameter):
        return PatternError(kind, "got a parameter; give its name as in model.named_parameters()")
    return PatternError(
        pattern,
        f"got {kind}, expected a str, a compiled regular expression, an nn.Module class, "
        "a callable(fqn, parameter), or a list of these",
    )


def _parse_text(text: str) -> ParsedPattern:
    if text.startswith("re:"):
        try:
            return RegexPattern(text, re.compile(text[3:]))
        except re.error as error:
            raise PatternError(text, f"not a regular expression: {error}") from error
    if text.startswith("type:"):
        name = text[5:].strip()
        if not name:
            raise PatternError(text, "no class name after 'type:'")
        return TypeNamePattern(text, name)
    if not text:
        raise PatternError(text, "it is empty; '*' stands for everything")
    return NamePattern(text, _parse_segments(text))


# One segment: a dotted name (maybe empty: the root), then at most one pair of brackets.
_SEGMENT = re.compile(r"([^\[\]]*)(?:\[([^\[\]]*)\])?")


def _parse_segments(text: str) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    position = 0
    while position < len(text):
        match = _SEGMENT.match(text, position)
        if match is None or match.end() == position:
            raise PatternError(text, "its brackets do not pair up")
        name, index = match[1], match[2]
        if segments:  # after brackets: more brackets, or a dot and more names
            if name and not name.startswith("."):
                raise PatternError(text, f"a dot is missing before {name!r}")
            name = name.removeprefix(".")
            if not name and (index is None or match[1]):
                raise PatternError(text, "an empty name between or after dots")
        if name.endswith(".") and index is not None:
            # As fnmatch has it, layer.[0-3]: the dot goes, then the bracket is looked at.
            start, stop = match.span(2)
            plain = text[: start - 2] + text[start - 1 :]
            _parse_index(plain, index, start - 1, stop - 1)
            raise PatternError(text, f"no dot before brackets; did you mean {plain!r}?")
        if name and "" in name.split("."):
            raise PatternError(text, "an empty name between or around dots")
        at = None if index is None else _parse_index(text, index, *match.span(2))
        segments.append(Segment(name, at))
        position = match.end()
    return tuple(segments)


_INTEGER = re.compile(r"-?(?:0|[1-9]\d*)")
_SLICE = re.compile(r"(-?\d+)?\s*:\s*(-?\d+)?\s*(?::\s*(-?\d+)?)?")
_RANGE = re.compile(r"(\d+)\s*(?:-|\.\.|to)\s*(\d+)")


def _parse_index(text: str, index: str, start: int, stop: int) -> int | slice:
    """What is in brackets, at ``text[start:stop]``."""

    def meant(other: str) -> str:
        return f"{text[:start]}{other}{text[stop:]}"

    index = index.strip()
    if _INTEGER.fullmatch(index):
        return int(index)
    if found := _SLICE.fullmatch(index):
        low, high, step = (None if part is None else int(part) for part in found.groups())
        if step == 0:
            raise PatternError(text, "a slice's step cannot be 0")
        return slice(low, high, step)
    if found := _RANGE.fullmatch(index):
        raise PatternError(
            text,
            f"brackets are Python indexing, not a character class or a range: "
            f"{found[1]} up to and including {found[2]} is "
            f"{meant(f'{found[1]}:{int(found[2]) + 1}')!r}",
        )
    numbers = [part.strip() for part in index.split(",")]
    if len(numbers) > 1 and all(_INTEGER.fullmatch(part) for part in numbers):
        listed = ", ".join(repr(meant(part)) for part in numbers)
        raise PatternError(text, f"one index or slice in a bracket; write the list [{listed}]")
    raise PatternError(
        text,
        f"[{index}] is not an index or a slice: brackets are Python indexing, "
        "never a character class; use 're:...' for those",
    )
