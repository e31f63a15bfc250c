"""What this machine is and how fast it multiplies: FLOP/s = 2 n^3 / seconds of the best n x n product."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

_BUDGET_SECONDS = 0.25
_CGROUP = Path("/sys/fs/cgroup")


def matmul_flops(threads: int = 0, device: str = "cpu") -> float:
    """Measured matmul limit in FLOP/s: float32 on a CPU (within about 0.3 s), bfloat16 on CUDA.

    Args: threads for the measurement (0 keeps torch's number, which is restored afterwards).
    On a CPU the best product counts by the smaller of wall time and CPU time per thread, so that another
    process on the same cores lowers the figure little.
    """
    import torch

    before = torch.get_num_threads()
    used = threads or before
    torch.set_num_threads(used)
    try:
        return _cuda_flops(device) if device.startswith("cuda") else _cpu_flops(used)
    finally:
        torch.set_num_threads(before)


def _cpu_flops(threads: int) -> float:
    import torch

    begin = time.perf_counter()
    best, width = 0.0, 256
    while time.perf_counter() - begin < _BUDGET_SECONDS:
        a = torch.ones(width, width)
        wall, cpu = time.perf_counter(), time.process_time()
        torch.mm(a, a)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        # CPU time ticks coarsely on some kernels: below 5 ms only wall time is trusted.
        seconds = min(wall, cpu / threads) if cpu > 5e-3 else wall
        best = max(best, 2.0 * width**3 / max(seconds, 1e-9))
        if width < 1024 and wall < _BUDGET_SECONDS / 20:
            width *= 2
    return best


def _cuda_flops(device: str) -> float:
    import torch

    width, best = 8192, 0.0
    a = torch.ones(width, width, device=device, dtype=torch.bfloat16)
    for _ in range(8):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        torch.mm(a, a)
        torch.cuda.synchronize(device)
        best = max(best, 2.0 * width**3 / (time.perf_counter() - begin))
    return best


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)  # bytes on macOS, KiB on Linux


def machine_facts() -> dict[str, object]:
    """CPU model, usable cores, memory, Python, torch, threads and GPUs, for the start panel and run.json."""
    import torch

    facts: dict[str, object] = {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def cpu_model() -> str:
    """Name of the processor as its maker writes it, else the architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in ("model name", "hardware", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may use: the affinity mask, cut by a cgroup v2 CPU quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota, _, period = _cgroup("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = max(1, min(cores, round(int(quota) / int(period))))
    return cores


def memory_bytes() -> int:
    """Memory this process may use: the machine's, cut by a cgroup v2 limit where there is one."""
    import psutil

    total, limit = psutil.virtual_memory().total, _cgroup("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def _cgroup(name: str) -> str:
    path = _CGROUP / name
    return path.read_text().strip() if path.is_file() else ""
