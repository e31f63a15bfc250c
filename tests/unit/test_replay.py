"""Replay: which weights draw which batch, at any speed; ages, errors of the thread, saving and resuming."""

from __future__ import annotations

import random
import threading
import time
import traceback
from dataclasses import replace

import pytest

from nemotron_ultra.engine.checkpoint import load_checkpoint, save_checkpoint
from nemotron_ultra.errors import BackendError, DataError
from nemotron_ultra.rl.replay import Replay
from nemotron_ultra.rl.rollout import Group, Problem, Rollout


class Source:
    """Makes batches whose tokens carry the version that is set when they are drawn, after random pauses."""

    def __init__(self, pause: float = 0.0):
        self.version, self.pause, self.made = 0, pause, []
        self.threads: set[threading.Thread] = set()

    def __call__(self, step: int) -> list[Group]:
        self.made.append(step)
        self.threads.add(threading.current_thread())
        draw, groups = random.Random(step), []
        for index in range(2):
            time.sleep(random.random() * self.pause)
            versions = [self.version] * draw.randint(1, 4)
            problem = Problem(domain="d", index=index, question=f"q{step}", answer="a", entry={"x": {1, 2}})
            groups.append(Group(problem=problem, rollouts=[rollout(versions, draw), rollout([], draw)]))
        return groups


def rollout(versions: list[int], draw: random.Random) -> Rollout:
    return Rollout(
        prompt=[1, 2],
        tokens=[draw.randrange(99) for _ in versions],
        logprobs=[-draw.random() for _ in versions],
        versions=versions,
        finish_reason="stop",
        text="tensor: \u00fc",
        reward=draw.random(),
    )


def train(replay: Replay, source: Source, steps: int, pause: float = 0.0) -> list[list[Group]]:
    """What a trainer gets: a batch, an update, new weights."""
    batches = []
    for _ in range(steps):
        batches.append(next(replay))
        time.sleep(random.random() * pause)
        replay.settle()
        source.version += 1
        replay.published(source.version)
    return batches


def versions(batches: list[list[Group]]) -> list[set[int]]:
    return [{v for g in groups for r in g.rollouts for v in r.versions} for groups in batches]


def plain(groups: list[Group]) -> list[Group]:
    """What a checkpoint keeps."""
    return [replace(group, problem=replace(group.problem, entry={})) for group in groups]


def test_age_zero_is_the_plain_loop():
    source, other = Source(), Source()
    replay = Replay(source, max_age=0)
    got = train(replay, source, 4)
    expected = []
    for step in range(4):
        expected.append(other(step))
        other.version += 1
    assert got == expected and source.made == [0, 1, 2, 3]
    assert source.threads == {threading.current_thread()}
    assert replay.metrics()["replay/age_max"] == 0.0 and replay.metrics()["replay/buffered"] == 0.0


@pytest.mark.parametrize("pauses", [(0.0, 0.0), (0.004, 0.0), (0.0, 0.004), (0.004, 0.004)])
def test_age_one_draws_each_batch_with_the_version_before(pauses: tuple[float, float]):
    source = Source(pauses[0])
    replay = Replay(source, max_age=1, steps=8)
    got = train(replay, source, 8, pauses[1])
    assert versions(got) == [{0}, {0}, {1}, {2}, {3}, {4}, {5}, {6}]
    assert source.made == list(range(8)), "nothing is made beyond the last step"
    assert replay.metrics()["replay/age_mean"] == 1.0
    with pytest.raises(StopIteration):
        next(replay)
    replay.close()


def test_batch_is_made_while_the_trainer_holds_the_one_before():
    begun, go = threading.Event(), threading.Event()
    source = Source()

    def produce(step: int) -> list[Group]:
        if step == 1:
            begun.set()
            assert go.wait(5)
        return source(step)

    replay = Replay(produce, max_age=1)
    next(replay)
    assert begun.wait(5)  # batch 1 is under way, and nobody has asked for it
    assert replay.metrics()["replay/buffered"] == 0.0
    go.set()
    replay.settle()
    assert replay.metrics()["replay/buffered"] == 1.0
    replay.close()


