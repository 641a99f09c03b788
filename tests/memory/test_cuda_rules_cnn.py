"""cuDNN's workspaces: what is copied to channels-last, and when the copy lives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from freezekit import estimate_memory
from freezekit._memory.convolutions import convolution_workspaces
from freezekit._memory.cuda_functions import attention_backend
from freezekit._memory.cuda_rules import CudaRules
from freezekit._memory.devices import Capability, Target, target_for
from freezekit._memory.recorder import Recorder
from freezekit._memory.shadow import Shadow
from freezekit._memory.steps import Steps, run_steps

MIB = 1 << 20
A100, RTX_3060, V100 = (8, 0), (8, 6), (7, 0)


def workspaces(operation: str, args: Any, capability: Capability) -> Any:
    """On the largest GPU of this capability."""
    return convolution_workspaces(operation, args, target_for("cuda", capability, (2, 13)))


def forward(
    data: torch.Tensor,
    weight: torch.Tensor,
    stride: int = 1,
    padding: int = 1,
    transposed: bool = False,
    groups: int = 1,
) -> tuple[Any, ...]:
    """Arguments of ``aten.convolution``."""
    return data, weight, None, [stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], groups


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of this shape without data."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def backward(call: tuple[Any, ...], output: torch.Tensor, *mask: bool) -> tuple[Any, ...]:
    """Arguments of the backward of a forward call."""
    data, weight, _, *options = call
    return output, data, weight, None, *options, [*mask, False]


# What cuDNN 9.24 and 9.8 answer for this layer on an A100, to 1 % (the rest is a few KiB of
# tables): VGG's second convolution at batch 128, 12.25 MiB an image in and out.
WIDE = forward(meta(128, 64, 224, 224), meta(64, 64, 3, 3))
WIDE_OUTPUT = meta(128, 64, 224, 224)


def test_the_forward_copies_its_input_and_the_backward_both() -> None:
    """fp32 on an A100: 12.25 MiB an image forward, 24.5 MiB in each half of the backward."""
    ((ahead, _),) = workspaces("aten.convolution", WIDE, A100)
    (data, _), (weight, _) = workspaces(
        "aten.convolution_backward", backward(WIDE, WIDE_OUTPUT, True, True), A100
    )
    assert ahead / MIB / 128 == pytest.approx(12.251, rel=0.01)
    assert data / MIB / 128 == pytest.approx(24.501, rel=0.01)
    assert weight / MIB / 128 == pytest.approx(24.55, rel=0.01)


def test_the_gradient_of_a_weight_is_summed_in_parts() -> None:
    """As many as fill 108 multiprocessors: each is a copy of the weight; wide ones fill them alone.

    It decides whether the block that the other half of the backward left behind is large enough.
    """
    (data, _), (weight, _) = workspaces(
        "aten.convolution_backward", backward(WIDE, WIDE_OUTPUT, True, True), A100
    )
    weight_bytes = 4 * 64 * 64 * 9
    assert weight - data == (108 // 5 - 1) * weight_bytes
    wide = forward(meta(8, 512, 28, 28), meta(512, 512, 3, 3))
    (data, _), (weight, _) = workspaces(
        "aten.convolution_backward", backward(wide, meta(8, 512, 28, 28), True, True), A100
    )
    assert weight == data


@pytest.mark.parametrize(("kernel", "taken"), [(3, False), (7, True)])
def test_images_are_read_as_they_are(kernel: int, taken: bool) -> None:
    """In the backward only under small kernels: ResNet's first layer has 7 by 7."""
    images = forward(meta(8, 3, 32, 32), meta(16, 3, kernel, kernel), 1, kernel // 2)
    ((weight, _),) = workspaces(
        "aten.convolution_backward", backward(images, meta(8, 16, 32, 32), False, True), A100
    )
    assert (weight > 0) is taken


def test_a_gradient_that_nobody_wants_takes_none() -> None:
    """A frozen weight, and a first layer's input, have no gradient and no workspace."""
    frozen = backward(WIDE, WIDE_OUTPUT, True, False)
    first = backward(WIDE, WIDE_OUTPUT, False, True)
    assert len(workspaces("aten.convolution_backward", frozen, A100)) == 1
    assert len(workspaces("aten.convolution_backward", first, A100)) == 1


@pytest.mark.parametrize(
    ("call", "capability", "bytes_"),
    [
        pytest.param(WIDE, RTX_3060, 0, id="fp32-without-fast-tf32"),
        pytest.param(WIDE, V100, 0, id="fp32-without-tf32"),
        pytest.param(forward(meta(8, 3, 32, 32), meta(16, 3, 3, 3)), A100, 0, id="images"),
        pytest.param(forward(meta(8, 64, 14, 14), meta(64, 64, 1, 1), 1, 0), A100, 0, id="1x1"),
        pytest.param(
            forward(meta(8, 64, 14, 14), meta(64, 1, 3, 3), 1, 1, False, 64),
            A100,
            0,
            id="depthwise",
        ),
        pytest.param(
            forward(
                meta(8, 64, 14, 14, dtype=torch.half), meta(64, 64, 1, 1, dtype=torch.half), 1, 0
            ),
            V100,
            2 * (64 * 64 + 2 * 8 * 64 * 14 * 14),
            id="half-copies-both",
        ),
        pytest.param(
            forward(
                meta(8, 64, 14, 14, dtype=torch.half).to(memory_format=torch.channels_last),
                meta(64, 64, 3, 3, dtype=torch.half),
            ),
            A100,
            0,
            id="half-channels-last",
        ),
        pytest.param(
            forward(meta(8, 6, 10, 10), meta(12, 6, 3, 3), 2, 1),
            A100,
            4 * 8 * (12 * 9 + 8 * 10 * 10),
            id="channels-are-padded",
        ),
        pytest.param(
            forward(meta(2, 16, 5, 5), meta(16, 8, 4, 4), 2, 1, True),
            A100,
            4 * (16 * 8 * 16 + 2 * 16 * 25 + 2 * 8 * 100),
            id="transposed-is-a-backward",
        ),
    ],
)
def test_what_a_forward_takes(call: tuple[Any, ...], capability: Any, bytes_: int) -> None:
    """By dtype, layout, kind of convolution and card."""
    ((taken, _),) = workspaces("aten.convolution", call, capability)
    assert taken == bytes_


def test_other_operators_take_none() -> None:
    """Only convolutions are asked about."""
    assert workspaces("aten.mm", (), A100) == ()


def test_a_workspace_lives_between_the_results() -> None:
    """Grad of the input, its workspace, grad of the weight, its workspace, grad of the bias."""
    model, images = nn.Conv2d(8, 8, 3, padding=1), torch.zeros(2, 8, 6, 6, requires_grad=True)
    shadow, recorder = Shadow(), Recorder(CudaRules(Target(A100)))
    twin, inputs = shadow.copy(model), shadow.inputs(images)
    with shadow.mode:
        stream = run_steps(recorder, twin, inputs, Steps(count=1))
    events = [
        (stream.allocations[event.allocation], event.is_alloc)
        for event in stream.events
        if "convolution_backward" in stream.allocations[event.allocation].operation
    ]
    data, weight, bias = images.nbytes, model.weight.nbytes, 4 * 8
    copies = 2 * data + weight
    partial = copies + 107 * weight
    expected = [data, copies, -copies, weight, partial, -partial, bias]
    signed = [a.nbytes if is_alloc else -a.nbytes for a, is_alloc in events]
    assert signed[: len(expected)] == expected
    spaces = [a for a, _ in events if a.category == "workspaces"]
    assert {a.operation for a in spaces} == {"aten.convolution_backward workspace"}


def test_the_estimate_counts_it_on_cards_that_take_it() -> None:
    """A convolution whose backward is the peak: more on an A100 than on a consumer card."""
    model = nn.Sequential(*[nn.Conv2d(32, 32, 3, padding=1) for _ in range(2)])
    images = torch.empty(8, 32, 64, 64, device="meta")
    with_copies, without = (
        estimate_memory(model, images, optimizer="sgd", capability=capability).peak_reserved
        for capability in (A100, RTX_3060)
    )
    assert with_copies - without >= images.nbytes


@pytest.mark.parametrize(
    ("shape", "dtype", "capability", "backend"),
    [
        pytest.param((2, 4, 8, 64), torch.float32, A100, "efficient", id="usual"),
        pytest.param((8, 8, 64), torch.float32, A100, "math", id="three-dimensions"),
        pytest.param((2, 4, 8, 30), torch.float32, A100, "math", id="rows-of-120-bytes"),
        pytest.param((2, 4, 8, 30), torch.float32, V100, "efficient", id="without-tensor-cores"),
        pytest.param((2, 4, 8, 30), torch.bfloat16, A100, "flash", id="flash-pads"),
        pytest.param((2, 4, 8, 300), torch.bfloat16, A100, "math", id="rows-of-600-bytes"),
        pytest.param((2, 4, 8, 64), torch.float64, A100, "math", id="double"),
    ],
)
def test_attention_that_no_fused_kernel_takes(
    shape: tuple[int, ...], dtype: torch.dtype, capability: Any, backend: str
) -> None:
    """Heads folded into the batch, odd head sizes, doubles."""
    assert attention_backend(meta(*shape, dtype=dtype), None, capability) == backend


def test_plain_attention_keeps_its_weights() -> None:
    """With heads in a dimension of their own nothing of length times length is kept."""

    class Attention(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.shape = shape

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = (x * self.scale).view(self.shape)
            return nn.functional.scaled_dot_product_attention(x, x, x)

    length, heads = 512, 8
    inputs = torch.empty(heads * length * 64, device="meta")
    folded, apart = (
        estimate_memory(Attention(shape), inputs, optimizer=None, steps=1).peak_allocated
        for shape in ((heads, length, 64), (1, heads, length, 64))
    )
    assert folded - apart > heads * length * length * 4


def test_what_another_choice_may_take_is_in_the_safe_figure() -> None:
    """On a card where cuDNN's answers are mixed nothing is taken, but planned for."""
    model = nn.Sequential(*[nn.Conv2d(32, 32, 3, padding=1) for _ in range(2)])
    images = torch.empty(8, 32, 64, 64, device="meta")
    estimate = estimate_memory(model, images, optimizer="sgd", capability=RTX_3060)
    assert any("cuDNN" in what and size >= images.nbytes for what, size in estimate.margins)
    assert any("kernels that its heuristics prefer" in text for text in estimate.assumptions)
