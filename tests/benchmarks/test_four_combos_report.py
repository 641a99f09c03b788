"""Results survive JSON, tables fit a terminal, and the docs page is the JSON's."""

from __future__ import annotations

import doctest
import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from _four_combos import cli, page, report, results
from _four_combos.combos import COMBINATIONS, apply
from _four_combos.results import CudaPart, Results
from benchmarks.four_combos_support import GIB, MakeTiny, cuda_row, some_results, train_row

WITH_CUDA = some_results(
    cuda=CudaPart(
        device="GPU",
        total_bytes=139 * GIB,
        rows=(
            cuda_row("ran", 5 * GIB, 6 * GIB),
            cuda_row("out of memory"),
            cuda_row("cap above device"),
        ),
    )
)
both = pytest.mark.parametrize("found", [some_results(), WITH_CUDA], ids=["cpu", "cuda"])


# -- JSON --------------------------------------------------------------------------------------


@both
def test_json_round_trip(found: Results) -> None:
    assert results.from_json(results.to_json(found)) == found


def test_json_begins_with_the_schema_and_holds_null_without_cuda() -> None:
    content = json.loads(results.to_json(some_results()))
    assert next(iter(content.items())) == ("schema", "freezekit.benchmarks.four_combos/2")
    assert content["cuda"] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"schema": "other/1"},
            "expected the schema 'freezekit.benchmarks.four_combos/2', found 'other/1'",
        ),
        ({"surplus": 1}, "results: missing or unknown: surplus"),
        ({"seed": True}, "results.seed: expected int, found bool"),
        ({"seed": None}, "results.seed: expected int, found NoneType"),
        ({"saved": {}}, "results.saved: expected list, found dict"),
        ({"saved": [{}]}, r"results.saved\[0\]: missing or unknown: attention"),
        ({"versions": {"torch": 2}}, r"results.versions\['torch'\]: expected str, found int"),
    ],
    ids=[
        "schema",
        "surplus",
        "bool for int",
        "null for int",
        "dict for list",
        "empty row",
        "version",
    ],
)
def test_other_json_is_refused_with_the_place(change: dict[str, object], words: str) -> None:
    content = json.loads(results.to_json(some_results())) | change
    with pytest.raises(ValueError, match=words):
        results.from_json(json.dumps(content))


def test_json_that_is_no_object_is_refused() -> None:
    with pytest.raises(ValueError, match="found None"):
        results.from_json("[]")


def test_an_integer_is_read_where_a_float_is_meant() -> None:
    content = json.loads(results.to_json(some_results())) | {"seconds": 12}
    assert results.from_json(json.dumps(content)).seconds == 12.0


def test_writing_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    results.write(some_results(), path)
    results.write(some_results(seed=1), path)
    assert results.from_json(path.read_text(encoding="utf-8")).seed == 1
    assert [each.name for each in path.parent.iterdir()] == ["out.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.write(some_results(seconds=float("nan")), path)
    assert path.read_text(encoding="utf-8") == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


# -- tables ------------------------------------------------------------------------------------


def shown(found: Results) -> str:
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    for table in report.tables(found):
        console.print(report.rich_table(table))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@both
def test_tables_fit_100_columns_and_cut_nothing(found: Results) -> None:
    text = shown(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for row in (row for table in report.tables(found) for row in table.rows):
        line = re.compile(r"\s+".join(re.escape(cell) for cell in row if cell))
        assert line.search(text), row


def test_square_brackets_are_no_markup() -> None:
    table = report.Table(title="t", columns=("layer[0]",), left=1, rows=(("x[red]",),))
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    console.print(report.rich_table(table))
    assert isinstance(console.file, io.StringIO)
    assert "layer[0]" in (text := console.file.getvalue())
    assert "x[red]" in text


def test_without_cuda_the_section_says_so() -> None:
    assert "no CUDA device here: not measured" in shown(some_results())


def test_running_out_of_memory_is_shown_as_in_the_question() -> None:
    cells = [row[-2:] for row in report.cuda_table(WITH_CUDA).rows]
    assert cells == [("5.0", "6.0"), ("CUDA out of memory", ""), ("device is smaller", "")]


def test_warm_up_is_left_out_and_times_a_compares_the_same_batches() -> None:
    row, three_times = train_row("a", 1.0), train_row("d", 3.0)
    assert report.step_quartiles(row, 2) == (2.0, 3.0, 4.0)
    assert report.times(three_times, row, 2) == pytest.approx(3.0)


def test_a_loss_that_was_not_finite_is_named() -> None:
    assert report.loss_edges(train_row("a", 1.0)) == ("0.600", "0.200")
    assert report.loss_edges(train_row("d", 1.0)) == ("0.600", "not finite")


def test_a_difference_between_a_b_and_c_is_not_hidden() -> None:
    assert report.same_head(some_results())
    rows = (train_row("a", 1.0), train_row("b", 1.0, "other"), *some_results().train[2:])
    differing = some_results(train=rows)
    assert not report.same_head(differing)
    assert "a, b and c: the losses or the trained heads DIFFER" in shown(differing)


def test_a_quick_run_is_labelled() -> None:
    assert shown(some_results(quick=True)).count("QUICK") == 2


# -- the page ----------------------------------------------------------------------------------


def test_the_page_is_what_the_committed_results_render_to() -> None:
    """If this fails: python benchmarks/four_combos.py --docs."""
    text = cli.PAGE.read_text(encoding="utf-8")
    found = results.from_json(cli.RESULTS.read_text(encoding="utf-8"))
    assert text == page.render(text, found)
    assert not found.quick


def test_the_committed_results_tell_nothing_about_their_owner() -> None:
    text = cli.RESULTS.read_text(encoding="utf-8")
    assert not re.search(r'": "/|/home/|/root/|/tmp/|/Users/|\\\\', text)


def test_the_pages_examples_run() -> None:
    text = cli.PAGE.read_text(encoding="utf-8")
    examples = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    test = doctest.DocTestParser().get_doctest(examples, {}, cli.PAGE.name, None, None)
    failed, attempted = doctest.DocTestRunner().run(test)
    assert attempted > 15
    assert failed == 0


@both
def test_rendering_twice_changes_nothing(found: Results) -> None:
    once = page.render(cli.PAGE.read_text(encoding="utf-8"), found)
    assert page.render(once, found) == once


@pytest.mark.parametrize(
    "text", ["", "<!-- four_combos: other -->\n<!-- end -->"], ids=["none", "other"]
)
def test_a_page_with_other_blocks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the page must hold the blocks"):
        page.render(text, some_results())


def test_only_b_raises_under_distributed_data_parallel(make_tiny: MakeTiny, tmp_path: Path) -> None:
    """The page says so. The pooler, unused in the tutorial, would make d raise as well."""
    ids = torch.ones(2, 5, dtype=torch.long)
    distributed = torch.distributed
    meeting = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        raised = []
        for combination in COMBINATIONS:
            model = make_tiny()
            model.bert.pooler = None
            apply(combination, model)
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
            wrapped(ids).sum().backward()
            try:
                wrapped(ids).sum().backward()
            except RuntimeError as error:
                assert "Expected to have finished reduction" in str(error)  # noqa: PT017 - which one
                raised.append(combination.key)
    finally:
        distributed.destroy_process_group()
    assert raised == ["b"]
