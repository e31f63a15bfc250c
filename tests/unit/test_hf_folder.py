"""Folders in the Hugging Face layout: round trips, what is refused and how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemotron_ultra import HybridLM, ModelConfig, load_model, save_model
from nemotron_ultra.errors import CheckpointError

CONFIG = ModelConfig(
    pattern="ME*-E",
    vocab_size=40,
    hidden_size=16,
    num_attention_heads=2,
    head_dim=8,
    mamba_num_heads=4,
    mamba_head_dim=8,
    ssm_state_size=4,
    n_groups=2,
    intermediate_size=24,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    moe_shared_expert_intermediate_size=20,
    moe_latent_size=8,
    num_nextn_predict_layers=1,
)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model() -> HybridLM:
    model = HybridLM(CONFIG)
    for _, layer in model.moe_layers():
        layer.gate.e_score_correction_bias.normal_(generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture
def single(model, tmp_path) -> Path:
    save_model(model, tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def sharded(model, tmp_path) -> Path:
    save_model(model, tmp_path / "sharded", max_shard_bytes=20_000)
    return tmp_path / "sharded"


def same(left: HybridLM, right: HybridLM) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def refusal(folder: Path, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, **options)
    return str(caught.value)


def edit_json(path: Path, change) -> None:
    """Change a JSON file as a user would: the checksums go."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    (path.parent / "checksums.json").unlink(missing_ok=True)


