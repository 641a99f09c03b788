"""Group B: the freeze never happened, or hit the wrong things."""

from __future__ import annotations

import re
from typing import cast

import pytest
import torch
from torch import nn

from freezekit import (
    audit,
    freeze,
    freeze_state,
    load_freeze_state,
    select,
    train_only,
    unfreeze,
)
from freezekit._patterns import Patterns
from freezekit.errors import (
    AuditFailedError,
    NumberPrefixWarning,
    PatternError,
    UnmatchedPatternError,
)


def frozen_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if not p.requires_grad]


def decay(model: nn.Module, x: torch.Tensor) -> None:
    """Two steps of an optimizer that moves all that it can."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()


class Layers(nn.Module):
    """Numbered layers of two parts each, and a head: twelve layers, like BERT."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict(
            {
                "layer": nn.ModuleList(
                    nn.ModuleDict({"attention": nn.Linear(2, 2), "output": nn.Linear(2, 2)})
                    for _ in range(layers)
                )
            }
        )
        self.head = nn.Linear(2, 1)


def numbers(model: nn.Module) -> set[int]:
    """Numbers of the layers that have something frozen."""
    return {int(name.split(".")[2]) for name in frozen_names(model) if ".layer." in name}


# -- B15, B16: a wrong attribute ---------------------------------------------------------------


@pytest.mark.parametrize("typo", ["require_grad", "requires_grads", "trainable", "frozen"])
def test_misspelt_attribute_freezes_nothing_and_freeze_does(typo: str) -> None:
    """A misspelt attribute leaves a parameter trainable, and freeze is not misled by it (B15)."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in model.parameters():
        setattr(parameter, typo, False)
    before = model.get_parameter("0.weight").detach().clone()
    decay(model, torch.ones(1, 2))
    assert not torch.equal(model.get_parameter("0.weight"), before)
    assert audit(model).frozen == 0

    freeze(model, "0")
    before = model.get_parameter("0.weight").detach().clone()
    decay(model, torch.ones(1, 2))
    assert torch.equal(model.get_parameter("0.weight"), before)
    assert getattr(model.get_parameter("0.weight"), typo) is False


def test_flag_on_a_module_freezes_nothing_and_freeze_does() -> None:
    """requires_grad set on a module says nothing about its parameters; freeze does (B16)."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    layer = model.get_submodule("0")
    layer.requires_grad = False  # type: ignore[assignment]
    assert frozen_names(model) == []
    assert audit(model).trainable == 9
    assert freeze_state(model)["frozen"] == []

    assert freeze(model, "0").changed == ("0.weight", "0.bias")
    layer.requires_grad = True  # type: ignore[assignment]
    assert audit(model).trainable == 3


# -- B18: a pattern that matches nothing -------------------------------------------------------


def text_model() -> nn.ModuleDict:
    text = nn.ModuleDict({"norm": nn.LayerNorm(4), "proj": nn.Linear(4, 4)})
    return nn.ModuleDict({"text_model": text, "head": nn.Linear(4, 2)})


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("text_model.model.norm", id="name-with-a-part-too-many"),
        pytest.param("text_model.nrom", id="name-misspelt"),
        pytest.param("text_model.norm.wieght", id="parameter-misspelt"),
        pytest.param("norm", id="name-without-its-beginning"),
        pytest.param("Head", id="other-case"),
        pytest.param("text_mdel.*", id="glob"),
        pytest.param("re:norm", id="regex-that-is-a-part-of-names"),
        pytest.param(re.compile("text_model.nrom.*"), id="compiled-regex"),
        pytest.param("type:LayerNrom", id="class-name"),
    ],
)
def test_pattern_without_a_match_is_an_error_with_near_names(pattern: Patterns) -> None:
    """A pattern that matches nothing is named, with near patterns that do match (B18)."""
    model = text_model()
    for name, parameter in model.named_parameters():
        if "text_model.model.norm" in name:
            parameter.requires_grad = False
    assert frozen_names(model) == []

    with pytest.raises(UnmatchedPatternError, match=r"1 pattern\(s\) matched no parameter") as info:
        freeze(model, pattern)
    assert frozen_names(model) == []
    (suggestions,) = info.value.suggestions
    assert 1 <= len(suggestions) <= 3
    for suggestion in suggestions:
        assert suggestion in str(info.value)
        assert select(model, suggestion).parameters


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        pytest.param(nn.Conv2d, "type:Conv2d", id="class"),
        pytest.param(lambda fqn, parameter: fqn == "norm", "lambda", id="callable"),
    ],
)
def test_pattern_that_is_no_text_is_named_too(pattern: Patterns, text: str) -> None:
    """A class or a callable that matches nothing is an error like any other (B18)."""
    with pytest.raises(UnmatchedPatternError, match=text):
        freeze(text_model(), pattern)


