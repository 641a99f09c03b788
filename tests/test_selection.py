"""select: the dry run, per pattern and in all."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import re
import weakref

import pytest
import torch
from torch import nn

import freezekit as fk
from freezekit._patterns import Patterns
from freezekit._selection import BlockCount, PartialTie
from freezekit.errors import PatternError, UnmatchedPatternError
from zoo import BY_NAME, ZOO, Encoder, SharedTwice, Specimen, StorageTied, TiedLM


@pytest.mark.parametrize("specimen", ZOO, ids=lambda specimen: specimen.name)
def test_everything_is_selected_by_default(specimen: Specimen) -> None:
    """Without patterns, select takes the whole model, each memory once."""
    selection = fk.select(specimen.make())
    found = (len(selection.parameters), selection.numel, selection.nbytes)
    assert found == (specimen.tensors, specimen.numel, specimen.nbytes)
    assert (selection.total_tensors, selection.total_numel) == found[:2]


def test_select_changes_nothing() -> None:
    """The dry run leaves flags, gradients and modes as they are."""
    model = BY_NAME["norms"].make()
    model.requires_grad_(requires_grad=False)
    before = copy.deepcopy(fk.freeze_state(model))
    fk.select(model, "bn1d")
    assert fk.freeze_state(model) == before
    assert all(module.training for module in model.modules())


def test_each_pattern_tells_what_it_matched() -> None:
    """Matches are per pattern, in the order written, also where they overlap."""
    selection = fk.select(Encoder(2), ["*.bias", "pooler"])
    assert [(m.pattern, len(m.parameters), m.numel) for m in selection.matches] == [
        ("*.bias", 7, 2 * 3 * 2 + 1),
        ("pooler", 2, 3),
    ]
    assert len(selection.parameters) == 8
    assert selection.numel == 2 * 3 * 2 + 1 + 2


def test_parameters_come_in_model_order() -> None:
    """The selection's order is the model's, not that of the patterns."""
    selection = fk.select(Encoder(1), ["pooler", "embeddings"])
    assert selection.parameters == ("embeddings.weight", "pooler.weight", "pooler.bias")


def test_exclude_takes_away() -> None:
    """What exclude matches is left out, and reported."""
    selection = fk.select(Encoder(2), "encoder", exclude=["*.bias", "type:LayerNorm"])
    assert all(name.endswith(("query.weight", "key.weight")) for name in selection.parameters)
    assert [(m.pattern, len(m.parameters)) for m in selection.excluded] == [
        ("*.bias", 7),
        ("type:LayerNorm", 4),
    ]


def test_many_patterns_are_counted_and_not_all_listed() -> None:
    """A list of names is in the data; the text shows the first ones."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(40)))
    names = [name for name, _ in model.named_parameters()]
    few, many = fk.select(model, names[:25]), fk.select(model, names)
    assert "24.weight" not in str(few)
    assert f"\n{names[24]} " in str(few)
    assert "... and 56 more" in str(many)
    assert len(str(many).splitlines()) < 40
    assert len(many.matches) == len(many.to_dict()["matches"]) == 80


def test_an_exclude_that_takes_nothing_away_is_fine() -> None:
    """Exclude patterns have to match something in the model, not in the selection."""
    assert len(fk.select(Encoder(2), "encoder", exclude="pooler").parameters) == 12


@pytest.mark.parametrize(
    ("patterns", "exclude"),
    [
        pytest.param("pooler.*", "pooler.*", id="glob-and-glob"),
        pytest.param("pooler.*", "pooler", id="glob-and-name"),
        pytest.param("pooler", "pooler", id="name-and-name"),
        pytest.param("pooler", ["pooler.weight", "pooler.bias"], id="name-and-parameters"),
        pytest.param("pooler", "pooler.*", id="name-and-glob"),
        pytest.param("*", "*", id="all-and-all"),
        pytest.param(nn.Embedding, "embeddings.weight", id="class-and-parameter"),
    ],
)
def test_excluding_all_is_an_error(patterns: Patterns, exclude: str) -> None:
    """A selection of which nothing is left is never meant, however it was written."""
    with pytest.raises(UnmatchedPatternError, match="- all that it matches is excluded"):
        fk.select(Encoder(2), patterns, exclude=exclude)


def test_excluding_all_parameters_of_a_norm_is_an_error_too() -> None:
    """A norm of which no parameter is selected is nothing to freeze, though it has statistics."""
    with pytest.raises(UnmatchedPatternError, match="- all that it matches is excluded"):
        fk.select(BY_NAME["norms"].make(), "bn1d", exclude="bn1d.*")


def test_a_norm_without_parameters_may_be_all_that_is_left() -> None:
    """Statistics without parameters can be held: that is a selection."""
    model = BY_NAME["batch-norm-without-affine"].make()
    assert fk.select(model, "*", exclude=["0", "2"]).parameters == ()


def test_exclude_none_is_a_wrong_type() -> None:
    """Nothing to exclude is an empty tuple."""
    with pytest.raises(PatternError, match=r"^bad pattern None: got NoneType"):
        fk.select(Encoder(2), "*", exclude=None)  # type: ignore[arg-type]


# -- ties --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "exclude", "ties"),
    [
        ("lm_head", (), [(("lm_head.weight",), ("wte.weight",), False)]),
        ("wte", (), [(("wte.weight",), ("lm_head.weight",), False)]),
        (["wte", "lm_head"], (), []),
        ("*", (), []),
        ("body", (), []),
        ("*", "lm_head", [(("wte.weight",), ("lm_head.weight",), True)]),
        ("*", ["lm_head", "wte"], []),
        (["wte", "body"], "wte", []),
        ("*", "body", []),
    ],
)
def test_a_tie_of_which_one_side_was_written_is_told(
    patterns: str | list[str],
    exclude: str | list[str],
    ties: list[tuple[tuple[str, ...], tuple[str, ...], bool]],
) -> None:
    """The names written and those not are told, and whether exclude decided."""
    selection = fk.select(TiedLM(), patterns, exclude=exclude)
    assert selection.partial_ties == tuple(
        PartialTie(written=written, unwritten=unwritten, excluded=excluded)
        for written, unwritten, excluded in ties
    )


