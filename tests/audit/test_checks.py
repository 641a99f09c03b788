"""Checks that no public case covers: what they find, what they leave alone, and their mends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

import freezekit as fk
from audit_support import apply_mend, codes, find, freeze_by_hand, loud
from freezekit._audit.checks import modes
from freezekit._format import format_bytes
from zoo import Encoder, StorageTied


def parts(**modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(modules)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def assert_mended(finding: fk.Finding, model: nn.Module, optimizer: Any = None) -> None:
    """Run the mend; the finding's code is gone."""
    scope = apply_mend(finding, model=model, optimizer=optimizer, finding=finding)
    report = fk.audit(scope["model"], optimizer=scope["optimizer"])
    assert finding.code not in codes(report), finding.mend


# -- what is trainable -------------------------------------------------------------------------


class Tokens(nn.Module):
    """A ViT's shape: tokens of the model's own, blocks, a head."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(1, 4, 2)))
        self.blocks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        self.head = nn.Linear(2, 1)


@pytest.mark.parametrize("name", ["cls_token", "pos_embed", "gate", "register_tokens"])
def test_loose_parameters_are_found(name: str) -> None:
    """Freezing layer by layer leaves what the model owns itself; freezing it mends that."""
    model = Tokens(name)
    freeze_by_hand(model.blocks)
    finding = find(fk.audit(model), "FK104")
    assert (finding.severity, finding.fqns) == ("warning", (name,))
    assert_mended(finding, model)


@pytest.mark.parametrize("name", ["prompt_tokens", "prefix", "lora_A", "adapter_scale"])
def test_prompts_and_adapters_are_meant(name: str) -> None:
    """What is added to a frozen model on purpose is no finding."""
    model = Tokens(name)
    freeze_by_hand(model.blocks)
    assert "FK104" not in codes(fk.audit(model))


def test_loose_parameters_of_a_trainable_model_are_as_they_should_be() -> None:
    """Where the blocks learn, tokens may."""
    assert codes(fk.audit(Tokens("cls_token"))) == []


def test_an_expectation_confirms_what_looks_odd() -> None:
    """What expect_trainable names is meant: no finding about blocks, tokens or ties."""
    model = Tokens("cls_token")
    freeze_by_hand(model.blocks)
    assert loud(fk.audit(model, expect_trainable=["cls_token", "head"])) == []
    stack = Encoder(12)
    freeze_by_hand(stack)
    stack.encoder.layer[5].requires_grad_(True)
    assert loud(fk.audit(stack)) == ["FK108"]
    assert loud(fk.audit(stack, expect_trainable="encoder.layer.5")) == []


def test_both_differences_from_the_expectation_are_told() -> None:
    """Missing and surplus parameters, each with a call that mends them."""
    model = parts(body=nn.Linear(2, 2), head=nn.Linear(2, 1))
    freeze_by_hand(model["head"])
    finding = find(fk.audit(model, expect_trainable="head"), "FK102")
    assert finding.cause == (
        "0 of 2 expected tensors are trainable; frozen: head.weight, head.bias; 2 tensors "
        "trainable and not expected to be: body.weight, body.bias."
    )
    apply_mend(finding, model=model)
    assert fk.audit(model, expect_trainable="head").ok


def test_a_state_with_names_that_are_gone() -> None:
    """Names of the state that the model no longer has are told."""
    model = parts(body=nn.Linear(2, 2), head=nn.Linear(2, 1))
    state = fk.freeze_state(model)
    del model["head"]
    finding = find(fk.audit(model, expect_trainable=state), "FK102")
    assert "2 names no longer in the model: head.weight, head.bias" in finding.cause
    assert fk.audit(model, expect_trainable=fk.freeze_state(model)).ok


def numbered(frozen: list[int], total: int = 12) -> nn.Module:
    model = Encoder(total)
    for number in frozen:
        freeze_by_hand(model.encoder.layer[number])
    return model


@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param([], id="none"),
        pytest.param(range(12), id="all"),
        pytest.param(range(8), id="first"),
        pytest.param(range(11), id="all-but-the-last"),
        pytest.param([0], id="the-first"),
        pytest.param(range(4, 12), id="last"),
        pytest.param(range(3, 7), id="middle"),
        pytest.param(range(0, 12, 2), id="every-second"),
        pytest.param(range(1, 12), id="from-1-on"),
        pytest.param(range(9, 12), id="over-the-ten"),
    ],
)
def test_ways_of_freezing_blocks_that_are_meant(frozen: Any) -> None:
    """Ranges from either end, in the middle, and strides are ways of fine-tuning."""
    assert not {"FK103", "FK108"} & set(codes(fk.audit(numbered(list(frozen)))))


@pytest.mark.parametrize(
    ("frozen", "total", "longer"),
    [
        ([1, 10, 11], 12, [10, 11]),
        ([0, 1, 10, 11], 12, [10, 11]),
        ([2, *range(20, 30)], 32, [*range(20, 30)]),
        ([*range(4), *range(10, 36)], 36, [*range(10, 36)]),
    ],
    ids=["1", "0-1", "2", "0-3"],
)
def test_numbers_taken_for_prefixes(frozen: list[int], total: int, longer: list[int]) -> None:
    """Blocks of which the number begins with a frozen one's digits."""
    finding = find(fk.audit(numbered(frozen, total)), "FK103")
    assert finding.fqns == tuple(f"encoder.layer.{number}" for number in longer)


