"""Reports are values: short to show, whole to print, plain to store."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

import freezekit as fk
from freezekit._report import Report
from freezekit._tables import Section
from test_tables import described_cells, html_cells, words
from zoo import BY_NAME, ZOO, Encoder, OddNames, Specimen, TiedLM


def make_bert() -> nn.Module:
    """BERT-base's structure without its weights."""
    from transformers import BertConfig, BertModel

    with torch.device("meta"):
        model: nn.Module = BertModel(BertConfig())
    return model


def freeze_norms() -> Report:
    """A freeze report with most of what such a report can tell."""
    model = BY_NAME["norms"].make()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fk.freeze(model, "*bn*", exclude="bn3d", optimizer=optimizer)


def audit_half() -> Report:
    """An audit report with findings."""
    model = Encoder(12)
    model.encoder.requires_grad_(requires_grad=False)
    model.embeddings.weight.grad = torch.zeros(3, 2)
    model.embeddings.weight.requires_grad = False
    return fk.audit(model)


REPORTS: dict[str, Callable[[], Report]] = {
    "select": lambda: fk.select(TiedLM(), "*", exclude="lm_head"),
    "select-odd": lambda: fk.select(OddNames(), ["parts.<b>*", r"re:parts\.\[red\]\..*"]),
    "freeze": freeze_norms,
    "freeze-odd": lambda: fk.freeze(OddNames(), ["parts.<b>*", lambda fqn, p: "[red]" in fqn]),
    "audit": audit_half,
    "audit-odd": lambda: fk.audit(OddNames()),
    "audit-empty": lambda: fk.audit(nn.ReLU()),
}


@pytest.fixture(params=list(REPORTS))
def report(request: pytest.FixtureRequest) -> Report:
    """Each kind of report, plain and odd."""
    return REPORTS[request.param]()


def sections_of(report: Report) -> tuple[Section, ...]:
    """What a report says of itself."""
    return report._sections()


# -- three renderings of one description -------------------------------------------------------


def test_text_is_within_100_columns(report: Report) -> None:
    """Every line of every report fits, and ends without blanks."""
    for line in str(report).split("\n"):
        assert len(line) <= 100
        assert line == line.rstrip()


def test_rich_shows_what_the_text_shows(report: Report) -> None:
    """Word for word, rich prints the report's text."""
    console = Console(file=StringIO(), width=200, no_color=True)
    with console.capture() as capture:
        console.print(report)
    assert words(capture.get()) == words(str(report))


def test_html_shows_what_is_described(report: Report) -> None:
    """Cell for cell, the HTML holds the report's description."""
    assert html_cells(sections_of(report)) == described_cells(sections_of(report))
    assert "<b>" not in report._repr_html_()


def test_odd_names_come_through_every_renderer() -> None:
    """Brackets, angle brackets and ampersands in FQNs are shown as they are."""
    report = fk.audit(OddNames())
    console = Console(file=StringIO(), width=200, no_color=True)
    with console.capture() as capture:
        console.print(report)
    html = " ".join(html_cells(sections_of(report)))
    for name in ("layer[x]", "<b>bold</b>", "[red]", "a & b"):
        assert name in str(report)
        assert name in capture.get()
        assert name in html


def test_a_report_of_a_very_wide_model_fits() -> None:
    """Long names, long classes, many dtypes and large counts still make 100 columns."""

    class AVeryLongClassNameForABlockOfATransformerOfTheNewestKind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                for index, dtype in enumerate(
                    (
                        torch.float32,
                        torch.bfloat16,
                        torch.float8_e4m3fn,
                        torch.float8_e5m2,
                        torch.float8_e8m0fnu,
                        torch.uint8,
                    )
                ):
                    tensor = torch.empty(2**20, 2**10, dtype=dtype)
                    self.register_parameter(
                        f"a_long_name_{index}", nn.Parameter(tensor, requires_grad=False)
                    )
                self.norm = nn.BatchNorm1d(3)

    model = nn.ModuleDict(
        {
            "a_model_that_is_wrapped_in_another_model_with_a_long_name": nn.ModuleDict(
                {"and_another": AVeryLongClassNameForABlockOfATransformerOfTheNewestKind()}
            ),
            "head": nn.Linear(1, 1),
        }
    )
    fk.freeze(model, "a_model*")
    text = str(fk.audit(model))
    assert max(len(line) for line in text.split("\n")) <= 100
    assert all(line == line.rstrip() for line in text.split("\n"))