def test_an_excluded_name_decides_for_the_tensor() -> None:
    """A tensor wanted by one name and excluded by another is left out."""
    assert "wte.weight" not in fk.select(TiedLM(), "*", exclude="lm_head").parameters


def test_a_storage_tie_is_a_tie() -> None:
    """Two Parameter objects over one memory are told like one."""
    (tie,) = fk.select(StorageTied(), "decode").partial_ties
    assert (tie.written, tie.unwritten) == (("decode.weight",), ("encode.weight",))


def test_a_shared_module_ties_all_of_its_parameters() -> None:
    """Naming one place of a module that is at three leaves two names unwritten per tensor."""
    ties = fk.select(SharedTwice(), "first").partial_ties
    assert len(ties) == 4
    assert ties[0].unwritten == ("second.0.weight", "inner.third.0.weight")


# -- blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "blocks"),
    [
        ("*", [("encoder.layer", 12, 0, 12)]),
        ("encoder.layer[:8]", [("encoder.layer", 8, 0, 12)]),
        ("encoder.layer[:8].attention", [("encoder.layer", 0, 8, 12)]),
        (["encoder.layer[:2]", "encoder.layer[5].LayerNorm"], [("encoder.layer", 2, 1, 12)]),
        ("pooler", []),
    ],
)
def test_blocks_are_counted(
    patterns: str | list[str], blocks: list[tuple[str, int, int, int]]
) -> None:
    """A numbered container tells how many of its blocks are selected, wholly or in part."""
    expected = tuple(
        BlockCount(container=container, whole=whole, partly=partly, total=total)
        for container, whole, partly, total in blocks
    )
    assert fk.select(Encoder(12), patterns).blocks == expected


def test_blocks_inside_blocks_are_not_counted() -> None:
    """Only the outermost numbers of a named container are told; a root's own do not hide them."""
    inner = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model = nn.Sequential(
        nn.ModuleDict({"stages": nn.ModuleList([inner, nn.Linear(1, 1)])}), nn.Linear(1, 1)
    )
    counted = [(block.container, block.total) for block in fk.select(model, "*").blocks]
    assert counted == [("", 2), ("0.stages", 2)]


def test_a_container_of_one_block_is_not_counted() -> None:
    """One of one says nothing."""
    assert fk.select(Encoder(1), "*").blocks == ()


# -- the report --------------------------------------------------------------------------------


def test_the_text_tells_it_all() -> None:
    """The text has a head, a row per pattern, the sum, and the blocks."""
    text = str(fk.select(Encoder(12), ["encoder.layer[:8]", "pooler"], exclude="*.bias"))
    assert text == (
        "Encoder: 25 of 75 tensors selected, 82 of 201 parameters, 328 B\n"
        "pattern            tensors  parameters\n"
        "--------------------------------------\n"
        "encoder.layer[:8]       48         128\n"
        "pooler                   2           3\n"
        "not *.bias              37          73\n"
        "--------------------------------------\n"
        "selected                25          82\n"
        "\n"
        "encoder.layer: 0 of 12 blocks, 8 more in part"
    )


def test_a_tie_is_in_the_text() -> None:
    """Ties of which one side was written are lines; what exclude decided is marked."""
    assert str(fk.select(TiedLM(), "lm_head")).endswith("\ntied: lm_head.weight = wte.weight")
    text = str(fk.select(TiedLM(), "*", exclude="lm_head"))
    assert text.endswith("\ntied: wte.weight = lm_head.weight (excluded)")


def test_a_pattern_of_several_lines_is_one_row() -> None:
    """A verbose regular expression does not break the table that it is shown in."""
    pattern = re.compile("pooler  # the head\n[.]weight", re.VERBOSE)
    text = str(fk.select(Encoder(2), pattern))
    assert len(text.splitlines()) == len(str(fk.select(Encoder(2), "pooler")).splitlines())


def test_the_selection_is_a_value() -> None:
    """Selections compare, pickle, and refuse changes."""
    one = fk.select(Encoder(2), "pooler")
    assert one == fk.select(Encoder(2), "pooler")
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError, match="cannot assign to field 'numel'"):
        one.numel = 3  # type: ignore[misc]


def test_the_dictionary_is_json() -> None:
    """to_dict has a schema, plain values, and every parameter's name."""
    selection = fk.select(TiedLM(), "lm_head")
    data = json.loads(json.dumps(selection.to_dict()))
    assert data == selection.to_dict()
    assert data["schema"] == "freezekit.Selection/1"
    assert data["parameters"] == ["wte.weight"]
    assert data["partial_ties"] == [
        {"written": ["lm_head.weight"], "unwritten": ["wte.weight"], "excluded": False}
    ]


def test_a_selection_holds_no_tensor() -> None:
    """A report keeps no model alive."""
    model = Encoder(2)
    gone = weakref.ref(model.pooler.weight)
    selection = fk.select(model, "*")
    del model
    gc.collect()
    assert gone() is None
    assert selection.numel == 9 + 32


def test_grad_mode_does_not_matter() -> None:
    """Selections under no_grad and inference_mode are the same."""
    model = Encoder(2)
    expected = fk.select(model, "*.bias")
    with torch.inference_mode():
        assert fk.select(model, "*.bias") == expected
