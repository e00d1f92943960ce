"""Prompts that ask a model how relevant a document is to a query, and scores of what it answers.

A model that writes says "yes" or "no": its score is the probability of yes among the two. A cross-encoder
reads both texts as a pair, and gives the logit of its score itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from thermocline.errors import UsageError
from thermocline.model.spec import ModelSpec
from thermocline.text.chat_template import ChatTemplate, GuardedEncoder
from thermocline.text.template_process import OWN, Span
from thermocline.text.tokenizer import Tokenizer

NOT_A_RERANKER = (
    "this model does not rank documents: its files name no tokens for yes and no; serve a reranker, such as "
    "Qwen/Qwen3-Reranker-0.6B"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Qwen3-Reranker's, from its card; between them are an instruction, a query and a document.
_PARTS = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: ",
    "\n<Query>: ",
    "\n<Document>: ",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


class Reranker:
    """How a model is asked about documents, and what its answer says."""

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        """`template`: the model's own, which is used where it has roles for a query and a document.

        Raises UsageError for a model that does not rank documents.
        """
        self._tokenizer, self.logits_of, self._template = tokenizer, spec.score_tokens, None
        # RoBERTa's pairs have no types, and two marks between the texts.
        self._pairs, self._between = spec.classifies, 2 if spec.token_types == 1 else 1
        if self._pairs:
            return
        if not spec.score_tokens:
            raise UsageError(NOT_A_RERANKER)
        own = template is not None and all(role in template.source for role in ("query", "document"))
        if own:
            self._template = template
        controls = {t.content for t in tokenizer.added}
        if not own and not controls >= {"<|im_start|>", "<|im_end|>"}:
            raise UsageError(
                "this reranker's chat template has no roles for a query and a document, and its tokenizer "
                "not the marks of Qwen3-Reranker's prompt; give a template with --template FILE"
            )
        self._encoder = GuardedEncoder(tokenizer, "".join(_PARTS))

    def encode(self, query: str, document: str, instruction: str | None = None) -> tuple[list[int], int]:
        """Return the prompt, and where the second text of a pair begins.

        A mark that a text spells out is text. Raises UsageError.
        """
        if self._pairs:
            return self._pair(query, document, instruction)
        if self._template is not None:
            return self._rendered(query, document, instruction), 0
        said: list[str] = []
        spans: list[Span] = []
        at = 0
        texts = (INSTRUCTION if instruction is None else instruction, query, document, "")
        for part, text in zip(_PARTS, texts, strict=True):
            spans.append((at, at + len(part), OWN))
            said += (part, text)
            at += len(part) + len(text)
        return self._encoder.encode("".join(said), spans, 0, at), 0

    def _pair(self, query: str, document: str, instruction: str | None) -> tuple[list[int], int]:
        """Return both texts with their marks, the second's first being one that parts them."""
        if instruction is not None:
            raise UsageError("instruction: this reranker takes none; leave it out, or put it into the query")
        first, second = (self._tokenizer.encode(text) for text in (query, document))
        if len(first) < 2 or len(second) < 2:
            raise UsageError(
                "this reranker's tokenizer puts no marks around a text: pairs cannot be told apart"
            )
        parting = first[-1:] * (self._between - 1)
        return [*first, *parting, *second[1:]], len(first) + len(parting)

    def _rendered(self, query: str, document: str, instruction: str | None) -> list[int]:
        assert self._template is not None
        messages: list[dict[str, Any]] = [{"role": "query", "content": query}]
        messages.append({"role": "document", "content": document})
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": instruction})
        return self._template.encode(messages)

    @staticmethod
    def score(logits: Iterable[float]) -> float:
        """Return the probability of yes, of the logits of yes and no, or of their difference."""
        yes, *no = (float(x) for x in logits)
        return 1 / (1 + math.exp(min(sum(no) - yes, 700.0)))
