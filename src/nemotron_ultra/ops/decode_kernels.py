"""`csrc/decode.c`, compiled for this machine when first used: several layers in one call, float32, on a CPU.

The library is kept in the user's cache folder under a name made of source, flags, compiler and processor.
Without a C compiler, or with NEMOTRON_ULTRA_DECODE=torch, decoding uses the functions of `step.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from nemotron_ultra.errors import BackendError, DataError

SOURCE = Path(__file__).parent / "csrc" / "decode.c"
SWITCH = "NEMOTRON_ULTRA_DECODE"
MOST_ROWS = 256  # rows of one call, as in the source
MOST_DRAFT_LAYERS = 128  # of a module that drafts
FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros", "-freciprocal-math"),
)
MAMBA, ATTENTION, MOE, MLP = range(4)
MATRICES = 8


class Matrix(ctypes.Structure):
    """Twin of `Matrix` in the source: float32, or int8 with a scale for each row."""

    _fields_ = [*((name, c_void_p) for name in ("data", "scale", "bias")), ("outs", c_int64)]


class Layer(ctypes.Structure):
    """Twin of `Layer` in the source, which says what each field means. Pointers of absent tensors are 0."""

    _fields_ = [
        ("kind", c_int64),
        ("norm", c_void_p),
        ("eps", c_float),
        ("w", Matrix * MATRICES),
        *((name, Matrix) for name in ("expert_up", "expert_down")),
        *((name, c_void_p) for name in ("conv", "conv_bias", "a_log", "skip", "dt_bias", "gate_norm")),
        ("dt_low", c_float),
        ("dt_high", c_float),
        *((name, c_void_p) for name in ("window", "state", "full", "u", "b", "log_decay", "key", "value")),
        *((name, c_int64) for name in ("capacity", "heads", "head_dim", "groups", "columns", "taps")),
        ("correction", c_void_p),
        *((name, c_int64) for name in ("experts", "chosen", "expert_hidden", "expert_width", "normalise")),
        ("factor", c_float),
    ]


class Work(ctypes.Structure):
    """Twin of `Work` in the source."""

    _fields_ = [
        ("x", c_void_p),
        *((name, c_int64) for name in ("batch", "tokens", "width", "waits")),
        ("length", c_void_p),
        *((name, c_void_p) for name in ("normed", "wide", "narrow", "hidden", "mixed", "scratch")),
        *((name, c_int64) for name in ("normed_size", "scratch_size")),
    ]


class Model(ctypes.Structure):
    """Twin of `Model` in the source."""

    _fields_ = [
        ("layers", c_void_p),
        ("count", c_int64),
        *((name, c_void_p) for name in ("embedding", "norm", "head")),
        ("eps", c_float),
        ("vocabulary", c_int64),
    ]


class Draft(ctypes.Structure):
    """Twin of `Draft` in the source."""

    _fields_ = [
        ("layers", c_void_p),
        ("count", c_int64),
        *((name, c_void_p) for name in ("embedding", "embedded_norm", "hidden_norm", "last_norm")),
        *((name, Matrix) for name in ("join", "head")),
        *((name, c_float) for name in ("embedded_eps", "hidden_eps", "last_eps")),
        *((name, c_int64) for name in ("drafts", "hidden_stride", "token_stride", "out_stride")),
        *((name, c_void_p) for name in ("hidden", "token", "counts", "length", "out")),
        *((name, c_void_p) for name in ("joined", "last", "logits")),
    ]


def compiler() -> str | None:
    """Path of the C compiler that would be used, on a POSIX system."""
    if os.name != "posix":
        return None
    names = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None: there is no compiler, it fails (with a warning), or SWITCH says so.

    Raises BackendError for another value of SWITCH.
    """
    command, asked = compiler(), os.environ.get(SWITCH, "")
    if asked not in ("", "compiled", "torch"):
        raise BackendError(f"variable {SWITCH}", got=repr(asked), allowed="compiled, torch, or unset")
    if asked == "torch" or command is None:
        return None
    try:
        return _loaded(command)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        warnings.warn(f"decoding uses torch: {SOURCE.name} did not compile: {detail}", stacklevel=2)
        return None


def run_layers(layers: ctypes.Array[Layer], first: int, count: int, work: Work) -> None:
    """Layers first .. first + count - 1 of an array, on the rows that `work` describes."""
    start = ctypes.addressof(layers) + first * ctypes.sizeof(Layer)
    library().nu_run_layers(start, count, ctypes.addressof(work), torch.get_num_threads())


