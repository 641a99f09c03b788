"""Near misses: what the user may have meant by a pattern that matched nothing."""

from __future__ import annotations

import re

import pytest
from torch import nn

from freezekit import select
from freezekit._inventory import take_inventory
from freezekit._patterns import Patterns
from freezekit._suggestions import suggest_class_names, suggest_names
from freezekit.errors import UnmatchedPatternError
from zoo import ClassToken, Encoder, TiedLM


def suggestions(model: nn.Module, pattern: str) -> tuple[str, ...]:
    """What the error about a pattern that matches nothing suggests."""
    with pytest.raises(UnmatchedPatternError, match=r"did you mean|has a name near it") as caught:
        select(model, pattern)
    (names,) = caught.value.suggestions
    return names


@pytest.mark.parametrize(
    ("pattern", "likeliest"),
    [
        ("embeding", "embeddings"),
        ("Embeddings", "embeddings"),
        ("embeddings.wieght", "embeddings.weight"),
        ("encoder.layers.0", "encoder.layer.0"),
        ("encoder.layers.7.attention", "encoder.layer.7.attention"),
        ("encoder.layer.3.layernorm", "encoder.layer.3.LayerNorm"),
        ("encoder.layer.3.attention.qeury.bias", "encoder.layer.3.attention.query.bias"),
        ("layer.3", "encoder.layer.3"),
        ("encoder.layers[:8]", "encoder.layer[:8]"),
        ("encoder.layers[:8].attention", "encoder.layer[:8].attention"),
        ("encoder.layer[:8].atention", "encoder.layer[:8].attention"),
        ("layer[:8]", "encoder.layer[:8]"),
        ("layer[:8].attention.query", "encoder.layer[:8].attention.query"),
        ("encoder.layers.*.attention", "encoder.layer.*.attention"),
        ("embeding.*", "embeddings.*"),
        ("pooler.wight", "pooler.weight"),
    ],
)
def test_the_likeliest_name_comes_first(pattern: str, likeliest: str) -> None:
    """A wrong component is corrected where it stands; what was right stays as written."""
    assert suggestions(Encoder(12), pattern)[0] == likeliest


@pytest.mark.parametrize("pattern", ["query", "attention.query", "query.weight"])
def test_a_name_that_is_in_every_block_is_suggested_for_all(pattern: str) -> None:
    """The last components of a name, written alone, stand in many places: the glob is offered."""
    assert f"*.{pattern}" in suggestions(Encoder(12), pattern)


def test_what_is_suggested_for_a_name_matches() -> None:
    """Every suggestion is a pattern that selects something in this model."""
    model = Encoder(12)
    for pattern in ("encoder.layers.0", "query", "layer[:8]", "encoder.layer.0.attn", "poler"):
        for suggestion in suggestions(model, pattern):
            assert select(model, suggestion).parameters


def test_no_more_than_three_are_suggested() -> None:
    """Three names can be read at a glance."""
    assert len(suggestions(Encoder(12), "layer.0.attention")) == 3


def test_the_users_own_numbers_are_kept() -> None:
    """Of twelve layers alike, the one that was written is suggested."""
    found = suggestions(Encoder(12), "encoder.layers.7.attention.querry.weight")
    assert found[0] == "encoder.layer.7.attention.query.weight"


def test_the_hidden_name_of_a_tied_tensor_is_suggested() -> None:
    """Names that named_parameters leaves out are names."""
    assert suggestions(TiedLM(), "lm_heads.weight")[0] == "lm_head.weight"


def test_parameters_of_the_root_are_suggested() -> None:
    """A class token's name is corrected."""
    assert suggestions(ClassToken(), "cls_tokens") == ("cls_token",)


def test_nothing_near_is_said_plainly() -> None:
    """A pattern unlike every name gets no suggestion, and the message says so."""
    with pytest.raises(UnmatchedPatternError, match="nothing in this model has a name near it"):
        select(Encoder(2), "zzzzzz")
    assert suggestions(Encoder(2), "zzzzzz") == ()


@pytest.mark.parametrize(
    ("pattern", "likeliest"),
    [
        ("type:LayerNrom", "type:LayerNorm"),
        ("type:linear", "type:Linear"),
        ("type:BertEncoder", "type:Encoder"),
        ("type:nn.Linear", "type:Linear"),
        ("type:torch.nn.Linear", "type:Linear"),
    ],
)
def test_classes_near_a_class_are_suggested(pattern: str, likeliest: str) -> None:
    """A misspelt class is corrected to one of the model's, torch.nn's public path to its end."""
    assert suggestions(Encoder(2), pattern)[0] == likeliest


def test_a_class_that_the_model_has_not_is_told_so() -> None:
    """A class object cannot be misspelt: the model has no module of it."""
    message = r"'type:BatchNorm2d'  - no module of that class, or of a subclass$"
    with pytest.raises(UnmatchedPatternError, match=message):
        select(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.BatchNorm2d)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("re:query", id="a-part"),
        pytest.param(r"re:encoder\.layer\.0", id="a-module"),
        pytest.param("re:query|key", id="alternatives"),
        pytest.param("re:(?i)QUERY", id="flags-inside"),
        pytest.param(re.compile("QUERY", re.IGNORECASE), id="flags-outside"),
        pytest.param(re.compile("que  # the\n ry", re.VERBOSE), id="verbose"),
    ],
)
def test_an_expression_that_a_search_would_find_gets_one_that_matches(pattern: Patterns) -> None:
    """A full match is what counts: what is offered instead does match, flags and all."""
    with pytest.raises(UnmatchedPatternError, match=r"did you mean 're:") as caught:
        select(Encoder(2), pattern)
    for suggestion in caught.value.suggestions[0]:
        assert select(Encoder(2), suggestion).parameters


def test_candidates_are_tried_before_they_are_suggested() -> None:
    """A corrected pattern that would match nothing (an index beyond the end) is not offered."""
    inventory = take_inventory(Encoder(2))
    asked: list[str] = []

    def matches(text: str) -> bool:
        asked.append(text)
        return False

    found = suggest_names("encoder.layers[9]", inventory, matches)
    assert asked == ["encoder.layer[9]"]
    assert "encoder.layer[9]" not in found


def test_class_names_are_the_models_own() -> None:
    """Only classes of modules in the model are near."""
    inventory = take_inventory(Encoder(2))
    assert suggest_class_names("Layer", inventory) == ("Layer", "LayerNorm")
    assert suggest_class_names("BatchNorm2d", inventory) == ()
