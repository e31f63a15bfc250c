"""Report 2.7 in the small: the MTP part of a shared head's gradient drowns in BF16 and survives in FP32."""

import torch
from torch import nn

from nemotron_ultra.ops.cross_entropy import linear_cross_entropy
from nemotron_ultra.precision.grads import MasterWeights

VOCABULARY, WIDTH, TOKENS, MICRO_BATCHES = 512, 64, 256, 64
ZIPF_V = 1.0 / torch.arange(1, VOCABULARY + 1)
SCALES = (1.0, 0.05, 0.05)  # next token, and two MTP depths at 0.1 / 2


def micro_batch(number: int):
    """Hidden states of the main and both MTP heads, and their labels."""
    draw = torch.Generator().manual_seed(number)
    hidden = torch.randn(3, TOKENS, WIDTH, generator=draw)
    labels = torch.multinomial(ZIPF_V, 3 * TOKENS, replacement=True, generator=draw).view(3, TOKENS)
    return hidden, labels


def add_gradient(head_VD: torch.Tensor, number: int, scales) -> None:
    hidden, labels = micro_batch(number)
    weight_T = torch.tensor(scales).repeat_interleave(TOKENS) / TOKENS
    linear_cross_entropy(hidden.flatten(0, 1), head_VD, labels.flatten(), weight_T)[0].backward()


def accumulated(scales, *, buffer: torch.dtype) -> torch.Tensor:
    """Gradient of a bf16 head over all micro-batches: by the engine in FP32, or in a BF16 buffer."""
    head = nn.Parameter(0.02 * torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0)))
    head.data = head.data.bfloat16()
    if buffer == torch.float32:
        master = MasterWeights([("head", head)])
        with master.computing():
            for number in range(MICRO_BATCHES):
                add_gradient(head, number, scales)
        return master.gradients()["head"]
    total = torch.zeros_like(head)
    for number in range(MICRO_BATCHES):
        add_gradient(head, number, scales)
        total += head.grad
        head.grad = None
    return total.float()


def test_mtp_part_survives_in_fp32_and_drowns_in_bf16():
    exact = accumulated((0.0, *SCALES[1:]), buffer=torch.float32)
    main = accumulated((SCALES[0], 0.0, 0.0), buffer=torch.float32)

    def error(buffer: torch.dtype) -> float:
        part = accumulated(SCALES, buffer=buffer) - main
        return float((part - exact).norm() / exact.norm())

    assert error(torch.float32) < 1e-3
    assert error(torch.bfloat16) > 0.1
