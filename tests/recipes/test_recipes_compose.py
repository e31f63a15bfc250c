"""Every recipe composes and round-trips; the Ultra recipes equal stored files and the report's numbers.

After a wanted change: `python tests/recipes/test_recipes_compose.py` writes the stored files again.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from nemotron_ultra.config.check import checked
from nemotron_ultra.config.compose import load_recipe, read_yaml, recipes, to_dict, to_yaml
from nemotron_ultra.config.loss import PolicyGradientOptions
from nemotron_ultra.config.plan import count_parameters
from nemotron_ultra.config.run import RunConfig

loaded = functools.cache(load_recipe)  # frozen, so tests may share it
GOLDEN = Path(__file__).resolve().parent / "golden"
ULTRA = ["ultra_pretrain", "ultra_pretrain_phase2", "ultra_long_context", "ultra_sft"]
STEP_TOKENS = 25_165_824


@pytest.fixture(autouse=True)
def no_places(monkeypatch):
    for name in ("NEMOTRON_ULTRA_DATA", "NEMOTRON_ULTRA_CHECKPOINTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", list(recipes()))
def test_composes_validates_and_round_trips(name):
    config = loaded(name)
    assert config.recipe == config.run.name == name
    assert checked(RunConfig, to_dict(config)) == config
    assert to_dict(checked(RunConfig, to_dict(config))) == to_dict(config)


@pytest.mark.parametrize("name", ULTRA)
def test_equals_the_stored_file(name):
    stored = read_yaml(GOLDEN / f"{name}.yaml")
    assert to_dict(loaded(name)) == to_dict(checked(RunConfig, stored))


def test_every_shipped_cluster_recipe_is_stored():
    big = [name for name in recipes() if loaded(name).cluster.gpus]
    assert sorted(big) == sorted(ULTRA) == sorted(file.stem for file in GOLDEN.glob("*.yaml"))


def test_places_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("NEMOTRON_ULTRA_DATA", "/big")
    monkeypatch.setenv("NEMOTRON_ULTRA_CHECKPOINTS", "/ckpt")
    config = load_recipe("ultra_pretrain_phase2")
    assert config.data.phases[0].sources["crawl++"].path == "/big/crawl++"
    assert config.run.from_ == "/ckpt/ultra_pretrain_15T"


def test_models_have_the_layers_and_sizes_of_the_reports():
    layers = {"ultra": (108, 48, 48, 12), "super": (88, 40, 40, 8), "nano": (52, 23, 23, 6)}
    attention = {
        "ultra": [7, 14, 23, 32, 39, 48, 57, 64, 73, 82, 89, 98],
        "super": [7, 16, 25, 36, 47, 58, 69, 78],
        "nano": [5, 12, 19, 26, 33, 42],
    }
    billions = {"ultra": (560.52, 54.99), "super": (123.61, 12.23), "nano": (31.58, 3.23)}
    for name, counts in layers.items():
        model = load_recipe("pretrain", [f"model={name}"]).model
        assert (len(model.pattern), *(model.pattern.count(x) for x in "ME*")) == counts
        assert [i for i, letter in enumerate(model.pattern) if letter == "*"] == attention[name]
        found = count_parameters(model)
        assert (found.total / 1e9, found.active / 1e9) == pytest.approx(billions[name], abs=0.01)
    blocks = ["M*EMEME", "M*EMEMEME", "M*EMEMEME"]
    assert loaded("ultra_pretrain").model.pattern == "MEMEME" + "".join(blocks * 4) + "ME"


def test_ultra_pretrain_is_the_reports_run():
    c = loaded("ultra_pretrain")
    assert c.tokens_per_step == STEP_TOKENS == 3072 * 8192
    assert c.trainer.steps == 794_728 and c.total_tokens == pytest.approx(20e12, rel=1e-6)
    assert c.schedule.warmup_tokens == 200e9 and round(200e9 / STEP_TOKENS) == 7_947
    assert c.schedule.decay_tokens == 5e12 and round(5e12 / STEP_TOKENS) == 198_682
    assert c.schedule.total_tokens - c.schedule.decay_tokens == c.data.phases[0].until_tokens == 15e12
    assert (c.optim.lr, c.schedule.min_lr, c.optim.betas, c.optim.eps) == (2.5e-4, 2.5e-6, (0.9, 0.95), 1e-8)
    assert (c.optim.weight_decay, c.optim.clip, c.model.initializer_range) == (0.1, 1.0, 0.0099)
    t = c.trainer
    assert (t.mtp_loss_scale, t.router_balance_coefficient, t.router_bias_rate) == (0.1, 1e-4, 1e-3)
    assert (t.checkpoint_every, t.keep_every, t.validate_every, t.weight_hash_every) == (
        125,
        1000,
        1000,
        20000,
    )
    p = c.parallel
    assert (p.tensor, p.expert, p.expert_tensor, p.pipeline, p.sequence) == (8, 64, 1, 1, True)
    assert (c.cluster.nodes, c.cluster.gpus, c.cluster.segment, c.cluster.walltime_hours) == (
        1536,
        6144,
        16,
        4,
    )


def test_blends_are_those_of_figure_4():
    one, two = (phase.sources for phase in loaded("ultra_pretrain").data.phases)
    assert len(set(one) | set(two)) == 19 and (len(one), len(two)) == (16, 17)
    assert sum(s.weight for s in one.values()) == pytest.approx(99.9)
    assert sum(s.weight for s in two.values()) == pytest.approx(99.9)
    crawl = [n for n in one | two if "crawl" in n and n != "crawl++"]
    assert sum(one[n].weight for n in crawl if n in one) == pytest.approx(49.2)
    assert sum(two[n].weight for n in crawl if n in two) == pytest.approx(38.4)
    alone = loaded("ultra_pretrain_phase2").data.phases[0].sources
    assert alone == two


def test_phase_2_alone_decays_from_its_first_token():
    c = loaded("ultra_pretrain_phase2")
    assert c.trainer.steps == 198_682 and c.schedule.decay_tokens == c.schedule.total_tokens == 5e12
    assert c.schedule.warmup_tokens == 0 and c.run.from_.endswith("ultra_pretrain_15T")


def test_long_context_is_the_reports_phase():
    c = loaded("ultra_long_context")
    assert c.data.sequence_length == 1_048_576 and c.trainer.global_batch_size == 24
    (short,) = c.data.alternates
    assert (short.sequence_length, short.share) == (4096, 0.08) and STEP_TOKENS // 4096 == 6144
    assert c.tokens_per_step == STEP_TOKENS and c.total_tokens == pytest.approx(33e9, rel=1e-3)
    assert (c.schedule.name, c.optim.lr) == ("constant", 2.5e-6)
    p = c.parallel
    assert (p.context, p.tensor, p.expert, p.pipeline) == (32, 8, 128, 2)
    sources = {name: source.weight for name, source in c.data.phases[0].sources.items()}
    assert sources.pop("long-context") == 46 and sum(sources.values()) == pytest.approx(54, rel=2e-3)
    two = loaded("ultra_pretrain_phase2").data.phases[0].sources
    assert sources == pytest.approx({name: 0.54 * source.weight for name, source in two.items()})


def test_ultra_sft_is_the_reports_stage():
    c = loaded("ultra_sft")
    assert (c.data.sequence_length, c.trainer.global_batch_size, c.trainer.steps) == (294_912, 64, 3200)
    assert c.trainer.steps * c.trainer.global_batch_size == 204_800
    assert (c.schedule.name, c.optim.lr, c.schedule.min_lr) == ("cosine", 1.5e-5, 1e-6)
    assert c.schedule.warmup_tokens == 9_600 * 294_912 == 150 * c.tokens_per_step
    assert (c.trainer.mtp_loss_scale, c.model.depths, c.trainer.loss_mean) == (0.1, 2, "tokens")
    assert c.data.packs == "data/ultra/sft" and c.tasks is None and c.data.phases == []
    p = c.parallel
    assert (p.tensor, p.pipeline, p.context, p.expert) == (2, 6, 8, 32) and c.cluster.gpus == 3072


def test_post_training_goes_on_from_the_stage_before():
    starts = {name: loaded(name).run.from_ for name in ("sft", "grpo", "mopd")}
    assert starts == {"sft": "runs/pretrain", "grpo": "runs/sft", "mopd": "runs/grpo"}
    assert load_recipe("grpo", ["run.dir=elsewhere"]).run.from_ == "elsewhere/sft"
    models = {loaded(name).model.pattern for name in ("pretrain", *starts)}
    assert len(models) == 1 and {loaded(name).trainer.name for name in starts} == set(starts)
    teachers = loaded("mopd").teachers
    assert {teachers.name_for(domain) for domain in loaded("mopd").tasks.trained} == set(teachers.folders)


@pytest.mark.parametrize("name", ["grpo", "mopd"])
def test_optimizer_of_the_published_configurations(name):
    c = loaded(name)
    assert (c.optim.betas, c.optim.eps, c.optim.weight_decay, c.optim.clip) == ((0.9, 0.999), 1e-8, 0.0, 1.0)
    assert c.schedule.name == "constant" and c.rollout.temperature == 1.0
    assert (c.trainer.router_balance_coefficient, c.trainer.router_bias_rate) == (0.0, 1e-3)


def test_losses_and_advantages_of_the_recipes():
    grpo, mopd = loaded("grpo"), loaded("mopd")
    assert (grpo.advantage.name, grpo.advantage.std, grpo.rollout.group_size) == ("leave_one_out", False, 8)
    assert (mopd.advantage.name, mopd.rollout.group_size) == ("teacher_gap", 1)
    assert grpo.loss == PolicyGradientOptions.preset("grpo")
    assert mopd.loss == PolicyGradientOptions.preset("mopd_paper") == PolicyGradientOptions()


@pytest.mark.parametrize(
    ("module", "format"),
    [
        ("backbone.layers.0.mixer.in_proj", "nvfp4"),
        ("backbone.layers.0.mixer.out_proj", "mxfp8"),
        ("backbone.layers.0.mixer.conv1d", "bf16"),
        ("backbone.layers.1.mixer.experts.3.up_proj", "nvfp4"),
        ("backbone.layers.1.mixer.experts", "nvfp4"),
        ("backbone.layers.1.mixer.shared_experts.down_proj", "nvfp4"),
        ("backbone.layers.1.mixer.fc1_latent_proj", "bf16"),
        ("backbone.layers.1.mixer.gate", "fp32"),
        ("backbone.layers.7.mixer.q_proj", "bf16"),
        ("backbone.layers.7.mixer.o_proj", "bf16"),
        ("mtp.layers.1.mixer.experts.3.up_proj", "bf16"),
        ("backbone.embeddings", "bf16"),
        ("lm_head", "bf16"),
        ("backbone.layers.91.mixer.experts", "nvfp4"),
        ("backbone.layers.92.mixer.out_proj", "bf16"),
        ("backbone.layers.107.mixer.experts", "bf16"),
        ("backbone.layers.107.mixer.gate", "fp32"),
    ],
)
def test_precision_of_each_tensor_class(module, format):
    config = loaded("ultra_pretrain")
    assert config.precision.format_of(module, config.model.num_layers) == format


if __name__ == "__main__":
    for name in ULTRA:
        (GOLDEN / f"{name}.yaml").write_text(to_yaml(load_recipe(name)))
