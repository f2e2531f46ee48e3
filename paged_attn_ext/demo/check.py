"""Are these the tokens that transformers' own attention would have chosen?

One forward pass over prompt and generated tokens gives the reference's choice at every position, given the tokens
before it. If the first generated token is its choice after the prompt, and each next one its choice after those, then
by induction greedy generation with the reference gives these very tokens: one pass instead of one per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Two float32 computations of the same logits differ by about 1e-5; closer than this, the reference's own choice is a
# matter of rounding.
TIE = 1e-3


@dataclass
class Verdict:
    """compared: tokens compared; wrong: index of the first that differs, or None; tie: index where the reference's
    best two are within TIE, or None."""

    compared: int
    wrong: int | None
    tie: int | None

    @property
    def equal(self) -> bool:
        return self.wrong is None

    @property
    def in_full(self) -> bool:
        return self.equal and self.tie is None


def compare(generated: list[int], logits: torch.Tensor) -> Verdict:
    """generated: n tokens; logits: [n, vocabulary] of the reference, row i after the tokens before generated[i]."""
    best = logits.float().topk(2)
    for i, token in enumerate(generated):
        if best.values[i, 0] - best.values[i, 1] <= TIE:
            return Verdict(i, None, i)
        if token != int(best.indices[i, 0]):
            return Verdict(i, i, None)
    return Verdict(len(generated), None, None)


@torch.inference_mode()
def check(reference, tokens: list[int], prompt_length: int) -> Verdict:
    """reference: a transformers causal language model; tokens: prompt and generated."""
    logits = reference(torch.tensor([tokens[:-1]])).logits[0, prompt_length - 1 :]
    return compare(tokens[prompt_length:], logits)
