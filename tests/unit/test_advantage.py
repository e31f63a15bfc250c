"""Advantages: identities in exact arithmetic, the order of the steps, and inputs that must be refused."""

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import ValidationError

from nemotron_ultra.config.advantage import AdvantageConfig
from nemotron_ultra.errors import ConfigError, DataError, NonFiniteError
from nemotron_ultra.rl.advantage import (
    clip_advantage,
    gap_advantages,
    group_deviation,
    group_normalized,
    kept_rollouts,
    leave_one_out,
    overlong_filter,
    overlong_penalty,
    overwrite_penalized,
    reward_metrics,
    rollout_advantages,
    teacher_gap,
)
from nemotron_ultra.rl.rollout import Group, Problem, Rollout

CONFIGS = Path(__file__).parents[2] / "configs" / "advantage"
GAP = AdvantageConfig(name="teacher_gap")


def group(*rewards, domain="sums", index=0, lengths=None, cut=()):
    lengths = lengths or [3] * len(rewards)
    rollouts = [
        Rollout(
            prompt=[1, 2],
            tokens=[5] * length,
            logprobs=[-1.0] * length,
            versions=[0] * length,
            finish_reason="length" if i in cut else "stop",
            text="",
            reward=reward,
        )
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    problem = Problem(domain=domain, index=index, question="?", answer="!")
    return Group(problem=problem, rollouts=rollouts)


def drawn(sizes, seed=0):
    """Rewards and group names in random order: the names are neither dense nor sorted."""
    generator = torch.Generator().manual_seed(seed)
    names_B = torch.repeat_interleave(torch.tensor([70, -3, 12, 5][: len(sizes)]), torch.tensor(sizes))
    order = torch.randperm(len(names_B), generator=generator)
    return torch.rand(len(names_B), dtype=torch.float64, generator=generator), names_B[order]


def exact(rewards_B, group_B, i):
    """(own reward - mean of the others, their variance) in rational numbers."""
    others = [
        Fraction(x)
        for j, (x, g) in enumerate(zip(rewards_B.tolist(), group_B.tolist(), strict=True))
        if j != i and g == group_B[i]
    ]
    mean = sum(others) / len(others)
    variance = sum((x - mean) ** 2 for x in others) / (len(others) - 1)
    return float(Fraction(rewards_B[i].item()) - mean), float(variance)


@pytest.mark.parametrize("sizes", [(3,), (4, 4), (16, 3, 5, 8)])
def test_leave_one_out_is_the_exact_difference_and_deviation(sizes):
    rewards_B, group_B = drawn(sizes)
    deviation_B, std_B = group_deviation(rewards_B, group_B, leave_one_out=True)
    for i in range(len(rewards_B)):
        difference, variance = exact(rewards_B, group_B, i)
        assert math.isclose(deviation_B[i].item(), difference, rel_tol=1e-13, abs_tol=1e-15)
        assert math.isclose(std_B[i].item(), math.sqrt(variance), rel_tol=1e-13)
    assert torch.equal(leave_one_out(rewards_B, group_B), deviation_B)
    assert torch.equal(leave_one_out(rewards_B, group_B, std=True), deviation_B / (std_B + 1e-6))


def test_a_list_of_rewards_is_read_in_float64():
    rewards = [1e6 + 0.25, 1e6 + 0.5, 1e6 + 0.3]
    wanted = [rewards[i] - (sum(rewards) - rewards[i]) / 2 for i in range(3)]
    assert leave_one_out(rewards, [0, 0, 0]).tolist() == pytest.approx(wanted, rel=1e-6)
    assert leave_one_out(rewards, [0, 0, 0]).dtype == torch.float32


def test_leave_one_out_is_the_scaled_group_mean_and_both_sum_to_zero():
    rewards_B, group_B = drawn((4, 8, 3))
    whole_B, others_B = group_normalized(rewards_B, group_B, std=False), leave_one_out(rewards_B, group_B)
    for name in group_B.unique():
        rows = group_B == name
        n = int(rows.sum())
        torch.testing.assert_close(others_B[rows], whole_B[rows] * n / (n - 1), rtol=1e-14, atol=0)
        assert abs(whole_B[rows].sum()) < 1e-14


@pytest.mark.parametrize("function", [leave_one_out, group_normalized])
def test_shift_scale_and_order_of_rewards(function):
    rewards_B, group_B = drawn((5, 7))
    plain_B = function(rewards_B, group_B, std=False)
    torch.testing.assert_close(function(3 * rewards_B + 100, group_B, std=False), 3 * plain_B)
    divided_B = function(rewards_B, group_B, std=True, eps=0.0)
    torch.testing.assert_close(function(3 * rewards_B + 100, group_B, std=True, eps=0.0), divided_B)
    turned = function(rewards_B.flip(0), group_B.flip(0), std=True, eps=0.0)
    torch.testing.assert_close(turned.flip(0), divided_B)


@pytest.mark.parametrize("value", [0.35, 0.1, 1e6 + 0.1, -7.3])
@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(value, count):
    rewards_B, group_B = torch.full([count], value), torch.zeros(count)
    for std in (False, True):
        assert torch.equal(leave_one_out(rewards_B, group_B, std=std), torch.zeros(count))
        assert torch.equal(group_normalized(rewards_B, group_B, std=std), torch.zeros(count))


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odd_one_out_of_equal_rewards_is_not_blown_up(scale, dtype):
    rewards_B = torch.tensor([0.35] * 7 + [0.0], dtype=dtype) * scale
    advantage_B = leave_one_out(rewards_B, [3] * 8, std=True)
    assert advantage_B.dtype == dtype
    torch.testing.assert_close(advantage_B[7].item(), -0.35 * scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(advantage_B[:7], torch.full([7], 7**-0.5, dtype=dtype), rtol=1e-5, atol=0)


def test_floor_leaves_the_advantage_undivided_below_it():
    rewards_B, group_B = torch.tensor([0.0, 0.001, 0.0, 1.0], dtype=torch.float64), [0, 0, 1, 1]
    std = 0.001 * 0.5**0.5
    low_B = group_normalized(rewards_B, group_B, std_floor=std * 0.99, eps=0.0)
    torch.testing.assert_close(low_B, torch.tensor([-1, 1, -1, 1]).double() * 0.5**0.5)
    high_B = group_normalized(rewards_B, group_B, std_floor=std * 1.01, eps=0.0)
    torch.testing.assert_close(high_B[:2], torch.tensor([-0.0005, 0.0005]).double())
    assert torch.equal(high_B[2:], low_B[2:])
    assert torch.equal(leave_one_out([0.0, 1.0], [0, 0], std=True), torch.tensor([-1.0, 1.0]))


def test_ddof_is_the_divisor():
    rewards_B, group_B = drawn((6,))
    for ddof in (0, 1, 2):
        std_B = group_deviation(rewards_B, group_B, ddof=ddof)[1]
        torch.testing.assert_close(std_B, rewards_B.std(correction=ddof).expand(6))


def test_gap_ignores_what_the_mask_hides_and_has_no_gradient():
    teacher_T = torch.tensor([-1.0, math.nan, -math.inf, -2.0], requires_grad=True)
    prox_T = torch.tensor([-3.0, -1.0, -math.inf, -0.5], requires_grad=True)
    gap_T = teacher_gap(teacher_T, prox_T, torch.tensor([1.0, 0.0, 0.0, 1.0]))
    assert gap_T.tolist() == [2.0, 0.0, 0.0, -1.5] and not gap_T.requires_grad
    assert gap_T.dtype == torch.float32


def test_student_as_its_own_teacher_has_advantage_zero():
    prox_T = torch.randn(50, generator=torch.Generator().manual_seed(1))
    advantage_T, metrics = gap_advantages(prox_T, prox_T.clone(), torch.ones(50), GAP)
    assert not advantage_T.any() and metrics["teacher/gap_mean"] == 0 and metrics["advantage/std"] == 0


def test_gap_metrics_count_only_tokens_inside_the_mask():
    teacher_T, prox_T = torch.tensor([-1.0, -60.0, -9.0, -1.0]), torch.tensor([-2.0, -10.0, -1.0, -0.5])
    mask_T, domain_T = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 2, 0, 0])
    advantage_T, metrics = gap_advantages(
        teacher_T, prox_T, mask_T, GAP, domain_T=domain_T, domains=["sums", "chess", "code"]
    )
    assert advantage_T.tolist() == [1.0, -20.0, 0.0, -0.5]
    assert metrics["teacher/gap_mean"] == pytest.approx((1 - 50 - 0.5) / 3)
    assert metrics["advantage/clip_share"] == pytest.approx(1 / 3)
    assert metrics["teacher/negative_share"] == pytest.approx(2 / 3)
    assert (metrics["advantage/min"], metrics["advantage/max"]) == (-20.0, 1.0)
    assert metrics["advantage/abs_p99"] == 20.0
    assert metrics["teacher/sums/gap_mean"] == 0.25 and metrics["teacher/code/gap_mean"] == -50
    assert "teacher/chess/gap_mean" not in metrics


