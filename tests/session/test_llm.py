"""LLM: memory is said before it is taken, what cannot work before weights are read; streams free theirs."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import tiny
from toy import GREEDY, SPEC, VOCAB, WEIGHTS, Letters

from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import BadFile, OutOfBudget, UsageError
from thermocline.llm import LLM
from thermocline.model.spec import ModelSpec
from thermocline.ops import reference
from thermocline.ops.interface import F32
from thermocline.plan.memory import GIB, HERE_BYTES, Needs, context_for, fit
from thermocline.session import weights
from thermocline.session.options import EngineOptions, Keywords, ModelOptions
from thermocline.session.session import Session, budget_for

# ---- memory, said before it is taken


LLAMA_7B = ModelSpec("llama", 4096, 11008, 32, 32, 32, 128, 32000, 4096, "rms", 1e-5, "silu")


def budget(available_gib: float, context: int = 4096) -> int:
    needs = Needs("exact", context, max_batch=8, threads=2, budget=int(available_gib * GIB))
    return fit(LLAMA_7B, needs, weights_bytes=7 * GIB, context=context)


def test_a_model_that_does_not_fit_is_refused_in_gib_with_a_way_out() -> None:
    with pytest.raises(
        OutOfBudget, match=r"needs 9\.\d\d GiB .*7\.00 GiB weights.* 8\.00 GiB is free; use a context of"
    ):
        budget(8)
    with pytest.raises(OutOfBudget, match="smaller weight format"):
        budget(6)


def test_the_context_it_recommends_fits() -> None:
    with pytest.raises(OutOfBudget) as refused:
        budget(8)
    tokens = int(str(refused.value).rsplit(maxsplit=1)[1])
    assert budget(8, context=tokens) == tokens


def test_a_cache_for_more_than_one_context_never_refuses_a_model() -> None:
    assert budget(100) == 4096
    assert budget(100, context=64) == 512
    assert budget(7.5, context=64) == 512
    assert budget(7.2, context=64) == 64


def test_the_memory_plan_is_above_what_a_run_takes_and_not_far(tiny_pack: Path) -> None:
    """In a process of its own: the peak is the process's. Half: a tiny model's share is all Python's."""
    code = f"""
from thermocline import LLM, SamplingParams
from thermocline.machine import hardware
from thermocline.plan.memory import runtime_bytes, scratch_bytes
from thermocline.engine.kv_cache import bytes_for
with LLM({str(tiny_pack)!r}, threads=2, context=2048, max_batch=2) as llm:
    llm.generate(["a" * 1000] * 2, SamplingParams(max_tokens=2, top_k=0))
    scratch = scratch_bytes(llm.spec, context=2048, max_batch=2, threads=2) + runtime_bytes(llm.spec)
    print(llm.session.weights_bytes + bytes_for(llm.spec, 4096) + scratch, hardware.peak_rss_bytes())"""
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    need, peak = map(int, run.stdout.split())
    assert 0.5 * need < peak <= need


def test_a_context_beyond_the_model_is_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"257 tokens .* 256"):
        context_for(SPEC, 257)
    assert context_for(SPEC, None) == 256


@pytest.mark.parametrize(
    ("option", "value"), [("threads", 0), ("context", 0), ("max_batch", -1), ("sparsity", "most")]
)
def test_an_option_out_of_range_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=option):
        LLM(**{option: value})


def test_each_keyword_is_a_field_of_the_options() -> None:
    """A keyword that is no field would be taken and dropped."""
    own = {f.name for cls in (EngineOptions, ModelOptions) for f in dataclasses.fields(cls)}
    assert set(Keywords.__annotations__) == own - {"model", "kv_tokens"}
    for name in Keywords.__annotations__:
        cls = EngineOptions if name in EngineOptions.__annotations__ else ModelOptions
        assert Keywords.__annotations__[name].__forward_arg__ == cls.__annotations__[name]
    with pytest.raises(TypeError, match="unexpected keyword argument 'contxt'"):
        LLM(contxt=5)  # type: ignore[call-arg]


