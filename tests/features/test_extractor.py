"""The module: frozen, in eval, without a graph, whatever happens around it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import freezekit as fk
from features.features_support import (
    ConvNet,
    RootParameter,
    SwitchesGradientsOn,
    bare,
    make_bert,
    make_convnet,
    state,
    token_batch,
    unchanged,
)
from freezekit import FrozenFeatureExtractor
from freezekit.errors import (
    InputGradientWarning,
    TrainableBackboneError,
    UnsupportedModelError,
)
from zoo import TiedLM

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 + 3


class Head(nn.Module):
    """An extractor with a head, as people train it."""

    def __init__(self, extractor: nn.Module, width: int) -> None:
        super().__init__()
        self.extractor = extractor
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.extractor(x))
        return result


def train(model: nn.Module, batch: Tensor, steps: int = 3) -> None:
    """Train in earnest, with an optimizer that is given everything."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(steps):
        model.train()
        optimizer.zero_grad()
        torch.autograd.backward(model(batch).pow(2).sum())
        optimizer.step()


# -- frozen ------------------------------------------------------------------------------------


def test_a_training_loop_moves_the_head_and_nothing_else() -> None:
    """Weights, statistics and features stay to the bit, also after a hot optimizer."""
    net = make_convnet()
    torch.autograd.backward(net(IMAGES).sum())  # stale gradients, statistics, all there is
    model = Head(FrozenFeatureExtractor(net), 2)
    before, head, features = state(net), state(model.head), model.extractor(IMAGES)
    train(model, IMAGES)
    assert unchanged(before, net)
    assert not unchanged(head, model.head)
    assert torch.equal(model.extractor(IMAGES), features)
    assert torch.equal(features, bare(make_convnet_like(net), IMAGES))


def make_convnet_like(net: nn.Module) -> nn.Module:
    """A net of the same weights that nothing holds."""
    other = ConvNet()
    other.load_state_dict(net.state_dict())
    return other


def test_stale_gradients_go() -> None:
    """What was trained before leaves no gradient behind that an optimizer would apply."""
    net = make_convnet()
    torch.autograd.backward(net(IMAGES).sum())
    FrozenFeatureExtractor(net)
    assert all(p.grad is None and not p.requires_grad for p in net.parameters())


def test_a_parameter_of_the_root_is_frozen() -> None:
    """A class token, a parameter of no submodule, is frozen like the rest."""
    net = RootParameter()
    model = Head(FrozenFeatureExtractor(net), 4)
    before = state(net)
    train(model, torch.randn(2, 3, 4))
    assert unchanged(before, net)


def test_a_tied_head_is_frozen_under_both_names() -> None:
    """An embedding that is tied to the output layer does not move through either."""
    net = TiedLM()
    extractor = FrozenFeatureExtractor(net, layers=["body"])
    before = state(net)
    model = nn.Sequential(extractor)
    head = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=1.0)
    torch.autograd.backward(head(model(torch.tensor([[1, 2]]))["body"]).sum())
    optimizer.step()
    assert unchanged(before, net)
    assert net.lm_head.weight is net.wte.weight


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(3), (8, 3)),
        (nn.BatchNorm1d(3), (8, 3, 4)),
        (nn.BatchNorm2d(3), (8, 3, 4, 4)),
        (nn.BatchNorm3d(3), (8, 3, 2, 2, 2)),
        (nn.BatchNorm2d(3, affine=False), (8, 3, 4, 4)),
        (nn.InstanceNorm2d(3, track_running_stats=True), (8, 3, 4, 4)),
    ],
    ids=["1d", "1d-tokens", "2d", "3d", "no-affine", "instance"],
)
def test_norms_of_any_dimension_hold_still(norm: nn.Module, shape: tuple[int, ...]) -> None:
    """Running statistics are used and not moved, under train() at every level."""
    extractor = FrozenFeatureExtractor(nn.Sequential(norm))
    before = state(norm)
    batch = torch.randn(shape) * 4 + 7
    for module in (extractor, extractor.backbone, norm):
        module.train()
        assert torch.equal(extractor(batch), bare(norm, batch))
    assert unchanged(before, norm)


def test_a_backbone_without_parameters() -> None:
    """Nothing to freeze is no reason to fail."""
    assert torch.equal(FrozenFeatureExtractor(nn.Flatten())(IMAGES), IMAGES.flatten(1))


