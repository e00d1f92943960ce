"""A model as the HTTP process needs it: everything but its weights."""

from __future__ import annotations

from dataclasses import dataclass

from thermocline.engine.sampler import SamplingParams
from thermocline.errors import ThermoclineError, UsageError
from thermocline.model.spec import ModelSpec
from thermocline.server.api.parsing.answer_parser import AnswerFormat
from thermocline.server.http.refusal import TOO_LONG, Refusal
from thermocline.server.process.engine_process import EngineProcess
from thermocline.server.process.messages import ModelOpened
from thermocline.text.chat_template import ChatTemplate
from thermocline.text.infill import Infill
from thermocline.text.prompts.reranker import Reranker
from thermocline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    name: str
    spec: ModelSpec
    context: int
    max_batch: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    why_no_template: str
    format: AnswerFormat
    infill: Infill | None  # None: the model does not fill in the middle of a text
    reranker: Reranker | None
    why_no_reranker: str
    most_bytes: int | None  # of the longest prompt that the context can hold
    engine: EngineProcess
    defaults: SamplingParams  # sampling options that a request leaves open

    @staticmethod
    def of(
        opened: ModelOpened, name: str | None, engine: EngineProcess, defaults: SamplingParams
    ) -> ServedModel:
        spec, files = opened.spec, opened.files
        tokenizer = Tokenizer(files, spec)
        template, why = None, ""
        try:
            template = ChatTemplate(files, tokenizer, opened.template)
        except ThermoclineError as e:
            why = str(e)
        reranker, why_not = None, ""
        try:
            reranker = Reranker(spec, tokenizer, template)
        except UsageError as e:
            why_not = str(e)
        format = AnswerFormat.of("" if template is None else template.source)
        about = files.origin.name if name is None else name
        most = tokenizer.most_bytes(opened.context)
        return ServedModel(
            about, spec, opened.context, opened.max_batch, tokenizer, template, why, format,
            Infill.of(tokenizer), reranker, why_not, most, engine, defaults
        )  # fmt: skip

    def close(self) -> None:
        """End the processes of the template and the tokenizer."""
        self.tokenizer.close()
        if self.template is not None:
            self.template.close()

    def check_length(self, *texts: str) -> None:
        """Refuse a text that cannot fit the context before it is tokenised: 20 MB would take 30 s."""
        if self.most_bytes is None:
            return
        size = sum(map(len, texts))  # a character has at least one byte
        if size <= self.most_bytes:
            size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if size > self.most_bytes:
            raise Refusal(
                400, f"the prompt has {size} bytes, far more than a context of {self.context} tokens holds",
                type="exceed_context_size_error", code=TOO_LONG,
                extra={"n_ctx": self.context}
            )  # fmt: skip
