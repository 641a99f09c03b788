"""What holds for every model and every pattern."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import freezekit as fk
from freezekit._fold import fold_names
from freezekit._format import format_bytes, format_count, format_percent
from freezekit._inventory import take_inventory
from freezekit._modes import held_by
from freezekit.errors import PatternError, UnmatchedPatternError, UntrainableParameterError
from property.strategies import (
    entries_of,
    frozen_models,
    law,
    model_and_patterns,
    models,
    modules_of,
    patterns_of,
    trainable_names,
    unique_numel,
)
from zoo import snapshot

# Partial ties and longer numbers are part of the game here; other tests expect these warnings.
pytestmark = pytest.mark.filterwarnings("ignore::freezekit.errors.FreezekitWarning")

ModelAndPatterns = tuple[nn.Module, list[Any]]


def selected(model: nn.Module, patterns: Any, **options: Any) -> set[str]:
    """First names of what is selected."""
    return set(fk.select(model, patterns, **options).parameters)


def closure(model: nn.Module, names: set[str]) -> set[str]:
    """All names of the memories that these names are of."""
    entries = entries_of(model)
    memories = {entries[name].untyped_storage().data_ptr() for name in names}
    return {n for n, p in entries.items() if p.untyped_storage().data_ptr() in memories}


# -- the walk ----------------------------------------------------------------------------------


@law
@given(frozen_models())
def test_the_walk_finds_every_name_of_every_parameter(model: nn.Module) -> None:
    """Entries are exactly the names that the module tree has."""
    inventory = take_inventory(model)
    assert [entry.fqn for entry in inventory.entries] == list(entries_of(model))
    assert [info.fqn for info in inventory.modules] == [name for name, _ in modules_of(model)]


@law
@given(frozen_models())
def test_counts_are_those_of_unique_storages(model: nn.Module) -> None:
    """Every count of parameters equals an independent sum over unique storages."""
    expected = unique_numel(model)
    audit = fk.audit(model)
    assert audit.total == audit.trainable + audit.frozen == expected
    assert fk.select(model).numel == expected
    assert fk.freeze(model).frozen == expected


# Where a rectangle of a matrix of 4 x 6 lies: first and last row, first and last column.
rectangles = st.tuples(
    st.integers(0, 3), st.integers(1, 4), st.integers(0, 5), st.integers(1, 6)
).filter(lambda r: r[0] < r[1] and r[2] < r[3])


@settings(law, max_examples=200)
@given(rectangles, rectangles, st.sampled_from([1, 80]))
def test_views_are_one_parameter_exactly_if_they_share_an_element(
    one: tuple[int, int, int, int], other: tuple[int, int, int, int], scale: int
) -> None:
    """Blocks of rows and columns of one matrix, small or large, are tied iff they overlap."""
    matrix = torch.zeros(4 * scale, 6 * scale)
    model = nn.ParameterList(
        nn.Parameter(matrix[top * scale : bottom * scale, left * scale : right * scale])
        for top, bottom, left, right in (one, other)
    )
    rows = range(max(one[0], other[0]), min(one[1], other[1]))
    columns = range(max(one[2], other[2]), min(one[3], other[3]))
    shared = bool(rows) and bool(columns)
    assert len(take_inventory(model).parameters) == (1 if shared else 2)


# Any view into 40 blocks: its shape, its strides and where it begins.
strided = st.tuples(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(st.integers(0, 6), min_size=3, max_size=3),
    st.integers(0, 3),
)


@settings(law, max_examples=200)
@given(strided, strided, st.sampled_from([1, 5000]))
def test_no_shared_element_is_missed(one: Any, other: Any, block: int) -> None:
    """However odd two views are, and however large, what shares an element is one parameter."""
    numbers, memory = torch.arange(40), torch.zeros(40 * block)
    seen, parameters = [], []
    for shape, strides, offset in (one, other):
        steps = strides[: len(shape)]
        seen.append(set(numbers.as_strided(shape, steps, offset).flatten().tolist()))
        view = memory.as_strided(
            [*shape, block], [*(step * block for step in steps), 1], offset * block
        )
        parameters.append(nn.Parameter(view))
    assume(not seen[0].isdisjoint(seen[1]))
    assert len(take_inventory(nn.ParameterList(parameters)).parameters) == 1


# -- selecting ---------------------------------------------------------------------------------


@law
@given(st.data(), models())
def test_a_name_is_anchored(data: st.DataObject, model: nn.Module) -> None:
    """A module's name selects what begins with it and a dot, a parameter's itself; no more."""
    names = list(entries_of(model))
    prefixes = {name[:at] for name in names for at, c in enumerate(name) if c == "."}
    pattern = data.draw(st.sampled_from(sorted({*names, *prefixes})))
    expected = {n for n in names if n == pattern or n.startswith(f"{pattern}.")}
    assert closure(model, selected(model, pattern)) == closure(model, expected)


@law
@given(model_and_patterns())
def test_a_selection_is_the_union_of_its_patterns(case: ModelAndPatterns) -> None:
    """select(a | b) = select(a) | select(b)."""
    model, patterns = case
    parts = [selected(model, pattern) for pattern in patterns]
    assert selected(model, patterns) == set().union(*parts)


@law
@given(model_and_patterns())
def test_a_wrapper_is_looked_through(case: ModelAndPatterns) -> None:
    """Patterns select the same in a model and in the same model wrapped."""
    model, patterns = case
    wrapped = nn.DataParallel(model)
    assert fk.select(wrapped, patterns).parameters == fk.select(model, patterns).parameters
    assert fk.freeze_state(wrapped) == fk.freeze_state(model)


@law
@given(model_and_patterns(), st.randoms(use_true_random=False))
def test_the_order_of_patterns_does_not_matter(case: ModelAndPatterns, random: Any) -> None:
    """The same patterns in another order, or said twice, select the same in the same order."""
    model, patterns = case
    shuffled = [*patterns, patterns[0]]
    random.shuffle(shuffled)
    assert fk.select(model, patterns).parameters == fk.select(model, shuffled).parameters


@law
@given(st.data(), model_and_patterns())
def test_exclude_takes_away(data: st.DataObject, case: ModelAndPatterns) -> None:
    """select(a, exclude=b) = select(a) - select(b); if nothing is left, that is an error."""
    model, patterns = case
    exclude = data.draw(patterns_of(model))
    expected = selected(model, patterns) - selected(model, exclude)
    # A norm without parameters may be all that is left: there is something to hold.
    if expected or any(info.has_running_stats for info in take_inventory(model).modules):
        with contextlib.suppress(UnmatchedPatternError):
            assert selected(model, patterns, exclude=exclude) == expected
            return
        assert not expected
    else:
        with pytest.raises(UnmatchedPatternError, match="all that it matches is excluded"):
            fk.select(model, patterns, exclude=exclude)


@law
@given(models(), st.text("abelnory_.[]:*?,-012 ", max_size=14))
def test_any_text_is_a_pattern_or_an_error_of_ours(model: nn.Module, text: str) -> None:
    """Whatever is written, it selects something or is told what is wrong with it."""
    told = text
    try:
        told = fk.select(model, text).matches[0].pattern
    except (PatternError, UnmatchedPatternError) as error:
        told = text if repr(text) in str(error) else str(error)
    assert told == text


@law
@given(st.data(), models())
def test_what_is_suggested_matches(data: st.DataObject, model: nn.Module) -> None:
    """A name with a letter changed is told names, and each of them selects something."""
    name = data.draw(st.sampled_from(list(entries_of(model))))
    at = data.draw(st.integers(0, len(name) - 1))
    pattern = name[:at] + data.draw(st.sampled_from("xq7")) + name[at + 1 :]
    try:
        fk.select(model, pattern)
    except UnmatchedPatternError as error:
        for suggestion in error.suggestions[0]:
            assert fk.select(model, suggestion).parameters


@law
@given(st.data(), models())
def test_folded_names_select_what_was_folded(data: st.DataObject, model: nn.Module) -> None:
    """fold_names() of FQNs are patterns that select exactly these."""
    names = fk.select(model).parameters
    chosen = data.draw(st.sets(st.sampled_from(names), min_size=1))
    folded = fold_names(sorted(chosen))
    assert len(folded) <= len(chosen)
    assert selected(model, folded) == chosen


# -- freezing ----------------------------------------------------------------------------------


@law
@given(model_and_patterns())
def test_freezing_freezes_what_is_selected_and_nothing_else(case: ModelAndPatterns) -> None:
    """After freeze(P) exactly select(P) has lost its flag; frozen + trainable = all."""
    model, patterns = case
    before = trainable_names(model)
    chosen = closure(model, selected(model, patterns))
    report = fk.freeze(model, patterns)
    assert trainable_names(model) == before - chosen
    assert report.frozen + report.trainable == report.total == unique_numel(model)
    assert all(p.grad is None for n, p in entries_of(model).items() if n in chosen)


@law
@given(model_and_patterns())
def test_freezing_is_idempotent(case: ModelAndPatterns) -> None:
    """A second freeze finds nothing to do."""
    model, patterns = case
    fk.freeze(model, patterns)
    once = snapshot(model)
    again = fk.freeze(model, patterns)
    assert (again.changed, again.held, again.released, again.cleared) == ((), (), (), ())
    assert snapshot(model) == once


@law
@given(st.data(), model_and_patterns(frozen_models(storage_ties=False)))
def test_one_more_pattern_never_unfreezes(data: st.DataObject, case: ModelAndPatterns) -> None:
    """What freeze(P) freezes and holds, freeze(P | Q) does too."""
    model, patterns = case
    other = copy.deepcopy(model)
    fk.freeze(model, patterns)
    fk.freeze(other, [*patterns, data.draw(patterns_of(model))])
    assert trainable_names(other) <= trainable_names(model)
    held = set(fk.freeze_state(model)["held"])
    assert held <= set(fk.freeze_state(other)["held"])


@law
@given(model_and_patterns())
def test_frozen_norms_hold_still_under_train(case: ModelAndPatterns) -> None:
    """After freeze(P) and train(), no frozen norm of what P selects is in train mode."""
    model, patterns = case
    chosen = closure(model, selected(model, patterns))
    fk.freeze(model, patterns)
    model.train()
    assert model.training or held_by(model) is not None
    for prefix, module in modules_of(model):
        own = [f"{prefix}.{name}" for name in module._parameters]
        if isinstance(module, nn.BatchNorm1d) and module.affine and set(own) <= chosen:
            assert not module.training


@law
@given(model_and_patterns(models()))
def test_unfreezing_undoes_freezing(case: ModelAndPatterns) -> None:
    """In a model that trains as a whole, unfreeze(P) after freeze(P) gives back all of it."""
    model, patterns = case
    before = snapshot(model)
    fk.freeze(model, patterns)
    fk.unfreeze(model, patterns)
    assert snapshot(model) == before


@law
@given(model_and_patterns())
def test_unfreezing_makes_what_is_selected_trainable(case: ModelAndPatterns) -> None:
    """After unfreeze(P) exactly select(P) has been added to what learns."""
    model, patterns = case
    before = closure(model, trainable_names(model))
    chosen = closure(model, selected(model, patterns))
    can_learn = {name for name, p in entries_of(model).items() if p.is_floating_point()}
    fk.unfreeze(model, patterns)
    assert closure(model, trainable_names(model)) == before | (chosen & can_learn)


@law
@given(model_and_patterns())
def test_train_only_trains_exactly_what_is_selected(case: ModelAndPatterns) -> None:
    """After train_only(P), exactly what can learn of select(P) is trainable."""
    model, patterns = case
    entries = entries_of(model)
    can_learn = {name for name, p in entries.items() if p.is_floating_point()}
    expected = closure(model, selected(model, patterns)) & can_learn
    try:
        report = fk.train_only(model, patterns)
    except UntrainableParameterError:
        assume(condition=False)
    assert trainable_names(model) == expected
    assert report.trainable + report.frozen == unique_numel(model)


@law
@given(model_and_patterns())
def test_train_only_is_idempotent(case: ModelAndPatterns) -> None:
    """A second train_only(P) finds nothing to do."""
    model, patterns = case
    fk.train_only(model, patterns)
    once = snapshot(model)
    again = fk.train_only(model, patterns)
    assert (again.changed, again.held, again.released) == ((), (), ())
    assert snapshot(model) == once


@law
@given(model_and_patterns(), st.booleans())
def test_leaving_the_block_is_the_identity(case: ModelAndPatterns, mode: bool) -> None:
    """frozen(P) restores every flag, gradient, mode and hold, whatever train() did inside."""
    model, patterns = case
    before = snapshot(model)
    with fk.frozen(model, patterns):
        assert closure(model, selected(model, patterns)).isdisjoint(trainable_names(model))
        model.train(mode)
    assert snapshot(model) == before


@law
@given(st.data(), model_and_patterns())
def test_blocks_nest(data: st.DataObject, case: ModelAndPatterns) -> None:
    """An inner block restores the outer one's state, the outer one the first."""
    model, patterns = case
    inner = data.draw(patterns_of(model))
    before = snapshot(model)
    with fk.frozen(model, patterns):
        outer = snapshot(model)
        with fk.frozen(model, inner):
            pass
        assert snapshot(model) == outer
    assert snapshot(model) == before


