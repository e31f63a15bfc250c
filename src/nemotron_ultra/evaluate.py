"""`python -m nemotron_ultra.evaluate RUN [key=value ...]`: scores of a run's newest weights on its tasks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemotron_ultra.config import check, schema
from nemotron_ultra.config.command import Parser, check_folder, is_run
from nemotron_ultra.config.compose import (
    load_recipe,
    options,
    own_folder,
    parse_override,
    read_config,
    read_yaml,
    to_dict,
)
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.errors import ConfigError, NemotronError

TRACEBACK = "NEMOTRON_ULTRA_TRACEBACK"
HELP = """\
Answer the held-out problems of every domain with a run's newest checkpoint, or with a folder of weights;
print the mean scores, and write scores.json and answers.jsonl into the run's folder.

  python -m nemotron_ultra.evaluate runs/grpo
  python -m nemotron_ultra.evaluate runs/pretrain recipe=sft        on the tasks of that recipe
  python -m nemotron_ultra.evaluate WEIGHTS_FOLDER recipe=grpo
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status, and prints an error without its traceback."""
    try:
        return run(_parser().parse_intermixed_args(arguments))
    except NemotronError as error:
        if os.environ.get(TRACEBACK, "0") != "0":
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130


def run(asked: argparse.Namespace) -> int:
    """Score, print, write."""
    folder = Path(asked.folder)
    config = configuration(folder, asked.overrides, own_folder(asked.config_dir))
    if config.tasks is None:
        raise ConfigError(
            f"{folder} has no tasks to be scored on",
            do="score it on those of a recipe, such as recipe=sft",
        )
    from nemotron_ultra.trainers.evaluation import save_scores, score_weights

    found = score_weights(folder, config, problems=asked.problems, max_new_tokens=asked.max_new_tokens)
    step = f" at step {found.step}" if found.step is not None else ""
    print(
        f"{folder}{step}: {found.problems} held-out problems a domain, temperature {found.temperature:g}, "
        f"answers of at most {found.max_new_tokens} tokens, {found.seconds:.1f} s"
    )
    if is_run(folder) and found.problems > config.tasks.validation_problems:
        kept = config.tasks.validation_problems
        print(f"  only the first {kept} of them were kept out of training (tasks.validation_problems)")
    width = max(len(name) for name in [*found.scores, "mean"])
    for name, score in [*found.scores.items(), ("mean", found.mean)]:
        print(f"  {name:<{width}}  {100 * score:5.1f} %")
    if is_run(folder):
        print(save_scores(found, folder))
    return 0


def configuration(folder: Path, overrides: Sequence[str], own: Path | None = None) -> RunConfig:
    """A recipe's configuration if one is named, else that which the run was started with; with overrides.

    Raises ConfigError where a folder of weights comes without recipe=NAME.
    """
    recipes = [word.removeprefix("recipe=") for word in overrides if word.startswith("recipe=")]
    words = [word for word in overrides if not word.startswith("recipe=")]
    check_folder(folder)
    if recipes:
        return load_recipe(recipes[-1], words, own)
    if not is_run(folder):
        raise ConfigError(
            f"{folder} is not a run: it has no config.yaml and run.json",
            do="name a run, or say recipe=NAME whose tasks the weights are scored on",
        )
    return changed(read_config(folder / "config.yaml"), words, own)


def changed(config: RunConfig, words: Sequence[str], own: Path | None = None) -> RunConfig:
    """`config` with overrides on top: options (tasks=NAME) and single values."""
    content = to_dict(config)
    for word in words:
        override = parse_override(word)
        key, value = override.key_or_group, override.value()
        if override.is_delete() or override.is_sweep_override():
            raise ConfigError(f"{word}: only key=value can be changed here")
        if key in schema.groups():
            content[key] = _option(key, str(value), own)
        else:
            _put(content, key.split("."), value)
    return check.checked(RunConfig, content)


def _option(group: str, name: str, own: Path | None) -> dict[str, Any]:
    known = options(group, own)
    if name not in known:
        raise ConfigError(
            f"{group}: no option '{name}'{check.nearest(name, known)}", allowed=", ".join(known)
        )
    return read_yaml(known[name])


def _put(content: Any, parts: list[str], value: Any) -> None:
    """Set a value at a path of nested dicts; where it leads to nothing the types say so afterwards."""
    *parents, last = parts
    for part in parents:
        if not isinstance(content.get(part), dict):
            content[part] = {}
        content = content[part]
    content[last] = value


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m nemotron_ultra.evaluate", description=HELP)
    add = parser.add_argument
    add("folder", metavar="RUN", help="folder of a run, or of weights (with recipe=NAME)")
    add("overrides", nargs="*", default=[], metavar="key=value", help="as for nemotron_ultra.train")
    add("--problems", type=_count, metavar="N", help="problems a domain (tasks.validation_problems)")
    add("--max-new-tokens", type=_count, metavar="N", help="longest answer (rollout.max_new_tokens)")
    add("--config-dir", metavar="DIR", help="options and recipes of your own")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