def test_a_method_overwritten_by_a_value() -> None:
    """``model.eval = True`` is found, and can be undone."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].eval = True  # type: ignore[assignment,method-assign]
    finding = find(fk.audit(model), "FK107")
    assert (finding.severity, finding.fqns) == ("error", ("0",))
    assert_mended(finding, model)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("require_grad", False, True),
        ("requires_gradient", False, True),
        ("required_grad", False, True),
        ("RequiresGrad", False, True),
        ("frozen", True, True),
        ("trainable", False, True),
        ("trainable", True, False),
        ("requires_grads", True, False),
        ("grad_scale", False, False),
        ("is_sparse_grad", False, False),
        ("tensor_model_parallel", True, False),
        ("require_grad", None, False),
    ],
)
def test_which_attributes_are_near_misses(name: str, value: Any, found: bool) -> None:
    """Only what sounds like the flag, and says the opposite of it."""
    model = nn.Linear(2, 2)
    setattr(model.weight, name, value)
    assert ("FK105" in codes(fk.audit(model))) is found


def test_a_models_own_attributes_are_warned_about_only_if_all_disagrees() -> None:
    """``trainable`` may be a model's own word."""
    model = parts(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    model.trainable = False  # type: ignore[assignment]
    assert find(fk.audit(model), "FK106").severity == "warning"
    freeze_by_hand(model["a"])
    assert "FK106" not in codes(fk.audit(model))


def test_an_attribute_that_its_class_goes_by_is_no_near_miss() -> None:
    """It does something: here a graph is kept of a part that is frozen, until it says so too."""
    from transformers import HubertConfig, HubertForCTC

    config = HubertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embedding_groups=2,
        vocab_size=8,
    )
    model = HubertForCTC(config)
    fk.freeze(model, "hubert.feature_extractor")
    finding = find(fk.audit(model), "FK106")
    assert finding.severity == "warning"
    assert "which the code of its class goes by; parameters in it are frozen" in finding.cause
    assert "set _requires_grad = False on hubert.feature_extractor" in finding.mend
    sound = torch.zeros(1, 800)
    assert model.hubert.feature_extractor(sound).requires_grad
    model.hubert.feature_extractor._requires_grad = False
    assert not model.hubert.feature_extractor(sound).requires_grad
    assert "FK106" not in codes(fk.audit(model))


