"""Near misses: what in this model the user may have meant by a pattern that matched nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

from freezekit._fold import is_number
from freezekit._inventory import Inventory

__all__ = ["suggest_class_names", "suggest_names"]

_DIGITS = re.compile(r"\d+")
_MOST = 3


def suggest_names(
    pattern: str, inventory: Inventory, matches: Callable[[str], bool]
) -> tuple[str, ...]:
    """Up to three patterns or FQNs near ``pattern``, the likeliest first.

    Args:
        pattern: the name, glob or indexed name that matched nothing.
        inventory: the model's.
        matches: whether a candidate pattern would match something.
    """
    wanted = pattern.strip(".")
    found: dict[str, None] = {}
    corrected = _correct_components(wanted, inventory)
    if corrected is not None and matches(corrected):
        found[corrected] = None
    cased = _correct_case(wanted, inventory)
    if cased != wanted and matches(cased):
        found[cased] = None
    for suffix in dict.fromkeys((f"*.{wanted}", f"*.{cased}")):
        if "[" not in wanted and "*" not in wanted and matches(suffix):
            found[suffix] = None
    for name in _closest(wanted, inventory):
        found[name] = None
    return tuple(found)[:_MOST]


def suggest_class_names(name: str, inventory: Inventory) -> tuple[str, ...]:
    """Classes in the model whose names are near ``name``."""
    known = sorted({info.type_name for info in inventory.modules})
    return tuple(_close_matches(name, known))


def _correct_components(pattern: str, inventory: Inventory) -> str | None:
    """The pattern with each unknown component replaced by the nearest sibling that exists.

    It may begin anywhere in the tree: what lies above its first component is put before it.
    """
    children: dict[str, dict[str, None]] = {}
    for name in dict.fromkeys(_names(inventory)):
        parent, _, last = name.rpartition(".")
        children.setdefault(parent, {})[last] = None
    first = re.split(r"[.\[]", pattern, maxsplit=1)[0]
    below = [name for name, known in children.items() if name and first in known]
    for at in ["", *sorted(below, key=lambda name: name.count("."))]:
        corrected = _correct_below(at, pattern, children)
        if corrected is not None:
            return corrected
    return None


def _correct_case(pattern: str, inventory: Inventory) -> str:
    """The pattern with its words in the case that the model's names have."""
    words: dict[str, str] = {}
    for name in _names(inventory):
        for word in re.findall(r"\w+", name):
            words.setdefault(word.casefold(), word)
    return re.sub(r"\w+", lambda m: words.get(m[0].casefold(), m[0]), pattern)


def _correct_below(at: str, pattern: str, children: dict[str, dict[str, None]]) -> str | None:
    corrected = [at] if at else []
    components = pattern.split(".")
    for position, component in enumerate(components):
        if "*" in component or "?" in component:
            # What is left may match anything: keep it as it was written.
            corrected += components[position:]
            break
        name, bracket, index = component.partition("[")
        known = children.get(at, {})
        if name not in known:
            near = _close_matches(name, list(known))
            if not near or is_number(name):
                return None
            name = near[0]
        corrected.append(name + bracket + index)
        at = f"{at}.{name}" if at else name
        if bracket:
            at = f"{at}.{next(iter(children.get(at, {'': None})))}"
    return ".".join(corrected)


def _closest(pattern: str, inventory: Inventory) -> list[str]:
    """FQNs that read most like the pattern; alike blocks are compared once."""
    numbers = _DIGITS.findall(pattern)
    shapes: dict[str, str] = {}
    exact: set[str] = set()
    for name in _names(inventory):
        exact.add(name)
        shapes.setdefault(_DIGITS.sub("#", name), name)
    wanted = _DIGITS.sub("#", re.sub(r"[*?\[\]:]", "", pattern)).strip(".")
    result = []
    for shape in _close_matches(wanted, list(shapes)):
        # Put the user's own numbers back, where that exists.
        pieces = shape.split("#")
        digits = [*numbers, *("0" * len(pieces))][: len(pieces) - 1]
        name = "".join(a + b for a, b in zip(pieces, [*digits, ""], strict=True))
        result.append(name if name in exact else shapes[shape])
    return result


def _names(inventory: Inventory) -> Iterable[str]:
    for info in inventory.modules:
        if info.fqn and info.last_entry > info.first_entry:
            yield info.fqn
    for entry in inventory.entries:
        yield entry.fqn


def _close_matches(word: str, known: list[str]) -> list[str]:
    """Close matches by difflib, with another case counting as the same."""
    folded: dict[str, str] = {}
    for name in known:
        folded.setdefault(name.casefold(), name)
    near = difflib.get_close_matches(word.casefold(), list(folded), n=_MOST, cutoff=0.6)
    return [folded[name] for name in near]
