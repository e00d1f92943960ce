"""Sampling is as a model's makers recommend where nobody says otherwise; a key is understood or refused."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from serving import TEMPLATE, served
from test_fuzz_readers import QUICKLY, VALUES

from thermocline import LLM, BadFile, SamplingParams, ThermoclineError, Unsupported, UsageError
from thermocline.cli import main
from thermocline.engine.generation_config import IGNORED, OFF, READ, parsed

Run = Callable[..., Any]

# As published, with the families this build runs.
LLAMA_3 = {
    "bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001, 128008, 128009],
    "temperature": 0.6, "max_length": 4096, "top_p": 0.9, "transformers_version": "4.40.0"
}  # fmt: skip
QWEN_2_5 = {
    "bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
    "transformers_version": "4.37.0"
}  # fmt: skip
QWEN_2_5_BASE = {"bos_token_id": 1, "do_sample": False, "eos_token_id": 1, "max_new_tokens": 2048}
GEMMA_3 = {"cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95, "pad_token_id": 0}
OPT = {"_from_model_config": True, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA_3, {"temperature": 0.6, "top_p": 0.9}),
        (
            QWEN_2_5,
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repeat_penalty": 1.05, "repeat_last_n": -1},
        ),
        (QWEN_2_5_BASE, {"max_tokens": 2048}),
        (GEMMA_3, {"top_k": 64, "top_p": 0.95}),
        (OPT, {}),
        ({"repetition_penalty": 1.0, "min_p": 0.02}, {"repeat_penalty": 1.0, "min_p": 0.02}),
        ({"temperature": None, "num_beams": None, "x": None}, {}),
        ({"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "token_healing": False}, {}),
    ],
)
def test_published_files_are_read_as_sampling_params_has_them(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert parsed(config, "f") == expected


@pytest.mark.parametrize(
    ("config", "error", "why"),
    [
        ({"num_beams": 4}, Unsupported, "num_beams"),
        ({"typical_p": 0.9}, Unsupported, "typical_p"),
        ({"no_repeat_ngram_size": False}, Unsupported, "no_repeat_ngram_size"),
        ({"renormalize_logits": True}, Unsupported, "renormalize_logits"),
        ({"suppress_tokens": [1]}, Unsupported, "suppress_tokens"),
        ({"temprature": 0.5}, Unsupported, "temprature"),
        ({"temperature": "hot"}, BadFile, "temperature is 'hot'"),
        ({"top_p": 1.5}, BadFile, "top_p is 1.5"),
        ({"top_k": 20.5}, BadFile, "top_k is 20.5"),
        ({"temperature": 10**400}, BadFile, "temperature is 1"),
        ({"repetition_penalty": 0}, BadFile, "repetition_penalty is 0"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_way_out(
    config: dict[str, Any], error: type[ThermoclineError], why: str
) -> None:
    with pytest.raises(error, match=rf"^f: .*{why}.*--generation-config off"):
        parsed(config, "f")


@QUICKLY
@given(some.dictionaries(some.sampled_from([*READ, *IGNORED, *OFF, "x"]), VALUES))
def test_any_values_are_understood_or_refused(config: dict[str, Any]) -> None:
    try:
        SamplingParams(**parsed(config, "f"))
    except (BadFile, Unsupported):
        return


# ---- who is told


@pytest.fixture(scope="module")
def pack(tiny_hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """The tiny model with that generation_config.json, packed."""

    def packed(config: dict[str, Any]) -> Path:
        source = shutil.copytree(tiny_hf, tmp_path_factory.mktemp("recommended") / "hf")
        (source / "generation_config.json").write_text(json.dumps(config))
        path = source.with_name("pack")
        assert main.main(["pack", str(source), "-o", str(path), "--format", "f32", "-q"]) == 0
        return path

    return packed


@pytest.fixture(scope="module")
def greedy(pack: Callable[[dict[str, Any]], Path]) -> Path:
    return pack({"temperature": 0.0, "max_new_tokens": 9})


def test_run_samples_as_recommended_and_flags_win(greedy: Path, thermocline: Run) -> None:
    def texts(*flags: str) -> list[str]:
        seeds = ("1", "2", "3")
        command = ("run", "-m", greedy, "Once", "-t", "1", "--ignore-eos", "--gpu", "off", "--json", *flags)
        return [json.loads(thermocline(*command, "-q", "-s", seed).out)["text"] for seed in seeds]

    with LLM(greedy, threads=1, gpu="off") as llm:
        likeliest = llm.generate("Once", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)).text
    assert texts() == [likeliest] * 3
    assert len(set(texts("--temp", "1.5"))) == 3
    assert len(set(texts("--generation-config", "off", "-n", "9"))) == 3
    assert texts("-n", "2")[0] == likeliest[: len(texts("-n", "2")[0])] != likeliest


def test_a_line_says_what_nobody_asked_for(greedy: Path, thermocline: Run) -> None:
    command = ("run", "-m", greedy, "Once", "-t", "1", "--gpu", "off")
    said = thermocline(*command).err
    assert "generation_config.json recommends: temperature 0.0, max_tokens 9 (--generation-config off" in said
    assert "recommends: max_tokens 9 (" in thermocline(*command, "--temp", "0.3").err
    for flags in (("-q",), ("--generation-config", "off", "-n", "3"), ("--temp", "0.3", "-n", "3")):
        assert "recommends" not in thermocline(*command, *flags).err


def test_a_chat_samples_as_recommended(
    greedy: Path, thermocline: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    said = set()
    for seed in ("1", "2", "3"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once\n")))
        flags = ("--template", template, "-t", "1", "--ignore-eos", "--gpu", "off", "-q", "-s", seed)
        said.add(thermocline("chat", "-m", greedy, *flags).out)
    assert len(said) == 1 and said != {""}


def test_the_library_samples_as_recommended_where_nothing_is_said(greedy: Path) -> None:
    with LLM(greedy, threads=1, gpu="off") as llm:
        assert llm.recommended == {"temperature": 0.0, "max_tokens": 9}
        done = llm.generate("Once")
        want = llm.generate("Once", SamplingParams(temperature=0, max_tokens=9))
        assert (done.text, done.token_ids) == (want.text, want.token_ids)
        assert [a.text for a in llm.best_of(2, "Once")] == [done.text] * 2
    with LLM(greedy, threads=1, gpu="off", generation_config="off") as llm:
        assert llm.recommended == {}
    with pytest.raises(UsageError, match="generation_config is 'on'"):
        LLM(greedy, generation_config="on")


def test_serve_samples_as_recommended_before_its_flags_before_the_request(greedy: Path) -> None:
    with served(model=greedy, sampling={"top_k": 7}) as server, server.client() as client:
        shown = client.get("/props").json()["default_generation_settings"]["params"]
        assert (shown["temperature"], shown["top_k"], shown["top_p"]) == (0.0, 7, 0.95)
        assert any("recommends: temperature 0.0, max_tokens 9" in line for line in server.notes)

        def texts(**body: Any) -> list[str]:
            asked = {"messages": [{"role": "user", "content": "Once"}], "n": 3, "ignore_eos": True, **body}
            answered = client.post("/v1/chat/completions", json=asked).json()
            assert answered["usage"]["completion_tokens"] == 27, "max_new_tokens"
            return [c["message"]["content"] for c in answered["choices"]]

        assert len(set(texts())) == 1 and len(set(texts(temperature=1.5, top_k=0))) == 3


def test_serve_does_without_what_is_recommended_if_asked(greedy: Path) -> None:
    with served(model=greedy, generation_config="off") as server, server.client() as client:
        shown = client.get("/props").json()["default_generation_settings"]["params"]
        assert shown["temperature"] == 0.8 and not any("recommends" in line for line in server.notes)


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_a_key_that_is_not_understood_is_one_line_and_off_does_without(
    command: str, pack: Callable[[dict[str, Any]], Path], thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack({"num_beams": 4})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    more = {"run": ("Once", "-n", "2"), "chat": (), "serve": ("--port", "0")}[command]
    ran = thermocline(command, "-m", path, "-t", "1", "--gpu", "off", "-q", *more)
    assert ran.code == 6 and "num_beams" in ran.err and ran.err.count("\n") == 1
    if command == "run":
        assert thermocline(command, "-m", path, "-q", *more, "--generation-config", "off").code == 0
