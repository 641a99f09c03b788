"""Outputs of layers, and forward passes that end after the last one wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, ViTConfig, ViTModel

from features.features_support import (
    Unrolled,
    bare,
    make_bert,
    make_convnet,
    make_gpt2,
    make_llama,
    token_batch,
)
from freezekit import FrozenFeatureExtractor
from freezekit._features.layers import may_end_early
from freezekit.errors import LayerNotRunError, UnknownLayerError

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 + 3


def hooked(net: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """A layer's output as a plain hook on a whole, bare forward sees it, copied at once."""
    seen: list[Any] = []

    def take(_module: nn.Module, _args: Any, output: Any) -> None:
        first = output if isinstance(output, Tensor) else output[0]
        seen.append(first.detach().clone())

    handle = net.get_submodule(name).register_forward_hook(take)
    bare(net, *args, **kwargs)
    handle.remove()
    return seen[-1]


def first_tensor(output: Any) -> Tensor:
    """The tensor, or the first one of a tuple."""
    return output if isinstance(output, Tensor) else output[0]


MODELS: dict[str, tuple[Any, dict[str, Tensor], list[str]]] = {
    "bert": (make_bert, token_batch([5, 3]), ["embeddings", "encoder.layer.0", "encoder.layer.1"]),
    "gpt2": (make_gpt2, token_batch([5, 5]), ["wte", "h.0.attn", "h.1"]),
    "llama": (make_llama, token_batch([5, 3]), ["layers.0.mlp", "layers.1"]),
    "vit": (
        lambda: ViTModel(
            ViTConfig(
                image_size=8,
                patch_size=4,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=32,
            )
        ),
        {"pixel_values": IMAGES},
        ["embeddings", "layernorm"],
    ),
    "convnet": (make_convnet, {"x": IMAGES}, ["conv", "norm", "act", "fc"]),
}


@pytest.mark.parametrize("model", list(MODELS))
def test_layers_give_exactly_what_a_whole_forward_gives(model: str) -> None:
    """Each alone and all together, at the first call and at those that end early: to the bit.

    The ConvNet's norm is followed by a ReLU that works in place on what the norm returned.
    """
    make, batch, names = MODELS[model]
    net = make()
    expected = {name: hooked(net, name, **batch) for name in names}
    for chosen in [names, names[::-1], *([name] for name in names)]:
        extractor = FrozenFeatureExtractor(net, chosen)
        for _ in range(3):
            got = extractor(**batch)
            assert list(got) == chosen
            for name in chosen:
                value = first_tensor(got[name])
                assert torch.equal(value, expected[name]), name
                assert not value.requires_grad


@pytest.mark.parametrize("model", list(MODELS))
def test_a_forward_that_ended_early_leaves_the_backbone_as_it_was(model: str) -> None:
    """No hook stays, and the backbone's own output, also with hidden states, is the same."""
    make, batch, names = MODELS[model]
    net = make()
    extra = {"output_hidden_states": True} if model != "convnet" else {}
    before = bare(net, **batch, **extra)
    hooks = [len(module._forward_hooks) for module in net.modules()]  # transformers' own
    extractor = FrozenFeatureExtractor(net, names[0])
    for _ in range(3):
        extractor(**batch)
    assert [len(module._forward_hooks) for module in net.modules()] == hooks
    after = bare(net, **batch, **extra)
    assert torch.equal(first_tensor(before), first_tensor(after))
    if extra:
        assert len(before.hidden_states) == len(after.hidden_states) > 2


def test_the_forward_ends_after_the_last_layer_wanted() -> None:
    """What comes later runs at the first call alone, which counts the runs of each layer."""
    net = make_bert()
    runs: list[str] = []
    net.encoder.layer[0].register_forward_hook(lambda *_: runs.append("0"))
    net.encoder.layer[1].register_forward_hook(lambda *_: runs.append("1"))
    extractor = FrozenFeatureExtractor(net, ["encoder.layer.0"])
    batch = token_batch([4])
    extractor(**batch)
    assert runs == ["0", "1"]
    for _ in range(3):
        extractor(**batch)
    assert runs == ["0", "1", "0", "0", "0"]


