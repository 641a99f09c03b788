"""audit: take stock of a model once, and run the checks over it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from freezekit._audit.checks import DEFAULT_CHECKS, code_of
from freezekit._audit.context import AuditContext
from freezekit._audit.findings import SEVERITIES
from freezekit._audit.report import AuditReport
from freezekit._audit.tree import module_rows
from freezekit._collector import collector_paused

__all__ = ["audit"]


def audit(model: nn.Module, *, ignore: Iterable[str] = ()) -> AuditReport:
    """Tell what learns in ``model``, what does not, and what is wrong.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    >>> for module in model[:2]:
    ...     _ = module.requires_grad_(False)
    >>> report = audit(model)
    >>> report.trainable, report.frozen, [finding.code for finding in report.findings]
    (10, 28, ['FK201'])

    The model is looked at, never run and never changed.

    Args:
        model: any ``nn.Module``, frozen by whatever means, on any device.
        ignore: codes of findings to leave out, such as ``("FK203",)``.

    Returns:
        The module tree, folded to what differs; totals in elements and bytes, each memory
        counted once; tied parameters; findings, the worst first.

    Raises:
        UnsupportedModelError: not a module, or a ScriptModule.
        ValueError: ``ignore`` names a code that no check has.
    """
    ignored = frozenset([ignore] if isinstance(ignore, str) else ignore)
    known = {code for check in DEFAULT_CHECKS if (code := code_of(check))}
    for code in ignored - known:
        raise ValueError(f"ignore: expected codes such as 'FK203', got {code!r}")
    with collector_paused():
        return _report(AuditContext(model), ignored)


def _report(context: AuditContext, ignored: frozenset[str]) -> AuditReport:
    findings = [finding for check in DEFAULT_CHECKS for finding in check(context)]
    findings = [finding for finding in findings if finding.code not in ignored]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    inventory = context.inventory
    parameters = inventory.parameters
    return AuditReport(
        model=inventory.modules[0].type_name,
        rows=module_rows(inventory),
        findings=tuple(findings),
        tied=tuple((info.fqn, *info.aliases) for info in parameters if info.aliases),
        tensors=len(parameters),
        trainable_tensors=sum(info.requires_grad for info in parameters),
        trainable=sum(info.numel for info in parameters if info.requires_grad),
        frozen=sum(info.numel for info in parameters if not info.requires_grad),
        parameter_bytes=sum(info.nbytes for info in parameters),
        trainable_bytes=sum(info.nbytes for info in parameters if info.requires_grad),
        buffer_bytes=sum(info.nbytes for info in inventory.buffers),
        uninitialized=tuple(info.fqn for info in parameters if info.layout == "lazy"),
        sharded=sum(info.layout == "sharded" for info in parameters),
        packed=sum(info.layout == "packed" for info in parameters),
    )
