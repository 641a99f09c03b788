"""From a model's output for a batch to rows of a store: names, layouts, dtypes, packing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from freezekit._features.pooling import fit_mask
from freezekit._format import format_dtype, format_tensor
from freezekit.errors import BatchError, NonFiniteFeatureError

__all__ = ["Column", "Rows", "Schema", "make_rows", "name_features"]


_NO_CACHE = (
    "which is no feature; choose layers or a pool, or switch it off in the backbone "
    "(config.use_cache = False)"
)


class Column(NamedTuple):
    """A feature or a column of a store.

    ``shape`` is that of one sample, or of one token if the layout is ``"packed"``.
    """

    layout: Literal["dense", "packed"]
    dtype: torch.dtype
    shape: tuple[int, ...]

    def text(self) -> str:
        """``"f32[tokens,384]"``."""
        if self.layout == "dense":
            return format_tensor(self.dtype, self.shape)
        return f"{format_dtype(self.dtype)}[{','.join(['tokens', *map(str, self.shape)])}]"


# What a store may hold. Names come from files: none is looked up that is not here.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class Schema(NamedTuple):
    """What every sample of a store has."""

    features: dict[str, Column]
    columns: dict[str, Column]

    def to_json(self) -> dict[str, Any]:
        """As the index and each shard have it."""

        def entry(column: Column) -> dict[str, Any]:
            dtype = str(column.dtype).removeprefix("torch.")
            return {"layout": column.layout, "dtype": dtype, "shape": list(column.shape)}

        return {
            "features": {name: entry(column) for name, column in self.features.items()},
            "columns": {name: entry(column) for name, column in self.columns.items()},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Schema:
        """The schema in an index or a shard.

        Raises:
            KeyError, TypeError, ValueError: it is not one.
        """

        def column(entry: Mapping[str, Any]) -> Column:
            layout: Literal["dense", "packed"] = entry["layout"]
            if layout not in ("dense", "packed"):
                raise ValueError(f"no such layout: {layout!r}")
            return Column(layout, _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])))

        return cls(
            {name: column(entry) for name, entry in found["features"].items()},
            {name: column(entry) for name, entry in found["columns"].items()},
        )

    def text(self) -> str:
        """``"features f32[384], labels i64[]"``."""
        entries = {**self.features, **self.columns}
        return ", ".join(f"{name} {column.text()}" for name, column in entries.items())


class Rows(NamedTuple):
    """One batch as it is stored: packed features without padding, and the lengths of samples."""

    schema: Schema
    size: int
    tensors: dict[str, Tensor]
    lengths: Tensor | None


def name_features(output: Any, index: int) -> dict[str, Tensor]:
    """The tensors in a model's output by name; the one tensor of an output is ``"features"``.

    Raises:
        BatchError: something in it is no tensor.
    """
    found = dict(_named(output, "", index))
    if not found:
        raise BatchError(index, f"the backbone returns no tensor, but a {type(output).__name__}")
    if list(found) == [""]:
        return {"features": found[""]}
    return found


def _named(value: Any, name: str, index: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key == "past_key_values" and item is not None:
                raise BatchError(index, f"{key!r} is a {type(item).__name__}, {_NO_CACHE}")
            yield from _named(item, f"{name}.{key}" if name else str(key), index)
    elif isinstance(value, list | tuple):
        # A layer's (hidden states,) is its hidden states.
        items = [item for item in value if item is not None]
        for position, item in enumerate(items):
            inner = f"{name}.{position}" if name else str(position)
            yield from _named(item, name if len(items) == 1 else inner, index)
    elif value is not None:
        where = repr(name) if name else "the output"
        raise BatchError(
            index,
            f"{where} is a {type(value).__name__}, {_NO_CACHE}",
        )


def make_rows(
    features: Mapping[str, Tensor],
    columns: Mapping[str, Tensor],
    *,
    mask: Tensor | None,
    size: int,
    index: int,
    dtype: torch.dtype | None,
    first_sample: int,
    allow_nonfinite: bool,
) -> Rows:
    """Check a batch's features, cast them, and drop the padding of those that are per token.

    Raises:
        BatchError: a feature has no batch dimension.
        NonFiniteFeatureError: a feature is NaN or infinite, or overflows ``dtype``.
    """
    _check_names(features, columns, index)
    tensors: dict[str, Tensor] = {}
    described: dict[str, Column] = {}
    lengths = None
    for name, feature in features.items():
        if not feature.dim() or feature.shape[0] != size:
            raise BatchError(
                index,
                f"the feature {name!r} has the shape {tuple(feature.shape)} for {size} samples: "
                "its dimension 0 is not the batch's",
            )
        keep = _tokens(feature, mask)
        kept = feature
        if keep is not None:
            # What stands in padded positions is not stored, and need not be finite.
            kept = feature.masked_fill(~keep.view(*keep.shape, *[1] * (feature.dim() - 2)), 0)
        if not allow_nonfinite:
            _check_finite(kept, name, first_sample)
        cast = _cast(kept, dtype, name, first_sample)
        if keep is None:
            described[name] = Column("dense", cast.dtype, tuple(cast.shape[1:]))
            tensors[name] = cast.cpu()
        else:
            described[name] = Column("packed", cast.dtype, tuple(cast.shape[2:]))
            tensors[name] = cast[keep].cpu()
            lengths = keep.sum(dim=1).cpu()
    extra = {name: Column("dense", c.dtype, tuple(c.shape[1:])) for name, c in columns.items()}
    tensors.update(columns)
    return Rows(Schema(described, extra), size, tensors, lengths)


def _check_names(features: Mapping[str, Tensor], columns: Mapping[str, Tensor], index: int) -> None:
    twice = features.keys() & columns.keys()
    if twice:
        names = ", ".join(map(repr, sorted(twice)))
        raise BatchError(index, f"{names} is a feature and a column that goes along: rename one")
    for name, tensor in {**features, **columns}.items():
        if name in ("offsets", "attention_mask"):
            raise BatchError(index, f"{name!r} is the store's own word: rename what goes along")
        if tensor.dtype not in _DTYPES.values():
            raise BatchError(index, f"{name!r} is {tensor.dtype}, which a store does not hold")


def _tokens(feature: Tensor, mask: Tensor | None) -> Tensor | None:
    """Which positions of a feature are tokens, if it is one per token and there is a mask."""
    if mask is None or feature.dim() < 3 or mask.dim() != 2:
        return None
    if feature.shape[:1] != mask.shape[:1]:
        return None
    try:
        return fit_mask(mask, feature).bool().to(feature.device)
    except ValueError:
        return None


def _check_finite(feature: Tensor, name: str, first_sample: int) -> None:
    if not feature.is_floating_point():
        return
    # One pass without a mask in memory; a sum that overflows is looked at closely.
    wide = torch.promote_types(feature.dtype, torch.float32)
    if bool(feature.sum(dtype=wide).isfinite()) or bool(feature.isfinite().all()):
        return
    bad = ~feature.isfinite().reshape(len(feature), -1).all(dim=1)
    row = int(bad.int().argmax())
    nan = bool(feature[row].isnan().any())
    raise NonFiniteFeatureError(
        first_sample + row,
        name,
        int(bad.sum()),
        f"{'is NaN' if nan else 'is infinite'}; allow_nonfinite=True stores it as it is",
    )


def _cast(feature: Tensor, dtype: torch.dtype | None, name: str, first_sample: int) -> Tensor:
    if dtype is None or not feature.is_floating_point() or feature.dtype == dtype:
        return feature
    cast = feature.to(dtype)
    lost = cast.isinf() & feature.isfinite()
    if bool(lost.any()):
        bad = lost.reshape(len(lost), -1).any(dim=1)
        row = int(bad.int().argmax())
        largest = float(feature[row].abs().nan_to_num(posinf=0).max())
        raise NonFiniteFeatureError(
            first_sample + row,
            name,
            int(bad.sum()),
            f"overflows {str(dtype).removeprefix('torch.')}: it is {largest:g}, the dtype's "
            f"largest is {torch.finfo(dtype).max:g}; use bfloat16 or float32",
        )
    return cast
