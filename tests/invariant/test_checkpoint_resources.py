"""Saving on a full disk loses nothing; loading and saving hold one model in memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemotron_ultra import HybridLM, ModelConfig, save_model

FULL_DISK = """
import resource, sys
from nemotron_ultra import ModelConfig, HybridLM, save_model
from nemotron_ultra.errors import CheckpointError
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
model = HybridLM(ModelConfig(pattern="*", vocab_size=20_000, hidden_size=32))
try:
    save_model(model, sys.argv[1], overwrite=True)
except CheckpointError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of the file size need POSIX")
def test_a_failing_write_leaves_the_older_checkpoint(tmp_path):
    target = tmp_path / "m"
    save_model(HybridLM(ModelConfig(pattern="*", vocab_size=8, hidden_size=8)), target)
    older = {path.name: path.read_bytes() for path in target.iterdir()}
    command = [sys.executable, "-c", FULL_DISK, str(target), "limit"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    assert "could not be written (File too large)" in done.stdout and "nothing was changed" in done.stdout
    assert list(tmp_path.iterdir()) == [target]
    assert {path.name: path.read_bytes() for path in target.iterdir()} == older


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare to mount a small disk")
def test_full_disk(tmp_path):
    """A tmpfs of 1 MB, visible only inside the command; what is left on it is listed before it goes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=1m none {disk} && mkdir {disk}/run"
    script = f'{mount} && {{ "$@"; echo rc $?; ls -A {disk} {disk}/run; }}'
    save = [sys.executable, "-c", FULL_DISK, f"{disk}/run/m", "disk"]
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script, "sh", *save], capture_output=True, text=True)
    if "rc" not in done.stdout:
        pytest.skip(f"no user may mount a tmpfs here: {done.stderr.strip()}")
    assert "No space left on device" in done.stdout and "rc 4" in done.stdout
    assert done.stdout.split("rc 4\n")[1].split() == [f"{disk}:", "run", f"{disk}/run:"]


PEAK = """
import sys, torch
from nemotron_ultra import ModelConfig, HybridLM, load_model, save_model

def memory(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

def size_of(model):
    return sum(t.numel() * t.element_size() for t in model.state_dict().values())

path, action, dtype = sys.argv[1], sys.argv[2], getattr(torch, sys.argv[3])
if action == "save":
    config = ModelConfig(pattern="ME*", vocab_size=4096, hidden_size=512, n_routed_experts=32,
                         num_experts_per_tok=4, moe_intermediate_size=1536)
    model = HybridLM(config)
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak of drawing the weights
    before = memory("VmRSS") - size_of(model)
    save_model(model, path, dtype=dtype)
else:
    import nemotron_ultra.model.hf_folder
    before = memory("VmRSS")
    model = load_model(path, dtype=dtype)
print((memory("VmHWM") - before) / size_of(model), size_of(model))
"""


def peak(path: Path, action: str, dtype: str) -> tuple[float, float]:
    """(peak memory as a multiple of the model's size, that size)."""
    command = [sys.executable, "-c", PEAK, str(path), action, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ratio, size = map(float, done.stdout.split())
    return ratio, size


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
def test_one_model_in_memory(tmp_path):
    for action, dtype in (("save", "float32"), ("load", "float32"), ("load", "bfloat16")):
        ratio, size = peak(tmp_path / "m", action, dtype)
        assert size > 100e6
        assert ratio < 1.15, f"{action} {dtype}: {ratio:.3f} x the model"
