"""Hooks of schemathesis for `bench/server/serve.py schema`: valid data is taken, but for what no schema says.

Its own check of that has no exceptions. Loaded by it (SCHEMATHESIS_HOOKS), in the environment that it is in.
"""

from __future__ import annotations

import re

import schemathesis

# What a document cannot say of what it allows: of grammars, vocabularies, contexts, of two fields together.
BEYOND = re.compile(
    r"the (JSON schema|grammar|answer's form) (cannot be|is|has|must be)"
    r"|the grammar or schema has more than"
    r"|response_format, json_schema and grammar exclude each other"
    r"|grammar: it is for the whole answer"
    r"|tool_choice: there (are no tools|is no function)"
    r"|tools: the parameters of .* have to be of type object"
    r"|logit_bias has the token|the grammar, logit_bias and ignore_eos ban"
    r"|logit_bias and ignore_eos ban"
    r"|n: \d+ answers; at most|best_of: it has to be equal to n"
    r"|(suffix: )?this model does not fill in|suffix: the prompt has to be text|n: /infill has one answer"
    r"|this model (writes text and has no pooling|does not rank documents|embeds texts and writes none)"
    r"|this model ranks documents"
    r"|instruction: this reranker takes none"
    r"|(input|documents)(\.\d+)?: (it has \d+ tokens, the context holds|\d+ bytes, far more than a context)"
    r"|dimensions \d+: this model's vectors"
    r"|stop: texts of 1 to|top_logprobs: needs logprobs"
    r"|(prompt is too long: )?the prompt has \d+ (tokens, the context holds|bytes, far more than a context)"
    r"|(messages|input): at most \d+, not"
    r"|previous_response_id: this response is not kept|input: the encrypted_content of a reasoning item"
    r"|.* cannot be variables of a chat template|chat_template_kwargs: "
)


@schemathesis.check
def what_the_document_allows_is_taken(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code != 400:
        return
    said = response.json()["error"]["message"]
    assert BEYOND.match(said), f"the document allows it, and it is refused: {said}"