def test_names_that_models_have_of_their_own_are_no_adapters() -> None:
    """SAM's prompt encoder is frozen with the rest, on purpose; peft's is not."""
    model = parts(prompt_encoder=nn.Linear(2, 2), adapter_1=nn.Linear(2, 2), head=nn.Linear(2, 2))
    freeze_by_hand(model["prompt_encoder"])
    freeze_by_hand(model["adapter_1"])
    assert "FK701" not in codes(fk.audit(model))
    model.peft_config = {}  # type: ignore[assignment]
    assert find(fk.audit(model), "FK701").fqns == (
        "prompt_encoder.weight",
        "prompt_encoder.bias",
        "adapter_1.weight",
        "adapter_1.bias",
    )


# -- norms and modes ---------------------------------------------------------------------------


def test_a_trainable_norm_that_does_not_track() -> None:
    """It learns with batch statistics and is evaluated with stale ones; the flag mends it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    norm: Any = model[1]
    norm.track_running_stats = False
    finding = find(fk.audit(model), "FK204")
    assert finding.severity == "warning"
    assert_mended(finding, model)
    norm.track_running_stats = False
    assert find(fk.audit(model.eval()), "FK204").severity == "note"


def test_a_norm_without_statistics_is_as_it_was_built() -> None:
    """``track_running_stats=False`` from the start leaves no statistics behind."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    assert codes(fk.audit(model)) == []


def test_a_held_norm_whose_weights_were_thawed_by_hand() -> None:
    """Held by freeze, and trained by hand: both ways out work."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    fk.freeze(model, "1")
    model[1].requires_grad_(True)
    finding = find(fk.audit(model), "FK205")
    assert "freezekit.unfreeze" in finding.mend
    fk.unfreeze(model, "1")
    assert "FK205" not in codes(fk.audit(model))


def test_a_model_in_eval_has_half_frozen_norms_as_a_note() -> None:
    """A model that is evaluated is not warned about; one that an optimizer will train is."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    assert find(fk.audit(model), "FK205").severity == "note"
    assert find(fk.audit(model, optimizer=sgd(model)), "FK205").severity == "warning"


def test_a_part_that_learns_in_eval() -> None:
    """Dropout that stays off in an unfrozen encoder."""
    model = parts(encoder=nn.Sequential(nn.Linear(2, 2), nn.Dropout()), head=nn.Linear(2, 1))
    model["encoder"].eval()
    finding = find(fk.audit(model), "FK207")
    assert (finding.severity, finding.fqns) == ("warning", ("encoder",))
    assert_mended(finding, model)


def test_a_part_in_eval_that_does_not_look_at_its_mode() -> None:
    """It makes no difference that is known: a note."""
    model = parts(encoder=nn.Sequential(nn.Linear(2, 2)), head=nn.Linear(2, 1))
    model["encoder"].eval()
    assert find(fk.audit(model), "FK207").severity == "note"


def test_one_dropout_in_eval() -> None:
    """A dropout alone in eval, among parameters that learn."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval(), nn.Linear(2, 2))
    assert find(fk.audit(model), "FK207").fqns == ("1",)


def test_a_whole_model_in_eval_is_no_finding() -> None:
    """Models come from the hub in eval mode."""
    assert codes(fk.audit(nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval())) == []


def test_a_recurrent_layer_in_eval_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it raises: a warning; below all that learns it does no harm."""
    model = parts(first=nn.Linear(2, 2), rnn=nn.GRU(2, 2), head=nn.Linear(2, 1))
    freeze_by_hand(model["rnn"])
    model["rnn"].eval()
    assert find(fk.audit(model), "FK208").severity == "note"
    monkeypatch.setattr(modes, "on_cuda", lambda _module: True)
    finding = find(fk.audit(model), "FK208")
    assert finding.severity == "warning"
    assert_mended(finding, model)
    model["rnn"].eval()
    freeze_by_hand(model["first"])
    assert "FK208" not in codes(fk.audit(model))


