import json
import re
from collections import Counter

import pytest

from nemotron_ultra.data.inputs import find_files
from nemotron_ultra.data.ngrams import HeldOut
from nemotron_ultra.data.synthetic.explain import RULES, explain
from nemotron_ultra.data.synthetic.gym import DEFAULT, Gym, Spec, domain_of
from nemotron_ultra.data.synthetic.shapes import (
    Compose,
    Format,
    Schema,
    json_schema,
    parse_object,
    without_form,
)
from nemotron_ultra.data.synthetic.similar import Clean, Unique
from nemotron_ultra.data.synthetic.steps import Drop
from nemotron_ultra.data.synthetic.wrong import wrong_answers
from nemotron_ultra.errors import ConfigError


def sample(question="What is 2 + 2?", answer="4", wrong=("3", "5", "6"), number=0, **fields):
    made = {"question": question, "answer": answer, "reasoning": "", **fields}
    row = {"id": f"s{number}", "generator": "g", "domain": "d", "environment": None, "family": "generative"}
    if wrong is not None:
        made["wrong_answers"] = list(wrong)
        row |= {"family": "mcq", "options": 4}
    return row | {"sample": made}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def worked(step, rows, tmp_path):
    step.open(write(tmp_path / "source.jsonl", rows), [])
    return step.work(rows)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ('<think>\nhm {\n</think>\n{"a": 1}', {"a": 1}),
        ('Sure! {"a": 1}', "the answer is not JSON"),
        ('{"a": 1} {"a": 2}', "the answer is not JSON"),
        ("[1]", "the answer is not a JSON object"),
        ("", "the answer is not JSON"),
    ],
)
def test_only_one_json_object_is_the_right_format(text, found):
    made = parse_object(text)
    assert (made.reason if isinstance(made, Drop) else made) == found


def test_an_answer_that_was_cut_off_is_not_read():
    row = {"id": "s0", "raw": {"text": '{"a": 1}', "finish": "length"}}
    assert Format().work([row])[0].reason == "the answer was cut off"
    assert Format().work([row | {"raw": {"question": "\ud800"}}])[0].reason.startswith("half of a surrogate")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"question": " "}, "schema: question"),
        ({"answer": 4}, "schema: answer"),
        ({"reasoning": None}, "schema: reasoning"),
        ({"more": "x"}, "schema: more"),
        ({"wrong_answers": "3"}, "schema: wrong_answers"),
        ({"wrong_answers": ["3", "5", " 4 "]}, "two options are the same"),
        ({"wrong_answers": ["Yes", "5", "yes"]}, "two options are the same"),
        ({"wrong_answers": ["3", "5"]}, "too few wrong answers"),
    ],
)
def test_samples_that_break_the_schema(change, reason):
    row = sample()
    row["sample"] |= change
    assert Schema().work([row])[0].reason == reason


def test_a_question_with_too_few_wrong_answers_for_ten_options_has_four():
    row = sample(wrong=[str(n) for n in range(10, 16)]) | {"options": 10}
    assert len(Schema().work([row])[0]["sample"]["wrong_answers"]) == 3
    row = sample(wrong=[str(n) for n in range(10, 19)]) | {"options": 10}
    assert len(Schema().work([row])[0]["sample"]["wrong_answers"]) == 9


def test_the_schema_for_endpoints_names_every_field():
    made = json_schema("mcq", 10)
    assert made["required"] == list(made["properties"]) and made["additionalProperties"] is False
    assert made["properties"]["wrong_answers"]["minItems"] == 9
    assert "wrong_answers" not in json_schema("generative", 0)["properties"]


def test_letters_are_right_equally_often_and_lead_to_the_answer():
    rows = [sample(f"q{n}", f"right {n}", ("x", "y", "z"), n, reasoning="because") for n in range(80)]
    step = Compose(seed=3)
    step.open(None, [])
    first = step.work(rows[:33])
    resumed = Compose(seed=3)
    resumed.open(None, first)
    made = first + resumed.work(rows[33:])
    assert Counter(row["prompt"]["answer"] for row in made) == dict.fromkeys("ABCD", 20)
    for number, row in enumerate(made):
        question, answer = row["chat"]["messages"]
        args = row["prompt"]["environment"]["args"]
        letter = re.search(args["pattern"], answer["content"]).group(1)
        assert letter == row["prompt"]["answer"] and args["options"][letter] == f"right {number}"
        assert f"right {number}" in question["content"] and answer["reasoning_content"] == "because"


def test_questions_twice_and_nearly_twice(tmp_path):
    wording = "Please look at this carefully and then say in one word what the following is about: "
    texts = [wording + f"w{i} x{i} y{i} z{i} k{i} l{i} m{i} n{i} o{i} p{i} q{i}" for i in range(30)]
    texts += [texts[3].upper() + "!", texts[4] + " and", wording + "something else entirely"]
    results = worked(Unique(0.8), [sample(text, number=n) for n, text in enumerate(texts)], tmp_path)
    dropped = {n: (r.reason, r.detail.split(",")[0]) for n, r in enumerate(results) if isinstance(r, Drop)}
    assert dropped == {
        30: ("the same question again", "s3"),
        31: ("nearly the same question again", "s4"),
    }


