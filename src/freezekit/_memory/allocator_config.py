"""Settings of the CUDA caching allocator, in the syntax of ``PYTORCH_ALLOC_CONF``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields

__all__ = ["MIB", "AllocatorConfig"]

MIB = 1 << 20

# Accepted and without effect on what is allocated where, on one process and its streams.
_NO_EFFECT = frozenset(
    {
        "backend",
        "graph_capture_record_stream_reuse",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "throw_on_cudamalloc_oom",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """How the allocator rounds, splits and grows; the defaults are PyTorch's.

    >>> AllocatorConfig.parse("expandable_segments:True,max_split_size_mb:128").max_split_size
    134217728

    Source: ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDAAllocatorConfig.h`` of torch 2.13.

    Attributes:
        expandable_segments: one growing segment for each pool and stream.
        roundup_power2_divisions: ``(up to this many bytes, divisions)`` in rising order, the last
            bound ``None``; 0 or 1 divisions: none. Empty: rounding to 512 bytes only.
        max_split_size: bytes from which on a block is never split; ``None``: no bound.
        garbage_collection_threshold: share of the capacity from which on old cached blocks are
            released; 0: never.
        large_segment_size: bytes of a segment for large requests below 10 MiB.
        max_non_split_rounding: bytes by which an unsplittable cached block may be larger than
            the request that takes it.
        per_process_memory_fraction: share of the device that the process may reserve.
    """

    expandable_segments: bool = False
    roundup_power2_divisions: tuple[tuple[int | None, int], ...] = ()
    max_split_size: int | None = None
    garbage_collection_threshold: float = 0.0
    large_segment_size: int = 20 * MIB
    max_non_split_rounding: int = 20 * MIB
    per_process_memory_fraction: float = 1.0

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Read ``PYTORCH_ALLOC_CONF`` (or ``PYTORCH_CUDA_ALLOC_CONF``) syntax.

        Args:
            text: such as ``"max_split_size_mb:128,roundup_power2_divisions:[256:1,>:4]"``.

        Raises:
            ValueError: an unknown key, with the nearest one, or a bad value.
        """
        settings: dict[str, object] = {}
        # Commas inside brackets belong to the list of a value.
        for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", text):
            key, colon, value = part.strip().partition(":")
            key, value = key.strip(), value.strip()
            if not colon or not value:
                raise ValueError(f"allocator setting {part.strip()!r}: expected key:value")
            if key in _NO_EFFECT:
                continue
            if key not in _PARSERS:
                near = difflib.get_close_matches(key, [*_PARSERS, *_NO_EFFECT], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown allocator setting {key!r}{hint}")
            name, read = _PARSERS[key]
            try:
                settings[name] = read(value)
            except ValueError as error:
                raise ValueError(f"allocator setting {key}: {error}") from error
        known = {field.name for field in fields(cls)}
        assert settings.keys() <= known
        return cls(**settings)  # type: ignore[arg-type]


def _read_bool(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"expected True or False, got {value!r}")
    return value == "True"


def _read_mib(value: str) -> int:
    if not value.isdecimal() or int(value) == 0:
        raise ValueError(f"expected a whole number of MiB, got {value!r}")
    return int(value) * MIB


def _read_split_size(value: str) -> int:
    size = _read_mib(value)
    if size <= 20 * MIB:
        raise ValueError(f"expected more than 20 MiB, got {value!r}")
    return size


def _read_fraction(value: str) -> float:
    number = float(value)
    if not 0 < number <= 1:
        raise ValueError(f"expected a fraction above 0 and up to 1, got {value!r}")
    return number


def _read_divisions(value: str) -> tuple[tuple[int | None, int], ...]:
    if not value.startswith("["):
        return ((None, _read_power_of_two(value)),)
    found: list[tuple[int | None, int]] = []
    for part in value.strip("[]").split(","):
        bound, colon, divisions = part.strip().partition(":")
        if not colon:
            raise ValueError(f"expected SIZE:DIVISIONS, got {part.strip()!r}")
        limit = None if bound.strip() == ">" else _read_mib(bound.strip())
        found.append((limit, _read_power_of_two(divisions.strip())))
    bounds = [bound for bound, _ in found if bound is not None]
    if bounds != sorted(bounds) or any(bound is None for bound, _ in found[:-1]):
        raise ValueError(f"expected sizes in rising order and '>' last, got {value!r}")
    return tuple(found)


def _read_power_of_two(value: str) -> int:
    if not value.isdecimal() or int(value) & (int(value) - 1):
        raise ValueError(f"expected a power of two, got {value!r}")
    return int(value)


_PARSERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "expandable_segments": ("expandable_segments", _read_bool),
    "garbage_collection_threshold": ("garbage_collection_threshold", _read_fraction),
    "large_segment_size_mb": ("large_segment_size", _read_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _read_mib),
    "max_split_size_mb": ("max_split_size", _read_split_size),
    "per_process_memory_fraction": ("per_process_memory_fraction", _read_fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
}
