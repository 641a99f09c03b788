"""Findings as SARIF 2.1.0, the format in which code hosts show what tools find."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from freezekit._audit.findings import Finding, Severity
from freezekit._audit.running import CheckDoc
from freezekit._version import __version__

__all__ = ["to_sarif"]

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_LEVELS: dict[Severity, str] = {"error": "error", "warning": "warning", "note": "note"}


def to_sarif(
    model: str,
    findings: Sequence[Finding],
    docs: dict[str, CheckDoc],
    file: str | None,
    line: int,
) -> dict[str, Any]:
    """A SARIF log with one run; parameters and modules are logical locations.

    Args:
        model: the model's class.
        findings: what was found.
        docs: by code, what the checks' docstrings say.
        file: where a code host is to show the findings, relative to the repository's root.
        line: the line in it, from 1.
    """
    codes = list(dict.fromkeys(finding.code for finding in findings))
    rules = [_rule(code, docs.get(code), findings) for code in codes]
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "freezekit", "version": __version__, "rules": rules}},
                "results": [
                    _result(model, finding, codes.index(finding.code), file, line)
                    for finding in findings
                ],
                "columnKind": "unicodeCodePoints",
            }
        ],
    }


def _rule(code: str, doc: CheckDoc | None, findings: Sequence[Finding]) -> dict[str, Any]:
    first = next(finding for finding in findings if finding.code == code)
    rule: dict[str, Any] = {
        "id": code,
        "shortDescription": {"text": _plain(doc.summary) if doc is not None else f"{first.title}."},
        "defaultConfiguration": {"level": _LEVELS[first.severity]},
    }
    if doc is not None and doc.body:
        rule["fullDescription"] = {"text": _plain(doc.body)}
        rule["help"] = {"text": _plain(doc.body), "markdown": doc.body}
    return rule


def _plain(markdown: str) -> str:
    return markdown.replace("`", "")


def _result(
    model: str, finding: Finding, index: int, file: str | None, line: int
) -> dict[str, Any]:
    location: dict[str, Any] = {
        "logicalLocations": [
            {"fullyQualifiedName": name, "kind": "member"} for name in finding.where or (model,)
        ]
    }
    if file is not None:
        location["physicalLocation"] = {
            "artifactLocation": {"uri": file},
            "region": {"startLine": line},
        }
    identity = "\n".join((model, finding.code, *finding.fqns))
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{finding.title}: {finding.cause} {finding.mend}"},
        "locations": [location],
        # The same finding in two runs is one alert.
        "partialFingerprints": {"freezekit/v1": hashlib.sha256(identity.encode()).hexdigest()},
    }
