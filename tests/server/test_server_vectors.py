"""`/v1/embeddings` and `/v1/rerank`: OpenAI's and Jina's shapes, the engine's vectors, errors that help."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import embedders
import httpx2
import numpy as np
import openai
import pytest
from scripted import scripted
from serving import Served, served

from thermocline import LLM, SamplingParams
from thermocline.errors import UsageError
from thermocline.ops.interface import F32
from thermocline.server.http.limits import ServerLimits

TEXTS = ["The cat sat on a mat.", "", "Rain fell all night, and all day", "unseen", "the cat sat on a mat ."]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("models")
    return {
        "bert": embedders.bert(at / "bert", matryoshka_dimensions=[16]),
        "qwen3": embedders.qwen3(at / "qwen3"),
        "cross": embedders.bert(at / "cross", "bert_ranker"),
        "reranker": embedders.reranker(at / "reranker"),
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def bert(models: dict[str, Path], cache: Path) -> Iterator[Served]:
    limits = ServerLimits(limit_inputs=64)
    with served(limits, model=models["bert"], cache_dir=cache, name="bert", gpu="off", format="f32") as made:
        yield made


@pytest.fixture(scope="module")
def reranker(models: dict[str, Path], cache: Path) -> Iterator[Served]:
    with served(model=models["reranker"], cache_dir=cache, name="ranks", gpu="off", format="f32") as made:
        yield made


@pytest.fixture(scope="module")
def client(bert: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{bert.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def want(models: dict[str, Path], cache: Path) -> Iterator[LLM]:
    with LLM(models["bert"], threads=1, gpu="off", format="f32", cache_dir=cache) as made:
        yield made


def post(server: Served, path: str, **body: Any) -> httpx2.Response:
    with server.client() as c:
        return c.post(path, json=body)


def refused(got: httpx2.Response, why: str, param: str | None = None) -> None:
    assert got.status_code == 400, got.text
    error = got.json()["error"]
    assert why in error["message"] and error["param"] == param, got.text


# ---- embeddings


def test_the_official_client_gets_the_engines_vectors(client: openai.OpenAI, want: LLM) -> None:
    """It asks for base64 by itself."""
    made = client.embeddings.create(model="bert", input=TEXTS)
    assert [d.index for d in made.data] == list(range(len(TEXTS))) and made.model == "bert"
    for d, v in zip(made.data, want.embed(TEXTS), strict=True):
        assert np.array(d.embedding, np.float32).tobytes() == v.tobytes()
        assert len(v) == 64 and abs(float(v @ v) - 1) < 1e-6
    tokens = sum(len(want.tokenizer.encode(text)) for text in TEXTS)
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (tokens, tokens)


def test_numbers_and_base64_are_the_same_bits_alone_and_together(bert: Served, want: LLM) -> None:
    whole = np.stack(want.embed(TEXTS))
    for texts, order in ((TEXTS, whole), (TEXTS[::-1], whole[::-1]), (TEXTS * 8, np.tile(whole, (8, 1)))):
        data = post(bert, "/v1/embeddings", input=texts, encoding_format="float").json()["data"]
        assert np.array([d["embedding"] for d in data], np.float32).tobytes() == order.tobytes()
    for text, v in zip(TEXTS, whole, strict=True):
        one = post(bert, "/v1/embeddings", input=text, encoding_format="base64").json()["data"][0][
            "embedding"
        ]
        assert base64.b64decode(one) == v.astype("<f4").tobytes()
        assert want.embed(text).tobytes() == v.tobytes()


def test_tokens_are_taken_as_they_are(client: openai.OpenAI, want: LLM) -> None:
    ids = [want.tokenizer.encode(text) for text in TEXTS]
    assert ids[1] == [2, 3], "an empty text has its marks"
    made = client.embeddings.create(model="bert", input=ids, encoding_format="float")
    assert vectors(made) == [v.tobytes() for v in want.embed(TEXTS)]
    alone = client.embeddings.create(model="bert", input=ids[0], encoding_format="float")
    assert vectors(alone) == vectors(made)[:1]


def vectors(made: Any) -> list[bytes]:
    return [np.array(d.embedding, np.float32).tobytes() for d in made.data]


@pytest.mark.parametrize(
    ("body", "why", "param"),
    [
        ({}, "Field required", "input"),
        ({"input": None}, "string", "input"),
        ({"input": []}, "at least 1 item", "input"),
        ({"input": [[]]}, "at least 1 item", "input.0"),
        ({"input": ["a", 1]}, "string", "input.1"),
        ({"input": [1, 131]}, "131", "input"),
        ({"input": [1, -1]}, "greater than or equal to 0", "input.1"),
        ({"input": ["a"] * 65}, "at most 64", "input"),
        ({"input": "the " * 64}, "it has 66 tokens, the context holds 64", "input"),
        ({"input": ["a", "the " * 64]}, "it has 66 tokens", "input.1"),
        ({"input": " " * 20000}, "far more than a context of 64", "input"),
        ({"input": "a", "dimensions": 32}, "may be cut to 16", "dimensions"),
        ({"input": "a", "dimensions": 0}, "greater than or equal to 1", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "'float' or 'base64'", "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "texts are not cut", "truncate_prompt_tokens"),
        ({"input": "a", "input_type": "query"}, "before your texts", "input_type"),
    ],
)
def test_what_cannot_be_honoured_is_refused(bert: Served, body: dict[str, Any], why: str, param: str) -> None:
    refused(post(bert, "/v1/embeddings", **body), why, param)


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({"input": ["a"] * 64, "encoding_format": None, "user": "u"}, True),
        ({"input": [5] * 64, "dimensions": 64}, True),
        ({"input": [[5], [130]]}, True),
        ({"input": ["a"] * 65}, False),
        ({"input": [[5]] * 65}, False),
        ({"input": [131]}, False),
        ({"input": []}, False),
        ({"input": [[]]}, False),
        ({"input": {"text": "a"}}, False),
        ({"input": "a", "encoding_format": "int8"}, False),
    ],
)
def test_inputs_are_taken_as_the_document_says(bert: Served, body: dict[str, Any], want: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    with bert.client() as c:
        document = c.get("/openapi.json").json()
        content = document["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"]
        schema = document | content["application/json"]["schema"]
        assert jsonschema.Draft202012Validator(schema).is_valid(body) == want
        assert c.post("/v1/embeddings", json=body).status_code == (200 if want else 400)


def test_a_text_that_is_no_unicode_is_refused(bert: Served) -> None:
    with bert.client() as c:
        head = {"content-type": "application/json"}
        got = c.post("/v1/embeddings", content=b'{"input": "\\ud800"}', headers=head)
    assert got.status_code == 400 and "surrogate" in got.text


def test_vectors_are_cut_where_the_model_lets_them(bert: Served, want: LLM) -> None:
    whole = want.embed("a")
    for n in (16, 64):
        got = post(bert, "/v1/embeddings", input="a", dimensions=n).json()["data"][0]["embedding"]
        v: F32 = np.array(got, np.float32)
        assert v.tobytes() == want.embed("a", dimensions=n).tobytes()
        assert len(v) == n and abs(float(v @ v) - 1) < 1e-6
        assert np.allclose(v * np.linalg.norm(whole[:n]), whole[:n], atol=1e-6)


def test_a_text_has_the_marks_that_its_model_expects(models: dict[str, Path], cache: Path) -> None:
    with LLM(models["qwen3"], threads=1, gpu="off", format="f32", cache_dir=cache, lazy=True) as llm:
        assert llm.tokenizer.encode("a") == [97, 259], "a mark ends every text"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 0}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_an_embedding_model_writes_nothing(bert: Served, path: str, body: dict[str, Any]) -> None:
    refused(post(bert, path, **body), "this model embeds texts and writes none: POST /v1/embeddings")


def test_an_embedding_model_does_not_rank(bert: Served) -> None:
    refused(post(bert, "/v1/rerank", query="a", documents=["b"]), "does not rank documents")


def test_a_model_that_writes_does_not_embed() -> None:
    with scripted() as made:
        got = httpx2.post(f"{made.url}/v1/embeddings", json={"input": "a"}, timeout=60)
        refused(got, "serve an embedding model, such as Qwen/Qwen3-Embedding-0.6B")
        got = httpx2.post(f"{made.url}/v1/rerank", json={"query": "a", "documents": ["b"]}, timeout=60)
        refused(got, "serve a reranker, such as Qwen/Qwen3-Reranker-0.6B")


def test_nothing_is_held_after_requests(bert: Served) -> None:
    post(bert, "/v1/embeddings", input=TEXTS * 12)
    bert.until_idle()


# ---- rerank

DOCUMENTS = ["the cat sat", "rain fell all night", "dogs", "the cat sat"]


def test_documents_are_ranked_by_how_likely_yes_is(
    reranker: Served, models: dict[str, Path], cache: Path
) -> None:
    with LLM(models["reranker"], threads=1, gpu="off", format="f32", cache_dir=cache) as llm:
        scores = llm.rerank("cats", DOCUMENTS)
        assert scores[0] == scores[3] and len(set(scores)) == 3
        vocabulary = llm.spec.vocab_size
        asked = SamplingParams(max_tokens=1, temperature=0, logprobs=vocabulary)
        for document, score in zip(DOCUMENTS, scores, strict=True):
            with llm._stream(llm._ranker._reranker.encode("cats", document)[0], asked) as stream:
                found = dict(next(stream).logprobs.top)  # type: ignore[union-attr]
            yes, no = math.exp(found[256]), math.exp(found[257])
            assert score == pytest.approx(yes / (yes + no), rel=1e-5)
        with pytest.raises(UsageError, match="no pooling"):
            llm.embed("a")
    made = post(reranker, "/v1/rerank", query="cats", documents=DOCUMENTS).json()
    order = sorted(range(4), key=lambda i: -scores[i])
    assert [r["index"] for r in made["results"]] == order, "of equal ones the first comes first"
    assert [r["relevance_score"] for r in made["results"]] == [scores[i] for i in order]
    assert (made["model"], made["object"]) == ("ranks", "list") and "document" not in made["results"][0]
    assert made["usage"]["prompt_tokens"] == made["usage"]["total_tokens"] > 1000


def test_the_best_documents_alone_with_their_texts(reranker: Served) -> None:
    whole = post(reranker, "/v1/rerank", query="cats", documents=DOCUMENTS).json()["results"]
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    asked = {"query": "cats", "documents": documents, "top_n": 2, "return_documents": True}
    made = post(reranker, "/v1/rerank", **asked).json()["results"]
    assert [{**r, "document": {"text": DOCUMENTS[r["index"]]}} for r in whole[:2]] == made
    alone = post(reranker, "/v1/rerank", query="cats", documents=[DOCUMENTS[1]], top_n=9).json()["results"]
    assert alone[0]["relevance_score"] in [r["relevance_score"] for r in whole if r["index"] == 1]
    other = post(reranker, "/v1/rerank", query="cats", documents=DOCUMENTS, instruction="Find a dog").json()
    assert other["results"][0]["relevance_score"] != whole[0]["relevance_score"]


def test_a_cross_encoder_ranks_pairs(models: dict[str, Path], cache: Path) -> None:
    with LLM(models["cross"], threads=1, gpu="off", format="f32", cache_dir=cache) as llm:
        prompts = llm._ranker.prompts("the cat", ["a dog", ""], None)
        assert [len(ids) for ids, _ in prompts] == [7, 5] and [p.second for _, p in prompts] == [4, 4]
        assert [ids[0] for ids, _ in prompts] == [2, 2] and prompts[0][0][3::3] == [3, 3]
        scores = llm.rerank("the cat", DOCUMENTS)
        assert scores[0] == scores[3] and len(set(scores)) == 3 and all(0 < s < 1 for s in scores)
        assert llm.rerank("the cat", DOCUMENTS[:1]) == scores[:1]
        with pytest.raises(UsageError, match="takes none"):
            llm.rerank("the cat", DOCUMENTS, instruction="Find it")
        with pytest.raises(UsageError, match="neither writes text nor embeds"):
            llm.embed("a")


def test_a_mark_in_a_document_is_text(models: dict[str, Path], cache: Path) -> None:
    with LLM(models["reranker"], threads=1, gpu="off", format="f32", cache_dir=cache) as llm:
        plain, odd = (llm._ranker._reranker.encode("a", text)[0] for text in ("b", "<|im_end|>"))
        marks = [i for i in plain if i >= 258]
        assert marks == [258, 259, 258, 259, 258] == [i for i in odd if i >= 258]
        text = "".join("" if i >= 258 else chr(i) for i in odd)
        assert "<Query>: a\n<Document>: <|im_end|>\nassistant\n<think>\n\n</think>\n\n" in text


@pytest.mark.parametrize(
    ("body", "why", "param"),
    [
        ({"documents": ["a"]}, "Field required", "query"),
        ({"query": "a"}, "Field required", "documents"),
        ({"query": "a", "documents": []}, "at least 1 item", "documents"),
        ({"query": "a", "documents": [{"title": "b"}]}, "Field required", "documents.0.text"),
        ({"query": "a", "documents": ["b"] * 2049}, "at most 2048", "documents"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "greater than or equal to 1", "top_n"),
        ({"query": "a", "documents": ["b", "b" * 1024]}, "the context holds 1024", "documents.1"),
        ({"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "as one text", "rank_fields"),
    ],
)
def test_what_cannot_be_ranked_is_refused(
    reranker: Served, body: dict[str, Any], why: str, param: str
) -> None:
    refused(post(reranker, "/v1/rerank", **body), why, param)


def test_a_reranker_also_writes(reranker: Served) -> None:
    got = post(reranker, "/v1/completions", prompt="a", max_tokens=2, temperature=0)
    assert got.status_code == 200 and got.json()["usage"]["completion_tokens"] == 2
