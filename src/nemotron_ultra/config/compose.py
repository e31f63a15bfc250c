"""Recipe + overrides -> RunConfig: Hydra composes `recipes/` with the options of `configs/`, pydantic checks.

Hydra is used through its compose API, imported on first use; it leaves no output folder and no global state.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemotron_ultra.config import check, schema, stages
from nemotron_ultra.config.base import key_of
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

PACKAGE = Path(__file__).resolve().parent.parent
UNUSABLE = "not all positive numbers:"


def share_dir(kind: str) -> Path:
    """Folder "configs" or "recipes": in the package (wheel) or beside `src/` (checkout, editable install)."""
    candidates = [PACKAGE / "_share" / kind, PACKAGE.parent.parent / kind]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"the folder {kind}/ of the package is not there", got=candidates, do="install it again"
    )


def load_recipe(name: str, overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> RunConfig:
    """The checked configuration of a recipe, for notebooks, tests and the command line.

    overrides: as on the command line, such as ["model=nano", "trainer.steps=50"].
    config_dir: a folder with recipes (DIR/NAME.yaml) and options (DIR/GROUP/NAME.yaml) of your own.
    Raises ConfigError that lists all mistakes.
    """
    own = own_folder(config_dir)
    known = recipes(own)
    if name not in known:
        raise ConfigError(
            f"recipe: no recipe '{name}'{check.nearest(name, known)}",
            allowed=", ".join(known),
            do="`--list` says what each is",
        )
    problems: list[str] = []
    parsed = _parse(overrides, problems)
    choices, values = _sort_overrides(parsed, own, problems)
    cfg = _compose(name, choices, own)
    for override in values:
        _apply(cfg, override, problems)
    return _finish(cfg, problems)


def recipes(config_dir: Path | None = None) -> dict[str, Path]:
    """Recipe name -> file; a user's recipe comes before a shipped one of the same name."""
    folders = [share_dir("recipes"), *([config_dir] if config_dir else [])]
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def options(group: str, config_dir: Path | None = None) -> dict[str, Path]:
    """Option name of one group -> file."""
    folders = [share_dir("configs"), *([config_dir] if config_dir else [])]
    return {file.stem: file for folder in folders for file in sorted((folder / group).glob("*.yaml"))}


def to_dict(config: Any) -> dict[str, Any]:
    """A typed configuration as plain dicts and lists; `RunConfig(**...)` of it is equal to the original."""
    return _plain(config)


def to_yaml(config: Any) -> str:
    """A typed configuration as YAML, in the order of its fields."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False, width=110, allow_unicode=True)


def read_config(path: str | Path) -> RunConfig:
    """The RunConfig of a config.yaml that a run has written."""
    return check.checked(RunConfig, read_yaml(Path(path)))


def read_yaml(path: Path, resolve: bool = True) -> dict[str, Any]:
    """Plain dict of one YAML file (1e3 is a number); ConfigError where it is no YAML of keys and values."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=resolve)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text", got=_one_line(error), do="save it as UTF-8") from error
    except PermissionError as error:
        raise ConfigError(f"{path}: may not be read", do="change its permissions") from error
    except (YAMLError, OSError) as error:  # omegaconf raises OSError for text that is neither keys nor list
        raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys and values", got=type(content).__name__)
    return {str(key): value for key, value in content.items()}


