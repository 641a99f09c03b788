"""audit and audit_step: what learns, what does not, and what is wrong."""

from freezekit._audit.checks import DEFAULT_CHECKS, Check
from freezekit._audit.context import AuditContext
from freezekit._audit.driver import audit
from freezekit._audit.findings import Finding
from freezekit._audit.report import AuditReport
from freezekit._audit.step.checks import DEFAULT_STEP_CHECKS
from freezekit._audit.step.driver import audit_step

__all__ = [
    "DEFAULT_CHECKS",
    "DEFAULT_STEP_CHECKS",
    "AuditContext",
    "AuditReport",
    "Check",
    "Finding",
    "audit",
    "audit_step",
]