def test_gap_of_nothing_is_finite():
    advantage_T, metrics = gap_advantages(torch.zeros(3), torch.ones(3), torch.zeros(3), GAP)
    assert not advantage_T.any() and all(math.isfinite(value) for value in metrics.values())


def test_impossible_token_is_clipped_and_not_a_number_is_refused():
    mask_T = torch.ones(2)
    advantage_T, _ = gap_advantages(torch.tensor([-math.inf, 0.0]), torch.zeros(2), mask_T, GAP)
    assert advantage_T.tolist() == [-20.0, 0.0]
    with pytest.raises(NonFiniteError, match="1 tokens"):
        gap_advantages(torch.tensor([math.nan, 0.0]), torch.zeros(2), mask_T, GAP)
    unclipped = AdvantageConfig(name="teacher_gap", clip=None)
    with pytest.raises(NonFiniteError, match="1 tokens"):
        gap_advantages(torch.tensor([-math.inf, 0.0]), torch.zeros(2), mask_T, unclipped)


def test_clip_counts_what_lies_outside():
    advantage_T = torch.tensor([-3.0, 2.0, 2.5, 0.0])
    clipped_T, share = clip_advantage(advantage_T, 2.0)
    assert clipped_T.tolist() == [-2.0, 2.0, 2.0, 0.0] and share == 0.5
    assert clip_advantage(advantage_T, 2.0, torch.tensor([0, 1, 1, 0]))[1] == 0.5
    assert clip_advantage(advantage_T, 2.0, torch.zeros(4))[1] == 0
    assert clip_advantage(advantage_T, None) == (advantage_T, 0.0)


