"""The simulated CUDA caching allocator: borders, growth, release, and laws."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freezekit._memory.allocator import Block, CachingAllocator
from freezekit._memory.allocator_config import MIB, AllocatorConfig
from freezekit.errors import SimulatedOutOfMemoryError

EXPANDABLE = AllocatorConfig(expandable_segments=True)


def take(allocator: CachingAllocator, *sizes: int) -> list[Block]:
    """Allocate each size; none of them is 0."""
    blocks = [allocator.malloc(size) for size in sizes]
    return [block for block in blocks if block is not None]


def give(allocator: CachingAllocator, blocks: list[Block]) -> None:
    """Free all of these."""
    for block in blocks:
        allocator.free(block)


@pytest.mark.parametrize(
    ("request_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (1048576, 1048576, 2 * MIB),
        (1048577, 1049088, 20 * MIB),
        (10485248, 10485248, 20 * MIB),
        (10485249, 10485760, 10 * MIB),
        (10485760, 10485760, 10 * MIB),
        (10485761, 10486272, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (19 * MIB, 20 * MIB, 20 * MIB),
        (25 * MIB, 26 * MIB, 26 * MIB),
        (25 * MIB + 1, 26 * MIB, 26 * MIB),
    ],
    ids="{}".format,
)
def test_borders_of_rounding_pools_and_splitting(
    request_bytes: int, allocated: int, reserved: int
) -> None:
    """The first request of a size takes and reserves what PyTorch's rules say."""
    allocator = CachingAllocator()
    take(allocator, request_bytes)
    assert allocator.counters.allocated == allocated
    assert allocator.counters.reserved == reserved
    assert allocator.counters.requested == request_bytes


def test_a_rest_of_one_mib_is_charged() -> None:
    """A block of the large pool is split only if more than 1 MiB remains."""
    allocator = CachingAllocator()
    take(allocator, 5 * MIB, 14 * MIB)
    assert (allocator.counters.allocated, allocator.counters.reserved) == (20 * MIB, 20 * MIB)


def test_zero_bytes_take_no_block() -> None:
    """A request of 0 bytes gets no block and counts nothing."""
    allocator = CachingAllocator()
    assert allocator.malloc(0) is None
    assert allocator.counters.peak_reserved == 0


@pytest.mark.parametrize(
    ("first", "second", "reserved"),
    [
        ([16] * 8, [32] * 4, (128, 256)),
        ([32] * 4, [16] * 8, (128, 128)),
        ([2], [0.5], (20, 22)),
        ([2], [2], (20, 20)),
    ],
    ids=["16s-then-32s", "32s-then-16s", "pools-apart", "reused"],
)
def test_segments_are_not_merged(
    first: list[float], second: list[float], reserved: tuple[int, int]
) -> None:
    """Free segments are used again, and never become one."""
    allocator = CachingAllocator()
    blocks = take(allocator, *(int(size * MIB) for size in first))
    assert allocator.counters.reserved == reserved[0] * MIB
    give(allocator, blocks)
    take(allocator, *(int(size * MIB) for size in second))
    assert allocator.counters.reserved == reserved[1] * MIB


