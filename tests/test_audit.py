"""audit: what learns, what does not, and what is wrong; nothing is changed."""

from __future__ import annotations

import ast
import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import freezekit as fk
from conftest import CompareGolden
from freezekit import DEFAULT_CHECKS
from freezekit._audit.findings import Severity
from freezekit._audit.tree import ModuleRow
from freezekit.errors import AuditFailedError, FreezekitWarning, UnmatchedPatternError
from zoo import (
    BY_NAME,
    ZOO,
    ClassToken,
    Encoder,
    NormZoo,
    ParameterLists,
    SharedTwice,
    Specimen,
    StorageTied,
    TiedLM,
    snapshot,
)


def frozen(model: nn.Module) -> nn.Module:
    """The model, with all parameters frozen by hand."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    return model


def with_head(model: nn.Module) -> nn.ModuleDict:
    """A frozen backbone below a head that learns."""
    return nn.ModuleDict({"backbone": frozen(model), "head": nn.Linear(2, 1)})


def codes(model: nn.Module) -> list[str]:
    """Codes of the findings about a model."""
    return [finding.code for finding in fk.audit(model).findings]


def finding_of(model: nn.Module, code: str) -> fk.Finding:
    """The one finding with this code."""
    (finding,) = (finding for finding in fk.audit(model).findings if finding.code == code)
    return finding


# -- totals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("specimen", ZOO, ids=lambda specimen: specimen.name)
def test_totals_are_those_counted_by_hand(specimen: Specimen) -> None:
    """Each memory counts once; what cannot learn counts as frozen."""
    report = fk.audit(specimen.make())
    assert (report.tensors, report.total) == (specimen.tensors, specimen.numel)
    assert report.parameter_bytes == specimen.nbytes
    assert report.frozen == specimen.untrainable


@pytest.mark.parametrize("specimen", ZOO, ids=lambda specimen: specimen.name)
@pytest.mark.parametrize("half", [False, True], ids=["whole", "half"])
def test_columns_add_up_to_the_totals(specimen: Specimen, half: bool) -> None:
    """The outermost rows add up to the totals, and rows below an opened one add up to it."""
    model = specimen.make()
    if half:
        for index, parameter in enumerate(model.parameters()):
            parameter.requires_grad = parameter.requires_grad and index % 3 == 0
    report = fk.audit(model)
    outermost = [row for row in report.rows if row.depth == 0]
    assert sum(row.tensors for row in outermost) == report.tensors
    assert sum(row.numel for row in outermost) == report.total
    assert sum(row.trainable for row in outermost) == report.trainable
    assert sum(row.nbytes for row in outermost) == report.parameter_bytes
    for index, row in enumerate(report.rows):
        if row.opened:
            below = children_of(report.rows, index)
            assert sum(child.numel for child in below) == row.numel
            assert sum(child.trainable for child in below) == row.trainable
            assert sum(child.nbytes for child in below) == row.nbytes
            assert sum(child.held for child in below) <= row.held


def children_of(rows: tuple[ModuleRow, ...], index: int) -> list[ModuleRow]:
    """The rows right below ``rows[index]``."""
    found = []
    for row in rows[index + 1 :]:
        if row.depth <= rows[index].depth:
            break
        if row.depth == rows[index].depth + 1:
            found.append(row)
    return found


@pytest.mark.parametrize(
    "specimen",
    [specimen for specimen in ZOO if specimen.name != "batch-norm-alone"],
    ids=lambda specimen: specimen.name,
)
@pytest.mark.filterwarnings("ignore::freezekit.errors.UninitializedParameterWarning")
def test_held_modules_add_up(specimen: Specimen) -> None:
    """The held column counts every module that is held."""
    model = specimen.make()
    fk.freeze(model)
    assert sum(row.held for row in fk.audit(model).rows if row.depth == 0) == specimen.held


def test_a_model_that_is_itself_held_is_told() -> None:
    """The root has no row of its own; that it is held is told all the same."""
    model = BY_NAME["batch-norm-alone"].make()
    assert fk.freeze(model).held == ("",)
    assert "held" in str(fk.audit(model))


def test_bytes_of_buffers_and_of_what_learns() -> None:
    """Buffers are counted apart; trainable bytes are those of trainable tensors."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    frozen(model[0])
    report = fk.audit(model)
    assert report.buffer_bytes == 2 * 4 + 2 * 4 + 8
    assert (report.trainable_bytes, report.trainable_tensors) == (16, 2)


