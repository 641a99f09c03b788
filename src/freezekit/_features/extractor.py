"""FrozenFeatureExtractor: a backbone that gives features and learns nothing."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freezekit._features import checkpoint
from freezekit._features.casting import cast_inputs, cast_weights
from freezekit._features.checking import check_repeatable, rng_kept
from freezekit._features.guard import settle, trainable_names
from freezekit._features.layers import Taps, run_taps
from freezekit._features.micro import batch_size, merge, split
from freezekit._features.pooling import Pool, check_pool, pool_tokens, token_features
from freezekit._features.trees import detach, iter_tensors, map_tensors
from freezekit._freeze import freeze
from freezekit._inventory import take_inventory
from freezekit._modes import hold, release
from freezekit.errors import InputGradientWarning, TrainableBackboneError, UnrepeatableFeaturesError

__all__ = ["FrozenFeatureExtractor", "as_call"]

# Names of masks in forward(), and whether a true value there means padding.
_MASKS = {"attention_mask": False, "src_key_padding_mask": True, "key_padding_mask": True}


class FrozenFeatureExtractor(nn.Module):
    """Features of a frozen backbone: always in eval, without a graph, ready for a trainable head.

    >>> import torch
    >>> from torch import nn
    >>> backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout())
    >>> model = nn.Sequential(FrozenFeatureExtractor(backbone), nn.Linear(8, 2))
    >>> _ = model.train()
    >>> backbone.training, [name for name, p in model.named_parameters() if p.requires_grad]
    (False, ['1.weight', '1.bias'])
    >>> extractor = FrozenFeatureExtractor(backbone, layers=["0"])
    >>> extractor(torch.zeros(3, 4))["0"].shape
    torch.Size([3, 8])

    The backbone is frozen in place, and each of its modules is held in eval under any ``train()``
    until :meth:`release`. Every call runs under ``torch.no_grad`` (not ``inference_mode``: its
    tensors cannot enter training), in any thread, inside autocast, DDP and ``torch.compile``. A
    backbone that switches gradients on itself gives no graph either.

    Args:
        backbone: any ``nn.Module``, frozen in place.
        layers: FQNs of modules inside the backbone. Their outputs are returned as a dict, and the
            forward pass ends after the last one. Without layers, what the backbone returns, in
            its own type.
        pool: how token features, (batch, length, width), become (batch, width): ``"cls"`` (the
            first token), ``"mean"``, ``"max"``, ``"last_token"``, or a callable that is given the
            features and the mask (or ``None``). The mask is ``attention_mask``, or torch's
            ``src_key_padding_mask``, of the call; padding on either side. Pooled are a tensor, a
            ``last_hidden_state``, or the first tensor of a tuple. A sample without a token gives
            NaN.
        dtype: cast the weights to it, once and in place, and floating point inputs at each call.
            Rotary frequencies stay as they are. The features are in this dtype.
        micro_batch_size: run larger batches in parts of so many samples, which bounds the peak
            memory; dimension 0 of the inputs and outputs has to be the batch.
        save_backbone: whether ``state_dict()`` has the backbone's weights. If not, it has a
            fingerprint of them in their place, which is checked on load.

    Raises:
        UnknownLayerError: a layer does not exist; near names are given.
        UnsupportedModelError: not a module, or a ScriptModule.
        ValueError, TypeError: an option is not what it should be.

    At a call:
        TrainableBackboneError: parameters of the backbone were made trainable again.
        LayerNotRunError: a layer exists, and this input does not reach it.

    Warns:
        InputGradientWarning: at a call, an input requires a gradient, which ends here.
    """

    def __init__(
        self,
        backbone: nn.Module,
        layers: str | Sequence[str] | None = None,
        *,
        pool: Pool | None = None,
        dtype: torch.dtype | None = None,
        micro_batch_size: int | None = None,
        save_backbone: bool = True,
    ) -> None:
        super().__init__()
        names = _check_layers(layers)
        check_pool(pool)
        _check_micro_batch_size(micro_batch_size)
        _check_dtype(dtype)
        inventory = take_inventory(backbone)
        self._taps = None if names is None else Taps(backbone, names)
        if inventory.parameters:
            freeze(backbone)
        for index in range(len(inventory.modules)):
            hold(inventory.module(index))
        if dtype is not None:
            cast_weights(backbone, dtype)
        self.backbone = backbone
        self.pool = pool
        self.dtype = dtype
        self.micro_batch_size = micro_batch_size
        self.save_backbone = save_backbone
        self.training = False
        checkpoint.install(self)

    @property
    def layers(self) -> tuple[str, ...] | None:
        """The layers whose outputs are returned, if they were named."""
        return None if self._taps is None else self._taps.names

    def train(self, mode: bool = True) -> FrozenFeatureExtractor:  # noqa: ARG002, FBT001, FBT002
        """Stay in eval, whatever is asked for; a pooling module stays too."""
        return super().train(mode=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The backbone's features for the arguments that the backbone itself takes."""
        self._refuse_trainable()
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # Its tensors could not enter training.
            with torch.inference_mode(mode=False), torch.no_grad():
                return detach(self._features(*detach((args, kwargs))))
        with torch.no_grad():
            features = self._features(*self._inputs(args, kwargs))
        return detach(features)

    def check(self, batch: Any) -> None:
        """Raise unless two passes over ``batch`` give the same features, to the bit.

        >>> import torch
        >>> class Noisy(nn.Module):
        ...     def forward(self, x):
        ...         return nn.functional.dropout(x)  # always on
        >>> FrozenFeatureExtractor(nn.Sequential(Noisy())).check(torch.ones(1, 8))
        Traceback (most recent call last):
        freezekit.errors.UnrepeatableFeaturesError: two passes over one batch give different ...

        Random generators are as they were afterwards.

        Args:
            batch: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.

        Raises:
            UnrepeatableFeaturesError: the features differ, and the modules where that arises are
                named; or a pass changes a buffer; or the parts of ``micro_batch_size`` do not
                give what the whole batch gives.
        """
        args, kwargs = as_call(batch)
        check_repeatable(self.backbone, lambda: self(*args, **kwargs))
        if self.micro_batch_size is not None:
            self._check_micro_batches(args, kwargs)

    def release(self) -> nn.Module:
        """Let the backbone's modules follow ``train()`` again, and return it, still frozen.

        The next call holds them again.
        """
        for module in self.backbone.modules():
            release(module)
        return self.backbone

    def extra_repr(self) -> str:
        """The options that are set."""
        options = {
            "layers": None if self.layers is None else list(self.layers),
            "pool": self.pool if isinstance(self.pool, str) else None,
            "dtype": self.dtype,
            "micro_batch_size": self.micro_batch_size,
        }
        return ", ".join(f"{key}={value!r}" for key, value in options.items() if value is not None)

    # What a call does

    def _refuse_trainable(self) -> None:
        if torch.compiler.is_compiling():
            trainable = any(p.requires_grad for p in self.backbone.parameters())
        else:
            trainable = settle(self.backbone)
        if trainable:
            raise TrainableBackboneError(trainable_names(self.backbone))

    def _inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments without gradients; said aloud, since the user may expect one."""
        if any(t.requires_grad for t in iter_tensors((args, kwargs))):
            if not torch.compiler.is_compiling():
                warnings.warn(
                    "an input of FrozenFeatureExtractor requires a gradient; it ends here, since "
                    "the backbone runs under no_grad. To send gradients through a frozen backbone, "
                    "use freezekit.freeze(backbone) and call the backbone itself",
                    InputGradientWarning,
                    stacklevel=5,
                )
            args, kwargs = map_tensors((args, kwargs), torch.Tensor.detach)
        return args, kwargs

    def _features(self, args: Any, kwargs: Any) -> Any:
        if self.dtype is not None:
            args, kwargs = cast_inputs((args, kwargs), self.dtype)
        part = self.micro_batch_size
        size = None if part is None else batch_size((args, kwargs))
        if part is None or size is None or size <= part:
            return self._pooled(args, kwargs)
        parts = [self._pooled(*inputs) for inputs in split((args, kwargs), size, part)]
        sizes = [min(part, size - start) for start in range(0, size, part)]
        return merge(parts, sizes)

    def _pooled(self, args: Any, kwargs: Any) -> Any:
        if self._taps is None:
            output = self.backbone(*args, **kwargs)
            if self.pool is None:
                return output
            return self._pool(token_features(output), args, kwargs)
        outputs = run_taps(self._taps, self.backbone, args, kwargs)
        if self.pool is None:
            return outputs
        return {
            name: self._pool(token_features(output, name), args, kwargs)
            for name, output in outputs.items()
        }

    def _pool(self, tokens: Tensor, args: Any, kwargs: Any) -> Tensor:
        assert self.pool is not None
        return pool_tokens(self.pool, tokens, self.token_mask(args, kwargs))

    def token_mask(self, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """The call's mask, (batch, length), true where there is a token; ``None`` without one."""
        given = dict(kwargs)
        if not any(name in given for name in _MASKS):
            given = _by_name(self.backbone, args, kwargs)
        for name, is_padding in _MASKS.items():
            mask = given.get(name)
            if isinstance(mask, Tensor):
                if is_padding:  # true, or minus infinity, where there is none
                    return ~mask if mask.dtype == torch.bool else mask == 0
                return mask
        return None

    def _check_micro_batches(self, args: Any, kwargs: Any) -> None:
        part = self.micro_batch_size
        try:
            self.micro_batch_size = None
            with rng_kept():
                whole = self(*args, **kwargs)
        finally:
            self.micro_batch_size = part
        with rng_kept():
            parted = self(*args, **kwargs)
        difference = relative_difference(whole, parted)
        if difference > 0.02:
            raise UnrepeatableFeaturesError(
                f"micro_batch_size={part}: the parts give other features than the whole batch (by "
                f"{difference:.1%} of the largest): dimension 0 is not the batch's "
                "(batch_first=False?), or the backbone mixes samples",
            )