def test_penalised_are_overwritten_after_normalising_and_before_clipping():
    wanted = overwrite_penalized(torch.tensor([1.0, 2.0]), torch.tensor([False, True]))
    assert wanted.tolist() == [1.0, -5.0]
    penalized_B, tight = torch.tensor([True, False]), AdvantageConfig(clip=3.0)
    result = rollout_advantages([group(1.0, 0.0)], tight, penalized_B=penalized_B)
    # -5 does not enter the other's baseline, and it is clipped.
    assert result.advantage_B.tolist() == [-3.0, -1.0] and result.metrics["advantage/clip_share"] == 0.5
    loose = AdvantageConfig(name="teacher_gap")
    advantage_T, _ = gap_advantages(
        torch.zeros(2), torch.ones(2), torch.tensor([1.0, 0.0]), loose, penalized_T=torch.ones(2)
    )
    assert advantage_T.tolist() == [-5.0, 0.0]


def test_soft_penalty_falls_in_a_straight_line_over_the_buffer():
    assert overlong_penalty([0, 6, 8, 9, 10, 12], 10, 4).tolist() == [0.0, 0.0, -0.5, -0.75, -1.0, -1.0]
    assert overlong_penalty([3, 10], 10, 10, factor=0.5).tolist() == [-0.15, -0.5]


