"""The tree of what modules hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freezekit._memory.tree import ModuleMemory, module_memory


def test_alike_blocks_are_one_row_and_chains_too() -> None:
    """Sums add up over the blocks, and the largest comes first."""
    held = [(f"encoder.layer.{n}.{part}", size) for n in range(3) for part, size in PARTS.items()]
    assert module_memory([*held, ("head", 5), ("", 3)]) == (
        ModuleMemory(name="encoder.layer[0:3]", depth=0, nbytes=360),
        ModuleMemory(name="mlp", depth=1, nbytes=300),
        ModuleMemory(name="attention", depth=1, nbytes=60),
        ModuleMemory(name="head", depth=0, nbytes=5),
    )


PARTS = {"attention": 20, "mlp": 100}
NAMES = st.lists(st.sampled_from(["a", "b", "0", "1", "7"]), min_size=1, max_size=4).map(".".join)


@given(st.lists(st.tuples(NAMES, st.integers(1, 1000))))
def test_the_top_rows_add_up(held: list[tuple[str, int]]) -> None:
    """Nothing is counted twice or lost, and no row is less than those below it."""
    rows = module_memory(held, least_share=0)
    assert sum(row.nbytes for row in rows if row.depth == 0) == sum(size for _, size in held)
    for index, row in enumerate(rows):
        below = 0
        for other in rows[index + 1 :]:
            if other.depth <= row.depth:
                break
            below += other.nbytes if other.depth == row.depth + 1 else 0
        assert below <= row.nbytes
