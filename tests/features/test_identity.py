"""What a store is of: features of anything else are refused, and what differs is said."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from features.features_support import make_bert, make_gpt2, make_llama, token_batch
from features.store_support import Counting, assert_holds, make_batches
from freezekit import FeatureDataset, FrozenFeatureExtractor, extract_features
from freezekit._features.identity import backbone_fingerprint, differences, identify
from freezekit.errors import CacheMismatchError


def identity(net: nn.Module, **options: Any) -> dict[str, str]:
    """The identity of an extractor's features."""
    return identify(
        FrozenFeatureExtractor(net, **options),
        stored_dtype="as computed",
        preprocessing=None,
        columns="",
    )


def fields(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """The names of the fields that differ."""
    return [name for name, _, _ in differences(one, other)]


# -- the same -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_bert, make_gpt2, make_llama, Counting])
def test_the_same_weights_have_the_same_identity(make: Callable[[], nn.Module]) -> None:
    """Loaded again, copied, used, and with gradients left behind: nothing of it matters."""
    net = make()
    first = identity(net)
    again = make()
    again.load_state_dict(net.state_dict())
    again.train()
    assert identity(again) == first
    if not isinstance(net, Counting):
        FrozenFeatureExtractor(net)(**token_batch([5, 3]))
        assert identity(net) == first
    assert identity(copy.deepcopy(net)) == first


def test_saved_and_loaded_from_another_place(tmp_path: Path) -> None:
    """Transformers notes where a model came from; its features do not depend on that."""
    net = make_bert()
    names = []
    for name in ("here", "there"):
        net.save_pretrained(tmp_path / name)
        names.append(type(net).from_pretrained(tmp_path / name))
    assert identity(names[0]) == identity(names[1]) == identity(net)


def test_another_process_finds_the_same() -> None:
    """No address, no hash seed, no order of a set goes in."""
    code = (
        "import json\n"
        "from features.features_support import make_bert\n"
        "from features.test_identity import identity\n"
        "print(json.dumps(identity(make_bert(), pool='mean')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "7", "PATH": ""},
    )
    assert json.loads(done.stdout.splitlines()[-1]) == identity(make_bert(), pool="mean")


def test_wrappers_do_not_change_the_names_of_weights() -> None:
    """The fingerprint of what is wrapped is that of what it wraps."""
    net = make_bert()
    assert backbone_fingerprint(nn.DataParallel(net)) == backbone_fingerprint(net)


def test_the_layout_in_memory_does_not_matter() -> None:
    """A weight that is stored transposed, or expanded, has the contents it has."""
    net = nn.Linear(3, 3)
    first = backbone_fingerprint(net)
    with torch.no_grad():
        net.weight.data = net.weight.t().contiguous().t()
    assert not net.weight.is_contiguous()
    assert backbone_fingerprint(net) == first


# -- another -----------------------------------------------------------------------------------


def change_weight(net: Any) -> None:
    """Change one weight by its last bit."""
    with torch.no_grad():
        net.linear.weight[0, 0] = torch.nextafter(net.linear.weight[0, 0], torch.tensor(9.0))


def change_statistics(net: Any) -> None:
    """Move a buffer."""
    net.norm.running_var[0] += 1


def change_option(net: Any) -> None:
    """Change what is neither weight nor buffer."""
    net.norm.eps = 1e-3


def change_attribute(net: Any) -> None:
    """Give it a number that a forward may use."""
    net.scale = 2.0


def add_unsaved_buffer(net: Any) -> None:
    """Give it a buffer that no state dict has."""
    net.register_buffer("shift", torch.ones(1), persistent=False)


def zero_sign(net: Any) -> None:
    """Turn a zero into a negative one."""
    with torch.no_grad():
        net.norm.bias[0] = -net.norm.bias[0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (change_weight, "weights"),
        (change_statistics, "weights"),
        (zero_sign, "weights"),
        (change_option, "architecture"),
        (change_attribute, "architecture"),
        (add_unsaved_buffer, "unsaved buffers"),
        (lambda net: net.half(), "weights"),
    ],
)
def test_whatever_changes_features_changes_the_identity(
    change: Callable[[nn.Module], object], field: str
) -> None:
    """One thing changed, one field differs."""
    net = Counting()
    first = identity(net)
    change(net)
    assert fields(first, identity(net)) == [field]


def half_of(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """A pool."""
    return tokens[:, 0] / 2


def third_of(tokens: Tensor, mask: Tensor | None, parts: int = 3) -> Tensor:
    """Another pool."""
    return tokens[:, 0] / parts


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        ({"pool": "mean"}, {"pool": "max"}, "pool"),
        ({"pool": half_of}, {"pool": third_of}, "pool"),
        ({"pool": partial(third_of, parts=4)}, {"pool": partial(third_of, parts=5)}, "pool"),
        ({"layers": ["encoder.layer.0"]}, {"layers": ["encoder.layer.1"]}, "layers"),
        ({"layers": ["encoder.layer.0"]}, {}, "layers"),
    ],
)
def test_options_are_part_of_it(one: Any, other: Any, field: str) -> None:
    """Layers and pools, by name or by their code and what they close over."""
    assert fields(identity(make_bert(), **one), identity(make_bert(), **other)) == [field]
    assert identity(make_bert(), **one) == identity(make_bert(), **one)


def test_dtype_is_part_of_it() -> None:
    """A cast backbone has other weights and another dtype."""
    cast = identity(make_bert(), dtype=torch.bfloat16)
    assert {"weights", "dtype"} <= set(fields(identity(make_bert()), cast))