def parse_override(text: str) -> Override:
    """One `key=value` of the command line, in Hydra's grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"{text}: not an override ({_one_line(error)})", allowed="key=value") from error
    if not override.key_or_group or override.package is not None:
        raise ConfigError(f"{text}: not an override", allowed="key=value")
    return override


def own_folder(config_dir: str | Path | None) -> Path | None:
    if config_dir is None:
        return None
    folder = Path(config_dir).resolve()
    if not folder.is_dir():
        raise ConfigError("--config-dir: no such folder", got=config_dir)
    return folder


def _parse(overrides: Sequence[str], problems: list[str]) -> list[Override]:
    parsed = []
    for text in overrides:
        try:
            parsed.append(parse_override(text))
        except ConfigError as error:
            problems.append(str(error))
    return parsed


def _sort_overrides(
    parsed: Iterable[Override], own: Path | None, problems: list[str]
) -> tuple[list[str], list[Override]]:
    """Split into choices of an option (model=ultra) and values (trainer.steps=5), noting what cannot be."""
    groups, choices, values = schema.groups(), [], []
    for override in parsed:
        key = override.key_or_group
        if override.is_sweep_override():
            problems.append(f"{key}: several values in {override.input_line}; -m runs them one by one")
        elif key not in groups or override.is_delete() or _is_left_out(override):
            values.append(override)
        elif (name := schema.plain(override.value())) in (known := options(key, own)):
            choices.append(f"{key}={name}")
        else:
            hint = check.nearest(name, known)
            problems.append(f"{key}: no option '{name}'{hint}; allowed: {', '.join(known)}")
    return choices, values


def _is_left_out(override: Override) -> bool:
    return override.value() is None and override.key_or_group in schema.optional_groups()


def _compose(name: str, choices: list[str], own: Path | None) -> DictConfig:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    folders = [*([own] if own else []), share_dir("recipes"), share_dir("configs")]
    file = recipes(own)[name]
    read_yaml(file, resolve=False)  # names the file where it is no YAML of keys and values
    first = file.parent  # Hydra looks for the primary config before it reads hydra.searchpath
    others = [folder for folder in folders if folder != first]
    quoted = ",".join("'file://" + str(folder).replace("'", "\\'") + "'" for folder in others)
    places = f"hydra.searchpath=[{quoted}]"
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(first), job_name=name, version_base="1.3"):
            if any(choice.partition("=")[0] in schema.optional_groups() for choice in choices):
                own_choices = compose(name, [places], return_hydra_config=True).hydra.runtime.choices
                choices = _added_where_new(choices, own_choices)
            cfg = compose(name, [places, *choices])
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise _explain_composition(error, name) from error
    except RecursionError as error:
        raise ConfigError(f"recipe {name}: its defaults lead back to itself") from error
    finally:
        GlobalHydra.instance().hydra = before
    OmegaConf.set_struct(cfg, False)
    cfg.recipe = name
    return cfg


def _added_where_new(choices: list[str], chosen: Mapping[str, Any]) -> list[str]:
    """In Hydra's grammar +loss=dapo adds a group that the recipe does not name; the last choice counts."""
    by_group = {choice.partition("=")[0]: choice for choice in choices}
    return [choice if group in chosen else f"+{choice}" for group, choice in by_group.items()]


def _explain_composition(error: Exception, name: str) -> ConfigError:
    from hydra.errors import MissingConfigException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        missing = str(error.missing_cfg_file)
        names = [str(option) for option in error.options or []]
        hint = check.nearest(missing.rsplit("/", 1)[-1], names)
        return ConfigError(
            f"recipe {name}: its defaults name '{missing}', which is not there{hint}",
            allowed=", ".join(names) or None,
        )
    return ConfigError(f"recipe {name}: {_one_line(error)}")


def _apply(cfg: DictConfig, override: Override, problems: list[str]) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key = override.key_or_group
    try:
        if override.is_delete():
            _remove(cfg, key)
        else:
            OmegaConf.update(cfg, key, override.value(), merge=True, force_add=True)
    except (OmegaConfBaseException, AttributeError, TypeError, ValueError, LookupError) as error:
        problems.append(f"{key}: cannot be set ({_one_line(error)})")


def _finish(cfg: DictConfig, problems: list[str]) -> RunConfig:
    """Interpolations replaced by their values, then the types; mistakes of both in one error.

    A value that cannot be computed from others is left out, and told only if nothing else explains it: with
    optim.lr=abc the mistake is optim.lr, not the schedule.min_lr that is a hundredth of it.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_new_resolver("mul", _product, replace=True)
    derived: list[str] = []
    while True:
        try:
            content = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
            break
        except OmegaConfBaseException as error:
            place = str(error.full_key or "")
            if not place:
                raise check.mistakes([*problems, f"{place}: {_one_line(error)}"]) from error
            (derived if _is_derived(error) else problems).append(f"{place}: {_one_line(error)}")
            _remove(cfg, place)
    values = {str(key): value for key, value in content.items()}
    return check.checked(RunConfig, values, [*problems, *stages.part_problems_of(values)], derived)


def _product(*factors: Any) -> float:
    """${mul:a,b,...} in YAML: a product, for tokens that follow from steps and batch."""
    try:
        numbers = [float(factor) for factor in factors]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{UNUSABLE} {factors}") from error
    if not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"{UNUSABLE} {factors}")
    return math.prod(numbers)


def _is_derived(error: Exception) -> bool:
    """Whether the mistake lies in another key: a factor of ${mul:...}, or a key that is not there."""
    text = str(error)
    named = re.search(r"Interpolation key '([\w.]+)' not found", text)
    return (
        UNUSABLE in text
        or "is not a container" in text
        or (named is not None and schema.find(tuple(named[1].split("."))) is not None)
    )


def _remove(cfg: DictConfig, key: str) -> None:
    from omegaconf import OmegaConf

    parent, _, last = key.rpartition(".")
    holder = OmegaConf.select(cfg, parent) if parent else cfg
    del holder[int(last) if last.isdigit() else last]  # pop would resolve the value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {key_of(field.name): _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(
        line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))
    )