def test_every_pattern_has_to_match() -> None:
    """One pattern of a list that matches nothing is an error, though the others match (B18)."""
    model = text_model()
    with pytest.raises(UnmatchedPatternError, match=r"(?s)2 pattern.*'FAKE'.*'hed'") as info:
        freeze(model, ["text_model", "FAKE", "head", "hed"])
    assert info.value.unmatched == ("FAKE", "hed")
    assert "head" in info.value.suggestions[1]
    assert frozen_names(model) == []


def test_exclude_has_to_match_too() -> None:
    """An exclude pattern that matches nothing would freeze the head: an error (B18)."""
    model = text_model()
    with pytest.raises(UnmatchedPatternError, match=r"(?s)exclude pattern.*'hed'.*'head'"):
        freeze(model, exclude="hed")
    assert frozen_names(model) == []


# -- B19, B24: numbers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("encoder.layer.1", id="name"),
        pytest.param("encoder.layer.1.*", id="glob"),
        pytest.param("*.layer.1.*", id="glob-at-any-depth"),
        pytest.param("*.1", id="glob-of-the-number"),
        pytest.param("encoder.layer[1]", id="index"),
        pytest.param("encoder.layer[-11]", id="index-from-the-end"),
        pytest.param("encoder.layer[1:2]", id="slice"),
        pytest.param("encoder.layer[1].*", id="index-and-glob"),
        pytest.param("*layer[1]", id="glob-and-index"),
        pytest.param(["encoder.layer.1.attention", "encoder.layer[1].output"], id="list"),
        pytest.param(r"re:encoder\.layer\.1\..*", id="regex"),
        pytest.param(re.compile(r".*\.1\..*"), id="compiled-regex"),
        pytest.param(lambda fqn, parameter: fqn.split(".")[2] == "1", id="callable"),
    ],
)
def test_layer_1_is_layer_1_alone(pattern: Patterns) -> None:
    """Layer 1 is never layers 10 and 11 as well, in whatever way it is written (B19)."""
    plain = Layers()
    for name, parameter in plain.named_parameters():
        if any(name.startswith(f"encoder.layer.{i}") for i in range(2)):
            parameter.requires_grad = False
    assert numbers(plain) == {0, 1, 10, 11}

    model = Layers()
    if callable(pattern):
        model = cast(Layers, nn.ModuleDict({"encoder": model.encoder}))
    report = freeze(model, pattern)
    assert numbers(model) == {1}
    assert len(report.changed) == 4


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        pytest.param("encoder.layer[:2]", range(2), id="first"),
        pytest.param("encoder.layer[0:2]", range(2), id="first-in-full"),
        pytest.param("encoder.layer[-2:]", range(10, 12), id="last"),
        pytest.param("encoder.layer[:-2]", range(10), id="all-but-the-last"),
        pytest.param("encoder.layer[10:]", range(10, 12), id="from-10"),
        pytest.param("encoder.layer[::3]", range(0, 12, 3), id="every-third"),
        pytest.param("encoder.layer[::-1]", range(12), id="backwards"),
        pytest.param("encoder.layer[:]", range(12), id="all"),
        pytest.param("encoder.layer[:12]", range(12), id="up-to-the-end"),
        pytest.param("encoder.layer[:2].attention", range(2), id="inner-part"),
        pytest.param("encoder.layer[-1:].*.bias", range(11, 12), id="inner-glob"),
    ],
)
def test_ranges_are_python_slices(pattern: str, expected: range) -> None:
    """A range of layers is a slice, at any depth, and parts of the layers go after it (B19)."""
    model = Layers()
    freeze(model, pattern)
    assert numbers(model) == set(expected)
    whole = select(model, pattern).blocks[0].whole
    assert whole == (0 if "]." in pattern else len(expected))


