"""Errors that speak to the person at the keyboard: what is wrong, what was found, what is allowed, the mend.

Each class carries the exit code that the command line returns for it; entry points print the message and no
traceback.
"""

from __future__ import annotations


class NemotronError(Exception):
    """Base of every error a user can cause or meet. `exit_code` is the process's exit status."""

    exit_code = 1

    def __init__(self, what: str, *, got: object = None, allowed: object = None, do: str | None = None):
        self.what, self.got, self.allowed, self.do = what, got, allowed, do
        parts = [what]
        if got is not None:
            parts.append(f"got {got}")
        if allowed is not None:
            parts.append(f"allowed: {allowed}")
        if do is not None:
            parts.append(do)
        super().__init__("; ".join(parts))


class ConfigError(NemotronError, ValueError):
    """A key, value or combination in the configuration."""

    exit_code = 2


class DataError(NemotronError, ValueError):
    """A corpus, shard, tokenizer or manifest."""

    exit_code = 3


class CheckpointError(NemotronError, RuntimeError):
    """A checkpoint folder: missing, unexpected, mis-shaped or damaged tensors."""

    exit_code = 4


class BackendError(NemotronError, RuntimeError):
    """A library, device or machine that the configuration asks for and that is not here."""

    exit_code = 5


class NonFiniteError(NemotronError, ArithmeticError):
    """A loss or gradient that is NaN or infinite."""

    exit_code = 6


# The run saved its state after SIGTERM or SIGUSR1; the same command continues it (EX_TEMPFAIL of sysexits.h).
EXIT_SAVED_ON_SIGNAL = 75
