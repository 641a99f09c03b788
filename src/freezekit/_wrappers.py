"""Modules that wrap a model: which names to look through, and whether it is compiled.

Wrappers are recognised by the names of their classes, so that none of their packages
(peft, torch.distributed, torch._dynamo) has to be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["eager", "has_compiled_code", "is_transparent", "reshard"]

# Child names that only ever come from a wrapper (torch.compile, FSDP1, activation checkpointing).
_WRAPPER_CHILDREN = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module"}
)

# Class (or base class) of a wrapper, and the child under which it keeps what it wraps.
_WRAPPER_CLASSES = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
    "PeftModel": "base_model",
    "BaseTuner": "model",
    "BaseTunerLayer": "base_layer",
    "AuxiliaryTrainingWrapper": "original_module",
    "TrainableTokensWrapper": "token_adapter",
}


def is_transparent(parent: nn.Module, child_name: str) -> bool:
    """Whether the child is the wrapped model itself, whose names go on without this component.

    ``is_transparent(DataParallel(model), "module")`` is true; a user's own child called
    ``module`` is a name like any other.
    """
    if child_name in _WRAPPER_CHILDREN:
        return True
    if child_name not in _WRAPPER_CLASSES.values():
        return False
    return any(_WRAPPER_CLASSES.get(cls.__name__) == child_name for cls in type(parent).__mro__)


def reshard(model: nn.Module) -> bool:
    """Let FSDP2 put its sharded parameters back; whether there was anything to do.

    After a forward without a backward (a validation step) the root's are still gathered, and what
    is registered are tensors that go at the next step, with all flags that were set on them.
    """
    sharded = [
        module
        for module in model.modules()
        if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)
    ]
    for module in sharded:
        module.reshard()  # type: ignore[operator]
    return bool(sharded)


def eager(model: nn.Module) -> tuple[bool, nn.Module]:
    """Whether anything in ``model`` is compiled, and the model without its compiled wrapper."""
    compiled = any(
        _is_compiled_wrapper(module) or module._compiled_call_impl is not None
        for module in model.modules()
    )
    while _is_compiled_wrapper(model):
        inner = model._orig_mod
        assert isinstance(inner, nn.Module)
        model = inner
    return compiled, model


def _is_compiled_wrapper(module: nn.Module) -> bool:
    return any(cls.__name__ == "OptimizedModule" for cls in type(module).__mro__)


def has_compiled_code(model: nn.Module) -> bool:
    """Whether ``torch.compile`` already holds compiled code for a module in ``model``.

    Never imports the compiler: a model that is compiled has it imported already. The model inside
    a compiled wrapper cannot be told from one that is not compiled. Code is held for a class, so
    another instance's counts too: a false alarm is a warning more, a missed one is a layer that
    silently does not learn.
    """
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return False
    # Private, since nothing public tells whether a compiled module has run. torch.compile() wraps
    # in an OptimizedModule, Module.compile() keeps its callable on the module.
    if not any(
        isinstance(module, eval_frame.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    ):
        return False
    codes = {getattr(type(module).forward, "__code__", None) for module in model.modules()}
    # Modules of torch's own are compiled through a frame around them.
    codes |= {wrap(len).__code__ for wrap in _frame_makers()}
    codes |= {nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__}
    return any(eval_frame._debug_get_cache_entry_list(code) for code in codes if code is not None)


def _frame_makers() -> list[Callable[[Callable[..., Any]], Any]]:
    utilities = sys.modules.get("torch._dynamo.external_utils")
    return [] if utilities is None else [utilities.wrap_inline]
