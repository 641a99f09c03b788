"""The documentation of all codes, made from the checks' own docstrings."""

from __future__ import annotations

from collections.abc import Iterable

from freezekit._audit.running import CHECK_FAILED, CheckDoc, check_doc
from freezekit._audit.step.checks import DEFAULT_STEP_CHECKS

__all__ = ["findings_page"]

_GROUPS = {
    "FK0": "The audit itself",
    "FK1": "What is trainable",
    "FK2": "Norms and modes",
    "FK3": "Gradients and the optimizer",
    "FK4": "Tied parameters",
    "FK5": "Wrappers: DDP, FSDP, checkpointing, compilation",
    "FK6": "Parameters that are not plain",
    "FK7": "Adapters, and where what learns lies",
    "FK8": "What a step shows (audit_step)",
}

_INTRODUCTION = """\
# What audit finds

`freezekit.audit(model)` looks at a model that stands still; `freezekit.audit_step(model, step)`
also runs one step of your own, watches it, and puts everything back. Every finding has one of these
codes, a severity, the names it is about, its cause with the values seen, and a mend with the code
to write.

- **error**: training does not do what it seems to;
- **warning**: it probably does not;
- **note**: worth knowing.

`report.ok` is true without errors and warnings; `report.raise_for("error")` is for tests and CI;
`ignore=("FK203",)` leaves codes out; `checks=(*DEFAULT_CHECKS, mine)` adds a check of your own. A
code never changes its meaning.
"""

_CHECK_FAILED = CheckDoc(
    CHECK_FAILED,
    "a check failed.",
    "What it looks for is not known; all other checks ran. It may be a check of your own, or a "
    "model that one of freezekit's did not expect: please report that.",
)


def findings_page() -> str:
    """The page in Markdown: a table of all codes, then a section for each."""
    docs = sorted([_CHECK_FAILED, *_documented()])
    parts = [_INTRODUCTION]
    for prefix, title in _GROUPS.items():
        group = [doc for doc in docs if doc.code.startswith(prefix)]
        rows = "\n".join(f"| [{d.code}](#{d.code.lower()}) | {d.summary} |" for d in group)
        parts.append(f"## {title}\n\n| code | |\n| --- | --- |\n{rows}\n")
        parts += [
            f"### {d.code}\n\n{_sentence(d.summary)}\n\n{d.body}".rstrip() + "\n" for d in group
        ]
    return "\n".join(parts)


def _documented() -> Iterable[CheckDoc]:
    for check in DEFAULT_STEP_CHECKS:
        doc = check_doc(check)
        if doc is not None:
            yield doc


def _sentence(text: str) -> str:
    return f"**{text[0].upper()}{text[1:]}**"
