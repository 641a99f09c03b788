"""The pattern grammar: what is parsed, and what each mistake is told."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from freezekit._patterns import (
    ClassPattern,
    NamePattern,
    ParsedPattern,
    PredicatePattern,
    RegexPattern,
    Segment,
    TypeNamePattern,
    glob_to_regex,
    parse_patterns,
)
from freezekit.errors import FreezekitError, PatternError


def parse_one(pattern: object) -> ParsedPattern:
    """Parse one pattern, of whatever type."""
    (parsed,) = parse_patterns(pattern)  # type: ignore[arg-type]
    return parsed


# -- what is understood ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("weight", [("weight", None)]),
        ("encoder.layer.1", [("encoder.layer.1", None)]),
        ("*", [("*", None)]),
        ("*.bias", [("*.bias", None)]),
        ("encoder.*.query?", [("encoder.*.query?", None)]),
        ("layers[3]", [("layers", 3)]),
        ("layers[-1]", [("layers", -1)]),
        ("layers[ 3 ]", [("layers", 3)]),
        ("layers[:]", [("layers", slice(None, None, None))]),
        ("layers[:8]", [("layers", slice(None, 8, None))]),
        ("layers[-2:]", [("layers", slice(-2, None, None))]),
        ("layers[::2]", [("layers", slice(None, None, 2))]),
        ("layers[1:9:3]", [("layers", slice(1, 9, 3))]),
        ("layers[::]", [("layers", slice(None, None, None))]),
        ("layers[::-1]", [("layers", slice(None, None, -1))]),
        ("[:2]", [("", slice(None, 2, None))]),
        ("[0]", [("", 0)]),
        ("[0][1]", [("", 0), ("", 1)]),
        ("[0].attention", [("", 0), ("attention", None)]),
        (
            "encoder.layer[:8].attention",
            [("encoder.layer", slice(None, 8, None)), ("attention", None)],
        ),
        (
            "a[0].b.c[1:].*.bias",
            [("a", 0), ("b.c", slice(1, None, None)), ("*.bias", None)],
        ),
        ("*.layer[0]", [("*.layer", 0)]),
        ("stages[0][1:].conv", [("stages", 0), ("", slice(1, None, None)), ("conv", None)]),
    ],
)
def test_names_are_parsed_into_segments(
    text: str, segments: list[tuple[str, int | slice | None]]
) -> None:
    """A name is cut at its brackets; each pair holds one Python index or slice."""
    expected = NamePattern(text, tuple(Segment(*segment) for segment in segments))
    assert parse_one(text) == expected


@pytest.mark.parametrize(
    ("name", "is_glob"),
    [("layer.1", False), ("*", True), ("a?b", True), ("", False), ("a.b_c", False)],
)
def test_a_star_or_a_question_mark_makes_a_glob(name: str, is_glob: bool) -> None:
    """Only * and ? are matched; every other name is looked up."""
    assert Segment(name).is_glob is is_glob


@pytest.mark.parametrize(
    ("glob", "text", "expected"),
    [
        ("*", "a.b.c", True),
        ("a.*", "a.b.c", True),
        ("a.*", "a", False),
        ("a?c", "a.c", True),
        ("a?c", "ac", False),
        ("*.bias", "bias", False),
        ("LayerNorm", "layernorm", False),
        ("a.b", "aXb", False),
        ("a+", "aa", False),
        ("a+", "a+", True),
        ("(a|b)", "a", False),
        ("a[0]", "a[0]", True),
    ],
)
def test_a_glob_crosses_dots_and_takes_all_else_literally(
    glob: str, text: str, expected: bool
) -> None:
    """Star and question mark match any characters; nothing else is special, case counts."""
    assert bool(re.fullmatch(glob_to_regex(glob), text)) is expected


def test_a_regular_expression_is_compiled() -> None:
    """``re:`` and a compiled expression come to the same."""
    text = parse_one(r"re:layer\.\d")
    compiled = parse_one(re.compile(r"layer\.\d"))
    assert isinstance(text, RegexPattern)
    assert text == compiled
    assert text.text == r"re:layer\.\d"


def test_a_compiled_expression_keeps_its_flags() -> None:
    """What the user compiled is what is matched with."""
    pattern = re.compile("LAYER", re.IGNORECASE)
    parsed = parse_one(pattern)
    assert isinstance(parsed, RegexPattern)
    assert parsed.regex is pattern


@pytest.mark.parametrize("text", ["type:BatchNorm2d", "type: BatchNorm2d "])
def test_a_class_by_its_name(text: str) -> None:
    """``type:`` is followed by the name of a class, spaces around it aside."""
    assert parse_one(text) == TypeNamePattern(text, "BatchNorm2d")


def test_a_class_itself() -> None:
    """A class of modules is shown as ``type:`` and its name."""
    assert parse_one(nn.Linear) == ClassPattern("type:Linear", nn.Linear)


def is_bias(fqn: str, parameter: nn.Parameter) -> bool:
    """Stand in for a predicate of the user's."""
    return fqn.endswith("bias")


