"""stories260K, a real trained model: golden ids, its greedy text word for word, its mean NLL.

The checkpoint is llama2.c's: interleaved RoPE and its own tokenizer file, so this also proves the
conversion that
Hugging Face directories have been through.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from thermocline import LLM, SamplingParams
from thermocline.convert.importer import pack
from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import KVCache, blocks_for
from thermocline.ops.interface import F32, Batch, FFNStats
from thermocline.pack.pack import Pack
from thermocline.session import weights

pytestmark = pytest.mark.shared

BOS, EOS = 1, 2
GOLDEN_NLL = 1.527951
GOLDEN_TOKENS = 39_439
Tensors = dict[str, F32]


def read_tensors(path: Path) -> tuple[dict[str, int], Tensors]:
    """llama2.c's file: seven int32, then float32 tensors, each for all layers."""
    data = path.read_bytes()
    names = ("dim", "hidden", "layers", "heads", "kv_heads", "vocab", "seq")
    c = dict(zip(names, struct.unpack("<7i", data[:28]), strict=True))
    hd, at = c["dim"] // c["heads"], 28

    def take(*shape: int) -> F32:
        nonlocal at
        n = int(np.prod(shape))
        out = np.frombuffer(data, "<f4", n, at).reshape(shape)
        at += 4 * n
        return out

    layers, dim, hidden = c["layers"], c["dim"], c["hidden"]
    t = {"embed": take(c["vocab"], dim), "attn_norm": take(layers, dim), "q": take(layers, dim, dim)}
    t |= {"k": take(layers, c["kv_heads"] * hd, dim), "v": take(layers, c["kv_heads"] * hd, dim)}
    t |= {"o": take(layers, dim, dim), "ffn_norm": take(layers, dim), "gate": take(layers, hidden, dim)}
    t |= {"down": take(layers, dim, hidden), "up": take(layers, hidden, dim), "norm": take(dim)}
    assert len(data) - at == 2 * 4 * c["seq"] * hd // 2, "what is left are two RoPE tables; the head is tied"
    return c, t


def halves(w: F32, head_dim: int) -> F32:
    """Rows of each head from RoPE pairs (2i, 2i+1) to pairs (i, i + head_dim/2)."""
    pairs = w.reshape(-1, head_dim // 2, 2, w.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(w.shape)


def hf_tensors(c: dict[str, int], t: Tensors) -> Tensors:
    hd = c["dim"] // c["heads"]
    out = {"model.embed_tokens.weight": t["embed"], "model.norm.weight": t["norm"]}
    for i in range(c["layers"]):
        named = {
            "self_attn.q_proj": halves(t["q"][i], hd),
            "self_attn.k_proj": halves(t["k"][i], hd),
            "self_attn.v_proj": t["v"][i],
            "self_attn.o_proj": t["o"][i],
            "mlp.gate_proj": t["gate"][i],
            "mlp.up_proj": t["up"][i],
            "mlp.down_proj": t["down"][i],
            "input_layernorm": t["attn_norm"][i],
            "post_attention_layernorm": t["ffn_norm"][i],
        }
        out |= {f"model.layers.{i}.{name}.weight": w for name, w in named.items()}
    return {name: np.ascontiguousarray(w) for name, w in out.items()}


def read_tokenizer(path: Path) -> Tokenizer:
    """llama2.c joins the pair whose whole has the best score: BPE whose merges are ranked by score."""
    data, at, pieces, scores = path.read_bytes(), 4, [], []
    while at < len(data):
        score, size = struct.unpack_from("<fi", data, at)
        pieces.append(data[at + 8 : at + 8 + size].decode().replace(" ", "▁"))
        scores.append(score)
        at += 8 + size
    pieces[:3] = "<unk>", "<s>", "</s>"
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces[259:], key=lambda p: -scores[vocab[p]])
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    made = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


