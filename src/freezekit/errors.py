"""Every exception and warning that freezekit raises on purpose.

Each one inherits the builtin that a caller would already catch (``ValueError``,
``LookupError``, ``TypeError``), carries what it found as attributes, and pickles.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freezekit._audit.report import AuditReport

__all__ = [
    "AuditFailedError",
    "CompiledModelWarning",
    "FreezeStateError",
    "FreezekitError",
    "FreezekitWarning",
    "NothingTrainableWarning",
    "NumberPrefixWarning",
    "OptimizerError",
    "PartialTieWarning",
    "PatternError",
    "SimulatedOutOfMemoryError",
    "TraceError",
    "UninitializedParameterWarning",
    "UnmatchedPatternError",
    "UnsupportedModelError",
    "UntrainableParameterError",
]


# What a user hands in by mistake may be a whole state dict.
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200


# -- errors ------------------------------------------------------------------------------------


class FreezekitError(Exception):
    """Base of every error that freezekit raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, vars(self))


def _rebuild(cls: type[FreezekitError], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """An error as it was, without making its message again."""
    # The base's own: MemoryError's refuses to make an error of several bases.
    error: FreezekitError = BaseException.__new__(cls, *args)
    error.args = args
    vars(error).update(state)
    return error


class PatternError(FreezekitError, ValueError):
    """A pattern is malformed: it could match nothing in any model.

    Attributes:
        pattern: the pattern as it was given; what is no text, by its ``repr``, shortened.
        reason: what is wrong with it, and what would work.
    """

    def __init__(self, pattern: object, reason: str) -> None:
        shown = _short.repr(pattern)
        super().__init__(f"bad pattern {shown}: {reason}")
        self.pattern = pattern if isinstance(pattern, str) else shown
        self.reason = reason


class UnmatchedPatternError(FreezekitError, LookupError):
    """Patterns that match nothing in this model, all of them at once.

    Attributes:
        unmatched: the patterns that matched nothing, as they were given (in text).
        hints: for each of them, why, or the nearest names that exist.
        suggestions: for each of them, the nearest patterns or FQNs that do match.
        role: ``"pattern"``, or ``"exclude pattern"`` if they came from ``exclude=``.
    """

    def __init__(
        self,
        unmatched: Sequence[str],
        hints: Sequence[str],
        suggestions: Sequence[Sequence[str]],
        role: str = "pattern",
    ) -> None:
        self.unmatched = tuple(unmatched)
        self.hints = tuple(hints)
        self.suggestions = tuple(tuple(names) for names in suggestions)
        self.role = role
        width = max(len(repr(pattern)) for pattern in self.unmatched)
        lines = [f"{len(self.unmatched)} {role}(s) matched no parameter:"]
        for pattern, hint in zip(self.unmatched, self.hints, strict=True):
            lines.append(f"  {pattern!r:<{width}}  - {hint}" if hint else f"  {pattern!r}")
        super().__init__("\n".join(lines))


class UnsupportedModelError(FreezekitError, TypeError):
    """What was given is not a model that freezekit can work on.

    Attributes:
        fqn: where in the model the trouble is; ``""`` for the model itself.
        reason: what is wrong, and what would work.
    """

    def __init__(self, reason: str, fqn: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.fqn = fqn


class UntrainableParameterError(FreezekitError, TypeError):
    """Parameters that cannot require a gradient were asked to.

    Attributes:
        parameters: ``(FQN, why)`` of each.
    """

    def __init__(self, parameters: Sequence[tuple[str, str]]) -> None:
        self.parameters = tuple(parameters)
        shown = "\n".join(f"  {fqn} - {why}" for fqn, why in self.parameters[:10])
        more = len(self.parameters) - 10
        tail = f"\n  ... and {more} more" if more > 0 else ""
        super().__init__(
            f"{len(self.parameters)} parameter(s) cannot be made trainable:\n{shown}{tail}"
        )


class FreezeStateError(FreezekitError, ValueError):
    """A freeze state cannot be loaded into this model; nothing was changed.

    Attributes:
        missing: FQNs that the state has and the model has not.
        unexpected: FQNs that the model has and the state has not.
    """

    def __init__(
        self, reason: str, missing: Sequence[str] = (), unexpected: Sequence[str] = ()
    ) -> None:
        self.reason = reason
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        lines = [reason]
        for title, names in (
            ("only in the state", self.missing),
            ("only in the model", self.unexpected),
        ):
            if names:
                more = f", ... and {len(names) - 10} more" if len(names) > 10 else ""
                lines.append(f"  {title} ({len(names)}): {', '.join(names[:10])}{more}")
        super().__init__("\n".join(lines))


class OptimizerError(FreezekitError, ValueError):
    """The optimizer cannot take in or let go of these parameters."""


class AuditFailedError(FreezekitError, AssertionError):
    """An audit found something at or above the severity that its caller tolerates.

    Attributes:
        report: the whole :class:`~freezekit.AuditReport`.
    """

    def __init__(self, message: str, report: AuditReport) -> None:
        super().__init__(message)
        self.message = message
        self.report = report


class TraceError(FreezekitError, RuntimeError):
    """A step failed while its memory was estimated; the cause is chained.

    Attributes:
        fqn: the module that was running; ``""`` outside of all.
    """

    def __init__(self, message: str, fqn: str) -> None:
        super().__init__(message)
        self.fqn = fqn


class SimulatedOutOfMemoryError(FreezekitError, MemoryError):
    """The simulated allocator could not serve a request; all sizes in bytes.

    Attributes:
        requested: what was asked for.
        capacity: what the process may reserve.
        allocated: in use at that moment.
        reserved: taken from the device at that moment.
        largest_free: the largest cached block.
    """

    def __init__(
        self,
        message: str,
        *,
        requested: int,
        capacity: int,
        allocated: int,
        reserved: int,
        largest_free: int,
    ) -> None:
        super().__init__(message)
        self.requested = requested
        self.capacity = capacity
        self.allocated = allocated
        self.reserved = reserved
        self.largest_free = largest_free


# -- warnings ----------------------------------------------------------------------------------


class FreezekitWarning(UserWarning):
    """Base of every warning that freezekit gives."""


class PartialTieWarning(FreezekitWarning):
    """A pattern named one side of tied parameters; the other side is the same tensor."""


class NothingTrainableWarning(FreezekitWarning):
    """Patterns that were meant to leave something trainable left nothing."""


class NumberPrefixWarning(FreezekitWarning):
    """A glob such as ``layer.1*`` also took layers 10, 11, ..."""


class UninitializedParameterWarning(FreezekitWarning):
    """A lazy parameter was frozen before it had a value."""


class CompiledModelWarning(FreezekitWarning):
    """Flags changed in a model of which ``torch.compile`` already holds compiled code."""
