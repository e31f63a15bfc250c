"""How far a preparation is: done, rate and time left."""

from __future__ import annotations

import sys
import time

from nemotron_ultra.data.parts import Receipt


class Progress:
    """Bytes done, rate and time left: a live line on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, total_bytes: int | None, every: float = 5.0):
        self.total, self.every = total_bytes, every
        self.live = sys.stderr.isatty()
        self.started = self.shown = time.monotonic()
        self.bytes = self.tokens = self.new_bytes = self.new_tokens = self.resumed = 0

    def __call__(self, receipt: Receipt, resumed: bool) -> None:
        self.add(receipt.size, sum(receipt.tokens.values()), resumed)

    def add(self, size: int, tokens: int, resumed: bool) -> None:
        """Bytes of input and tokens more, by this run or an earlier one."""
        self.bytes, self.tokens = self.bytes + size, self.tokens + tokens
        if resumed:
            self.resumed += 1
            return
        self.new_bytes, self.new_tokens = self.new_bytes + size, self.new_tokens + tokens
        now = time.monotonic()
        if now - self.shown >= (0.2 if self.live else self.every):
            self.shown = now
            text = f"\r\x1b[K{self.line()}" if self.live else f"{self.line()}\n"
            print(text, end="", file=sys.stderr, flush=True)

    def line(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-3)
        rate = f"{self.new_tokens / seconds:,.0f} tokens/s"
        if not self.total:
            return f"{self.bytes / 1e6:,.1f} MB  {self.tokens:,} tokens  {rate}"
        left = (self.total - self.bytes) / max(self.new_bytes / seconds, 1e-9)
        share = 100 * self.bytes / self.total
        done = f"{self.bytes / 1e6:,.1f} of {self.total / 1e6:,.1f} MB ({share:.0f} %)"
        return f"{done}  {self.tokens:,} tokens  {rate}  {left:,.0f} s left"

    def note(self, text: str) -> None:
        """A line that stays."""
        self.end()
        print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr)
