"""What a pattern covers in a model, and why a pattern covers nothing."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from freezekit import select
from freezekit._inventory import take_inventory
from freezekit._matching import Match, Matcher
from freezekit._patterns import Patterns, parse_patterns
from freezekit.errors import UnmatchedPatternError
from zoo import (
    BY_NAME,
    ClassToken,
    Encoder,
    NormZoo,
    OddNames,
    ParameterLists,
    SharedTwice,
    TiedLM,
)


def names(model: nn.Module, patterns: Patterns) -> list[str]:
    """FQNs of what the patterns select."""
    return list(select(model, patterns).parameters)


def match(model: nn.Module, pattern: str) -> Match:
    """What one pattern covers, without strictness."""
    (parsed,) = parse_patterns(pattern)
    return Matcher(take_inventory(model)).match(parsed)


def layers_of(model: nn.Module, patterns: Patterns) -> list[int]:
    """The numbers of the layers of an Encoder that the patterns touch."""
    found = {name.split(".")[2] for name in names(model, patterns) if ".layer." in name}
    return sorted(map(int, found))


# -- names -------------------------------------------------------------------------------------


def test_a_name_takes_a_modules_whole_subtree() -> None:
    """A module's name stands for all parameters below it, and for no others."""
    assert names(Encoder(2), "encoder.layer.1") == [
        "encoder.layer.1.attention.query.weight",
        "encoder.layer.1.attention.query.bias",
        "encoder.layer.1.attention.key.weight",
        "encoder.layer.1.attention.key.bias",
        "encoder.layer.1.LayerNorm.weight",
        "encoder.layer.1.LayerNorm.bias",
    ]


def test_a_name_takes_one_parameter() -> None:
    """A parameter's name stands for it alone."""
    assert names(Encoder(2), "pooler.bias") == ["pooler.bias"]


@pytest.mark.parametrize(
    "pattern",
    ["encoder.layer.1", "encoder.layer.1.*", "encoder.layer[1]", r"re:encoder\.layer\.1\..*"],
)
def test_layer_1_is_never_layer_10(pattern: str) -> None:
    """Components are matched whole: 10 and 11 do not begin with 1."""
    assert layers_of(Encoder(12), pattern) == [1]


def test_a_name_does_not_take_its_beginning() -> None:
    """``pool`` is not ``pooler``, and ``encoder.lay`` is nothing."""
    for pattern in ("pool", "encoder.lay", "oder.layer.0"):
        with pytest.raises(UnmatchedPatternError, match="1 pattern\\(s\\) matched no parameter"):
            names(Encoder(2), pattern)


@pytest.mark.parametrize("pattern", ["encoder.layer.0.layernorm", "*layernorm*"])
def test_case_counts(pattern: str) -> None:
    """Names and globs are case-sensitive, as attributes are; the right case is suggested."""
    with pytest.raises(UnmatchedPatternError, match=r"did you mean '.*LayerNorm"):
        names(Encoder(2), pattern)


def test_parameters_of_the_root_have_names() -> None:
    """A class token is selected like any other parameter."""
    assert names(ClassToken(), ["cls_token", "*_embed"]) == ["cls_token", "pos_embed"]


def test_every_name_of_a_shared_module_stands_for_it() -> None:
    """A module at three places is selected by each of its names."""
    first = names(SharedTwice(), "first")
    assert first == [f"first.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
    assert first == names(SharedTwice(), "second") == names(SharedTwice(), "inner.third")


def test_every_name_of_a_tied_tensor_stands_for_it() -> None:
    """The second name, which named_parameters hides, selects the tensor as well."""
    for pattern in ("lm_head", "lm_head.weight", "*head*", "re:lm_head.weight", "type:Linear"):
        assert "wte.weight" in names(TiedLM(), pattern)


def test_parametrised_weights_keep_the_name_that_the_user_knows() -> None:
    """``0.weight`` still names the weight after spectral_norm has moved it."""
    assert names(BY_NAME["spectral-norm"].make(), "0.weight") == [
        "0.parametrizations.weight.original"
    ]
    assert names(BY_NAME["weight-norm"].make(), "0.weight") == [
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    ]


def test_parametrised_weights_are_found_below_an_index() -> None:
    """The user's name works behind brackets too."""
    model = nn.ModuleDict({"blocks": BY_NAME["spectral-norm"].make()})
    assert names(model, "blocks[0].weight") == ["blocks.0.parametrizations.weight.original"]


# -- globs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("*", 15),
        ("encoder.*", 12),
        ("*.bias", 7),
        ("*bias", 7),
        ("*LayerNorm*", 4),
        ("encoder.layer.?.LayerNorm", 4),
        ("*.attention.*.weight", 4),
        ("**", 15),
        ("?mbeddings", 1),
    ],
)
def test_globs_cross_dots(pattern: str, count: int) -> None:
    """Star and question mark match across components, modules and parameters alike."""
    assert len(names(Encoder(2), pattern)) == count


