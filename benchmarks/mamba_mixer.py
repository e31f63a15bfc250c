"""Mamba-2 mixer, forward and backward: ours beside transformers' on the same weights, interleaved in one run.

    python benchmarks/mamba_mixer.py                  4 x 512, 4 x 2048, 4 x 4096
    python benchmarks/mamba_mixer.py --lengths 512 --repeat 3
    python benchmarks/mamba_mixer.py --scaling        time per token and memory, one row, 512 to 16,384

Outputs and input gradients are compared before anything is timed. CPU seconds count all threads, so they can
be trusted on a shared machine; each figure is the best of the repeats. Both sides run in this process, under
the same malloc settings. To see both with memory that glibc does not hand back, set
MALLOC_TOP_PAD_=268435456, MALLOC_TRIM_THRESHOLD_=4294967296 and MALLOC_MMAP_THRESHOLD_=4294967296.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.mamba2 import Mamba2Mixer
from nemotron_ultra.model.norm import RMSNorm
from nemotron_ultra.ops.segments import Segments

SIZES = {
    "hidden_size": 256,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 128,
}


def our_block() -> torch.nn.Module:
    """Norm and mixer with weights drawn as the report does (small dt, A from 1 to H)."""
    config = ModelConfig(pattern="M", vocab_size=1, **SIZES)
    block = torch.nn.ModuleDict({"norm": RMSNorm(256, 1e-5), "mixer": Mamba2Mixer(config)})
    generator = torch.Generator().manual_seed(0)
    for name, parameter in block.named_parameters():
        if name.endswith(("_proj.weight", "conv1d.weight")):
            parameter.data.normal_(0, 0.05 if "proj" in name else 0.3, generator=generator)
        elif name.endswith("conv1d.bias"):
            parameter.data.normal_(0, 0.1, generator=generator)
    block["mixer"].dt_bias.data.uniform_(-6, -2, generator=generator)
    return block


def peer_block(ours: torch.nn.Module) -> torch.nn.Module:
    """transformers' norm and mixer with the same weights and the published dt limits."""
    from transformers.models.nemotron_h import modeling_nemotron_h as peer
    from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig

    config = NemotronHConfig(**SIZES, layers_block_type=["mamba"], vocab_size=8)
    block = torch.nn.ModuleDict(
        {"norm": peer.NemotronHRMSNorm(256, 1e-5), "mixer": peer.NemotronHMamba2Mixer(config, layer_idx=0)}
    )
    block.load_state_dict(ours.state_dict())
    block["mixer"].time_step_limit = (0.0, float("inf"))
    return block


def step(
    block: torch.nn.Module, u_BLD: torch.Tensor, grad_BLD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward and backward -> output and input gradient."""
    block.zero_grad(set_to_none=True)
    u = u_BLD.detach().requires_grad_()
    if isinstance(block["mixer"], Mamba2Mixer):
        rows, length, width = u.shape
        bounds = torch.arange(rows + 1, dtype=torch.int32) * length
        out = block["mixer"](block["norm"](u.view(-1, width)), Segments(rows * length, bounds)).view(u.shape)
    else:
        out = block["mixer"](block["norm"](u))
    out.backward(grad_BLD)
    return out.detach(), u.grad


def timed(block: torch.nn.Module, u: torch.Tensor, grad: torch.Tensor) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    step(block, u, grad)
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(rows: int, length: int, repeat: int) -> None:
    ours = our_block()
    peer = peer_block(ours)
    u, grad = torch.randn(rows, length, 256), torch.randn(rows, length, 256)
    errors = [
        float((a - b).abs().max() / b.abs().max())
        for a, b in zip(step(ours, u, grad), step(peer, u, grad), strict=True)
    ]
    assert max(errors) < 2e-5, f"the two mixers disagree: output and input gradient {errors}"
    runs = {"ours": [], "peer": []}
    for _ in range(repeat):
        runs["ours"].append(timed(ours, u, grad))
        runs["peer"].append(timed(peer, u, grad))
    (our_wall, our_cpu), (peer_wall, peer_cpu) = (
        map(min, zip(*runs[k], strict=True)) for k in ("ours", "peer")
    )
    print(
        f"{rows} x {length:<6} differ by {errors[0]:.0e} / {errors[1]:.0e}   "
        f"CPU {our_cpu:.3f} against {peer_cpu:.3f} s: {peer_cpu / our_cpu:.2f} x   "
        f"wall {our_wall:.3f} against {peer_wall:.3f} s: {peer_wall / our_wall:.2f} x",
        flush=True,
    )


def scaling(repeat: int) -> None:
    block = our_block()
    print("one row, forward and backward; memory is the process's peak so far above its start")
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        u, grad = torch.randn(1, length, 256), torch.randn(1, length, 256)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        times = [timed(block, u, grad) for _ in range(repeat + 1)][1:]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        microseconds = min(cpu for _, cpu in times) / length * 1e6
        print(
            f"1 x {length:<6} {microseconds:6.1f} CPU-us a token   peak grew by {peak / 1024:.0f} MiB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--scaling", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    if args.scaling:
        scaling(args.repeat)
    else:
        for length in args.lengths:
            compare(args.rows, length, args.repeat)


if __name__ == "__main__":
    main()