def test_expandable_segments_grow_by_pages_and_merge() -> None:
    """A growing segment maps 20 MiB pages, and what was freed in it becomes one."""
    allocator = CachingAllocator(EXPANDABLE)
    reserved, blocks = [], []
    for _ in range(8):
        blocks += take(allocator, 16 * MIB)
        reserved.append(allocator.counters.reserved // MIB)
    assert reserved == [20, 40, 60, 80, 80, 100, 120, 140]
    give(allocator, blocks)
    take(allocator, *[32 * MIB] * 4)
    assert allocator.counters.reserved == 140 * MIB


@pytest.mark.parametrize(("freed", "grows"), [((0, 2), True), ((0, 1, 2, 3), False)])
def test_expandable_segments_have_holes(freed: tuple[int, ...], *, grows: bool) -> None:
    """Two holes of 16 MiB are no place for 32 MiB; four in a row are."""
    allocator = CachingAllocator(EXPANDABLE)
    blocks = take(allocator, *[16 * MIB] * 4)
    before = allocator.counters.reserved
    give(allocator, [blocks[i] for i in freed])
    take(allocator, 32 * MIB)
    assert (allocator.counters.reserved > before) is grows


def test_expandable_segments_give_whole_pages_back() -> None:
    """Emptying the cache unmaps the pages that are wholly free, and keeps the others."""
    allocator = CachingAllocator(EXPANDABLE)
    blocks = take(allocator, 30 * MIB, 30 * MIB)
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert allocator.counters.reserved == 40 * MIB
    allocator.free(blocks[0])
    allocator.empty_cache()
    assert allocator.counters.reserved == 0
    take(allocator, 30 * MIB)
    assert allocator.counters.reserved == 40 * MIB


def test_released_under_a_capacity() -> None:
    """Where nothing fits any more, wholly free segments are given back before it fails."""
    allocator = CachingAllocator(capacity=64 * MIB)
    give(allocator, take(allocator, 30 * MIB))
    take(allocator, 40 * MIB)
    assert allocator.counters.reserved == 40 * MIB
    assert allocator.counters.peak_reserved == 40 * MIB


def test_a_live_block_keeps_its_segment() -> None:
    """A segment with one live block stays whole, and out of memory says what was free."""
    allocator = CachingAllocator(capacity=64 * MIB)
    blocks = take(allocator, 2 * MIB, 10 * MIB - 512, 30 * MIB)
    give(allocator, blocks[1:])
    with pytest.raises(
        SimulatedOutOfMemoryError,
        match=r"tried to allocate 50\.0 MiB \(a segment of 50\.0 MiB\): of 64\.0 MiB 2\.0 MiB are",
    ) as caught:
        allocator.malloc(50 * MIB)
    error = caught.value
    assert (error.requested, error.capacity) == (50 * MIB, 64 * MIB)
    assert (error.allocated, error.reserved) == (2 * MIB, 20 * MIB)
    assert error.largest_free == 18 * MIB
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.largest_free == error.largest_free


def test_out_of_memory_is_a_memory_error() -> None:
    """Code that catches MemoryError catches it."""
    with pytest.raises(MemoryError, match="tried to allocate"):
        CachingAllocator(capacity=MIB).malloc(1)


def test_fraction_of_the_device() -> None:
    """The process's share bounds what it reserves."""
    config = AllocatorConfig.parse("per_process_memory_fraction:0.5")
    allocator = CachingAllocator(config, capacity=80 * MIB)
    take(allocator, 40 * MIB)
    with pytest.raises(SimulatedOutOfMemoryError, match=r"of 40\.0 MiB"):
        allocator.malloc(1)


def test_large_blocks_are_not_split_above_the_bound() -> None:
    """With max_split_size a large cached block serves only requests near its size."""
    config = AllocatorConfig.parse("max_split_size_mb:64")
    allocator = CachingAllocator(config)
    give(allocator, take(allocator, 100 * MIB))
    take(allocator, 30 * MIB)
    assert allocator.counters.reserved == 130 * MIB
    take(allocator, 90 * MIB)
    assert allocator.counters.reserved == 130 * MIB
    assert allocator.counters.allocated == 130 * MIB


def test_garbage_collection_releases_the_oldest() -> None:
    """Above the threshold, segments that have been free the longest go first."""
    config = AllocatorConfig.parse("garbage_collection_threshold:0.5")
    allocator = CachingAllocator(config, capacity=200 * MIB)
    old, young = take(allocator, 60 * MIB, 60 * MIB)
    allocator.free(old)
    give(allocator, take(allocator, *[512] * 5))
    allocator.free(young)
    take(allocator, 70 * MIB)
    assert old.segment.address not in allocator.segments
    assert young.segment.address in allocator.segments


def test_streams_do_not_share() -> None:
    """A free block serves its own stream only."""
    allocator = CachingAllocator()
    give(allocator, take(allocator, 30 * MIB))
    allocator.malloc(30 * MIB, stream=1)
    assert allocator.counters.reserved == 60 * MIB


@pytest.mark.parametrize(
    ("divisions", "request_bytes", "rounded"),
    [
        ("4", 4_500_000, 5_242_880),
        ("4", 4 * MIB, 4 * MIB),
        ("4", 1200, 1536),
        ("[1:1,>:8]", 1_000_000, 1_000_448),
        ("[1:1,>:8]", 17 * MIB, 18 * MIB),
    ],
)
def test_rounding_to_divisions(divisions: str, request_bytes: int, rounded: int) -> None:
    """Requests above 512 bytes times the divisions round up to a step between powers of two."""
    config = AllocatorConfig.parse(f"roundup_power2_divisions:{divisions}")
    assert CachingAllocator(config).round_size(request_bytes) == rounded


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size:64", r"unknown allocator setting 'max_split_size'; did you mean 'max_sp"),
        ("max_split_size_mb", r"'max_split_size_mb': expected key:value"),
        ("max_split_size_mb:20", r"max_split_size_mb: expected more than 20 MiB, got '20'"),
        ("expandable_segments:yes", r"expandable_segments: expected True or False, got 'yes'"),
        ("garbage_collection_threshold:1.5", r"expected a fraction above 0 and up to 1"),
        ("roundup_power2_divisions:3", r"expected a power of two, got '3'"),
        ("roundup_power2_divisions:[4:2,1:4]", r"expected sizes in rising order"),
        ("roundup_power2_divisions:[4]", r"expected SIZE:DIVISIONS, got '4'"),
        ("large_segment_size_mb:x", r"expected a whole number of MiB, got 'x'"),
    ],
)
def test_bad_settings(text: str, message: str) -> None:
    """A setting that is unknown or malformed is an error that names it."""
    with pytest.raises(ValueError, match=message):
        AllocatorConfig.parse(text)


