"""README and docs are tests: Python blocks run, and what they print is compared.

A ``text`` block right after a ``python`` block is what that block prints. Blocks of ``>>>``
examples are compared as doctests.
"""

from __future__ import annotations

import difflib
import io
from contextlib import redirect_stdout
from doctest import ELLIPSIS

from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

_run = PythonEvaluator()


def run(example: Example) -> None:
    """Run a block, and keep what it prints for the ``text`` block after it."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        _run(example)
    example.namespace["__printed__"] = printed.getvalue()


def compare(example: Example) -> str | None:
    """The difference between what was printed and what the page shows, if there is one."""
    shown = example.parsed.strip().splitlines()
    printed = example.namespace.pop("__printed__", "").strip().splitlines()
    return "\n".join(difflib.unified_diff(shown, printed, "shown", "printed", lineterm="")) or None


_python = PythonCodeBlockParser(doctest_optionflags=ELLIPSIS)
_python.codeblock_parser = CodeBlockParser("python", run)

pytest_collect_file = Sybil(
    parsers=[_python, CodeBlockParser("text", compare)],
    patterns=["README.md", "docs/**/*.md"],
).pytest()