@law
@given(model_and_patterns(frozen_models(storage_ties=False)), st.booleans())
def test_a_freeze_survives_copies(case: ModelAndPatterns, mode: bool) -> None:
    """Deepcopy and pickle carry flags and holds; train() of a copy moves the copy alone."""
    model, patterns = case
    fk.freeze(model, patterns)
    state, before = fk.freeze_state(model), snapshot(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert fk.freeze_state(other) == state
        other.train(mode)
        assert not any(held_by(m) is not None and m.training for m in other.modules())
    assert snapshot(model) == before


# -- states and reports ------------------------------------------------------------------------


@law
@given(st.data(), model_and_patterns(frozen_models(storage_ties=False)))
def test_a_freeze_state_goes_round(data: st.DataObject, case: ModelAndPatterns) -> None:
    """Through JSON and into a model frozen otherwise, the freeze is the same."""
    model, patterns = case
    other = copy.deepcopy(model)
    fk.freeze(model, patterns)
    model.train(data.draw(st.booleans()))
    fk.freeze(other, data.draw(patterns_of(model)))
    state = json.loads(json.dumps(fk.freeze_state(model)))
    fk.load_freeze_state(other, state)
    assert fk.freeze_state(other) == state
    assert trainable_names(other) == trainable_names(model)


@law
@given(model_and_patterns())
def test_audit_changes_nothing(case: ModelAndPatterns) -> None:
    """Flags, gradients, modes, values and the random state are as before."""
    model, patterns = case
    fk.freeze(model, patterns)
    before, rng = snapshot(model), torch.random.get_rng_state()
    values = copy.deepcopy(model.state_dict())
    first = fk.audit(model)
    assert snapshot(model) == before
    assert torch.equal(rng, torch.random.get_rng_state())
    assert all(torch.equal(values[key], value) for key, value in model.state_dict().items())
    assert fk.audit(model) == first


@law
@given(model_and_patterns())
def test_an_audits_columns_add_up(case: ModelAndPatterns) -> None:
    """Outermost rows add up to the totals: tensors, elements, bytes, trainable, held."""
    model, patterns = case
    fk.freeze(model, patterns)
    report = fk.audit(model)
    outermost = [row for row in report.rows if row.depth == 0]
    assert sum(row.tensors for row in outermost) == report.tensors
    assert sum(row.numel for row in outermost) == report.total
    assert sum(row.trainable for row in outermost) == report.trainable
    assert sum(row.nbytes for row in outermost) == report.parameter_bytes
    held = {id(module) for _, module in modules_of(model) if held_by(module) is not None}
    assert sum(row.held for row in outermost) == len(held)


@law
@given(model_and_patterns())
def test_no_norm_is_found_moving_after_a_freeze(case: ModelAndPatterns) -> None:
    """freeze(everything) leaves audit no statistics that move (FK201, FK202)."""
    model, _ = case
    fk.freeze(model)
    model.train()
    codes = {finding.code for finding in fk.audit(model).findings}
    assert codes.isdisjoint({"FK201", "FK202", "FK301", "FK401"})


@law
@given(model_and_patterns())
def test_reports_survive_json_and_fit(case: ModelAndPatterns) -> None:
    """to_dict survives JSON and pickle, and the text is within 100 columns."""
    model, patterns = case
    for report in (fk.select(model, patterns), fk.freeze(model, patterns), fk.audit(model)):
        assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
        assert pickle.loads(pickle.dumps(report)) == report
        assert all(len(line) <= 100 for line in str(report).split("\n"))


# -- numbers as text ---------------------------------------------------------------------------

BYTE_UNITS: dict[str, int] = {"B": 1, **{f"{c}iB": 1024**i for i, c in enumerate("KMGTP", 1)}}
COUNT_UNITS: dict[str, int] = {"": 1, **{c: 1000**i for i, c in enumerate("KMBT", 1)}}


def read_bytes(text: str) -> float:
    """The number of bytes that a text says."""
    number, unit = text.split(" ")
    return float(number.replace(",", "")) * BYTE_UNITS[unit]


def read_count(text: str) -> float:
    """The count that a text says."""
    found = re.fullmatch(r"([\d,.]+)([KMBT]?)", text)
    assert found is not None
    return float(found[1].replace(",", "")) * COUNT_UNITS[found[2]]


@law
@given(st.integers(0, 2**60), st.integers(0, 2**60))
def test_bytes_are_monotone(one: int, other: int) -> None:
    """More bytes never read as fewer."""
    less, more = sorted((one, other))
    assert read_bytes(format_bytes(less)) <= read_bytes(format_bytes(more))


@law
@given(st.integers(0, 2**60))
def test_bytes_are_right_within_their_precision(nbytes: int) -> None:
    """What is read back is within half of the last digit; below 1 KiB it is exact."""
    text = format_bytes(nbytes)
    unit = BYTE_UNITS[text.split(" ")[1]]
    tolerance = 0 if unit == 1 else 0.05 * unit * (1 + 1e-9)
    assert abs(read_bytes(text) - nbytes) <= tolerance


@law
@given(st.integers(0, 10**14), st.integers(0, 10**14))
def test_counts_are_monotone_and_right(one: int, other: int) -> None:
    """More never reads as less; what is read back is within half of the last digit."""
    less, more = sorted((one, other))
    assert read_count(format_count(less)) <= read_count(format_count(more))
    text = format_count(more)
    unit = COUNT_UNITS.get(text[-1], 1)
    assert abs(read_count(text) - more) <= (0.005 * unit * (1 + 1e-9) if unit > 1 else 0)


@law
@given(st.integers(1, 10**12), st.integers(0, 10**12))
def test_shares_are_honest(whole: int, part: int) -> None:
    """0% is nothing, 100% is all, and all else is right within a tenth."""
    part = min(part, whole)
    text = format_percent(part, whole)
    assert (text == "0%") == (part == 0)
    assert (text == "100%") == (part == whole)
    percent = float(text.strip("<%"))
    assert abs(percent - 100 * part / whole) <= 0.1 + 1e-9
