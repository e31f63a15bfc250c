"""The smallest model with every kind of block, batches for it, and the same for the command line."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from nemotron_ultra import prep
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.config.optim import OptimConfig
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.engine.schedule import Schedule
from nemotron_ultra.engine.torch_engine import TorchEngine
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.objectives.next_token import NextToken
from nemotron_ultra.observe.metrics import read_metrics

MODEL = dict(
    pattern="ME*-E",
    hidden_size=32,
    num_attention_heads=2,
    head_dim=16,
    mamba_num_heads=4,
    mamba_head_dim=16,
    ssm_state_size=16,
    n_groups=2,
    chunk_size=16,
    intermediate_size=48,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    moe_shared_expert_intermediate_size=24,
    moe_latent_size=16,
    num_nextn_predict_layers=1,
)


def micro_model(dtype: torch.dtype = torch.float32, **changes) -> HybridLM:
    model = HybridLM(ModelConfig(**MODEL | {"vocab_size": 64} | changes), dtype=dtype)
    model.init_weights(7)
    return model


def micro_batches(count: int, seed: int = 0) -> list[TokenBatch]:
    """Micro-batches of two documents each, of different lengths and weights."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(9, 40, (count, 2), generator=draw).tolist()
    batches = []
    for number, pair in enumerate(lengths):
        documents = [torch.randint(3, 64, (n,), generator=draw).tolist() for n in pair]
        names = [f"micro:{number}:{i}" for i in range(2)]
        batches.append(TokenBatch.from_documents(documents, stats={"documents": names}))
    return batches


def joined(batches: list[TokenBatch]) -> TokenBatch:
    """The same documents in one pack."""
    bounds = [0]
    for batch in batches:
        bounds += [bounds[-1] + n for n in batch.cu_seqlens.tolist()[1:]]
    return TokenBatch(
        tokens_T=torch.cat([b.tokens_T for b in batches]),
        labels_T=torch.cat([b.labels_T for b in batches]),
        weight_T=torch.cat([b.weight_T for b in batches]),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        stats={"documents": [d for b in batches for d in b.stats["documents"]]},
    )


def micro_engine(
    model: HybridLM | None = None, *, lr: float = 1e-2, clip: float = 1.0, **options
) -> TorchEngine:
    schedule = Schedule(name="constant", peak=lr, total_tokens=1e9)
    return TorchEngine(model or micro_model(), OptimConfig(lr=lr, clip=clip), schedule, **options)


def objective() -> NextToken:
    return NextToken(mtp_loss_scale=0.1, balance_coefficient=1e-2, mtp_depths=2)


def step(engine: TorchEngine, batches: list[TokenBatch]) -> dict[str, float]:
    return engine.forward_backward(batches, objective()) | engine.optimizer_step()


def weights(model: HybridLM) -> dict[str, torch.Tensor]:
    """A copy of every tensor of the model."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def micro_corpus(folder: Path, seed: int = 0) -> Path:
    """A prepared corpus of 40 short documents, some of them for validation."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    draw = random.Random(seed)
    words = ["state", "layer", "token", "expert", "router", "norm", "scan", "chunk"]
    for number in range(40):
        text = " ".join(draw.choices(words, k=60))
        (texts / f"{number:02d}.txt").write_text(f"document {number}: {text}.\n")
    assert prep.main([str(texts), "--out", str(folder / "corpus"), "--valid-fraction", "0.2"]) == 0
    return folder / "corpus"


def micro_overrides(corpus: Path, run_dir: Path, **changes: object) -> list[str]:
    """recipe=pretrain shrunk to seconds: 6 steps of 4 rows in 2 micro-batches, a checkpoint every 2 steps."""
    values: dict[str, object] = {
        "run.dir": run_dir,
        "model": "tiny",
        **{f"model.{name}": value for name, value in MODEL.items()},
        "data.sequence_length": 48,
        "data.phases": f"[{{sources: {{text: {{path: {corpus}}}}}}}]",
        "trainer.steps": 6,
        "trainer.global_batch_size": 4,
        "trainer.micro_batch_size": 2,
        "trainer.validate_every": 3,
        "trainer.validate_rows": 2,
        "trainer.checkpoint_every": 2,
        "trainer.sample_tokens": 4,
        "schedule.warmup_tokens": 0,
        "schedule.decay_tokens": 400,
        "engine.device": "cpu",
        "engine.threads": 1,
    }
    return [f"{key}={value}" for key, value in (values | changes).items()]


def losses(run_dir: Path, name: str = "pretrain") -> list[tuple[int, float]]:
    """(step, loss) of a run's metrics.jsonl, in file order."""
    return [(row["step"], row["loss"]) for row in read_metrics(run_dir / name / "metrics.jsonl")]


def task_overrides(run_dir: Path, **changes: object) -> list[str]:
    """recipe=sft, grpo or mopd shrunk to seconds: a micro model, short answers, 3 steps of 8 rows."""
    values: dict[str, object] = {
        "run.dir": run_dir,
        **{f"model.{name}": value for name, value in MODEL.items()},
        "data.sequence_length": 96,
        "trainer.steps": 3,
        "trainer.micro_batch_size": 4,
        "trainer.validate_every": 0,
        "trainer.sample_every": 1,
        "trainer.checkpoint_every": 1,
        "tasks.validation_problems": 4,
        "engine.device": "cpu",
        "engine.threads": 1,
    }
    return [f"{key}={value}" for key, value in (values | changes).items()]


def rollout_overrides(run_dir: Path, **changes: object) -> list[str]:
    """task_overrides for recipe=grpo (groups of 4) and mopd (changes: group_size 1)."""
    rollout = {"rollout.prompts_per_step": 2, "rollout.group_size": 4, "rollout.max_new_tokens": 6}
    return task_overrides(run_dir, **rollout | changes)