def test_a_glob_that_matches_a_module_takes_its_subtree() -> None:
    """``*attention`` ends at the module, and takes what is in it."""
    found = names(Encoder(2), "*attention")
    assert len(found) == 8
    assert all(".attention." in name for name in found)


@pytest.mark.parametrize("pattern", ["mod*", "*odule*", "re:module.*"])
def test_a_wrappers_own_component_is_no_name_of_the_model(pattern: str) -> None:
    """A glob selects the same in a wrapped model: ``mod*`` does not meet DataParallel's child."""
    wrapped = nn.DataParallel(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    with pytest.raises(UnmatchedPatternError, match=r"1 pattern\(s\) matched no parameter"):
        names(wrapped, pattern)


@pytest.mark.parametrize("pattern", ["1.weight", "module.1.weight"])
def test_a_wrapped_models_parameter_has_both_names(pattern: str) -> None:
    """The name as printed by the wrapper's named_parameters is understood as well."""
    wrapped = nn.DataParallel(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    assert names(wrapped, pattern) == ["1.weight"]


# -- indices and slices ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("encoder.layer[0]", [0]),
        ("encoder.layer[-1]", [11]),
        ("encoder.layer[-12]", [0]),
        ("encoder.layer[:8]", list(range(8))),
        ("encoder.layer[:12]", list(range(12))),
        ("encoder.layer[-2:]", [10, 11]),
        ("encoder.layer[::2]", [0, 2, 4, 6, 8, 10]),
        ("encoder.layer[1::5]", [1, 6, 11]),
        ("encoder.layer[::-4]", [3, 7, 11]),
        ("encoder.layer[8:2:-3]", [5, 8]),
        ("encoder.layer[2:-8]", [2, 3]),
        ("*.layer[3]", [3]),
        ("enc*[3]", [3]),
    ],
)
def test_brackets_index_a_containers_numbered_children(pattern: str, layers: list[int]) -> None:
    """An index or slice takes what Python takes of a list of the children."""
    assert layers_of(Encoder(12), pattern) == layers


def test_a_slice_goes_on_below() -> None:
    """``encoder.layer[:8].attention`` is the attention of the first eight layers."""
    found = names(Encoder(12), "encoder.layer[:8].attention")
    assert len(found) == 8 * 4
    assert all(".attention." in name for name in found)
    assert layers_of(Encoder(12), "encoder.layer[:8].attention") == list(range(8))


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("encoder.layer[:3].attention.query.weight", 3),
        ("encoder.layer[:3].*.bias", 9),
        ("encoder.layer[:3].*", 18),
        ("encoder.layer[:3].?ayerNorm", 6),
    ],
)
def test_below_a_slice_there_are_names_and_globs(pattern: str, count: int) -> None:
    """What follows the brackets is a name or a glob relative to each child."""
    assert len(names(Encoder(4), pattern)) == count


def test_a_name_below_a_slice_is_anchored() -> None:
    """Behind brackets a name begins right below the child."""
    with pytest.raises(UnmatchedPatternError, match=r"'encoder\.layer\[:2\]\.query'"):
        names(Encoder(2), "encoder.layer[:2].query")


def nested() -> nn.Module:
    """Stages of blocks: two levels of numbers."""
    return nn.ModuleDict(
        {
            "stages": nn.ModuleList(
                nn.Sequential(*(nn.Linear(1, 1) for _ in range(depth))) for depth in (2, 3)
            )
        }
    )