# -- helpers -----------------------------------------------------------------------------------


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a batch: a mapping is keywords, a tuple positions."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return tuple(batch), {}
    return (batch,), {}


def relative_difference(one: Any, other: Any) -> float:
    """The largest difference between two outputs, relative to the largest value of the first."""
    largest = 0.0
    for first, second in zip(iter_tensors(one), iter_tensors(other), strict=True):
        if first.shape != second.shape:
            return float("inf")
        if first.numel() and first.is_floating_point():
            a, b = first.double(), second.double()
            scale = max(float(a.abs().nan_to_num().max()), 1e-12)
            same = (a == b) | (a.isnan() & b.isnan())
            apart = (a - b).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0)
            largest = max(largest, float(apart.max()) / scale)
    return largest


def _by_name(backbone: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names that the backbone's forward gives them."""
    forward: Callable[..., Any] = backbone.forward
    try:
        bound = inspect.signature(forward).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return dict(kwargs)
    return dict(bound.arguments)


def _check_layers(layers: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if layers is None:
        return None
    names = (layers,) if isinstance(layers, str) else tuple(layers)
    if not names:
        raise ValueError("layers: none are named; leave it out for what the backbone returns")
    for name in names:
        _check_layer(name)
    return tuple(dict.fromkeys(names))


def _check_layer(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"layers: expected FQNs (text), got {type(name).__name__}")


def _check_dtype(dtype: object) -> None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return
    raise ValueError(f"dtype: expected a floating point torch.dtype, got {dtype!r}")


def _check_micro_batch_size(size: object) -> None:
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(f"micro_batch_size: expected an integer of 1 or more, got {size!r}")
