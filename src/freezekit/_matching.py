"""Matching parsed patterns against one model's inventory.

Every pattern either covers something or says why not: with a reason (no such index, no
parameters there), or with the nearest names that exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from freezekit._fold import is_number
from freezekit._format import plural, shorten
from freezekit._inventory import Inventory
from freezekit._patterns import (
    ClassPattern,
    NamePattern,
    ParsedPattern,
    PredicatePattern,
    RegexPattern,
    Segment,
    TypeNamePattern,
    glob_to_regex,
    parse_patterns,
)
from freezekit._suggestions import suggest_class_names, suggest_names
from freezekit.errors import PatternError, UnmatchedPatternError

__all__ = ["Match", "Matcher"]

# In a glob's regular expression: a digit right before a star.
_NUMBER_STAR = re.compile(r"(\d)\.\*")


class Match:
    """What one pattern covers.

    Attributes:
        entries: indices of named entries.
        modules: indices of modules, their subtrees included.
        reason: why there is nothing, where that is known.
        number_prefix: what a glob took beyond a number that it begins with; ``""`` if nothing.
    """

    __slots__ = ("entries", "modules", "number_prefix", "reason")

    def __init__(self, entries: set[int], modules: set[int], reason: str = "") -> None:
        self.entries = entries
        self.modules = modules
        self.reason = reason
        self.number_prefix = ""


class Matcher:
    """Matches parsed patterns against one inventory."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self._raw_names: tuple[dict[str, list[int]], dict[str, list[int]]] | None = None
        self._entry_names: dict[str, list[int]] | None = None
        self._module_names: dict[str, list[int]] | None = None
        self._classes: dict[tuple[type, str], bool] = {}

    @property
    def entry_names(self) -> dict[str, list[int]]:
        """Named entries by the model's own names for them."""
        if self._entry_names is None:
            self._entry_names = {}
            for index, entry in enumerate(self.inventory.entries):
                for name in _names_of_entry(entry.fqn):
                    self._entry_names.setdefault(name, []).append(index)
        return self._entry_names

    @property
    def module_names(self) -> dict[str, list[int]]:
        """Modules by the model's own names for them."""
        if self._module_names is None:
            self._module_names = {}
            for index, info in enumerate(self.inventory.modules):
                self._module_names.setdefault(info.fqn, []).append(index)
        return self._module_names

    def lookup(self, name: str) -> tuple[list[int], list[int]]:
        """Modules and entries of exactly this name, which may also be as it is listed.

        With wrappers, ``named_parameters`` lists longer names: they may be written in full, but
        patterns do not match them, or ``m*`` would take all that is in a wrapper's ``module``.
        """
        modules, entries = self.module_names.get(name, []), self.entry_names.get(name, [])
        if modules or entries:
            return modules, entries
        if self._raw_names is None:
            self._raw_names = {}, {}
            for index, info in enumerate(self.inventory.modules):
                self._raw_names[0].setdefault(info.raw, []).append(index)
            for index, entry in enumerate(self.inventory.entries):
                self._raw_names[1].setdefault(entry.raw, []).append(index)
        return self._raw_names[0].get(name, []), self._raw_names[1].get(name, [])

    def match_all(self, patterns: Iterable[ParsedPattern], role: str) -> tuple[Match, ...]:
        """Match each pattern; all that match nothing are raised together."""
        matches = []
        failed: list[tuple[str, str, tuple[str, ...]]] = []
        for pattern in patterns:
            match = self.match(pattern)
            matches.append(match)
            if not match.entries and not self._holds_stats(match.modules):
                suggestions = () if match.reason else self.suggest(pattern)
                hint = match.reason or _did_you_mean(suggestions)
                failed.append((pattern.text, hint, suggestions))
        if failed:
            texts, hints, suggestions_ = zip(*failed, strict=True)
            raise UnmatchedPatternError(texts, hints, suggestions_, role)
        return tuple(matches)

    def _holds_stats(self, modules: Iterable[int]) -> bool:
        return any(self.inventory.modules[i].has_running_stats for i in modules)

    def match(self, pattern: ParsedPattern) -> Match:
        if isinstance(pattern, NamePattern):
            match = self.match_segments(pattern.segments)
            match.number_prefix = self.find_number_prefix(pattern, match)
            return match
        if isinstance(pattern, RegexPattern):
            return self.match_regex(pattern.regex)
        if isinstance(pattern, PredicatePattern):
            return self.match_predicate(pattern)
        return self.match_class(pattern)

    def match_regex(self, regex: re.Pattern[str]) -> Match:
        found = {i for name, at in self.entry_names.items() if regex.fullmatch(name) for i in at}
        return Match(found, set())

    def match_predicate(self, pattern: PredicatePattern) -> Match:
        found = set()
        for index, entry in enumerate(self.inventory.entries):
            try:
                if pattern.predicate(entry.fqn, self.inventory.tensors(entry.parameter)[0]):
                    found.add(index)
            except Exception as error:
                error.add_note(f"raised by the pattern {pattern.text} for {entry.fqn!r}")
                raise
        return Match(found, set(), "" if found else "it was false for every parameter")

    def match_class(self, pattern: ClassPattern | TypeNamePattern) -> Match:
        roots = []
        for index in range(len(self.inventory.modules)):
            module = self.inventory.module(index)
            if isinstance(pattern, ClassPattern):
                if isinstance(module, pattern.cls):
                    roots.append(index)
            elif self.has_class_name(type(module), pattern.name):
                roots.append(index)
        match = self.subtrees(roots)
        if not roots and isinstance(pattern, ClassPattern):
            match.reason = "no module of that class, or of a subclass"
        if roots and not match.entries:
            count = plural(len(roots), "module")
            match.reason = f"{count} of that class, without parameters or running statistics"
        return match

    def has_class_name(self, cls: type, name: str) -> bool:
        key = (cls, name)
        if key not in self._classes:
            regex = re.compile(glob_to_regex(name))
            self._classes[key] = any(
                regex.fullmatch(base.__name__)
                or regex.fullmatch(f"{base.__module__}.{base.__qualname__}")
                for base in cls.__mro__
                if issubclass(base, nn.Module)
            )
        return self._classes[key]

    def subtrees(self, roots: Iterable[int]) -> Match:
        entries: set[int] = set()
        modules: set[int] = set()
        for root in roots:
            info = self.inventory.modules[root]
            entries.update(range(info.first_entry, info.last_entry))
            modules.update(range(root, info.end))
        return Match(entries, modules)

    # Names, globs and indices: a frontier of modules that goes deeper with each segment.

    def match_segments(self, segments: tuple[Segment, ...], *, number_ends: bool = False) -> Match:
        """What the segments lead to; with ``number_ends`` no star goes on with a number."""
        bases: list[int] = [0]
        for position, segment in enumerate(segments):
            modules, entries = self.find(
                segment.name, bases, at_root=position == 0, number_ends=number_ends
            )
            if segment.at is not None:
                modules, entries, reason = self.take_children(segment, modules)
                if reason:
                    return Match(set(), set(), reason)
            if position < len(segments) - 1:
                bases = modules
                if not bases:
                    return Match(set(), set())
        match = self.subtrees(modules)
        match.entries.update(entries)
        if modules and not match.entries:
            info = self.inventory.modules[modules[0]]
            name = repr(info.fqn) if info.fqn else "the model"
            match.reason = f"{name} ({info.type_name}) has no parameters"
        elif not modules and not entries and len(segments) == 1:
            match.reason = self.explain_number(segments[0].name)
        return match

    def explain_number(self, name: str) -> str:
        """Why ``encoder.layer.12`` is not there: the numbers end before it."""
        parent, _, last = name.rpartition(".")
        containers = self.module_names.get(parent, []) if is_number(last) else []
        if not containers or not self.inventory.modules[containers[0]].numbered:
            return ""
        info = self.inventory.modules[containers[0]]
        return _out_of_range(Segment(parent, int(last)), len(info.numbered), parent)

    def find(
        self, name: str, bases: list[int], *, at_root: bool, number_ends: bool
    ) -> tuple[list[int], list[int]]:
        """Modules and entries called ``name`` (or matching it) below ``bases``."""
        if not name:  # the model itself, and what wrappers around it share its name
            return self.module_names[""] if at_root else bases, []
        tail = glob_to_regex(name)
        if number_ends:
            tail = _NUMBER_STAR.sub(r"\1(?!\\d).*", tail)
        if at_root:
            if not Segment(name).is_glob:
                return self.lookup(name)
            regex = re.compile(tail, re.DOTALL)
            return (
                [i for n, at in self.module_names.items() if regex.fullmatch(n) for i in at],
                [i for n, at in self.entry_names.items() if regex.fullmatch(n) for i in at],
            )
        modules: list[int] = []
        entries: list[int] = []
        for base in bases:
            info = self.inventory.modules[base]
            regex = re.compile(re.escape(f"{info.fqn}.") + tail, re.DOTALL)
            raw = f"{info.raw}.{name}"  # also written in full, as it is listed
            for i in range(base, info.end):
                module = self.inventory.modules[i]
                if regex.fullmatch(module.fqn) or module.raw == raw:
                    modules.append(i)
            for i in range(info.first_entry, info.last_entry):
                entry = self.inventory.entries[i]
                names = _names_of_entry(entry.fqn)
                if entry.raw == raw or any(regex.fullmatch(n) for n in names):
                    entries.append(i)
        return modules, entries

    def take_children(
        self, segment: Segment, containers: list[int]
    ) -> tuple[list[int], list[int], str]:
        """Numbered children at the segment's index; or the reason why there are none."""
        modules: list[int] = []
        entries: list[int] = []
        numbered = [
            i
            for i in containers
            if self.inventory.modules[i].numbered or self.inventory.modules[i].numbered_entries
        ]
        if not numbered:
            reason = ""
            if containers:
                info = self.inventory.modules[containers[0]]
                name = repr(info.fqn) if info.fqn else "the model"
                reason = f"{name} ({info.type_name}) has no numbered children"
            return [], [], reason
        for container in numbered:
            info = self.inventory.modules[container]
            items, into = (
                (info.numbered, modules) if info.numbered else (info.numbered_entries, entries)
            )
            reason = _out_of_range(segment, len(items), info.fqn)
            if reason:
                return [], [], reason
            if isinstance(segment.at, slice):
                into += items[segment.at]
            elif segment.at is not None:
                into.append(items[segment.at])
        return modules, entries, ""

    def find_number_prefix(self, pattern: NamePattern, match: Match) -> str:
        """What ``layer.1*`` took besides layer 1: 10, 11, ..."""
        if not re.search(r"\d\*", pattern.text):
            return ""
        kept = self.match_segments(pattern.segments, number_ends=True).entries
        more = [self.inventory.entries[i].fqn for i in sorted(match.entries - kept)]
        if not kept or not more:
            return ""
        alone = re.sub(r"(\d)\*.*", r"\1", pattern.text)
        return f"also took {shorten(more)}; {alone!r} is that number alone"

    def suggest(self, pattern: ParsedPattern) -> tuple[str, ...]:
        if isinstance(pattern, TypeNamePattern):
            names = suggest_class_names(pattern.name.rpartition(".")[2], self.inventory)
            return tuple(f"type:{name}" for name in names)
        if isinstance(pattern, RegexPattern):
            if any(pattern.regex.search(name) for name in self.entry_names):
                # A search would have found it; a full match is what counts.
                return (_as_full_match(pattern.regex),)
            literal = re.sub(r"\\(.)|[\^$*+?{}()|]", r"\1", pattern.regex.pattern)
            return suggest_names(literal, self.inventory, lambda _: False)
        if not isinstance(pattern, NamePattern):
            return ()

        def matches(text: str) -> bool:
            try:
                (candidate,) = parse_patterns(text)
            except PatternError:  # a name with brackets in it cannot be written as a pattern
                return False
            return bool(self.match(candidate).entries)

        return suggest_names(pattern.text, self.inventory, matches)


