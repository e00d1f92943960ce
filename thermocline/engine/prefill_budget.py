"""How many tokens of prompts a step computes while answers wait for their next token.

Owns two running estimates. Must not know requests or the time: it is told what took how long.
"""

from __future__ import annotations

LEAST = 4  # tokens of prompts in a step, however dear they are: a prompt always gets on
# Decode steps' time that the prompts' part is to take. With the answers' own their tokens are then four times
# as far apart as without prompts; up to five is promised, and what is left is for what no estimate knows.
SHARE = 3.0
WEIGHT = 0.3  # of the newest measurement in an estimate
# A decode step counts as at most so much longer than the last ones: it may have met a hiccup, which is no
# reason for a long chunk. Where they do get longer, that is believed within ten steps.
LEAP = 1.25


class PrefillBudget:
    """Chunks of prompts that keep answers flowing. Without answers nobody asks it: a chunk is then whole.

    A prompt's token is dearest in a short chunk, which reads the same weights for fewer tokens. So estimates
    begin with a short one and only ever err on the side of the next being too short: chunks grow into their
    share, whatever a step costs before its first token, and never overshoot.
    """

    def __init__(self) -> None:
        self._step_s: float | None = None  # of a token for every answer
        self._token_s: float | None = None  # of a prompt, beside answers
        self._prompted = False  # in the last step

    def answered(self, seconds: float) -> None:
        """A step's answers took that.

        After a prompt's chunk it may be more, as the caches are cold: the promise is about steps without.
        """
        if self._step_s is not None:
            seconds = min(seconds, self._step_s * (1 if self._prompted else LEAP))
        self._step_s, self._prompted = _moved(self._step_s, seconds), False

    def prompted(self, seconds: float, tokens: int) -> None:
        """Its prompts' part of so many tokens, beside answers, took that."""
        self._token_s, self._prompted = _moved(self._token_s, seconds / tokens), True

    def chunk(self, most: int) -> int:
        """Tokens of prompts for the next step: of few sizes, since a GPU records a step for each."""
        if self._step_s is None or not self._token_s:
            return min(LEAST, most)
        wanted = SHARE * self._step_s / self._token_s
        return min(most, LEAST * max(1, int(wanted / LEAST)))


def _moved(known: float | None, seconds: float) -> float:
    return seconds if known is None else known + WEIGHT * (seconds - known)
