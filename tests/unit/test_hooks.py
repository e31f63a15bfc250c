"""Hooks: when they act, what they measure, and how signals end a run."""

import io
import math
import signal

import numpy as np
import pytest
import torch

from micro import micro_batches, micro_engine, micro_model, objective, step
from nemotron_ultra.config.runtime import LogConfig
from nemotron_ultra.observe.console import Console
from nemotron_ultra.observe.metrics import MetricsLog, read_metrics
from nemotron_ultra.observe.sinks import open_sinks
from nemotron_ultra.trainers.hooks import (
    Checkpoint,
    Clock,
    Every,
    Log,
    Samples,
    SavedOnSignal,
    Signals,
    Stability,
    Validation,
)


def test_every():
    assert [n for n in range(1, 11) if Every(4, 10)(n)] == [4, 8, 10]
    assert [n for n in range(1, 11) if Every(0, 10)(n)] == [10]


def test_clock_measures_the_step_alone():
    engine = micro_engine()
    clock = Clock(engine, training_flops_per_token=1e6, matmul_flops=1e9)
    clock.start()
    metrics = step(engine, micro_batches(2))
    clock.after_step(1, metrics)
    tokens = sum(batch.num_tokens for batch in micro_batches(2))
    assert metrics["tokens"] == tokens and metrics["seconds"] > 0 and metrics["memory_gb"] > 0
    assert metrics["tokens_per_second"] == pytest.approx(tokens / metrics["seconds"])
    assert metrics["matmul_share"] == pytest.approx(metrics["tokens_per_second"] * 1e-3)
    before = clock.mark
    clock.restart.after_step(1, metrics)
    assert clock.mark > before and clock.tokens == tokens


def test_stability_names_every_moe_layer_and_every_layer():
    engine = micro_engine()
    metrics = step(engine, micro_batches(2))
    Stability(engine).after_step(1, metrics)
    assert metrics["moe/0/max_vio"] == pytest.approx(metrics["moe/0/max_load"] - 1)
    assert {f"moe/{i}/max_vio" for i in range(3)} | {f"residual/{i}" for i in range(5)} <= metrics.keys()
    assert "moe/max_vio_median" in metrics and "moe/max_vio_max" in metrics


def test_validation_counts_bits_per_byte():
    engine, batches = micro_engine(), micro_batches(2, seed=3)
    bytes_V = np.full(64, 3)
    metrics = {}
    Validation(engine, objective(), batches, bytes_V, Every(1, 1)).after_step(1, metrics)
    assert metrics["val/bits_per_byte"] == pytest.approx(metrics["val/loss"] / math.log(2) / 3)
    logits = [engine.model(b.tokens_T, b.cu_seqlens).logits_TV for b in batches]
    nll = [
        torch.nn.functional.cross_entropy(x.detach(), b.labels_T, reduction="none") * b.weight_T
        for x, b in zip(logits, batches, strict=True)
    ]
    mean = float(sum(x.sum() for x in nll) / sum(b.weight_T.sum() for b in batches))
    assert metrics["val/loss"] == pytest.approx(mean, rel=1e-5) and "val/mtp_2/loss" in metrics


def test_log_drops_rows_after_the_step_to_go_on_from(tmp_path):
    engine, path = micro_engine(), tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for number in (1, 2, 3):
        log.append({"step": number, "loss": 1.0})
    engine.step = 2
    hook = Log(engine, log, Console(5, stream=io.StringIO()), open_sinks(LogConfig(), tmp_path, {}))
    hook.start()
    hook.after_step(3, {"loss": 0.5})
    hook.finish()
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(1, 1.0), (2, 1.0), (3, 0.5)]


def test_samples_are_appended(tmp_path):
    log = MetricsLog(tmp_path / "samples.jsonl")
    hook = Samples(
        micro_engine(), log, Console(4, stream=io.StringIO()), lambda n: ("def", f" f{n}"), Every(2, 4)
    )
    hook.start()
    for number in (1, 2, 3, 4):
        hook.after_step(number, {})
    rows = read_metrics(tmp_path / "samples.jsonl")
    assert [(r["step"], r["prompt"], r["text"]) for r in rows] == [(2, "def", " f2"), (4, "def", " f4")]


def test_checkpoint_saves_each_step_once():
    saved = []
    hook = Checkpoint(lambda: saved.append("x"), Every(2, 5))
    for number in (1, 2, 3, 4, 5):
        hook.after_step(number, {})
    hook.save_now(5)
    assert len(saved) == 3


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_signals_save_and_stop(name):
    saved = []
    hook = Signals(Checkpoint(lambda: saved.append("x"), Every(0, 100)))
    before = signal.getsignal(getattr(signal, name))
    hook.start()
    try:
        signal.raise_signal(getattr(signal, name))
        with pytest.raises(SavedOnSignal) as caught:
            hook.after_step(7, {})
    finally:
        hook.finish()
    assert saved == ["x"] and caught.value.code == 75 and caught.value.step == 7
    assert signal.getsignal(getattr(signal, name)) == before


def test_a_second_interrupt_stops_at_once():
    hook = Signals(Checkpoint(lambda: None, Every(0, 100)))
    hook.start()
    try:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        hook.finish()


def test_text_sampler_is_the_same_at_the_same_step():
    from nemotron_ultra.data.tokenizer import load_tokenizer
    from nemotron_ultra.trainers.text import TextSampler

    tokenizer = load_tokenizer("builtin")
    model = micro_model(vocab_size=tokenizer.vocab_size)
    write = TextSampler(model, tokenizer, micro_batches(1)[0], max_new_tokens=5)
    random = torch.get_rng_state()
    assert write(3) == write(3) and write(3)[1] != write(4)[1]
    assert torch.equal(random, torch.get_rng_state())
    greedy = TextSampler(model, tokenizer, micro_batches(1)[0], max_new_tokens=3, temperature=0.0)
    assert greedy(1) == greedy(2)
