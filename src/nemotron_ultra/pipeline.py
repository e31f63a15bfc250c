"""`python -m nemotron_ultra.pipeline chain=NAME [key=value ...]`: several runs, in a row or side by side.

Every stage runs in this process, as `python -m nemotron_ultra.train` would run it. The same command again
skips what is finished and continues what is not.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from nemotron_ultra import train
from nemotron_ultra.config import check
from nemotron_ultra.config.compose import own_folder
from nemotron_ultra.config.explain import first_comment
from nemotron_ultra.errors import EXIT_SAVED_ON_SIGNAL, ConfigError, NemotronError
from nemotron_ultra.trainers.chain import chains, load_chain, plan_lines

HELP = """\
python -m nemotron_ultra.pipeline chain=NAME [run.dir=runs] [run.name=NAME] [run.seed=N] [key=value ...]

  chain=tiny                  pretrain, SFT, GRPO, one teacher a domain, MOPD, scores of each
  chain=nvfp4_gap             the same pretraining in BF16 and in NVFP4, gap of the loss
  chain=bf16_gradients        gradient buffers in FP32 and in BF16: what is left of MTP
  key=value                   an override for every stage that has such a key, as for nemotron_ultra.train
  STAGE:key=value             for one stage (or several: teacher_*:trainer.steps=20)
  --plan                      stages, steps and commands; nothing runs
  --list                      all chains
  --config-dir DIR            chains (DIR/chains/NAME.yaml), recipes and options of your own

Stages are the runs DIR/NAME/STAGE; the table is DIR/NAME/scores.json, the page DIR/NAME/report.html.
The same command continues after any interruption; exit status 75 means: saved after a signal, run me again.
"""
FLAGS = ("--help", "-h", "--list", "--plan", "--config-dir")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status, and prints an error without its traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return perform(words)
    except NemotronError as error:
        if os.environ.get(train.TRACEBACK, "0") != "0":
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Stopped as stopped:
        print(
            f"{stopped.name}: stopped between two steps; continue with\n  {_command(words)}", file=sys.stderr
        )
        return EXIT_SAVED_ON_SIGNAL
    except BrokenPipeError:  # `--help | head` closes our output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"interrupted; continue with\n  {_command(words)}", file=sys.stderr)
        return train.EXIT_INTERRUPTED


def perform(words: list[str]) -> int:
    """Do what is asked; raises NemotronError."""
    flags, folder, overrides = _sort(words)
    names = [word.removeprefix("chain=") for word in overrides if word.startswith("chain=")]
    overrides = [word for word in overrides if not word.startswith("chain=")]
    if "--list" in flags:
        print(_list_text(folder))
        return 0
    if not flags & {"--help", "-h"} and (names or overrides or flags):
        if len(names) != 1:
            raise ConfigError("name one chain", allowed=f"chain=NAME of {', '.join(chains(folder))}")
        return _run(names[0], overrides, folder, plan="--plan" in flags, words=words)
    print(HELP, end="")
    return 0


def _run(name: str, overrides: list[str], folder: Path | None, *, plan: bool, words: list[str]) -> int:
    chain = load_chain(name, overrides, folder)
    if plan:
        print("\n".join(plan_lines(chain)))
        return 0
    from nemotron_ultra.observe.console import Console
    from nemotron_ultra.trainers.chain_run import run_chain, summary, table_lines

    console = Console(len(chain.stages))
    with _stopping_on_signals():
        code = run_chain(chain, _train, console)
    if code:
        console.note(f"the chain stopped with exit status {code}; the same command continues:")
        console.note(f"  {_command(words)}")
        return code
    print("\n" + "\n".join(table_lines(summary(chain))))
    console.done(chain.folder)
    return 0


def _train(words: Sequence[str]) -> int:
    """The train entry point, as if `words` had been typed: what it proposes as the next command is right."""
    before = sys.argv
    sys.argv = [str(Path(train.__file__)), *words]
    try:
        return train.main(words)
    finally:
        sys.argv = before


class Stopped(SystemExit):
    """A signal came while no step was running: everything that counts is on the disk."""

    def __init__(self, name: str):
        super().__init__(EXIT_SAVED_ON_SIGNAL)
        self.name = name


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """SIGTERM and SIGUSR1 end the chain with status 75; while a stage trains, its own handlers save first."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in train.FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _sort(words: list[str]) -> tuple[set[str], Path | None, list[str]]:
    """(flags, --config-dir, overrides), in any order."""
    flags, folder, overrides, rest = set(), None, [], list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            overrides.append(word)
        elif flag == "--config-dir":
            if not equals and not rest:
                raise ConfigError("--config-dir: expected a folder")
            folder = own_folder(value if equals else rest.pop(0))
        elif word in FLAGS:
            flags.add(word)
        else:
            raise ConfigError(f"{word}: unknown flag{check.nearest(word, FLAGS)}", allowed=", ".join(FLAGS))
    return flags, folder, overrides


def _list_text(folder: Path | None) -> str:
    known = chains(folder)
    width = max(map(len, known), default=0)
    return "\n".join(
        ["chains (chain=NAME)", *(f"  {n:<{width}}  {first_comment(f)}" for n, f in known.items())]
    )


def _command(words: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "nemotron_ultra.pipeline", *words])


if __name__ == "__main__":
    sys.exit(main())
