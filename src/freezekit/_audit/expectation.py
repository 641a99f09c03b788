"""What the user expects to be trainable, resolved against the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from freezekit._inventory import Inventory
from freezekit._patterns import Patterns
from freezekit._selection import resolve
from freezekit._state import FreezeState, check_state

__all__ = ["Expectation", "ExpectedTrainable", "resolve_expectation"]

ExpectedTrainable: TypeAlias = Patterns | FreezeState | Mapping[str, Any]


class Expectation(NamedTuple):
    """Indices of the parameters that are to be trainable, and what the state says besides.

    Attributes:
        trainable: indices of the parameters.
        missing: names in the freeze state that the model no longer has.
        from_state: whether a freeze state was given, not patterns.
    """

    trainable: frozenset[int]
    missing: tuple[str, ...] = ()
    from_state: bool = False


def resolve_expectation(inventory: Inventory, expected: ExpectedTrainable) -> Expectation:
    """Patterns, or what ``freeze_state`` returned, as parameters of this model.

    Raises:
        PatternError, UnmatchedPatternError: as :func:`freezekit.select`.
        FreezeStateError: not a freeze state.
    """
    if not isinstance(expected, Mapping):
        return Expectation(frozenset(resolve(inventory, expected).parameters))
    state = check_state(expected)
    wanted = set(state["trainable"])
    entries = inventory.entries
    known = {entry.fqn for entry in entries}
    gone = [name for name in (*state["trainable"], *state["frozen"]) if name not in known]
    chosen = frozenset(entry.parameter for entry in entries if entry.fqn in wanted)
    return Expectation(chosen, tuple(gone), from_state=True)