def test_settings_are_read() -> None:
    """Every setting of the syntax that has an effect is read; the others are accepted."""
    config = AllocatorConfig.parse(
        "backend:native, expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4],"
        "large_segment_size_mb:32,max_non_split_rounding_mb:40"
    )
    assert config == AllocatorConfig(
        expandable_segments=True,
        roundup_power2_divisions=((256 * MIB, 1), (512 * MIB, 2), (None, 4)),
        large_segment_size=32 * MIB,
        max_non_split_rounding=40 * MIB,
    )
    assert AllocatorConfig.parse("") == AllocatorConfig()


SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 40 * MIB), st.sampled_from([MIB, 20 * MIB]))


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1)), max_size=60),
    config=st.sampled_from(
        [
            AllocatorConfig(),
            EXPANDABLE,
            AllocatorConfig(max_split_size=30 * MIB),
            AllocatorConfig(roundup_power2_divisions=((None, 4),)),
        ]
    ),
)
def test_laws(steps: list[tuple[bool, int, int]], config: AllocatorConfig) -> None:
    """Blocks never overlap, counters are their sums, and giving all back leaves nothing."""
    allocator = CachingAllocator(config)
    live: list[Block] = []
    for free, size, stream in steps:
        if free and live:
            allocator.free(live.pop(size % len(live)))
        else:
            block = allocator.malloc(size, stream)
            assert block is not None
            live.append(block)
        spans = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        counters = allocator.counters
        assert counters.allocated == sum(block.size for block in live)
        assert counters.requested <= counters.allocated <= counters.reserved
        assert counters.reserved == sum(s.size for s in allocator.segments.values())
        assert counters.peak_reserved >= counters.reserved
    give(allocator, live)
    assert allocator.counters.allocated == 0
    allocator.empty_cache()
    assert allocator.counters.reserved == 0
