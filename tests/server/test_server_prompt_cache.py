"""A server that is started again takes the prompts of the one before from disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran
from serving import Served, served

from thermocline.engine.prompt_cache.files import MARKER

TALK = [
    {"role": "user", "content": "Once upon a time there was a dog. " * 12},
    {"role": "assistant", "content": "It ran and ran. "},
]


def asked(s: Served, messages: list[dict[str, str]]) -> tuple[str, int]:
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    with s.client() as c:
        answer: dict[str, Any] = c.post("/v1/chat/completions", json=body).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]


@pytest.mark.slow
def test_a_restarted_server_computes_only_what_is_new(tmp_path: Path) -> None:
    more = [*TALK, {"role": "user", "content": "Then it sat. " * 3}]
    with served() as s:
        want, cached = asked(s, more)
        assert cached == 0 and "thermocline_prompt_cache_restores_total" not in s.metrics()
    with served(prompt_cache_dir=tmp_path) as s:
        asked(s, TALK)
        s.until_idle()
    with served(prompt_cache_dir=tmp_path) as s:
        found, cached = asked(s, more)
        assert found == want and cached >= 96
        s.until_idle()
        while (m := s.metrics())["thermocline_prompt_cache_restores_total"] < 1:  # with the next heartbeat
            time.sleep(0.05)
        assert m["thermocline_prompt_cache_restores_total"] == 1
        assert m["thermocline_prompt_cache_restored_tokens_total"] == cached
        assert m["thermocline_prompt_cache_read_bytes_total"] > 0
        assert m["thermocline_prompt_cache_damaged_files_total"] == 0


def test_a_directory_of_another_version_stops_nothing(
    thermocline: Callable[..., Ran], tmp_path: Path
) -> None:
    (tmp_path / MARKER).write_text('{"thermocline_prompt_cache": 99}')
    ran = thermocline("run", "-p", "Once", "-n", "4", "--prompt-cache-dir", tmp_path)
    assert ran.code == 0 and ran.out and f"{tmp_path}: a prompt cache of version 99" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


def test_a_directory_of_other_files_is_refused_in_a_line(
    thermocline: Callable[..., Ran], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("")
    ran = thermocline("run", "-p", "Once", "-n", "1", "-q", "--prompt-cache-dir", tmp_path)
    assert ran.code == 2 and ran.err.count("\n") == 1 and "has other files" in ran.err
    ran = thermocline("run", "-p", "Once", "-n", "1", "-q", "--prompt-cache-dir", tmp_path / "mine")
    assert ran.code == 4 and ran.err.count("\n") == 1 and "no prompt cache can be kept there" in ran.err


def test_a_plan_counts_what_a_run_takes(thermocline: Callable[..., Ran], tmp_path: Path) -> None:
    flags = ("--prompt-cache", "0.01", "--prompt-cache-dir", tmp_path / "d")
    planned = json.loads(thermocline("plan", "--json", *flags).out)
    ran = json.loads(thermocline("run", "-p", "Once", "-n", "1", "--json", *flags).out)
    part = planned["bytes"]["ram"]["prompt cache"]
    assert part == ran["placement"]["bytes"]["cpu"]["prompt cache"] <= 0.01 * 2**30 + 5 * 2**20
    assert "prompt cache" in thermocline("plan", *flags).out
    more = thermocline("run", "-p", "Once", "-n", "1", "--prompt-cache", "1e5")
    assert more.code == 5 and "GiB prompt cache" in more.err and "a smaller --prompt-cache" in more.err
