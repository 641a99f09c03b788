"""What the tests of audit share: findings by code, and mends that are run as they stand."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import freezekit as fk
from freezekit.errors import FreezekitWarning

__all__ = ["apply_mend", "code_in", "codes", "find", "freeze_by_hand", "loud", "mended"]

_BEGINS = re.compile(
    r"freezekit\.\w+\(|optimizer = |held = |model = |\[setattr|\[vars|\[group|\[model|\[optimizer"
    r"|model\.|torch\."
)


def codes(report: fk.AuditReport) -> list[str]:
    """Codes of the findings, the worst first."""
    return [finding.code for finding in report.findings]


def loud(report: fk.AuditReport) -> list[str]:
    """Codes of errors and warnings."""
    return [finding.code for finding in report.findings if finding.severity != "note"]


def find(report: fk.AuditReport, code: str) -> fk.Finding:
    """The one finding with this code."""
    found = [finding for finding in report.findings if finding.code == code]
    assert len(found) == 1, f"{code} in {codes(report)}\n{report}"
    return found[0]


def freeze_by_hand(*modules: nn.Module) -> None:
    """What most scripts do."""
    for module in modules:
        for parameter in module.parameters():
            parameter.requires_grad = False


def code_in(mend: str) -> str:
    """The first piece of code in a mend: the longest text from its beginning that is Python."""
    mend = mend.replace("after each model.train(): ", "")
    for match in _BEGINS.finditer(mend):
        for end in range(len(mend), match.end(), -1):
            text = mend[match.start() : end]
            try:
                tree = ast.parse(text)
            except SyntaxError:
                continue
            if all(_does_something(node) for node in tree.body):
                return text
    raise AssertionError(f"no code in {mend!r}")


def _does_something(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.ListComp | ast.BoolOp)
    )


def apply_mend(finding: fk.Finding, /, **names: Any) -> dict[str, Any]:
    """Run a mend's code as it stands; returns the names after it."""
    scope = {"freezekit": fk, "torch": torch, **names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FreezekitWarning)
        exec(code_in(finding.mend), scope)
    return scope


def mended(finding: fk.Finding, look: Callable[..., fk.AuditReport], **names: Any) -> Iterable[str]:
    """The codes that are found after the finding's mend was run."""
    scope = apply_mend(finding, **names)
    return codes(look(**{name: scope[name] for name in names}))
