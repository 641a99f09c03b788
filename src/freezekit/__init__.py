"""Freeze parts of a PyTorch model, and know that they are frozen.

===============  ==========================================================================
freeze           `freeze`, `unfreeze`, `train_only`, `frozen`; `select` is the dry run
keep             `freeze_state`, `load_freeze_state`: the freeze as JSON, for checkpoints
look             `audit`: what learns, what does not, and what is wrong; `audit_step` runs a step
extract          `FrozenFeatureExtractor`: features of a frozen backbone; `extract_features` keeps
                 them on disk, a `FeatureDataset` reads them
plan             `estimate_memory`: what a training step takes on a GPU that need not be here;
                 `max_batch_size`: the largest batch that fits; `measure_memory`: a real run
===============  ==========================================================================
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from freezekit._version import __version__

if TYPE_CHECKING:
    from freezekit._audit import (
        DEFAULT_CHECKS,
        DEFAULT_STEP_CHECKS,
        AuditContext,
        AuditReport,
        Finding,
        audit,
        audit_step,
    )
    from freezekit._context import frozen
    from freezekit._features.dataset import FeatureDataset
    from freezekit._features.extract import extract_features
    from freezekit._features.extractor import FrozenFeatureExtractor
    from freezekit._freeze import freeze, train_only, unfreeze
    from freezekit._freeze_report import FreezeReport
    from freezekit._memory.batch_size import BatchSizeEstimate, max_batch_size
    from freezekit._memory.estimate import estimate_memory
    from freezekit._memory.measure import measure_memory
    from freezekit._memory.memory_report import MemoryComparison, MemoryEstimate
    from freezekit._selection import Selection, select
    from freezekit._state import FreezeState, freeze_state, load_freeze_state

__all__ = [
    "DEFAULT_CHECKS",
    "DEFAULT_STEP_CHECKS",
    "AuditContext",
    "AuditReport",
    "BatchSizeEstimate",
    "FeatureDataset",
    "Finding",
    "FreezeReport",
    "FreezeState",
    "FrozenFeatureExtractor",
    "MemoryComparison",
    "MemoryEstimate",
    "Selection",
    "__version__",
    "audit",
    "audit_step",
    "estimate_memory",
    "extract_features",
    "freeze",
    "freeze_state",
    "frozen",
    "load_freeze_state",
    "max_batch_size",
    "measure_memory",
    "select",
    "train_only",
    "unfreeze",
]

# Where each name is found when it is first asked for: a script pays for what it uses. (Fake
# tensors, which an estimate needs, bring in half of the compiler.)
_FOUND_IN = {
    "AuditContext": "_audit",
    "AuditReport": "_audit",
    "BatchSizeEstimate": "_memory.batch_size",
    "DEFAULT_CHECKS": "_audit",
    "DEFAULT_STEP_CHECKS": "_audit",
    "FeatureDataset": "_features.dataset",
    "Finding": "_audit",
    "FreezeReport": "_freeze_report",
    "FreezeState": "_state",
    "FrozenFeatureExtractor": "_features.extractor",
    "MemoryComparison": "_memory.memory_report",
    "MemoryEstimate": "_memory.memory_report",
    "Selection": "_selection",
    "audit": "_audit",
    "audit_step": "_audit",
    "estimate_memory": "_memory.estimate",
    "extract_features": "_features.extract",
    "freeze": "_freeze",
    "freeze_state": "_state",
    "frozen": "_context",
    "load_freeze_state": "_state",
    "max_batch_size": "_memory.batch_size",
    "measure_memory": "_memory.measure",
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
