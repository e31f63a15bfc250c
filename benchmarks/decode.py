"""Greedy generation beside transformers' generate on the same weights, CPU, float32, interleaved in one run.

    python benchmarks/decode.py                     batch 8 and 1, prompt 64, 128 new tokens
    python benchmarks/decode.py --waits active      threads spin while they wait (a quiet machine only)
    python benchmarks/decode.py --context           time of a step after 64 to 16,384 tokens
    python benchmarks/decode.py --calls             torch operator calls of a step

The peer runs with its fastest experts implementation, found first. Tokens of both sides are compared before
anything is timed; each repeat times both sides in turn, and ratios are medians over repeats. CPU seconds
count all threads. NEMOTRON_ULTRA_DECODE=torch shows our step without the compiled kernels.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
WAITS = "active" if "active" in sys.argv else "passive"
THREADS = os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["OMP_WAIT_POLICY"] = WAITS.upper()
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}

import torch  # noqa: E402
from train_step import MODEL  # noqa: E402

from nemotron_ultra import HybridLM, ModelConfig, save_model  # noqa: E402
from nemotron_ultra.generation import generate  # noqa: E402
from nemotron_ultra.model.cache import Cache  # noqa: E402
from nemotron_ultra.ops import decode_kernels  # noqa: E402

PROMPT, NEW = 64, 128
EXPERTS = ("eager", "grouped_mm", "batched_mm")
Side = Callable[[torch.Tensor], list[list[int]]]


def our_model() -> HybridLM:
    """Weights as drawn, but for the head: three times as wide, so that no two logits are nearly equal."""
    model = HybridLM(ModelConfig(**MODEL)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    return model


def peers(folder: Path) -> dict[str, torch.nn.Module]:
    from transformers import NemotronHForCausalLM

    found = {}
    for name in EXPERTS:
        model = NemotronHForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=name
        ).eval()
        for module in model.modules():
            if type(module).__name__ == "NemotronHMamba2Mixer":
                module.time_step_limit = tuple(model.config.time_step_limit)
        found[name] = model
    return found


def ours(model: HybridLM) -> Side:
    return lambda ids_BS: [c.tokens for c in generate(model, ids_BS.tolist(), NEW)]


def theirs(model: torch.nn.Module) -> Side:
    def side(ids_BS: torch.Tensor) -> list[list[int]]:
        out_BS = model.generate(
            input_ids=ids_BS,
            attention_mask=torch.ones_like(ids_BS),
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            pad_token_id=0,
            eos_token_id=None,
        )
        return out_BS[:, ids_BS.shape[1] :].tolist()

    return side


def timed(side: Side, ids_BS: torch.Tensor) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    side(ids_BS)
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(batches: list[int], repeat: int) -> None:
    model = our_model()
    with tempfile.TemporaryDirectory() as scratch:
        save_model(model, Path(scratch) / "model")
        others = peers(Path(scratch) / "model")
    draw = torch.Generator().manual_seed(0)
    print(f"{'':16}{'batch':>6}{'wall s':>9}{'CPU s':>9}{'tokens/s':>10}{'ms a step':>11}")
    for batch in batches:
        ids_BS = torch.randint(3, MODEL["vocab_size"], (batch, PROMPT), generator=draw)
        speeds = {name: min(timed(theirs(other), ids_BS) for _ in range(2)) for name, other in others.items()}
        name = min(speeds, key=speeds.get)
        sides = {"ours": ours(model), f"peer {name}": theirs(others[name])}
        one, other = (side(ids_BS) for side in sides.values())
        same = sum(a == b for row in zip(one, other, strict=True) for a, b in zip(*row, strict=True))
        runs = [[timed(side, ids_BS) for side in sides.values()] for _ in range(repeat)]
        for place, label in enumerate(sides):
            wall, cpu = (median(run[place][kind] for run in runs) for kind in (0, 1))
            print(
                f"{label:16}{batch:6}{wall:9.2f}{cpu:9.2f}{batch * NEW / wall:10.0f}{wall / NEW * 1e3:11.1f}"
            )
        ratios = [median(run[1][kind] / run[0][kind] for run in runs) for kind in (0, 1)]
        print(
            f"  {ratios[0]:.2f} x (wall), {ratios[1]:.2f} x (CPU time); {same} of {batch * NEW} tokens equal"
        )


@torch.no_grad()
def context(batch: int, steps: int = 30) -> None:
    """Milliseconds of a step by the tokens seen, for the whole pattern and for its Mamba and MoE layers."""
    lengths = (64, 1024, 4096, 16384)
    print(f"batch {batch}, ms a step after" + "".join(f"{n:>9,}" for n in lengths) + " tokens")
    for pattern in (MODEL["pattern"], MODEL["pattern"].replace("*", "")):
        model = HybridLM(ModelConfig(**MODEL | {"pattern": pattern})).eval()
        cells = []
        for length in lengths:
            cache: Cache = model.new_cache(batch, length + steps + 5)
            cache.admit_new(batch)
            cache.open([length] * batch)  # as if so many tokens had been read: the values do not matter
            cache.close()
            times = []
            for _ in range(steps):
                begin = time.perf_counter()
                model.next_logits(model.step(torch.full((batch,), 5), cache))
                times.append(time.perf_counter() - begin)
            cells.append(median(times) * 1e3)
        print(f"{pattern:29}" + "".join(f"{cell:9.2f}" for cell in cells))


def calls(batch: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    model, prompts = our_model(), [[5, 6, 7, number] for number in range(batch)]
    counts = []
    for new in (9, 19):
        with profile(activities=[ProfilerActivity.CPU]) as record:
            generate(model, prompts, new, temperature=1.0)
        counts.append(sum(event.count for event in record.key_averages()))
    print(f"batch {batch}: {(counts[1] - counts[0]) / 10:.0f} torch operator calls a step, sampling included")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--waits", choices=["passive", "active"], default="passive")
    parser.add_argument("--context", action="store_true")
    parser.add_argument("--calls", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(int(THREADS))
    kind = "torch" if decode_kernels.library() is None else "compiled"
    print(f"{THREADS} threads, waits {WAITS}, our step: {kind}; prompt {PROMPT}, {NEW} new tokens")
    if options.context or options.calls:
        for batch in options.batches:
            context(batch) if options.context else calls(batch)
        return
    compare(options.batches, options.repeat)


if __name__ == "__main__":
    main()