# ---- LLM: the public way in


@pytest.fixture
def llm() -> LLM:
    """An LLM over the test model; only the loading is left out."""
    llm = LLM.__new__(LLM)
    letters: Any = Letters()
    llm.spec, llm.tokenizer = SPEC, letters
    llm._lock, llm._leaving, llm._closed = threading.Lock(), deque(), False
    llm._files = ModelOptions(generation_config="off")
    llm.session = Session.__new__(Session)
    llm.session.options, llm.session._gpus, llm.session._predictors = EngineOptions(context=256), None, None
    llm.session._engine = Engine(SPEC, WEIGHTS, reference, EngineSettings(context=256), tokenizer=letters)
    return llm


def test_one_prompt_gives_one_completion_and_a_list_gives_a_list(llm: LLM) -> None:
    one = llm.generate("abc", GREEDY)
    many = llm.generate(["abc", "xyz"], GREEDY)
    assert one.text == many[0].text and len(many) == 2 and many[0].text != many[1].text
    assert llm.generate([]) == []


def test_a_stream_gives_what_generate_gives(llm: LLM) -> None:
    stream = llm.stream("abc", GREEDY)
    assert "".join(chunk.text for chunk in stream) == llm.generate("abc", GREEDY).text
    assert stream.completion.finish_reason == "length"


def test_two_streams_can_be_read_in_turns(llm: LLM) -> None:
    a, b = llm.stream("abc", GREEDY), llm.stream("xyz", GREEDY)
    texts = ["".join(c.text for c in chunks) for chunks in zip(*zip(a, b, strict=True), strict=True)]
    assert texts == [llm.generate("abc", GREEDY).text, llm.generate("xyz", GREEDY).text]


def idle(llm: LLM) -> bool:
    assert llm.session.engine is not None
    llm.session.engine.check_integrity()
    return llm.session.engine.kv.used == 0 and not llm.session.engine.running


def test_a_closed_stream_frees_its_memory_and_keeps_its_figures(llm: LLM) -> None:
    with llm.stream("abc", GREEDY) as stream:
        next(stream)
        assert not idle(llm)
    assert idle(llm) and list(stream) == []
    assert stream.completion.finish_reason == "cancelled" and stream.completion.figures.tokens == 1


def test_a_dropped_stream_frees_its_memory(llm: LLM) -> None:
    stream = llm.stream("abc", GREEDY)
    next(stream)
    del stream
    gc.collect()
    assert idle(llm)


def test_a_stream_dropped_while_the_lock_is_held_does_not_deadlock(llm: LLM) -> None:
    stream, other = llm.stream("abc", GREEDY), llm.stream("xyz", GREEDY)
    next(stream)
    with llm._lock:
        del stream
        gc.collect()
    for _ in other:
        pass
    assert idle(llm)


def test_an_interrupted_generate_frees_everything(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def interrupted(*args: Any) -> F32:
        if next(calls) == 30:
            raise KeyboardInterrupt
        return original(*args)

    original = reference.matmul
    monkeypatch.setattr(reference, "matmul", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "xyz"], GREEDY)
    assert idle(llm)


def test_a_failed_request_raises_where_it_is_read(llm: LLM) -> None:
    with pytest.raises(UsageError, match="ban every token"):
        llm.generate("abc", SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -float("inf"))))
    assert idle(llm)


