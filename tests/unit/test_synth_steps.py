import json
import random

import pytest

from nemotron_ultra.data.synthetic.steps import Drop, read_jsonl, run_step
from nemotron_ultra.errors import DataError


class Halve:
    """Lets even numbers through with how many were there before, and dies at row `fatal`."""

    name = "halve"

    def __init__(self, chunk, fatal=None):
        self.chunk, self.fatal = chunk, fatal

    def open(self, source, kept):
        self.before = sum(1 for _ in kept)

    def work(self, rows):
        return [self.one(row) for row in rows]

    def one(self, row):
        if row["n"] == self.fatal:
            raise KeyboardInterrupt
        if row["n"] % 2:
            return Drop("odd", str(row["n"]))
        self.before += 1
        return row | {"before": self.before - 1}


def numbers(start):
    return ({"id": f"r{n}", "n": n} for n in range(start, 100))


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("seed", range(4))
def test_killed_anywhere_and_resumed_gives_the_same_files(tmp_path, seed):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    whole.mkdir()
    torn.mkdir()
    run_step(whole, 1, Halve(7), numbers)
    draw = random.Random(seed)
    for fatal in sorted(draw.sample(range(100), 3)):
        with pytest.raises(KeyboardInterrupt):
            run_step(torn, 1, Halve(7, fatal), numbers)
        for path in torn.glob("*.jsonl"):  # what a kill in the middle of a write leaves behind
            path.write_bytes(path.read_bytes() + b'{"id": "r9')
    receipt = run_step(torn, 1, Halve(7), numbers)
    assert files(torn) == files(whole)
    assert (receipt.rows_in, receipt.rows_out, dict(receipt.dropped)) == (100, 50, {"odd": 50})
    assert [row["before"] for row in read_jsonl(torn / "1-halve.jsonl")] == list(range(50))


def test_the_size_of_chunks_does_not_show(tmp_path):
    made = []
    for chunk in (9, 33, 1000):
        folder = tmp_path / str(chunk)
        folder.mkdir()
        run_step(folder, 1, Halve(chunk), numbers)
        made.append((folder / "1-halve.jsonl").read_bytes())
    assert made[0] == made[1] == made[2]


def test_a_finished_step_is_read_not_worked(tmp_path):
    run_step(tmp_path, 1, Halve(10), numbers)
    again = run_step(tmp_path, 1, Halve(10, fatal=0), numbers)
    assert again.finished and again.examples == {"odd": [f"r{n}: {n}" for n in (1, 3, 5, 7, 9)]}
    second = run_step(tmp_path, 2, Halve(10), tmp_path / "1-halve.jsonl")
    assert (second.rows_in, second.rows_out) == (50, 50)
    dropped = [json.loads(line) for line in (tmp_path / "1-halve.dropped.jsonl").read_text().splitlines()]
    assert dropped[0] == {"reason": "odd", "detail": "1", "row": {"id": "r1", "n": 1}}


def test_a_file_shorter_than_its_receipt_is_refused(tmp_path):
    run_step(tmp_path, 1, Halve(10), numbers)
    (tmp_path / "1-halve.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match=r"1-halve.jsonl is not what its receipt says"):
        run_step(tmp_path, 1, Halve(10), numbers)