def test_soft_penalty_changes_the_reward_before_the_baseline():
    config = AdvantageConfig(overlong="penalty", overlong_buffer=4)
    result = rollout_advantages([group(1.0, 1.0, lengths=[10, 2])], config, max_new_tokens=10)
    assert result.advantage_B.tolist() == [-1.0, 1.0]
    assert result.metrics["reward/mean"] == 1.0 and result.metrics["reward/overlong_penalty"] == -0.5


def test_filter_takes_cut_rollouts_out_of_the_loss_but_not_of_the_baseline():
    groups = [group(1.0, 0.0, 0.0, cut=[2]), group(0.0, 0.0)]
    result = rollout_advantages(groups, AdvantageConfig(overlong="filter"))
    assert result.keep_B.tolist() == [True, True, False, True, True]
    assert result.advantage_B.tolist() == [1.0, -0.5, -0.5, 0.0, 0.0]
    assert result.metrics["advantage/kept_share"] == 0.8 and result.metrics["advantage/mean"] == 0.125
    assert kept_rollouts(groups, AdvantageConfig()).all()


def test_all_cut_or_all_empty_is_finite():
    for rollouts in (group(0.0, 0.0, cut=[0, 1]), group(0.0, 0.0, lengths=[0, 0])):
        for config in (AdvantageConfig(overlong="filter", std=True), AdvantageConfig()):
            result = rollout_advantages([rollouts], config)
            assert not result.advantage_B.any()
            assert all(math.isfinite(value) for value in result.metrics.values())


def test_reward_metrics_by_group_and_domain():
    groups = [
        group(0.0, 0.0),
        group(1.0, 1.0),
        group(0.5, 0.5),
        group(1.0, 0.0, 1.0, 0.0, domain="chess"),
    ]
    metrics = reward_metrics(groups)
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/zero_std_share"] == 0.75
    assert metrics["reward/all_zero_share"] == metrics["reward/all_one_share"] == 0.25
    assert metrics["reward/sums/mean"] == 0.5 and metrics["reward/chess/mean"] == 0.5
    assert reward_metrics([group(1.0)])["reward/mean"] == 1.0


def test_groups_of_other_sizes_are_each_their_own():
    groups = [group(1.0, 0.0), group(1.0, 0.0, 0.0, 0.0), group(0.2, 0.2, 0.2)]
    result = rollout_advantages(groups, AdvantageConfig(name="group_mean"))
    assert result.advantage_B.tolist() == pytest.approx([0.5, -0.5, 0.75, -0.25, -0.25, -0.25, 0, 0, 0])
    assert result.advantage_B.dtype == torch.float32


def test_group_of_one_is_an_error_that_names_it():
    for function in (leave_one_out, group_normalized):
        with pytest.raises(ConfigError, match=r"group 9.*1 rollout.*at least 2"):
            function([1.0, 0.0, 1.0], [4, 9, 4])
    with pytest.raises(ConfigError, match=r"domain sums, problem 17.*rollout\.group_size"):
        rollout_advantages([group(1.0, 0.0), group(1.0, index=17)], AdvantageConfig())
    with pytest.raises(DataError, match="no group"):
        rollout_advantages([], AdvantageConfig())


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_named(reward):
    with pytest.raises(DataError, match=f"reward of rollout 1.*{reward}"):
        leave_one_out([1.0, reward], [0, 0])
    with pytest.raises(DataError, match=f"domain sums, problem 3: reward of rollout 2.*{reward}"):
        rollout_advantages([group(1.0, 0.0, reward, index=3)], AdvantageConfig())