# -- values ------------------------------------------------------------------------------------


def test_the_dictionary_survives_json(report: Report) -> None:
    """to_dict is made of what JSON has, and comes back equal."""
    data = report.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["schema"] == f"freezekit.{type(report).__name__}/1"


def test_a_report_pickles_and_copies(report: Report) -> None:
    """Reports go through pickle and deepcopy, and are equal to what went in."""
    assert pickle.loads(pickle.dumps(report)) == report
    assert copy.deepcopy(report) == report


def test_a_report_cannot_be_changed(report: Report) -> None:
    """A report is what was found; its fields are not assigned to."""
    name = "action" if isinstance(report, fk.FreezeReport) else "model"
    with pytest.raises(FrozenInstanceError, match=f"^cannot assign to field '{name}'$"):
        setattr(report, name, "other")


def test_the_repr_is_one_short_line(report: Report) -> None:
    """A report in a debugger or a log is one line."""
    assert "\n" not in repr(report)
    assert len(repr(report)) < 1000


@pytest.mark.parametrize(
    "patterns",
    [
        pytest.param("*", id="everything"),
        pytest.param(["embeddings", "encoder.layer[:8]"], id="two-patterns"),
        pytest.param("*.bias", id="glob"),
        pytest.param([f"encoder.layer.{i}" for i in range(12)], id="twelve-names"),
        pytest.param(None, id="every-name"),
    ],
)
def test_the_repr_is_short_for_bert(patterns: str | list[str] | None) -> None:
    """199 tensors do not make the repr long: under 1,000 characters for BERT-base."""
    model = make_bert()
    if patterns is None:
        patterns = [name for name, _ in model.named_parameters() if "pooler" not in name]
    exclude = "pooler" if patterns == "*" else ()
    assert len(repr(fk.freeze(model, patterns, exclude=exclude))) < 1000
    assert len(repr(fk.select(model, patterns))) < 1000
    assert len(repr(fk.audit(model))) < 1000


def test_printing_is_left_to_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    """The library writes nothing by itself."""
    model = TiedLM()
    fk.select(model, "body")
    fk.freeze(model, "body")
    fk.audit(model)
    fk.unfreeze(model)
    with fk.frozen(model):
        pass
    fk.load_freeze_state(model, fk.freeze_state(model))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("specimen", ZOO, ids=lambda specimen: specimen.name)
def test_reports_of_the_whole_zoo_fit_and_survive(specimen: Specimen) -> None:
    """Each specimen's selection and audit render in 100 columns and survive JSON."""
    model = specimen.make()
    for report in (fk.select(model), fk.audit(model)):
        assert max(len(line) for line in str(report).split("\n")) <= 100
        assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
        assert html_cells(sections_of(report)) == described_cells(sections_of(report))


# -- the base class ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything(Report):
    """A report with every kind of value."""

    dtype: torch.dtype
    pairs: tuple[tuple[str, int], ...]
    by_name: dict[str, tuple[int, ...]]
    missing: int | None

    def _sections(self) -> tuple[Section, ...]:
        return (Section((f"{len(self.pairs)} pairs",)),)


def test_every_kind_of_value_becomes_plain() -> None:
    """Dtypes, tuples, dictionaries and None have a form in JSON."""
    report = Everything(
        dtype=torch.bfloat16, pairs=(("a", 1),), by_name={"b": (2, 3)}, missing=None
    )
    assert report.to_dict() == {
        "schema": "freezekit.Everything/1",
        "dtype": "bfloat16",
        "pairs": [["a", 1]],
        "by_name": {"b": [2, 3]},
        "missing": None,
    }
    assert str(report) == "1 pairs"


def test_a_report_has_no_room_for_more() -> None:
    """Reports are slotted: nothing can be attached to them."""
    assert not hasattr(fk.audit(TiedLM()), "__dict__")


def test_the_base_class_is_abstract() -> None:
    """A report that does not describe itself cannot be made."""
    with pytest.raises(TypeError, match=r"abstract method '?_sections'?"):
        Report()  # type: ignore[abstract]
