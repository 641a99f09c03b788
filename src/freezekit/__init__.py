"""Freeze parts of a PyTorch model, and know that they are frozen.

===============  ==========================================================================
freeze           `freeze`, `unfreeze`, `train_only`, `frozen`; `select` is the dry run
keep             `freeze_state`, `load_freeze_state`: the freeze as JSON, for checkpoints
look             `audit`: what learns, what does not, and what is wrong
===============  ==========================================================================
"""

from freezekit._audit import AuditReport, Finding, audit
from freezekit._context import frozen
from freezekit._freeze import freeze, train_only, unfreeze
from freezekit._freeze_report import FreezeReport
from freezekit._selection import Selection, select
from freezekit._state import FreezeState, freeze_state, load_freeze_state
from freezekit._version import __version__

__all__ = [
    "AuditReport",
    "Finding",
    "FreezeReport",
    "FreezeState",
    "Selection",
    "__version__",
    "audit",
    "freeze",
    "freeze_state",
    "frozen",
    "load_freeze_state",
    "select",
    "train_only",
    "unfreeze",
]


def __dir__() -> list[str]:
    return __all__
