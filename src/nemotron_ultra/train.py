"""`python -m nemotron_ultra.train recipe=NAME`: the front door; torch is imported by the run alone."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from nemotron_ultra.config import check, compose, explain, sweep
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.errors import EXIT_SAVED_ON_SIGNAL, ConfigError, NemotronError

EXIT_INTERRUPTED = 130
TRACEBACK = "NEMOTRON_ULTRA_TRACEBACK"
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
TRAINERS = {name: f"nemotron_ultra.trainers.{name}" for name in ("pretrain", "sft", "grpo", "mopd")}
ACTIONS = ("help", "eject", "list", "cfg", "plan")


@dataclass
class Request:
    """What the command line asks for; `subject` is the KEY of --help or the NAME of --eject."""

    action: str = "train"
    subject: str | None = None
    recipe: str | None = None
    config_dir: Path | None = None
    several: bool = False
    overrides: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code, and prints an error without its traceback.

    NEMOTRON_ULTRA_TRACEBACK=1 lets the exception through instead.
    """
    try:
        code = perform(read_arguments(sys.argv[1:] if arguments is None else arguments))
        if sys.stdout is not None:
            sys.stdout.flush()  # what cannot be written is met here, not while the interpreter ends
        return code
    except NemotronError as error:
        if os.environ.get(TRACEBACK, "0") != "0":
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `--help | head` closes our output
        _discard_output()
        return 0
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if (error.filename is None and not full) or os.environ.get(TRACEBACK, "0") != "0":
            raise
        if full:
            _discard_output()
        print(f"error: {error.filename or 'writing'}: {error.strerror}", file=sys.stderr)
        return NemotronError.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _discard_output() -> None:
    """Send output that cannot be written nowhere: the interpreter tries once more when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_arguments(arguments: Sequence[str]) -> Request:
    """Flags and overrides in any order; what is no flag is an override."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", nargs="?", const="")
    parser.add_argument("--eject")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--cfg", nargs="?", const="job", choices=["job"])
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--config-dir")
    parser.add_argument("--config-name")
    known, words = parser.parse_known_args(list(arguments))
    flags = [word for word in words if word.startswith("-")]
    if flags:
        names = parser._option_string_actions
        raise ConfigError(
            f"{flags[0]}: unknown flag{check.nearest(flags[0], names)}", allowed=", ".join(names)
        )
    request = Request(several=known.multirun, recipe=known.config_name)
    request.config_dir = compose.own_folder(known.config_dir)
    chosen = [name for name in ACTIONS if getattr(known, name) not in (None, False)]
    request.action = chosen[0] if chosen else "train"
    request.subject = known.eject if request.action == "eject" else known.help or None
    if known.help and "=" in known.help:
        request.subject, words = None, [known.help, *words]
    for word in words:
        if word.startswith("recipe="):
            request.recipe = word.removeprefix("recipe=")
        else:
            request.overrides.append(word)
    return request


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, do="see --help")


def perform(request: Request) -> int:
    """Do what is asked; raises NemotronError."""
    if request.action in ("help", "list", "eject"):
        print(_text(request))
        return 0
    if request.recipe is None:
        print(explain.SHORT, end="", file=sys.stderr if request.overrides else sys.stdout)
        return ConfigError.exit_code if request.overrides or request.action != "train" else 0
    if request.several:
        return _run_all(request)
    config = compose.load_recipe(request.recipe, request.overrides, request.config_dir)
    if request.action == "cfg":
        print(compose.to_yaml(config), end="")
        return 0
    if request.action == "plan":
        return _print_plan(config)
    return _train(config)


def _text(request: Request) -> str:
    if request.action == "list":
        return explain.list_text(request.config_dir)
    if request.action == "eject":
        target = explain.eject(str(request.subject), request.config_dir)
        return f"{target}\nuse it with --config-dir {request.config_dir or '.'}"
    if request.subject is None:
        return explain.help_text(request.config_dir)
    values: dict[str, Any] | None = None
    if request.recipe is not None:
        loaded = compose.load_recipe(request.recipe, request.overrides, request.config_dir)
        values = compose.to_dict(loaded)
    return explain.subject_text(request.subject, request.config_dir, values)


def _print_plan(config: RunConfig) -> int:
    from nemotron_ultra.config.plan import make_plan
    from nemotron_ultra.config.requirements import shortfalls, this_machine

    print("\n".join(make_plan(config).lines()))
    machine = this_machine()
    missing = list(shortfalls(config, machine))
    print(f"here         {machine}: {'this runs' if not missing else 'this does not run, because'}")
    for line in missing:
        print(f"             {line}")
    return 0


def _train(config: RunConfig) -> int:
    from nemotron_ultra.config.requirements import check_requirements

    check_requirements(config)
    trainer = importlib.import_module(TRAINERS[config.trainer.name])  # the first import of torch
    return trainer.run(config)


def _run_all(request: Request) -> int:
    """One process after another, all checked before the first starts; the first exit code that is not 0."""
    commands, names = [], []
    for suffix, (recipe, *overrides) in sweep.expand([f"recipe={request.recipe}", *request.overrides]):
        config = compose.load_recipe(recipe.removeprefix("recipe="), overrides, request.config_dir)
        names.append(config.run.name + suffix)
        commands.append([recipe, *overrides, f"run.name={names[-1]}"])
    if len(set(names)) < len(names):
        raise ConfigError("-m: two runs would have the same name", got=", ".join(names))
    folder = ["--config-dir", str(request.config_dir)] if request.config_dir else []
    view = {"cfg": ["--cfg"], "plan": ["--plan"]}.get(request.action, [])
    codes = []
    for number, (name, command) in enumerate(zip(names, commands, strict=True), 1):
        print(f"run {number} of {len(names)}: {name}", flush=True)
        codes.append(_run_one([sys.executable, "-m", "nemotron_ultra.train", *command, *folder, *view]))
        if codes[-1] in (EXIT_SAVED_ON_SIGNAL, EXIT_INTERRUPTED):
            break
    failed = [f"{name} (exit code {code})" for name, code in zip(names, codes, strict=False) if code]
    if failed:
        print(f"not finished: {', '.join(failed)}", file=sys.stderr)
    return next((code for code in codes if code), 0)


def _run_one(command: list[str]) -> int:
    """A child process; SIGTERM and SIGUSR1 are handed on, so that the run can save."""
    child = subprocess.Popen(command)
    before = {number: signal.signal(number, lambda got, _: child.send_signal(got)) for number in FORWARDED}
    try:
        return child.wait()
    except KeyboardInterrupt:
        return child.wait() or EXIT_INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
