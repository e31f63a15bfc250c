"""Text samples for people who watch a run: one token at a time, each by a full forward over what is there
so far.
"""

from __future__ import annotations

import itertools

import torch

from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.model.hybrid import HybridLM, apply_head

PROMPT_TOKENS = 24


class TextSampler:
    """Continues the beginning of a validation document; the same step gives the same text.

    `max_new_tokens` are drawn at `temperature`, 0 for the likeliest token.
    """

    def __init__(
        self,
        model: HybridLM,
        tokenizer: Tokenizer,
        batch: TokenBatch,
        *,
        max_new_tokens: int,
        temperature: float = 0.8,
        seed: int = 0,
    ):
        self.model, self.tokenizer, self.seed = model, tokenizer, seed
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        bounds = batch.cu_seqlens.tolist()
        start, end = max(itertools.pairwise(bounds), key=lambda pair: pair[1] - pair[0])
        self.prompt = batch.tokens_T[start : min(end, start + PROMPT_TOKENS)].tolist()

    @torch.no_grad()
    def __call__(self, step: int) -> tuple[str, str]:
        """(prompt, continuation) with the weights of now; torch's own random state is left alone."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        ids = list(self.prompt)
        while len(ids) < len(self.prompt) + self.max_new_tokens and ids[-1] != self.tokenizer.eos_id:
            ids.append(self._next(ids, generator))
        return self.tokenizer.decode(self.prompt), self.tokenizer.decode(
            ids[len(self.prompt) :], special=False
        )

    def _next(self, ids: list[int], generator: torch.Generator) -> int:
        tokens_T = torch.tensor(ids, device=self.model.lm_head.weight.device)
        output = self.model(tokens_T, mtp_depths=0, balance=False)
        logits_V = apply_head(output.hidden_TD[-1], output.head_VD)[: self.tokenizer.vocab_size].cpu()
        if not self.temperature:
            return int(logits_V.argmax())
        return int(torch.multinomial(torch.softmax(logits_V / self.temperature, 0), 1, generator=generator))
