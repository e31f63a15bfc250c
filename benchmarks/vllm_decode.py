"""Greedy generation beside vLLM's CPU build on the same weights, float32, interleaved in one process.

    PYTHON benchmarks/vllm_decode.py               a dense hybrid (Mamba, attention, MLP)
    PYTHON benchmarks/vllm_decode.py --experts     the 19M model; vLLM loops over experts (a patch)
    PYTHON benchmarks/vllm_decode.py --compiled    vLLM with torch.compile instead of eager

PYTHON is that of an environment with vLLM (docs/vllm.md). Batch 8 and 1, prompt 64, 128 new tokens. Tokens
of both sides are compared before anything is timed; each repeat times both sides in turn and figures are
medians. CPU seconds count all threads.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "vllm"))
THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import torch  # noqa: E402
from cpu_relu2 import allow_relu2_experts  # noqa: E402
from train_step import MODEL  # noqa: E402

from nemotron_ultra import HybridLM, ModelConfig  # noqa: E402
from nemotron_ultra.generation import Sampler  # noqa: E402
from nemotron_ultra.generation.base import Generator  # noqa: E402
from nemotron_ultra.generation.vllm_generator import VLLMGenerator, VLLMOptions  # noqa: E402

PROMPT, NEW = 64, 128
DENSE = MODEL | {"pattern": MODEL["pattern"].replace("E", "-"), "intermediate_size": 1024}


def our_model(sizes: dict) -> HybridLM:
    """Weights as drawn, but for the head: three times as wide, so that no two logits are nearly equal."""
    model = HybridLM(ModelConfig(**sizes)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    return model


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(sides: dict[str, Generator], batch: int, repeats: int) -> None:
    ids_BS = torch.randint(
        3, MODEL["vocab_size"], (batch, PROMPT), generator=torch.Generator().manual_seed(batch)
    )
    prompts = ids_BS.tolist()
    work = {
        name: lambda side=side: side.generate(prompts, max_new_tokens=NEW, temperature=0.0)
        for name, side in sides.items()
    }
    first, second = (run() for run in work.values())
    if [c.tokens for c in first] != [c.tokens for c in second]:
        raise SystemExit("the two sides drew different tokens")
    gap = max(
        abs(a - b)
        for x, y in zip(first, second, strict=True)
        for a, b in zip(x.logprobs, y.logprobs, strict=True)
    )
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, run in work.items():
            times[name].append(measure(run))
    for name, found in times.items():
        wall, cpu = (median(column) for column in zip(*found, strict=True))
        count = batch * NEW
        print(f"batch {batch} {name:8} {count / wall:8.1f} tokens/s {count / cpu:8.1f} tokens per CPU-second")
    ratios = [b[1] / a[1] for a, b in zip(*times.values(), strict=True)]
    spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"batch {batch} CPU time vLLM / ours {spread}, largest log-prob difference {gap:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", action="store_true", help="the 19M model with experts")
    parser.add_argument("--compiled", action="store_true", help="vLLM with torch.compile")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    model = our_model(MODEL if given.experts else DENSE)
    if given.experts:
        allow_relu2_experts()
    options = VLLMOptions(max_tokens=PROMPT + NEW, max_slots=8, cache_bytes=1 << 28, eager=not given.compiled)
    parameters = sum(p.numel() for p in model.parameters())
    sides = {"ours": Sampler(model), "vLLM": VLLMGenerator.of(model, options)}
    kind = "compiled" if given.compiled else "eager"
    print(f"{model.config.pattern}, {parameters / 1e6:.2f}M parameters, {THREADS} threads, vLLM {kind}")
    for batch in (8, 1):
        compare(sides, batch, given.repeats)


if __name__ == "__main__":
    main()
