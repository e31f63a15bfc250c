"""The learning rate over tokens, with the numbers of report 2.1."""

import math

import pytest

from nemotron_ultra.config.optim import ScheduleConfig
from nemotron_ultra.engine.schedule import Schedule
from nemotron_ultra.errors import ConfigError

ULTRA = Schedule(
    name="wsd", peak=2.5e-4, minimum=2.5e-6, total_tokens=20e12, warmup_tokens=200e9, decay_tokens=5e12
)


@pytest.mark.parametrize(
    ("tokens", "lr"),
    [
        (0, 0.0),
        (100e9, 1.25e-4),
        (200e9, 2.5e-4),
        (15e12, 2.5e-4),
        (16.25e12, 2.5e-6 + 2.475e-4 * 0.5),
        (20e12, 2.5e-6),
        (33e12, 2.5e-6),
    ],
)
def test_ultra_pretraining(tokens, lr):
    assert ULTRA(tokens) == pytest.approx(lr, rel=1e-12, abs=1e-18)


def test_ultra_milestones_in_steps():
    step = 3072 * 8192
    assert (
        math.ceil(ULTRA.total_tokens / step) == 794_729
    )  # 794,728.5: the report's public config rounds down
    assert round(ULTRA.warmup_tokens / step) == 7_947
    assert round((ULTRA.total_tokens - ULTRA.decay_start) / step) == 198_682


def test_minus_sqrt_falls_fastest_at_its_start():
    falls = [ULTRA(15e12 + i * 1e12) - ULTRA(15e12 + (i + 1) * 1e12) for i in range(5)]
    assert falls == sorted(falls, reverse=True)


def test_cosine_is_half_way_at_the_middle():
    sft = Schedule(name="cosine", peak=1.5e-5, minimum=1e-6, total_tokens=1000, warmup_tokens=100)
    assert sft(100) == pytest.approx(1.5e-5)
    assert sft(550) == pytest.approx((1.5e-5 + 1e-6) / 2)
    assert sft(1000) == pytest.approx(1e-6)


def test_constant_stays_after_warmup_from_initial():
    long_context = Schedule(name="constant", peak=2.5e-6, total_tokens=33e9, warmup_tokens=10, initial=1e-6)
    rates = [long_context(t) for t in (0, 5, 10, 33e9, 1e12)]
    assert rates == pytest.approx([1e-6, 1.75e-6, 2.5e-6, 2.5e-6, 2.5e-6])


def test_from_config_takes_the_length_of_the_run():
    config = ScheduleConfig(name="wsd", warmup_tokens=10, decay_tokens=50, min_lr=1e-5)
    schedule = Schedule.from_config(config, peak=1e-3, run_tokens=100)
    assert schedule.total_tokens == 100 and schedule.decay_start == 50
    assert schedule(100) == pytest.approx(1e-5)


def test_warmup_and_decay_must_fit():
    with pytest.raises(ConfigError, match="longer than the schedule"):
        Schedule(name="wsd", peak=1.0, total_tokens=100, warmup_tokens=60, decay_tokens=50)
    with pytest.raises(ConfigError, match="min_lr"):
        Schedule(name="cosine", peak=1.0, total_tokens=100, minimum=2.0)