def test_odd_layouts_are_counted_and_told() -> None:
    """Sharded, packed and uninitialised tensors are noted."""
    for name, note in (
        ("zero-3", "sharded: 2 tensors, counted whole"),
        ("four-bit", "packed: 1 tensor; parameters are counted unpacked, bytes as packed"),
        ("lazy", "uninitialised: 0.weight, 0.bias, 1.weight and 1 more; the counts are lower"),
        ("tied", "tied: wte.weight = lm_head.weight"),
    ):
        assert note in str(fk.audit(BY_NAME[name].make()))


def test_many_ties_are_counted() -> None:
    """Ten ties are listed in the text, the others counted; the report has them all."""
    shared = [nn.Parameter(torch.zeros(1)) for _ in range(12)]
    model = nn.ModuleDict({"a": nn.ParameterList(shared), "b": nn.ParameterList(shared)})
    report = fk.audit(model)
    assert len(report.tied) == 12
    assert str(report).count("tied: a.") == 10
    assert "\ntied: 2 more\n" in str(report)


def test_a_wrappers_rows_are_those_of_what_it_wraps() -> None:
    """A wrapper is looked through: no row, no prefix."""
    model = Encoder(2)
    assert fk.audit(nn.DataParallel(model)).rows == fk.audit(model).rows


def test_ties_are_listed_with_all_names() -> None:
    """Each tied tensor has its names, first name first."""
    assert fk.audit(TiedLM()).tied == (("wte.weight", "lm_head.weight"),)
    assert fk.audit(SharedTwice()).tied[0] == (
        "first.0.weight",
        "second.0.weight",
        "inner.third.0.weight",
    )


def test_a_flag_set_by_hand_is_seen() -> None:
    """The model is the only truth, whoever froze it."""
    model = Encoder(2)
    frozen(model.encoder)
    report = fk.audit(model)
    assert (report.trainable, report.frozen) == (9, 32)


# -- the tree ----------------------------------------------------------------------------------


def rows_of(model: nn.Module) -> list[tuple[str, int, str, int]]:
    """Name, depth, type and count of each row."""
    return [(row.name, row.depth, row.type_name, row.count) for row in fk.audit(model).rows]


def test_alike_blocks_are_one_row() -> None:
    """Twelve layers alike are ``encoder.layer[0:12]``."""
    assert rows_of(Encoder(12)) == [
        ("embeddings", 0, "Embedding", 1),
        ("encoder.layer[0:12]", 0, "Layer", 12),
        ("pooler", 0, "Linear", 1),
    ]


def test_blocks_that_differ_are_rows_of_their_own() -> None:
    """A layer that is frozen, or in another mode, is told apart."""
    model = Encoder(12)
    frozen(model.encoder.layer[3])
    model.encoder.layer[11].eval()
    names = [(row.name, row.trainable, row.mode) for row in fk.audit(model).rows if row.depth == 1]
    assert names == [
        ("[0:3]", 48, "train"),
        ("3", 0, "train"),
        ("[4:11]", 112, "train"),
        ("11", 16, "eval"),
    ]


def test_a_part_that_is_half_trainable_is_opened_to_the_parameter() -> None:
    """Where some parameters learn and some do not, rows go down to them."""
    model = Encoder(2)
    frozen(model)
    for layer in model.encoder.layer:
        layer.get_submodule("attention.query").bias.requires_grad = True
    rows = [(row.name, row.depth, row.trainable, row.count) for row in fk.audit(model).rows]
    assert ("query", 2, 4, 2) in rows
    assert ("bias", 3, 4, 2) in rows
    assert ("weight", 3, 0, 2) in rows


