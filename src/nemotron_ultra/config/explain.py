"""The texts of `--help`, `--help KEY`, `--list` and `--eject`, all read from the types and the YAML files."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nemotron_ultra.config import check, compose, schema
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.errors import ConfigError

USAGE = """\
python -m nemotron_ultra.train recipe=NAME [key=value ...] [flags]

  recipe=pretrain                    train a recipe; the same command again resumes it
  model=nano                         choose another option of a group
  recipe=grpo loss=dapo              the same for a group that not every run has; loss=null leaves it out
  trainer.steps=50 optim.lr=1e-3     set values; 1e3 and 20e12 are numbers, null is null
  data.phases.0.sources.python.weight=2    reach into lists by number, into names by name
  '~data.phases.0.until_tokens'      take a value out

  --help [KEY]       this page, or one key or group with type, default and text
  --list             recipes and options, one line each
  --cfg job          the resolved configuration as YAML; nothing runs
  --plan             parameters, memory, FLOPs, steps and milestones; nothing runs
  -m                 several values: -m optim.lr=1e-3,3e-3 runs one after another
  --config-dir DIR   your own recipes (DIR/NAME.yaml) and options (DIR/GROUP/NAME.yaml)
  --eject NAME       copy a recipe or an option (GROUP/NAME) into DIR, or here, to change it
"""

SHORT = """\
nemotron_ultra.train needs a recipe:

  python -m nemotron_ultra.train recipe=pretrain     a tiny model on real text, on any machine
  python -m nemotron_ultra.train recipe=sft          then answers to tasks; then recipe=grpo
  python -m nemotron_ultra.train --list              all recipes and options
  python -m nemotron_ultra.train --help              how to change things, and every key
"""


def first_comment(file: Path) -> str:
    """The first comment line of a YAML file: what it is."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")


def list_text(config_dir: Path | None = None) -> str:
    """Recipes, then the options of each group, with their first comment line."""
    lines = ["recipes (recipe=NAME)", *_named(compose.recipes(config_dir))]
    for group in schema.groups():
        lines += ["", f"{group} ({group}=NAME)", *_named(compose.options(group, config_dir))]
    return "\n".join(lines)


def help_text(config_dir: Path | None = None) -> str:
    """Usage, what there is, and every key."""
    groups = [f"  {group:<10} {', '.join(compose.options(group, config_dir))}" for group in schema.groups()]
    return "\n".join(
        [
            USAGE,
            "recipes",
            *_named(compose.recipes(config_dir)),
            "",
            "options",
            *groups,
            "",
            "keys (type, default, meaning)",
            *key_lines(schema.all_keys()),
        ]
    )


def subject_text(subject: str, config_dir: Path | None = None, values: dict[str, Any] | None = None) -> str:
    """One key or group: its text, and the keys below it; `values`, a resolved recipe, adds what it sets."""
    found = [key for key in schema.all_keys() if _below(key.path, subject)]
    if not found:
        names = [key.path for key in schema.all_keys()]
        same_end = [name for name in names if name.rsplit(".", 1)[-1] == subject]
        hint = f" (did you mean '{same_end[0]}'?)" if same_end else check.nearest(subject, names)
        raise ConfigError(f"--help {subject}: no such key{hint}", allowed="a key or group of --help")
    lines = list(key_lines(found, values))
    if subject in schema.groups():
        lines += ["", "options", *_named(compose.options(subject, config_dir))]
    return "\n".join(lines)


def key_lines(keys: Iterable[schema.Key], values: dict[str, Any] | None = None) -> Iterator[str]:
    """`path  (type, default)` and the text below it."""
    for key in keys:
        facts = [key.type] if key.default is schema.MISSING else [key.type, f"default {key.default_text}"]
        if key.default is schema.MISSING and key.nested is None:
            facts.append("required")
        if values is not None and (value := lookup(values, key.path)) is not None and key.nested is None:
            facts.append(f"here {schema.plain(value)}")
        yield f"  {key.path}  ({', '.join(facts)})"
        yield from textwrap.wrap(key.text, 92, initial_indent="      ", subsequent_indent="      ")


def lookup(values: dict[str, Any], path: str) -> Any:
    """The value at a dotted path of a resolved configuration; None where the path leaves it."""
    here: Any = values
    for part in path.split("."):
        here = here.get(part) if isinstance(here, dict) else None
    return here


def eject(name: str, config_dir: Path | None = None) -> Path:
    """Copy a shipped recipe NAME or option GROUP/NAME into `config_dir` or the current folder."""
    group, _, option = name.rpartition("/")
    known = compose.options(group) if group else compose.recipes()
    if (group and group not in schema.groups()) or option not in known:
        names = [*compose.recipes(), *(f"{g}/{o}" for g in schema.groups() for o in compose.options(g))]
        raise ConfigError(
            f"--eject: nothing is called '{name}'{check.nearest(name, names)}", allowed="see --list"
        )
    target = (config_dir or Path.cwd()) / group / f"{option}.yaml"
    if target.exists():
        raise ConfigError(
            f"--eject: {target} exists; nothing is overwritten", do="move it or give --config-dir DIR"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(known[option], target)
    return target


def reference_markdown() -> str:
    """The table of every key for docs/configuration.md, a section per field of RunConfig."""
    lines: list[str] = []
    for key in schema.all_keys(RunConfig):
        if "." not in key.path:
            lines += ["", f"### {key.path}", "", key.text, ""]
            lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        else:
            cells = (f"`{key.path}`", key.type, f"`{key.default_text}`", key.text)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines).strip() + "\n"


def _named(files: dict[str, Path]) -> list[str]:
    width = max(map(len, files), default=0)
    return [f"  {name:<{width}}  {first_comment(file)}" for name, file in files.items()]


def _below(path: str, subject: str) -> bool:
    return path == subject or path.startswith((subject + ".", subject + "["))