def test_shapes_that_do_not_match_are_refused():
    with pytest.raises(DataError, match=r"\(3,\) and \(2,\)"):
        leave_one_out([1.0, 0.0, 1.0], [0, 0])
    with pytest.raises(DataError, match=r"\(2, 2\)"):
        group_normalized(torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(DataError, match="teacher and prox and mask"):
        teacher_gap(torch.zeros(3), torch.zeros(2), torch.zeros(3))
    with pytest.raises(DataError, match="advantage and penalized"):
        overwrite_penalized(torch.zeros(3), torch.zeros(2))


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf])
def test_bounds_must_be_above_zero(bound):
    with pytest.raises(ConfigError, match=r"advantage\.clip"):
        clip_advantage(torch.zeros(2), bound)
    with pytest.raises(ConfigError, match="std_floor"):
        leave_one_out([1.0, 0.0], [0, 0], std=True, std_floor=bound)
    for key in ("clip", "std_floor"):
        with pytest.raises(ValidationError, match=key):
            AdvantageConfig(**{key: bound})


@pytest.mark.parametrize("buffer", [0, -1, 11])
def test_overlong_buffer_must_fit_the_longest_answer(buffer):
    with pytest.raises(ConfigError, match=r"overlong_buffer.*10 tokens"):
        overlong_penalty([1, 2], 10, buffer)


def test_lengths_and_finish_reasons_are_checked():
    with pytest.raises(DataError, match="length of an answer"):
        overlong_penalty([3, -1], 10, 4)
    with pytest.raises(DataError, match="stop or length"):
        overlong_filter(["stop", "eos"])
    with pytest.raises(ConfigError, match="longest answer"):
        rollout_advantages([group(1.0, 0.0)], AdvantageConfig(overlong="penalty", overlong_buffer=2))


def test_each_source_of_advantages_refuses_the_other():
    with pytest.raises(ConfigError, match="teacher_gap"):
        rollout_advantages([group(1.0, 0.0)], GAP)
    with pytest.raises(ConfigError, match="leave_one_out"):
        gap_advantages(torch.zeros(1), torch.zeros(1), torch.ones(1), AdvantageConfig())


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"overlong": "penalty"}, "overlong_buffer"),
        ({"overlong_buffer": 3}, "has no effect"),
        ({"name": "teacher_gap", "std": True}, "std"),
        ({"name": "teacher_gap", "overlong": "penalty", "overlong_buffer": 3}, "overlong"),
        ({"name": "loo"}, "leave_one_out"),
        ({"cilp": 3}, "cilp"),
    ],
)
def test_config_refuses_what_would_have_no_effect(keys, named):
    with pytest.raises(ValidationError, match=named):
        AdvantageConfig(**keys)


# The advantage of the two right answers among four.
OPTION_FILES = {
    "leave_one_out": 2 / 3,
    "group_mean": 1 / 2,
    "group_std": 1 / 2 / (1 / 3) ** 0.5,
    "ultra_rlvr": 2 / 3 / (1 / 3) ** 0.5,
    "teacher_gap": None,
}


@pytest.mark.parametrize("name", sorted(OPTION_FILES))
def test_option_files_say_what_they_are_and_load(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    config = AdvantageConfig(**yaml.safe_load(text))
    assert text.startswith("# ") and config.clip == 20
    if name == "teacher_gap":
        assert config.name == name
    else:
        right = OPTION_FILES[name]
        advantage_B = rollout_advantages([group(1.0, 1.0, 0.0, 0.0)], config).advantage_B
        assert advantage_B.tolist() == pytest.approx([right, right, -right, -right], rel=3e-6)


def test_every_option_file_is_tested():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(OPTION_FILES)
