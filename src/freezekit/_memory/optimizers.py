"""Optimizers by name, with the defaults that they have on CUDA."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["OptimizerFactory", "as_on_cuda", "optimizer_factory", "optimizer_names"]

OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]

# By name, beside torch.optim's own classes.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"sgd_momentum": ("SGD", {"momentum": 0.9})}


def _classes() -> dict[str, type[Optimizer]]:
    return {
        name: cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls)
        and issubclass(cls, Optimizer)
        and cls is not Optimizer
        # (LBFGS calls the model itself, SparseAdam wants sparse gradients.)
        and name not in {"LBFGS", "SparseAdam"}
    }


def optimizer_names() -> tuple[str, ...]:
    """Every name that :func:`optimizer_factory` knows."""
    names = {name.lower(): cls for name, cls in _classes().items()}
    fused = [f"{name}_fused" for name, cls in names.items() if _takes(cls, "fused")]
    return tuple(sorted([*names, *fused, *_VARIANTS]))


def optimizer_factory(name: str) -> OptimizerFactory:
    """``optimizer_factory("adamw")``: the class of that name with its defaults on CUDA.

    ``"adamw_fused"`` is ``AdamW(fused=True)``.

    Raises:
        ValueError: no optimizer of that name; the nearest is given.
    """
    wanted = name.lower()
    if wanted not in optimizer_names():
        near = difflib.get_close_matches(wanted, optimizer_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown optimizer {name!r}{hint} (known: {', '.join(optimizer_names())}; "
            "or give an optimizer, or a function from parameters to one)"
        )
    class_name, options = _VARIANTS.get(wanted, (wanted.removesuffix("_fused"), {}))
    if wanted.endswith("_fused"):
        options = {**options, "fused": True}
    classes = {known.lower(): cls for known, cls in _classes().items()}
    cls = classes[class_name.lower()]
    # A learning rate is given since some (SGD before torch 2.3) have none.
    return lambda parameters: cls(parameters, **{"lr": 1e-3, **options})


def as_on_cuda(optimizer: Optimizer) -> Optimizer:
    """Set what torch would choose for parameters on CUDA: lists of tensors at once (foreach).

    Its temporaries are as large as all trainable parameters. Adafactor is the exception: it goes
    parameter by parameter unless told otherwise. Source: ``_default_to_fused_or_foreach`` in
    torch/optim/optimizer.py.
    """
    ours = type(optimizer).__module__.startswith("torch.optim")
    if not ours or isinstance(optimizer, torch.optim.Adafactor):
        return optimizer
    for group in (optimizer.defaults, *optimizer.param_groups):
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer


def _takes(cls: type[Optimizer], option: str) -> bool:
    return option in inspect.signature(cls).parameters