def test_a_closed_llm_ends_its_streams_and_says_so(llm: LLM) -> None:
    stream = llm.stream("abc", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    assert list(stream) == [] and stream.completion.finish_reason == "cancelled"
    with pytest.raises(UsageError, match="closed"):
        llm.generate("abc")


# ---- LLM: from files


def test_a_directory_and_its_pack_give_the_same_answer(
    tiny_hf: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    answers = []
    for model in (tiny_pack, tiny_hf):
        with LLM(model, context=128, threads=1, format="f32", cache_dir=tmp_path) as llm:
            answers.append(llm.generate("Once", GREEDY))
            assert idle(llm) and llm.context == 128 and llm.weight_format == "f32"
    assert answers[0].token_ids == answers[1].token_ids and len(answers[0].token_ids) == 24
    assert answers[0].figures.logits_hash == answers[1].figures.logits_hash


def test_sparsity_and_threads_do_not_change_a_bit(tiny_pack: Path) -> None:
    hashes = set()
    for sparsity, threads in itertools.product(("exact", "off"), (1, 2)):
        with LLM(tiny_pack, context=128, threads=threads, sparsity=sparsity) as llm:
            hashes.add(llm.generate("Once", GREEDY).figures.logits_hash)
    assert len(hashes) == 1


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights must not be read for a request that is refused")

    monkeypatch.setattr(weights, "load", load)


def test_what_this_process_holds_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python, and not the weights of other sessions."""
    from thermocline.machine import hardware

    monkeypatch.setattr(hardware, "available_bytes", lambda: 1 << 30)
    for own, counted in ((0, 0), (20 << 20, 20 << 20), (500 << 20, HERE_BYTES)):
        monkeypatch.setattr(hardware, "own_bytes", lambda own=own: own)
        assert budget_for(None) == ((1 << 30) + counted, "free")
        assert budget_for(1.0) == (1 << 30, "allowed")


def test_too_little_memory_is_said_before_loading(
    unloadable: None, tiny_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thermocline.machine import hardware

    monkeypatch.setattr(hardware, "available_bytes", lambda: 32 << 20)
    monkeypatch.setattr(hardware, "own_bytes", lambda: 0)
    with pytest.raises(OutOfBudget, match=r"3\d\.\d MiB is free"):
        LLM(tiny_pack)


def test_too_long_a_context_is_said_before_loading(unloadable: None, tiny_pack: Path) -> None:
    with pytest.raises(UsageError, match=r"32769 tokens .* 32768"):
        LLM(tiny_pack, context=32769)


def test_a_pack_without_a_tokenizer_is_said_before_loading(
    unloadable: None, tiny_hf: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((tiny_hf / name).read_bytes())
    with pytest.raises(BadFile, match=r"tokenizer\.json: not found"):
        LLM(bare, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ("a" * 129, SamplingParams(), "has 129 tokens, the context holds 128"),
        ("a", SamplingParams(logit_bias={9999: 1.0}), "9999"),
        ("\ud800", SamplingParams(), "remove the unpaired surrogate at character 0"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_before_loading(
    prompt: str, params: SamplingParams, said: str, unloadable: None, tiny_pack: Path
) -> None:
    with LLM(tiny_pack, context=128, lazy=True) as llm, pytest.raises(UsageError, match=said):
        llm.stream(prompt, params)


def test_an_empty_prompt_without_a_beginning_token_is_refused_before_loading(
    unloadable: None, tmp_path: Path
) -> None:
    model = tiny.hf_directory(tmp_path / "hf", bos_token_id=None)
    with LLM(model, cache_dir=tmp_path, lazy=True) as llm, pytest.raises(UsageError, match="empty"):
        llm.stream("")


def test_packing_and_loading_tell_how_far_they_are(tiny_hf: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    with LLM(tiny_hf, cache_dir=tmp_path, lazy=True, progress=lambda *at: told.append(at)) as llm:
        assert {what for what, _, _ in told} == {"packing"}
        llm.generate("Once", GREEDY)
    assert told[-1] == ("loading", llm.session.weights_bytes, llm.session.weights_bytes)
    assert all(done <= total for _, done, total in told)


# ---- the package


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = "numpy", "tokenizers", "tqdm", "thermocline.engine.engine"
    code = f"import sys, thermocline; print([m for m in {heavy!r} if m in sys.modules])"
    root = Path(__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert out.stdout == "[]\n"


def test_every_public_name_can_be_imported() -> None:
    import thermocline

    assert all(getattr(thermocline, name) is not None for name in thermocline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = thermocline.LLMs
