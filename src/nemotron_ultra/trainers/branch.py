"""The folder of a stage that continues another stage's run: weights, optimizer, data, curves.

A copy in one rename: afterwards the stage resumes like any run that was interrupted after that step.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from nemotron_ultra.config.compose import to_yaml
from nemotron_ultra.engine.checkpoint import step_folder
from nemotron_ultra.errors import CheckpointError, ConfigError
from nemotron_ultra.observe.metrics import MetricsLog
from nemotron_ultra.trainers.chain import Chain, Stage
from nemotron_ultra.trainers.evaluation import write_json, write_text
from nemotron_ultra.trainers.run_folder import now


def begin_branch(chain: Chain, stage: Stage) -> None:
    """Make the folder of a branch, unless it is there. Raises CheckpointError if its checkpoint is gone."""
    if stage.branch is None or (stage.folder / "run.json").is_file():
        return
    source = chain.stage(stage.branch.source)
    checkpoint = step_folder(source.folder, stage.branch.step)
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"{stage.name} goes on from {checkpoint}, which is not there",
            do=f"restore it, or remove {source.folder} so that {source.name} is trained again",
        )
    if stage.folder.exists():
        raise ConfigError(f"{stage.folder} is not a run folder (it has no run.json)", do="move it away")
    fresh = stage.folder.with_name(f".{stage.name}.branching")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        _copy(source.folder, checkpoint, fresh, stage.branch.step)
        write_text(fresh / "config.yaml", to_yaml(stage.config))
        branch = {"from": source.name, "step": stage.branch.step}
        facts = {"recipe": stage.config.recipe, "created": now(), "started": [], "branch": branch}
        write_json(fresh / "run.json", facts)
        fresh.rename(stage.folder)
    except OSError as error:
        raise CheckpointError(
            f"{stage.folder} cannot be made from {checkpoint}",
            got=error.strerror,
            do="make room on that disk and run the same command again",
        ) from error


def _copy(source: Path, checkpoint: Path, target: Path, step: int) -> None:
    """The checkpoint, and the curves and samples up to it."""
    shutil.copytree(checkpoint, target / checkpoint.relative_to(source))
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
            log = MetricsLog(target / name)
            log.truncate_after(step)
            log.close()
