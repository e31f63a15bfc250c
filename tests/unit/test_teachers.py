"""Teachers: routing by domain, scores of the same labels in the same places, and teachers that do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from micro import micro_engine, micro_model
from nemotron_ultra.config.teachers import TeachersConfig
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.tokenizer import BUILTIN, load_tokenizer
from nemotron_ultra.errors import CheckpointError, ConfigError
from nemotron_ultra.model.hf_folder import save_model
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.rl.teachers import Teachers

TOKENIZER = load_tokenizer("builtin")
DOMAINS = ["sums", "words", "sums", "other", "words"]


def model_of(seed: int, **changes: int) -> HybridLM:
    model = micro_model(**changes)
    model.init_weights(seed)
    return model


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    for seed, name in enumerate(("sums", "wordy")):
        save_model(model_of(seed), tmp_path / name)
    return {name: tmp_path / name for name in ("sums", "wordy")}


def teachers(folders: dict[str, Path], **changes: object) -> Teachers:
    names = {name: str(folder) for name, folder in folders.items()}
    options = {"domains": {"words": "wordy"}, "strict": False, "default": "wordy"} | changes
    return Teachers(TeachersConfig(folders=names, **options), folders, tokenizer=TOKENIZER, vocab_size=64)


def documents() -> TokenBatch:
    draw = torch.Generator().manual_seed(0)
    return TokenBatch.from_documents(
        [torch.randint(3, 64, (n,), generator=draw).tolist() for n in (9, 2, 17, 5, 12)]
    )


def test_each_document_is_scored_by_the_teacher_of_its_domain(folders):
    batch, expert = documents(), teachers(folders)
    found_T = expert.score(batch, DOMAINS)
    bounds = batch.cu_seqlens.tolist()
    for domain, a, b in zip(DOMAINS, bounds, bounds[1:], strict=False):
        model = model_of(0 if domain == "sums" else 1)
        logp_LV = model(batch.tokens_T[a:b], mtp_depths=0).logits_TV.log_softmax(-1)
        expected_L = logp_LV[:-1].gather(1, batch.tokens_T[a + 1 : b, None])[
            :, 0
        ]  # of the token that follows
        torch.testing.assert_close(found_T[a : b - 1], expected_L, rtol=0, atol=1e-5)
    assert found_T.dtype == torch.float32 and not found_T.requires_grad


def test_student_as_its_own_teacher_has_no_gap(folders):
    engine, batch = micro_engine(model_of(0)), documents()
    gap_T = teachers(folders).score(batch, ["sums"] * 5) - engine.logprob(batch)
    assert float(gap_T.abs().max()) < 1e-5


def test_routes(folders):
    expert = teachers(folders)
    assert [expert.for_domain(domain) for domain in DOMAINS] == ["sums", "wordy", "sums", "wordy", "wordy"]
    strict = teachers(folders, strict=True, default=None)
    assert strict.for_domain("words") == "wordy"
    with pytest.raises(
        ConfigError, match=r"'sum' has no teacher \(did you mean 'sums'.*teachers.domains.sum="
    ):
        strict.score(documents(), ["sums"] * 4 + ["sum"])


def test_folder_with_two_names_is_loaded_once(folders):
    expert = teachers(folders | {"same": folders["sums"] / ".." / "sums"})
    assert expert.models["same"] is expert.models["sums"]
    assert expert.models["same"] is not expert.models["wordy"]
    assert not any(p.requires_grad for p in expert.models["same"].parameters())


def test_metrics_are_those_since_the_last_call(folders):
    expert = teachers(folders)
    expert.score(documents(), DOMAINS)
    expert.score(documents(), DOMAINS)
    found = expert.metrics()
    assert found["teacher/sums/tokens"] == 2 * (9 + 17) and found["teacher/wordy/tokens"] == 2 * (2 + 5 + 12)
    assert found["teacher/sums/seconds"] > 0
    assert set(expert.metrics().values()) == {0.0}


def test_number_of_domains_must_be_that_of_the_documents(folders):
    with pytest.raises(AssertionError, match="one domain per document"):
        teachers(folders).score(documents(), DOMAINS[:4])


def test_teacher_of_another_vocabulary(folders, tmp_path):
    save_model(model_of(0, vocab_size=80), tmp_path / "large")
    with pytest.raises(ConfigError, match=r"teachers\.folders\.large: .*got 80 rows.*allowed: 64"):
        teachers(folders | {"large": tmp_path / "large"})


def test_teacher_of_another_tokenizer(folders):
    shutil.copytree(BUILTIN, folders["sums"], dirs_exist_ok=True)
    teachers(folders)  # the run's own
    content = json.loads((BUILTIN / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folders["wordy"] / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"teachers\.folders\.wordy: .*{TOKENIZER.hash[:8]}"):
        teachers(folders)


def test_teacher_without_weights(folders, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"teachers\.folders\.x: no weights.*has no config\.json"):
        teachers(folders | {"x": tmp_path / "empty"})
    with pytest.raises(CheckpointError, match=r"teachers\.folders\.x: no weights.*is not a folder"):
        teachers(folders | {"x": tmp_path / "nowhere"})
