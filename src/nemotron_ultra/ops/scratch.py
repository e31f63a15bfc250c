"""Scratch: named buffers that live from call to call, because fresh memory costs a page fault every 4 KiB."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


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


scratch = Scratch()
