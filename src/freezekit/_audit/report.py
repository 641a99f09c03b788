"""What audit returns."""

from __future__ import annotations

import html
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from freezekit._audit.findings import SEVERITIES, Finding, Severity
from freezekit._audit.running import CheckDoc
from freezekit._audit.sarif import to_sarif
from freezekit._audit.step.record import StepSummary
from freezekit._audit.tree import ModuleRow
from freezekit._format import format_bytes, format_count, format_percent, plural, shorten
from freezekit._report import Report
from freezekit._tables import Column, Section, Table
from freezekit.errors import AuditFailedError

__all__ = ["AuditReport"]

_PAGE = '<!doctype html>\n<meta charset="utf-8">\n<title>audit of {title}</title>\n{body}'


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
        docs: for each code that was found, what its check's docstring says.
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
    docs: tuple[tuple[str, CheckDoc], ...] = field(default=(), repr=False, compare=False)
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
                where = f" ({shorten(finding.where)})" if finding.where else ""
                lines.append(f"  {finding.code} {finding.severity}: {finding.title}{where}")
                lines.append(f"    {finding.cause} {finding.mend}")
            raise AuditFailedError("\n".join(lines), self)

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sarif(self, *, file: str | None = None, line: int = 1) -> dict[str, Any]:
        """The findings as a SARIF 2.1.0 log, which code hosts show beside the code.

        Args:
            file: the file in which they are to be shown, relative to the repository's root, such as
                ``"train.py"``. Hosts show nothing without one.
            line: the line in it, from 1.

        Raises:
            ValueError: an absolute path, one that leaves the repository, or a line below 1.
        """
        if line < 1:
            raise ValueError(f"line: expected 1 or more, got {line!r}")
        if file is not None:
            path = PurePosixPath(file.replace("\\", "/"))
            if not file or path.is_absolute() or ".." in path.parts or ":" in file:
                raise ValueError(
                    f"file: expected a path relative to the repository's root, such as "
                    f"'src/train.py', got {file!r}"
                )
            file = quote(str(path))
        return to_sarif(self.model, self.findings, dict(self.docs), file, line)

    def write(self, path: str | PathLike[str], *, file: str | None = None, line: int = 1) -> None:
        """Write the report; the suffix tells how: ``.json``, ``.sarif``, ``.html`` or ``.txt``.

        It is written beside and then renamed, so that no half of it is ever read.

        Args:
            path: where to.
            file: as for :meth:`to_sarif`.
            line: as for :meth:`to_sarif`.

        Raises:
            ValueError: another suffix.
        """
        target = Path(path)
        kinds: dict[str, Callable[[], str]] = {
            ".json": self.to_json,
            ".sarif": lambda: json.dumps(self.to_sarif(file=file, line=line), indent=2),
            ".html": lambda: _PAGE.format(title=html.escape(self.model), body=self._repr_html_()),
            ".txt": lambda: str(self),
        }
        make = kinds.get(target.suffix)
        if make is None:
            raise ValueError(f"path: expected a suffix of {', '.join(kinds)}, got {target.name!r}")
        text = make()
        beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            beside.write_text(text + "\n", encoding="utf-8")
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

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
    if finding.where:
        lines.append(f"  where: {shorten(finding.where, 6)}")
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
