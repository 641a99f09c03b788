"""Names of what is added to a pretrained model: adapters and prompts, peft's or hand-made."""

from __future__ import annotations

import re

__all__ = ["is_adapter", "is_added"]

_ADAPTER = re.compile(r"(^|\.)(lora_|ia3_|vera_|hada_|lokr_|oft_|boft_|loha_|trainable_tokens_)")
# Names that models also have of their own: SAM's prompt_encoder, the adapter_1 of a mask head.
_MAYBE_ADAPTER = re.compile(
    r"(^|\.)(adapter|prompt_encoder|prompt_embeddings|prefix_(encoder|tokens))"
)
_ADDED = re.compile(
    r"prompt|prefix|soft|virtual|adapter|lora|vera|ia3|ctx|context|delta|learn|quer(y|ies)$|probe"
)


def is_adapter(fqn: str, *, adapted: bool = True) -> bool:
    """Whether a parameter is an adapter's, by its name.

    ``adapted`` is whether the model is known to have adapters: then names count that are a model's
    own elsewhere.
    """
    if _ADAPTER.search(fqn) is not None:
        return True
    return adapted and _MAYBE_ADAPTER.search(fqn) is not None


def is_added(fqn: str) -> bool:
    """Whether a parameter is an adapter's, or its own name is that of a prompt or the like."""
    return is_adapter(fqn) or _ADDED.search(fqn.rpartition(".")[2].lower()) is not None
