"""What audit returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from freezekit._audit.findings import SEVERITIES, Finding, Severity
from freezekit._audit.step.record import StepSummary
from freezekit._audit.tree import ModuleRow
from freezekit._fold import fold_names
from freezekit._format import format_bytes, format_count, format_percent, plural, shorten
from freezekit._report import Report
from freezekit._tables import Column, Section, Table
from freezekit.errors import AuditFailedError

__all__ = ["AuditReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport(Report):
    """What a model is made of and what is wrong with it; counts are by unique memory.

    Attributes:
        model: the model's class.
        rows: the module tree, folded to what differs.
        findings: the worst first.
        tied: for each tied tensor, all of its names.
        tensors: parameter tensors.
        trainable_tensors: those that require a gradient.
        trainable: trainable parameters (elements).
        frozen: frozen parameters (elements).
        parameter_bytes: bytes of all parameters.
        trainable_bytes: bytes of the trainable ones.
        buffer_bytes: bytes of all buffers.
        uninitialized: FQNs of lazy parameters; the counts are lower bounds then.
        sharded: tensors that are sharded (counted whole).
        packed: tensors that are packed, such as 4-bit (elements unpacked, bytes packed).
        step: the step that was run, in figures; ``None`` from :func:`freezekit.audit`.
    """

    model: str
    rows: tuple[ModuleRow, ...] = field(repr=False)
    findings: tuple[Finding, ...] = field(repr=False)
    tied: tuple[tuple[str, ...], ...] = field(repr=False)
    tensors: int
    trainable_tensors: int
    trainable: int
    frozen: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    uninitialized: tuple[str, ...] = field(repr=False)
    sharded: int
    packed: int
    step: StepSummary | None = None

    @property
    def total(self) -> int:
        """All parameters (elements)."""
        return self.trainable + self.frozen

    @property
    def ok(self) -> bool:
        """Whether there is no error and no warning."""
        return all(finding.severity == "note" for finding in self.findings)

    def raise_for(self, severity: Severity = "error") -> None:
        """Raise if there is a finding of this severity or worse; for tests and CI.

        Raises:
            AuditFailedError: there is; its message lists them.
            ValueError: not a severity.
        """
        if severity not in SEVERITIES:
            raise ValueError(f"severity: expected one of {SEVERITIES}, got {severity!r}")
        worst = SEVERITIES[: SEVERITIES.index(severity) + 1]
        found = [finding for finding in self.findings if finding.severity in worst]
        if found:
            lines = [f"{self.model}: {plural(len(found), 'finding')}"]
            for finding in found:
                where = f" ({shorten(fold_names(finding.fqns))})" if finding.fqns else ""
                lines.append(f"  {finding.code} {finding.severity}: {finding.title}{where}")
                lines.append(f"    {finding.cause} {finding.mend}")
            raise AuditFailedError("\n".join(lines), self)

    def _sections(self) -> tuple[Section, ...]:
        share = format_percent(self.trainable, self.total)
        head = (
            f"{self.model}: {format_count(self.total)} parameters, "
            f"{format_count(self.trainable)} trainable ({share})"
        )
        notes = self._notes()
        return (
            Section((head,), self._table()),
            *((Section(tuple(notes)),) if notes else ()),
            *(Section(tuple(_finding_lines(finding))) for finding in self.findings),
            Section(self._totals()),
        )

    def _table(self) -> Table:
        held = any(row.held for row in self.rows)
        columns = [
            Column("module", shrink=2),
            Column("type", shrink=1),
            Column("params", "right"),
            Column("trainable", "right"),
            Column("frozen", "right"),
            Column("bytes", "right"),
            Column("dtype"),
            Column("mode"),
        ]
        rows = [_cells(row) for row in self.rows]
        if held:
            columns.append(Column("held", "right"))
            rows = [
                (*cells, str(row.held or "")) for cells, row in zip(rows, self.rows, strict=True)
            ]
        total = (
            "total",
            "",
            format_count(self.total),
            format_count(self.trainable),
            format_count(self.frozen),
            format_bytes(self.parameter_bytes),
            "",
            "",
            *(("",) if held else ()),
        )
        return Table(tuple(columns), tuple(rows), total)

    def _notes(self) -> list[str]:
        lines = [f"tied: {' = '.join(names)}" for names in self.tied[:10]]
        if len(self.tied) > 10:
            lines.append(f"tied: {len(self.tied) - 10:,} more")
        if self.uninitialized:
            lines.append(
                f"uninitialised: {shorten(self.uninitialized)}; the counts are lower bounds"
            )
        if self.sharded:
            lines.append(f"sharded: {plural(self.sharded, 'tensor')}, counted whole")
        if self.packed:
            lines.append(
                f"packed: {plural(self.packed, 'tensor')}; parameters are counted unpacked, "
                "bytes as packed"
            )
        if any(row.held for row in self.rows):
            lines.append("held: modules held in eval under any train(), by freezekit.freeze")
        return lines

    def _totals(self) -> tuple[str, ...]:
        count = {
            severity: sum(finding.severity == severity for finding in self.findings)
            for severity in SEVERITIES
        }
        found = ", ".join(plural(n, severity) for severity, n in count.items() if n)
        return (
            f"findings: {found or 'none'}",
            *(() if self.step is None else (_step_line(self.step),)),
            f"total: {self.total:,} parameters in {plural(self.tensors, 'tensor')}, "
            f"{format_bytes(self.parameter_bytes)}; buffers {format_bytes(self.buffer_bytes)}",
            f"trainable: {self.trainable:,} in {plural(self.trainable_tensors, 'tensor')}, "
            f"{format_bytes(self.trainable_bytes)}; frozen: {self.frozen:,}",
        )


def _cells(row: ModuleRow) -> tuple[str, ...]:
    kind = f"{row.type_name} x{row.count}" if row.count > 1 else row.type_name
    return (
        "  " * row.depth + row.name,
        kind,
        format_count(row.numel) if not row.tied_to else "tied",
        format_count(row.trainable),
        format_count(row.numel - row.trainable),
        format_bytes(row.nbytes),
        ",".join(row.dtypes),
        row.mode,
    )


def _finding_lines(finding: Finding) -> list[str]:
    lines = [f"{finding.code} {finding.severity}: {finding.title}"]
    if finding.fqns:
        folded = fold_names(finding.fqns)
        lines.append(f"  where: {shorten(folded, 6)}")
    lines.append(f"  cause: {finding.cause}")
    lines.append(f"  mend:  {finding.mend}")
    return lines


def _step_line(step: StepSummary) -> str:
    steps = plural(step.optimizer_steps, "optimizer step")
    return (
        f"step: {1000 * step.seconds:,.0f} ms, watched {1000 * step.watched_seconds:,.0f} ms; "
        f"{plural(step.gradients, 'gradient')}, {steps}; snapshot ({step.snapshot}) "
        f"{format_bytes(step.snapshot_bytes)}; "
        f"{'everything put back' if step.restored else 'left as it is after the step'}"
    )
