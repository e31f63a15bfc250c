"""fit: batches in, steps out, hooks in order, and finished in reverse also after an error."""

import itertools

import pytest

from micro import micro_batches, micro_engine, objective
from nemotron_ultra.errors import NonFiniteError
from nemotron_ultra.trainers.hooks import Hook
from nemotron_ultra.trainers.loop import fit


class Recorder(Hook):
    def __init__(self, name, events):
        self.name, self.events = name, events

    def start(self):
        self.events.append(f"start {self.name}")

    def after_step(self, step, metrics):
        self.events.append(f"{step} {self.name}")
        metrics[self.name] = len(metrics)

    def finish(self):
        self.events.append(f"finish {self.name}")


def test_hooks_see_each_step_in_order():
    events, engine = [], micro_engine()
    fit(
        engine,
        itertools.repeat(micro_batches(1)),
        objective(),
        steps=2,
        hooks=[Recorder("a", events), Recorder("b", events)],
    )
    assert events == ["start a", "start b", "1 a", "1 b", "2 a", "2 b", "finish b", "finish a"]
    assert engine.step == 2


def test_a_finished_engine_takes_no_batch():
    engine = micro_engine()
    engine.step = 5
    fit(engine, iter(()), objective(), steps=5)


def test_hooks_finish_after_an_error():
    events, batches = [], micro_batches(1)
    batches[0].weight_T[0] = float("nan")
    with pytest.raises(NonFiniteError):
        fit(micro_engine(), iter([batches]), objective(), steps=1, hooks=[Recorder("a", events)])
    assert events == ["start a", "finish a"]