def test_the_attention_implementation_is_part_of_it() -> None:
    """Eager and fused attention round differently."""
    eager = identity(make_bert(attn_implementation="eager"))
    # Older versions of transformers have a class for each implementation.
    assert "attention" in fields(identity(make_bert(attn_implementation="sdpa")), eager)


def test_the_configuration_is_part_of_it() -> None:
    """An activation function is in the configuration and in no weight."""
    changed = fields(identity(make_bert()), identity(make_bert(hidden_act="relu")))
    assert "configuration" in changed


def test_code_is_part_of_it() -> None:
    """Two classes of one name with other forwards give other features."""

    def make(sign: int) -> nn.Module:
        scope: dict[str, Any] = {"nn": nn}
        exec(  # what a console defines has no source to read
            f"class Net(nn.Module):\n    def forward(self, x):\n        return x * {sign}\n",
            scope,
        )
        scope["Net"].__module__ = "console"
        net: nn.Module = scope["Net"]()
        return net

    assert fields(identity(make(1)), identity(make(-1))) == ["code"]
    assert identity(make(1)) == identity(make(1))


def test_autocast_is_part_of_it() -> None:
    """Features made under autocast are other ones."""
    first = identity(Counting())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fields(first, identity(Counting())) == ["autocast"]


def test_versions_are_part_of_it() -> None:
    """Kernels change between versions; transformers' counts where it is used."""
    bert, plain = identity(make_bert()), identity(Counting())
    assert bert["torch"] == torch.__version__.partition("+")[0]
    assert bert["transformers"] != "none"
    assert plain["transformers"] == "none"


# -- stores ------------------------------------------------------------------------------------


def test_a_store_of_other_weights_is_refused(tmp_path: Path) -> None:
    """Neither read nor gone on with; the field is named, and the store stays as it was."""
    extract_features(
        FrozenFeatureExtractor(Counting()), make_batches(), tmp_path, keys="labels", progress=False
    )
    other = FrozenFeatureExtractor(Counting(seed=1))
    with pytest.raises(CacheMismatchError, match=r"weights +\w+.* in the store, \w+") as caught:
        extract_features(other, make_batches(), tmp_path, keys="labels", progress=False)
    assert [name for name, _, _ in caught.value.differences] == ["weights"]
    with pytest.raises(CacheMismatchError, match="holds features of something else"):
        FeatureDataset(tmp_path, other)
    assert_holds(FeatureDataset(tmp_path, FrozenFeatureExtractor(Counting())), make_batches())


def test_an_unfinished_store_of_other_weights_is_refused(tmp_path: Path) -> None:
    """What was cut short is not mixed with features of another backbone."""
    batches: list[Any] = [*make_batches(), "stop"]
    with pytest.raises(ValueError, match="batch 6"):
        extract_features(
            FrozenFeatureExtractor(Counting()),
            batches,
            tmp_path,
            keys="labels",
            shard_bytes=1,
            progress=False,
        )
    with pytest.raises(CacheMismatchError, match="weights"):
        extract_features(
            FrozenFeatureExtractor(Counting(seed=1)),
            make_batches(),
            tmp_path,
            keys="labels",
            progress=False,
        )
    (tmp_path / "index.json").unlink()
    with pytest.raises(ValueError, match="it holds something else"):
        extract_features(
            FrozenFeatureExtractor(Counting(seed=1)),
            make_batches(),
            tmp_path,
            keys="labels",
            progress=False,
        )


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"preprocessing": {"max_length": 128}}, "preprocessing"),
        ({"dtype": torch.float16}, "stored dtype"),
        ({"keys": ["target"]}, "columns"),
    ],
)
def test_what_the_call_declares_is_part_of_it(
    options: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """Preprocessing, the dtype on disk and what goes along."""
    extractor = FrozenFeatureExtractor(Counting())
    plain: dict[str, Any] = {"keys": ["labels"], "progress": False}
    extract_features(extractor, make_batches(), tmp_path, preprocessing={"max_length": 64}, **plain)
    changed = {"preprocessing": {"max_length": 64}, **plain, **options}
    with pytest.raises(CacheMismatchError, match=field) as caught:
        extract_features(extractor, make_batches(), tmp_path, **changed)
    assert [name for name, _, _ in caught.value.differences] == [field]


def test_an_index_that_was_edited_is_no_way_in(tmp_path: Path) -> None:
    """Shards carry the identity themselves: an index with another one does not adopt them."""
    extract_features(
        FrozenFeatureExtractor(Counting()), make_batches(), tmp_path, keys="labels", progress=False
    )
    other = FrozenFeatureExtractor(Counting(seed=1))
    index = json.loads((tmp_path / "index.json").read_text())
    here = identify(other, stored_dtype="as computed", preprocessing=None, columns="labels")
    index.update(identity=here, complete=False)
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="shards of other features"):
        extract_features(other, make_batches(), tmp_path, keys="labels", progress=False)


def test_other_data_is_refused(tmp_path: Path) -> None:
    """The same backbone and a directory of other data: the first batch tells, or their number."""
    extractor = FrozenFeatureExtractor(Counting())
    extract = partial(extract_features, extractor, keys="labels", progress=False)
    extract(make_batches(), tmp_path)
    other = [(x + 1, y) for x, y in make_batches()]
    with pytest.raises(ValueError, match="batch 0: it is not the batch that the store has"):
        extract(other, tmp_path)
    with pytest.raises(ValueError, match="there are 5 batches, but the store holds 6"):
        extract(make_batches()[:5], tmp_path)
