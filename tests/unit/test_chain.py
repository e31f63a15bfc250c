"""Chain files: stages in order, overrides where they belong, links, and every mistake as one clear error."""

import subprocess
import sys

import pytest
import yaml

from nemotron_ultra import pipeline
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.trainers.chain import Override, load_chain, plan_lines, quoted

DOMAINS = ["sums", "equations"]
STAGES = [
    {"name": "pretrain", "recipe": "pretrain"},
    {"name": "sft", "recipe": "sft", "from": "pretrain"},
    {"name": "student", "recipe": "grpo", "from": "sft", "overrides": ["trainer.steps=7"]},
    {
        "name": "teacher_{domain}",
        "recipe": "grpo",
        "from": "student",
        "overrides": ["tasks.only=[{domain}]"],
    },
    {"name": "mopd", "recipe": "mopd", "from": "student", "teachers": "teacher_{domain}"},
]
COMMON = ["rollout.max_new_tokens=9", "optim.lr=1e-3"]


def chain_folder(tmp_path, **changes):
    """A --config-dir with the chain `mine`."""
    content = {"domains": DOMAINS, "common": COMMON, "stages": STAGES} | changes
    (tmp_path / "chains").mkdir(exist_ok=True)
    (tmp_path / "chains" / "mine.yaml").write_text("# Stages for a test\n" + yaml.safe_dump(content))
    return tmp_path


def mine(tmp_path, *overrides, **changes):
    narrow = ["tasks.only=[sums,equations]", "teacher_*:tasks.only=[sums]"]
    return load_chain("mine", [*narrow, *overrides], chain_folder(tmp_path, **changes))


def changed(number, **changes):
    return [stage | changes if i == number else stage for i, stage in enumerate(STAGES)]


def test_stages_are_expanded_and_linked(tmp_path):
    chain = mine(tmp_path, "run.dir=somewhere")
    names = ["pretrain", "sft", "student", "teacher_sums", "teacher_equations", "mopd"]
    assert [stage.name for stage in chain.stages] == names
    assert chain.student.name == "student" and chain.mopd.name == "mopd"
    mopd = chain.mopd.config
    assert mopd.run.from_ == "somewhere/mine/student" and mopd.run.dir == "somewhere/mine"
    assert mopd.teachers.folders == {d: f"somewhere/mine/teacher_{d}" for d in DOMAINS}
    assert chain.stages[0].config.run.from_ is None and chain.max_new_tokens == 9


def test_an_override_goes_where_its_group_is(tmp_path):
    chain = mine(tmp_path, "rollout.group_size=4", "student:trainer.steps=3", "run.seed=5", "run.name=other")
    by_name = {stage.name: stage.config for stage in chain.stages}
    assert by_name["pretrain"].rollout is None and by_name["student"].rollout.group_size == 4
    assert by_name["student"].trainer.steps == 3 != by_name["sft"].trainer.steps
    assert {config.run.seed for config in by_name.values()} == {5}
    assert chain.folder.parts == ("runs", "other") and by_name["sft"].optim.lr == 1e-3


def test_commands_are_those_of_the_train_entry_point(tmp_path):
    lines = plan_lines(mine(tmp_path))
    student = next(line for line in lines if "run.name=student" in line)
    assert student.startswith("   python -m nemotron_ultra.train recipe=grpo ")
    assert "run.from=runs/mine/sft" in student and f"--config-dir={tmp_path}" in student


