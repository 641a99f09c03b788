"""The CUDA caching allocator, simulated: where each block lands, what is reserved, what fails.

Source of every rule: ``c10/cuda/CUDACachingAllocator.cpp``, unchanged in them from torch 2.6
to 2.11 (proved by replaying recorded traces, see ``benchmarks/allocator_replay.py``).
"""

from __future__ import annotations

from collections.abc import Callable

from freezekit._format import format_bytes
from freezekit._memory.allocator_config import MIB, AllocatorConfig
from freezekit._memory.blocks import Block, Counters, Pool, Segment, absorb, with_growth
from freezekit.errors import SimulatedOutOfMemoryError

__all__ = ["Block", "CachingAllocator", "Counters", "Segment"]

MIN_BLOCK = 512
SMALL_LIMIT = MIB  # requests up to here (rounded) are the small pool's
SMALL_SEGMENT = 2 * MIB
OWN_SEGMENT = 10 * MIB  # requests from here on get a segment of their own size
SEGMENT_STEP = 2 * MIB


class CachingAllocator:
    """Gives out blocks as the CUDA caching allocator does.

    >>> allocator = CachingAllocator()
    >>> block = allocator.malloc(25 * 1024 * 1024)
    >>> allocator.counters.allocated // 1024**2, allocator.counters.reserved // 1024**2
    (26, 26)

    (The segment is rounded up to 26 MiB, and a rest of 1 MiB is not split off but charged.)

    Args:
        config: the allocator's settings.
        capacity: bytes that the process may reserve: the device's memory less the CUDA context.
            ``None``: without bound.
        place: gives a new segment of so many bytes its address; by default rising addresses.
    """

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        *,
        capacity: int | None = None,
        place: Callable[[int], int] | None = None,
    ) -> None:
        self.config = config or AllocatorConfig()
        self.counters = Counters()
        self.limit = (
            None if capacity is None else int(capacity * self.config.per_process_memory_fraction)
        )
        self.segments: dict[int, Segment] = {}
        self._capacity = capacity
        self._place = place or self._place_upwards
        self._next_address = SEGMENT_STEP
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._unmapped: dict[tuple[bool, int], list[Block]] = {}

    # -- what a caller does

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """A block for ``nbytes``; ``None`` for 0 bytes, which take none.

        Raises:
            SimulatedOutOfMemoryError: it does not fit under the capacity, also after everything
                cached was released.
        """
        if nbytes == 0:
            return None
        size = self.round_size(nbytes)
        small = size <= SMALL_LIMIT
        pool = self._pools.setdefault((small, stream), Pool())
        pool.calls += 1
        block = self._find(pool, size)
        if block is None:
            self._collect_garbage()
            block = self._grow(size, small=small, stream=stream)
        if block is None and self.config.max_split_size is not None:
            released = self._release_oversize(size, stream)
            block = self._grow(size, small=small, stream=stream) if released else None
        if block is None:
            self.empty_cache()
            block = self._grow(size, small=small, stream=stream)
        if block is None:
            raise self._out_of_memory(nbytes, size)
        self._hand_out(block, size, nbytes)
        return block

    def free(self, block: Block) -> None:
        """Return a block: it merges with free neighbours of its segment and stays cached."""
        assert block.in_use, "a block is returned once"
        self.counters.change(allocated=-block.size, requested=-block.requested)
        block.in_use, block.requested = False, 0
        self._merge_and_cache(block)

    def empty_cache(self) -> list[Segment]:
        """Give every wholly free segment back to the device; returns them in that order.

        Large before small, each by size, then address. Of growing segments the wholly free pages.
        """
        released: list[Segment] = []
        for small in (False, True):
            pools = [pool for key, pool in self._pools.items() if key[0] == small]
            for pool in pools:
                for block in pool:
                    if block.segment.expandable:
                        self._unmap(block)
                    elif not block.is_split:
                        released.append(self._release(block))
        return released

    def adopt(self, segment: Segment, blocks: list[tuple[int, int, bool]]) -> list[Block]:
        """Take over a segment that exists already, as ``(address, size, in use)`` blocks."""
        self.segments[segment.address] = segment
        self._next_address = max(self._next_address, segment.address + segment.size)
        self.counters.change(reserved=segment.size)
        adopted: list[Block] = []
        for address, size, in_use in blocks:
            block = Block(segment, address, size, requested=size if in_use else 0, in_use=in_use)
            if adopted:
                block.prev, adopted[-1].next = adopted[-1], block
            adopted.append(block)
        pool = self._pools.setdefault((segment.small, segment.stream), Pool())
        for block in adopted:
            if block.in_use:
                self.counters.change(allocated=block.size, requested=block.size)
            else:
                pool.add(block)
        return adopted

    # -- sizes

    def round_size(self, nbytes: int) -> int:
        """What a request is rounded up to: a multiple of 512, or a step between powers of two."""
        if nbytes < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self._divisions(nbytes)
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            floor = 1 << (nbytes.bit_length() - 1)
            step = floor // divisions
            return floor if nbytes == floor else -(-nbytes // step) * step
        return -(-nbytes // MIN_BLOCK) * MIN_BLOCK

    def _divisions(self, nbytes: int) -> int:
        for bound, divisions in self.config.roundup_power2_divisions:
            if bound is None or nbytes <= bound:
                return divisions
        return 0

    def _segment_size(self, size: int) -> int:
        if size <= SMALL_LIMIT:
            return SMALL_SEGMENT
        if size < OWN_SEGMENT:
            return self.config.large_segment_size
        return -(-size // SEGMENT_STEP) * SEGMENT_STEP

    # -- finding and handing out

    def _find(self, pool: Pool, size: int) -> Block | None:
        """Best fit: the smallest free block that is large enough, the lowest address of these."""
        candidates = pool.at_least(size)
        block = next(candidates, None)
        if block is None:
            return None
        if block.segment.expandable:
            # Counted with what it can still grow by: an edge is taken last.
            for other in candidates:
                if with_growth(other) >= with_growth(block):
                    break
                block = other
        limit = self.config.max_split_size
        if limit is not None and not block.segment.expandable:
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + self.config.max_non_split_rounding:
                return None
        pool.remove(block)
        return block

    def _hand_out(self, block: Block, size: int, requested: int) -> None:
        rest = block.size - size
        if self._should_split(block, size, rest):
            tail = Block(block.segment, block.address + size, rest, prev=block, next=block.next)
            if block.next is not None:
                block.next.prev = tail
            block.next, block.size = tail, size
            self._pool_of(tail).add(tail)
        block.in_use, block.requested = True, requested
        self.counters.change(allocated=block.size, requested=requested)

    def _should_split(self, block: Block, size: int, rest: int) -> bool:
        if block.segment.small or self.config.expandable_segments:
            return rest >= MIN_BLOCK
        limit = self.config.max_split_size
        return rest > SMALL_LIMIT and (limit is None or size < limit)

    def _merge_and_cache(self, block: Block) -> None:
        for neighbour in (block.prev, block.next):
            if neighbour is None or neighbour.in_use or not neighbour.mapped:
                continue
            if not block.mapped:
                continue
            self._pool_of(neighbour).remove(neighbour)
            absorb(block, neighbour)
        self._pool_of(block).add(block)

    def _pool_of(self, block: Block) -> Pool:
        return self._pools.setdefault((block.segment.small, block.segment.stream), Pool())

    # -- growing

    def _grow(self, size: int, *, small: bool, stream: int) -> Block | None:
        if self.config.expandable_segments:
            return self._grow_expandable(size, small=small, stream=stream)
        nbytes = self._segment_size(size)
        if not self._has_room(nbytes):
            return None
        segment = Segment(self._place(nbytes), nbytes, small, stream)
        self.segments[segment.address] = segment
        self.counters.change(reserved=nbytes)
        return Block(segment, segment.address, nbytes)

    def _has_room(self, nbytes: int) -> bool:
        return self.limit is None or self.counters.reserved + nbytes <= self.limit

    def _place_upwards(self, size: int) -> int:
        address = self._next_address
        self._next_address += -(-size // SEGMENT_STEP) * SEGMENT_STEP
        return address

    # -- releasing

    def _release(self, block: Block) -> Segment:
        self._pool_of(block).remove(block)
        del self.segments[block.segment.address]
        self.counters.change(reserved=-block.size)
        return block.segment

    def _release_oversize(self, size: int, stream: int) -> bool:
        """Release cached blocks too large to be split, until ``size`` is free."""
        limit = self.config.max_split_size
        pool = self._pools.get((False, stream))
        if limit is None or pool is None:
            return False
        wanted = max(size, limit)
        whole = [b for b in pool if not b.is_split and not b.segment.expandable]
        for block in whole:
            if block.size >= wanted:
                self._release(block)
                return True
        # None is large enough alone: the largest first, until they are together.
        total = 0
        for block in reversed(whole):
            if block.size < limit or total >= wanted:
                break
            total += block.size
            self._release(block)
        return total >= wanted

    def _collect_garbage(self) -> None:
        """Release the oldest wholly free large segments above the threshold."""
        if self.limit is None or not self.config.garbage_collection_threshold:
            return
        threshold = int(self.config.garbage_collection_threshold * self.limit)
        target = self.counters.reserved - threshold
        ages = {
            id(block): (pool.calls - block.born, block)
            for (small, _), pool in self._pools.items()
            if not small
            for block in pool
            if not block.is_split and not block.segment.expandable
        }
        while target > 0 and ages:
            mean = sum(age for age, _ in ages.values()) / len(ages)
            old = [key for key, (age, _) in ages.items() if age >= mean]
            for key in old:
                if target <= 0:
                    return
                _, block = ages.pop(key)
                target -= block.size
                self._release(block)

    def _out_of_memory(self, nbytes: int, size: int) -> SimulatedOutOfMemoryError:
        assert self.limit is not None, "only a capacity can be exceeded"
        cached = self.counters.reserved - self.counters.allocated
        largest = max((pool.keys[-1][0] for pool in self._pools.values() if pool.keys), default=0)
        needed = self._segment_size(size)
        return SimulatedOutOfMemoryError(
            f"tried to allocate {format_bytes(nbytes)} (a segment of {format_bytes(needed)}): "
            f"of {format_bytes(self.limit)} {format_bytes(self.counters.allocated)} are "
            f"allocated and {format_bytes(cached)} are cached but not free in one piece "
            f"(largest {format_bytes(largest)})",
            requested=nbytes,
            capacity=self.limit,
            allocated=self.counters.allocated,
            reserved=self.counters.reserved,
            largest_free=largest,
        )

    # -- expandable segments

    def _grow_expandable(self, size: int, *, small: bool, stream: int) -> Block | None:
        """Map more pages of a growing segment, at the lowest address that has room."""
        block = self._find_room(size, small=small, stream=stream)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            after = block.next
            assert after is not None, "the range is longer than any request"
            mapped = self._map(after, min(size - block.size, after.size))
            if mapped is None:
                return None
            block = mapped
        self._pool_of(block).remove(block)
        return block

    def _find_room(self, size: int, *, small: bool, stream: int) -> Block:
        unmapped = self._unmapped.setdefault((small, stream), [])
        for block in sorted(unmapped, key=lambda b: b.address):
            start = block
            if block.prev is not None and not block.prev.in_use:
                start = block.prev
            room = 0
            at: Block | None = start
            while at is not None and not at.in_use and room < size:
                room += at.size
                at = at.next
            if room >= size:
                return start
        # One virtual range of 1 1/8 of the device's memory.
        length = ((self._capacity or 1 << 44) * 9 // 8) // self._page(small=small) + 1
        length *= self._page(small=small)
        segment = Segment(self._place(length), 0, small, stream, expandable=True)
        self.segments[segment.address] = segment
        block = Block(segment, segment.address, length, mapped=False)
        unmapped.append(block)
        return block

    def _page(self, *, small: bool) -> int:
        return SMALL_SEGMENT if small else self.config.large_segment_size

    def _map(self, block: Block, size: int) -> Block | None:
        """Map the front of an unmapped block, whole pages; it merges with free neighbours."""
        segment = block.segment
        page = self._page(small=segment.small)
        end = block.address + size - segment.address
        nbytes = min(-(-end // page) * page + segment.address - block.address, block.size)
        if not self._has_room(nbytes):
            return None
        unmapped = self._unmapped[segment.small, segment.stream]
        unmapped.remove(block)
        if nbytes < block.size:
            rest = Block(
                segment,
                block.address + nbytes,
                block.size - nbytes,
                mapped=False,
                prev=block,
                next=block.next,
            )
            if block.next is not None:
                block.next.prev = rest
            block.next, block.size = rest, nbytes
            unmapped.append(rest)
        block.mapped = True
        segment.size += nbytes
        self.counters.change(reserved=nbytes)
        self._merge_and_cache(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Give the whole pages inside a free block back."""
        segment = block.segment
        page = self._page(small=segment.small)
        first = -(-(block.address - segment.address) // page) * page + segment.address
        last = (block.address + block.size - segment.address) // page * page + segment.address
        if last <= first:
            return
        self._pool_of(block).remove(block)
        middle = self._cut(block, first, last)
        middle.mapped = False
        segment.size -= middle.size
        self.counters.change(reserved=-middle.size)
        unmapped = self._unmapped[segment.small, segment.stream]
        for neighbour in (middle.prev, middle.next):
            if neighbour is not None and not neighbour.mapped:
                unmapped.remove(neighbour)
                absorb(middle, neighbour)
        unmapped.append(middle)

    def _cut(self, block: Block, first: int, last: int) -> Block:
        """Cut a free block at two addresses; the outer parts stay free, the middle is returned."""
        if first > block.address:
            front = Block(block.segment, block.address, first - block.address, prev=block.prev)
            if block.prev is not None:
                block.prev.next = front
            front.next, block.prev = block, front
            block.size -= front.size
            block.address = first
            self._pool_of(front).add(front)
        rest = block.address + block.size - last
        if rest:
            tail = Block(block.segment, last, rest, prev=block, next=block.next)
            if block.next is not None:
                block.next.prev = tail
            block.next = tail
            block.size -= rest
            self._pool_of(tail).add(tail)
        return block
