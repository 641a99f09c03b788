"""audit: what learns, what does not, and what is wrong."""

from freezekit._audit.driver import audit
from freezekit._audit.findings import Finding
from freezekit._audit.report import AuditReport

__all__ = ["AuditReport", "Finding", "audit"]
