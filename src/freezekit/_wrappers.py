"""Modules that wrap a model: which names to look through, and whether it is compiled.

Wrappers are recognised by the names of their classes, so that none of their packages
(peft, torch.distributed, torch._dynamo) has to be imported.
"""

from __future__ import annotations

import sys

from torch import nn

__all__ = ["has_compiled_code", "is_transparent"]

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


def has_compiled_code(model: nn.Module) -> bool:
    """Whether ``torch.compile`` already holds compiled code for a module in ``model``.

    Never imports the compiler: a model that is compiled has it imported already.
    """
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return False
    for module in model.modules():
        # Private, since nothing public tells whether a compiled module has run:
        # Module.compile() keeps its callable here, torch.compile() wraps in an OptimizedModule.
        if isinstance(module, eval_frame.OptimizedModule):
            inner = module._orig_mod
        elif module._compiled_call_impl is not None:
            inner = module
        else:
            continue
        code = getattr(type(inner).forward, "__code__", None)
        # Code held for another instance of the class counts too: a false alarm is a warning
        # more, a missed one is a layer that silently does not learn.
        if code is None or eval_frame._debug_get_cache_entry_list(code):
            return True
    return False
