"""What a configuration needs against what this machine and this version have, before anything is built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from nemotron_ultra.config.plan import Plan, make_plan
from nemotron_ultra.config.policy import config_modules, plan_policy
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.config.te import INSTALL, installed_version
from nemotron_ultra.errors import BackendError


@dataclass(frozen=True)
class Machine:
    """What is here: usable cores, bytes of memory, and the name of each visible GPU."""

    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        gpus = f"{len(self.gpus)} x {self.gpus[0]}" if self.gpus else "no GPU"
        return f"1 machine, {gpus}, {self.cores} CPU cores, {_size(self.memory_bytes)} of memory"


def this_machine() -> Machine:
    """Counted without torch: GPUs from the driver's folder or nvidia-smi, within CUDA_VISIBLE_DEVICES."""
    return Machine(_cores(), psutil.virtual_memory().total, tuple(_visible_gpus()))


def check_requirements(config: RunConfig, machine: Machine | None = None) -> None:
    """Raise one BackendError that lists everything the configuration needs and this place lacks."""
    machine = machine or this_machine()
    missing = list(shortfalls(config, machine))
    if not missing:
        return
    head = f"recipe {config.recipe} cannot run here:"
    raise BackendError("\n  ".join([head, *missing, f"here: {machine}", f"try {_smaller(config)}"]))


def shortfalls(config: RunConfig, machine: Machine) -> Iterator[str]:
    """One line for each thing that is missing."""
    plan = make_plan(config)
    yield from _devices(config, machine)
    yield from _memory(config, machine, plan)
    if config.engine.name != "torch":
        yield f"engine: needs {config.engine.name}, this version has torch only"
        return
    if config.rollout is not None and config.rollout.generator == "vllm" and find_spec("vllm") is None:
        yield (
            "rollout.generator: vllm is not installed: pip install 'nemotron-ultra[vllm]' (CUDA), or take "
            "rollout.generator=sampler"
        )
    yield from _torch_limits(config)


def _devices(config: RunConfig, machine: Machine) -> Iterator[str]:
    cluster = config.cluster
    if cluster.gpus > len(machine.gpus):
        kind = f" {cluster.gpu}" if cluster.gpu else " GPUs"
        nodes = f"{cluster.nodes:,} node" + ("" if cluster.nodes == 1 else "s")
        yield f"devices: needs {nodes} x {cluster.gpus_per_node}{kind} = {cluster.gpus:,} GPUs"
    elif config.engine.device == "cuda" and not machine.gpus:
        yield "devices: needs a GPU (engine.device=cuda); engine.device=auto takes the CPU"


def _memory(config: RunConfig, machine: Machine, plan: Plan) -> Iterator[str]:
    """The GPU's memory is not asked for here: torch says it when it is short."""
    on_gpu = config.engine.name == "torch" and config.engine.device != "cpu" and machine.gpus
    if plan.training_bytes <= machine.memory_bytes or on_gpu:
        return
    state = plan.weight_bytes + plan.gradient_bytes + plan.optimizer_bytes
    gpus = config.cluster.gpus
    share = f", {_size(state / gpus)} on each GPU if spread evenly" if gpus else ""
    yield (
        f"memory: needs {_size(plan.weight_bytes)} for weights, {_size(plan.gradient_bytes)} for gradients, "
        f"{_size(plan.optimizer_bytes)} for the optimizer{share}"
    )


def _torch_limits(config: RunConfig) -> Iterator[str]:
    """Fields that the torch engine of this version would otherwise ignore."""
    ranks = max(config.parallel.smallest_world, config.cluster.gpus, config.cluster.nodes)
    if ranks > 1:
        yield f"parallel: needs {ranks} processes, the torch engine runs one"
    stored, name = config.precision.weights, config.precision.name
    table = plan_policy(config_modules(config.model), config.precision, config.model)
    if config.precision.backend == "te" and installed_version() is None:
        yield f"precision.backend: te needs Transformer Engine, which is not installed: {INSTALL}"
    for row in table.rows:
        if row.flops and "router" not in row.kind and row.format in {"fp32", "bf16"} - {stored}:
            yield (
                f"precision {name}: weights {stored}, products in {row.format} ({row.kind}); the torch "
                "engine emulates nvfp4 and mxfp8 and computes the rest in the format of the weights"
            )
    if config.trainer.weight_hash_every:
        yield "trainer.weight_hash_every: the torch engine does not do this; leave it at its default"


def _smaller(config: RunConfig) -> str:
    """The nearest thing that runs on one machine."""
    small = config.trainer.name  # the recipe of that trainer that runs anywhere has its name
    if config.cluster.gpus or config.recipe != small:
        return f"recipe={small}"
    return f"the defaults of recipe={small} (model=tiny precision=fp32)"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _visible_gpus() -> list[str]:
    names = _gpu_names()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    chosen = [part for part in visible.split(",") if part.strip() and part.strip() != "-1"]
    return names[: len(chosen)]


def _gpu_names() -> list[str]:
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    if files:
        lines = [line for file in files for line in file.read_text().splitlines()]
        return [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return []
    return found.stdout.splitlines() if found.returncode == 0 else []


def _size(count: float) -> str:
    """Decimal units, three digits: 8.41 TB."""
    for power, unit in ((12, "TB"), (9, "GB")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {unit}"
    return f"{count / 1e6:.3g} MB"
