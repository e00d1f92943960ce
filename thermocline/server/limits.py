from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    queue: int = 64
    n: int = 8
    answers: int = 64
    stops: int = 16
    stop_bytes: int = 256
    logit_biases: int = 1024
    top_logprobs: int = 20
    ping_s: float = 15.0