def test_parameters_of_the_root_have_rows() -> None:
    """A class token is a row with its dtype and shape."""
    assert rows_of(ClassToken())[:2] == [
        ("cls_token", 0, "f32[1,1,2]", 1),
        ("pos_embed", 0, "f32[1,3,2]", 1),
    ]


def test_alike_parameters_of_a_list_are_one_row() -> None:
    """An opened ParameterList folds like a ModuleList."""
    model = ParameterLists()
    model.prompts[0].requires_grad = False
    assert rows_of(model)[:3] == [
        ("prompts", 0, "ParameterList", 1),
        ("0", 1, "f32[2]", 1),
        ("[1:4]", 1, "f32[2]", 3),
    ]


def test_a_tied_row_says_what_it_is_tied_to() -> None:
    """A tensor's second place counts nothing there, and names the first."""
    (row,) = (row for row in fk.audit(TiedLM()).rows if row.name == "lm_head")
    assert (row.tied_to, row.numel, row.tensors) == ("wte.weight", 0, 0)
    (line,) = (line for line in str(fk.audit(TiedLM())).split("\n") if line.startswith("lm_head"))
    assert line.split()[:3] == ["lm_head", "Linear", "tied"]


def test_modules_in_both_modes_are_mixed() -> None:
    """A subtree with modules in train and in eval mode is mixed."""
    block = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 2), nn.Dropout().eval())
    assert fk.audit(nn.ModuleDict({"block": block})).rows[0].mode == "mixed"


def test_a_mode_in_a_folded_chain_is_not_lost() -> None:
    """A row that stands for a chain of modules tells the modes of all that it stands for."""
    block = nn.Sequential(nn.Linear(1, 1), nn.Dropout().eval())
    assert fk.audit(nn.ModuleDict({"block": block})).rows[0].mode == "mixed"


def test_held_modules_have_a_column() -> None:
    """What is held is counted in a column that is there only then."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    assert "held" not in str(fk.audit(model))
    fk.freeze(model, ["0", "1"])
    text = str(fk.audit(model))
    assert text.splitlines()[1].endswith("mode   held")
    assert "held: modules held in eval under any train(), by freezekit.freeze" in text


def test_a_held_module_in_a_folded_chain_is_counted() -> None:
    """A held module without parameters of its own, above a single child, is still counted."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(2))
            self.inner = nn.Linear(2, 2)

    model = nn.ModuleDict({"scale": Normalised(), "head": nn.Linear(2, 1)})
    assert fk.freeze(model, "scale").held == ("scale",)
    assert sum(row.held for row in fk.audit(model).rows if row.depth == 0) == 1


def test_a_key_with_leading_zeros_keeps_them() -> None:
    """Rows name modules as the model does."""
    names = [row.name for row in fk.audit(BY_NAME["gapped-numbers"].make()).rows]
    assert "07" in names or "07,08" in names
    assert "[7:9]" not in names


# -- findings ----------------------------------------------------------------------------------


def test_a_model_that_trains_as_a_whole_has_no_findings() -> None:
    """Nothing is wrong with a fresh model, whatever is in it."""
    for specimen in ZOO:
        report = fk.audit(specimen.make())
        assert (report.findings, report.ok) == ((), True)
        report.raise_for("note")


def test_nothing_trainable_is_an_error() -> None:
    """FK101 tells how much is frozen, and how to unfreeze the last part."""
    finding = finding_of(frozen(Encoder(2)), "FK101")
    assert finding.severity == "error"
    assert finding.cause == "All 41 parameters (15 tensors) are frozen."
    assert finding.mend == (
        'Unfreeze what is to learn, such as freezekit.unfreeze(model, "pooler").'
    )


@pytest.mark.parametrize(
    ("model", "mend"),
    [
        pytest.param(
            nn.ReLU(), "Give it parameters, or audit the model that has them.", id="empty"
        ),
        pytest.param(
            frozen(nn.Linear(1, 1)),
            'Unfreeze what is to learn, such as freezekit.unfreeze(model, "*").',
            id="one-layer",
        ),
    ],
)
def test_nothing_trainable_in_small_models(model: nn.Module, mend: str) -> None:
    """An empty model, and one without named parts, get a mend that fits."""
    assert finding_of(model, "FK101").mend == mend


