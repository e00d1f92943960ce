"""lm-eval's log-likelihoods through the server against `LLM`'s of the same texts.

    python bench/server/clients/lm_eval_scores.py SAMPLES.jsonl   (after `lm_eval`; see README.md beside this)

SAMPLES: the samples that `lm_eval --log_samples` wrote.
"""

import json
import math
import sys

from thermocline import LLM, SamplingParams


def scored(llm: LLM, begin: str, ending: str) -> tuple[float, bool]:
    """(log-likelihood of the ending's tokens, are they what greedy decoding says)."""
    whole, first = llm.tokenizer.encode(begin + ending), llm.tokenizer.encode(begin)
    assert whole[: len(first)] == first, "the border of the two is no border of tokens"
    made = llm.generate(begin + ending, SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=1))
    assert made.prompt_logprobs is not None
    scores = made.prompt_logprobs[len(first) - len(whole) :]
    return sum(s.logprob for s in scores), all(s.logprob == s.top[0][1] for s in scores)


def main() -> None:
    worst, found = 0.0, 0
    with LLM(gpu="off") as llm, open(sys.argv[1], encoding="utf-8") as f:
        for line in f:
            sample = json.loads(line)
            for asked, got in zip(sample["arguments"].values(), sample["resps"], strict=True):
                score, greedy = scored(llm, asked["arg_0"], asked["arg_1"])
                value, is_greedy = got[0]
                worst = max(worst, abs(float(value) - score))
                assert str(is_greedy) == str(greedy), (asked, got)
                assert math.isclose(float(value), score, abs_tol=1e-4), (asked, got, score)
                found += 1
    assert found
    print(f"lm-eval: {found} log-likelihoods, the largest difference {worst:.1e}")


if __name__ == "__main__":
    main()
