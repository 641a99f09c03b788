"""Whether a sample's features depend on the padding beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from freezekit._features.batches import Batch
from freezekit._features.extractor import FrozenFeatureExtractor, relative_difference
from freezekit._features.rows import name_features
from freezekit._features.trees import iter_tensors, map_tensors
from freezekit.errors import PaddingError

__all__ = ["check_padding", "default_tolerance", "has_padding"]

# Relative to the largest feature. Rounding in other shapes of a batch moves float32 features by
# about 1e-6; a mask that is missing moves them by tenths.
_TOLERANCES = {torch.float16: 0.02, torch.bfloat16: 0.08}
_TOLERANCE = 1e-3


def default_tolerance(features: Any) -> float:
    """The difference that is rounding, for the coarsest dtype among features."""
    found = [_TOLERANCES.get(t.dtype, _TOLERANCE) for t in iter_tensors(features)]
    return max(found, default=_TOLERANCE)


def token_positions(
    extractor: FrozenFeatureExtractor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Which positions are tokens, (batch, length): by the mask, else by what looks like padding.

    Without a mask, runs of the padding id at either end count as padding: the id that the
    backbone's configuration names, else 0.
    """
    mask = extractor.token_mask(args, kwargs)
    if mask is not None:
        return mask.bool() if mask.dim() == 2 else None
    ids = kwargs.get("input_ids")
    if ids is None:
        ids = next(iter_tensors((args, dict(kwargs))), None)
    if ids is None or ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        return None
    config = getattr(extractor.backbone, "config", None)
    pad = getattr(config, "pad_token_id", None)
    other = ids != (0 if pad is None else pad)
    # A position between two others is none of the padding.
    after_first = other.int().cummax(dim=1).values.bool()
    before_last = other.flip(1).int().cummax(dim=1).values.flip(1).bool()
    return after_first & before_last


def has_padding(extractor: FrozenFeatureExtractor, args: Any, kwargs: Any) -> bool:
    """Whether any sample has padding, and tokens besides."""
    tokens = token_positions(extractor, args, kwargs)
    return tokens is not None and bool((tokens.any(dim=1) & ~tokens.all(dim=1)).any())


def check_padding(
    extractor: FrozenFeatureExtractor,
    batch: Batch,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    *,
    tolerance: float | None,
    first_sample: int,
) -> None:
    """Run the sample with the most padding without it, and compare.

    Raises:
        PaddingError: its features are other ones.
    """
    tokens = token_positions(extractor, args, kwargs)
    if tokens is None or not bool((tokens.any(dim=1) & ~tokens.all(dim=1)).any()):
        return
    counts = tokens.sum(dim=1).masked_fill(~tokens.any(dim=1), tokens.shape[1])
    row = int(counts.argmin())
    keep = tokens[row]
    size, length = tokens.shape

    def alone(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != size:
            # Position ids of one row for all: shortened like the rest.
            if tensor.dim() == 2 and tensor.shape == (1, length):
                return tensor[:, : int(keep.sum())]
            return tensor
        one = tensor[row : row + 1]
        return one[:, keep] if one.dim() > 1 and one.shape[1] == length else one

    bare_args, bare_kwargs = map_tensors((args, kwargs), alone)
    expected = name_features(extractor(*bare_args, **bare_kwargs), batch.number)
    found = name_features(output, batch.number)
    worst = 0.0
    for name, value in found.items():
        here = value[row : row + 1]
        if here.dim() > 2 and here.shape[1] == length:
            here = here[:, keep]
        worst = max(worst, relative_difference(expected[name], here))
    limit = default_tolerance(output) if tolerance is None else tolerance
    if worst > limit:
        raise PaddingError(
            first_sample + row, worst, _message(extractor, args, kwargs, first_sample + row, worst)
        )


def _message(
    extractor: FrozenFeatureExtractor, args: Any, kwargs: Any, sample: int, worst: float
) -> str:
    amount = "in shape" if worst == float("inf") else f"by {worst:.1%} of the largest feature"
    text = f"the features of sample {sample} change {amount} with the padding beside it"
    if extractor.token_mask(args, kwargs) is None:
        return (
            f"{text}: the batch has no attention_mask. Pass it, as the tokenizer returns it; or "
            "padding_tolerance=float('inf') if these are no padding tokens"
        )
    return (
        f"{text}, though there is a mask: absolute positions count padding on the left (pad on the "
        "right, or pass position_ids), or the backbone does not use the mask. "
        "padding_tolerance=... allows it"
    )