@pytest.mark.parametrize("name", ["bn1d", "bn2d", "bn3d", "sync", "instance"])
def test_statistics_that_move_in_a_frozen_part_are_an_error(name: str) -> None:
    """FK201 finds every norm with statistics that is frozen and in train mode."""
    model = NormZoo()
    frozen(model.get_submodule(name))
    finding = finding_of(model, "FK201")
    assert (finding.severity, finding.fqns) == ("error", (name,))
    assert finding.mend == f'Hold them: freezekit.freeze(model, "{name}").'


def test_a_norm_without_parameters_moves_in_a_frozen_part() -> None:
    """BatchNorm without affine belongs to what is around it."""
    assert finding_of(with_head(BY_NAME["batch-norm-without-affine"].make()), "FK201").fqns == (
        "backbone.1",
    )


@pytest.mark.parametrize("name", ["spectral-norm", "old-spectral-norm"])
def test_power_iteration_moves_in_a_frozen_part(name: str) -> None:
    """Spectral norm's vectors are statistics too."""
    assert "FK201" in codes(with_head(BY_NAME[name].make()))


def test_norms_that_learn_or_are_in_eval_do_not_move() -> None:
    """A trainable norm, one in eval and one that is held are no findings."""
    assert codes(NormZoo()) == []
    assert codes(with_head(NormZoo()).eval()) == []
    model = NormZoo()
    fk.freeze(model, "*bn*")
    assert codes(model.train()) == []


def test_a_norm_that_does_not_track_is_a_warning() -> None:
    """With track_running_stats off, buffers stand still, but outputs are not the checkpoint's."""
    model = with_head(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    norm: Any = model.get_submodule("backbone.1")
    norm.track_running_stats = False
    inputs = torch.randn(8, 2) + 3
    backbone = model["backbone"]
    assert not torch.allclose(backbone.train()(inputs), copy.deepcopy(backbone).eval()(inputs))
    finding = finding_of(model, "FK204")
    assert (finding.severity, finding.fqns) == ("warning", ("backbone.1",))
    assert codes(model) == ["FK204"]


def test_other_saved_buffers_are_a_note() -> None:
    """A module of unknown kind with saved floating point buffers may move them: a note."""
    block = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    block[1].register_buffer("ema", torch.zeros(2))
    finding = finding_of(with_head(block), "FK202")
    assert (finding.severity, finding.fqns) == ("note", ("backbone.1",))


@pytest.mark.parametrize(
    ("module", "fqn", "rate"),
    [
        pytest.param(nn.Dropout(0.25), "backbone.1", "p=0.25", id="dropout"),
        pytest.param(nn.AlphaDropout(0.5), "backbone.1", "p=0.5", id="alpha"),
        pytest.param(nn.Dropout2d(0.5), "backbone.1", "p=0.5", id="dropout2d"),
        pytest.param(nn.RReLU(0.25, 0.75), "backbone.1", "p=0.5", id="rrelu"),
        pytest.param(nn.GRU(2, 1, num_layers=2, dropout=0.1), "backbone.1", "p=0.1", id="gru"),
        pytest.param(
            nn.MultiheadAttention(2, 1, dropout=0.3), "backbone.1", "p=0.3", id="attention"
        ),
    ],
)
def test_dropout_in_a_frozen_part_is_a_warning(module: nn.Module, fqn: str, rate: str) -> None:
    """FK203 finds random layers of every kind, with their rate."""
    finding = finding_of(with_head(nn.Sequential(nn.Linear(2, 2), module)), "FK203")
    assert (finding.severity, finding.fqns) == ("warning", (fqn,))
    assert f"({rate})" in finding.cause


def one_layer_gru() -> nn.Module:
    """A net of one layer with a rate of dropout, which is applied between layers alone."""
    model = nn.GRU(2, 1)
    model.dropout = 0.5
    return model


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(nn.Dropout(0.0), id="p-0"),
        pytest.param(nn.Dropout(0.5).eval(), id="eval"),
        pytest.param(one_layer_gru(), id="one-layer-gru"),
        pytest.param(nn.MultiheadAttention(2, 1), id="attention"),
    ],
)
def test_what_does_not_drop_is_no_finding(module: nn.Module) -> None:
    """A rate of 0, eval mode, and a recurrent net of one layer drop nothing."""
    assert codes(with_head(nn.Sequential(nn.Linear(2, 2), module))) == []


