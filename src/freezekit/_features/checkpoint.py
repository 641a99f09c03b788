"""State dicts that leave the backbone out, and a fingerprint in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from freezekit._features.identity import backbone_fingerprint
from freezekit.errors import BackboneMismatchError

if TYPE_CHECKING:
    from freezekit._features.extractor import FrozenFeatureExtractor

__all__ = ["KEY", "install"]

KEY = "backbone_fingerprint"
_PREFIX = "backbone."


def install(extractor: FrozenFeatureExtractor) -> None:
    """Hook into the extractor's ``state_dict`` and ``load_state_dict``, at any depth."""
    extractor.register_state_dict_post_hook(_after_save)  # type: ignore[no-untyped-call]
    extractor.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]


def _after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    if module.save_backbone:
        return
    for key in [key for key in state_dict if key.startswith(prefix + _PREFIX)]:
        del state_dict[key]
    # A tensor: state dicts go into safetensors files, and through weights_only loading.
    digest = bytes.fromhex(backbone_fingerprint(module.get_submodule("backbone")))
    state_dict[prefix + KEY] = torch.tensor(list(digest), dtype=torch.uint8)


def _before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Check a fingerprint, and stand in for the weights that the state dict leaves out."""
    saved = state_dict.pop(prefix + KEY, None)
    if saved is None or any(key.startswith(prefix + _PREFIX) for key in state_dict):
        return
    backbone = module.get_submodule("backbone")
    found = backbone_fingerprint(backbone)
    expected = bytes(saved.tolist()).hex() if isinstance(saved, Tensor) else str(saved)
    if expected != found:
        raise BackboneMismatchError(expected, found)
    state_dict.update({prefix + _PREFIX + key: v for key, v in backbone.state_dict().items()})
