"""Prompts that are read and not continued, as jobs of the engine: a few at a time, however many there are."""

from __future__ import annotations

from collections.abc import Sequence

from thermocline.engine.request import PoolingParams, reading_for
from thermocline.engine.vectors import Prompt
from thermocline.errors import UsageError
from thermocline.ops.interface import F32
from thermocline.server.api.models.served import ServedModel
from thermocline.server.api.state import Api
from thermocline.server.http.refusal import TOO_LONG, Refusal
from thermocline.server.process.messages import Finished

# Prompts of one request that the engine has at a time, in answers that it computes together: enough that a
# step is full, and few enough that other requests' prompts come between.
AT_ONCE = 4
# A text of more bytes for each token of the context is refused before it is tokenised, where a token may
# stand for any text: English has about 4.
BYTES_A_TOKEN = 256


def check_length(model: ServedModel, where: str, *texts: str) -> None:
    """Refuse texts that cannot fit the context together. `where`: the field."""
    model.check_length(*texts)
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    if size > BYTES_A_TOKEN * model.context:
        raise _too_long(
            model, f"{where}: {size} bytes, far more than a context of {model.context} tokens holds", where
        )


def check(model: ServedModel, ids: list[int], pooling: PoolingParams, where: str) -> None:
    """Refuse a prompt that the engine would refuse, before any is queued."""
    if len(ids) > model.context:
        why = f"{where}: it has {len(ids)} tokens, the context holds {model.context}; texts are not cut"
        raise _too_long(model, why, where)
    try:
        reading_for(model.spec, model.context, model.tokenizer, ids, pooling)
    except UsageError as e:
        raise Refusal(400, f"{where}: {e}", param=where) from None


def _too_long(model: ServedModel, why: str, where: str) -> Refusal:
    return Refusal(
        400, why, param=where, type="exceed_context_size_error", code=TOO_LONG, extra={"n_ctx": model.context}
    )


async def read(api: Api, model: ServedModel, prompts: Sequence[Prompt]) -> list[F32]:
    """Return the vectors of prompts, in their order. Raises the first error of one of them."""
    step = AT_ONCE * model.max_batch
    found: dict[int, F32] = {}
    for first in range(0, len(prompts), step):
        some = prompts[first : first + step]
        # One that was in the queue goes on.
        jobs = model.engine.submit(some) if first else api.submit(model, some)
        try:  # if the client leaves, the guard cancels this
            while (events := await jobs.next()) is not None:
                for i, event in events:
                    if isinstance(event, Finished):
                        assert event.vector is not None, "a prompt that was read has one"
                        found[first + i] = event.vector
        finally:
            jobs.close()
    return [found[i] for i in range(len(prompts))]
