"""The configuration of SFT, GRPO and MOPD: the parts a trainer needs, and what has to agree between them."""

from __future__ import annotations

import dataclasses

import pytest

from nemotron_ultra.config.base import config
from nemotron_ultra.config.check import checked
from nemotron_ultra.config.compose import load_recipe, read_config, to_dict, to_yaml
from nemotron_ultra.config.plan import make_plan
from nemotron_ultra.config.requirements import Machine, check_requirements, shortfalls
from nemotron_ultra.config.run import RunConfig, RunOptions
from nemotron_ultra.config.schema import all_keys
from nemotron_ultra.config.tasks import TasksConfig
from nemotron_ultra.config.teachers import TeachersConfig
from nemotron_ultra.errors import BackendError, ConfigError

LAPTOP = Machine(cores=2, memory_bytes=16 * 10**9, gpus=())
TASKS = {"domains": {"sums": {"name": "chain_sum"}, "words": {"name": "equations", "weight": 3}}}


def mistakes(recipe: str, *overrides: str) -> list[str]:
    """The lines of the one error, without its first."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("sft", ["tasks=null"], "tasks: missing, trainer.name=sft needs it"),
        ("grpo", ["~rollout"], "rollout: missing, trainer.name=grpo needs it"),
        ("grpo", ["loss=null"], "loss: missing, trainer.name=grpo needs it"),
        ("mopd", ["~teachers"], "teachers: missing, trainer.name=mopd needs it"),
        ("pretrain", ["tasks=puzzles"], "tasks: has no effect with trainer.name=pretrain; leave it out, or"),
        (
            "sft",
            ["loss=dapo"],
            "loss: has no effect with trainer.name=sft; leave it out, or use grpo or mopd",
        ),
        (
            "grpo",
            ["teachers=puzzles"],
            "teachers: has no effect with trainer.name=grpo; leave it out, or use",
        ),
        (
            "sft",
            ["data=builtin"],
            "data.phases: has no effect with trainer.name=sft, which learns from tasks",
        ),
        ("pretrain", ["data=tasks"], "data.phases: got []; allowed: at least one with trainer.name=pretrain"),
        (
            "sft",
            ["trainer.name=stf"],
            "trainer.name: got 'stf' (did you mean 'sft'?); allowed: pretrain | sft",
        ),
        ("grpo", ["trainer.mtp_loss_scale=0.1"], "trainer.mtp_loss_scale: 0.1 has no effect"),
        ("grpo", ["loss.kl_coefficient=0.1"], "loss.kl_coefficient: got 0.1; allowed: 0"),
        ("grpo", ["loss=dapoo"], "loss: no option 'dapoo' (did you mean 'dapo'?); allowed: cispo, dapo"),
        ("grpo", ["loss.clip=[0.3,0.2]"], "loss.clip: got [0.3, 0.2]; allowed: [low, high]"),
        ("grpo", ["loss.tis=null", "loss.icepop=[5,0.5]"], "loss.icepop: got [5, 0.5]; allowed: [low, high]"),
        (
            "grpo",
            ["trainer.global_batch_size=64", "trainer.micro_batch_size=8"],
            "trainer.global_batch_size: 64 is not rollout.prompts_per",
        ),
        ("grpo", ["rollout.max_new_tokens=128"], "rollout.max_new_tokens: 128 leaves no room for a prompt"),
        (
            "grpo",
            ["rollout.group_size=1"],
            "rollout.group_size: got 1; advantage.name=leave_one_out compares",
        ),
        ("grpo", ["rollout.max_age=2"], "rollout.max_age: got 2; allowed: whole number >= 0 and <= 1"),
        ("grpo", ["rollout.temperature=0"], "rollout.temperature: got 0; allowed: number > 0"),
        (
            "grpo",
            ["loss=dapo", "rollout.temperature=0.7"],
            "rollout.temperature: 0.7 draws from another policy",
        ),
        ("grpo", ["advantage=teacher_gap"], "advantage.name: teacher_gap needs teachers, which"),
        ("mopd", ["advantage.name=group_mean", "rollout.group_size=2"], "advantage.name: got group_mean"),
        (
            "grpo",
            ["advantage.overlong=penalty", "advantage.overlong_buffer=25"],
            "advantage.overlong_buffer: 25 is above rollout.max_new_tokens 24",
        ),
        ("sft", ["tasks.only=[sumz]"], "tasks.only: no domain 'sumz' (did you mean 'sums'?)"),
        (
            "sft",
            ["tasks.domains.sums.environment=reasoning_gim"],
            "tasks.domains.sums.environment: got 'reasoning_gim' (did you mean 'reasoning_gym'?)",
        ),
        (
            "sft",
            ["tasks.domains.sums.weight=0"],
            "tasks.domains.sums.weight: got 0; allowed: number",
        ),
        (
            "mopd",
            ["~teachers.folders.sums"],
            "teachers.domains: no teacher for the domain 'sums'; add",
        ),
        (
            "mopd",
            ["teachers.domains.smus=sums"],
            "teachers.domains.smus: no such domain in tasks",
        ),
        (
            "mopd",
            ["teachers.domains.sums=smus"],
            "teachers.domains.sums: no teacher 'smus' (did you mean 'sums'?)",
        ),
        (
            "mopd",
            ["teachers.folders.sumss=runs/x"],
            "teachers.folders.sumss: teaches no domain (did you mean 'sums'?); allowed: sums, equations",
        ),
        (
            "mopd",
            ["teachers.strict=false", "teachers.default=sumss"],
            "teachers.default: no teacher 'sumss' (did you mean 'sums'?)",
        ),
        (
            "mopd",
            ["teachers.strict=false"],
            "teachers.default: strict=false needs a teacher; allowed: sums",
        ),
        (
            "mopd",
            ["teachers.default=sums"],
            "teachers.default: 'sums' has no effect with strict=true",
        ),
        ("grpo", ["run.from_=x"], "run.from_: unknown key, got 'x' (did you mean 'from'?)"),
    ],
)
def test_one_line_that_names_the_key(recipe, overrides, expected):
    found = mistakes(recipe, *overrides)
    assert len(found) == 1 and found[0].startswith(expected), found


def test_missing_parts_and_other_mistakes_come_together():
    found = mistakes("mopd", "~rollout", "loss=null", "~teachers", "optim.lr=-1", "trainer.stpes=3")
    assert [line.split(":")[0] for line in found] == [
        "rollout",
        "loss",
        "teachers",
        "trainer.stpes",
        "optim.lr",
    ]
    found = mistakes("grpo", "rollout.group_size=1", "rollout.max_new_tokens=999", "data=builtin")
    assert [line.split(":")[0] for line in found] == [
        "data.phases",
        "rollout.max_new_tokens",
        "rollout.group_size",
    ]


def test_a_value_computed_from_a_wrong_one_is_no_mistake_of_its_own():
    assert mistakes("grpo", "rollout.group_size=many") == [
        "rollout.group_size: got 'many'; allowed: whole number > 0"
    ]


def test_options_of_groups_that_may_be_missing(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "# Mine\ndefaults: [grpo, override loss: gspo, _self_]\nrollout: {group_size: 2}\n"
    )
    mine = load_recipe("mine", ["rollout.prompts_per_step=4"], tmp_path)
    assert mine.loss.ratio == "sequence" and mine.trainer.global_batch_size == 8
    assert load_recipe("mine", ["loss=dapo", "loss=cispo"], tmp_path).loss.cispo
    (tmp_path / "bare.yaml").write_text(
        "# Bare\ndefaults: [base, override trainer: sft, override data: tasks, _self_]\n"
    )
    assert (
        load_recipe("bare", ["tasks=puzzles", "schedule=constant"], tmp_path).tasks.validation_problems == 200
    )
    assert load_recipe("pretrain", ["tasks=null"]).tasks is None


def test_domains_that_are_trained_on():
    tasks = checked(TasksConfig, TASKS)
    assert list(tasks.trained) == ["sums", "words"] and tasks.trained["words"].weight == 3
    assert list(checked(TasksConfig, {**TASKS, "only": ["words"]}).trained) == ["words"]
    with pytest.raises(ConfigError, match=r"domains: got \{\}; allowed: at least one"):
        checked(TasksConfig, {"domains": {}})


def test_teacher_of_a_domain():
    folders = {"math": "runs/a", "other": "runs/b"}
    teachers = checked(TeachersConfig, {"folders": folders, "domains": {"sums": "math"}})
    assert [teachers.name_for(d) for d in ("sums", "math", "words")] == ["math", "math", None]
    lenient = checked(TeachersConfig, {"folders": folders, "strict": False, "default": "other"})
    assert [lenient.name_for(d) for d in ("math", "words")] == ["math", "other"]


def test_a_domain_left_out_of_training_needs_no_teacher():
    config = load_recipe("mopd", ["~teachers.folders.sums", "tasks.only=[equations]"])
    assert list(config.tasks.trained) == ["equations"]


def test_a_trailing_underscore_is_no_part_of_a_key(tmp_path):
    config = load_recipe("sft", ["run.from=runs/other"])
    assert config.run.from_ == "runs/other" and to_dict(config)["run"]["from"] == "runs/other"
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config
    assert dataclasses.replace(config.run, from_=None) == RunOptions(name="sft")
    assert "run.from" in [key.path for key in all_keys()]


def test_only_keys_of_fields_lose_an_underscore():
    @config
    class Named:
        class_: str
        places: dict[str, int]

    named = checked(Named, {"class": "a", "places": {"x_": 1}})
    assert to_dict(named) == {"class": "a", "places": {"x_": 1}}


def test_plan_of_runs_on_tasks_is_an_upper_bound():
    text = "\n".join(make_plan(load_recipe("grpo", ["tasks.only=[sums]"])).lines())
    assert "100 steps of at most 16,384 tokens" in text
    assert "16 prompts x 8 of at most 24 new tokens, 1 of 3 domains" in text
    assert "at most" not in "\n".join(make_plan(load_recipe("pretrain")).lines())
    plan = make_plan(load_recipe("mopd"))
    assert plan.copies == 4 and plan.copy_bytes == 4 * plan.weight_bytes
    assert make_plan(load_recipe("sft")).copies == 0


@pytest.mark.parametrize("recipe", ["sft", "grpo", "mopd"])
def test_runs_on_any_machine_and_says_what_to_try_elsewhere(recipe):
    assert list(shortfalls(load_recipe(recipe), LAPTOP)) == []
    with pytest.raises(BackendError, match=f"try the defaults of recipe={recipe} "):
        check_requirements(load_recipe(recipe, ["trainer.weight_hash_every=5"]), LAPTOP)
    big = dataclasses.replace(load_recipe(recipe, ["engine=megatron"]), recipe="ultra_big")
    with pytest.raises(BackendError, match=f"try recipe={recipe}$"):
        check_requirements(big, LAPTOP)


def test_a_run_of_an_earlier_version_has_none_of_the_new_parts():
    values = to_dict(load_recipe("pretrain"))
    for key in ("tasks", "rollout", "loss", "advantage", "teachers"):
        del values[key]
    del values["trainer"]["name"]
    assert checked(RunConfig, values) == load_recipe("pretrain")


def test_vllm_is_asked_for_before_anything_is_built():
    lines = list(shortfalls(load_recipe("grpo", ["rollout.generator=vllm"]), LAPTOP))
    assert len(lines) == 1 and "rollout.generator: vllm is not installed" in lines[0]


def test_drafts_need_an_mtp_module():
    assert load_recipe("grpo", ["rollout.draft_tokens=3"]).rollout.draft_tokens == 3
    (line,) = mistakes("grpo", "rollout.draft_tokens=3", "model.num_nextn_predict_layers=0")
    assert "rollout.draft_tokens: 3 needs a model with an MTP module" in line