def test_metrics_tell_ages_and_waiting():
    source = Source()
    replay = Replay(lambda step: time.sleep(0.02) or source(step), max_age=1)
    train(replay, source, 3)
    found = replay.metrics()
    assert found["replay/age_mean"] == found["replay/age_max"] == 1.0
    assert 0.01 < found["replay/wait_seconds"] < 1.0
    replay.close()


@pytest.mark.parametrize("max_age, given", [(0, 2), (0, 4), (1, 1), (1, 4)])
def test_token_outside_the_bound_is_refused(max_age: int, given: int):
    source = Source()
    replay = Replay(source, max_age=max_age)
    replay.load_state_dict({"step": 3, "batches": []})
    source.version = given
    replay.published(3)
    with pytest.raises(BackendError, match=rf"rollout 0 of d:0.*step 3.*versions {given} to {given}"):
        next(replay)
    replay.close()


def test_oldest_token_counts():
    groups = Source()(0)
    mixed = replace(groups[0].rollouts[0], tokens=[1, 2], logprobs=[0.0, 0.0], versions=[5, 3])
    replay = Replay(lambda step: [Group(problem=groups[0].problem, rollouts=[mixed])], max_age=1)
    replay.load_state_dict({"step": 5, "batches": []})
    with pytest.raises(BackendError, match="versions 3 to 5; allowed: 4 to 5"):
        next(replay)
    replay.close()


def test_token_without_a_version_is_refused():
    groups = Source()(0)
    bare = replace(groups[0].rollouts[0], versions=[])
    replay = Replay(lambda step: [Group(problem=groups[0].problem, rollouts=[bare])])
    with pytest.raises(BackendError, match="every token needs a version; got 0 versions"):
        next(replay)


def test_weights_that_were_not_published():
    replay = Replay(Source(), max_age=1)
    next(replay), next(replay)
    with pytest.raises(BackendError, match=r"batch 2 has no weights.*version 0.*version 1 or newer"):
        next(replay)
    replay.close()


@pytest.mark.parametrize("max_age", [0, 1])
def test_error_of_produce_comes_out_of_next_with_its_traceback(max_age: int):
    def produce(step: int) -> list[Group]:
        if step == 1:
            raise DataError("the scorer broke")
        return Source()(step)

    replay = Replay(produce, max_age=max_age)
    next(replay)
    replay.settle()
    for _ in range(2):
        with pytest.raises(DataError, match="the scorer broke") as error:
            next(replay)
    assert "in produce" in "".join(traceback.format_exception(error.value))
    if max_age:
        with pytest.raises(DataError, match="the scorer broke"):
            replay.state_dict()
    replay.close()


def test_close_joins_the_thread():
    source = Source(0.01)
    replay = Replay(source, max_age=1)
    replay.start_ahead()
    while not source.made:
        time.sleep(0.001)
    (worker,) = source.threads
    replay.close()
    assert not worker.is_alive()
    assert source.made in ([0], [0, 1])
    replay.close()


@pytest.mark.parametrize("max_age", [0, 1])
@pytest.mark.parametrize("published", [False, True])
def test_resumed_run_gets_what_the_whole_run_gets(tmp_path, max_age: int, published: bool):
    whole, source = Source(), Source()
    expected = train(Replay(whole, max_age=max_age, steps=7), whole, 7)
    first = Replay(source, max_age=max_age, steps=7)
    train(first, source, 3)
    if not published:  # saved between the update and the publishing of its weights
        source = Source()
        first = Replay(source, max_age=max_age, steps=7)
        train(first, source, 2)
        next(first)
    folder = save_checkpoint(tmp_path, 3, {"stream": first.state_dict()})
    again = Replay(resumed := Source(), max_age=max_age, steps=7)
    again.load_state_dict(load_checkpoint(folder)["stream"])
    resumed.version = 3
    again.published(3)
    got = train(again, resumed, 4)
    assert [plain(g) for g in got] == [plain(g) for g in expected[3:]]
    assert resumed.made == list(range(3 + max_age * (1 + published), 7))


def test_saved_batches_that_are_too_old_for_a_new_bound_are_made_anew():
    source = Source()
    first = Replay(source, max_age=1)
    train(first, source, 3)
    again = Replay(resumed := Source(), max_age=0)
    again.load_state_dict(first.state_dict())
    resumed.version = 3
    assert versions([next(again)]) == [{3}]
    first.close()