# -- eval --------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["extractor", "backbone", "inside", "around"])
def test_all_of_it_is_held_in_eval(at: str) -> None:
    """train() anywhere puts nothing of the backbone into train mode, and returns its module."""
    net = make_convnet()
    extractor = FrozenFeatureExtractor(net)
    around = nn.Sequential(extractor, nn.Dropout())
    called = {"extractor": extractor, "backbone": net, "inside": net.drop, "around": around}[at]
    assert called.train() is called
    assert not any(module.training for module in extractor.modules())
    assert around.eval() is around


def test_modes_set_by_hand_are_put_right_at_the_next_call() -> None:
    """``module.training = True`` past all methods does not reach the features."""
    net = make_convnet()
    extractor = FrozenFeatureExtractor(net)
    expected = extractor(IMAGES)
    for module in net.modules():
        module.training = True
    assert torch.equal(extractor(IMAGES), expected)
    assert not any(module.training for module in net.modules())


def test_a_module_that_is_added_later_is_held_too() -> None:
    """A part that replaces another one after the freeze runs in eval, at once and later."""
    net = make_convnet()
    extractor = FrozenFeatureExtractor(net)
    net.drop = nn.Dropout(0.9)
    first = extractor(IMAGES)
    extractor.train()
    assert torch.equal(extractor(IMAGES), first)
    assert not net.drop.train().training


def test_release_lets_go() -> None:
    """After release() modules follow train() again; what was frozen stays so."""
    net = make_convnet()
    extractor = FrozenFeatureExtractor(net)
    assert extractor.release() is net
    net.train()
    assert all(module.training for module in net.modules())
    assert not any(p.requires_grad for p in net.parameters())
    extractor(IMAGES)
    assert not net.training


# -- outputs -----------------------------------------------------------------------------------


class Named(NamedTuple):
    """An output as a named tuple."""

    a: Tensor
    b: Tensor


