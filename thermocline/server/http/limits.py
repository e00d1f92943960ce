"""Every limit of `thermocline serve`, with its default, unit and flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thermocline.options import flag, opt, options_of, real, whole

KIB, MIB = 1 << 10, 1 << 20


def _bytes(default: int, help: str, least: int = 1) -> Any:
    return opt(default, whole(least, 1 << 40), "BYTES", "Limits", help)


def _seconds(default: float, help: str, least: float = 0.01, shown: str | None = None) -> Any:
    return opt(default, real(least, 1e9), "SECONDS", "Limits", help, shown=shown)


def _count(default: int, help: str, least: int = 1, most: int = 1_000_000) -> Any:
    return opt(default, whole(least, most), "N", "Limits", help)


@dataclass(frozen=True)
class ServerLimits:
    """Limits on the memory, time and work that a client can cost the server (`--print-limits`)."""

    limit_connections: int = _count(
        1024, "Open connections; beyond, one without a request makes room, or `/health` alone is answered."
    )
    limit_header_bytes: int = _bytes(64 * KIB, "A request's line and headers together.", 256)
    limit_headers: int = _count(128, "Headers of a request.")
    limit_header_s: float = _seconds(10, "Time in which they have to arrive.")
    limit_keep_alive_s: float = _seconds(5, "Time that a connection may wait for its next request.")
    limit_body_bytes: int = _bytes(8 * MIB, "A request's body; twice that as text in memory.")
    limit_bodies_bytes: int = _bytes(
        128 * MIB, "The bodies of all requests, until all they say is passed on to the engine."
    )
    limit_body_s: float = _seconds(30, "Time in which a body has to arrive.")
    limit_body_rate: int = opt(
        KIB, whole(1, 1 << 40), "BYTES/S", "Limits", "Least speed of a body, on average."
    )
    limit_body_stall_s: float = _seconds(5, "Time that a body may be late against that speed.")
    limit_json_depth: int = _count(128, "Lists and objects inside each other in a body.", most=500)
    limit_json_values: int = _count(
        1 << 18, "Values and keys in a body: an empty list takes 2 bytes there, 64 here."
    )

    limit_buffer_bytes: int = _bytes(MIB, "An answer's bytes that wait for a client to read them.", 2048)
    limit_write_stall_s: float = _seconds(
        30, "Time without a byte read after which its request is cancelled."
    )
    limit_ping_s: float = _seconds(15, "Longest silence in a stream; then a comment is sent.")
    limit_request_s: float = _seconds(3600, "Time that a request may take, with waiting.")
    limit_silence_s: float = _seconds(
        60, "Time without a sign of the engine after which it is started again.", 1
    )
    limit_drain_s: float = _seconds(
        300, "Time that a model's requests get to finish when another needs its memory."
    )
    limit_grace_s: float = _seconds(10, "Time that requests get to finish when the server is stopped.", 0)

    limit_queue: int = _count(64, "Requests that wait; more are refused with 503 and Retry-After.", 0)
    limit_trials: int = _count(16, "Grammars that wait to be tried out; more are refused with 503.")
    limit_onlookers: int = _count(32, "Streams of `/activity` at once; more are refused with 503.")
    limit_benchmark_s: float = _seconds(
        30, "Time between two benchmarks (`/benchmark`); one that comes earlier is refused with 429.", 0
    )
    limit_messages: int = _count(4096, "Messages of a conversation, with their parts and calls.")
    limit_kept_responses: int = _count(256, "Responses of `/v1/responses` kept in memory; 0: none.", 0)
    limit_kept_bytes: int = _bytes(64 * MIB, "Those responses and their conversations together.")
    limit_tools: int = _count(1024, "Functions that a model is offered (`tools`).")
    limit_template_variables: int = _count(64, "Variables of a chat template (`chat_template_kwargs`).", 0)
    limit_n: int = _count(8, "Answers to one prompt (`n`).")
    limit_choices: int = _count(64, "Prompts of a request times `n`.")
    limit_inputs: int = _count(2048, "Texts of `/v1/embeddings`, documents of `/v1/rerank`.")
    limit_top_logprobs: int = _count(20, "Rivals of each token (`top_logprobs`).", 0)
    limit_stop: int = _count(16, "Texts in `stop`.", 0)
    limit_stop_bytes: int = _bytes(256, "One of those texts.")
    limit_logit_bias: int = _count(1024, "Tokens in `logit_bias`.", 0)
    limit_tokenize_bytes: int = _bytes(64 * KIB, "A text for `/tokenize`.")
    limit_detokenize: int = _count(1 << 16, "Tokens for `/detokenize`.")
    limit_schema_bytes: int = opt(
        64 * KIB, whole(1, 64 * KIB), "BYTES", "Limits", "A JSON schema or grammar."
    )
    limit_schema_depth: int = _count(64, "Lists and objects inside each other in a schema.", most=64)


def described(limits: ServerLimits) -> dict[str, dict[str, object]]:
    """Return the limits as `serve --print-limits --json` prints them."""
    return {
        f.name: {
            "value": getattr(limits, f.name),
            "default": f.default,
            "unit": (o.metavar or "").lower(),
            "flag": flag(f.name),
            "help": o.help,
        }
        for f, o in options_of(ServerLimits)
    }
