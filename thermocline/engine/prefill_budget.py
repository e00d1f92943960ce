"""The prefill budget: how many tokens of prompts a step computes while answers wait for their next token."""

from __future__ import annotations

from thermocline.model.spec import ModelSpec

PREFILL_CHUNK = 256  # tokens of prompts in a step, at most
LEAST = 4  # tokens of prompts in a step, however expensive they are, so that a prompt always advances
# The time for prompts in a step, in decode steps. Answers' tokens are then four times as far apart as without
# prompts. Up to five times is promised; the rest is a margin for errors of the estimates.
SHARE = 3.0
WEIGHT = 0.3  # of the newest measurement in an estimate
# A decode step counts as at most this much longer than the last ones, because a single slow step is no reason
# for a long chunk. If steps do get longer, the estimate follows within ten steps.
LEAP = 1.25


def chunk_for(spec: ModelSpec, context: int) -> int:
    """Return the tokens of prompts in a step, at most: an encoder reads a whole text at once."""
    return max(PREFILL_CHUNK, context) if spec.bidirectional else PREFILL_CHUNK


class PrefillBudget:
    """Chooses the chunk of a prompt in a step that also computes answers. (Other steps take whole chunks.)

    A prompt's token is most expensive in a short chunk, which reads the same weights for fewer tokens. So
    estimates begin with a short chunk, and their errors only make the next one too short. Chunks grow into
    their share, whatever a step costs before its first token, and never exceed it.
    """

    def __init__(self) -> None:
        self._step_s: float | None = None  # seconds to compute a token of every answer
        self._token_s: float | None = None  # seconds for a prompt's token, beside answers
        self._prompted = False  # whether the last step computed a prompt

    def answered(self, seconds: float) -> None:
        """Take in the time of a step's answers.

        After a prompt's chunk the caches are cold and answers take longer. Such steps do not raise the
        estimate, since the promise is about steps without prompts.
        """
        if self._step_s is not None:
            seconds = min(seconds, self._step_s * (1 if self._prompted else LEAP))
        self._step_s, self._prompted = _moved(self._step_s, seconds), False

    def prompted(self, seconds: float, tokens: int) -> None:
        """Take in the time of a prompt's chunk of `tokens` tokens beside answers."""
        self._token_s, self._prompted = _moved(self._token_s, seconds / tokens), True

    def chunk(self, most: int) -> int:
        """Return the tokens of prompts for the next step, at most `most`.

        Sizes are multiples of `LEAST`, because a GPU records a step for each size.
        """
        if self._step_s is None or not self._token_s:
            return min(LEAST, most)
        wanted = SHARE * self._step_s / self._token_s
        return min(most, LEAST * max(1, int(wanted / LEAST)))


def _moved(known: float | None, seconds: float) -> float:
    return seconds if known is None else known + WEIGHT * (seconds - known)
