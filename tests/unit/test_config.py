"""The types of the configuration: every rule that a value or a combination has to keep."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from pathlib import Path

import pytest

from nemotron_ultra.config.check import checked, lines_of
from nemotron_ultra.config.compose import load_recipe, to_dict
from nemotron_ultra.config.data import DataConfig
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.config.optim import OptimConfig, ScheduleConfig
from nemotron_ultra.config.parallel import ParallelConfig
from nemotron_ultra.config.precision import Nvfp4Config, PrecisionConfig
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.config.runtime import EngineConfig
from nemotron_ultra.config.schema import all_keys, field_texts, type_text
from nemotron_ultra.config.trainer import TrainerConfig
from nemotron_ultra.errors import ConfigError

MODEL = {"pattern": "MEM*EME", "vocab_size": 64, "hidden_size": 16, "n_routed_experts": 4}
TRAINER = {"steps": 2, "global_batch_size": 4, "micro_batch_size": 2}
TEXT = {"sources": {"text": {"path": "x"}}}

MISTAKES = [
    (ModelConfig, {**MODEL, "pattern": "MXE"}, "pattern: unknown letter 'X' in 'MXE'; allowed: M E * -"),
    (ModelConfig, {**MODEL, "pattern": ""}, "pattern: got ''"),
    (ModelConfig, {**MODEL, "num_attention_heads": 4, "num_key_value_heads": 3}, "4 is not divisible by"),
    (ModelConfig, {**MODEL, "mamba_num_heads": 4, "n_groups": 3}, "mamba_num_heads: 4 is not divisible"),
    (ModelConfig, {**MODEL, "num_experts_per_tok": 5}, "num_experts_per_tok: 5 is above n_routed_experts 4"),
    (ModelConfig, {**MODEL, "n_group": 3}, "n_routed_experts: 4 is not divisible by n_group 3"),
    (ModelConfig, {**MODEL, "conv_kernel": 1}, "conv_kernel: got 1; allowed: whole number >= 2"),
    (ModelConfig, {**MODEL, "hidden_size": "wide"}, "hidden_size: got 'wide'; allowed: whole number > 0"),
    (ModelConfig, {**MODEL, "hidden_size": True}, "hidden_size: got True; allowed: whole number > 0"),
    (ModelConfig, {**MODEL, "hidden_size": 16.5}, "hidden_size: got 16.5; allowed: whole number > 0"),
    (
        ModelConfig,
        {**MODEL, "time_step_limit": [1.0, 0.5]},
        "time_step_limit: not a lower and an upper end: [1.0, 0.5]",
    ),
    (ModelConfig, {**MODEL, "hiden_size": 3}, "hiden_size: unknown key, got 3 (did you mean 'hidden_size'?)"),
    (ModelConfig, {"pattern": "M", "vocab_size": 64}, "hidden_size: missing; allowed: whole number > 0"),
    (TrainerConfig, {**TRAINER, "micro_batch_size": 3}, "global_batch_size: 4 is not a multiple of"),
    (TrainerConfig, {**TRAINER, "steps": 0}, "steps: got 0; allowed: whole number > 0"),
    (
        TrainerConfig,
        {**TRAINER, "checkpoint_every": 4, "keep_every": 6},
        "keep_every: 6 is not a multiple of",
    ),
    (OptimConfig, {"lr": math.nan}, "lr: got nan"),
    (OptimConfig, {"lr": math.inf}, "lr: got inf"),
    (OptimConfig, {"lr": 1, "betas": [0.9, 1.0]}, "betas.1: got 1.0; allowed: number >= 0 and < 1"),
    (OptimConfig, {"lr": 1, "betas": [0.9]}, "betas"),
    (OptimConfig, {"lr": 1, "name": "adam"}, "name: got 'adam' (did you mean 'adamw'?); allowed: adamw"),
    (
        ScheduleConfig,
        {"name": "wsd", "warmup_tokens": 60, "decay_tokens": 50, "total_tokens": 100},
        "total_tokens: 100 is below warmup_tokens + decay_tokens = 110",
    ),
    (ScheduleConfig, {"name": "cosine", "decay_tokens": 5}, "decay_tokens: 5 has no effect with name=cosine"),
    (DataConfig, {}, "phases: missing; allowed: list of PhaseConfig"),
    (DataConfig, {"phases": [{"sources": {}}]}, "phases.0.sources: got {}; allowed: at least one"),
    (DataConfig, {"phases": [{"sources": {"a": {}}}]}, "phases.0.sources.a.path: missing; allowed: text"),
    (DataConfig, {"phases": [{**TEXT, "until_tokens": 5}]}, "the last phase has until_tokens 5"),
    (DataConfig, {"phases": [TEXT, TEXT]}, "only the last phase may have until_tokens null"),
    (
        DataConfig,
        {"phases": [{**TEXT, "until_tokens": 9}, {**TEXT, "until_tokens": 5}, TEXT]},
        "until_tokens must rise",
    ),
    (DataConfig, {"phases": [{"sources": {"a": {"path": "x", "weight": 0}}}]}, "all weights are 0"),
    (ParallelConfig, {"sequence": True}, "sequence: true has no effect with tensor 1"),
    (PrecisionConfig, {"name": "x", "default": "fp4"}, "default: got 'fp4'"),
    (
        PrecisionConfig,
        {"name": "x", "default": "fp4"},
        "(did you mean 'nvfp4'?); allowed: fp32 | bf16 | mxfp8",
    ),
    (PrecisionConfig, {"name": "x", "default": "bfloat16"}, "(did you mean 'bf16'?)"),
    (PrecisionConfig, {"name": "x", "default": "nvfp4"}, "nvfp4: null, but a rule uses the format"),
    (
        PrecisionConfig,
        {"name": "x", "rules": [{"match": "a*", "format": "bf16"}, {"match": "a*", "format": "fp32"}]},
        "rules.1: got fp32 for 'a*', rules.0 has bf16 for it; allowed: one format for one glob",
    ),
    (PrecisionConfig, {"name": "x", "last_share": 1.5}, "last_share: got 1.5; allowed: number >= 0 and < 1"),
    (
        PrecisionConfig,
        {"name": "x", "nvfp4": {"scale_rule": "four_over_six_mse", "hadamard": "none"}},
        "nvfp4.scale_rule: got four_over_six_mse with stochastic_rounding; allowed: te, te_2_13",
    ),
    (Nvfp4Config, {"scale_rule": "four_over_six_mae"}, "set hadamard=none and stochastic_rounding=none"),
    (Nvfp4Config, {"scale_rule": "te_2.13"}, "scale_rule: got 'te_2.13' (did you mean 'te_2_13'?)"),
    (
        EngineConfig,
        {"name": "torch", "megatron": {}},
        "megatron: these options have no effect with name=torch",
    ),
]


@pytest.mark.parametrize(("cls", "values", "expected"), MISTAKES, ids=lambda v: str(v)[:40])
def test_one_clear_line(cls, values, expected):
    with pytest.raises(ConfigError) as caught:
        checked(cls, values)
    assert "1 mistake in the configuration" in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize("written", [1000, 1e3, "1e3", "1000", "1_000"])
def test_numbers_in_any_spelling(written):
    trainer = checked(TrainerConfig, {**TRAINER, "steps": written})
    assert trainer.steps == 1000 and isinstance(trainer.steps, int)
    assert checked(OptimConfig, {"lr": str(written)}).lr == 1000.0


def test_large_token_counts_are_exact():
    assert checked(ScheduleConfig, {"name": "wsd", "total_tokens": "20e12"}).total_tokens == 20e12
    assert checked(TrainerConfig, {**TRAINER, "steps": "9007199254740993"}).steps == 9007199254740993


def test_infinity_only_where_it_means_something():
    assert checked(ModelConfig, {**MODEL, "time_step_limit": [0, "inf"]}).time_step_limit[1] == math.inf
    with pytest.raises(ConfigError):
        checked(TrainerConfig, {**TRAINER, "steps": math.inf})


def test_a_number_may_be_a_name():
    run = to_dict(pretrain())
    run["run"]["name"] = 12
    assert checked(RunConfig, run).run.name == "12"


@functools.cache
def pretrain() -> RunConfig:
    return load_recipe("pretrain")


def _run(**changes: object) -> dict:
    values = to_dict(pretrain())
    for path, value in changes.items():
        group, _, key = path.partition("__")
        values[group][key] = value
    return values


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schedule__warmup_tokens": 1e12}, "schedule.warmup_tokens: warmup + decay take"),
        ({"schedule__min_lr": 1.0}, "schedule.min_lr: 1 is above the peak optim.lr"),
        ({"parallel__tensor": 2}, "parallel: the layout needs 2 ranks, but cluster.gpus_per_node is 0"),
        ({"cluster__gpus_per_node": 3, "parallel__expert": 2}, "parallel: 3 GPUs"),
        ({"cluster__gpus_per_node": 3}, "is not a multiple of micro_batch_size 8 x data-parallel ranks 3"),
        ({"cluster__gpus_per_node": 4, "parallel__tensor": 4}, "parallel.tensor: 4 does not divide"),
        ({"data__phases": []}, "data.phases: got []; allowed: at least one with trainer.name=pretrain"),
        ({"run__name": "a/b"}, "run.name: got 'a/b'; allowed: letters"),
        ({"run__seed": -1}, "run.seed: got -1; allowed: whole number >= 0"),
    ],
)
def test_combinations_of_groups(changes, expected):
    with pytest.raises(ConfigError) as caught:
        checked(RunConfig, _run(**changes))
    assert expected in str(caught.value)


def test_all_mistakes_at_once_with_paths():
    values = _run(trainer__stpes=3, optim__lr=-1, model__pattern="Q", log__sinks=["wandbb"])
    with pytest.raises(ConfigError) as caught:
        checked(RunConfig, values)
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 mistakes in the configuration:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "model.pattern",
        "trainer.stpes",
        "optim.lr",
        "log.sinks.0",
    ]
    assert "did you mean 'steps'" in lines[2] and "did you mean 'wandb'" in lines[4]


def test_unknown_key_is_found_in_another_group():
    values = to_dict(pretrain())
    values["steps"] = 5
    with pytest.raises(ConfigError, match=r"steps: unknown key, got 5 \(did you mean 'trainer.steps'\?\)"):
        checked(RunConfig, values)


def test_every_key_has_a_text_and_a_readable_type():
    keys = list(all_keys())
    assert len(keys) > 120
    assert not [key.path for key in keys if not key.text.endswith((".", "null", "`"))]
    assert not [
        key for key in keys if "<" in key.type.replace("< ", "").replace("<= ", "") or "typing" in key.type
    ]
    assert field_texts(OptimConfig)["lr"] == "Peak learning rate."


def test_type_text_in_words():
    by_path = {key.path: key for key in all_keys()}
    assert by_path["trainer.steps"].type == "whole number > 0"
    assert by_path["schedule.total_tokens"].type == "number > 0 or null"
    assert by_path["log.sinks"].type == "list of wandb | tensorboard"
    assert by_path["data.phases[].sources.NAME.weight"].default_text == "1"
    assert by_path["engine.megatron"].default_text == "null"
    assert type_text(dict[str, int]) == "name: whole number"


def test_lines_of_is_usable_alone():
    from pydantic import TypeAdapter, ValidationError

    with pytest.raises(ValidationError) as caught:
        TypeAdapter(OptimConfig).validate_python({})
    assert lines_of(caught.value, OptimConfig) == ["lr: missing; allowed: number > 0"]


def test_reference_page_is_up_to_date():
    script = Path(__file__).resolve().parents[2] / "scripts" / "make_config_reference.py"
    assert subprocess.run([sys.executable, str(script), "--check"]).returncode == 0
