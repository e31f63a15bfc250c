"""Held-out scores: one answer a problem, a function of weights and seed alone; files; the command."""

import json
from dataclasses import replace

import pytest

from micro import micro_model
from nemotron_ultra import evaluate as command
from nemotron_ultra.config.compose import load_recipe, to_yaml
from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.engine.checkpoint import save_checkpoint
from nemotron_ultra.errors import CheckpointError, ConfigError, DataError
from nemotron_ultra.generation import Completion, Sampler
from nemotron_ultra.model.hf_folder import save_model
from nemotron_ultra.rl.environments import make_environments
from nemotron_ultra.trainers.evaluation import (
    answer_held_out,
    evaluate,
    prompt_of,
    read_json,
    score_weights,
    write_json,
)

TASKS = replace(load_recipe("sft").tasks, validation_problems=4)


@pytest.fixture(scope="module")
def chat():
    return ChatTemplate(load_tokenizer("builtin"))


@pytest.fixture(scope="module")
def environments():
    return make_environments(TASKS, 7)


@pytest.fixture(scope="module")
def model():
    return micro_model(vocab_size=4096)


class Scholar:
    """A generator that knows every answer, and ends it or not."""

    version = 0

    def __init__(self, chat, environments, ends=True):
        held_out = [env.held_out(i) for env in environments.values() for i in range(4)]
        self.answers = {tuple(prompt_of(chat, p)): chat.tokenizer.encode(p.answer) for p in held_out}
        self.stop, self.ends = chat.stop_ids[0], ends

    def load_weights(self, weights, version): ...

    def generate(self, prompts, *, max_new_tokens, temperature=1.0, stop_ids=(), seeds=None):
        assert len(set(seeds)) == len(prompts) and temperature == TASKS.validation_temperature
        end, reason = ([self.stop], "stop") if self.ends else ([], "length")
        found = [self.answers[tuple(prompt)] + end for prompt in prompts]
        return [Completion(tokens=ids, logprobs=[0.0] * len(ids), finish_reason=reason) for ids in found]


def test_right_answers_have_full_marks_and_cut_ones_none(chat, environments):
    settings = {"max_new_tokens": 9, "seed": 1}
    assert evaluate(Scholar(chat, environments), chat, environments, TASKS, **settings) == dict.fromkeys(
        environments, 1.0
    )
    unfinished = Scholar(chat, environments, ends=False)
    assert set(evaluate(unfinished, chat, environments, TASKS, **settings).values()) == {0.0}


def test_an_answer_depends_on_its_problem_and_the_seed_alone(chat, environments, model):
    def answers(of, seed, count=4):
        tasks = replace(TASKS, validation_problems=count)
        return answer_held_out(Sampler(model), chat, of, tasks, max_new_tokens=6, seed=seed)

    all_answers = answers(environments, 3)
    last = list(environments)[-1]
    assert [a for a in all_answers if a.domain == last][:2] == answers({last: environments[last]}, 3, 2)
    assert [a.text for a in all_answers] != [a.text for a in answers(environments, 4)]


def config(tmp_path, *more, recipe="sft"):
    micro = ["trainer.steps=2", "tasks.validation_problems=3", f"run.dir={tmp_path}"]
    return load_recipe(recipe, [*micro, *more] if recipe == "sft" else [micro[0], micro[2], *more])


def run_folder(tmp_path, model, recipe="sft"):
    """A run with one checkpoint at step 2."""
    folder = tmp_path / recipe
    save_checkpoint(folder, 2, {}, save_weights=lambda path: save_model(model, path))
    (folder / "config.yaml").write_text(to_yaml(config(tmp_path, recipe=recipe)))
    (folder / "run.json").write_text(json.dumps({"recipe": recipe}))
    return folder


