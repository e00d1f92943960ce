"""Texts whose vectors or scores are wanted, as prompts; and vectors cut to a length."""

from __future__ import annotations

from collections.abc import Sequence

from thermocline.engine.pool import unit
from thermocline.engine.request import PoolingParams, check_embeds
from thermocline.errors import UsageError
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import F32
from thermocline.text.chat_template import ChatTemplate
from thermocline.text.prompts.reranker import Reranker
from thermocline.text.tokenizer import Tokenizer

Prompt = tuple[list[int], PoolingParams]


class Embedder:
    """An embedding model's texts as prompts, and its vectors at the length that was asked for."""

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer, dimensions: int | None = None) -> None:
        """Raise UsageError for another model, and for a length that it does not have."""
        check_embeds(spec)
        check_dimensions(spec, dimensions)
        self._spec, self._tokenizer, self._dimensions = spec, tokenizer, dimensions

    def prompts(self, texts: Sequence[str]) -> list[Prompt]:
        return [(self._tokenizer.encode(text), PoolingParams()) for text in texts]

    def cut(self, vector: F32) -> F32:
        return shortened(self._spec, vector, self._dimensions)


class DocumentRanker:
    """A reranker's queries and documents as prompts, and their vectors as scores."""

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        """Take what `Reranker` takes, and raise what it raises."""
        self._reranker = Reranker(spec, tokenizer, template)

    def prompts(self, query: str, documents: Sequence[str], instruction: str | None) -> list[Prompt]:
        encode, logits_of = self._reranker.encode, self._reranker.logits_of
        pairs = (encode(query, document, instruction) for document in documents)
        return [(ids, PoolingParams(logits_of, second)) for ids, second in pairs]

    def scores(self, vectors: Sequence[F32]) -> list[float]:
        return [self._reranker.score(v) for v in vectors]


def check_dimensions(spec: ModelSpec, dimensions: int | None) -> None:
    """Raise UsageError for a length that vectors of the model may not be cut to."""
    if dimensions is None or dimensions == spec.dim:
        return
    if spec.matryoshka is None:
        raise UsageError(
            f"dimensions {dimensions}: this model's vectors have {spec.dim} numbers, and its config "
            "does not say that they may be cut (is_matryoshka, matryoshka_dimensions); leave it out"
        )
    if not 1 <= dimensions <= spec.dim or (spec.matryoshka and dimensions not in spec.matryoshka):
        known = ", ".join(map(str, spec.matryoshka)) or f"1 to {spec.dim}"
        raise UsageError(f"dimensions {dimensions}: this model's vectors may be cut to {known}")


def shortened(spec: ModelSpec, vector: F32, dimensions: int | None) -> F32:
    """Return a vector's first numbers, as long again as it was if that was 1."""
    if dimensions is None or dimensions == spec.dim:
        return vector
    return unit(vector[:dimensions]) if spec.unit_vectors else vector[:dimensions]
