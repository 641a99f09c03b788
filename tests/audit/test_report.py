"""The report as JSON, SARIF, HTML and text; the page of all codes."""

from __future__ import annotations

import html
import io
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import freezekit as fk
from audit_support import freeze_by_hand
from freezekit._audit.pages import findings_page
from freezekit._audit.running import check_doc

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "findings.md"


def model_with_findings() -> nn.Module:
    model = nn.ModuleDict(
        {
            "body": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()),
            "[x] & <y>": nn.BatchNorm1d(2),
            "head": nn.Linear(2, 1),
        }
    )
    freeze_by_hand(model["body"], model["[x] & <y>"])
    return model


@pytest.fixture
def report() -> fk.AuditReport:
    return fk.audit(model_with_findings())


# -- JSON --------------------------------------------------------------------------------------


def test_json_is_the_dictionary(report: fk.AuditReport) -> None:
    """All of the report survives JSON."""
    found = json.loads(report.to_json())
    assert found == report.to_dict()
    assert found["schema"] == "freezekit.AuditReport/1"
    assert [finding["code"] for finding in found["findings"]] == ["FK201", "FK203"]
    assert found["step"] is None


def test_a_step_is_in_the_dictionary() -> None:
    """Its figures are, too."""
    model = nn.Linear(2, 1)
    step = fk.audit_step(model, lambda: model(torch.ones(1, 2)).sum().backward()).to_dict()["step"]
    assert (step["gradients"], step["snapshot"], step["snapshot_bytes"]) == (2, "copy", 12)


def test_reports_pickle_and_compare(report: fk.AuditReport) -> None:
    """A report is a value."""
    assert pickle.loads(pickle.dumps(report)) == report
    assert fk.audit(model_with_findings()) == report


# -- SARIF -------------------------------------------------------------------------------------


def strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


def test_sarif_has_what_the_format_asks_for(report: fk.AuditReport) -> None:
    """Version, tool, rules, results that point at their rules, messages, levels, locations."""
    log = json.loads(json.dumps(report.to_sarif(file="src/train me.py", line=7)))
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert (driver["name"], driver["version"]) == ("freezekit", fk.__version__)
    rules = driver["rules"]
    assert [rule["id"] for rule in rules] == ["FK201", "FK203"]
    for rule in rules:
        assert rule["shortDescription"]["text"].endswith(".")
        assert {"text", "markdown"} == rule["help"].keys()
        assert "`" not in rule["help"]["text"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in {"error", "warning", "note"}
        assert result["message"]["text"]
        (location,) = result["locations"]
        physical = location["physicalLocation"]
        assert physical["artifactLocation"]["uri"] == "src/train%20me.py"
        assert physical["region"]["startLine"] == 7
        assert location["logicalLocations"]
        assert re.fullmatch(r"[0-9a-f]{64}", result["partialFingerprints"]["freezekit/v1"])
    assert all(strings_in(log))


def test_sarif_of_nothing_is_a_run_without_results() -> None:
    """A host closes its alerts when a run has none."""
    (run,) = fk.audit(nn.Linear(1, 1)).to_sarif()["runs"]
    assert run["results"] == []
    assert run["tool"]["driver"]["rules"] == []


def test_a_finding_keeps_its_fingerprint(report: fk.AuditReport) -> None:
    """The same finding is the same alert, wherever it is shown; another model's is another."""

    def prints(log: dict[str, Any]) -> list[str]:
        found = log["runs"][0]["results"]
        return [result["partialFingerprints"]["freezekit/v1"] for result in found]

    assert prints(report.to_sarif(file="a.py")) == prints(report.to_sarif(file="b.py", line=3))
    other = model_with_findings()
    freeze_by_hand(other.get_submodule("head"))
    assert prints(fk.audit(other).to_sarif())[0] not in prints(report.to_sarif())


@pytest.mark.parametrize("file", ["/etc/passwd", "../train.py", "a/../../b.py", "", "C:\\a.py"])
def test_sarif_files_are_relative(report: fk.AuditReport, file: str) -> None:
    """A path that is not in the repository is refused."""
    with pytest.raises(ValueError, match=r"^file: expected a path relative to the repository's"):
        report.to_sarif(file=file)


def test_sarif_lines_begin_at_one(report: fk.AuditReport) -> None:
    """As the format has it."""
    with pytest.raises(ValueError, match=r"^line: expected 1 or more, got 0$"):
        report.to_sarif(file="a.py", line=0)


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".sarif", ".html", ".txt"])
def test_files_are_written_whole(report: fk.AuditReport, suffix: str, tmp_path: Path) -> None:
    """The suffix tells how; nothing is left beside it; an old file is replaced."""
    path = tmp_path / f"audit{suffix}"
    path.write_text("old")
    report.write(path, file="train.py")
    text = path.read_text(encoding="utf-8")
    if suffix in {".json", ".sarif"}:
        expected = report.to_dict() if suffix == ".json" else report.to_sarif(file="train.py")
        assert json.loads(text) == expected
    elif suffix == ".html":
        assert html.escape("[x] & <y>") in text
        assert "<y>" not in text
    else:
        assert text == f"{report}\n"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_another_suffix_is_refused(report: fk.AuditReport, tmp_path: Path) -> None:
    """With those that there are."""
    with pytest.raises(ValueError, match=r"suffix of .json, .sarif, .html, .txt, got 'a.xml'$"):
        report.write(tmp_path / "a.xml")


def test_nothing_is_left_where_writing_fails(report: fk.AuditReport, tmp_path: Path) -> None:
    """An error leaves neither the file nor half of one."""
    (tmp_path / "audit.txt").mkdir()
    with pytest.raises(OSError, match=r"."):
        report.write(tmp_path / "audit.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["audit.txt"]


def test_all_renderings_tell_all_findings(report: fk.AuditReport) -> None:
    """Text, rich and HTML have every code, cause and mend."""
    from rich.console import Console

    shown = io.StringIO()
    Console(width=400, file=shown).print(report)
    texts = [
        " ".join(str(report).split()),
        " ".join(shown.getvalue().split()),
        html.unescape(" ".join(re.sub(r"<[^>]+>", " ", report._repr_html_()).split())),
    ]
    for finding in report.findings:
        for part in (finding.code, finding.title, finding.cause, finding.mend):
            assert all(" ".join(part.split()) in text for text in texts), part


# -- the page ----------------------------------------------------------------------------------


def test_the_page_of_codes_is_current(request: pytest.FixtureRequest) -> None:
    """The page is what the checks' docstrings say; ``--overwrite-golden`` makes it anew."""
    if request.config.getoption("--overwrite-golden"):
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(findings_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == findings_page()


def test_every_check_has_a_code_of_its_own_and_says_why() -> None:
    """One code a check, in order of its group, with a sentence, and a reason besides."""
    docs = [check_doc(check) for check in fk.DEFAULT_STEP_CHECKS]
    found = [doc for doc in docs if doc is not None]
    assert len(found) == len(docs)
    codes = [doc.code for doc in found]
    assert len(set(codes)) == len(codes)
    for doc in found:
        assert re.fullmatch(r"FK[1-8]\d\d", doc.code)
        assert doc.summary.endswith(".")
        assert doc.body, f"{doc.code} says what, not why"
        assert f"\n### {doc.code}\n" in findings_page()
    assert set(fk.DEFAULT_CHECKS) < set(fk.DEFAULT_STEP_CHECKS)