def test_shipped_chain_composes():
    chain = load_chain("tiny")
    assert [stage.config.trainer.name for stage in chain.stages] == ["pretrain", "sft", *["grpo"] * 4, "mopd"]
    assert set(chain.mopd.teachers) == set(chain.domains) == set(chain.mopd.config.tasks.domains)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages": changed(1, **{"from": "pretrian"})}, "sft: from 'pretrian' is no stage.*'pretrain'"),
        (
            {"stages": changed(0, **{"from": "sft"})},
            r"leads back to itself \(pretrain from sft from pretrain\)",
        ),
        ({"stages": [STAGES[1], STAGES[0]]}, "starts from pretrain, which comes later"),
        ({"stages": [STAGES[0], STAGES[0]]}, "two are named pretrain"),
        ({"stages": []}, "stages: .*allowed: at least one"),
        ({"domains": []}, r"domains: got \[\].*the stage 'teacher_\{domain\}' stands for"),
        ({"stages": changed(1, recipe="stf")}, "stage sft: recipe: no recipe 'stf'.*'sft'"),
        ({"stages": changed(1, steps=4)}, "stages.1.steps: unknown key"),
        (
            {"stages": changed(4, teachers="tutor_{domain}")},
            "its teacher 'tutor_sums' is no stage before",
        ),
        ({"domains": ["sums", "equation"]}, "no domain 'equation'.*'equations'"),
        ({"common": ["optim.lr=abc"]}, "stage pretrain: .*optim.lr"),
        (
            {"stages": changed(2, overrides=["tasks.validation_problems=9"])},
            "tasks: all stages are scored on the same .*other tasks in student than in sft",
        ),
    ],
)
def test_mistakes_in_the_file(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        mine(tmp_path, **changes)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cluster.nodez=4", "stage pretrain: .*cluster.nodez: unknown key"),
        ("pretrain:rollout.group_size=4", "no stage that it is meant for has such a group"),
        ("studnet:trainer.steps=4", "no stage 'studnet'.*'student'"),
        ("run.from=x", "the chain itself sets this key"),
        ("recipe=sft", "the chain itself sets this key"),
        ("student:recipe=sft", "the chain itself sets this key"),
        ("steps", "steps: not an override"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, override, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        mine(tmp_path, override)


def test_a_colon_in_a_value_names_no_stage():
    assert Override.parse("data.tokenizer=a:b") == Override("data.tokenizer=a:b", "*")
    assert Override.parse("sft:data.tokenizer=a:b") == Override("data.tokenizer=a:b", "sft")


def test_paths_are_quoted_for_the_grammar(tmp_path):
    assert quoted("runs/a-b_c.d") == "runs/a-b_c.d"
    chain = mine(tmp_path, "run.dir='it\\'s a, {folder}'")
    assert chain.stages[1].config.run.from_ == "it's a, {folder}/mine/pretrain"


def test_list_plan_and_help(tmp_path, capsys):
    folder = f"--config-dir={chain_folder(tmp_path)}"
    assert pipeline.main(["--list", folder]) == 0 and "Stages for a test" in capsys.readouterr().out
    assert pipeline.main([]) == 0 and pipeline.main(["--help"]) == 0
    assert "exit status 75" in capsys.readouterr().out
    assert pipeline.main(["chain=tiny", "--plan", f"run.dir={tmp_path}"]) == 0
    assert "7. mopd  (mopd, from student" in capsys.readouterr().out and not (tmp_path / "tiny").exists()


@pytest.mark.parametrize("call", ["pipeline.main(['chain=tiny', '--plan'])", "evaluate.main(['nowhere'])"])
def test_plans_and_mistakes_need_no_torch(call, tmp_path):
    code = (
        f"import sys; from nemotron_ultra import evaluate, pipeline; {call}; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chain=tny"], "no chain 'tny' (did you mean 'tiny'?)"),
        (["run.seed=3"], "name one chain; allowed: chain=NAME of bf16_gradients, nvfp4_gap, tiny"),
        (["chain=tiny", "--pln"], "--pln: unknown flag (did you mean '--plan'?)"),
        (["chain=tiny", "--config-dir", "/nowhere"], "--config-dir: no such folder"),
    ],
)
def test_mistakes_of_the_command(words, said, capsys):
    assert pipeline.main(words) == 2
    assert said in capsys.readouterr().err
