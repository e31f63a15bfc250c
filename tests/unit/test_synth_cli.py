import json
import subprocess
import sys

import pytest

from nemotron_ultra import prep
from nemotron_ultra.config.compose import load_recipe
from nemotron_ultra.data.synthetic.gym import Gym, Spec
from nemotron_ultra.rl.environments import make_environments


def synth(out, *flags, count=240):
    return prep.main(["synth", "--out", str(out), "--count", str(count), *flags])


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_from_nothing_to_chats_and_prompts(tmp_path, capsys):
    out, prompts = tmp_path / "synth", tmp_path / "prompts"
    assert synth(out) == 0
    shown = capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    chats = lines(out / "chats.jsonl")
    assert len(chats) == manifest["samples"] >= 225 and "generate       240 in        240 out" in shown
    assert len(manifest["domains"]) >= 5 and min(manifest["families"].values()) > 100
    assert manifest["reasoned"] > 80
    for step, after in zip(manifest["steps"], manifest["steps"][1:], strict=False):
        assert step["in"] - sum(step["dropped"].values()) == step["out"] == after["in"]
    assert prep.main(["prompts", str(out / "prompts.jsonl"), "--out", str(prompts)]) == 0
    kept = json.loads((prompts / "manifest.json").read_text())
    assert kept["rows"] == len(chats) and not kept["dropped"]
    assert set(kept["environments"]) == {"reasoning_gym", "multiple_choice"}


def test_a_prompt_row_is_enough_to_score_an_answer(tmp_path):
    assert synth(tmp_path / "out", "--family", "generative", count=60) == 0
    for row in lines(tmp_path / "out" / "prompts.jsonl"):
        args = row["environment"]["args"]
        gym = Gym(Spec(args["name"], args["args"]), 0)
        assert gym.score(row["answer"], args["entry"]) == 1 > gym.score("nonsense", args["entry"])


def test_held_out_questions_are_not_made_again(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert synth(first, "--family", "generative", count=48) == 0
    flags = ("--held-out", str(first / "prompts.jsonl"), "--family", "generative")
    assert synth(second, *flags, count=96) == 0
    held_out = {row["messages"][0]["content"] for row in lines(first / "prompts.jsonl")}
    made = {row["messages"][0]["content"] for row in lines(second / "chats.jsonl")}
    assert not held_out & made and len(made) > 40
    steps = json.loads((second / "manifest.json").read_text())["steps"]
    # In groups this small some wording of a template counts as a repetition too.
    assert len(held_out) <= steps[5]["dropped"]["in the held-out texts"] <= len(held_out) + 4


def test_held_out_questions_of_tasks_are_not_made(tmp_path):
    sums = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    sums |= {"allow_parentheses": False, "allow_negation": False}
    spec = f"basic_arithmetic:{json.dumps(sums)}"
    flags = ("--generator", spec, "--family", "generative", "--held-out-tasks", "puzzles")
    assert synth(tmp_path / "out", *flags) == 0
    tasks = load_recipe("grpo", ["tasks=puzzles"]).tasks
    held_out = set(make_environments(tasks, seed=7)["sums"].questions)
    made = {row["messages"][0]["content"] for row in lines(tmp_path / "out" / "chats.jsonl")}
    steps = json.loads((tmp_path / "out" / "manifest.json").read_text())["steps"]
    assert steps[5]["dropped"]["in the held-out texts"] > 20 and made and not made & held_out
    assert steps[5]["examples"]["in the held-out texts"][0].startswith("s0000")


def test_the_same_command_again_and_another_into_the_same_folder(tmp_path, capsys):
    assert synth(tmp_path / "out", count=24) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert synth(tmp_path / "out", count=24) == 0
    assert "already complete" in capsys.readouterr().out
    assert synth(tmp_path / "out", "--seed", "1", count=24) == 3
    assert "made with other seed; got seed: 0 there, 1 here" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_bad_commands_say_what_is_allowed(tmp_path, capsys):
    cases = [
        (("--generator", "chain_sums"), 2, "did you mean chain_sum"),
        (("--generator", 'gcd:{"nonsense": 1}'), 2, "refuses its options"),
        (("--endpoint", "http://localhost:1"), 2, "--endpoint alone"),
        (("--topics", "x"), 2, "--endpoint URL --model M"),
        (("--options", "3"), 2, "allowed: 4 to 10"),
        (("--held-out", str(tmp_path / "none.txt")), 3, "input not found"),
        (("--generator", "propositional_logic"), 3, "the checks left no sample"),
    ]
    for number, (flags, status, words) in enumerate(cases):
        assert synth(tmp_path / str(number), *flags, count=12) == status
        error = capsys.readouterr().err
        assert words in error and "Traceback" not in error
        claimed = (tmp_path / str(number) / "job.json").exists()
        assert claimed == (number == len(cases) - 1)  # but for the last, mended options may use the folder


@pytest.mark.parametrize(
    "flag", ["--retries=-1", "--timeout=0", "--timeout=nan", "--temperature=-1", "--count=0"]
)
def test_numbers_out_of_range(tmp_path, capsys, flag):
    with pytest.raises(SystemExit) as stopped:
        synth(tmp_path / "out", "--endpoint", "http://localhost:1", "--model", "m", flag)
    assert stopped.value.code == 2 and f"argument {flag.partition('=')[0]}: " in capsys.readouterr().err


def test_without_the_extra_the_error_names_it(tmp_path):
    code = (
        "import sys; sys.modules['reasoning_gym'] = None; from nemotron_ultra import prep; "
        f"sys.exit(prep.main(['synth', '--out', {str(tmp_path / 'out')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 5 and "pip install 'nemotron-ultra[synth]'" in done.stderr
    assert "torch" not in done.stderr and not (tmp_path / "out").exists()
