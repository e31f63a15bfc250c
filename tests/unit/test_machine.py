"""What the machine is: plausible figures, a short measurement, no lasting change of torch's threads."""

import time

import psutil
import pytest
import torch

from nemotron_ultra.observe import machine


def test_matmul_flops_is_short_and_restores_threads():
    before = torch.get_num_threads()
    begin = time.process_time()
    flops = machine.matmul_flops(1)
    assert time.process_time() - begin < 0.6 and torch.get_num_threads() == before
    assert 1e8 < flops < 1e14


def test_facts_are_plain_and_plausible():
    facts = machine.machine_facts()
    assert facts["torch"] == torch.__version__ and facts["cores"] >= 1 and facts["memory_gb"] > 0.1
    assert all(isinstance(value, str | int | float | list) for value in facts.values())


def test_peak_memory_is_at_least_what_is_used_now():
    used = psutil.Process().memory_info().rss
    assert 0.9 * used < machine.peak_memory_bytes() < machine.memory_bytes()


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("max 100000", None), ("", None)])
def test_cgroup_quota_cuts_cores(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path / "none")
    free = machine.usable_cores()
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.usable_cores() == (cores or free)


def test_cgroup_limit_cuts_memory(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.memory_bytes() == 1_000_000
