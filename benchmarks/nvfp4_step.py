"""Training step in emulated NVFP4 beside the float32 step of the same model, CPU.

    python benchmarks/nvfp4_step.py [--steps 6] [--precision nvfp4] [--parts] [--threads 1] [OVERRIDE ...]

The model has the layers of configs/model/tiny.yaml at hidden size 256 (every other width scaled with it).
Both sides run the torch engine, forward, backward and AdamW on the same batches, in turn in one process. CPU
time is compared, so that other work on the machine matters little. --parts tells how much of the
step is quantising (ops/nvfp4, ops/mxfp8) and how much the products of the quantised layers.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from nemotron_ultra import HybridLM, TokenBatch
from nemotron_ultra.config.compose import load_recipe
from nemotron_ultra.engine.schedule import Schedule
from nemotron_ultra.engine.torch_engine import TorchEngine
from nemotron_ultra.objectives.next_token import NextToken
from nemotron_ultra.ops import mxfp8, nvfp4
from nemotron_ultra.precision import experts, linear
from nemotron_ultra.precision.apply import apply_policy

# configs/model/tiny.yaml times 256 / 192; heads keep Mamba's in_proj a whole number of blocks wide.
WIDTHS = {
    "hidden_size": 256,
    "head_dim": 64,
    "mamba_head_dim": 64,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 512,
    "moe_latent_size": 128,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Side:
    """One engine; `step` returns the CPU seconds of a whole training step."""

    def __init__(self, precision: str, overrides: list[str]):
        widths = [f"model.{name}={value}" for name, value in WIDTHS.items()]
        self.config = config = load_recipe("pretrain", [*widths, f"precision={precision}", *overrides])
        model = HybridLM(config.model, dtype=DTYPES[config.precision.weights])
        model.init_weights(0)
        self.policy = apply_policy(model, config.precision)
        schedule = Schedule(name="constant", peak=1e-4, total_tokens=1e9)
        self.engine = TorchEngine(model, config.optim, schedule, policy=self.policy)
        self.objective = NextToken(
            mtp_loss_scale=0.1, balance_coefficient=1e-2, mtp_depths=config.model.depths
        )

    def step(self, batches: list[TokenBatch]) -> tuple[float, float]:
        """(CPU seconds, loss)."""
        begun = time.process_time()
        loss = self.engine.forward_backward(batches, self.objective)["loss"]
        self.engine.optimizer_step()
        return time.process_time() - begun, loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--precision", default="nvfp4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("overrides", nargs="*", help="of both sides; precision.* of the low one only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    draw = torch.Generator().manual_seed(0)
    plain = [word for word in options.overrides if not word.startswith("precision.")]
    sides = [Side("fp32", plain), Side(options.precision, options.overrides)]
    shape = (options.micro_batches, options.rows, options.length)
    ids = torch.randint(sides[0].config.model.vocab_size, shape, generator=draw)
    batches = [TokenBatch.from_documents(rows.tolist()) for rows in ids]
    print("\n".join(sides[1].policy.table.lines()))
    if options.parts:
        parts(sides[1], batches, options.steps)
        return
    for side in sides:
        side.step(batches)
    times = [[side.step(batches)[0] for side in sides] for _ in range(options.steps)]
    single, low = (min(column) for column in zip(*times, strict=True))
    ratio = median(low / single for single, low in times)
    print(
        f"{ids.numel():,} tokens in {options.micro_batches} micro-batch(es), {options.threads} thread(s), "
        f"CPU seconds, best of {options.steps}: fp32 {single:.3f}, {options.precision} {low:.3f}"
    )
    print(f"{options.precision} / fp32: {ratio:.2f} (median of pairs), {low / single:.2f} (best steps)")


def parts(side: Side, batches: list[TokenBatch], steps: int) -> None:
    """CPU milliseconds of one warm step, the least of `steps`, by what the quantised layers do in it."""
    spent: dict[str, float] = {}

    def timed(name: str, function):
        def run(*args, **options):
            begun = time.process_time()
            result = function(*args, **options)
            spent[name] = spent.get(name, 0.0) + time.process_time() - begun
            return result

        return run

    for format in (nvfp4, mxfp8):
        format.operand = timed(f"{format.__name__.rpartition('.')[2]} operands", format.operand)
    for layer in (linear, experts):
        layer.multiply = timed("their products", layer.multiply)
    runs = []
    for _ in range(steps):
        spent.clear()
        whole = side.step(batches)[0]
        runs.append(dict(spent) | {"whole step": whole})
    for name in runs[-1]:
        print(f"{name:18}{min(run[name] for run in runs) * 1e3:8.0f} CPU-ms")


if __name__ == "__main__":
    main()
