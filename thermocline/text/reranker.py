"""Prompts that ask a model how relevant a document is to a query, and scores of what it answers.

The model writes "yes" or "no": its score is the probability of yes among the two.
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
        if not spec.score_tokens:
            raise UsageError(NOT_A_RERANKER)
        own = template is not None and all(role in template.source for role in ("query", "document"))
        self._template = template if own else None
        controls = {t.content for t in tokenizer.added}
        if not own and not controls >= {"<|im_start|>", "<|im_end|>"}:
            raise UsageError(
                "this reranker's chat template has no roles for a query and a document, and its tokenizer "
                "not the marks of Qwen3-Reranker's prompt; give a template with --template FILE"
            )
        self.logits_of = spec.score_tokens
        self._encoder = GuardedEncoder(tokenizer, "".join(_PARTS))

    def encode(self, query: str, document: str, instruction: str | None = None) -> list[int]:
        """Return the prompt. A mark that a text spells out is text. Raises UsageError."""
        if self._template is not None:
            return self._rendered(query, document, instruction)
        said: list[str] = []
        spans: list[Span] = []
        at = 0
        texts = (INSTRUCTION if instruction is None else instruction, query, document, "")
        for part, text in zip(_PARTS, texts, strict=True):
            spans.append((at, at + len(part), OWN))
            said += (part, text)
            at += len(part) + len(text)
        return self._encoder.encode("".join(said), spans, 0, at)

    def _rendered(self, query: str, document: str, instruction: str | None) -> list[int]:
        assert self._template is not None
        messages: list[dict[str, Any]] = [{"role": "query", "content": query}]
        messages.append({"role": "document", "content": document})
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": instruction})
        return self._template.encode(messages)

    @staticmethod
    def score(logits: Iterable[float]) -> float:
        """Return the probability of yes, of the logits of yes and no."""
        yes, no = (float(x) for x in logits)
        return 1 / (1 + math.exp(min(no - yes, 700.0)))
