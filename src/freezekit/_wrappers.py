"""Modules that wrap a model: which names to look through, and whether it is compiled.

Wrappers are recognised by the names of their classes, so that none of their packages
(peft, torch.distributed, torch._dynamo) has to be imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import nn

__all__ = [
    "CHECKPOINTING",
    "checkpoints_reentrantly",
    "eager",
    "flags_compiled_for",
    "gradients_ddp_expects",
    "has_compiled_code",
    "is_class_of",
    "is_compiled",
    "is_kind",
    "is_transparent",
    "parameters_ddp_ignores",
    "reshard",
]

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
    compiled = any(is_compiled(module) for module in model.modules())
    while _is_compiled_wrapper(model):
        inner = model._orig_mod
        assert isinstance(inner, nn.Module)
        model = inner
    return compiled, model


def _is_compiled_wrapper(module: nn.Module) -> bool:
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


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
    if not any(is_compiled(module) for module in model.modules()):
        return False
    codes = {getattr(type(module).forward, "__code__", None) for module in model.modules()}
    # Modules of torch's own are compiled through a frame around them.
    codes |= {wrap(len).__code__ for wrap in _frame_makers()}
    codes |= {nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__}
    return any(eval_frame._debug_get_cache_entry_list(code) for code in codes if code is not None)


def _frame_makers() -> list[Callable[[Callable[..., Any]], Any]]:
    utilities = sys.modules.get("torch._dynamo.external_utils")
    return [] if utilities is None else [utilities.wrap_inline]


# -- what wrappers remember ----------------------------------------------------------------------


def is_kind(module: nn.Module, *names: str) -> bool:
    """Whether the module's class, or a base of it, is called so."""
    kind: Any = type(module)
    return is_class_of(kind, names)


@lru_cache(maxsize=4096)
def is_class_of(cls: Any, names: tuple[str, ...]) -> bool:
    """Whether the class, or a base of it, is called so."""
    return any(base.__name__ in names for base in cls.__mro__)


def gradients_ddp_expects(module: nn.Module) -> tuple[int, int] | None:
    """Tensors, and their bytes, that a DistributedDataParallel was built to reduce.

    Private, since nothing public tells what its reducer was built for. None if it does not tell.
    """
    if not is_kind(module, "DistributedDataParallel"):
        return None
    try:
        data = module._get_ddp_logging_data()  # type: ignore[operator]
        return int(data["num_parameter_tensors"]), int(data["total_parameter_size_bytes"])
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return None


def parameters_ddp_ignores(module: nn.Module) -> frozenset[str]:
    """Raw names of the parameters that a DistributedDataParallel was told to leave alone."""
    return frozenset(getattr(module, "parameters_to_ignore", ()))


_GUARD = re.compile(
    r"check_tensor\(L\['\w+'\]((?:\._modules\['[^']+'\])*)\._parameters\['([^']+)'\],"
    r".*?requires_grad=(True|False)"
)
_COMPONENT = re.compile(r"\._modules\['([^']+)'\]")


def flags_compiled_for(module: nn.Module) -> list[dict[str, bool]]:
    """For each compiled form of a module: its parameters' names, and the flags it was made for.

    Private, and read from the text of the compiler's guards, since nothing public tells: an empty
    list where the text cannot be read, or nothing was compiled.
    """
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return []
    inner = module._orig_mod if isinstance(module, eval_frame.OptimizedModule) else module
    codes = {getattr(type(inner).forward, "__code__", None)}
    codes |= {wrap(len).__code__ for wrap in _frame_makers()}
    codes |= {nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__}
    known = {name for name, _ in inner.named_parameters(remove_duplicate=False)}
    found = []
    for code in codes:
        for entry in eval_frame._debug_get_cache_entry_list(code) if code is not None else ():
            flags = {
                ".".join((*_COMPONENT.findall(path), name)): flag == "True"
                for path, name, flag in _GUARD.findall(str(entry.guard_manager))
            }
            if flags and flags.keys() <= known:
                found.append(flags)
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was put around the module, or ``module.compile()`` called on it."""
    return _is_compiled_wrapper(module) or module._compiled_call_impl is not None


# The attributes that checkpoints_reentrantly reads.
CHECKPOINTING = frozenset({"_gradient_checkpointing_func", "checkpoint_impl"})


def checkpoints_reentrantly(module: nn.Module) -> bool:
    """Whether the module runs what is in it under a reentrant checkpoint.

    That is transformers' ``gradient_checkpointing_enable`` with ``use_reentrant=True``, and torch's
    and fairscale's checkpoint wrappers.
    """
    function = vars(module).get("_gradient_checkpointing_func")
    if function is not None and vars(module).get("gradient_checkpointing"):
        keywords = getattr(function, "keywords", None) or {}
        return bool(keywords.get("use_reentrant", False))
    implementation = vars(module).get("checkpoint_impl")
    return getattr(implementation, "name", "") == "REENTRANT"
