"""What features depend on, as a flat record of text: the identity of a store.

Two records are compared field by field, so that a mismatch can say what differs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from freezekit._features.hashing import digest_many
from freezekit._inventory import take_inventory

if TYPE_CHECKING:
    from freezekit._features.extractor import FrozenFeatureExtractor

__all__ = ["backbone_fingerprint", "differences", "identify"]

# Attributes that change without changing features, or that tell where weights came from.
_VOLATILE = ("training", "name_or_path", "gradient_checkpointing", "warnings_issued")
_CONFIG_VOLATILE = ("transformers_version", "architectures", "torch_dtype", "dtype", "use_cache")


def identify(
    extractor: FrozenFeatureExtractor, *, stored_dtype: str, preprocessing: Any, columns: str
) -> dict[str, str]:
    """Everything that the features of ``extractor`` depend on, the data aside.

    The device is not in it, nor the size of batches, nor names of files: the same weights loaded
    again, elsewhere, give the same record.
    """
    backbone = extractor.backbone
    saved, unsaved = _state_digests(backbone)
    pool = extractor.pool
    return {
        "weights": saved,
        "unsaved buffers": unsaved,
        "architecture": _architecture(backbone),
        "code": _code(backbone),
        "configuration": _configuration(backbone),
        "attention": _attention(backbone),
        "layers": json.dumps(extractor.layers),
        "pool": _callable_text(pool) if callable(pool) else str(pool),
        "dtype": str(extractor.dtype),
        "stored dtype": stored_dtype,
        "autocast": _autocast(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "preprocessing": json.dumps(preprocessing, sort_keys=True, ensure_ascii=False),
        "columns": columns,
        "torch": torch.__version__.partition("+")[0],
        "transformers": _transformers_version(backbone),
    }


def differences(stored: dict[str, Any], here: dict[str, str]) -> list[tuple[str, str, str]]:
    """``(field, stored, here)`` of each field that differs; a missing one differs."""
    return [
        (name, str(stored.get(name, "(absent)")), here.get(name, "(absent)"))
        for name in dict.fromkeys([*here, *stored])
        if stored.get(name) != here.get(name)
    ]


def backbone_fingerprint(backbone: nn.Module) -> str:
    """SHA-256 of the names, dtypes, shapes and contents of parameters and saved buffers."""
    return _state_digests(backbone)[0]


# -- weights -----------------------------------------------------------------------------------


def _state_digests(backbone: nn.Module) -> tuple[str, str]:
    """Of parameters and saved buffers, and of buffers that are not saved."""
    inventory = take_inventory(backbone)
    clean = {info.raw: info.fqn for info in inventory.modules}
    tensors: dict[str, Tensor] = {}
    for module_name, module in backbone.named_modules(remove_duplicate=False):
        prefix = clean.get(module_name, module_name)
        own = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in own:
            tensors[f"{prefix}.{name}" if prefix else name] = tensor
    saved_raw = backbone.state_dict(keep_vars=True)
    saved_ids = {id(value) for value in saved_raw.values() if isinstance(value, Tensor)}
    unique = {id(tensor): tensor for tensor in tensors.values()}
    digests = dict(zip(unique, digest_many(unique.values()), strict=True))
    saved, unsaved = hashlib.sha256(), hashlib.sha256()
    for name in sorted(tensors):
        key = id(tensors[name])
        total = saved if key in saved_ids else unsaved
        total.update(f"{name}\0".encode() + digests[key])
    return saved.hexdigest(), unsaved.hexdigest()


# -- code and configuration --------------------------------------------------------------------


def _architecture(backbone: nn.Module) -> str:
    """Digest of every module's name, class, options and plain attributes."""
    total = hashlib.sha256()
    inventory = take_inventory(backbone)
    for index, info in enumerate(inventory.modules):
        module = inventory.module(index)
        kind = type(module)
        line = f"{info.fqn} {kind.__module__}.{kind.__qualname__} {module.extra_repr()} "
        total.update(line.encode() + _attributes(module).encode() + b"\n")
    return total.hexdigest()