class Chooser:
    """An object that can be called."""

    def __call__(self, fqn: str, parameter: nn.Parameter) -> bool:
        return False


@pytest.mark.parametrize(
    ("predicate", "text"),
    [
        pytest.param(is_bias, "is_bias(fqn, parameter)", id="function"),
        pytest.param(Chooser(), "Chooser(fqn, parameter)", id="object"),
        pytest.param(lambda fqn, parameter: True, "<lambda>(fqn, parameter)", id="lambda"),
    ],
)
def test_a_callable_is_shown_by_its_name(
    predicate: Callable[[str, nn.Parameter], bool], text: str
) -> None:
    """A predicate is kept as it is, and named in reports."""
    parsed = parse_one(predicate)
    assert isinstance(parsed, PredicatePattern)
    assert parsed.predicate is predicate
    assert parsed.text.endswith(text)


@pytest.mark.parametrize(
    "collection",
    [["a", "b"], ("a", "b"), {"a": 1, "b": 2}.keys(), frozenset({"a", "b"})],
    ids=["list", "tuple", "keys", "set"],
)
def test_any_collection_of_patterns_is_taken(collection: object) -> None:
    """Lists, tuples, sets and keys of a dictionary hold patterns."""
    parsed = parse_patterns(collection)  # type: ignore[arg-type]
    assert {pattern.text for pattern in parsed} == {"a", "b"}


def test_equal_patterns_are_kept_once() -> None:
    """Saying a thing twice is saying it once; the order is that of the first time."""
    parsed = parse_patterns(["b", "a", "b", is_bias, is_bias])
    assert [pattern.text for pattern in parsed] == ["b", "a", "is_bias(fqn, parameter)"]


def test_kinds_may_be_mixed() -> None:
    """One list may hold every kind of pattern."""
    parsed = parse_patterns(["a", "re:a", re.compile("b"), "type:A", nn.Linear, is_bias])
    assert [type(pattern) for pattern in parsed] == [
        NamePattern,
        RegexPattern,
        RegexPattern,
        TypeNamePattern,
        ClassPattern,
        PredicatePattern,
    ]


