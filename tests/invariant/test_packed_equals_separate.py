"""Random conversations: packed into files and read back they train as one by one, whatever the pack or mean.

Both means of the loss are compared with plain sums in float64; accumulation of any kind gives the same.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from micro import micro_model
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.loss_mean import LossMean
from nemotron_ultra.data.pack_stream import token_batch
from nemotron_ultra.data.packs import PackFiles, PackWriter
from nemotron_ultra.objectives.next_token import NextToken, total_counts

SEEDS = range(4)
MEANS = ("tokens", "conversations")


def random_conversations(seed):
    """(tokens, mask) with a prompt of 3 or more tokens; some answer in several turns, some not at all."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(int(draw.integers(5, 12))):
        prompt, answer = draw.integers(3, 12), draw.integers(1, 20)
        mask = np.r_[np.zeros(prompt), draw.integers(0, 2, answer) if number % 3 else np.ones(answer)]
        rows.append((draw.integers(3, 64, prompt + answer).astype(np.int32), mask.astype(np.uint8)))
    rows.append((np.array([5, 6, 7], np.int32), np.zeros(3, np.uint8)))
    return rows


def packed(rows, folder, seed):
    """TokenBatches of packs of random sizes, through a file."""
    cuts = np.sort(np.random.default_rng(seed).choice(len(rows) - 1, 2, replace=False) + 1)
    with PackWriter(folder / "a.parquet", group_tokens=50) as writer:
        for pack in np.split(np.arange(len(rows)), cuts):
            writer.add([rows[i] for i in pack])
    files = PackFiles(folder)
    return [token_batch([files[i]]) for i in range(3)], token_batch([files[i] for i in range(3)])


def alone(rows):
    """A batch of each conversation, made without any of the packing code."""
    batches = [TokenBatch.from_documents([tokens.tolist()]) for tokens, _ in rows]
    weights = [torch.tensor([*mask[1:], 0], dtype=torch.float32) for _, mask in rows]
    return [replace(batch, weight_T=weight) for batch, weight in zip(batches, weights, strict=True)]


def train(batches, over):
    """Loss of the step, its metrics and the gradients of all weights, float64."""
    model, objective = micro_model(torch.float64), NextToken(0.3, 0.01, 2)
    batches = LossMean(over=over)(batches, 0)
    counts = total_counts(objective, batches)
    losses, metrics = [], {}
    for batch in batches:
        loss, found = objective(model(batch.tokens_T, batch.cu_seqlens, mtp_depths=2), batch, counts)
        loss.backward()
        losses.append(float(loss.detach()))
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in found.items()}
    return sum(losses), metrics, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("over", MEANS)
@pytest.mark.parametrize("seed", SEEDS)
def test_packs_equal_conversations(tmp_path, seed, over):
    rows = random_conversations(seed)
    three, one = packed(rows, tmp_path, seed)
    expected = train(alone(rows), over)
    for batches in (three, [one]):
        loss, metrics, gradients = train(batches, over)
        assert loss == pytest.approx(expected[0], abs=1e-6)
        assert metrics == pytest.approx(expected[1], abs=1e-6)
        for name, gradient in expected[2].items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5, msg=name)


@torch.no_grad()
def naive(rows, over):
    """{"loss", "mtp_k/loss"} by plain loops over conversations and tokens, each conversation by itself."""
    model, out = micro_model(torch.float64), {}
    for depth, name in enumerate(("loss", "mtp_1/loss", "mtp_2/loss")):
        sums = []
        for tokens, mask in rows:
            output = model(torch.tensor(tokens.astype(np.int64)), mtp_depths=2)
            logits = output.logits_TV if not depth else output.mtp_logits_JTV[depth - 1]
            nll_T = -F.log_softmax(logits, -1)
            places = [t for t in range(len(tokens) - depth - 1) if mask[t + depth + 1]]
            values = [float(nll_T[t, int(tokens[t + depth + 1])]) for t in places]
            sums.append((sum(values), len(values)))
        total = sum(n for _, n in sums)
        means = [value / n for value, n in sums if n]
        out[name] = sum(v for v, _ in sums) / total if over == "tokens" else sum(means) / len(means)
    return out


@pytest.mark.parametrize("over", MEANS)
@pytest.mark.parametrize("seed", SEEDS)
def test_means_are_those_of_plain_sums(tmp_path, seed, over):
    rows = random_conversations(seed)
    three, _ = packed(rows, tmp_path, seed)
    metrics = train(three, over)[1]
    for name, value in naive(rows, over).items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name


def test_the_two_means_differ_and_both_train_all_conversations(tmp_path):
    rows = random_conversations(1)
    three, _ = packed(rows, tmp_path, 1)
    tokens, conversations = (train(three, over) for over in MEANS)
    assert abs(tokens[0] - conversations[0]) > 1e-4
    weighted = LossMean(over="conversations")(three, 0)
    answered = sum(bool(mask.sum()) for _, mask in rows)
    assert answered < len(rows)
    assert sum(float(b.weight_T.double().sum()) for b in weighted) == pytest.approx(answered, abs=1e-6)