@pytest.fixture(scope="module")
def hf_directory(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, path = shared_data / "stories260K", tmp_path_factory.mktemp("stories") / "stories260K"
    path.mkdir()
    c, tensors = read_tensors(source / "stories260K.bin")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c["dim"],
        "intermediate_size": c["hidden"],
        "num_hidden_layers": c["layers"],
        "num_attention_heads": c["heads"],
        "num_key_value_heads": c["kv_heads"],
        "vocab_size": c["vocab"],
        "max_position_embeddings": c["seq"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(hf_tensors(c, tensors), str(path / "model.safetensors"))
    read_tokenizer(source / "tok512.bin").save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def packed(hf_directory: Path) -> Path:
    path = hf_directory.with_name("pack")
    pack(hf_directory, path, "f32")
    return path


Logits = Callable[[list[int]], F32]


@pytest.fixture(scope="module")
def logits(packed: Path) -> Logits:
    """All rows' logits of one text."""
    opened = Pack.open(packed)
    spec, loaded = opened.spec, weights.load(opened, threads=2)
    kv = KVCache(spec, blocks_for(spec.max_context))
    model = bind(spec, loaded.weights, loaded.ops)

    def of(ids: list[int]) -> F32:
        table = kv.open([])
        assert kv.grow(table, len(ids))
        rows = np.arange(len(ids), dtype=np.int32)
        batch = Batch(
            np.array(ids, np.int32),
            rows,
            np.zeros_like(rows),
            np.array([table.held[0].blocks], np.int32),
            rows,
        )
        y = forward(model, kv, batch, loaded.ops, sparsity="exact", stats=FFNStats())
        kv.close(table)
        return y

    return of


def test_ids_and_next_token_are_golden(packed: Path, logits: Logits) -> None:
    with LLM(packed) as llm:
        ids = llm.tokenizer.encode("Once upon a time")
    assert ids == [1, 403, 407, 261, 378]
    assert int(logits(ids)[-1].argmax()) == 432


def test_greedy_text_is_the_authors_word_for_word(
    hf_directory: Path, tmp_path: Path, shared_data: Path
) -> None:
    page = (shared_data / "stories260K" / "stories260K.md").read_text()
    text = re.search(r"-t 0\.0\n(.*?)\n```", page, re.DOTALL)
    assert text is not None
    greedy = SamplingParams(temperature=0, max_tokens=256)  # and BOS: the author's 257
    with LLM(hf_directory, format="f32", cache_dir=tmp_path) as llm:
        done = llm.generate("", greedy)
        assert (len(done.token_ids), done.text) == (256, text[1])


@pytest.mark.parametrize(("name", "expected"), [("tinystories/*.txt", 11.3635), ("wikitext2/*", 130.0652)])
def test_perplexity_is_llama_perplexitys(
    packed: Path, shared_data: Path, name: str, expected: float, thermocline: Callable[..., Any]
) -> None:
    """Of the same weights as an f32 GGUF: `llama-perplexity -c 512 --chunks 40` (0c1e570)."""
    (text,) = (shared_data / "text").glob(name)
    ran = thermocline("eval", packed, "--text", text, "--limit", "40", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["tokens"] == 40 * 255
    assert found["perplexity"]["value"] == pytest.approx(expected, rel=2e-4)  # f32, summed in another order


def test_mean_nll_is_golden(
    hf_directory: Path,
    logits: Logits,
    shared_data: Path,
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    tokenizer = Tokenizer.from_file(str(hf_directory / "tokenizer.json"))
    (sample,) = (shared_data / "text" / "tinystories").glob("*.txt")
    stories = [s.strip() for s in sample.read_text().split("<|endoftext|>")][1:101]
    total, count = 0.0, 0
    for story in stories:
        ids = tokenizer.encode(story).ids[:512]
        y: NDArray[np.float64] = logits(ids)[:-1].astype(np.float64)
        top = y.max(axis=1)
        log_sum = top + np.log(np.exp(y - top[:, None]).sum(axis=1))
        total += float((log_sum - y[np.arange(len(y)), ids[1:]]).sum())
        count += len(y)
    record_testsuite_property("nll", total / count)
    assert count == GOLDEN_TOKENS
    assert abs(total / count - GOLDEN_NLL) <= 1e-4
