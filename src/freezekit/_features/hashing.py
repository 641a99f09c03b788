"""SHA-256 of the contents of tensors: the same on every device, at memory's own pace."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

__all__ = ["digest_many", "digest_tensor", "tensor_bytes"]

# Smaller tensors are not worth a thread.
_PARALLEL_FROM = 1 << 20


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements as bytes in row-major order, little-endian; of the CPU's memory.

    Raises:
        ValueError: it has no contents (meta, fake).
    """
    if tensor.device.type == "meta":
        raise ValueError("a tensor on the meta device has no contents to hash")
    whole = getattr(tensor, "full_tensor", None)  # a sharded one: all of it
    plain = (tensor if whole is None else whole()).detach().cpu()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    flat = plain.resolve_conj().resolve_neg().contiguous().flatten()
    if not flat.numel():
        return memoryview(b"")
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def digest_tensor(tensor: Tensor) -> bytes:
    """SHA-256 of dtype, shape and contents."""
    total = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    total.update(tensor_bytes(tensor))
    return total.digest()


def digest_many(tensors: Iterable[Tensor]) -> list[bytes]:
    """The digest of each tensor, several threads at a time: hashing lets go of Python's lock."""
    given = list(tensors)
    large = [i for i, tensor in enumerate(given) if tensor.nbytes >= _PARALLEL_FROM]
    found = {i: digest_tensor(t) for i, t in enumerate(given) if t.nbytes < _PARALLEL_FROM}
    with ThreadPoolExecutor(max_workers=4) as pool:
        found.update(zip(large, pool.map(digest_tensor, [given[i] for i in large]), strict=True))
    return [found[i] for i in range(len(given))]