def test_scores_of_a_run_and_of_its_weights_are_equal(tmp_path, model):
    folder = run_folder(tmp_path, model)
    of_run = score_weights(folder, config(tmp_path), max_new_tokens=5)
    bare = score_weights(folder / "checkpoints/step_00000002/model", config(tmp_path), max_new_tokens=5)
    assert (of_run.step, bare.step) == (2, None)
    assert of_run.scores == bare.scores and of_run.answers == bare.answers and len(of_run.answers) == 9


def test_what_cannot_be_scored(tmp_path, model):
    with pytest.raises(CheckpointError, match="no such folder"):
        score_weights(tmp_path / "nothing", config(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        (tmp_path / "empty" / "run.json").write_text("{}")
        score_weights(tmp_path / "empty", config(tmp_path))
    save_model(micro_model(), tmp_path / "small")
    with pytest.raises(ConfigError, match="64 rows for 4096 ids"):
        score_weights(tmp_path / "small", config(tmp_path))
    save_model(model, tmp_path / "whole")
    with pytest.raises(DataError, match="leaves no room for an answer"):
        score_weights(tmp_path / "whole", config(tmp_path, "data.sequence_length=9"))


def test_files_are_whole_or_absent(tmp_path):
    path = write_json(tmp_path / "a.json", {"b": 1})
    assert read_json(path) == {"b": 1} and [p.name for p in tmp_path.iterdir()] == ["a.json"]
    path.write_text('{"b": 1')
    assert read_json(path) is None and read_json(tmp_path / "none.json") is None
    (tmp_path / "taken.json").mkdir()
    with pytest.raises(DataError, match="cannot write"):
        write_json(tmp_path / "taken.json", {})


def test_command_prints_a_table_and_writes_scores(tmp_path, model, capsys):
    folder = run_folder(tmp_path, model)
    assert command.main([str(folder), "--problems", "2", "tasks.validation_temperature=0.5"]) == 0
    out = capsys.readouterr().out
    assert f"{folder} at step 2: 2 held-out problems a domain, temperature 0.5" in out
    found = json.loads((folder / "scores.json").read_text())
    assert list(found["scores"]) == list(TASKS.domains) and found["settings"]["problems"] == 2
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 6


def test_command_on_weights_writes_nothing(tmp_path, model, capsys):
    save_model(model, tmp_path / "weights")
    words = [str(tmp_path / "weights"), "recipe=sft", "--problems=1", "--max-new-tokens=3"]
    assert command.main(words) == 0 and "mean" in capsys.readouterr().out
    assert not (tmp_path / "weights" / "scores.json").exists()


def test_command_gives_a_run_without_tasks_some(tmp_path, model, capsys):
    folder = run_folder(tmp_path, model, recipe="pretrain")
    assert command.main([str(folder)]) == 2
    assert "has no tasks to be scored on; score it on those of a recipe" in capsys.readouterr().err
    words = ["recipe=sft", "tasks.validation_problems=1", "--problems=2", "--max-new-tokens=3"]
    assert command.main([str(folder), *words]) == 0
    assert "only the first 1 of them were kept out of training" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{}/nowhere"], "is not a folder"),
        (["{}"], "holds runs and is none itself; name one: "),
        (["{}/weights"], "is not a run: it has no config.yaml"),
        (["{}/sft", "tasks=pzzles"], "tasks: no option 'pzzles' (did you mean 'puzzles'?)"),
        (["{}/sft", "tasks.validation_problms=3"], "tasks.validation_problms: unknown key"),
        (["{}/sft", "steps"], "steps: not an override"),
    ],
)
def test_command_mistakes(tmp_path, words, said, capsys):
    (tmp_path / "sft").mkdir()
    (tmp_path / "weights").mkdir()
    (tmp_path / "sft" / "config.yaml").write_text(to_yaml(config(tmp_path)))
    (tmp_path / "sft" / "run.json").write_text("{}")
    assert command.main([word.format(tmp_path) for word in words]) == 2
    assert said in capsys.readouterr().err


def test_only_the_run_is_required(capsys):
    with pytest.raises(SystemExit):
        command.main([])
    assert capsys.readouterr().err.startswith("error: the following arguments are required: RUN; ")