def test_inner_part_is_that_part_alone() -> None:
    """What comes after a slice narrows it down (B19)."""
    model = Layers()
    freeze(model, "encoder.layer[10:].attention.weight")
    assert frozen_names(model) == [f"encoder.layer.{i}.attention.weight" for i in (10, 11)]


@pytest.mark.parametrize(
    "pattern",
    ["encoder.layer.1*", "*layer.1*", "*.1*", "encoder.layer.1*.weight", "encoder[0].1*"],
)
def test_glob_after_a_digit_warns_of_longer_numbers(pattern: str) -> None:
    """A glob right after a digit takes longer numbers too, and says so (B19)."""
    model = Layers()
    if pattern.startswith("encoder[0]"):
        model.encoder = nn.ModuleDict({"0": model.encoder["layer"]})
    with pytest.warns(NumberPrefixWarning, match=r"also took encoder\.\w+\.10\.attention\.weight"):
        freeze(model, pattern)
    assert {int(name.split(".")[2]) for name in frozen_names(model)} == {1, 10, 11}


@pytest.mark.parametrize(
    "pattern", ["encoder.layer.1*", "*layer.1*", "*.1*", "encoder.layer.1*.weight"]
)
def test_number_warning_tells_what_takes_one_layer(pattern: str) -> None:
    """The pattern that the warning proposes for that number alone takes it alone (B19)."""
    model = Layers()
    with pytest.warns(NumberPrefixWarning, match="is that number alone") as caught:
        freeze(model, pattern)
    (proposed,) = re.findall(r"'([^']*)' is that number alone", str(caught[0].message))
    unfreeze(model)
    freeze(model, proposed)
    assert numbers(model) == {1}


@pytest.mark.parametrize("pattern", ["encoder.layer.1", "encoder.layer.1.*", "encoder.layer.1?"])
def test_no_warning_where_the_number_is_meant(pattern: str) -> None:
    """Anchored names, and a wildcard that says how much it stands for, pass without one (B19)."""
    freeze(Layers(), pattern)  # a warning is an error here


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("encoder.layer[0-11]", r"'encoder\.layer\[0:12\]'"),
        ("encoder.layer[0..3]", r"'encoder\.layer\[0:4\]'"),
        ("encoder.layer[1,2]", r"\['encoder\.layer\[1\]', 'encoder\.layer\[2\]'\]"),
        ("encoder.layer.[01]", "never a character class"),
        ("encoder.layer[ab]", "never a character class"),
    ],
)
def test_brackets_are_never_a_character_class(pattern: str, meant: str) -> None:
    """A range written as a character class is refused, with the slice that was meant (B19)."""
    with pytest.raises(PatternError, match=meant):
        freeze(Layers(), pattern)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("encoder.layer[-15:]", "-15 is out of range"),
        ("encoder.layer[:15]", "15 is out of range"),
        ("encoder.layer[12]", "no index 12"),
        ("encoder.layer[-13]", "no index -13"),
        ("encoder.layer.12", "no index 12"),
        ("encoder.layer[12:]", "the slice is empty"),
        ("encoder.layer[5:5]", "the slice is empty"),
        ("encoder[0]", r"'encoder' \(ModuleDict\) has no numbered children"),
    ],
)
def test_counts_beyond_the_stack_are_errors(pattern: str, reason: str) -> None:
    """A count that does not fit the stack freezes nothing in plain code, and is an error (B24)."""
    layers = list(range(12))
    assert [i for i in layers if i < len(layers) - 15] == []

    model = Layers()
    for call in (freeze, train_only, unfreeze, select):
        with pytest.raises(UnmatchedPatternError, match=reason):
            call(model, pattern)
    assert frozen_names(model) == []


@pytest.mark.parametrize("layers", [1, 3, 12])
def test_last_layers_are_counted_from_the_end(layers: int) -> None:
    """What is to learn can be written as it is meant: the last n of however many (B24)."""
    model = Layers(12)
    report = train_only(model, [f"encoder.layer[-{layers}:]", "head"])
    assert numbers(model) == set(range(12 - layers))
    assert f"encoder.layer: {layers} of 12 blocks" in str(report)