def test_no_exclude_pattern_at_all_is_allowed() -> None:
    """``exclude=()`` is how nothing is excluded."""
    assert parse_patterns((), allow_empty=True) == ()


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty; '*' stands for everything"),
        ("layer[0", "its brackets do not pair up"),
        ("layer0]", "its brackets do not pair up"),
        ("layer]0[", "its brackets do not pair up"),
        ("layer[[0]]", "its brackets do not pair up"),
        ("[", "its brackets do not pair up"),
        ("layer[0]attention", "a dot is missing before 'attention'"),
        ("layer[0].", "an empty name between or after dots"),
        ("layer[0].[1]", "an empty name between or after dots"),
        ("layer[0]..a", "an empty name between or around dots"),
        ("a..b", "an empty name between or around dots"),
        (".a", "an empty name between or around dots"),
        ("a.", "an empty name between or around dots"),
        (".", "an empty name between or around dots"),
        ("*.", "an empty name between or around dots"),
        ("layer[::0]", "a slice's step cannot be 0"),
        ("type:", "no class name after 'type:'"),
        ("type:  ", "no class name after 'type:'"),
        (
            "layer[]",
            "[] is not an index or a slice: brackets are Python indexing, never a character "
            "class; use 're:...' for those",
        ),
        (
            "layer[abc]",
            "[abc] is not an index or a slice: brackets are Python indexing, never a character "
            "class; use 're:...' for those",
        ),
        (
            "layer[1.5]",
            "[1.5] is not an index or a slice: brackets are Python indexing, never a character "
            "class; use 're:...' for those",
        ),
        (
            "layer[1:2:3:4]",
            "[1:2:3:4] is not an index or a slice: brackets are Python indexing, never a "
            "character class; use 're:...' for those",
        ),
        (
            "layer[!0]",
            "[!0] is not an index or a slice: brackets are Python indexing, never a character "
            "class; use 're:...' for those",
        ),
    ],
)
def test_a_malformed_name_says_what_is_wrong(text: str, reason: str) -> None:
    """Each mistake in a name is told in a sentence, with the pattern as it was written."""
    message = f"^{re.escape(f'bad pattern {text!r}: {reason}')}$"
    with pytest.raises(PatternError, match=message) as caught:
        parse_patterns(text)
    assert (caught.value.pattern, caught.value.reason) == (text, reason)


@pytest.mark.parametrize("index", ["0-11", "0 - 11", "0..11", "0 to 11"])
def test_a_range_is_refused_with_the_slice_meant(index: str) -> None:
    """``layer[0-11]`` is no character class: the message has the slice to write."""
    message = (
        r"brackets are Python indexing, not a character class or a range: "
        r"0 up to and including 11 is 'encoder\.layer\[0:12\]'$"
    )
    with pytest.raises(PatternError, match=message):
        parse_patterns(f"encoder.layer[{index}]")


def test_the_slice_meant_keeps_what_is_around_it() -> None:
    """What the message offers is the whole pattern: copied, it takes no more than was meant."""
    with pytest.raises(PatternError, match=re.escape("'a[0].layer[0:12].attention'")):
        parse_patterns("a[0].layer[0-11].attention")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("layer[0,2]", "['layer[0]', 'layer[2]']"),
        ("layer[0, -1]", "['layer[0]', 'layer[-1]']"),
        ("layer[0,1,2]", "['layer[0]', 'layer[1]', 'layer[2]']"),
    ],
)
def test_commas_are_refused_with_the_list_meant(text: str, meant: str) -> None:
    """Several indices are several patterns."""
    message = re.escape(f"one index or slice in a bracket; write the list {meant}")
    with pytest.raises(PatternError, match=f"{message}$"):
        parse_patterns(text)


def test_the_list_meant_keeps_what_is_around_it() -> None:
    """What the message offers for commas are whole patterns."""
    meant = "['a[0].layer[1].bias', 'a[0].layer[3].bias']"
    with pytest.raises(PatternError, match=re.escape(meant)):
        parse_patterns("a[0].layer[1,3].bias")


def test_spaces_in_a_slice_are_pythons() -> None:
    """``layer[1 : 3]`` is Python, and reads as it does there."""
    assert parse_one("layer[1 : 3]") == NamePattern(
        "layer[1 : 3]", (Segment("layer", slice(1, 3, None)),)
    )


def test_an_expression_that_does_not_compile_says_why() -> None:
    """The regular expression's own error is told, and chained."""
    message = r"^bad pattern 're:\(layer': not a regular expression: missing \), unterminated"
    with pytest.raises(PatternError, match=message) as caught:
        parse_patterns("re:(layer")
    assert isinstance(caught.value.__cause__, re.error)