def test_what_was_kept_before_a_resume_still_counts(tmp_path):
    rows = [sample(f"one two three four {n} five six seven eight", number=n) for n in (0, 1, 0)]
    source = write(tmp_path / "source.jsonl", rows)
    step = Unique(0.99)
    step.open(source, rows[:2])
    assert step.work([rows[2] | {"id": "s9"}]) == [Drop("the same question again", "s0")]


def test_sums_of_different_numbers_are_different_questions(tmp_path):
    rows = [sample(f"Calculate {a} + {b}.", number=10 * a + b) for a in range(9) for b in range(9)]
    assert worked(Unique(0.8), rows, tmp_path) == rows


def test_questions_of_held_out_texts_leave(tmp_path):
    long = " ".join(f"word{n}" for n in range(20))
    (tmp_path / "held.txt").write_text(f"{long}\nCalculate 3 + 4.\n")
    held_out = HeldOut(find_files([str(tmp_path / "held.txt")], tmp_path / "out"), 13)
    rows = ["calculate 3 + 4", "Calculate 3 - 4.", "so: " + " ".join(long.split()[4:18]), "word1 word2"]
    results = worked(Clean(held_out), [sample(text, number=n) for n, text in enumerate(rows)], tmp_path)
    assert [isinstance(result, Drop) for result in results] == [True, False, True, False]
    assert results[0].detail == "held.txt:2" and results[2].detail == "held.txt:1"


@pytest.mark.parametrize("name", sorted({*DEFAULT, *RULES}))
def test_answers_are_right_steps_end_in_them_and_wrong_ones_are_wrong(name):
    gym = Gym(Spec(name), 5)
    reasoned = 0
    for number in range(8):
        made = gym.make(number, 9, str(number))
        raw, entry = made["raw"], made["entry"]
        assert gym.score(raw["answer"], json.loads(json.dumps(entry))) == 1
        assert len(raw["wrong_answers"]) >= 3 and raw["answer"] not in raw["wrong_answers"]
        assert all(gym.score(text, entry) < 1 for text in raw["wrong_answers"])
        reasoned += bool(raw["reasoning"])
    assert reasoned == 8 or name not in RULES or name == "basic_arithmetic"


def test_a_question_with_options_does_not_ask_for_a_bare_answer():
    texts = {
        "Find the GCD of 6, 4. Give only the GCD as your final answer.": "Find the GCD of 6, 4.",
        'Who is a?\n(Format your answer like: "x is a")': "Who is a?",
        "How is A related to B? Provide the relationship in one word.": "How is A related to B?",
        "Factor 12. Write the factors separated by × (for 4: 2 × 2)": "Factor 12.",
        "State the final answer: (3 + 4)": "State the final answer: (3 + 4)",
        "Give only a number.": "Give only a number.",
    }
    assert {text: without_form(text) for text in texts} == texts


def test_steps_that_end_elsewhere_are_none():
    entry = {"metadata": {"expression": "3 + 4 - 2"}, "answer": "5"}
    assert explain("chain_sum", entry) == "3 + 4 = 7\n7 - 2 = 5"
    assert explain("chain_sum", entry | {"answer": "6"}) == ""
    assert explain("basic_arithmetic", {"metadata": {"expression": "( 3 + 4 ) * 2"}, "answer": "14"}) == ""
    assert explain("knights_knaves", entry) == ""


def test_the_same_seed_gives_the_same_problems_and_another_gives_others():
    first, again, other = (Gym(Spec("chain_sum"), seed) for seed in (1, 1, 2))
    makes = [[gym.make(n, 3, str(n)) for n in range(20)] for gym in (first, again, other)]
    assert makes[0] == makes[1]
    questions = [{made["raw"]["question"] for made in row} for row in makes]
    assert len(questions[0] & questions[2]) <= 1
    assert first.make(499, 3, "k") == Gym(Spec("chain_sum"), 1).make(499, 3, "k")


def test_near_misses_and_answers_of_few_words():
    near = wrong_answers("12", [], 9, "k", lambda text: text == "13")
    assert {"11", "10", "14", "22", "2", "21"} == set(near)
    family = wrong_answers("aunt", ["uncle", "father", "uncle", "son"] * 3, 9, "k", lambda text: False)
    assert sorted(family) == ["father", "son", "uncle"]


def test_wrong_answers_on_the_island_are_about_the_same_people():
    made = Gym(Spec("knights_knaves"), 0).make(3, 9, "k")
    names = made["entry"]["metadata"]["names"]
    assert len(made["raw"]["wrong_answers"]) == 3
    assert all(name in text for name in names for text in made["raw"]["wrong_answers"])


@pytest.mark.parametrize("text", ["chain_sums", "chain_sum:{", "chain_sum:[]", 'chain_sum:{"seed": 1}'])
def test_generators_that_are_none(text):
    with pytest.raises(ConfigError):
        Spec.parse(f"reasoning_gym:{text}")


def test_options_a_generator_refuses_are_named():
    assert domain_of("gcd") == "arithmetic"
    spec = Spec.parse('gcd:{"min_numbers": 2}')
    assert Spec.parse(spec.text()) == spec
    with pytest.raises(ConfigError, match="generator gcd refuses its options"):
        Gym(Spec("gcd", {"nonsense": 1}), 0)
