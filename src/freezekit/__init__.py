"""Freeze parts of a PyTorch model, and know that they are frozen.

===============  ==========================================================================
freeze           `freeze`, `unfreeze`, `train_only`, `frozen`; `select` is the dry run
keep             `freeze_state`, `load_freeze_state`: the freeze as JSON, for checkpoints
look             `audit`: what learns, what does not, and what is wrong
plan             `estimate_memory`: what a training step takes on a GPU that need not be here
===============  ==========================================================================
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from freezekit._context import frozen
from freezekit._freeze import freeze, train_only, unfreeze
from freezekit._freeze_report import FreezeReport
from freezekit._selection import Selection, select
from freezekit._state import FreezeState, freeze_state, load_freeze_state
from freezekit._version import __version__

if TYPE_CHECKING:
    from freezekit._audit import AuditReport, Finding, audit
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


# A training script that only freezes does not pay for the rest: fake tensors bring in half of the
# compiler, and the audit is for debugging.
_ON_DEMAND = {
    "AuditReport": "freezekit._audit",
    "Finding": "freezekit._audit",
    "MemoryEstimate": "freezekit._memory.estimate",
    "audit": "freezekit._audit",
    "estimate_memory": "freezekit._memory.estimate",
}


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return getattr(import_module(_ON_DEMAND[name]), name)
    raise AttributeError(f"module 'freezekit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
