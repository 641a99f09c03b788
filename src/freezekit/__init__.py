"""Freeze parts of a PyTorch model, and know that they are frozen.

===============  ==========================================================================
freeze           `freeze`, `unfreeze`, `train_only`, `frozen`; `select` is the dry run
keep             `freeze_state`, `load_freeze_state`: the freeze as JSON, for checkpoints
look             `audit`: what learns, what does not, and what is wrong
plan             `estimate_memory`: what a training step takes on a GPU that need not be here
===============  ==========================================================================
"""

from typing import TYPE_CHECKING, Any

from freezekit._audit import AuditReport, Finding, audit
from freezekit._context import frozen
from freezekit._freeze import freeze, train_only, unfreeze
from freezekit._freeze_report import FreezeReport
from freezekit._selection import Selection, select
from freezekit._state import FreezeState, freeze_state, load_freeze_state
from freezekit._version import __version__

if TYPE_CHECKING:
    from freezekit._memory.estimate import MemoryEstimate, estimate_memory

__all__ = [
    "AuditReport",
    "Finding",
    "FreezeReport",
    "FreezeState",
    "MemoryEstimate",
    "Selection",
    "__version__",
    "audit",
    "estimate_memory",
    "freeze",
    "freeze_state",
    "frozen",
    "load_freeze_state",
    "select",
    "train_only",
    "unfreeze",
]


# Fake tensors bring in half of the compiler: only who asks for an estimate pays for the import.
_ON_DEMAND = ("MemoryEstimate", "estimate_memory")


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        from freezekit._memory import estimate

        return getattr(estimate, name)
    raise AttributeError(f"module 'freezekit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