@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        ("stages[0][1]", ["stages.0.1"]),
        ("stages[:][0]", ["stages.0.0", "stages.1.0"]),
        ("stages[-1][-2:]", ["stages.1.1", "stages.1.2"]),
        ("stages.1[0]", ["stages.1.0"]),
        ("stages[1].0", ["stages.1.0"]),
        ("stages.*[1]", ["stages.0.1", "stages.1.1"]),
    ],
)
def test_slices_nest(pattern: str, modules: list[str]) -> None:
    """Brackets follow brackets, names and globs at any depth."""
    found = dict.fromkeys(name.rpartition(".")[0] for name in names(nested(), pattern))
    assert list(found) == modules


def test_the_model_itself_is_indexed() -> None:
    """``[:2]`` takes the first two children of a Sequential model."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(4)))
    assert names(model, "[:2]") == ["0.weight", "1.weight"]
    assert names(model, "[-1]") == ["3.weight"]


def test_a_parameter_list_is_indexed() -> None:
    """Numbered parameters are indexed like numbered modules."""
    assert names(ParameterLists(), "prompts[1:3]") == ["prompts.1", "prompts.2"]
    assert names(ParameterLists(), "prompts[-1]") == ["prompts.3"]


def test_numbers_with_gaps_are_indexed_by_position() -> None:
    """In a ModuleDict with keys 2, 5, 07 and 08, [1] is the second child, and .5 is key 5."""
    model = BY_NAME["gapped-numbers"].make()
    assert names(model, "[1]") == names(model, "5") == ["5.weight", "5.bias"]
    assert names(model, "[2:]") == ["07.weight", "07.bias", "08.weight", "08.bias"]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("encoder.layer[12]", "no index 12: encoder.layer has 12 numbered children, 0 to 11"),
        ("encoder.layer[-13]", "no index -13: encoder.layer has 12 numbered children, 0 to 11"),
        ("encoder.layer[:24]", "24 is out of range: encoder.layer has 12 numbered children"),
        ("encoder.layer[-20:]", "-20 is out of range: encoder.layer has 12 numbered children"),
        ("encoder.layer[13:]", "13 is out of range: encoder.layer has 12 numbered children"),
        ("encoder.layer[:24].attention", "24 is out of range: encoder.layer has 12 numbered"),
        ("encoder.layer[8:4]", "the slice is empty: encoder.layer has 12 numbered children"),
        ("encoder.layer[:0]", "the slice is empty: encoder.layer has 12 numbered children"),
        ("encoder.layer[12:]", "the slice is empty: encoder.layer has 12 numbered children"),
        ("encoder.layer.12", "no index 12: encoder.layer has 12 numbered children, 0 to 11"),
        ("encoder[0]", "'encoder' (Stack) has no numbered children"),
        ("pooler[0]", "'pooler' (Linear) has no numbered children"),
        ("[0]", "the model (Encoder) has no numbered children"),
    ],
)
def test_an_index_beyond_the_end_says_how_many_there_are(pattern: str, reason: str) -> None:
    """Bounds are strict, unlike Python's: layer[:24] of 12 is a mistake about the model."""
    with pytest.raises(UnmatchedPatternError, match=re.escape(f"{pattern!r}  - {reason}")):
        select(Encoder(12), pattern)


def test_an_index_beyond_the_root_says_how_many_there_are() -> None:
    """A root without a name is called the model."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    message = "no index 5: the model has 2 numbered children, 0 to 1"
    for pattern in ("5", "[5]"):
        with pytest.raises(UnmatchedPatternError, match=message):
            select(model, pattern)


def test_bounds_are_strict_in_every_container() -> None:
    """One container too short makes the pattern an error, though another would do."""
    with pytest.raises(UnmatchedPatternError, match=r"stages\.0 has 2 numbered children"):
        select(nested(), "stages[:][2]")


# -- regular expressions, classes, callables ---------------------------------------------------


def test_a_regular_expression_matches_a_parameters_whole_name() -> None:
    """Half a name is no match, and a module's name is none."""
    assert len(names(Encoder(12), r"re:encoder\.layer\.(0|1)\..*")) == 12
    assert len(names(Encoder(12), re.compile(r".*\.BIAS", re.IGNORECASE))) == 37
    for pattern in ("re:encoder", r"re:encoder\.layer\.0", "re:bias"):
        with pytest.raises(UnmatchedPatternError, match="1 pattern\\(s\\) matched no parameter"):
            names(Encoder(2), pattern)


