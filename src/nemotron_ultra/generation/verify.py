"""Which drafts stay: the distribution of the tokens is the target's, p, whatever the drafts are.

By match: x ~ p is drawn with the number of its place, and a draft stays if it is x. So the tokens themselves
are those of decoding without drafts. By rejection (Leviathan et al. 2023): a draft d ~ q stays with
probability min(1, p(d) / q(d)), else the token is drawn from (p - q)+; 1 - TV(p, q) of the drafts stay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron_ultra.generation.draw import draw, draw_scaled
from nemotron_ultra.generation.sampling import RowOptions, heated, model_logprobs
from nemotron_ultra.ops.decode_kernels import Verified


@dataclass(frozen=True)
class Verdict:
    """accepted_B drafts stay in each row, and accepted_B[b] + 1 of token_BK and its log-probabilities count:
    those drafts, and the token after them. logprob: under p; model_logprob: under the unmodified model.
    """

    accepted_B: Tensor
    token_BK: Tensor
    logprob_BK: Tensor
    model_logprob_BK: Tensor


def repeated(options: RowOptions, count: int) -> RowOptions:
    """Options for `count` rows in place of each one."""
    names = ("temperature_B1", "greedy_B", "top_p_B1", "top_k_B1", "min_p_B1")
    return replace(options, **{name: getattr(options, name).repeat_interleave(count, 0) for name in names})


def by_match(drawn: tuple[Tensor, Tensor, Tensor], draft_BJ: Tensor) -> Verdict:
    """drawn: what `next_tokens` gives for B * K rows, K = J + 1 places, place j for the token of draft j.

    Its options are as `repeated` has them.
    """
    token_BK, logprob_BK, model_logprob_BK = (x.view(len(draft_BJ), -1) for x in drawn)
    return Verdict(_run(token_BK[:, :-1] == draft_BJ), token_BK, logprob_BK, model_logprob_BK)


def likeliest_run(found: Verified, tokens_BK: Tensor) -> Verdict:
    """What `HybridLM.verify` found of a pending token and drafts."""
    shape = tokens_BK.shape
    columns = (found.token_M, found.logprob_M, found.model_logprob_M)
    return Verdict(found.keep_B - 1, *(column_M.view(shape) for column_M in columns))


def draft_token(logits_BV: Tensor, options: RowOptions, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """A draft d ~ q and q [B, V], float64: the draft's logits heated and cut as the target's are."""
    q_BV = _probabilities(logits_BV, options)
    token_B, _ = draw_scaled(q_BV.log(), uniform_B)
    return token_B, q_BV


def by_rejection(
    logits_BKV: Tensor,
    draft_BJ: Tensor,
    q_BJV: Tensor,
    vocab_size: int,
    options: RowOptions,
    uniforms: tuple[Tensor, Tensor],
) -> Verdict:
    """As `by_match`. uniforms: [B, J] to accept with, [B, K] for the token after the accepted ones."""
    accept_BJ, draw_BK = uniforms
    rows, places = draw_BK.shape
    logits_TV = logits_BKV.flatten(0, 1)
    p_BKV = _probabilities(logits_TV[:, :vocab_size], options).unflatten(0, (rows, places))
    chances = (x.gather(2, draft_BJ[..., None])[..., 0] for x in (p_BKV[:, :-1], q_BJV))
    p_BJ, q_BJ = chances
    accepted_B = _run(accept_BJ * q_BJ < p_BJ)
    row_B = torch.arange(rows, device=accepted_B.device)
    p_BV, q_BV = p_BKV[row_B, accepted_B], F.pad(q_BJV, (0, 0, 0, 1))[row_B, accepted_B]
    rest_BV = (p_BV - q_BV).clamp_(min=0)
    rest_BV = torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)  # p = q but for rounding
    after_B, _ = draw_scaled(rest_BV.log(), draw_BK[row_B, accepted_B])
    token_BK = F.pad(draft_BJ, (0, 1)).index_put((row_B, accepted_B), after_B)
    logprob_T = p_BKV.flatten(0, 1).gather(1, token_BK.flatten()[:, None])[:, 0].log()
    if options.any_greedy:
        _, best_T = draw(logits_TV[:, :vocab_size], 0.0, logprob_T)
        logprob_T = torch.where(options.greedy_B, best_T.double(), logprob_T)
    own_T = model_logprobs(logits_TV, token_BK.flatten())
    return Verdict(accepted_B, token_BK, logprob_T.view(rows, places), own_T.view(rows, places))


def _probabilities(logits_BV: Tensor, options: RowOptions) -> Tensor:
    """What a row is drawn from, float64; for temperature 0 all mass on the likeliest id."""
    p_BV = heated(logits_BV, options).double().softmax(-1)
    if options.any_greedy:
        best_BV = F.one_hot(logits_BV.argmax(-1), logits_BV.shape[1]).to(p_BV)
        p_BV = torch.where(options.greedy_B[:, None], best_BV, p_BV)
    return p_BV


def _run(kept_BJ: Tensor) -> Tensor:
    """How many are true before the first that is not."""
    return kept_BJ.long().cumprod(1).sum(1)