def test_report_says_how_many_blocks() -> None:
    """The report tells how many of how many blocks are frozen, in whole and in part (B24)."""
    report = freeze(Layers(), ["encoder.layer[:10]", "encoder.layer.11.output.bias"])
    (count,) = report.selection.blocks
    assert (count.container, count.whole, count.partly, count.total) == ("encoder.layer", 10, 1, 12)
    assert "encoder.layer: 10 of 12 blocks, 1 more in part" in str(report)


def test_student_and_teacher_are_not_mixed_up() -> None:
    """A name begins at the root: the teacher's last layer is never the student's (B24)."""
    model = nn.ModuleDict({"teacher": Layers(2), "student": Layers(2)})
    freeze(model, ["teacher", "student.head"])
    assert {name.split(".")[0] for name in frozen_names(model)} == {"teacher", "student"}
    assert [n for n in frozen_names(model) if n.startswith("student")] == [
        "student.head.weight",
        "student.head.bias",
    ]
    with pytest.raises(UnmatchedPatternError, match=r"did you mean .*'\*\.head'"):
        freeze(model, "head")


# -- B21, B22: more or less than was meant -----------------------------------------------------


def multimodal() -> nn.ModuleDict:
    """A language model with experts and norms, and a vision tower."""

    def layer() -> nn.ModuleDict:
        experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
        mlp = nn.ModuleDict({"experts": experts, "gate": nn.Linear(2, 2, bias=False)})
        return nn.ModuleDict({"mlp": mlp, "input_layernorm": nn.LayerNorm(2, bias=False)})

    text = nn.ModuleDict(
        {
            "layers": nn.ModuleList(layer() for _ in range(4)),
            "norm": nn.LayerNorm(2, bias=False),
        }
    )
    visual = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))})
    return nn.ModuleDict({"model": text, "visual": visual})


@pytest.mark.parametrize("pattern", ["model.layers[-1:]", "model.layers[3]", "model.layers.3"])
def test_last_layer_is_of_the_named_stack(pattern: str) -> None:
    """The last layer takes no expert 3 of other layers, and no block of the vision tower (B21)."""
    model = multimodal()
    by_substring = [name for name, _ in model.named_parameters() if ".3." in name]
    assert {name.split(".")[0] for name in by_substring} == {"model", "visual"}

    train_only(model, pattern)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable == [n for n, _ in model.named_parameters() if n.startswith("model.layers.3.")]


def test_norm_is_the_final_norm_alone() -> None:
    """A norm's name takes no norm whose name merely contains it (B21)."""
    model = multimodal()
    assert sum("norm" in name for name, _ in model.named_parameters()) == 5
    assert freeze(model, "model.norm").changed == ("model.norm.weight",)
    assert select(model, "*.norm").parameters == ("model.norm.weight",)
    with pytest.raises(UnmatchedPatternError, match=r"did you mean .*'model\.norm'"):
        freeze(model, "norm")


def test_surprises_show_per_container() -> None:
    """The report counts matches per container, where a pattern took more than was meant (B21)."""
    selection = select(multimodal(), "*.3.*")
    blocks = {b.container: (b.whole, b.partly, b.total) for b in selection.blocks}
    assert blocks == {"model.layers": (1, 3, 4), "visual.blocks": (1, 0, 4)}
    assert "visual.blocks: 1 of 4 blocks" in str(selection)


def test_matches_are_counted_per_pattern() -> None:
    """An entry that matches some of the layers only shows by its count (B22)."""
    parts = [["q", "k", "v"]] * 25 + [["q", "k"]] * 5
    layers = nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names}) for names in parts
    )
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(1, 1)})
    report = freeze(model, ["*.q", "*.k", "*.v"])
    counts = {m.pattern: (len(m.parameters), m.numel) for m in report.matches}
    assert counts == {"*.q": (30, 30), "*.k": (30, 30), "*.v": (25, 25)}
    assert report.matches[2].parameters == tuple(f"layers.{i}.v.weight" for i in range(25))
    assert "layers: 25 of 30 blocks" not in str(report)
    (blocks,) = select(model, "*.v").blocks
    assert (blocks.container, blocks.whole, blocks.partly, blocks.total) == ("layers", 0, 25, 30)


