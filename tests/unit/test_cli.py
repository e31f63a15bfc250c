"""The front door: every flag, every exit code, no torch, no traceback, nothing left in the working folder."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import get_args

import pytest

from nemotron_ultra import train
from nemotron_ultra.config import sweep
from nemotron_ultra.config.compose import load_recipe, own_folder, read_config
from nemotron_ultra.config.requirements import Machine, check_requirements, shortfalls, this_machine
from nemotron_ultra.config.schema import hints
from nemotron_ultra.config.trainer import TrainerConfig
from nemotron_ultra.errors import BackendError, ConfigError

LAPTOP = Machine(cores=2, memory_bytes=16 * 10**9, gpus=())


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    """(exit code, stdout, stderr) of one command line in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = train.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_without_torch_and_without_a_trace(tmp_path):
    program = """
import sys
from nemotron_ultra.train import main
lines = [[], ["--help"], ["--help", "optim"], ["--list"], ["recipe=pretrain", "--cfg", "job"],
         ["recipe=pretrain", "--plan"], ["recipe=pretrain", "trainer.stpes=1"], ["recipe=nothing"],
         ["recipe=ultra_pretrain"], ["recipe=grpo", "--plan"], ["recipe=mopd", "--cfg"], ["--help", "loss"],
         ["recipe=sft", "tasks.only=[x]"], ["-m", "recipe=pretrain", "trainer.steps=1,x"]]
print([main(line) for line in lines], file=sys.stderr)
print(sorted({"torch", "transformers", "reasoning_gym"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines()[-2:] == ["[0, 0, 0, 0, 0, 0, 2, 2, 5, 0, 0, 0, 2, 2]", "[]"], done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_no_arguments_and_no_recipe(cli):
    code, out, err = cli()
    assert (code, err) == (0, "") and "recipe=pretrain" in out
    code, _, err = cli("trainer.steps=3")
    assert code == 2 and "needs a recipe" in err


def test_help_shows_recipes_options_and_every_key(cli):
    code, out, _ = cli("--help")
    assert code == 0
    for words in ("recipe=NAME", "ultra_long_context", "nano, super, tiny, ultra", "--eject NAME"):
        assert words in out
    assert "trainer.steps  (whole number > 0, required)\n      Optimizer steps of the whole run." in out
    assert "data.phases[].sources.NAME.weight  (number >= 0, default 1)" in out


def test_help_of_one_key_and_what_a_recipe_sets(cli):
    code, out, _ = cli("--help", "optim.lr", "recipe=ultra_pretrain")
    assert code == 0 and out.startswith("  optim.lr  (number > 0, required, here 0.00025)\n")
    assert "trainer.keep_last" not in out
    assert "wsd" in cli("--help", "schedule")[1]
    assert cli("recipe=pretrain", "--help")[1] == cli("--help", "recipe=pretrain")[1] == cli("-h")[1]
    code, _, err = cli("--help", "lr")
    assert code == 2 and "did you mean 'optim.lr'" in err


def test_cfg_is_yaml_that_reads_back(cli, tmp_path):
    code, out, _ = cli("recipe=pretrain", "trainer.steps=7", "--cfg", "job")
    (tmp_path / "config.yaml").write_text(out)
    assert code == 0 and read_config(tmp_path / "config.yaml") == load_recipe("pretrain", ["trainer.steps=7"])
    assert cli("recipe=pretrain", "--cfg", "hydra")[0] == 2


def test_plan_says_what_follows_and_whether_it_runs(cli):
    code, out, _ = cli("recipe=pretrain", "--plan")
    assert code == 0 and "parameters" in out and "this runs" in out
    code, out, _ = cli("recipe=ultra_pretrain", "--plan")
    assert code == 0 and "1,121,049,257,984 bytes in 51,023 tensors" in out and "794,728 steps" in out
    assert "this does not run, because" in out


def test_mistakes_end_with_code_2_and_one_line_each(cli, tmp_path):
    code, out, err = cli("recipe=pretrain", "model=ulta", "trainer.stpes=5", "optim.lr=-1")
    assert (code, out) == (2, "") and err.startswith("error: 3 mistakes in the configuration:\n")
    assert len(err.splitlines()) == 4 and not list(tmp_path.iterdir())
    assert cli("recipe=pretrian")[0] == 2
    code, _, err = cli("--lst")
    assert code == 2 and "unknown flag (did you mean '--list'?)" in err
    assert cli("recipe=pretrain", "--config-dir")[0] == 2


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("NEMOTRON_ULTRA_TRACEBACK", "1")
    with pytest.raises(ConfigError):
        train.main(["recipe=pretrian"])


@pytest.mark.parametrize("name", ["ultra_pretrain", "ultra_pretrain_phase2", "ultra_long_context"])
def test_a_recipe_for_a_cluster_says_what_it_needs(name):
    with pytest.raises(BackendError) as caught:
        check_requirements(load_recipe(name), LAPTOP)
    text = str(caught.value)
    assert "needs 1,536 nodes x 4 GB200 = 6,144 GPUs" in text
    assert "1.12 TB for weights, 2.24 TB for gradients, 6.73 TB for the optimizer" in text
    assert "here: 1 machine, no GPU, 2 CPU cores, 16 GB of memory" in text
    assert text.endswith("try recipe=pretrain") and caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["precision=nvfp4", "precision.weights=fp32"], "weights fp32, products in bf16 (MTP)"),
        (["precision=bf16", "precision.default=fp32"], "weights bf16, products in fp32"),
        (["engine=megatron"], "engine: needs megatron, this version has torch only"),
        (["engine.device=cuda"], "devices: needs a GPU (engine.device=cuda)"),
        (["trainer.weight_hash_every=5"], "trainer.weight_hash_every: the torch engine does not do this"),
        (
            ["cluster.gpus_per_node=2", "parallel.tensor=2"],
            "parallel: needs 2 processes, the torch engine runs",
        ),
        (["cluster.nodes=2"], "parallel: needs 2 processes"),
        (
            ["cluster.gpus_per_node=2", "trainer.micro_batch_size=4"],
            "devices: needs 1 node x 2 GPUs = 2 GPUs",
        ),
        (["model=nano"], "memory: needs 126 GB for weights"),
    ],
)
def test_what_this_version_cannot_do_is_refused(overrides, expected):
    found = list(shortfalls(load_recipe("pretrain", overrides), LAPTOP))
    assert any(expected in line for line in found), found


@pytest.mark.parametrize(
    "overrides", [[], ["precision=bf16"], ["precision=nvfp4"], ["schedule=cosine", "log=wandb"]]
)
def test_what_runs_here(overrides):
    assert list(shortfalls(load_recipe("pretrain", overrides), LAPTOP)) == []
    assert this_machine().cores >= 1


def test_the_run_starts_only_when_all_is_well(cli, monkeypatch):
    from nemotron_ultra.trainers import pretrain

    started = []
    monkeypatch.setattr(pretrain, "run", lambda config: started.append(config.trainer.steps) or 75)
    assert cli("recipe=pretrain", "trainer.steps=3")[0] == 75
    assert cli("recipe=pretrain", "engine=megatron")[0] == 5
    assert started == [3]


def test_each_trainer_has_its_module():
    names = get_args(hints(TrainerConfig)["name"])
    assert tuple(train.TRAINERS) == names
    assert all(callable(importlib.import_module(train.TRAINERS[name]).run) for name in names)


def test_sweep_names_each_run():
    runs = sweep.expand(
        ["recipe=pretrain", "optim.lr=1e-3,3e-3", "trainer.steps=5", "~run.dir", "run.seed=1,2"]
    )
    assert [suffix for suffix, _ in runs] == [
        "-lr0.001-seed1",
        "-lr0.001-seed2",
        "-lr0.003-seed1",
        "-lr0.003-seed2",
    ]
    assert runs[2][1] == ["recipe=pretrain", "optim.lr=0.003", "trainer.steps=5", "~run.dir", "run.seed=1"]
    assert [s for s, _ in sweep.expand(["recipe=a,b"])] == ["", ""]
    assert [s for s, _ in sweep.expand(["recipe=a,b", "run.name=x"])] == ["-recipea", "-recipeb"]
    first, *_ = sweep.expand(["trainer.steps=1,2", "other.steps=3,4"])
    assert first[0] == "-trainer.steps1-other.steps3"
    assert len(sweep.expand(["trainer.steps=range(1,4)"])) == 3
    with pytest.raises(ConfigError, match="no key has several values"):
        sweep.expand(["trainer.steps=5"])


def test_sweep_runs_one_after_another_and_reports_the_first_failure(cli, monkeypatch):
    commands, codes = [], iter([0, 6, 0])
    monkeypatch.setattr(train, "_run_one", lambda command: commands.append(command[3:]) or next(codes))
    code, out, err = cli("-m", "recipe=pretrain", "optim.lr=1e-3,2e-3,3e-3")
    assert code == 6 and "run 3 of 3: pretrain-lr0.003" in out
    assert "not finished: pretrain-lr0.002 (exit code 6)" in err
    assert commands[0] == ["recipe=pretrain", "optim.lr=0.001", "run.name=pretrain-lr0.001"]


def test_sweep_stops_where_a_run_was_told_to_save(cli, monkeypatch):
    monkeypatch.setattr(train, "_run_one", lambda command: 75)
    code, out, _ = cli("-m", "recipe=pretrain", "optim.lr=1e-3,2e-3")
    assert code == 75 and "run 2" not in out
    assert cli("-m", "recipe=pretrain", "optim.lr=1e-3,-1")[0] == 2, "checked before the first starts"
    assert cli("-m", "recipe=pretrain", "run.name=a,a")[0] == 2


def test_sweep_in_processes_of_its_own(tmp_path):
    command = [sys.executable, "-m", "nemotron_ultra.train", "-m", "recipe=pretrain", "run.seed=1,2", "--cfg"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "name: pretrain-seed1" in done.stdout and "name: pretrain-seed2" in done.stdout
    assert not list(tmp_path.iterdir())


def test_eject_copies_and_never_overwrites(cli, tmp_path):
    code, out, _ = cli("--eject", "pretrain")
    assert code == 0 and "use it with --config-dir ." in out and (tmp_path / "pretrain.yaml").is_file()
    code, _, err = cli("--eject", "pretrain")
    assert code == 2 and "nothing is overwritten" in err
    (tmp_path / "mine").mkdir()
    assert cli("--eject", "model/tiny", "--config-dir", "mine")[0] == 0
    assert (tmp_path / "mine" / "model" / "tiny.yaml").is_file()
    code, _, err = cli("--eject", "model/tinny")
    assert code == 2 and "did you mean 'model/tiny'" in err


def test_an_ejected_recipe_can_be_renamed_and_listed(cli, tmp_path):
    cli("--eject", "pretrain")
    (tmp_path / "pretrain.yaml").rename(tmp_path / "mine.yaml")
    assert "  mine " in cli("--list", "--config-dir", ".")[1]
    code, out, _ = cli("recipe=mine", "--config-dir=.", "--cfg")
    assert code == 0 and "recipe: mine" in out
    assert own_folder(None) is None


def test_a_folder_that_cannot_be_made_is_one_line(cli, monkeypatch):
    def no_room(config):
        raise FileNotFoundError(2, "No such file or directory", "/nowhere")

    monkeypatch.setattr(train, "_train", no_room)
    assert cli("recipe=pretrain") == (1, "", "error: /nowhere: No such file or directory\n")


@pytest.mark.skipif(os.name == "nt", reason="shell of POSIX")
@pytest.mark.parametrize(
    ("output", "code", "said"), [("| true", 0, ""), (">/dev/full", 1, "No space left on device\n")]
)
def test_output_that_cannot_be_written(output, code, said):
    """A reader that has gone is no error, a full disk is one line; the output is buffered until the end."""
    if "full" in output and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    line = f"(sleep 0.3; {sys.executable} -m nemotron_ultra.train --list; echo code $? >&2) {output}"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)
    assert done.stderr.endswith(f"{said}code {code}\n") and "Exception" not in done.stderr


@pytest.mark.parametrize("text", ["optim.lr=interval(0,1)", "optim.lr=glob(*)"])
def test_a_sweep_without_an_end_is_refused(text):
    with pytest.raises(ConfigError, match="names no values"):
        sweep.expand(["recipe=pretrain", text])
