"""Recipes and overrides into a RunConfig: what composes, what is refused, and that nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron_ultra.config import compose, schema
from nemotron_ultra.config.check import checked
from nemotron_ultra.config.compose import load_recipe, options, read_config, read_yaml, share_dir, to_yaml
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.errors import ConfigError


def refused(*overrides: str, recipe: str = "pretrain", config_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides, config_dir)
    return str(caught.value)


def test_overrides_of_options_and_values():
    config = load_recipe(
        "pretrain", ["model=nano", "trainer.steps=1e3", "+optim.clip=0.5", "log.sinks=[wandb]"]
    )
    assert config.model.hidden_size == 2688 and config.trainer.steps == 1000
    assert config.optim.clip == 0.5 and config.log.sinks == ["wandb"]
    assert config.recipe == config.run.name == "pretrain"


def test_values_inside_lists_and_names():
    config = load_recipe(
        "pretrain",
        ["data.phases.0.sources.python.weight=3", "data.phases.0.sources.mine={path: here, weight: 2}"],
    )
    sources = config.data.phases[0].sources
    assert sources["python"].weight == 3 and sources["mine"].path == "here"


def test_what_follows_from_the_length_follows_overrides():
    config = load_recipe("pretrain", ["trainer.steps=1000", "optim.lr=1e-2"])
    assert config.schedule.warmup_tokens == pytest.approx(0.05 * config.total_tokens)
    assert config.schedule.decay_tokens == pytest.approx(0.25 * config.total_tokens)
    assert config.schedule.min_lr == pytest.approx(1e-4)


def test_a_value_can_be_taken_out():
    assert load_recipe("pretrain", ["~trainer.keep_last"]).trainer.keep_last == 2
    assert "optim.lr: missing; allowed: number > 0" in refused("~optim.lr")
    assert "trainer.stps: cannot be set" in refused("~trainer.stps")


def test_misspelt_recipe():
    text = refused(recipe="pretrian")
    assert "no recipe 'pretrian' (did you mean 'pretrain'?)" in text and "ultra_long_context" in text


def test_mistakes_in_options_words_and_values_come_together():
    text = refused("model=ulta", "foo", "trainer.stpes=3", "optim.lr=abc", "trainer.steps=-1")
    lines = text.splitlines()
    assert lines[0] == "5 mistakes in the configuration:"
    assert "foo: not an override" in text
    assert "model: no option 'ulta' (did you mean 'ultra'?); allowed: mini, nano, super, tiny, ultra" in text
    assert "trainer.stpes: unknown key, got 3 (did you mean 'steps'?)" in text
    assert "optim.lr: got 'abc'; allowed: number > 0" in text
    assert "min_lr" not in text, "what is computed from a wrong value is no mistake of its own"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr=${nothing.here}", "optim.lr: Interpolation key 'nothing.here' not found"),
        ("run.dir=${oc.env:NEMOTRON_ULTRA_NO_SUCH}", "run.dir: KeyError raised while resolving"),
        ("trainer.steps=???", "trainer.steps: Missing mandatory value"),
        ("model.hidden_size.x=3", "model.hidden_size: got {'x': 3}; allowed: whole number > 0"),
        (
            "data.phases.0.nothing=1",
            "data.phases.0.nothing: unknown key, got 1; allowed: until_tokens, sources",
        ),
        ("data.phases.7.sources=1", "data.phases.7.sources: cannot be set"),
        ("steps=9", "steps: unknown key, got 9 (did you mean 'trainer.steps'?)"),
        ("trainer.steps=1,2", "trainer.steps: several values in trainer.steps=1,2; -m runs them one by one"),
        ("trainer=3", "trainer: no option '3'; allowed: grpo, mopd, packs, sft, short, ultra, ultra_sft"),
        ("trainer.steps=1e400", "trainer.steps: got inf; allowed: whole number > 0"),
        ("log.sinks=wandb", "log.sinks: got 'wandb' (did you mean '[wandb]'?); allowed: list of"),
        ("model.time_step_limit=[0,nan]", "model.time_step_limit: not a lower and an upper end"),
        ("optim.lr=${schedule.min_lr}", "optim.lr: Recursive interpolation detected"),
        ("model@x=tiny", "model@x=tiny: not an override; allowed: key=value"),
        ("=3", "=3: not an override; allowed: key=value"),
        ("~model", "model: missing; allowed: 39 keys, see --help"),
        ("hydra.run.dir=x", "hydra: unknown key, got {'run': {'dir': 'x'}}"),
        ("model.num_experts_per_tok=99", "model.num_experts_per_tok: 99 is above n_routed_experts 16"),
    ],
)
def test_one_line_per_mistake(override, expected):
    text = refused(override)
    assert expected in text and text.startswith("1 mistake")


def test_own_options_and_recipes_extend_shipped_ones(tmp_path):
    folder = tmp_path / "my configs, 'quoted'"
    (folder / "optim").mkdir(parents=True)
    (folder / "optim" / "slow.yaml").write_text("# Slow\nname: adamw\nlr: 1e-5\n")
    (folder / "my_run.yaml").write_text(
        "# Mine\ndefaults:\n  - pretrain\n  - override optim: slow\n  - _self_\ntrainer: {steps: 7}\n"
    )
    config = load_recipe("my_run", config_dir=folder)
    assert config.run.name == "my_run" and config.optim.lr == 1e-5 and config.trainer.steps == 7
    assert load_recipe("pretrain", ["optim=slow"], folder).optim.lr == 1e-5
    assert "no option 'slow'" in refused("optim=slow")


def test_mistakes_in_own_files(tmp_path):
    (tmp_path / "a.yaml").write_text("defaults:\n  - base\n  - override model: ulta\n")
    assert "its defaults name 'model/ulta', which is not there (did you mean 'ultra'?)" in refused(
        recipe="a", config_dir=tmp_path
    )
    (tmp_path / "b.yaml").write_text("defaults:\n  - base\n  - override modle: ultra\n")
    assert "modle" in refused(recipe="b", config_dir=tmp_path)
    (tmp_path / "d.yaml").write_text("defaults:\n  - base\n  - _self_\ntrainer:\n  stepz: 3\n")
    assert "did you mean 'steps'" in refused(recipe="d", config_dir=tmp_path)
    (tmp_path / "e.yaml").write_text("defaults:\n  - e\n  - _self_\n")
    assert "recipe e: its defaults lead back to itself" in refused(recipe="e", config_dir=tmp_path)
    assert "no such folder" in refused(config_dir=tmp_path / "nowhere")


def test_many_times_in_one_process_and_inside_another_hydra(tmp_path):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    (tmp_path / "other.yaml").write_text("a: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert load_recipe("pretrain") == load_recipe("pretrain")
        assert hydra_compose("other").a == 1, "the caller's own Hydra is still there"
    assert not GlobalHydra.instance().is_initialized()


def test_config_yaml_reads_back(tmp_path):
    config = load_recipe("pretrain", ["run.name=x"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config
    (tmp_path / "config.yaml").write_text("recipe: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_config(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        read_config(tmp_path / "nothing.yaml")


def test_share_dir_prefers_the_installed_copy(tmp_path, monkeypatch):
    assert (share_dir("recipes") / "pretrain.yaml").is_file()
    (tmp_path / "pkg" / "_share" / "configs").mkdir(parents=True)
    monkeypatch.setattr(compose, "PACKAGE", tmp_path / "pkg")
    assert share_dir("configs") == tmp_path / "pkg" / "_share" / "configs"
    with pytest.raises(ConfigError, match="install it again"):
        share_dir("recipes")


OPTIONS = [(group, name) for group in schema.groups() for name in options(group)]
COMPUTED = {  # the recipe in which its interpolations have a value
    ("schedule", "wsd"): "pretrain",
    ("schedule", "cosine"): "pretrain",
    ("trainer", "grpo"): "grpo",
    ("trainer", "mopd"): "mopd",
    ("teachers", "puzzles"): "mopd",
}


@pytest.mark.parametrize(("group", "name"), [o for o in OPTIONS if o not in COMPUTED], ids=lambda v: str(v))
def test_each_option_validates_alone(group, name):
    cls = schema.strip(schema.hints(RunConfig)[group])
    assert checked(cls, read_yaml(options(group)[name])) is not None


@pytest.mark.parametrize(("group", "name"), COMPUTED)
def test_options_that_follow_from_others(group, name):
    assert getattr(load_recipe(COMPUTED[group, name], [f"{group}={name}"]), group) is not None


def test_every_file_says_what_it_is_and_fits_its_line():
    for file in [*share_dir("configs").rglob("*.yaml"), *share_dir("recipes").glob("*.yaml")]:
        first = file.read_text().splitlines()[0]
        assert first.startswith("# ") and len(first) <= 92, file


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"- a\n- b\n", "mine.yaml: expected keys and values; got list"),
        (b"model: \xff\n", "mine.yaml: not UTF-8 text"),
        (b"a: [1\n", "mine.yaml: not valid YAML"),
    ],
)
def test_a_recipe_that_is_no_yaml_of_keys_is_named(tmp_path, content, expected):
    (tmp_path / "mine.yaml").write_bytes(content)
    assert expected in refused(recipe="mine", config_dir=tmp_path)