def test_dropout_where_something_learns_is_no_finding() -> None:
    """Dropout belongs to what is around it: in a trainable part it is as it should be."""
    model = Encoder(2)
    frozen(model.embeddings)
    assert codes(model) == []


def dropping() -> nn.Module:
    """A frozen part that drops at random."""
    return frozen(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))


def partly_frozen(*names: str) -> nn.Module:
    """An encoder of which these parts are frozen."""
    model = Encoder(4)
    for name in names:
        frozen(model.get_submodule(name))
    return model


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: with_head(dropping()), id="named"),
        pytest.param(lambda: nn.Sequential(dropping(), nn.Linear(2, 1)), id="numbered"),
        pytest.param(
            lambda: nn.Sequential(dropping(), dropping(), nn.Linear(2, 1)), id="numbered-slice"
        ),
        pytest.param(lambda: partly_frozen("encoder.layer.0"), id="layer"),
        pytest.param(lambda: partly_frozen("encoder.layer.0", "encoder.layer.1"), id="layer-slice"),
        pytest.param(
            lambda: partly_frozen("encoder.layer.0.attention", "encoder.layer.0.LayerNorm"),
            id="below-a-layer",
        ),
        pytest.param(
            lambda: nn.ModuleDict(
                {"a": dropping(), "b": dropping(), "c": dropping(), "head": nn.Linear(2, 1)}
            ),
            id="three-parts",
        ),
        pytest.param(
            lambda: nn.ModuleDict({"my-part": dropping(), "head": nn.Linear(2, 1)}), id="hyphen"
        ),
        pytest.param(lambda: frozen(Encoder(3)), id="all"),
    ],
)
def test_the_mend_for_dropout_is_code_that_works(make: Callable[[], nn.Module]) -> None:
    """Run as it stands, the mend puts the frozen part into eval, and the finding is gone."""
    model = make()
    findings = [finding for finding in fk.audit(model).findings if finding.code == "FK203"]
    for finding in findings:
        code = finding.mend.partition(": ")[2].removesuffix(".")
        ast.parse(code)
        exec(code, {"model": model})
    assert "FK203" not in codes(model)


def test_a_gradient_on_a_frozen_parameter_is_a_warning() -> None:
    """FK301 names what an optimizer would still move."""
    model = Encoder(2)
    model.pooler.weight.grad = torch.zeros(1, 2)
    frozen(model.pooler)
    finding = finding_of(model, "FK301")
    assert (finding.severity, finding.fqns) == ("warning", ("pooler.weight",))


def test_two_flags_on_one_memory_are_an_error() -> None:
    """FK401 finds two Parameter objects over one memory of which one learns."""
    model = StorageTied()
    model.decode.weight.requires_grad = False
    finding = finding_of(model, "FK401")
    assert (finding.severity, finding.fqns) == ("error", ("encode.weight", "decode.weight"))


@pytest.mark.parametrize(
    "code", ["FK201", "FK202", "FK204", "FK301", "FK401"], ids=lambda code: code.lower()
)
def test_the_mend_is_code_that_works(code: str) -> None:
    """Run as it stands, a mend that freezes makes the finding go."""
    models: dict[str, nn.Module] = {
        "FK201": with_head(NormZoo()),
        "FK202": with_head(nn.Sequential(nn.Linear(2, 2), nn.Identity())),
        "FK204": with_head(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
        "FK301": Encoder(12),
        "FK401": StorageTied(),
    }
    model = models[code]
    if code == "FK202":
        model.get_submodule("backbone.1").register_buffer("ema", torch.zeros(2))
    if code == "FK204":
        norm: Any = model.get_submodule("backbone.1")
        norm.track_running_stats = False
    if code == "FK301":
        frozen(model.get_submodule("encoder"))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    if code == "FK401":
        model.get_parameter("decode.weight").requires_grad = False
    found = re.search(r"freezekit\.freeze\(.*?\)(?=\.| sets| takes)", finding_of(model, code).mend)
    assert found is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FreezekitWarning)
        exec(found[0], {"freezekit": fk, "model": model})
    assert code not in codes(model)


