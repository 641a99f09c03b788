"""Whether a backbone is still frozen, read from the model itself at every call.

``nn.Module``'s own tables (``_parameters``, ``_modules``) are read here: the public iterators,
which keep sets of what they have seen, take longer than a small backbone's forward.
"""

from __future__ import annotations

from torch import nn

from freezekit._inventory import take_inventory
from freezekit._modes import hold

__all__ = ["settle", "trainable_names", "training_names"]


def settle(backbone: nn.Module) -> bool:
    """Put modules that were added, or set to train by hand, into eval; whether any trains."""
    todo = [backbone]
    while todo:
        module = todo.pop()
        if module.training:
            hold(module)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                return True
        if module._modules:
            todo.extend(child for child in module._modules.values() if child is not None)
    return False


def trainable_names(backbone: nn.Module) -> list[str]:
    """FQNs of the parameters that require a gradient."""
    return [info.fqn for info in take_inventory(backbone).parameters if info.requires_grad]


def training_names(backbone: nn.Module) -> list[str]:
    """FQNs of the modules that are in train mode; the backbone itself is named by its class."""
    return [
        info.fqn or info.type_name for info in take_inventory(backbone).modules if info.training
    ]
