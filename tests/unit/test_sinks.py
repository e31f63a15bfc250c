"""wandb and tensorboard for real, and sinks that raise, hang, die or cannot start: none may stop a run."""

import importlib.util
import math
import os
import subprocess
import sys
import threading
import time

import pytest

from nemotron_ultra.config.runtime import LogConfig
from nemotron_ultra.errors import BackendError
from nemotron_ultra.observe import sinks as sinks_module
from nemotron_ultra.observe.sinks import open_sinks

ODD_SINKS = """
import os, sys, time

class Good:
    def __init__(self, options):
        self.file = open(options["run_dir"] + "/rows.txt", "w")
        print("noise on standard output", flush=True)
    def write(self, step, metrics):
        print(step, sorted(metrics), metrics.get("loss"), file=self.file, flush=True)
    def close(self):
        print("closed", file=self.file, flush=True)

class RaisesAtStart(Good):
    def __init__(self, options):
        raise RuntimeError("no such project")

class RaisesInWrite(Good):
    def write(self, step, metrics):
        raise ValueError(f"bad row {step}")

class RaisesInClose(Good):
    def close(self):
        raise OSError("upload failed")

class HangsAtStart(Good):
    def __init__(self, options):
        time.sleep(1000)

class HangsOnline(Good):
    def __init__(self, options):
        super().__init__(options)
        if options["mode"] == "online":
            time.sleep(1000)

class HangsInWrite(Good):
    def write(self, step, metrics):
        time.sleep(1000)

class HangsInClose(Good):
    def close(self):
        time.sleep(1000)

class Dies(Good):
    def write(self, step, metrics):
        os._exit(3)
"""


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """Opens a sink class of ODD_SINKS; `said` collects what the person is told."""
    (tmp_path / "odd_sinks.py").write_text(ODD_SINKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    said = []

    def start(name, **limits):
        extra = {"odd": f"odd_sinks:{name}"}
        return open_sinks(LogConfig(), tmp_path, {"a": 1}, extra=extra, report=said.append, **limits), said

    return start


def write_all(sinks, count=5):
    begin = time.monotonic()
    for step in range(1, count + 1):
        sinks.write(step, {"step": step, "loss": math.nan if step == 2 else 1.0 / step})
    assert time.monotonic() - begin < 1.0


def test_no_sinks(tmp_path):
    sinks = open_sinks(LogConfig(), tmp_path, {})
    sinks.write(1, {"loss": 1.0})
    sinks.close()
    assert list(tmp_path.iterdir()) == []


def test_rows_arrive_in_order(odd, tmp_path):
    sinks, said = odd("Good")
    write_all(sinks)
    sinks.close()
    lines = (tmp_path / "rows.txt").read_text().splitlines()
    assert lines[:2] == ["1 ['loss'] 1.0", "2 ['loss'] nan"] and lines[-1] == "closed" and len(lines) == 6
    assert said == [] and "noise" in (tmp_path / "odd.log").read_text()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("RaisesAtStart", "no such project"),
        ("RaisesInWrite", "bad row 1"),
        ("RaisesInClose", "upload failed"),
        ("Dies", "its process ended"),
        ("Missing", "has no attribute"),
    ],
)
def test_failure_is_said_once_and_stops_nothing(odd, name, reason):
    sinks, said = odd(name)
    write_all(sinks)
    sinks.close()
    sinks.close()
    sinks.write(6, {"loss": 1.0})
    assert len(said) == 1 and reason in said[0] and "the run and metrics.jsonl go on" in said[0]


@pytest.mark.parametrize("name", ["HangsAtStart", "HangsInWrite", "HangsInClose"])
def test_hanging_sink_is_ended_in_time(odd, name):
    sinks, said = odd(name, close_seconds=2.0)
    workers = [sink for sink in sinks._sinks]
    write_all(sinks)
    begin = time.monotonic()
    sinks.close()
    assert time.monotonic() - begin < 6.0
    assert len(said) == 1 and "did not finish" in said[0]
    assert all(sink._worker._process.poll() is not None for sink in workers)


