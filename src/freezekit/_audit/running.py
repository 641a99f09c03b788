"""Running checks over a context, whatever a check does; and what their docstrings say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from freezekit._audit.checks import Check
from freezekit._audit.context import AuditContext
from freezekit._audit.findings import SEVERITIES, Finding
from freezekit._audit.mends import where_text

__all__ = ["CHECK_FAILED", "CheckDoc", "check_codes", "check_doc", "run_checks"]

CHECK_FAILED = "FK001"

_DOC = re.compile(r"(?P<code>[A-Z]+\d+): (?P<summary>.*?)(?:\n\s*\n(?P<body>.*))?\Z", re.DOTALL)
_ROLE = re.compile(r":\w+:`([^`]+)`")


class CheckDoc(NamedTuple):
    """A check's docstring, as Markdown: its code, one sentence, and why it matters."""

    code: str
    summary: str
    body: str


def check_doc(check: Check) -> CheckDoc | None:
    """What the check's docstring says; None if it does not begin with a code."""
    match = _DOC.match((getattr(check, "__doc__", None) or "").strip())
    if match is None:
        return None
    return CheckDoc(
        match["code"], _flat(match["summary"]), "\n\n".join(_paragraphs(match["body"] or ""))
    )


def _paragraphs(text: str) -> list[str]:
    return [_flat(part) for part in re.split(r"\n\s*\n", text) if part.strip()]


def _flat(text: str) -> str:
    """One line of Markdown: without the roles and the double backticks of a docstring."""
    text = _ROLE.sub(r"`\1`", " ".join(text.split()))
    return text.replace("``", "`")


def check_codes(checks: Sequence[Check], ignore: Iterable[str]) -> frozenset[str]:
    """The codes to leave out, each of them known.

    Raises:
        TypeError: a check is not callable.
        ValueError: a code that no check has.
    """
    ignored = frozenset([ignore] if isinstance(ignore, str) else ignore)
    docs = []
    for check in checks:
        if not callable(check):
            raise TypeError(
                f"checks: expected functions of an AuditContext, got {type(check).__name__}; add "
                "yours as checks=(*DEFAULT_CHECKS, mine)"
            )
        docs.append(check_doc(check))
    known = {doc.code for doc in docs if doc is not None} | {CHECK_FAILED}
    # What a check without a code of its own may find is not known beforehand.
    if None not in docs:
        for code in sorted(ignored - known, key=str):
            raise ValueError(f"ignore: expected codes such as 'FK203', got {code!r}")
    return ignored


def run_checks(
    context: AuditContext, checks: Sequence[Check], ignored: frozenset[str]
) -> tuple[Finding, ...]:
    """What the checks find, the worst first. A check that fails becomes a finding."""
    findings: list[Finding] = []
    for check in checks:
        try:
            found: list[Any] = list(check(context))
            for finding in found:
                if not isinstance(finding, Finding):
                    kind = type(finding).__name__
                    raise TypeError(f"expected it to yield Finding, got {kind}")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001  # whatever it is: the others still run
            findings.append(_failed(check, error))
        else:
            findings += found
    kept = [
        finding if finding.where else replace(finding, where=where_text(context, finding.fqns))
        for finding in findings
        if finding.code not in ignored
    ]
    return tuple(sorted(kept, key=lambda finding: SEVERITIES.index(finding.severity)))


def _failed(check: Check, error: Exception) -> Finding:
    doc = check_doc(check)
    name = getattr(check, "__name__", type(check).__name__)
    which = f"{name} ({doc.code})" if doc is not None else name
    ours = getattr(check, "__module__", "").startswith("freezekit.")
    message = str(error).strip().partition("\n")[0]
    return Finding(
        code=CHECK_FAILED,
        severity="warning",
        title="a check failed: what it looks for is not known",
        fqns=(),
        cause=f"{which} raised {type(error).__name__}{f': {message}' if message else ''}; the "
        "other checks ran.",
        mend="Please report it, with the model's class; ignore "
        f'it with ignore=("{CHECK_FAILED}",).'
        if ours
        else f"Mend the check, or leave it out of checks=: {name}.",
    )