def test_a_mend_with_many_parts_names_all_of_them() -> None:
    """The code of a mend mends everything that the finding is about, not the first three."""
    names = ["a", "b", "c", "d", "e"]
    model = nn.ModuleDict({name: frozen(nn.BatchNorm1d(2)) for name in names})
    model["head"] = nn.Linear(1, 1)
    mend = finding_of(model, "FK201").mend
    assert "..." not in mend.partition("freeze(")[2]


def test_a_mend_for_keys_that_are_numbers_with_gaps_matches() -> None:
    """Where positions are not numbers, the mend still names what is there."""
    model = nn.ModuleDict(
        {
            "by_size": nn.ModuleDict({key: frozen(nn.BatchNorm1d(2)) for key in ("5", "6")}),
            "head": nn.Linear(1, 1),
        }
    )
    found = re.search(r"freezekit\.freeze\(model, (.*)\)\.$", finding_of(model, "FK201").mend)
    assert found is not None
    patterns = ast.literal_eval(found[1])
    try:
        selection = fk.select(model, patterns)
    except UnmatchedPatternError as error:
        pytest.fail(f"the mend matches nothing: {error}")
    assert len(selection.parameters) == 4


def test_findings_come_worst_first() -> None:
    """Errors, then warnings, then notes."""
    model = with_head(nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Identity()))
    model.get_submodule("backbone.2").register_buffer("ema", torch.zeros(2))
    frozen(model["head"])
    found = [(finding.code, finding.severity) for finding in fk.audit(model).findings]
    assert found == [("FK101", "error"), ("FK203", "warning"), ("FK202", "note")]


@pytest.mark.parametrize(
    ("ignore", "left"),
    [((), ["FK101", "FK203"]), (("FK203",), ["FK101"]), ("FK203", ["FK101"])],
    ids=["nothing", "one", "a-string"],
)
def test_findings_may_be_ignored(ignore: Any, left: list[str]) -> None:
    """Codes in ignore= are left out."""
    model = frozen(Encoder(2))
    assert [finding.code for finding in fk.audit(model, ignore=ignore).findings] == left


@pytest.mark.parametrize("ignore", ["dropout", "fk203", "FK20", ("FK203", 203), "FK999"], ids=str)
def test_a_code_that_no_check_has_is_an_error(ignore: Any) -> None:
    """A misspelt code would ignore nothing: it is refused."""
    with pytest.raises(ValueError, match=r"^ignore: expected codes such as 'FK203', got "):
        fk.audit(Encoder(2), ignore=ignore)


def test_every_check_says_what_it_finds_and_why() -> None:
    """A check's docstring begins with its code."""
    for check in DEFAULT_CHECKS:
        assert re.match(r"FK\d{3}: ", check.__doc__ or "")


# -- raising -----------------------------------------------------------------------------------


def test_raise_for_raises_at_its_severity_and_above() -> None:
    """With a warning found, "error" passes, "warning" and "note" raise."""
    report = fk.audit(with_head(nn.Sequential(nn.Linear(2, 2), nn.Dropout())))
    report.raise_for()
    message = r"^ModuleDict: 1 finding\n  FK203 warning: dropout is active .* \(backbone\.1\)\n    "
    severities: tuple[Severity, ...] = ("warning", "note")
    for severity in severities:
        with pytest.raises(AuditFailedError, match=message) as caught:
            report.raise_for(severity)
        assert caught.value.report is report
    assert not report.ok