# -- B25, B27, B28: undone by others -----------------------------------------------------------


def trainer_setup(model: nn.Module) -> None:
    """What some trainers do."""
    for parameter in model.parameters():
        parameter.requires_grad = True


def test_trainer_that_switches_it_back_on_is_seen_and_undone() -> None:
    """A state taken after freeze tells what was switched on since, and freezes it again (B25)."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    freeze(model, ["0", "1"])
    state = freeze_state(model)
    trainer_setup(model)
    model.train()
    assert frozen_names(model) == []
    now = freeze_state(model)
    assert set(now["trainable"]) - set(state["trainable"]) == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    }

    report = load_freeze_state(model, state)
    assert report.changed == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert freeze_state(model) == state
    before = {name: value.clone() for name, value in model.state_dict().items()}
    decay(model, torch.randn(4, 2))
    assert [n for n, v in model.state_dict().items() if not torch.equal(v, before[n])] == [
        "2.weight",
        "2.bias",
    ]


def test_state_can_be_checked_at_every_step() -> None:
    """Loading a state that is in force already changes nothing, so it can be a check (B25)."""
    model = Layers(2)
    freeze(model, "encoder")
    state = freeze_state(model)
    assert load_freeze_state(model, state).changed == ()
    model.get_parameter("encoder.layer.1.output.bias").requires_grad = True
    assert load_freeze_state(model, state).changed == ("encoder.layer.1.output.bias",)


def test_adapter_frozen_by_a_later_call() -> None:
    """train_only switches on as well as off, and audit fails where nothing is left on (B27)."""
    model = nn.ModuleDict(
        {"base": nn.Linear(4, 4), "lora_A": nn.Linear(4, 2), "lora_B": nn.Linear(2, 4)}
    )
    for parameter in model.parameters():
        parameter.requires_grad = False
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.requires_grad = False
    with pytest.raises(AuditFailedError, match=r"FK101 error: nothing is trainable"):
        audit(model).raise_for("error")

    report = train_only(model, "*lora_*")
    assert frozen_names(model) == ["base.weight", "base.bias"]
    assert len(report.changed) == 4
    audit(model).raise_for("note")
    freeze(model)
    unfreeze(model, ["lora_A", "lora_B"])
    assert frozen_names(model) == ["base.weight", "base.bias"]


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found


STATISTICS = ["body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"]


@pytest.mark.parametrize(
    ("options", "frozen", "moves", "held"),
    [
        pytest.param(
            {}, ["0.weight", "0.bias", "1.weight", "1.bias"], [], ("body.1",), id="frozen"
        ),
        pytest.param(
            {"norm_stats": "keep"},
            ["0.weight", "0.bias", "1.weight", "1.bias"],
            STATISTICS,
            (),
            id="statistics-move",
        ),
        pytest.param(
            {"exclude": "type:BatchNorm2d"},
            ["0.weight", "0.bias"],
            ["body.1.weight", "body.1.bias", *STATISTICS],
            (),
            id="norm-trains",
        ),
    ],
)
def test_norms_are_frozen_unless_it_is_said(
    options: dict[str, str], frozen: list[str], moves: list[str], held: tuple[str, ...]
) -> None:
    """Norms of a frozen backbone are frozen with it; the call and the report say if not (B28)."""
    plain = Backbone().body
    for module in plain.modules():
        if not isinstance(module, nn.BatchNorm2d):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad = False
    assert frozen_names(plain) == ["0.weight", "0.bias"]

    model = Backbone()
    report = freeze(model, "body", **options)  # type: ignore[arg-type]
    assert frozen_names(model) == [f"body.{name}" for name in frozen]
    assert report.held == held
    assert ("held in eval: 1 module" in str(report)) is bool(held)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    decay(model, torch.randn(2, 3, 2, 2) + 5)
    moved = [n for n, v in model.state_dict().items() if not torch.equal(v, before[n])]
    assert moved == [*moves, "head.weight", "head.bias"]