def test_start_that_takes_too_long(odd):
    sinks, said = odd("HangsAtStart", start_seconds=0.5)
    while sinks.alive:
        time.sleep(0.05)
    sinks.close()
    assert len(said) == 1 and "no answer within" in said[0]


def test_full_queue_never_waits(odd, monkeypatch):
    monkeypatch.setattr(sinks_module, "_QUEUE_ROWS", 10)
    sinks, said = odd("HangsAtStart")
    write_all(sinks, 50)
    sinks.close()
    assert len(said) == 1 and "took no row" in said[0]


def test_interpreter_ends_although_a_sink_hangs(odd, tmp_path):
    code = f"""
from nemotron_ultra.config.runtime import LogConfig
from nemotron_ultra.observe.sinks import open_sinks
extra = {{"odd": "odd_sinks:HangsInClose"}}
open_sinks(LogConfig(), {str(tmp_path)!r}, {{}}, extra=extra, close_seconds=1.0).write(1, {{"loss": 1.0}})
print("end of run")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "end of run\n" and done.stderr.count("switched off") == 1


def test_missing_package_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r'pip install "nemotron-ultra\[wandb\]"'):
        open_sinks(LogConfig(sinks=["wandb"]), tmp_path, {})


def test_folder_called_wandb_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb_like").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match="not installed"):
        sinks_module._require("wandb_like")


def test_real_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said = []
    sinks = open_sinks(LogConfig(sinks=["tensorboard"]), tmp_path, {}, report=said.append)
    write_all(sinks)
    sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert said == [] and [event.step for event in events] == [1, 2, 3, 4, 5]
    assert events[0].value == 1.0 and math.isnan(events[1].value)


def test_real_wandb_offline(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    (tmp_path / "wandb_id").write_text("keptid")  # as of a run that is resumed
    said = []
    config = LogConfig(sinks=["wandb"], wandb_mode="offline")
    sinks = open_sinks(config, tmp_path, {"model": {"hidden_size": 8}}, report=said.append)
    write_all(sinks)
    sinks.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-keptid.wandb")
    assert said == [] and file.stat().st_size > 100


def test_real_wandb_online_without_login_goes_on_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    said = []
    config = LogConfig(sinks=["wandb"], wandb_mode="online")
    sinks = open_sinks(config, tmp_path, {}, report=said.append)
    write_all(sinks)
    sinks.close()
    assert len(said) == 1 and "cannot go online" in said[0] and "API key" in said[0]
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_wandb_that_does_not_answer_goes_on_offline(odd, tmp_path, monkeypatch):
    """A class in the place of wandb's: online it hangs for ever, as without a network."""
    monkeypatch.setitem(sinks_module._BUILTIN, "wandb", "odd_sinks:HangsOnline")
    monkeypatch.setattr(sinks_module, "_require", lambda name: None)
    said = []
    config = LogConfig(sinks=["wandb"], wandb_mode="online")
    sinks = open_sinks(config, tmp_path, {}, report=said.append, start_seconds=1.0)
    write_all(sinks)
    sinks.close()
    assert len(said) == 1 and "no answer within 1 s" in said[0]
    assert (tmp_path / "rows.txt").read_text().endswith("closed\n")


def test_worker_given_up_from_many_sides(odd, tmp_path):
    sinks, said = odd("HangsInClose", close_seconds=0.1)
    write_all(sinks)
    (sink,) = sinks._sinks
    while sink._worker is None:
        time.sleep(0.01)
    threads = [threading.Thread(target=call) for call in [sink._worker.kill] * 8 + [sinks.close] * 2]
    for thread in threads:
        thread.start()
    for thread in [*threads, sink._thread]:
        thread.join(10.0)
        assert not thread.is_alive()
    assert len(said) == 1