def edit_tensors(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    (path.parent / "checksums.json").unlink(missing_ok=True)


def test_single_and_sharded_come_back(model, single, sharded):
    assert sorted(p.name for p in single.iterdir()) == ["checksums.json", "config.json", SINGLE]
    assert len(list(sharded.glob("model-*-of-*.safetensors"))) > 2
    assert same(load_model(single), model) and same(load_model(sharded), model)
    sizes = [p.stat().st_size for p in sharded.glob("*.safetensors")]
    assert json.loads((sharded / INDEX).read_text())["metadata"]["total_size"] < sum(sizes)
    assert load_model(single).config == CONFIG


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("loaded", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_convert_but_the_selection_bias_stays_float32(model, tmp_path, stored, loaded):
    save_model(model, tmp_path / "m", dtype=stored)
    again = load_model(tmp_path / "m", dtype=loaded)
    for name, tensor in model.state_dict().items():
        fixed = name.endswith("e_score_correction_bias")
        expected = tensor if fixed else tensor.to(stored).to(loaded)
        assert torch.equal(again.state_dict()[name], expected), name


def test_bf16_round_trip_is_byte_identical(model, tmp_path):
    save_model(model, tmp_path / "a", dtype=torch.bfloat16, max_shard_bytes=20_000)
    save_model(load_model(tmp_path / "a", dtype=torch.bfloat16), tmp_path / "b", max_shard_bytes=20_000)
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_files_are_what_the_library_reads(model, single):
    tensors = load_file(single / SINGLE)
    stem = "backbone.layers.1.mixer.experts"
    assert torch.equal(tensors[f"{stem}.3.up_proj.weight"], model.state_dict()[f"{stem}.up_proj"][3])
    assert any(key.startswith("mtp.") for key in tensors)
    assert f"{stem}.up_proj" not in tensors


def test_stacked_experts_and_other_prefixes_load(model, single):
    def restack(tensors):
        for key in [k for k in tensors if ".mixer.experts." in k]:
            del tensors[key]
        for name, tensor in model.state_dict().items():
            if ".mixer.experts." in name:
                tensors[name] = tensor.clone()
        for key in [k for k in tensors if k.startswith("backbone.")]:
            tensors["model." + key.removeprefix("backbone.").replace("embeddings", "embedding")] = (
                tensors.pop(key)
            )

    edit_tensors(single / SINGLE, restack)
    assert same(load_model(single), model)


def test_flipped_byte_is_found(sharded):
    victim = sorted(sharded.glob("*.safetensors"))[1]
    content = bytearray(victim.read_bytes())
    content[-3] ^= 1
    victim.write_bytes(content)
    message = refusal(sharded)
    assert victim.name in message and "checksums.json" in message and "copy this file again" in message
    load_model(sharded, verify=False)


def test_changed_config_and_broken_checksums_are_found(single):
    text = (single / "config.json").read_text()
    (single / "config.json").write_text(text.replace('"n_groups": 2', '"n_groups": 4'))
    assert "config.json: its content differs from checksums.json" in refusal(single)
    (single / "checksums.json").write_text("{")
    assert "checksums.json: unreadable" in refusal(single)
    (single / "checksums.json").write_text('{"config.json": {}}')
    assert "checksums.json says None" in refusal(single)


def test_everything_that_does_not_fit_is_listed_at_once(single):
    def spoil(tensors):
        del tensors["backbone.norm_f.weight"], tensors["backbone.layers.4.mixer.experts.2.up_proj.weight"]
        tensors["backbone.layers.9.norm.weight"] = torch.ones(4)
        tensors["backbone.layers.1.mixer.experts.4.up_proj.weight"] = torch.ones(12, 8)
        tensors["lm_head.weight"] = torch.ones(40, 15)
        tensors["backbone.layers.0.mixer.D"] = torch.ones(4, dtype=torch.int8)

    edit_tensors(single / SINGLE, spoil)
    message = refusal(single)
    assert "2 missing, 2 unexpected, 2 wrong in shape or place" in message
    for part in (
        "missing: backbone.norm_f.weight",
        "missing: backbone.layers.4.mixer.experts.2.up_proj.weight",
        "unexpected: backbone.layers.9.norm.weight [4] in model.safetensors",
        "unexpected: backbone.layers.1.mixer.experts.4.up_proj.weight",
        "shape: lm_head.weight is [40, 15], config.json needs [40, 16]",
        "format: backbone.layers.0.mixer.D is I8",
    ):
        assert part in message


def test_a_long_list_ends_in_a_count(single):
    edit_json(
        single / "config.json", lambda c: c.update(hybrid_override_pattern="MMMMM", num_hidden_layers=5)
    )
    lines = refusal(single).splitlines()
    assert len(lines) == 23 and lines[-2].startswith("  and ") and lines[-2].endswith(" more")
    assert "config.json that belongs to these weights" in lines[-1]


def test_config_of_another_model(single):
    edit_json(single / "config.json", lambda c: c.update(hidden_size=24))
    message = refusal(single)
    assert "shape: backbone.embeddings.weight is [40, 16], config.json needs [40, 24]" in message


def test_mtp_weights_without_mtp_config_and_the_reverse(single):
    edit_json(single / "config.json", lambda c: c.update(num_nextn_predict_layers=0))
    assert "set num_nextn_predict_layers to 1" in refusal(single)
    edit_json(single / "config.json", lambda c: c.update(num_nextn_predict_layers=1))
    edit_tensors(single / SINGLE, lambda t: [t.pop(k) for k in list(t) if k.startswith("mtp.")])
    assert "set num_nextn_predict_layers to 0" in refusal(single)


def test_missing_shards_are_named(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1:3]
    for path in gone:
        path.unlink()
    message = refusal(sharded)
    assert "2 of" in message and all(path.name in message for path in gone)


def test_index_that_does_not_match_its_shards(sharded):
    def spoil(index):
        weights = index["weight_map"]
        weights["backbone.extra"] = weights.pop("backbone.norm_f.weight")

    edit_json(sharded / INDEX, spoil)
    message = refusal(sharded)
    assert "backbone.norm_f.weight: in model-" in message and "but not in the index" in message
    assert "backbone.extra: the index says model-" in message and "does not hold it" in message


def test_unusable_index(sharded):
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update(x="../other.safetensors"))
    assert "must name files of its own folder" in refusal(sharded)
    (sharded / INDEX).write_text("{}")
    assert "no usable weight_map" in refusal(sharded)
    (sharded / INDEX).unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(sharded)


@pytest.mark.parametrize("size", [0, 5, 400, -7])
def test_truncated_file(single, size):
    content = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(content[:size])
    message = refusal(single)
    assert "model.safetensors: truncated or damaged" in message and "again" in message


def test_garbage_headers(single):
    for header in (b"x" * 16, b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b'{"a": 3}'):
        (single / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
        assert "truncated or damaged" in refusal(single, verify=False)


def test_a_folder_that_is_not_empty_is_refused(model, single, tmp_path):
    with pytest.raises(CheckpointError, match="is not empty"):
        save_model(model, single)
    (tmp_path / "empty").mkdir()
    save_model(model, tmp_path / "empty")
    (single / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"something else than a checkpoint.*notes\.txt"):
        save_model(model, single, overwrite=True)
    assert (single / "notes.txt").read_text() == "mine"
    with pytest.raises(CheckpointError, match="is a file"):
        save_model(model, single / "notes.txt")


def test_overwrite_replaces_the_whole_checkpoint(model, sharded):
    killed = sharded.with_name(".sharded.writing")  # what a save that was killed leaves behind
    killed.mkdir()
    (killed / "model.safetensors").write_text("half")
    save_model(model, sharded, dtype=torch.bfloat16, overwrite=True)
    assert sorted(p.name for p in sharded.iterdir()) == ["checksums.json", "config.json", SINGLE]
    assert [p.name for p in sharded.parent.iterdir()] == ["sharded"]


def test_transformers_opens_our_folder_and_we_open_its(model, tmp_path):
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    save_model(model, tmp_path / "ours")
    theirs = modeling.NemotronHForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    ids = torch.arange(12).view(2, 6)
    for layer in theirs.model.layers:
        if "Mamba" in type(layer.mixer).__name__:  # it clamps dt at time_step_min otherwise
            layer.mixer.time_step_limit = CONFIG.time_step_limit
    assert torch.allclose(theirs(ids).logits, model.logits(ids), atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "config.json", lambda c: c.update(num_nextn_predict_layers=0))
    ours = load_model(tmp_path / "theirs").state_dict()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in ours.items())