def _names_of_entry(fqn: str) -> Iterable[str]:
    """What a user may write for a parameter: its name, and that from before parametrisation."""
    yield fqn
    if ".parametrizations." in f".{fqn}":
        # X.parametrizations.weight.original is what the user knows as X.weight.
        plain = re.sub(r"(^|\.)parametrizations\.(\w+)\.original\d*$", r"\1\2", fqn)
        if plain != fqn:
            yield plain


def _as_full_match(regex: re.Pattern[str]) -> str:
    """A ``re:`` pattern that matches in full where ``regex`` is found."""
    text = re.sub(r"^\(\?[aiLmsux]+\)", "", regex.pattern)
    flags = {re.IGNORECASE: "i", re.MULTILINE: "m", re.DOTALL: "s", re.VERBOSE: "x", re.ASCII: "a"}
    inline = "".join(letter for flag, letter in flags.items() if regex.flags & flag)
    if regex.flags & re.VERBOSE:
        text += "\n"  # ends a comment
    if "|" in text or "\n" in text:
        text = f"(?:{text})"
    return f"re:{f'(?{inline})' if inline else ''}.*{text}.*"


def _did_you_mean(suggestions: tuple[str, ...]) -> str:
    if not suggestions:
        return "nothing in this model has a name near it"
    return f"did you mean {', '.join(map(repr, suggestions))}?"


def _out_of_range(segment: Segment, length: int, fqn: str) -> str:
    """Why an index or slice does not fit ``length`` children; ``""`` if it does.

    Unlike Python's own slices, a bound beyond the end is refused: ``layer[:24]`` on 12 layers
    is a mistake about the model, and clamping it would hide that.
    """
    index = segment.at
    have = f"{fqn or 'the model'} has {length} numbered children, 0 to {length - 1}"
    if isinstance(index, int):
        return "" if -length <= index < length else f"no index {index}: {have}"
    if isinstance(index, slice):
        for bound in (index.start, index.stop):
            if bound is not None and not -length <= bound <= length:
                return f"{bound} is out of range: {have}"
        if not range(length)[index]:
            return f"the slice is empty: {have}"
    return ""
