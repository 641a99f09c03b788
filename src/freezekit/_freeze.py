"""freeze, unfreeze, train_only: what a training script calls."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from freezekit._collector import collector_paused
from freezekit._freeze_report import FreezeReport
from freezekit._patterns import Patterns
from freezekit._plan import NormStats, Plan

__all__ = ["freeze", "train_only", "unfreeze"]


def freeze(
    model: nn.Module,
    patterns: Patterns = "*",
    *,
    exclude: Patterns = (),
    norm_stats: NormStats = "hold",
    optimizer: Optimizer | None = None,
) -> FreezeReport:
    """Freeze in place: the parameters stop learning and stay as they are.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    >>> report = freeze(model, ["0", "1"])
    >>> report.frozen, report.trainable, report.held
    (15, 4, ('1',))
    >>> model.train()[1].training  # its running statistics hold still
    False

    Besides ``requires_grad``, this clears ``.grad`` (optimizers look at ``grad is None``, not at
    ``requires_grad``, so a leftover gradient, momentum or weight decay would still move the
    weight; LBFGS alone steps without looking, and needs to be made anew). Modules with running
    statistics are held in eval under every later ``model.train()``, so that they give the outputs
    of the checkpoint. The hold survives ``copy.deepcopy``, ``pickle``, ``torch.save`` of the
    module, ``torch.compile`` and DDP; code that sets ``module.training`` by hand goes past it.
    Dropout is left as it is.

    Args:
        model: any ``nn.Module``, changed in place.
        patterns: what to freeze; see :func:`select`. Everything by default.
        exclude: what to leave as it is, of what ``patterns`` match.
        norm_stats: ``"hold"`` holds frozen modules with running statistics (BatchNorm,
            InstanceNorm with statistics, spectral norm: told by their buffers) in eval;
            ``"keep"`` leaves their modes alone.
        optimizer: also take the frozen parameters out of its groups and drop their state. A
            group that becomes empty stays, since schedulers count groups.

    Returns:
        What each pattern matched, what changed, and the totals; sizes in elements and bytes.

    Raises:
        PatternError: a pattern is malformed, or there is none.
        UnmatchedPatternError: patterns that match nothing, all at once, with near names.
        UnsupportedModelError: not a module, or a ScriptModule.
        OptimizerError: an optimizer whose parameter list cannot be edited.

    Warns:
        PartialTieWarning: a name of a tied tensor was written, another of its names was not.
        NothingTrainableWarning: specific patterns leave nothing trainable in the model.
        UninitializedParameterWarning: a lazy parameter is frozen before it has a value.
        CompiledModelWarning: the model was compiled, and has run, with other flags.
        NumberPrefixWarning: a glob such as ``layer.1*`` also took ``layer.10``.
    """
    with collector_paused():
        plan = Plan.start(model, patterns, exclude, norm_stats, optimizer)
        plan.freeze = list(plan.selected.parameters)
        plan.plan_holds()
        return plan.carry_out("freeze")


def unfreeze(
    model: nn.Module,
    patterns: Patterns = "*",
    *,
    exclude: Patterns = (),
    optimizer: Optimizer | None = None,
    **group_options: Any,
) -> FreezeReport:
    """Unfreeze in place: the parameters learn again.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> _ = freeze(model, "0")
    >>> optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    >>> unfreeze(model, "0", optimizer=optimizer, lr=1e-5).optimizer.added
    2

    Modules that :func:`freeze` holds in eval get the mode back that was last asked for.

    Args:
        model: any ``nn.Module``, changed in place.
        patterns: what to unfreeze; see :func:`select`. Everything by default.
        exclude: what to leave as it is, of what ``patterns`` match.
        optimizer: also put the parameters into one of its groups, each exactly once, by
            identity.
        group_options: options of a new group for them, such as ``lr=1e-5``. Without options, those
            that are in no group join the only one, or the only empty one. A scheduler that keeps
            a list for each group (``LambdaLR``, ``OneCycleLR``) is made anew after a new group.

    Returns:
        What each pattern matched, what changed, and the totals. Integer and quantised tensors
        have no gradient: among others they are left out and listed as ``skipped``.

    Raises:
        UntrainableParameterError: none of what a pattern matched can require a gradient.
        PatternError, UnmatchedPatternError, UnsupportedModelError: as :func:`freeze`.
        OptimizerError: an optimizer whose parameter list cannot be edited, or that has no such
            option, or has several groups and no options were given.
        TypeError: group options without an optimizer.
    """
    with collector_paused():
        plan = Plan.start(model, patterns, exclude, "hold", optimizer, group_options)
        plan.thaw = plan.trainable_part(plan.selected.parameters)
        plan.plan_releases()
        return plan.carry_out("unfreeze")


def train_only(
    model: nn.Module,
    patterns: Patterns,
    *,
    exclude: Patterns = (),
    norm_stats: NormStats = "hold",
    optimizer: Optimizer | None = None,
) -> FreezeReport:
    """Make exactly these parameters trainable, in place, and freeze all others.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> train_only(model, "1").trainable
    4

    Args:
        model: any ``nn.Module``, changed in place.
        patterns: what is to learn; see :func:`select`.
        exclude: what is not to learn, of what ``patterns`` match.
        norm_stats: as for :func:`freeze`, for what is frozen.
        optimizer: also take what is frozen out of its groups, and put what is trainable in.

    Returns:
        What each pattern matched, what changed, and the totals.

    Raises:
        UntrainableParameterError: none of what a pattern matched can require a gradient.
        PatternError, UnmatchedPatternError, UnsupportedModelError, OptimizerError: as
            :func:`freeze`.
    """
    with collector_paused():
        plan = Plan.start(model, patterns, exclude, norm_stats, optimizer)
        plan.thaw = plan.trainable_part(plan.selected.parameters)
        chosen = set(plan.selected.parameters)
        plan.freeze = [i for i in range(len(plan.inventory.parameters)) if i not in chosen]
        plan.plan_releases(everywhere=True)
        plan.plan_holds(everywhere=True)
        return plan.carry_out("train_only")
