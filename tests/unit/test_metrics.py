"""metrics.jsonl: valid JSON whatever the numbers, whole lines whatever happens, rows cut on resume."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from micro import micro_batches, micro_engine, objective, step
from nemotron_ultra.errors import DataError
from nemotron_ultra.observe.catalog import METRICS, describe, markdown, undocumented
from nemotron_ultra.observe.metrics import MetricsLog, read_metrics
from nemotron_ultra.observe.stability import stability_metrics

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def strict(line: str) -> dict:
    def refuse(word):
        raise ValueError(word)

    return json.loads(line, parse_constant=refuse)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def test_rows_come_back(path):
    log = MetricsLog(path)
    rows = [
        {"step": 1, "loss": 2.5, "note": "a\nb", "list": [1, 2.0]},
        {"step": 2, "loss": None, "flag": True},
    ]
    for row in rows:
        log.append(row)
    assert read_metrics(path) == rows and path.read_text().count("\n") == 2


def test_non_finite_is_valid_json_and_comes_back(path):
    MetricsLog(path).append({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": [math.nan]})
    assert strict(path.read_text()) == {
        "step": 1,
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
        "d": ["NaN"],
    }
    (row,) = read_metrics(path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_numpy_and_torch_scalars(path):
    MetricsLog(path).append({"step": np.int64(3), "loss": torch.tensor(1.5), "x": np.float32(math.nan)})
    (row,) = read_metrics(path)
    assert row["step"] == 3 and row["loss"] == 1.5 and math.isnan(row["x"])


def test_torn_last_line_is_skipped_and_cut_on_append(path):
    MetricsLog(path).append({"step": 1})
    with open(path, "a") as file:
        file.write('{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
    MetricsLog(path).append({"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}] and "lo" not in path.read_text()


def test_long_torn_line_and_nul_bytes_are_cut(path):
    MetricsLog(path).append({"step": 1})
    with open(path, "ab") as file:
        file.write(b'{"step": 2' + b" " * 200_000 + b"\0" * 10)
    MetricsLog(path).append({"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_whole_last_line_without_newline_is_kept(path):
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"step": 2}')
    assert len(read_metrics(path)) == 2
    MetricsLog(path).append({"step": 3})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_damage_in_the_middle_names_the_line(path):
    path.parent.mkdir()
    path.write_text('{"step": 1}\nbroken\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"line 2 .*remove that line"):
        read_metrics(path)


def test_missing_file(path):
    with pytest.raises(DataError, match="is not there"):
        read_metrics(path)


def test_truncate_after(path):
    log = MetricsLog(path)
    for number in range(1, 8):
        log.append({"step": number})
    assert log.truncate_after(4) == 3
    log.append({"step": 5, "again": 1})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert os.listdir(path.parent) == ["metrics.jsonl"]


def test_truncate_to_nothing_and_past_the_end(path):
    log = MetricsLog(path)
    log.append({"step": 1})
    assert log.truncate_after(9) == 0 and log.truncate_after(0) == 1
    log.append({"step": 1})
    assert len(read_metrics(path)) == 1


def test_kill_9_loses_no_line(path):
    code = (
        "import sys\nfrom nemotron_ultra.observe.metrics import MetricsLog\nlog = MetricsLog(sys.argv[1])\n"
        "for s in range(10**9):\n    log.append({'step': s, 'loss': 1.5})\n    print(s, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    seen = [int(process.stdout.readline()) for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    rows = read_metrics(path)
    assert rows[-1]["step"] >= seen[-1] and [row["step"] for row in rows] == list(range(len(rows)))


def test_full_disk_is_one_error_and_leaves_whole_lines(path):
    """A limit on the size of files stands in for the disk."""
    log = MetricsLog(path)
    log.append({"step": 1})
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1][1]))
    try:
        with pytest.raises(DataError, match=r"cannot write .*free space"):
            log.append({"step": 2, "loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
        signal.signal(signal.SIGXFSZ, before[0])
    log.append({"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_every_key_of_a_step_is_documented():
    engine = micro_engine()
    keys = {
        "step",
        "tokens",
        "seconds",
        "tokens_per_second",
        "matmul_share",
        "memory_gb",
        "val/bits_per_byte",
    }
    metrics = step(engine, micro_batches(1))
    keys |= set(metrics) | set(stability_metrics(engine.counts_LE, engine.residual_norm_L))
    keys |= {f"val/{key}" for key in engine.evaluate(micro_batches(1), objective())}
    assert len(keys) > 25 and undocumented(keys) == []


def test_docs_have_the_table():
    assert markdown() in DOCS.read_text(encoding="utf-8")


def test_catalogue_is_sound():
    assert len({metric.key for metric in METRICS}) == len(METRICS)
    assert describe("moe/3/max_vio").key == "moe/<k>/max_vio"
    assert describe("moe/max_vio_max").key == "moe/max_vio_max"
    assert undocumented(["loss", "los", "moe/3/max_vio/x"]) == ["los", "moe/3/max_vio/x"]


def test_a_deleted_file_is_begun_again(path):
    log = MetricsLog(path)
    log.append({"step": 1})
    path.unlink()
    log.append({"step": 2})
    assert [row["step"] for row in read_metrics(path)] == [2]