def test_dropout_below_prompts_is_regularisation() -> None:
    """A frozen backbone through which a prompt learns makes no features."""
    backbone = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model = parts(prompt_encoder=nn.Linear(2, 2), backbone=backbone, head=nn.Linear(2, 1))
    freeze_by_hand(backbone)
    assert find(fk.audit(model), "FK203").severity == "note"


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_frozen_layer_with_weight_norm(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """The weight of a frozen layer is computed from parameters that a pattern missed."""
    model = parts(body=wrap(nn.Linear(2, 2)), head=nn.Linear(2, 1))
    for name, parameter in model["body"].named_parameters():
        if name in {"weight", "bias"}:
            parameter.requires_grad = False
    finding = find(fk.audit(model), "FK209")
    assert len(finding.fqns) == 2
    assert_mended(finding, model)


def test_half_of_a_weight_norm() -> None:
    """Freezing one of the two parameters does not freeze the weight."""
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    model = parts(body=layer, head=nn.Linear(2, 1))
    layer.get_parameter("parametrizations.weight.original0").requires_grad = False
    assert find(fk.audit(model), "FK209").fqns == ("body.parametrizations.weight.original1",)


def test_a_computed_weight_looks_frozen() -> None:
    """The old spectral norm keeps a plain tensor that says requires_grad=False."""
    layer = nn.utils.spectral_norm(nn.Linear(2, 2))
    model = parts(body=layer, rest=nn.Linear(2, 2))
    assert codes(fk.audit(model)) == []  # nobody froze anything
    freeze_by_hand(model["rest"])
    finding = find(fk.audit(model), "FK210")
    assert (finding.severity, finding.fqns) == ("note", ("body.weight",))
    assert_mended(finding, model)


# -- the optimizer -----------------------------------------------------------------------------


def test_frozen_in_a_group_without_a_gradient_is_a_note() -> None:
    """It is skipped; its state takes memory."""
    model = parts(body=nn.Linear(2, 2), head=nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model["head"](model["body"](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    freeze_by_hand(model["body"])
    finding = find(fk.audit(model, optimizer=optimizer), "FK302")
    assert (finding.severity, finding.fqns) == ("note", ("body.weight", "body.bias"))
    assert "with 56 B of state" in finding.cause
    assert_mended(finding, model, optimizer)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 0.9}, "moves them by momentum."),
        ({"weight_decay": 0.1}, "moves them by weight decay (0.1)."),
        ({"momentum": 0.9, "weight_decay": 0.1}, "momentum and weight decay (0.1)."),
    ],
    ids=["momentum", "decay", "both"],
)
def test_what_would_move_a_frozen_parameter(options: dict[str, float], words: str) -> None:
    """A gradient of zeros is enough for momentum and weight decay."""
    model = nn.Linear(2, 2)
    optimizer = sgd(model, **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model.weight.requires_grad = False
    finding = find(fk.audit(model, optimizer=optimizer), "FK302")
    assert finding.cause.endswith(words)
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)  # it is true


def test_listed_twice() -> None:
    """A tensor in two groups, and one memory under two parameters, are updated twice."""
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    optimizer.param_groups[0]["params"].append(model.weight)
    finding = find(fk.audit(model, optimizer=optimizer), "FK305")
    assert (finding.severity, finding.fqns) == ("error", ("weight",))
    assert_mended(finding, model, optimizer)
    tied = StorageTied()
    assert find(fk.audit(tied, optimizer=sgd(tied)), "FK305").fqns == ("encode.weight",)
    assert "FK305" in codes(fk.audit(model, optimizer=[sgd(model), sgd(model)]))


def test_empty_groups() -> None:
    """One that a freeze emptied is a note, an optimizer with nothing at all an error."""
    model = parts(body=nn.Linear(2, 2), head=nn.Linear(2, 1))
    optimizer = torch.optim.SGD(
        [{"params": list(model[name].parameters())} for name in model], lr=0.1
    )
    fk.freeze(model, "body", optimizer=optimizer)
    finding = find(fk.audit(model, optimizer=optimizer), "FK306")
    assert (finding.severity, finding.cause) == ("note", "SGD: of 2 groups number 0 is empty.")
    fk.freeze(model, "*", optimizer=optimizer)
    assert find(fk.audit(model, optimizer=optimizer), "FK306").severity == "error"


