"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["SEVERITIES", "Finding", "Severity"]

Severity: TypeAlias = Literal["error", "warning", "note"]

# From the worst down.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        code: stable, such as ``"FK201"``.
        severity: ``"error"``: training does not do what it seems to; ``"warning"``: it probably
            does not; ``"note"``: worth knowing.
        title: what it is, in a few words.
        fqns: the parameters or modules that it is about.
        cause: one sentence, with the values seen.
        mend: one sentence, with the code to write.
        where: the ``fqns`` for a reader: whole modules in the place of all of their parameters, and
            blocks alike in one line; filled in by the audit.
    """

    code: str
    severity: Severity
    title: str
    fqns: tuple[str, ...]
    cause: str
    mend: str
    where: tuple[str, ...] = ()
