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
    "BackboneMismatchError",
    "BatchError",
    "CacheMismatchError",
    "CompiledModelWarning",
    "DamagedShardError",
    "FeatureStoreError",
    "FreezeStateError",
    "FreezekitError",
    "FreezekitWarning",
    "InputGradientWarning",
    "LayerNotRunError",
    "NonFiniteFeatureError",
    "NothingTrainableWarning",
    "NumberPrefixWarning",
    "OptimizerError",
    "PaddingError",
    "PartialTieWarning",
    "PatternError",
    "SimulatedOutOfMemoryError",
    "StoreBusyError",
    "StoreWriteError",
    "TraceError",
    "TrainableBackboneError",
    "UninitializedParameterWarning",
    "UnknownLayerError",
    "UnmatchedPatternError",
    "UnrepeatableFeaturesError",
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
    # The base's own: MemoryError's refuses to make an error of several bases. OSError insists.
    new = OSError.__new__ if issubclass(cls, OSError) else BaseException.__new__
    error: FreezekitError = new(cls, *args)
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
        assumed: whether stand-ins had been given before for values that only data has.
    """

    def __init__(self, message: str, fqn: str, *, assumed: bool = False) -> None:
        super().__init__(message)
        self.fqn = fqn
        self.assumed = assumed


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


# Features


def _listed(names: Sequence[str], most: int = 10) -> str:
    """``_listed(["a", "b"])`` is ``"a, b"``; long lists are cut."""
    more = f", ... and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class TrainableBackboneError(FreezekitError, RuntimeError):
    """A backbone that gives features has trainable parameters, or modules in train mode.

    Attributes:
        parameters: FQNs of the parameters that require a gradient.
        modules: FQNs of the modules that are in train mode.
    """

    def __init__(self, parameters: Sequence[str], modules: Sequence[str] = ()) -> None:
        self.parameters = tuple(parameters)
        self.modules = tuple(modules)
        lines = []
        if self.parameters:
            lines.append(
                f"{len(self.parameters)} parameter(s) of the frozen backbone require a gradient, "
                f"and would get none: {_listed(self.parameters)}. Freeze them again "
                "(freezekit.freeze), or call the backbone itself to train it"
            )
        if self.modules:
            lines.append(
                f"{len(self.modules)} module(s) of the backbone are in train mode, past the hold: "
                f"{_listed(self.modules)}. Something set .training by hand; call .eval()"
            )
        super().__init__("; ".join(lines))


class UnknownLayerError(FreezekitError, LookupError):
    """Layers that the backbone does not have, all of them at once.

    Attributes:
        layers: the names that were given.
        suggestions: for each of them, the nearest names that exist.
    """

    def __init__(self, layers: Sequence[str], suggestions: Sequence[Sequence[str]]) -> None:
        self.layers = tuple(layers)
        self.suggestions = tuple(tuple(names) for names in suggestions)
        lines = [f"{len(self.layers)} layer(s) are not in the backbone:"]
        for layer, near in zip(self.layers, self.suggestions, strict=True):
            hint = f"  - did you mean {', '.join(map(repr, near))}?" if near else ""
            lines.append(f"  {layer!r}{hint}")
        super().__init__("\n".join(lines))


class LayerNotRunError(FreezekitError, RuntimeError):
    """Layers that exist but did not run in this forward pass.

    Attributes:
        layers: their FQNs.
    """

    def __init__(self, layers: Sequence[str], hint: str = "") -> None:
        self.layers = tuple(layers)
        tail = f"; {hint}" if hint else ""
        super().__init__(
            f"{len(self.layers)} layer(s) exist but did not run in this forward pass: "
            f"{_listed([repr(name) for name in self.layers])}{tail}"
        )


class UnrepeatableFeaturesError(FreezekitError, RuntimeError):
    """Two passes over one batch gave different features, or changed the backbone.

    Attributes:
        modules: FQNs of the modules in which the difference arises.
        buffers: FQNs of the buffers that a pass changed.
    """

    def __init__(
        self, reason: str, modules: Sequence[str] = (), buffers: Sequence[str] = ()
    ) -> None:
        self.reason = reason
        self.modules = tuple(modules)
        self.buffers = tuple(buffers)
        super().__init__(reason)


class BackboneMismatchError(FreezekitError, ValueError):
    """A state dict that leaves the backbone out was made with another backbone.

    Attributes:
        saved: the fingerprint in the state dict.
        found: that of this backbone.
    """

    def __init__(self, saved: str, found: str) -> None:
        self.saved = saved
        self.found = found
        super().__init__(
            f"this state dict was made with another backbone: its fingerprint is {saved[:12]}, "
            f"that of this backbone is {found[:12]}. Load the backbone's own weights first"
        )


class BatchError(FreezekitError, ValueError):
    """A batch that features cannot be extracted from.

    Attributes:
        batch: its index in the iterable.
        reason: what is wrong with it, and what would work.
    """

    def __init__(self, batch: int, reason: str) -> None:
        self.batch = batch
        self.reason = reason
        super().__init__(f"batch {batch}: {reason}")


class NonFiniteFeatureError(FreezekitError, ValueError):
    """A feature is NaN or infinite, or does not fit into the dtype that it is stored in.

    Attributes:
        sample: the first such sample's index in the data.
        feature: the feature's name.
        count: how many samples of its batch are affected.
    """

    def __init__(self, sample: int, feature: str, count: int, reason: str) -> None:
        self.sample = sample
        self.feature = feature
        self.count = count
        more = f" (and {count - 1} more of its batch)" if count > 1 else ""
        super().__init__(f"feature {feature!r} of sample {sample}{more} {reason}")


class PaddingError(FreezekitError, ValueError):
    """A sample's features change with the padding beside it.

    Attributes:
        sample: the sample's index in the data.
        difference: the largest difference, relative to the largest feature.
    """

    def __init__(self, sample: int, difference: float, reason: str) -> None:
        self.sample = sample
        self.difference = difference
        super().__init__(reason)


class FeatureStoreError(FreezekitError, ValueError):
    """A directory cannot be used as a feature store.

    Attributes:
        directory: which.
        reason: what is wrong, and what would work.
    """

    def __init__(self, directory: str, reason: str) -> None:
        self.directory = directory
        self.reason = reason
        super().__init__(f"{directory}: {reason}")


class StoreBusyError(FeatureStoreError):
    """Another process is writing to the store."""


class StoreWriteError(FeatureStoreError, OSError):
    """A store cannot be written to: no space, no permission."""


class DamagedShardError(FeatureStoreError):
    """Shards of a store are missing, cut short or altered.

    Attributes:
        shards: ``(file name, what is wrong)`` of each.
    """

    def __init__(self, directory: str, shards: Sequence[tuple[str, str]]) -> None:
        self.shards = tuple(shards)
        shown = "\n".join(f"  {name} - {why}" for name, why in self.shards[:10])
        more = len(self.shards) - 10
        tail = f"\n  ... and {more} more" if more > 0 else ""
        super().__init__(
            directory,
            f"{len(self.shards)} shard(s) are damaged:\n{shown}{tail}\n"
            "extract_features(..., verify=True) with the same batches makes them again, alone",
        )


class CacheMismatchError(FreezekitError, ValueError):
    """A feature store was made by something else; nothing was read from it.

    Attributes:
        directory: the store's.
        differences: ``(field, in the store, here)`` of each part of the identity that differs.
    """

    def __init__(self, directory: str, differences: Sequence[tuple[str, str, str]]) -> None:
        self.directory = directory
        self.differences = tuple(differences)
        lines = [f"{directory} holds features of something else:"]
        width = max(len(name) for name, _, _ in self.differences)
        for name, stored, here in self.differences:
            lines.append(f"  {name:<{width}}  {_cut(stored)} in the store, {_cut(here)} here")
        lines.append("use another directory, or delete this one")
        super().__init__("\n".join(lines))


def _cut(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:37]}..."


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


class InputGradientWarning(FreezekitWarning):
    """An input of a frozen feature extractor requires a gradient, which ends there."""