def test_state_left_over() -> None:
    """State of a tensor that left its group, with its bytes; the mend drops it."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["params"].pop()
    finding = find(fk.audit(model, optimizer=optimizer), "FK307")
    assert finding.fqns == ("bias",)
    assert "20 B of state of 1 tensor" in finding.cause
    assert_mended(finding, model, optimizer)


def test_a_loss_with_weights_of_its_own_is_a_note() -> None:
    """An optimizer may train what is not in the model; all of the model's is in it."""
    model, loss = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    assert find(fk.audit(model, optimizer=optimizer), "FK304").severity == "note"


def rows(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.clone()
    grad[:2] = 0
    return grad


def masked(mask: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return grad * mask


MASKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "assigned": rows,
    "partial": partial(masked, torch.tensor([[0.0], [1.0], [1.0]])),
    "filled": lambda grad: grad.index_fill(0, torch.tensor([0]), 0),
}


@pytest.mark.parametrize("hook", MASKS.values(), ids=MASKS.keys())
def test_masked_rows_and_decay(hook: Callable[[torch.Tensor], Any]) -> None:
    """A gradient mask does not freeze rows for an optimizer with weight decay."""
    model = nn.Embedding(3, 2)
    model.weight.register_hook(hook)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    finding = find(fk.audit(model, optimizer=optimizer), "FK308")
    assert (finding.severity, finding.fqns) == ("warning", ("weight",))
    assert_mended(finding, model, optimizer)


def test_a_closed_over_mask_is_seen_and_clipping_is_not() -> None:
    """A mask in a closure; a hook that clips masks nothing."""
    mask = torch.tensor([[0.0], [1.0], [1.0]])
    for hook, found in ((lambda grad: grad * mask, True), (lambda grad: grad.clamp(-1, 1), False)):
        model = nn.Embedding(3, 2)
        model.weight.register_hook(hook)  # type: ignore[no-untyped-call]
        optimizer = torch.optim.AdamW(model.parameters())
        assert ("FK308" in codes(fk.audit(model, optimizer=optimizer))) is found


# -- wrappers ----------------------------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    """A gloo group with this process as its only member."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("thaw", [True, False], ids=["unfrozen-after", "frozen-after"])
def test_ddp_built_before_flags_changed(thaw: bool) -> None:
    """DDP notes at construction what has gradients: a change after it is an error."""
    net = parts(body=nn.Linear(2, 2), head=nn.Linear(2, 1))
    net["body"].requires_grad_(not thaw)
    model = nn.parallel.DistributedDataParallel(net)
    assert fk.audit(model).ok
    net["body"].requires_grad_(thaw)
    finding = find(fk.audit(model), "FK502")
    assert finding.severity == "error"
    assert ("body.weight" in finding.fqns) is True
    assert ("the ranks drift apart" if thaw else "waits for gradients") in finding.cause
    rebuilt = nn.parallel.DistributedDataParallel(model.module)
    assert "FK502" not in codes(fk.audit(rebuilt))


@pytest.mark.usefixtures("process_group")
def test_a_mixed_fsdp_unit() -> None:
    """With fully_shard a note; names are those of the frozen parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    freeze_by_hand(block[0])
    model = nn.Sequential(block, nn.Linear(2, 1))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    finding = find(fk.audit(model), "FK501")
    assert (finding.severity, finding.fqns) == ("note", ("0.0.weight", "0.0.bias"))


def test_a_mixed_unit_of_the_first_fsdp() -> None:
    """FSDP's first version keeps gradient memory for all of a mixed unit: a warning."""

    class FullyShardedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._fsdp_wrapped_module = module

    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    freeze_by_hand(block[0])
    model = parts(block=FullyShardedDataParallel(block), head=nn.Linear(2, 1))
    finding = find(fk.audit(model), "FK501")
    assert (finding.severity, finding.fqns) == ("warning", ("block.0.weight", "block.0.bias"))


deprecated = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")


def small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=4,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


@deprecated
def test_reentrant_checkpoints_over_frozen_embeddings() -> None:
    """Transformers' reentrant checkpointing is found statically; either mend ends it."""
    model = small_llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    # Newer versions of transformers add the hook by themselves, older ones do not.
    model.model.embed_tokens._forward_hooks.clear()
    assert "FK503" not in codes(fk.audit(model))  # the embeddings learn
    freeze_by_hand(model.model.embed_tokens)
    finding = find(fk.audit(model), "FK503")
    assert finding.severity == "error"
    assert finding.fqns[0] == "model.layers.0.self_attn.q_proj.weight"
    assert not any("norm.weight" in name and "layers" not in name for name in finding.fqns)
    assert_mended(finding, model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    assert "FK503" not in codes(fk.audit(model))


def test_torchs_checkpoint_wrapper() -> None:
    """A wrapped module with the reentrant implementation is found."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        checkpoint_wrapper,
    )

    for kind, found in ((CheckpointImpl.REENTRANT, True), (CheckpointImpl.NO_REENTRANT, False)):
        block = checkpoint_wrapper(nn.Linear(2, 2), checkpoint_impl=kind)
        model = parts(stem=nn.Linear(2, 2), block=block, head=nn.Linear(2, 1))
        freeze_by_hand(model["stem"])
        assert ("FK503" in codes(fk.audit(model))) is found


def test_a_module_compiled_for_other_flags() -> None:
    """Flags that changed since the compilation are named; compiling again ends it."""
    torch.compiler.reset()
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    freeze_by_hand(inner[0])
    model: Any = torch.compile(inner, backend="aot_eager")
    model(torch.randn(3, 4)).sum().backward()
    assert "FK504" not in codes(fk.audit(model))
    inner[0].requires_grad_(True)
    finding = find(fk.audit(model), "FK504")
    assert (finding.severity, finding.fqns) == ("note", ("0.weight", "0.bias"))
    model(torch.randn(3, 4)).sum().backward()
    assert "FK504" not in codes(fk.audit(model))
    torch.compiler.reset()


# -- odd parameters, adapters, placement -------------------------------------------------------


def test_a_parameter_on_the_meta_device_among_others() -> None:
    """A weight that was never loaded is an error; a model without any values is a structure."""
    model = parts(body=nn.Linear(2, 2), head=nn.Linear(2, 1, device="meta"))
    finding = find(fk.audit(model), "FK601")
    assert (finding.severity, finding.fqns) == ("error", ("head.weight", "head.bias"))
    assert codes(fk.audit(nn.Linear(2, 2, device="meta"))) == []


def test_a_frozen_part_under_autocast() -> None:
    """Inside autocast the frozen float32 backbone is cast at every use; a cast once mends it."""
    model = parts(body=nn.Sequential(nn.Linear(4, 4)), head=nn.Linear(4, 1))
    freeze_by_hand(model["body"])
    assert "FK603" not in codes(fk.audit(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        finding = find(fk.audit(model), "FK603")
        assert (finding.severity, finding.fqns) == ("note", ("body",))
        assert_mended(finding, model)


def test_what_learns_in_16_bits() -> None:
    """bfloat16 weights that an optimizer updates in place: a note."""
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = sgd(model)
    finding = find(fk.audit(model, optimizer=optimizer), "FK604")
    assert finding.severity == "note"
    assert_mended(finding, model, optimizer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_active_adapter_is_frozen() -> None:
    """Another adapter learns and is not used; set_adapter mends it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], r=2)
    model = get_peft_model(small_llama(), config)
    model.add_adapter("other", config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".other." in name
    finding = find(fk.audit(model), "FK702")
    assert finding.severity == "warning"
    assert "active: default" in finding.cause
    assert_mended(finding, model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_constant_of_an_adapter_learns() -> None:
    """AdaLoRA divides by its rank: trainable, the rank drifts and every output is kept."""
    from peft import AdaLoraConfig, get_peft_model

    model = get_peft_model(small_llama(), AdaLoraConfig(target_modules=["q_proj"], total_step=10))
    ranks = [name for name, _ in model.named_parameters() if ".ranknum." in name]
    for name in ranks:
        model.get_parameter(name).requires_grad = True
    finding = find(fk.audit(model), "FK704")
    assert finding.severity == "warning"
    assert [f"base_model.model.{name}" for name in finding.fqns] == ranks
    assert "SVDLinear.ranknum" in finding.cause
    assert_mended(finding, model)
    assert not any(model.get_parameter(name).requires_grad for name in ranks)
    assert any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_lora_that_misses_a_block() -> None:
    """Adapters in all blocks but one, in which the layer is there without."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=4,
            intermediate_size=8,
            num_hidden_layers=6,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    targets = r".*layers\.[0124]\.self_attn\.(q|v)_proj|.*layers\.[35]\.self_attn\.q_proj"
    model = get_peft_model(base, LoraConfig(target_modules=targets, r=2))
    finding = find(fk.audit(model), "FK103")
    assert "4 of 6 blocks that learn in model.layers" in finding.cause


def test_a_frozen_part_above_a_trainable_one() -> None:
    """It costs a backward pass; with the lower part frozen too it is free."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    freeze_by_hand(model[1:3])
    finding = find(fk.audit(model), "FK703")
    assert (finding.severity, finding.fqns) == ("note", ("0.weight", "0.bias"))
    assert "40 frozen parameters (61.5%) in 4 tensors" in finding.cause
    assert "freezekit.audit(model, inputs=batch) tells how much memory" in finding.mend
    assert_mended(finding, model)


def test_what_a_frozen_part_above_costs() -> None:
    """With inputs the estimator says so: a frozen layer keeps nothing but what it passes on."""
    # (64, 256) fp32 is 64 KiB: each GELU keeps its input, a frozen Linear nothing; the last one's
    # output is kept too, for the head.
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(256, 256), *blocks, nn.Linear(256, 256))
    freeze_by_hand(model[1:5])
    inputs = torch.empty(64, 256, device="meta")
    finding = find(fk.audit(model, inputs=inputs), "FK703")
    assert "their activations are kept: 320.0 KiB in frozen modules, with these" in finding.cause
    now = fk.estimate_memory(model, inputs, optimizer=None)
    fk.freeze(model, "0")
    mended = fk.estimate_memory(model, inputs, optimizer=None)
    assert now.peak_allocated - mended.peak_allocated > 4 * 64 << 10
    peaks = (format_bytes(each.peak_allocated) for each in (now, mended))
    assert "peak at {}, with the mend at {})".format(*peaks) in finding.cause
    assert "tells how much memory" not in finding.mend


def test_what_a_frozen_part_above_costs_is_not_known() -> None:
    """Inputs that the model does not take: that check says so, the others run."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    freeze_by_hand(model[1:3])
    report = fk.audit(model, inputs=torch.zeros(2, 5))
    assert codes(report) == ["FK001"]
    assert "frozen_above_trainable (FK703) raised TraceError: " in report.findings[0].cause
    with pytest.raises(ValueError, match=r"no tensor in the inputs \(str\): give tensors"):
        fk.audit(model, inputs="no tensor")


def test_a_frozen_part_below_is_free() -> None:
    """Nothing to say where all that learns lies above."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    freeze_by_hand(model[:2])
    assert codes(fk.audit(model)) == []


# -- checks of one's own, and what goes wrong --------------------------------------------------


def no_bias(context: fk.AuditContext) -> Any:
    """MY001: a layer has a bias."""
    for info in context.inventory.parameters:
        if info.fqn.endswith("bias"):
            yield fk.Finding(
                code="MY001",
                severity="warning",
                title="bias",
                fqns=(info.fqn,),
                cause="It has a bias.",
                mend="Take it away.",
            )


def broken(context: fk.AuditContext) -> Any:
    """MY002: never gets that far."""
    raise KeyError("no such thing")


def unnamed(context: fk.AuditContext) -> Any:
    return ()


def wrong(context: fk.AuditContext) -> Any:
    """MY003: yields text."""
    yield "a bias"


def test_a_check_of_ones_own() -> None:
    """It runs beside the others, and its code can be ignored."""
    model = nn.Linear(2, 2)
    checks = (*fk.DEFAULT_CHECKS, no_bias)
    assert codes(fk.audit(model, checks=checks)) == ["MY001"]
    assert codes(fk.audit(model, checks=checks, ignore="MY001")) == []
    assert codes(fk.audit(model, checks=[no_bias])) == ["MY001"]


def test_a_check_that_fails_is_a_finding_and_the_rest_comes() -> None:
    """It says which check, and what it raised."""
    report = fk.audit(nn.Linear(2, 2), checks=(broken, wrong, no_bias))
    assert codes(report) == ["FK001", "FK001", "MY001"]
    first, second = report.findings[:2]
    assert first.cause == "broken (MY002) raised KeyError: 'no such thing'; the other checks ran."
    assert "expected it to yield Finding, got str" in second.cause
    assert not report.ok
    assert codes(fk.audit(nn.Linear(2, 2), checks=(broken,), ignore="FK001")) == []


def test_a_check_without_a_code_leaves_codes_open() -> None:
    """What it may find is not known, so that any code can be ignored."""
    assert codes(fk.audit(nn.Linear(2, 2), checks=(unnamed, no_bias), ignore="MY9")) == ["MY001"]
    with pytest.raises(ValueError, match=r"^ignore: expected codes such as 'FK203', got 'MY9'$"):
        fk.audit(nn.Linear(2, 2), checks=(no_bias,), ignore="MY9")


def test_a_check_that_is_none() -> None:
    """Something else than a function is refused."""
    with pytest.raises(TypeError, match=r"^checks: expected functions of an AuditContext, got str"):
        fk.audit(nn.Linear(2, 2), checks=["FK101"])  # type: ignore[list-item]


def test_the_context_is_frozen() -> None:
    """A check cannot change it."""

    def meddles(context: fk.AuditContext) -> Any:
        """MY004: meddles."""
        context.model = nn.ReLU()  # type: ignore[misc]
        yield None

    finding = find(fk.audit(nn.Linear(2, 2), checks=(meddles,)), "FK001")
    assert "FrozenInstanceError" in finding.cause


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adam", r"^optimizer: one of several: expected a torch.optim.Optimizer, got str"),
        (torch.optim.Adam, r"got Adam; make an instance of it$|got type; make an instance"),
        (
            torch.optim.lr_scheduler.ConstantLR(sgd(nn.Linear(1, 1))),
            r"got ConstantLR; its attribute .optimizer is one: pass that$",
        ),
        ([sgd(nn.Linear(1, 1)), None], r"one of several: expected .* got NoneType$"),
    ],
    ids=["text", "class", "scheduler", "several"],
)
def test_what_is_no_optimizer(optimizer: Any, message: str) -> None:
    """A clear error, with what would have worked."""
    with pytest.raises(fk.errors.OptimizerError, match=message):
        fk.audit(nn.Linear(1, 1), optimizer=optimizer)


def test_an_expectation_that_matches_nothing() -> None:
    """Patterns are as strict as those of freeze."""
    with pytest.raises(LookupError, match=r"'haed'.*did you mean 'head"):
        fk.audit(parts(head=nn.Linear(1, 1)), expect_trainable="haed")
    with pytest.raises(fk.errors.FreezeStateError, match="without schema"):
        fk.audit(nn.Linear(1, 1), expect_trainable={"trainable": []})


def test_every_default_check_is_quiet_about_everything_in_order() -> None:
    """No warning is given, and nothing printed, while checks run."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codes(fk.audit(Encoder(3), checks=fk.DEFAULT_STEP_CHECKS)) == []
