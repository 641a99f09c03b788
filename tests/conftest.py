"""What the tests share: golden files, and a switch that writes them anew."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest

GOLDEN = Path(__file__).parent / "golden"


class CompareGolden(Protocol):
    """Compares a text with ``tests/golden/<name>.txt``."""

    def __call__(self, text: str, name: str) -> None: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch that accepts what the reports say now."""
    parser.addoption(
        "--overwrite-golden",
        action="store_true",
        help="write the golden files anew; read the difference before it is committed",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> CompareGolden:
    """Compare a text with its golden file, or write the file with ``--overwrite-golden``."""

    def compare(text: str, name: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--overwrite-golden"):
            path.write_text(text + "\n", encoding="utf-8")
        assert path.exists(), f"no {path.name} yet: run with --overwrite-golden"
        assert text + "\n" == path.read_text(encoding="utf-8")

    return compare
