"""Whole training step beside transformers' NemotronHForCausalLM with the same weights, CPU, float32.

    python benchmarks/train_step.py [--steps 5] [--malloc default|tuned] [--waits passive|active] [--only X]
    python benchmarks/train_step.py --parts      # where our step spends its CPU time, by kind of layer

Each side is a process of its own (so peak memory is its own); the parent lets them step in turn. First both
compute one row of the batch and losses and gradients are compared (on the whole batch a router tie may fall
the other way). The peer's dt limits are set from the config, as published.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

BATCH, LENGTH, THREADS = 4, 512, 2
MODEL = dict(
    pattern="MEMEM*EMEM*E",
    vocab_size=8192,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    mamba_num_heads=8,
    mamba_head_dim=64,
    ssm_state_size=64,
    n_groups=2,
    chunk_size=128,
    n_routed_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=256,
    moe_latent_size=128,
    moe_shared_expert_intermediate_size=512,
)
# Blocks up to 32 MiB (the most glibc allows) come from the heap, and the heap is never handed back.
TUNED = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=4294967296"}
# Float32 gradients of two implementations: measured below 2e-5 of each tensor's largest entry.
TOLERANCE = 2e-4


def ours(folder: Path):
    import torch

    from nemotron_ultra import TokenBatch, load_model
    from nemotron_ultra.objectives.next_token import NextToken

    model = load_model(folder)
    objective = NextToken(balance_coefficient=0.0)

    def loss_of(ids_BS: torch.Tensor) -> torch.Tensor:
        batch = TokenBatch.from_documents(ids_BS.tolist())
        output = model(batch.tokens_T, batch.cu_seqlens, balance=False)
        return objective(output, batch, objective.count(batch))[0]

    return model, loss_of, lambda name: name


def peer(folder: Path):
    import torch
    from transformers import NemotronHForCausalLM

    model = NemotronHForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm"
    )
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.time_step_limit = tuple(model.config.time_step_limit)
    model.train()
    return (
        model,
        lambda ids_BS: model(input_ids=ids_BS, labels=ids_BS).loss,
        lambda name: name.replace("model.", "backbone.", 1) if name.startswith("model.") else name,
    )


def child(side: str, folder: Path) -> None:
    """Answers `check` and `step` on stdin with one JSON line each."""
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(THREADS)
    model, loss_of, public_name = {"ours": ours, "transformers": peer}[side](folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids_BS = torch.load(folder / "ids.pt")
    for command in map(str.strip, sys.stdin):
        wall, cpu = time.perf_counter(), time.process_time()
        loss = loss_of(ids_BS[:1] if command == "check" else ids_BS)
        loss.backward()
        if command == "check":
            grads = {public_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
            save_file(grads, folder / f"{side}.safetensors")
            del grads
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        answer = {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "loss": loss.item(),
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        }
        print(json.dumps(answer), flush=True)


class Side:
    def __init__(self, name: str, folder: Path, env: dict[str, str]):
        self.name = name
        command = [sys.executable, __file__, "--child", name, "--folder", str(folder)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.steps: list[dict[str, float]] = []

    def ask(self, command: str) -> dict[str, float]:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: process ended with status {self.process.wait()}")
        return json.loads(line)

    def best(self, key: str) -> float:
        return min(step[key] for step in self.steps)


def prepare(folder: Path) -> float:
    """Write weights and batch; returns forward FLOPs per token."""
    import torch

    from nemotron_ultra import HybridLM, ModelConfig, save_model
    from nemotron_ultra.config.plan import flops_per_token

    model = HybridLM(ModelConfig(**MODEL))
    save_model(model, folder, overwrite=True)
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(MODEL["vocab_size"], (BATCH, LENGTH), generator=generator)
    torch.save(ids_BS, folder / "ids.pt")
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f}M parameters, {MODEL['pattern']}, batch {BATCH} x {LENGTH}, fused AdamW")
    return flops_per_token(model.config, LENGTH)


def compare(folder: Path, losses: dict[str, float]) -> None:
    from safetensors.torch import load_file

    mine, theirs = (load_file(folder / f"{name}.safetensors") for name in ("ours", "transformers"))
    assert mine.keys() == theirs.keys(), sorted(mine.keys() ^ theirs.keys())
    worst, where = max(
        (((mine[k] - theirs[k]).abs().max() / theirs[k].abs().max().clamp(min=1e-12)).item(), k) for k in mine
    )
    gap = abs(losses["ours"] - losses["transformers"])
    print(f"agreement: loss apart by {gap:.1e}, gradients by {worst:.1e} of the largest ({where})")
    if gap > 1e-5 or worst > TOLERANCE:
        raise SystemExit(f"the two sides disagree; allowed: loss 1e-5, gradients {TOLERANCE}")


def report(sides: list[Side], flops: float) -> None:
    import torch

    from nemotron_ultra.observe.machine import matmul_flops

    torch.set_num_threads(THREADS)
    limit = max(matmul_flops(THREADS) for _ in range(3))
    tokens = BATCH * LENGTH
    print(
        f"matmul limit {limit / 1e9:.0f} GFLOP/s with {THREADS} threads, "
        f"a step is {3 * flops * tokens / 1e9:.1f} GFLOP"
    )
    print(f"{'':14}{'wall s':>8}{'CPU s':>8}{'tokens/s':>10}{'of limit':>10}{'peak GB':>9}{'faults':>9}")
    for side in sides:
        wall, cpu = side.best("wall"), side.best("cpu")
        peak = max(step["peak"] for step in side.steps)
        faults = (side.steps[-1]["faults"] - side.steps[0]["faults"]) / max(1, len(side.steps) - 1)
        share = 3 * flops * tokens / (cpu / THREADS) / limit
        print(
            f"{side.name:14}{wall:8.2f}{cpu:8.2f}{tokens / wall:10.0f}{share:10.0%}"
            f"{peak / 1e9:9.2f}{faults:9.0f}"
        )
    if len(sides) == 2:
        mine, theirs = sides
        peak = [max(step["peak"] for step in side.steps) for side in sides]
        pairs = list(zip(mine.steps, theirs.steps, strict=True))
        wall, cpu = (median(b[key] / a[key] for a, b in pairs) for key in ("wall", "cpu"))
        print(f"median of neighbouring steps: {wall:.2f} x (wall), {cpu:.2f} x (CPU time)")
        print(
            f"best steps: tokens/s {theirs.best('wall') / mine.best('wall'):.2f} x (wall), "
            f"{theirs.best('cpu') / mine.best('cpu'):.2f} x (CPU time); peak memory {peak[0] / peak[1]:.2f} x"
        )


def parts(steps: int) -> None:
    """CPU milliseconds of our step by kind of layer, the least of `steps` steps, beside its FLOPs.

    A marker at the input of each block takes the time when the forward enters it and when the backward leaves
    it.
    """
    import torch

    from nemotron_ultra import HybridLM, ModelConfig, TokenBatch
    from nemotron_ultra.config.plan import flops_by_block
    from nemotron_ultra.objectives.next_token import NextToken

    torch.set_num_threads(THREADS)
    spent: dict[str, float] = {}
    last = 0.0

    def mark(name: str) -> None:
        nonlocal last
        now = time.process_time()
        spent[name], last = spent.get(name, 0.0) + now - last, now

    class Marker(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            mark(ctx.name + " backward")
            return grad, None

    model = HybridLM(ModelConfig(**MODEL))
    kinds = {"M": "mamba", "E": "moe", "*": "attention"}
    for block in model.backbone.layers:
        kind = kinds[block.letter]
        block.register_forward_pre_hook(lambda _, args, kind=kind: (Marker.apply(args[0], kind), *args[1:]))
        block.register_forward_hook(lambda *_, kind=kind: mark(kind + " forward"))
    objective, optimizer = (
        NextToken(balance_coefficient=0.0),
        torch.optim.AdamW(model.parameters(), fused=True),
    )
    batch = TokenBatch.from_documents(torch.randint(MODEL["vocab_size"], (BATCH, LENGTH)).tolist())
    runs = []
    for _ in range(steps):
        spent.clear()
        last = time.process_time()
        output = model(batch.tokens_T, batch.cu_seqlens, balance=False)
        mark("rest")
        loss = objective(output, batch, objective.count(batch))[0]
        mark("head")
        loss.backward()
        mark("rest")
        optimizer.step()
        optimizer.zero_grad()
        mark("adamw")
        runs.append(dict(spent))
    flops = flops_by_block(model.config, LENGTH)
    for name in sorted(runs[0]):
        best = min(run[name] for run in runs)
        kind, _, way = name.partition(" ")
        work = flops.get(kind, 0.0) * BATCH * LENGTH * {"forward": 1, "backward": 2, "": 3}[way]
        print(f"{name:20}{best * 1e3:8.0f} CPU-ms{work / 1e9:8.1f} GFLOP{work / best / 1e9:8.1f} GFLOP/CPU-s")
    print(f"{'sum':20}{min(sum(run.values()) for run in runs) * 1e3:8.0f} CPU-ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--malloc", choices=["default", "tuned"], default="default")
    parser.add_argument("--waits", choices=["passive", "active"], default="passive")
    parser.add_argument("--only", choices=["ours", "transformers"])
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.folder)
        return
    if options.parts:
        parts(options.steps)
        return
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": options.waits.upper()}
    env |= {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    env |= TUNED if options.malloc == "tuned" else {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        flops = prepare(folder)
        print(f"both sides: {THREADS} threads, waits {options.waits}, malloc {options.malloc}")
        sides = [
            Side(name, folder, env) for name in ([options.only] if options.only else ["ours", "transformers"])
        ]
        losses = {side.name: side.ask("check")["loss"] for side in sides}
        if len(sides) == 2:
            compare(folder, losses)
        for _ in range(options.steps):
            for side in sides:
                side.steps.append(side.ask("step"))
        report(sides, flops)
        for side in sides:
            side.process.stdin.close()
            side.process.wait()


if __name__ == "__main__":
    main()