def _attributes(module: nn.Module) -> str:
    """A module's plain attributes: a number, a flag or a text may steer its forward."""
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name in _VOLATILE or name.endswith("_cached"):
            continue
        if isinstance(value, bool | int | float | str) or (
            isinstance(value, tuple) and all(isinstance(v, bool | int | float | str) for v in value)
        ):
            found[name] = value
        elif inspect.isfunction(value):
            found[name] = _callable_text(value)
    return json.dumps(found, sort_keys=True)


def _code(backbone: nn.Module) -> str:
    """Digest of the source of the classes that are neither torch's nor transformers'.

    Those two are known by their versions. What a class calls outside of itself is not followed.
    """
    sources: dict[str, str] = {}
    for module in backbone.modules():
        for cls in type(module).__mro__:
            package = cls.__module__.partition(".")[0]
            if package not in ("torch", "transformers", "builtins", "freezekit"):
                sources.setdefault(f"{cls.__module__}.{cls.__qualname__}", _source(cls))
    text = "\n".join(f"{name}\n{source}" for name, source in sorted(sources.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _source(thing: type | Callable[..., Any]) -> str:
    """The source text; where there is none (a console), the compiled code."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        pass
    functions: Iterable[Any] = vars(thing).values() if isinstance(thing, type) else [thing]
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    return "\n".join(_code_text(code) for code in codes)


def _code_text(code: Any) -> str:
    constants = [_code_text(c) if hasattr(c, "co_code") else repr(c) for c in code.co_consts]
    return f"{code.co_name} {code.co_code.hex()} {code.co_names} {constants}"


def _callable_text(function: Any) -> str:
    """A callable by its name and a digest of its source and of the values it closes over."""
    if isinstance(function, nn.Module):
        digest = backbone_fingerprint(function) + _architecture(function) + _code(function)
        name = type(function).__qualname__
    else:
        target = getattr(function, "func", function)  # functools.partial
        bound = (getattr(function, "args", ()), getattr(function, "keywords", {}))
        cells = [cell.cell_contents for cell in getattr(target, "__closure__", None) or ()]
        defaults = getattr(target, "__defaults__", None)
        known = target if inspect.isroutine(target) else type(target)
        digest = _source(known) + _plain_text((bound, cells, defaults))
        name = getattr(target, "__qualname__", type(target).__qualname__)
    return f"{name} {hashlib.sha256(digest.encode()).hexdigest()[:16]}"


def _plain_text(value: Any) -> str:
    """Numbers and texts as they are; of the rest the class: its repr may be an address."""
    if isinstance(value, bool | int | float | str | bytes | None):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain_text, value))})"
    if isinstance(value, dict):
        return _plain_text([*value.items()])
    if isinstance(value, Tensor):
        return digest_many([value])[0].hex()
    if inspect.isfunction(value):
        return _callable_text(value)
    return type(value).__qualname__


def _configuration(backbone: nn.Module) -> str:
    """Digest of the configurations (transformers') in the backbone."""
    configs: dict[int, Any] = {}
    for module in backbone.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            configs.setdefault(id(config), config)
    total = hashlib.sha256()
    for config in configs.values():
        text = json.dumps(_stable(config.to_dict()), sort_keys=True, default=str)
        total.update(text.encode() + b"\n")
    return total.hexdigest() if configs else "none"


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        # What begins with an underscore is bookkeeping: paths, what was set automatically.
        kept = {str(k): v for k, v in value.items() if k not in _CONFIG_VOLATILE}
        return {k: _stable(v) for k, v in kept.items() if not k.startswith("_")}
    if isinstance(value, list | tuple):
        return [_stable(item) for item in value]
    return value


def _attention(backbone: nn.Module) -> str:
    """The attention implementations that configurations name; transformers' own attribute."""
    found = {
        str(getattr(module.config, "_attn_implementation", None))
        for module in backbone.modules()
        if hasattr(getattr(module, "config", None), "to_dict")
    }
    return ", ".join(sorted(found)) or "none"


def _autocast() -> str:
    on = [
        f"{device} {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
    return ", ".join(on) or "off"


def _transformers_version(backbone: nn.Module) -> str:
    """Its version, if a class of the backbone is transformers' or is derived from one."""
    for module in backbone.modules():
        if any(cls.__module__.startswith("transformers.") for cls in type(module).__mro__):
            return str(sys.modules["transformers"].__version__)
    return "none"
