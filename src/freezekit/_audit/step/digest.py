"""Whether tensors have the same bits: by comparison, or by a digest of a hundredth of the size."""

from __future__ import annotations

import torch

__all__ = ["digest", "same_bits"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Words of one line of the digest: a line's is eight bytes.
_LINE = 1024
# Lines whose products are made at once: a megabyte, which stays in a core's cache.
_LINES = 128


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are alike to the bit; NaN is like itself."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.is_sparse or one.is_quantized:
        return _same_values(one, other)
    return torch.equal(_as_integers(one), _as_integers(other))


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_sparse and other.is_sparse:
        one, other = one.coalesce(), other.coalesce()
        return torch.equal(one.indices(), other.indices()) and torch.equal(
            one.values(), other.values()
        )
    return torch.equal(one, other)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    kind = _INTEGERS.get(plain.itemsize)
    return plain if kind is None or plain.is_quantized else plain.view(kind)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A digest: for each 1,024 words a weighted sum of their bits, modulo 2**64.

    A word is eight bytes of the tensor, or one element where the bytes do not divide so. Any one
    changed element changes the digest, since all weights are odd.
    """
    flat = _as_integers(tensor).reshape(-1)
    words = 8 // flat.itemsize
    if words > 1 and len(flat) % words == 0 and flat.storage_offset() % words == 0:
        flat = flat.view(torch.int64)
    if flat.is_floating_point() or flat.is_complex():  # a subclass that is not read as bits
        return tensor.detach().clone()
    weights = torch.arange(1, 2 * _LINE, 2, device=flat.device, dtype=torch.int64)
    weights = weights * 0x5851F42D4C957F2D | 1
    parts = []
    for block in torch.split(flat, _LINE * _LINES):
        length = len(block)
        padded = -length % _LINE
        wide = block.to(torch.int64)
        if padded:
            wide = torch.nn.functional.pad(wide, (0, padded))
        parts.append((wide.view(-1, _LINE) * weights).sum(1))
    return torch.cat(parts) if parts else flat.to(torch.int64)