def test_a_layer_that_runs_several_times_gives_its_last_output() -> None:
    """ALBERT's one layer runs for each of its depths: the last is the layer's output."""
    net = Unrolled()
    batch = torch.randn(2, 4)
    expected = hooked(net, "shared", batch)
    extractor = FrozenFeatureExtractor(net, "shared")
    assert all(torch.equal(extractor(batch)["shared"], expected) for _ in range(3))
    torch.manual_seed(0)
    albert = AlbertModel(
        AlbertConfig(
            vocab_size=50,
            embedding_size=8,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )
    name = "encoder.albert_layer_groups.0.albert_layers.0"
    tokens = token_batch([4, 2])
    want = hooked(albert, name, **tokens)
    taps = FrozenFeatureExtractor(albert, name)
    assert all(torch.equal(first_tensor(taps(**tokens)[name]), want) for _ in range(3))


def test_layers_are_named_through_wrappers() -> None:
    """A compiled or wrapped backbone has the names of the model itself."""
    net = nn.DataParallel(make_convnet())
    extractor = FrozenFeatureExtractor(net, ["norm"])
    assert torch.equal(extractor(IMAGES)["norm"], hooked(net, "module.norm", IMAGES))
    assert list(FrozenFeatureExtractor(net, ["module.norm"])(IMAGES)) == ["module.norm"]


def test_a_layer_that_is_replaced_is_taken_from_its_name() -> None:
    """The name tells which layer is meant, not the module that had it once."""
    net = make_convnet()
    extractor = FrozenFeatureExtractor(net, "fc")
    extractor(IMAGES)
    net.fc = nn.Linear(4, 5).requires_grad_(requires_grad=False)
    assert extractor(IMAGES)["fc"].shape == (4, 5)
    del net.fc
    with pytest.raises(UnknownLayerError, match="'fc'"):
        extractor(IMAGES)


def test_layers_that_do_not_exist() -> None:
    """All of them at once, each with near names."""
    with pytest.raises(UnknownLayerError, match=r"2 layer\(s\) are not in the backbone") as caught:
        FrozenFeatureExtractor(make_bert(), ["encoder.layers.0", "encoder.layer.0", "polar"])
    error = caught.value
    assert error.layers == ("encoder.layers.0", "polar")
    assert error.suggestions[0][0] == "encoder.layer.0"
    assert "pooler" in error.suggestions[1]
    assert "did you mean 'encoder.layer.0'" in str(error)
    assert isinstance(error, LookupError)


def test_a_layer_without_parameters_is_suggested_too() -> None:
    """A name near an activation's or a dropout's is found."""
    with pytest.raises(UnknownLayerError, match="did you mean 'drop'"):
        FrozenFeatureExtractor(make_convnet(), "drops")


def test_layers_that_never_run() -> None:
    """A layer that exists and is not reached is another error, at every call."""
    extractor = FrozenFeatureExtractor(Unrolled(), ["last", "unused"])
    for _ in range(2):
        with pytest.raises(LayerNotRunError, match=r"1 layer.*'unused'") as caught:
            extractor(torch.randn(2, 4))
    assert caught.value.layers == ("unused",)
    assert isinstance(caught.value, RuntimeError)


def test_a_container_never_runs_and_the_error_says_so() -> None:
    """A ModuleList is called by nobody: the last layer in it is named."""
    with pytest.raises(LayerNotRunError, match=r"take 'encoder\.layer\.1'"):
        FrozenFeatureExtractor(make_bert(), "encoder.layer")(**token_batch([3]))


def test_an_error_inside_the_backbone_passes_and_leaves_no_hook() -> None:
    """The backbone's own exception reaches the user as it is."""
    net = make_convnet()
    extractor = FrozenFeatureExtractor(net, ["norm"])
    with pytest.raises(RuntimeError, match="channels"):
        extractor(torch.randn(4, 2, 8, 8))
    assert not any(module._forward_hooks for module in net.modules())


def test_an_except_clause_in_the_backbone_does_not_catch_the_end() -> None:
    """A model that tries and excepts around a layer does not run on."""

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.two = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.one(x)
            except Exception:  # noqa: BLE001
                x = -x
            result: Tensor = self.two(x)
            return result

    net = Tries()
    seen: list[int] = []
    net.two.register_forward_hook(lambda *_: seen.append(1))
    extractor = FrozenFeatureExtractor(net, "one")
    batch = torch.randn(2, 4)
    assert torch.equal(extractor(batch)["one"], extractor(batch)["one"])
    assert seen == [1]


def test_hooks_of_the_user_still_run_and_stay() -> None:
    """A hook that changes a layer's output is part of the backbone; only our own are removed."""
    net = make_convnet()
    net.norm.register_forward_hook(lambda _m, _a, out: out * 2)
    plain = make_convnet()
    got = FrozenFeatureExtractor(net, "norm")(IMAGES)["norm"]
    assert torch.equal(got, hooked(plain, "norm", IMAGES) * 2)
    assert len(net.norm._forward_hooks) == 1


def test_backbones_that_clean_up_after_a_forward_are_not_ended_early() -> None:
    """FSDP lets go of gathered weights, accelerate of moved ones: they run to their end."""

    class FSDPModule(nn.Linear):
        def reshard(self) -> None:
            pass

    offloaded = nn.Linear(2, 2)
    offloaded._hf_hook = object()  # type: ignore[assignment]
    assert may_end_early(make_bert())
    assert not may_end_early(nn.Sequential(FSDPModule(2, 2)))
    assert not may_end_early(nn.Sequential(offloaded))
    net = nn.Sequential(nn.Linear(2, 2), FSDPModule(2, 2))
    seen: list[int] = []
    net[1].register_forward_hook(lambda *_: seen.append(1))
    extractor = FrozenFeatureExtractor(net, "0")
    for _ in range(3):
        extractor(torch.randn(1, 2))
    assert seen == [1, 1, 1]


def test_one_backbone_in_two_threads_with_different_layers() -> None:
    """Each thread's taps catch what that thread ran."""
    net = make_convnet()
    first, second = FrozenFeatureExtractor(net, "norm"), FrozenFeatureExtractor(net, "fc")
    batches = {first: IMAGES, second: IMAGES + 1}
    expected = {first: first(batches[first])["norm"], second: second(batches[second])["fc"]}
    wrong: list[str] = []

    def work(extractor: FrozenFeatureExtractor) -> None:
        for _ in range(50):
            (value,) = extractor(batches[extractor]).values()
            if not torch.equal(value, expected[extractor]):
                wrong.append(str(extractor.layers))

    threads = [threading.Thread(target=work, args=(e,)) for e in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- attention and recurrence ------------------------------------------------------------------


def encoder() -> nn.TransformerEncoder:
    """Torch's own encoder, which has a fast path in eval without gradients."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@nested
def test_the_fast_path_gives_what_the_bare_encoder_gives() -> None:
    """Torch's fused layer is used as it would be without the extractor, to the bit."""
    net, batch = encoder(), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    got = FrozenFeatureExtractor(net)(batch, src_key_padding_mask=padding)
    assert torch.equal(got, bare(net, batch, src_key_padding_mask=padding))


@pytest.mark.parametrize("name", ["layers.0.self_attn", "layers.0.linear1", "layers.0", "layers.1"])
def test_layers_inside_the_fast_path_run_all_the_same(name: str) -> None:
    """A tap on a part of the fused layer switches the fusion off instead of never firing."""
    net, batch = encoder(), torch.randn(2, 5, 16)
    extractor = FrozenFeatureExtractor(net, name)
    expected = hooked(net, name, batch)
    for _ in range(2):
        assert torch.equal(first_tensor(extractor(batch)[name]), expected)
    # The two paths differ in rounding alone.
    torch.testing.assert_close(bare(net, batch), net(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_backbones(kind: Callable[..., nn.RNNBase]) -> None:
    """Dropout between layers is off, outputs and states come back as the RNN gives them."""
    torch.manual_seed(0)
    net = kind(4, 6, num_layers=2, dropout=0.5, batch_first=True, bidirectional=True)
    batch = torch.randn(3, 5, 4)
    extractor = FrozenFeatureExtractor(net)
    extractor.train()
    got, expected = extractor(batch), bare(net, batch)
    assert torch.equal(got[0], expected[0])
    packed = nn.utils.rnn.pack_padded_sequence(batch, [5, 4, 2], batch_first=True)
    out, _ = extractor(packed)
    assert isinstance(out, nn.utils.rnn.PackedSequence)
    assert torch.equal(out.data, bare(net, packed)[0].data)
    head = nn.Linear(12, 1)
    torch.autograd.backward(head(got[0]).sum())
    assert head.weight.grad is not None