class Returns(nn.Module):
    """A backbone that returns what it is told to make of its features."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: (x, x + 1),
        lambda x: [x, [x + 1]],
        lambda x: {"a": x, "b": (x + 1, None)},
        lambda x: Named(x, x + 1),
    ],
    ids=["tensor", "tuple", "list", "dict", "namedtuple"],
)
def test_what_the_backbone_returns_comes_back_in_its_own_type(
    make: Callable[[Tensor], Any],
) -> None:
    """Same type, same values, no graph."""
    net = Returns(make)
    batch = torch.randn(2, 4)
    expected = bare(net, batch)
    got = FrozenFeatureExtractor(net)(batch)
    assert type(got) is type(expected)
    assert repr(got) == repr(expected)


def test_a_model_output_comes_back_as_one() -> None:
    """Outputs of transformers keep their class and fields."""
    net, batch = make_bert(), token_batch([5, 3])
    expected = bare(net, **batch)
    got = FrozenFeatureExtractor(net)(**batch)
    assert type(got) is type(expected)
    assert list(got) == list(expected)
    assert torch.equal(got.last_hidden_state, expected.last_hidden_state)
    assert got.last_hidden_state.grad_fn is None


def test_a_backbone_that_switches_gradients_on_gives_no_graph() -> None:
    """``enable_grad`` inside forward leaves nothing that requires a gradient, at any depth."""
    got = FrozenFeatureExtractor(SwitchesGradientsOn())(torch.randn(2, 4))
    assert not got["out"].requires_grad
    assert not got["nested"][0][0].requires_grad
    assert (got["nested"][0][1], got["name"]) == (3, "x")


def test_features_enter_a_trainable_head() -> None:
    """The head gets gradients; features are not of inference mode, not even inside of it."""
    extractor = FrozenFeatureExtractor(nn.Linear(4, 4))
    head = nn.Linear(4, 2)
    with torch.inference_mode():
        features = extractor(torch.randn(2, 4))
    assert not features.is_inference()
    torch.autograd.backward(head(features).sum())
    assert head.weight.grad is not None


def test_inputs_of_inference_mode_do_not_pass_through() -> None:
    """A backbone that hands its input on does not hand on a tensor that cannot be trained with."""
    with torch.inference_mode():
        inputs = torch.randn(2, 4)
        inside = FrozenFeatureExtractor(nn.Identity())(inputs)
    outside = FrozenFeatureExtractor(nn.Identity())(inputs)
    assert not inside.is_inference()
    assert not outside.is_inference()


def test_an_input_that_requires_a_gradient_is_warned_about() -> None:
    """Its gradient ends here: the user is told, at their own line."""
    extractor = FrozenFeatureExtractor(nn.Linear(4, 4))
    batch = torch.randn(2, 4, requires_grad=True)
    with pytest.warns(InputGradientWarning, match="it ends here") as caught:
        assert not extractor(batch).requires_grad
    assert caught[0].filename == __file__


def test_the_graph_of_the_forward_is_not_kept() -> None:
    """No activation outlives the call: what a layer made is gone once its features are dropped."""
    net = make_convnet()
    kept: list[weakref.ref[Tensor]] = []
    handle = net.norm.register_forward_hook(lambda _m, _a, out: kept.append(weakref.ref(out)))
    features = FrozenFeatureExtractor(net)(IMAGES)
    handle.remove()
    gc.collect()
    assert features.grad_fn is None
    assert [ref() for ref in kept] == [None]


# -- refused -----------------------------------------------------------------------------------


def test_a_backbone_that_was_made_trainable_again_is_refused() -> None:
    """The next call names the parameters; frozen again, it works."""
    net = make_convnet()
    extractor = FrozenFeatureExtractor(net)
    fk.unfreeze(net, ["conv", "norm.bias"])
    with pytest.raises(TrainableBackboneError, match=r"3 parameter\(s\).*conv\.weight") as caught:
        extractor(IMAGES)
    assert caught.value.parameters == ("conv.weight", "conv.bias", "norm.bias")
    fk.freeze(net)
    extractor(IMAGES)


def test_a_parameter_that_is_added_later_is_refused() -> None:
    """A layer that is new, as after a resize, trains by default: not in here."""
    net = make_convnet()
    extractor = FrozenFeatureExtractor(net)
    net.fc = nn.Linear(4, 2)
    with pytest.raises(TrainableBackboneError, match=r"fc\.weight, fc\.bias"):
        extractor(IMAGES)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"pool": "median"}, ValueError, "'cls', 'mean', 'max', 'last_token', or a callable"),
        ({"pool": 3}, TypeError, "got int"),
        ({"pool": nn.Linear(2, 2)}, ValueError, "would get no gradient"),
        ({"layers": []}, ValueError, "none are named"),
        ({"layers": [nn.Linear(1, 1)]}, TypeError, "expected FQNs"),
        ({"micro_batch_size": 0}, ValueError, "an integer of 1 or more, got 0"),
        ({"micro_batch_size": True}, ValueError, "got True"),
        ({"dtype": torch.int8}, ValueError, "floating point"),
        ({"dtype": "bf16"}, ValueError, "'bf16'"),
    ],
)
def test_wrong_options_are_refused_before_anything_changes(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    """What was wrong is said with its value, and the backbone is as it was."""
    net = make_convnet().train()
    with pytest.raises(kind, match=words):
        FrozenFeatureExtractor(net, **options)
    assert all(p.requires_grad for p in net.parameters())
    assert all(module.training for module in net.modules())


def test_what_is_no_model_is_refused() -> None:
    """A class, a generator of parameters, a function: the error says which."""
    with pytest.raises(UnsupportedModelError, match="the class Linear"):
        FrozenFeatureExtractor(nn.Linear)  # type: ignore[arg-type]


# -- dtype and parts ---------------------------------------------------------------------------


def test_dtype_casts_weights_once_and_inputs_at_each_call() -> None:
    """Images in float32 go in, features in bfloat16 come out, and the weights are cast for good."""
    net = make_convnet()
    extractor = FrozenFeatureExtractor(net, dtype=torch.bfloat16)
    assert {t.dtype for t in state(net).values()} == {torch.bfloat16, torch.int64}
    assert extractor(IMAGES).dtype == torch.bfloat16
    half = copy.deepcopy(net).to(torch.bfloat16)
    assert torch.equal(extractor(IMAGES), bare(half, IMAGES.bfloat16()))


def test_rotary_frequencies_stay_exact() -> None:
    """bfloat16 weights, and positions that are still those of the checkpoint."""
    from features.features_support import make_llama

    net = make_llama()
    before = net.rotary_emb.inv_freq.clone()
    extractor = FrozenFeatureExtractor(net, dtype=torch.bfloat16)
    assert torch.equal(net.rotary_emb.inv_freq, before)
    out = extractor(**token_batch([5, 5])).last_hidden_state
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("pool", [None, "mean"])
def test_parts_give_what_the_whole_gives(size: int, pool: Any) -> None:
    """micro_batch_size bounds the peak, and not a value differs beyond rounding."""
    net, batch = make_bert(), token_batch([5, 3, 1, 4, 5, 2, 3])
    whole = FrozenFeatureExtractor(net, pool=pool)(**batch)
    seen: list[int] = []
    handle = net.register_forward_hook(lambda _m, _a, out: seen.append(len(out[0])))
    parts = FrozenFeatureExtractor(net, pool=pool, micro_batch_size=size)(**batch)
    handle.remove()
    assert max(seen) == min(size, 7)
    assert sum(seen) == 7
    assert type(parts) is type(whole)
    torch.testing.assert_close(
        parts if pool else parts.last_hidden_state, whole if pool else whole.last_hidden_state
    )


def test_what_cannot_be_put_together_is_refused() -> None:
    """A cache of keys and values is no tensor per sample; a scalar has no batch."""

    class Cached(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"hidden": x, "cache": DynamicCache()}

    extractor = FrozenFeatureExtractor(Cached(), micro_batch_size=1)
    with pytest.raises(ValueError, match=r"DynamicCache.*use_cache=False"):
        extractor(torch.randn(2, 4))
    scalar = FrozenFeatureExtractor(Returns(lambda x: {"loss": x.sum()}), micro_batch_size=1)
    with pytest.raises(ValueError, match=r"\['loss'\] has the shape \(\) for 1 samples"):
        scalar(torch.randn(2, 4))


def test_tensors_for_all_samples_go_whole_into_each_part() -> None:
    """Position ids of one row serve every part."""
    net, batch = make_bert(), token_batch([5, 5, 5])
    positions = torch.arange(5).unsqueeze(0)
    extractor = FrozenFeatureExtractor(net, pool="cls", micro_batch_size=2)
    torch.testing.assert_close(
        extractor(**batch, position_ids=positions), extractor(**batch), rtol=1e-5, atol=1e-6
    )


# -- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_extractors_of_their_own(way: Callable[[Any], Any]) -> None:
    """Copying and pickling give a held, frozen backbone that does not touch the original."""
    extractor = FrozenFeatureExtractor(make_convnet(), layers=["norm", "fc"])
    expected = extractor(IMAGES)
    other = way(extractor)
    other.train()
    got = other(IMAGES)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert other.backbone is not extractor.backbone
    assert not other.backbone.norm.train().training


def test_the_backbone_is_freed_with_its_extractor() -> None:
    """Holding modules makes no cycle that only the collector could break."""
    extractor = FrozenFeatureExtractor(make_convnet(), layers=["norm"])
    extractor(IMAGES)
    gone = weakref.ref(extractor.get_parameter("backbone.conv.weight"))
    gc.disable()
    try:
        del extractor
        assert gone() is None
    finally:
        gc.enable()


def test_repr_tells_the_options() -> None:
    """print(model) shows what the extractor does, at its head."""
    text = repr(FrozenFeatureExtractor(make_bert(), layers="encoder.layer.0", pool="mean"))
    head = text.splitlines()[1].strip()
    assert head == "layers=['encoder.layer.0'], pool='mean'"


# -- threads -----------------------------------------------------------------------------------


def test_threads_have_no_graph_either() -> None:
    """Grad mode belongs to a thread; the extractor sets it in whichever runs it, with its taps."""
    net = SwitchesGradientsOn()
    extractor = FrozenFeatureExtractor(net, layers=["linear"])
    batches = [torch.full((2, 4), float(i)) for i in range(8)]
    expected = [bare(net.linear, batch) for batch in batches]
    got: dict[int, Tensor] = {}

    def work(index: int) -> None:
        with torch.enable_grad():
            for _ in range(20):
                got[index] = extractor(batches[index])["linear"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(value.requires_grad for value in got.values())
    for index, want in enumerate(expected):
        torch.testing.assert_close(got[index], want)


def test_nothing_warns_in_ordinary_use() -> None:
    """Construction and calls are silent."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FrozenFeatureExtractor(make_convnet())(IMAGES)
