"""From a vector per token to a vector per sample, with an eye on the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from freezekit._features.trees import iter_tensors

__all__ = ["Pool", "check_pool", "fit_mask", "pool_tokens", "token_features"]

Pool: TypeAlias = Literal["cls", "mean", "max", "last_token"] | Callable[..., Tensor]


def check_pool(pool: object) -> None:
    """Raise for what is no way to pool.

    Raises:
        ValueError: an unknown name, or a module that has something to learn.
        TypeError: neither a name nor callable.
    """
    if pool is None or (isinstance(pool, str) and pool in _POOLS):
        return
    known = f"expected one of {', '.join(map(repr, _POOLS))}, or a callable"
    if isinstance(pool, str):
        raise ValueError(f"pool: {known}, got {pool!r}")  # noqa: TRY004  (the type is right)
    if not callable(pool):
        raise TypeError(f"pool: {known}, got {type(pool).__name__}")
    if isinstance(pool, nn.Module) and any(p.requires_grad for p in pool.parameters()):
        raise ValueError(
            f"pool: {type(pool).__name__} has trainable parameters, and would get no gradient in "
            "here: apply it to the features, outside of the extractor"
        )


def token_features(output: Any, layer: str = "") -> Tensor:
    """The vectors per token in a model's or a layer's output, (batch, length, width).

    Raises:
        ValueError: there are none.
    """
    hidden = getattr(output, "last_hidden_state", None)
    found = hidden if isinstance(hidden, Tensor) else next(iter_tensors(output), None)
    where = f"layer {layer!r}" if layer else "the backbone"
    if found is None:
        raise ValueError(f"pool: {where} returns no tensor, but a {type(output).__name__}")
    if found.dim() != 3:
        raise ValueError(
            f"pool: expected token features (batch, length, width) from {where}, got the shape "
            f"{tuple(found.shape)}; pass a callable that pools this, or no pool"
        )
    return found


def pool_tokens(pool: Pool, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Pool (batch, length, width) to (batch, width).

    ``mask`` is (batch, length), true where there is a token; without it every position counts. A
    row without a token gives NaN.
    """
    mask = None if mask is None else fit_mask(mask, tokens)
    if not isinstance(pool, str):
        return pool(tokens, mask)
    if mask is not None:
        mask = mask.bool().to(tokens.device)
    return _POOLS[pool](tokens, mask)


def fit_mask(mask: Tensor, tokens: Tensor) -> Tensor:
    """The mask for as many positions as there are features."""
    if mask.dim() != 2 or mask.shape[0] != tokens.shape[0]:
        raise ValueError(
            f"pool: expected a mask of shape (batch, length) = {tuple(tokens.shape[:2])}, got "
            f"{tuple(mask.shape)}"
        )
    length = tokens.shape[1]
    # torch's encoder with nested tensors cuts off positions that are padding in every row.
    if mask.shape[1] > length and not bool(mask[:, length:].any()):
        return mask[:, :length]
    if mask.shape[1] != length:
        raise ValueError(
            f"pool: the mask has {mask.shape[1]} positions, the features have {length}: the "
            "backbone adds or merges tokens; pass a callable that knows which"
        )
    return mask


def _cls(tokens: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return tokens[:, 0]
    return _take(tokens, mask, mask.int().argmax(dim=1))


def _last_token(tokens: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return tokens[:, -1]
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
    return _take(tokens, mask, last)


def _take(tokens: Tensor, mask: Tensor, at: Tensor) -> Tensor:
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    return tokens[rows, at].masked_fill(~mask.any(dim=1, keepdim=True), torch.nan)


def _mean(tokens: Tensor, mask: Tensor | None) -> Tensor:
    # Sums in half precision overflow, or lose the small: in float32 at least.
    wide = torch.promote_types(tokens.dtype, torch.float32)
    if mask is None:
        return tokens.mean(dim=1, dtype=wide).to(tokens.dtype)
    # Not a product: NaN in a padded position would come through it.
    total = tokens.masked_fill(~mask.unsqueeze(2), 0).sum(dim=1, dtype=wide)
    return (total / mask.sum(dim=1, keepdim=True)).to(tokens.dtype)


def _max(tokens: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return tokens.amax(dim=1)
    largest = tokens.masked_fill(~mask.unsqueeze(2), -torch.inf).amax(dim=1)
    return largest.masked_fill(~mask.any(dim=1, keepdim=True), torch.nan)


_POOLS = cast(
    "dict[str, Callable[[Tensor, Tensor | None], Tensor]]",
    {"cls": _cls, "mean": _mean, "max": _max, "last_token": _last_token},
)