@pytest.mark.parametrize("pattern", ["type:LayerNorm", nn.LayerNorm, "type:Layer?orm"])
def test_a_class_takes_the_modules_of_it(pattern: Patterns) -> None:
    """A class, its name and a glob of its name take the same modules."""
    found = names(Encoder(2), pattern)
    assert len(found) == 4
    assert all("LayerNorm" in name for name in found)


def test_a_class_takes_whole_subtrees() -> None:
    """The parameters below a module of the class are taken with it."""
    assert len(names(Encoder(2), "type:Attention")) == 8


@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        (nn.modules.batchnorm._BatchNorm, ["bn1d", "bn2d", "bn3d", "sync"]),
        ("type:_BatchNorm", ["bn1d", "bn2d", "bn3d", "sync"]),
        ("type:BatchNorm2d", ["bn2d"]),
        ("type:*BatchNorm", ["bn1d", "bn2d", "bn3d", "sync"]),
        (nn.modules.batchnorm._NormBase, ["bn1d", "bn2d", "bn3d", "sync", "instance"]),
        ("type:torch.nn.modules.batchnorm.BatchNorm1d", ["bn1d"]),
    ],
    ids=str,
)
def test_subclasses_count(pattern: Patterns, modules: list[str]) -> None:
    """A module of a subclass is a module of the class, by name as by the class itself."""
    model = NormZoo()
    model.plain_instance = nn.InstanceNorm2d(2)
    found = dict.fromkeys(name.rpartition(".")[0] for name in names(model, pattern))
    assert list(found) == modules


def test_a_class_that_the_model_is_takes_everything() -> None:
    """The root is a module as well."""
    model = Encoder(2)
    assert names(model, Encoder) == names(model, nn.Module) == names(model, "*")


def test_a_module_with_statistics_alone_is_a_match() -> None:
    """BatchNorm without parameters has something to hold, by its name and its class."""
    model = BY_NAME["batch-norm-without-affine"].make()
    for pattern in ("1", "[1]", "type:BatchNorm1d", nn.BatchNorm1d):
        selection = select(model, pattern)
        assert (selection.parameters, selection.numel) == ((), 0)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("encoder.layer.0.dropout", "'encoder.layer.0.dropout' (Dropout) has no parameters"),
        ("encoder.layer[:].dropout", "'encoder.layer.0.dropout' (Dropout) has no parameters"),
        ("type:Dropout", "2 modules of that class, without parameters or running statistics"),
    ],
)
def test_a_module_without_parameters_is_no_match(pattern: str, reason: str) -> None:
    """Dropout has nothing to freeze, and the error says so."""
    with pytest.raises(UnmatchedPatternError, match=re.escape(reason)):
        select(Encoder(2), pattern)


def test_a_callable_sees_names_and_parameters() -> None:
    """A predicate is asked about every name, with the true parameter."""
    model = TiedLM()
    seen: dict[str, torch.Tensor] = {}

    def is_matrix(fqn: str, parameter: nn.Parameter) -> bool:
        seen[fqn] = parameter
        return parameter.ndim == 2

    assert names(model, is_matrix) == ["wte.weight", "body.weight"]
    assert list(seen) == ["wte.weight", "body.weight", "body.bias", "lm_head.weight"]
    assert seen["lm_head.weight"] is model.wte.weight


def test_a_callables_error_says_where_it_came_from() -> None:
    """An exception in a predicate goes through as it is, with a note."""

    def broken(fqn: str, parameter: nn.Parameter) -> bool:
        raise KeyError(fqn)

    with pytest.raises(KeyError, match=r"wte\.weight") as caught:
        select(TiedLM(), broken)
    (note,) = caught.value.__notes__
    assert note.startswith("raised by the pattern ")
    assert note.endswith("broken(fqn, parameter) for 'wte.weight'")