@pytest.mark.parametrize("collection", [[], (), set()], ids=["list", "tuple", "set"])
def test_no_pattern_at_all_is_an_error(collection: object) -> None:
    """An empty list selects nothing, which nobody means."""
    with pytest.raises(PatternError, match=r"no pattern at all; '\*' stands for everything$"):
        parse_patterns(collection)  # type: ignore[arg-type]


EXPECTED = (
    "expected a str, a compiled regular expression, an nn.Module class, "
    "a callable(fqn, parameter), or a list of these"
)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        pytest.param(3, f"bad pattern 3: got int, {EXPECTED}", id="int"),
        pytest.param(None, f"bad pattern None: got NoneType, {EXPECTED}", id="none"),
        pytest.param(True, f"bad pattern True: got bool, {EXPECTED}", id="bool"),
        pytest.param({"a": 1}, f"bad pattern {{'a': 1}}: got dict, {EXPECTED}", id="dict"),
        pytest.param(b"layer", f"bad pattern b'layer': got bytes, {EXPECTED}", id="bytes"),
        pytest.param(
            nn.Linear(1, 1),
            "bad pattern 'Linear': got a Linear module; give its name, or call this on the "
            "module itself",
            id="module",
        ),
        pytest.param(
            nn.ModuleList(),
            "bad pattern 'ModuleList': got a ModuleList module; give its name, or call this on "
            "the module itself",
            id="module-list",
        ),
        pytest.param(
            nn.Parameter(torch.zeros(2)),
            "bad pattern 'Parameter': got a parameter; give its name as in "
            "model.named_parameters()",
            id="parameter",
        ),
        pytest.param(int, "the class int is not an nn.Module", id="class"),
        pytest.param(
            re.compile(b"layer"),
            "bad pattern re.compile(b'layer'): a regular expression over str is needed, not bytes",
            id="bytes-regex",
        ),
    ],
)
@pytest.mark.parametrize("listed", [False, True], ids=["alone", "in-a-list"])
def test_a_pattern_of_a_wrong_type_is_told_what_would_do(
    pattern: object, message: str, listed: bool
) -> None:
    """What is no pattern is named with its type, alone and in a list alike."""
    given = ["weight", pattern] if listed else pattern
    with pytest.raises(PatternError, match=re.escape(message)):
        parse_patterns(given)  # type: ignore[arg-type]


def test_a_generator_of_patterns_is_no_pattern() -> None:
    """A generator could be read only once: it is refused."""
    with pytest.raises(PatternError, match=rf"got generator, {re.escape(EXPECTED)}$"):
        parse_patterns(name for name in ["a"])  # type: ignore[arg-type]


def test_a_list_in_a_list_is_no_pattern() -> None:
    """Patterns do not nest."""
    with pytest.raises(PatternError, match=r"^bad pattern \['b'\]: got list, expected a str"):
        parse_patterns(["a", ["b"]])  # type: ignore[list-item]


def test_a_wrong_pattern_is_told_in_short() -> None:
    """A whole state dict given by mistake does not fill the screen with its weights."""
    state = nn.Linear(50, 50).state_dict()
    with pytest.raises(PatternError, match="got OrderedDict, expected a str") as caught:
        parse_patterns(state)
    assert len(str(caught.value)) < 500


def test_the_error_is_a_value_error() -> None:
    """A caller who catches ValueError catches it."""
    with pytest.raises(ValueError, match="bad pattern") as caught:
        parse_patterns("a..b")
    assert isinstance(caught.value, FreezekitError)


def test_a_dot_before_brackets_is_told() -> None:
    """The form that fnmatch has, layer.[0-3], is refused with the slice that was meant."""
    with pytest.raises(PatternError, match=re.escape("is 'encoder.layer[0:4].attention'")):
        parse_patterns("encoder.layer.[0-3].attention")
    with pytest.raises(PatternError, match=re.escape("did you mean 'layer[0]'?")):
        parse_patterns("layer.[0]")
