"""The official JavaScript clients of OpenAI and Anthropic, installed by npm, against the agents' routes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from agent_shapes import CALL, SHOWN
from scripted import scripted

PACKAGES = ("openai@7", "@anthropic-ai/sdk@1")
SCRIPT = Path(__file__).with_name("agent_clients.mjs")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the clients. Skip, saying why, where they cannot be had."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("no node and npm here")
    folder = tmp_path_factory.mktemp("js")
    how = ("--no-audit", "--no-fund", "--ignore-scripts")
    command = [npm, "install", "--prefix", str(folder), *how, *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not install the clients within 240 s")
    if done.returncode:
        pytest.skip(f"npm cannot install the clients: {done.stderr.strip()[-200:]}")
    return folder


@pytest.mark.slow
def test_they_read_streams_thoughts_calls_counts_and_errors(installed: Path) -> None:
    with scripted(template=SHOWN) as puppet:
        puppet.engine.answer = ["<think>Let me see</think>", "I", " read.", CALL]
        command = ["node", str(SCRIPT), puppet.url]
        done = subprocess.run(command, cwd=installed, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        counted = len(puppet.engine.prompts[-1])  # of the last request that was answered: the message
    assert found["kinds"][0] == "response.created" and found["kinds"][-1] == "response.completed"
    assert found["items"] == ["reasoning", "message", "function_call"]
    assert found["text"] == found["next"] == "I read."
    thought, text, call = found["blocks"]
    assert (thought["thinking"], text["text"]) == ("Let me see", "I read.") and thought["signature"]
    assert (call["name"], call["input"]) == ("read", {"path": "a.py"}) and found["stop_reason"] == "tool_use"
    assert found["tokens"] == counted
    assert found["refused"] == ["NotFoundError", 404, "not_found_error"]