def test_a_callable_that_takes_nothing_is_an_error() -> None:
    """A predicate that says no to all matches nothing."""
    with pytest.raises(
        UnmatchedPatternError, match=r"is_never\(.*'  - it was false for every parameter$"
    ):
        select(TiedLM(), is_never)


def is_never(fqn: str, parameter: nn.Parameter) -> bool:
    """Say no."""
    return False


# -- numbers before a star ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("encoder.layer.1*", "'encoder.layer.1' is that number alone"),
        ("*layer.1*", None),
        ("encoder.layer.1.*", ""),
        ("encoder.layer.2*", ""),
        ("encoder.layer[1]", ""),
        ("encoder.layer.*", ""),
        ("encoder.layer.1?", ""),
    ],
)
def test_a_star_right_after_a_number_takes_longer_numbers(
    pattern: str, message: str | None
) -> None:
    """``layer.1*`` also takes 10 and 11, and that is noted; ``layer.1.*`` does not."""
    found = match(Encoder(12), pattern).number_prefix
    if message == "":
        assert found == ""
    else:
        assert found.startswith("also took encoder.layer.10.attention.query.weight, ")
        assert found.endswith(message or "is that number alone")


# -- what is not there -------------------------------------------------------------------------


def test_all_patterns_that_match_nothing_are_told_at_once() -> None:
    """One error lists every bad pattern, each with names near it; the good ones are not in it."""
    patterns = ["embeding", "pooler", "encoder.layers.0", "re:nothing", "encoder.layer[99]"]
    message = r"^4 pattern\(s\) matched no parameter:\n"
    with pytest.raises(UnmatchedPatternError, match=message) as caught:
        select(Encoder(12), patterns)
    assert caught.value.unmatched == (
        "embeding",
        "encoder.layers.0",
        "re:nothing",
        "encoder.layer[99]",
    )
    assert str(caught.value).splitlines()[1:] == [
        "  'embeding'           - did you mean 'embeddings', 'embeddings.weight'?",
        "  'encoder.layers.0'   - did you mean 'encoder.layer.0', 'encoder.layer', "
        "'encoder.layer.0.LayerNorm'?",
        "  're:nothing'         - nothing in this model has a name near it",
        "  'encoder.layer[99]'  - no index 99: encoder.layer has 12 numbered children, 0 to 11",
    ]


def test_exclude_patterns_are_strict_too() -> None:
    """An exclude pattern that matches nothing is an error that calls it one."""
    with pytest.raises(UnmatchedPatternError, match=r"^1 exclude pattern\(s\) matched no") as e:
        select(Encoder(2), "*", exclude=["pooler", "poler"])
    assert (e.value.role, e.value.unmatched) == ("exclude pattern", ("poler",))


def test_a_model_without_parameters_says_so() -> None:
    """In a model that has none, even * matches nothing; the reason is the model's."""
    with pytest.raises(UnmatchedPatternError, match=r"the model \(ReLU\) has no parameters"):
        select(nn.ReLU(), "*")


def test_everything_is_everything_of_a_norm_alone() -> None:
    """``*`` takes a model that is one BatchNorm without parameters: it has statistics to hold."""
    selection = select(nn.BatchNorm1d(2, affine=False), "*")
    assert selection.parameters == ()


def test_odd_names_are_selected_by_what_can_name_them() -> None:
    """Names with brackets are reached by globs, regular expressions and callables."""
    model = OddNames()
    assert names(model, "parts.<b>*") == ["parts.<b>bold</b>.weight", "parts.<b>bold</b>.bias"]
    assert len(names(model, r"re:parts\.layer\[x\]\..*")) == 2
    assert len(names(model, lambda fqn, parameter: "[red]" in fqn)) == 2


def test_a_name_near_an_odd_name_is_an_error_about_the_users_pattern() -> None:
    """A suggestion that cannot be written as a pattern is no error of its own."""
    with pytest.raises(UnmatchedPatternError, match=r"'parts\.layer'"):
        select(OddNames(), "parts.layer")