def test_raise_for_takes_a_severity() -> None:
    """Another word is an error that lists the three."""
    with pytest.raises(ValueError, match=r"^severity: expected one of \('error', 'warning', 'no"):
        fk.audit(Encoder(2)).raise_for("fatal")  # type: ignore[arg-type]


# -- nothing is changed ------------------------------------------------------------------------


@pytest.mark.parametrize("specimen", ZOO, ids=lambda specimen: specimen.name)
def test_audit_changes_nothing(specimen: Specimen) -> None:
    """Flags, gradients, modes, buffers and the random state stay as they are."""
    model = specimen.make()
    rng = torch.random.get_rng_state()
    before = snapshot(model)
    buffers = [(name, id(buffer), buffer._version) for name, buffer in model.named_buffers()]
    weights = [parameter._version for parameter in model.parameters()]
    fk.audit(model)
    assert snapshot(model) == before
    assert [(n, id(b), b._version) for n, b in model.named_buffers()] == buffers
    assert [parameter._version for parameter in model.parameters()] == weights
    assert torch.equal(rng, torch.random.get_rng_state())


def test_audit_does_not_run_the_model() -> None:
    """Neither forward nor hooks are called."""

    class Loud(nn.Module):
        def forward(self, *inputs: Any) -> Any:
            raise AssertionError("forward was called")

    fk.audit(nn.Sequential(Loud(), nn.Linear(1, 1)))


# -- golden reports ----------------------------------------------------------------------------

NUMBER = re.compile(r"^[\d,]+$")


def check_columns(text: str) -> None:
    """The outermost rows of a printed table add up to its total, column by column."""
    lines = text.split("\n")
    start, stop = (i for i, line in enumerate(lines) if line and not line.strip("-"))
    header = lines[start - 1]
    names = ("params", "trainable", "frozen")
    ends = [header.index(name) + len(name) for name in names]
    for end in ends:
        cells = [line[:end].rsplit("  ", 1)[-1].strip() for line in lines[start + 1 : stop]]
        outermost = [
            int(cell.replace(",", ""))
            for cell, line in zip(cells, lines[start + 1 : stop], strict=True)
            if not line.startswith(" ") and NUMBER.match(cell)
        ]
        total = lines[stop + 1][:end].rsplit("  ", 1)[-1].strip()
        assert sum(outermost) == int(total.replace(",", ""))


def half_frozen_encoder() -> nn.Module:
    """Eight of twelve layers frozen by hand, dropout on, a gradient left behind."""
    model = Encoder(12)
    for layer in model.encoder.layer[:8]:
        frozen(layer)
    model.get_parameter("encoder.layer.0.LayerNorm.weight").grad = torch.zeros(2)
    return model


def held_norms() -> nn.Module:
    """Blocks with norms, the first ones frozen and held."""
    blocks = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(6))
    model = nn.ModuleDict({"blocks": nn.Sequential(*blocks), "head": nn.Linear(2, 1)})
    fk.freeze(model, "blocks[:4]")
    return model


GOLDEN = {
    "audit_encoder": half_frozen_encoder,
    "audit_norms": held_norms,
    "audit_tied": TiedLM,
    "audit_class_token": lambda: frozen(ClassToken()),
    "audit_parameter_lists": ParameterLists,
    "audit_shared": SharedTwice,
    "audit_integers": BY_NAME["integers"].make,
    "audit_four_bit": BY_NAME["four-bit"].make,
    "audit_lazy": BY_NAME["lazy"].make,
    "audit_gpt2": BY_NAME["gpt2"].make,
    "audit_empty": nn.ReLU,
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_report_reads_well(name: str, golden: CompareGolden) -> None:
    """The text of an audit is the golden one, and its columns add up."""
    text = str(fk.audit(GOLDEN[name]()))
    golden(text, name)
    check_columns(text)


def test_the_check_of_columns_can_fail() -> None:
    """A table that does not add up is found out."""
    text = str(fk.audit(copy.deepcopy(TiedLM())))
    check_columns(text)
    with pytest.raises(AssertionError, match="assert"):
        check_columns(re.sub(r"(body +Linear +)6", r"\g<1>7", text))
