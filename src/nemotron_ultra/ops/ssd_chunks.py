"""Chunks of the SSD scan: y = (C B^T decay) u + exp(sum a) C S, S' = exp(sum a) S + (decay u)^T B, u = dt x.

A pack of T tokens is cut into chunks of Q tokens wherever its documents begin. A 0/1 mask keeps tokens of
different documents apart inside a chunk, and a state crosses the border of two chunks only inside a document.
Exponents are never positive. The gradient of a log decay is summed over the pairs of tokens that it separates
(j before it, i at or after it); the usual difference of row and column sums loses a digit of the gradients of
A and dt_bias.

Shapes in this file: n chunks, G groups, J heads per group, Q tokens of a chunk, P head width, N state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from nemotron_ultra.ops.scratch import scratch

SLAB_ELEMENTS = 1 << 18  # of one buffer, 1 MB in float32: smaller slabs pay more for calls than cache gains
LONGEST_CHUNK = 64  # 32 and 48 are no faster and keep more states; 16 and 128 are slower


class ChunkPlan:
    """What the scan must know of the documents of a pack, for one chunk length."""

    def __init__(self, bounds: tuple[int, ...], chunk: int, dtype: torch.dtype, device: torch.device):
        self.bounds, self.total, self.chunk = bounds, bounds[-1], chunk
        self.count = -(-self.total // chunk)
        starts, ends = set(bounds[:-1]), set(bounds[1:])
        order = {start: doc for doc, start in enumerate(bounds[:-1])}
        self.start = [order.get(c * chunk) for c in range(self.count)]  # document that starts with this chunk
        after = [min((c + 1) * chunk, self.total) for c in range(self.count)]
        self.end = [
            order.get(a, len(bounds) - 1) - 1 if a in ends else None for a in after
        ]  # document that ends with it
        self.aligned = all(start % chunk == 0 for start in starts)
        lower = torch.ones(chunk, chunk, dtype=dtype, device=device).tril()
        self.lower, self.upper = lower, 1 - lower
        lengths = torch.tensor(bounds, device=device).diff()
        doc = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        doc = torch.nn.functional.pad(doc, (0, self.count * chunk - self.total), value=len(lengths) - 1)
        doc = doc.view(self.count, chunk)
        self.from_first = (doc == doc[:, :1]).to(
            dtype
        )  # [n, Q] 1 where the state that enters the chunk is seen
        self.to_last = (doc == doc[:, -1:]).to(dtype)
        self.mask = (
            lower[None] if self.aligned else lower * (doc[:, :, None] == doc[:, None, :])
        )  # [1 or n, Q, Q]


@lru_cache(maxsize=32)
def chunk_plan(bounds: tuple[int, ...], chunk: int, dtype: torch.dtype, device: torch.device) -> ChunkPlan:
    """The plan of a pack or a part of one, kept because every layer of a step asks for the same ones."""
    with torch.inference_mode(False):
        return ChunkPlan(bounds, chunk, dtype, device)


@dataclass
class Decays:
    """Factors of all chunks, [n, G, J, Q] but for `through` [n, G, J]."""

    dt: Tensor
    logs: Tensor  # sum of dt A since the chunk or the document began
    rest: Tensor  # what rounding took from it: after a sum of -2000 the next token's -0.001 would be noise
    into: Tensor  # state that enters the chunk -> token
    out: Tensor  # token -> state that leaves the chunk
    through: Tensor  # state that enters -> state that leaves

    @classmethod
    def of(cls, dt_TH: Tensor, A_H: Tensor, groups: int, plan: ChunkPlan) -> Decays:
        heads = dt_TH.shape[1]
        dt = torch.nn.functional.pad(dt_TH, (0, 0, 0, plan.count * plan.chunk - plan.total))
        dt = dt.view(plan.count, plan.chunk, heads).transpose(1, 2).contiguous()
        exact = torch.matmul((dt * A_H[:, None]).double(), plan.mask.mT.double())
        logs = exact.to(dt.dtype)
        into = logs.exp() * plan.from_first[:, None]
        out = (exact[..., -1:] - exact).to(dt.dtype).clamp_(max=0).exp_() * plan.to_last[:, None]
        rest = (exact - logs).to(dt.dtype)
        shape = (plan.count, groups, heads // groups, plan.chunk)
        dt, logs, rest, into, out = (t.view(shape) for t in (dt, logs, rest, into, out))
        return cls(dt, logs, rest, into, out, into[..., -1])


@dataclass
class SmallGrads:
    """Gradients per token of all chunks, [n, G, J, Q] (`leave` [n, G, Q, J], `through` [n, G, J])."""

    pairs: Tensor  # of log decays, from pairs inside the chunk
    enter: Tensor  # of the token's `into`, times it
    leave: Tensor  # of the token's `out`, times it
    through: Tensor
    dt: Tensor  # x . du
    skip: Tensor  # x . dy

    @classmethod
    def like(cls, decays: Decays) -> SmallGrads:
        n, G, J, Q = decays.dt.shape
        new = decays.dt.new_empty
        tokens = [new(n, G, J, Q) for _ in range(4)]
        return cls(tokens[0], tokens[1], new(n, G, Q, J), new(n, G, J), tokens[2], tokens[3])

    def finish(self, decays: Decays, A_H: Tensor, plan: ChunkPlan) -> tuple[Tensor, Tensor, Tensor]:
        """-> gradients of dt [T, H], A [H] and D [H]."""
        n, G, J, Q = self.dt.shape
        log = self.pairs + self.enter @ plan.lower + self.leave.transpose(2, 3) @ plan.upper
        log += self.through[..., None]
        d_A = (log * decays.dt).sum((0, 3)).flatten()
        d_dt = self.dt.addcmul_(log, A_H.view(G, J, 1))
        d_dt = d_dt.permute(0, 3, 1, 2).reshape(n * Q, G * J)[: plan.total]
        return d_dt, d_A, self.skip.sum((0, 3)).flatten()


class SlabScan:
    """Forward and backward of a few neighbouring chunks at a time, so that what they share stays in cache."""

    def __init__(self, plan: ChunkPlan, decays: Decays, D_H: Tensor, sizes: tuple[int, int]):
        self.plan, self.decays = plan, decays
        _, self.G, self.J, self.Q = decays.dt.shape
        self.P, self.N = sizes
        self.D = D_H.view(self.G, self.J, 1, 1)
        self.step = max(1, SLAB_ELEMENTS // (self.G * self.J * self.Q * max(self.Q, self.P, self.N)))

    def slabs(self) -> Iterator[slice]:
        """Runs of chunks whose working set is about half a megabyte a tensor."""
        for first in range(0, self.plan.count, self.step):
            yield slice(first, min(first + self.step, self.plan.count))

    @property
    def slab_rows(self) -> int:
        return self.step * self.Q

    def buffer(self, name: str, n: int, *shape: int) -> Tensor:
        return scratch.take(f"scan.{name}", (n, self.G, *shape), self.decays.dt)

    def heads(self, cut: slice, values_THP: Tensor) -> Tensor:
        """Tokens of these chunks, [T, H, P], seen as [n, G, J, Q, P]."""
        rows = values_THP[cut.start * self.Q : cut.stop * self.Q]
        return rows.unflatten(1, (self.G, self.J)).unflatten(0, (-1, self.Q)).permute(0, 2, 3, 1, 4)

    def groups(self, cut: slice, values_TGN: Tensor) -> Tensor:
        """Tokens of these chunks, [T, G, N], seen as [n, G, Q, N]."""
        return values_TGN[cut.start * self.Q : cut.stop * self.Q].unflatten(0, (-1, self.Q)).transpose(1, 2)

    def scores(self, cut: slice, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        """-> masked C B^T [n, G, 1, Q, Q], and exp(logs_i - logs_j) [n, G, J, Q, Q], 1 where masked."""
        n, Q = B.shape[0], self.Q
        scores = self.buffer("scores", n, 1, Q, Q)
        torch.bmm(C.flatten(0, 1), B.flatten(0, 1).mT, out=scores.view(n * self.G, Q, Q))
        mask = self.plan.mask
        scores.mul_((mask if len(mask) == 1 else mask[cut])[:, None, None])
        logs = self.decays.logs[cut]
        decay = self.buffer("decay", n, self.J, Q, Q)
        torch.sub(logs[..., :, None], logs[..., None, :], out=decay)
        if decay.dtype != torch.float64:
            rest = self.decays.rest[cut]
            decay.add_(rest[..., :, None]).sub_(rest[..., None, :])
        return scores, decay.clamp_(max=0).exp_()

    def inputs(self, cut: slice, x: Tensor) -> tuple[Tensor, Tensor]:
        """-> u = dt x [n, G, J, Q, P] and u decayed to the chunk's end [n, G, Q, J P]."""
        n, d = x.shape[0], self.decays
        u = torch.mul(x, d.dt[cut][..., None], out=self.buffer("u", n, self.J, self.Q, self.P))
        u_out = self.buffer("u_out", n, self.Q, self.J, self.P)
        torch.mul(u.transpose(2, 3), d.out[cut].transpose(2, 3)[..., None], out=u_out)
        return u, u_out.flatten(3)

    def forward(self, cut: slice, x: Tensor, B: Tensor, C: Tensor, states: Tensor, y: Tensor) -> None:
        """x, y [n, G, J, Q, P] (views), B, C [n, G, Q, N], states [n + 1, G, J P, N] with row 0 given.

        Rows 1..n are written: the state that enters the next chunk, which is the initial state of a document
        that starts there.
        """
        n, G, J, Q, P = x.shape
        scores, decay = self.scores(cut, B, C)
        weights = decay.mul_(scores)
        u, u_out = self.inputs(cut, x)
        torch.bmm(u_out.flatten(0, 1).mT, B.flatten(0, 1), out=states[1:].flatten(0, 1))
        self.carry(cut, states)
        seen = self.buffer("seen", n, Q, J, P)
        torch.bmm(C.flatten(0, 1), states[:-1].flatten(0, 1).mT, out=seen.view(n * G, Q, J * P))
        inside = self.buffer("inside", n, J, Q, P)
        torch.bmm(weights.flatten(0, 2), u.flatten(0, 2), out=inside.view(n * G * J, Q, P))
        torch.addcmul(inside, seen.transpose(2, 3), self.decays.into[cut][..., None], out=y)
        y.addcmul_(x, self.D)

    initial: Tensor | None = None  # [docs, G, J P, N]
    final: Tensor | None = None

    def carry(self, cut: slice, states: Tensor) -> None:
        through = self.decays.through[cut][..., None]
        by_head = states.view(*states.shape[:2], self.J, -1)
        for c, (entering, leaving) in enumerate(pairwise(by_head)):
            leaving.addcmul_(entering, through[c])
            chunk = cut.start + c
            if self.final is not None and self.plan.end[chunk] is not None:
                self.final[self.plan.end[chunk]] = states[c + 1]
            if chunk + 1 < self.plan.count and self.plan.start[chunk + 1] is not None:
                self.reset(self.plan.start[chunk + 1], states[c + 1])

    def reset(self, document: int, state: Tensor) -> None:
        if self.initial is None:
            state.zero_()
        else:
            state.copy_(self.initial[document])

    d_initial: Tensor | None = None
    d_final: Tensor | None = None

    def carry_back(self, cut: slice, d_states: Tensor) -> None:
        """Rows 0..n-1: gradient of entering states from their own tokens; row n: from all later chunks."""
        through = self.decays.through[cut][..., None]
        by_head = d_states.view(*d_states.shape[:2], self.J, -1)
        for c in reversed(range(len(d_states) - 1)):
            chunk, leaving = cut.start + c, d_states[c + 1]
            if chunk + 1 < self.plan.count and self.plan.start[chunk + 1] is not None:
                if self.d_initial is not None:
                    self.d_initial[self.plan.start[chunk + 1]] = leaving
                leaving.zero_()
            if self.d_final is not None and self.plan.end[chunk] is not None:
                leaving.add_(self.d_final[self.plan.end[chunk]])
            by_head[c].addcmul_(by_head[c + 1], through[c])

    def backward(
        self,
        cut: slice,
        x: Tensor,
        B: Tensor,
        C: Tensor,
        states: Tensor,
        dy: Tensor,
        d_states: Tensor,
        small: SmallGrads,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dy [n, G, J, Q, P] dense, d_states [n + 1, G, J P, N], row n given -> dx, dB, dC [n, G, Q, N]."""
        n, G, J, Q, P = x.shape
        scores, decay = self.scores(cut, B, C)
        u, u_out = self.inputs(cut, x)
        dy_in = self.buffer("dy_in", n, Q, J, P)
        torch.mul(dy.transpose(2, 3), self.decays.into[cut].transpose(2, 3)[..., None], out=dy_in)
        torch.bmm(dy_in.view(n * G, Q, J * P).mT, C.flatten(0, 1), out=d_states[:-1].flatten(0, 1))
        self.carry_back(cut, d_states)
        d_scores, du = self.inside_back(cut, scores, decay, u, dy, small)
        self.through_back(cut, states, d_states, small)
        dC = self.seen_back(cut, C, states, dy, small)
        dC.flatten(0, 1).baddbmm_(d_scores, B.flatten(0, 1))
        dB = self.buffer("dB", n, Q, self.N)
        leaving = d_states[1:].flatten(0, 1)
        torch.bmm(u_out.flatten(0, 1), leaving, out=dB.view(n * G, Q, self.N))
        dB.flatten(0, 1).baddbmm_(d_scores.mT, C.flatten(0, 1))
        dx = self.inputs_back(cut, x, B, dy, du, u_out, leaving, small)
        return dx, dB, dC

    def inside_back(self, cut, scores, decay, u, dy, small: SmallGrads) -> tuple[Tensor, Tensor]:
        """Pairs of one chunk -> gradient of C B^T [n G, Q, Q] and of u [n, G, J, Q, P]."""
        n, G, J, Q, P = u.shape
        weights = torch.mul(decay, scores, out=self.buffer("weights", n, J, Q, Q))
        du = self.buffer("inside", n, J, Q, P)
        torch.bmm(weights.flatten(0, 2).mT, dy.flatten(0, 2), out=du.view(n * G * J, Q, P))
        d_weights = weights
        torch.bmm(dy.flatten(0, 2), u.flatten(0, 2).mT, out=d_weights.view(n * G * J, Q, Q))
        d_weights.mul_(decay)
        d_scores = torch.sum(d_weights, 2, keepdim=True, out=self.buffer("d_scores", n, 1, Q, Q))
        mask = self.plan.mask
        d_scores.mul_((mask if len(mask) == 1 else mask[cut])[:, None, None])
        pairs = d_weights.mul_(scores)
        before = torch.mm(pairs.view(-1, Q), self.plan.upper, out=decay.view(-1, Q)).view_as(decay)
        torch.sum(before.mul_(self.plan.lower), -2, out=small.pairs[cut])
        return d_scores.view(n * G, Q, Q), du

    def through_back(self, cut: slice, states: Tensor, d_states: Tensor, small: SmallGrads) -> None:
        n = len(states) - 1
        both = torch.mul(states[:-1], d_states[1:], out=self.buffer("both", n, self.J * self.P, self.N))
        torch.sum(both.view(n, self.G, self.J, -1), -1, out=small.through[cut])
        small.through[cut].mul_(self.decays.through[cut])

    def seen_back(self, cut: slice, C: Tensor, states: Tensor, dy: Tensor, small: SmallGrads) -> Tensor:
        """Entering states as the tokens see them -> gradient of C [n, G, Q, N]."""
        n, G, J, Q, P = dy.shape
        per_head = self.buffer("seen", n, J, Q, self.N)
        torch.bmm(
            dy.flatten(0, 2),
            states[:-1].view(n * G * J, P, self.N),
            out=per_head.view(n * G * J, Q, self.N),
        )
        per_head.mul_(self.decays.into[cut][..., None])
        dC = torch.sum(per_head, 2, out=self.buffer("dC", n, Q, self.N))
        torch.sum(per_head.mul_(C[:, :, None]), -1, out=small.enter[cut])
        return dC

    def inputs_back(self, cut, x, B, dy, du, u_out, leaving, small: SmallGrads) -> Tensor:
        """-> gradient of x [n, G, J, Q, P], in the buffer of du."""
        n, G, J, Q, P = x.shape
        d = self.decays
        du_out = self.buffer("dy_in", n, Q, J, P)
        torch.bmm(B.flatten(0, 1), leaving.mT, out=du_out.view(n * G, Q, J * P))
        du.addcmul_(du_out.transpose(2, 3), d.out[cut][..., None])
        torch.sum(du_out.mul_(u_out.view_as(du_out)), -1, out=small.leave[cut])
        product = self.buffer("u", n, J, Q, P)
        torch.sum(torch.mul(x, du, out=product), -1, out=small.dt[cut])
        torch.sum(torch.mul(x, dy, out=product), -1, out=small.skip[cut])
        return du.mul_(d.dt[cut][..., None]).addcmul_(dy, self.D)
