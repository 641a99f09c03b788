"""The checks of a model that stands still: each a small function from the context to findings.

A check's docstring begins with its code and says what it finds and why it matters: it is the page
of that code in the documentation. A code never changes meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from freezekit._audit.checks import (
    adapters,
    blocks,
    modes,
    names,
    norms,
    optimizers,
    parameters,
    parametrised,
    placement,
    ties,
    trainable,
    wrappers,
)
from freezekit._audit.context import AuditContext
from freezekit._audit.findings import Finding

__all__ = ["DEFAULT_CHECKS", "Check"]

Check: TypeAlias = Callable[[AuditContext], Iterable[Finding]]

DEFAULT_CHECKS: tuple[Check, ...] = (
    trainable.nothing_trainable,
    trainable.unexpected_trainable,
    blocks.blocks_differ,
    blocks.one_block_differs,
    trainable.loose_parameters,
    names.near_miss_on_parameter,
    names.near_miss_on_module,
    names.method_overwritten,
    norms.running_stats_move,
    norms.saved_buffers_in_train,
    modes.active_dropout,
    norms.batch_statistics,
    norms.norm_half_frozen,
    norms.norms_learn_in_frozen,
    modes.learning_in_eval,
    modes.recurrent_in_eval,
    parametrised.computed_weight_moves,
    parametrised.computed_weight_looks_frozen,
    optimizers.frozen_with_gradient,
    optimizers.frozen_in_group,
    optimizers.trainable_in_no_group,
    optimizers.tensors_of_no_module,
    optimizers.listed_twice,
    optimizers.empty_groups,
    optimizers.leftover_state,
    optimizers.masked_rows_decay,
    ties.tied_flags_disagree,
    ties.tied_across_freeze,
    wrappers.mixed_fsdp_unit,
    wrappers.ddp_before_freezing,
    wrappers.reentrant_below_frozen,
    wrappers.compiled_for_other_flags,
    parameters.not_materialised,
    parameters.uncountable,
    parameters.cast_again_and_again,
    parameters.updates_rounded_away,
    adapters.no_adapter_learns,
    adapters.active_adapter_frozen,
    adapters.constant_learns,
    placement.frozen_above_trainable,
)