def commit_layers(layers: ctypes.Array[Layer], work: Work, keep_B: Tensor) -> None:
    """The states of all layers with pending tokens take in the first keep_B[b], int64, of row b."""
    start, threads = ctypes.addressof(layers), torch.get_num_threads()
    library().nu_commit_layers(start, len(layers), ctypes.addressof(work), keep_B.data_ptr(), threads)


def start(layers: ctypes.Array[Layer]) -> int:
    return ctypes.addressof(layers)


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def matrix(weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Matrix:
    """weight [..., outs, k], float32, or int8 with scale [..., outs]; bias [outs]."""
    return Matrix(address(weight), address(scale), address(bias), weight.shape[-2])


def few_rows(x_BD: Tensor, weight_VD: Tensor) -> Tensor:
    """x W^T [B, V] for contiguous float32 tensors on a CPU and at most MOST_ROWS rows."""
    y_BV = torch.empty(len(x_BD), len(weight_VD), dtype=x_BD.dtype)
    sizes = (len(x_BD), weight_VD.data_ptr(), weight_VD.shape[1], len(weight_VD), torch.get_num_threads())
    library().nu_few_rows(x_BD.data_ptr(), y_BV.data_ptr(), *sizes)
    return y_BV


def likeliest(x_BD: Tensor, weight_VD: Tensor, usable: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of x W^T: ids [B] of the largest logits below `usable`, their log-softmax among those and among all."""
    rows, outs = len(x_BD), len(weight_VD)
    logits_BV = torch.empty(rows, outs)
    token_B, logprob_B, model_B = torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows)
    sizes = (rows, weight_VD.data_ptr(), weight_VD.shape[1], outs, usable)
    found = (token_B.data_ptr(), logprob_B.data_ptr(), model_B.data_ptr(), torch.get_num_threads())
    library().nu_likeliest(x_BD.data_ptr(), logits_BV.data_ptr(), *sizes, *found)
    return token_B, logprob_B, model_B


def advance(model: Model, work: Work, token_M: Tensor, width: int) -> Tensor:
    """ids [batch * tokens] of `work` through all layers -> hidden [batch * tokens, width]."""
    hidden_MD = torch.empty(work.batch * work.tokens, width)
    pointers = (ctypes.addressof(model), ctypes.addressof(work), token_M.data_ptr(), hidden_MD.data_ptr())
    library().nu_advance(*pointers, torch.get_num_threads())
    return hidden_MD


@dataclass(frozen=True)
class Verified:
    """hidden [M, D] and, after each place, what `likeliest` gives, [M] each; keep_B tokens a row stayed."""

    hidden_MD: Tensor
    token_M: Tensor
    logprob_M: Tensor
    model_logprob_M: Tensor
    keep_B: Tensor


def verify(model: Model, work: Work, token_M: Tensor, width: int, usable: int) -> Verified:
    """`advance`, `likeliest` and, where states wait, `commit_layers` of what stays: see the source."""
    batch, rows = work.batch, work.batch * work.tokens
    found = Verified(
        torch.empty(rows, width),
        torch.empty(rows, dtype=torch.int64),
        torch.empty(rows),
        torch.empty(rows),
        torch.empty(batch, dtype=torch.int64),
    )
    logits_MV = torch.empty(rows, model.vocabulary)
    outputs = (found.token_M, found.logprob_M, found.model_logprob_M, found.keep_B)
    library().nu_verify(
        ctypes.addressof(model),
        ctypes.addressof(work),
        *(t.data_ptr() for t in (token_M, found.hidden_MD, logits_MV)),
        usable,
        *(t.data_ptr() for t in outputs),
        torch.get_num_threads(),
    )
    return found


def check_ids(model: Model, token_M: Tensor) -> None:
    """Raises DataError for an id that the model does not have."""
    place = library().nu_first_unknown(ctypes.addressof(model), token_M.data_ptr(), token_M.numel())
    if place >= 0:
        wrong = token_M.flatten()[place].item()
        raise DataError("token: no id of this model", got=wrong, allowed=f"0 to {model.vocabulary - 1}")


def draft(what: Draft, first: Work, later: Work) -> None:
    library().nu_draft(*map(ctypes.addressof, (what, first, later)), torch.get_num_threads())


@dataclass(frozen=True)
class Round:
    """Of B sequences: keep [B], and of each place the token found there with its log-probabilities, as lists;
    hidden [B * K, D] and token [B * K] of all places, last [B, D] and next [B] of those after what stayed.
    """

    keep: list[int]
    found: list[int]
    logprobs: list[float]
    model_logprobs: list[float]
    hidden_MD: Tensor
    token_M: Tensor
    last_BD: Tensor
    next_B: Tensor


def draft_and_verify(
    draft: Draft, works: tuple[Work, Work, Work], model: Model, pending_B: Tensor, logits: int, usable: int
) -> Round:
    """`draft` with works[0] and [1], `verify` with works[2]: see the source. logits: address of room."""
    work = works[2]
    batch, rows, width = work.batch, work.batch * work.tokens, work.width
    ints = torch.empty(2 * rows + 2 * batch, dtype=torch.int64)  # tokens, found, keep, next
    floats, hidden = torch.empty(2 * rows), torch.empty(rows + batch, width)
    here, at, size = ints.data_ptr(), floats.data_ptr(), ints.element_size()
    library().nu_round(
        *map(ctypes.addressof, (draft, *works[:2], model, work)),
        *(pending_B.data_ptr(), here, hidden.data_ptr(), logits, usable),
        *(here + size * rows, at, at + 4 * rows, here + 2 * size * rows),
        *(hidden.data_ptr() + 4 * rows * width, here + size * (2 * rows + batch), torch.get_num_threads()),
    )
    numbers, logprobs = ints.tolist(), floats.tolist()
    return Round(
        numbers[2 * rows : 2 * rows + batch],
        numbers[rows : 2 * rows],
        logprobs[:rows],
        logprobs[rows:],
        hidden[:rows],
        ints[rows : 2 * rows],
        hidden[rows:],
        ints[2 * rows + batch :],
    )


def fits(*tensors: Tensor | None) -> bool:
    """Whether the kernels can read these tensors where they are."""
    return all(
        t is None or (t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous())
        for t in tensors
    )


def _loaded(command: str) -> ctypes.CDLL:
    path = _cache_folder() / f"decode-{_key(command)}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / "decode.so"
            _compile(command, made)
            os.replace(made, path)
    found = ctypes.CDLL(str(path))
    found.nu_run_layers.argtypes = [c_void_p, c_int64, c_void_p, c_int64]
    found.nu_few_rows.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64]
    found.nu_commit_layers.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_int64]
    found.nu_draft.argtypes = [c_void_p, c_void_p, c_void_p, c_int64]
    found.nu_likeliest.argtypes = [
        *(c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64),
        *(c_void_p, c_void_p, c_void_p, c_int64),
    ]
    found.nu_advance.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p, c_int64]
    found.nu_round.argtypes = [*[c_void_p] * 9, c_int64, *[c_void_p] * 6, c_int64]
    found.nu_verify.argtypes = [*[c_void_p] * 5, c_int64, *[c_void_p] * 4, c_int64]
    found.nu_first_unknown.argtypes, found.nu_first_unknown.restype = [c_void_p, c_void_p, c_int64], c_int64
    found.nu_draft.restype = found.nu_likeliest.restype = found.nu_advance.restype = None
    found.nu_verify.restype = found.nu_round.restype = None
    found.nu_run_layers.restype = found.nu_commit_layers.restype = found.nu_few_rows.restype = None
    return found


def _compile(command: str, made: Path) -> None:
    """With threads where the compiler has OpenMP, else for one thread."""
    base = [command, *FLAGS, str(SOURCE), "-o", str(made)]
    first = subprocess.run([*base, "-fopenmp", "-lm"], capture_output=True, text=True, timeout=120)
    if first.returncode:
        subprocess.run([*base, "-lm"], capture_output=True, text=True, timeout=120, check=True)


def _key(command: str) -> str:
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), _version(command), _processor())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _version(command: str) -> bytes:
    return subprocess.run([command, "--version"], capture_output=True, timeout=60, check=True).stdout


def _processor() -> bytes:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {platform.processor()} {features}".encode()


def _cache_folder() -> Path:
    """Made if it can be; else a folder of this user among the temporary files."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for folder in (
        Path(base) / "nemotron_ultra",
        Path(tempfile.gettempdir()) / f"nemotron_ultra-{os.getuid()}",
    ):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise OSError("no folder for compiled code can be written")
