"""Memory used again: fresh memory costs a page fault every 4 KiB, an eighth of a long mixer step on a CPU.

`scratch` holds named buffers that live from call to call. `recycled` makes tensors whose memory goes back to
a shelf, not to the system, once nothing refers to them.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

SHELF_BYTES = 1 << 29  # idle memory kept for the next step
SMALLEST_BYTES = 1 << 20  # below this malloc reuses memory by itself
ALIGNMENT = 64


class Scratch(threading.local):
    """One set of buffers a thread. A buffer's content is valid only inside the call that took it."""

    def __init__(self) -> None:
        self.buffers: dict[tuple, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Uninitialised tensor of this shape, of the dtype and device of `like`."""
        key, size = (name, like.dtype, like.device), math.prod(shape)
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(
                False
            ):  # an inference tensor could not be written by a later training step
                buffer = torch.empty(size, dtype=like.dtype, device=like.device)
            self.buffers[key] = buffer
        return buffer[:size].view(shape)


class Shelf:
    """Blocks of memory by size. A lease is a numpy view held by a tensor's storage; its end is the return.

    Any thread may lease, and a tensor may end in any thread. The lock is reentrant because the garbage
    collector can end one tensor while its thread leases another.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.blocks: dict[int, list[np.ndarray]] = defaultdict(list)
        self.idle = 0

    def lease(self, size: int) -> np.ndarray:
        """`size` bytes or more, uninitialised, aligned for vector instructions."""
        step = 1 << max(12, size.bit_length() - 4)  # classes an eighth apart at most
        size = -(-size // step) * step
        with self.lock:
            block = self.blocks[size].pop() if self.blocks[size] else None
            self.idle -= 0 if block is None else size
        if block is None:
            block = np.empty(size + ALIGNMENT, dtype=np.uint8)
        start = -block.ctypes.data % ALIGNMENT
        view = block[start : start + size]
        weakref.finalize(view, self.back, block, size).atexit = False
        return view

    def back(self, block: np.ndarray, size: int) -> None:
        with self.lock:
            if self.idle + size <= SHELF_BYTES:
                self.blocks[size].append(block)
                self.idle += size


shelf = Shelf()
scratch = Scratch()


def recycled(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised tensor of the dtype and device of `like`, for large results made anew in every step."""
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < SMALLEST_BYTES:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    lease = torch.from_numpy(shelf.lease(size))
    return lease[:size].view(like.dtype).view(shape)
