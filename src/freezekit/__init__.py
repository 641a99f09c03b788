"""Freeze parts of a PyTorch model, and know that they are frozen.

===============  ==========================================================================
freeze           `freeze`, `unfreeze`, `train_only`, `frozen`; `select` is the dry run
keep             `freeze_state`, `load_freeze_state`: the freeze as JSON, for checkpoints
look             `audit`: what learns, what does not, and what is wrong
extract          `FrozenFeatureExtractor`: features of a frozen backbone; `extract_features` keeps
                 them on disk, a `FeatureDataset` reads them
plan             `estimate_memory`: what a training step takes on a GPU that need not be here
===============  ==========================================================================
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from freezekit._version import __version__

if TYPE_CHECKING:
    from freezekit._audit import AuditReport, Finding, audit
    from freezekit._context import frozen
    from freezekit._features.dataset import FeatureDataset
    from freezekit._features.extract import extract_features
    from freezekit._features.extractor import FrozenFeatureExtractor
    from freezekit._freeze import freeze, train_only, unfreeze
    from freezekit._freeze_report import FreezeReport
    from freezekit._memory.estimate import MemoryEstimate, estimate_memory
    from freezekit._selection import Selection, select
    from freezekit._state import FreezeState, freeze_state, load_freeze_state

__all__ = [
    "AuditReport",
    "FeatureDataset",
    "Finding",
    "FreezeReport",
    "FreezeState",
    "FrozenFeatureExtractor",
    "MemoryEstimate",
    "Selection",
    "__version__",
    "audit",
    "estimate_memory",
    "extract_features",
    "freeze",
    "freeze_state",
    "frozen",
    "load_freeze_state",
    "select",
    "train_only",
    "unfreeze",
]

# Where each name is found when it is first asked for: a script pays for what it uses. (Fake
# tensors, which an estimate needs, bring in half of the compiler.)
_FOUND_IN = {
    "AuditReport": "_audit",
    "FeatureDataset": "_features.dataset",
    "Finding": "_audit",
    "FreezeReport": "_freeze_report",
    "FreezeState": "_state",
    "FrozenFeatureExtractor": "_features.extractor",
    "MemoryEstimate": "_memory.estimate",
    "Selection": "_selection",
    "audit": "_audit",
    "estimate_memory": "_memory.estimate",
    "extract_features": "_features.extract",
    "freeze": "_freeze",
    "freeze_state": "_state",
    "frozen": "_context",
    "load_freeze_state": "_state",
    "select": "_selection",
    "train_only": "_freeze",
    "unfreeze": "_freeze",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("freezekit.errors")
    if name not in _FOUND_IN:
        raise AttributeError(f"module 'freezekit' has no attribute {name!r}")
    found = getattr(import_module(f"freezekit.{_FOUND_IN[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
