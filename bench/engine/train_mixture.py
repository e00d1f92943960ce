"""Train a small mixture of experts, to measure routing, reads and divergence on trained weights.

    python bench/engine/train_mixture.py -o moe-trained --data TEXTS --steps 600

A Qwen3-MoE of 6 layers, 192 wide, 128 experts of 64 neurons, 8 a token, with a BPE vocabulary of 2048 made
from the same text. `TEXTS` is a folder with text files; the last twentieth of each is held out and written
to `held_out.txt`, for `eval`. The result is a Hugging Face directory (`thermocline convert moe-trained -o
pack`). A checkpoint every 20 steps lets an interrupted run go on. Needs torch, transformers, tokenizers.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY, CONTEXT, SEQUENCES = 2048, 256, 16
RATE, WARM_UP, BALANCE, SAVE_EVERY = 3e-3, 40, 0.01, 20
END = "<|endoftext|>"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="text files, or folders of them")
    parser.add_argument("--steps", type=int, default=600, help="of 4096 tokens each")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--most", type=float, default=4.0, help="MB that a file gives at most")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    o.out.mkdir(parents=True, exist_ok=True)
    seen, held_out = texts(o.data, int(o.most * 1e6))
    (o.out / "held_out.txt").write_text("\n".join(held_out), encoding="utf-8")
    tokens, n_seen = encoded(o.out, seen, held_out)
    train(o.out, tokens[:n_seen], tokens[n_seen:], o.steps)


def texts(paths: list[Path], most: int) -> tuple[list[str], list[str]]:
    """Return what is learned of each file, and what is held out of it."""
    files = sorted(
        f for path in paths for f in ([path] if path.is_file() else path.rglob("*")) if f.is_file()
    )
    every = [file.read_text(encoding="utf-8", errors="replace")[:most] for file in files]
    return [t[: len(t) * 19 // 20] for t in every], [t[len(t) * 19 // 20 :] for t in every]


def encoded(out: Path, seen: list[str], held_out: list[str]) -> tuple[torch.Tensor, int]:
    """Return the ids of both, one after the other, and how many are of the first. The tokenizer is saved."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    pieces = [text[i : i + 10_000] for text in seen for i in range(0, len(text), 10_000)]
    tokenizer.train_from_iterator(pieces, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(out)
    parts = [
        np.concatenate([np.array(x.ids, np.int64) for x in tokenizer.encode_batch(several)])
        for several in (pieces, held_out)
    ]
    return torch.from_numpy(np.concatenate(parts)), len(parts[0])


def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        moe_intermediate_size=64,
        intermediate_size=64,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
    )


def train(out: Path, tokens: torch.Tensor, held_out: torch.Tensor, steps: int) -> None:
    model = Qwen3MoeForCausalLM(config())
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    first, checkpoint = 0, out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["adam"])
        first = saved["steps"]
    weights = sum(p.numel() for p in model.parameters())
    print(f"{weights / 1e6:.1f} M weights, {len(tokens)} tokens, from step {first}")
    begin = time.monotonic()
    for step in range(first, steps):
        for group in adam.param_groups:
            group["lr"] = RATE * min(
                (step + 1) / WARM_UP, 0.05 + 0.475 * (1 + math.cos(math.pi * step / steps))
            )
        loss, balance = losses(model, windows(tokens, step))
        adam.zero_grad(set_to_none=True)
        torch.autograd.backward(loss + BALANCE * balance)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        if step % 10 == 0 or step + 1 == steps:
            took = (time.monotonic() - begin) / (step - first + 1)
            print(
                f"step {step} loss {loss.item():.3f} balance {balance.item():.3f} {took:.2f} s a step",
                flush=True,
            )
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            saved = {"model": model.state_dict(), "adam": adam.state_dict(), "steps": step + 1}
            torch.save(saved, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
    with torch.no_grad():
        every = [losses(model, windows(held_out, step))[0].item() for step in range(4)]
    print(f"held out: {sum(every) / len(every):.3f} nats a token")
    model.save_pretrained(out)


def windows(tokens: torch.Tensor, step: int) -> torch.Tensor:
    """Return a step's sequences [SEQUENCES, CONTEXT + 1], from anywhere in the text."""
    at = np.random.default_rng([0, step]).integers(0, len(tokens) - CONTEXT - 1, SEQUENCES)
    return torch.stack([tokens[i : i + CONTEXT + 1] for i in at.tolist()])


def losses(model: Qwen3MoeForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy, and how uneven each layer's experts are in this batch (1: even), in the mean.

    transformers' own loss is of all layers together, which lets each be uneven.
    """
    with torch.autocast("cpu", torch.bfloat16):
        found = model(ids[:, :-1], output_router_logits=True)
    loss = F.cross_entropy(found.logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    uneven = []
    for logits in found.router_logits:
        p = logits.float().softmax(-1)
        chosen = p.topk(model.config.num_experts_per_tok).indices
        load = torch.bincount(chosen.flatten(), minlength=p.shape[1]) / chosen.numel()
        uneven.append(p.shape[1] * (load * p.mean(0)).sum())
    return loss, torch.stack(uneven).mean()


if __name__ == "__main__":
    main()
