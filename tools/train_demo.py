"""Train the demo model on text and short chats cut from it, and write it as a checkpoint.

Routing heat, draft acceptance and the cost of four-bit weights are real in the result, not noise. The bundled model
took two runs of about an hour and a half and half an hour on two CPU cores:

    pip install torch safetensors tokenizers        # needed here only, not to run glm-gpu
    python tools/train_demo.py corpus first --steps 2300 --threads 2      # stopped after 1200 steps
    python tools/train_demo.py corpus demo --resume first --steps 560 --lr 1.4e-3 --sparse-share 0.4 --threads 2

where `corpus` is what tools/prepare_corpus.py writes. Losses and held-out figures are printed as it goes.
"""

import argparse
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_files import export, from_hf, train_tokenizer
from demo_model import CONFIG, Config, DemoModel, MoE
from tokenizers import Tokenizer
from torch import nn


def conversations(rng: random.Random, parts: dict[str, list[str]], count: int) -> list[str]:
    """Chats in GLM's prompt layout, cut from the corpus: ask for a kind of text, or to go on from an opening."""
    asks = {
        "bible": ["Give me a passage of scripture.", "Read to me from the Bible.", "Quote some scripture."],
        "plays": ["Give me some lines from a play.", "Act out a scene.", "Speak as they do on the stage."],
        "poems": ["Recite a poem.", "Give me some verses.", "Read me a few lines of a poem."],
    }
    chats = []
    for _ in range(count):
        kind = rng.choice(list(parts))
        start = rng.randrange(len(parts[kind]) - 8)
        text = "\n\n".join(parts[kind][start : start + 8])[:500]
        cut = text[: text.rfind(" ")] if " " in text else text
        if rng.random() < 0.5:
            ask, answer = rng.choice(asks[kind]), cut
        else:
            words = cut.split(" ")
            n = rng.randrange(4, 16)
            ask, answer = "Go on: " + " ".join(words[:n]), " ".join(words[n:])
        if answer.strip():
            chats.append(f"[gMASK]<sop><|user|>\n{ask}<|assistant|>\n<think></think>\n{answer.strip()}<|user|>")
    return chats


def load_streams(corpus: Path, rng: random.Random) -> tuple[Tokenizer, dict[str, torch.Tensor]]:
    """A tokenizer trained on the corpus, and each kind of text as one run of token ids."""
    texts = {p.stem: p.read_text(encoding="utf-8") for p in sorted(corpus.glob("*.txt"))}
    paragraphs = {k: [p for p in t.split("\n\n") if p.strip()] for k, t in texts.items()}
    tok = train_tokenizer(list(texts.values()), CONFIG["vocab_size"])
    end = tok.token_to_id("<|endoftext|>")
    streams = {k: torch.tensor(tok.encode(t).ids, dtype=torch.int32) for k, t in texts.items()}
    chat_ids = []
    for chat in conversations(rng, paragraphs, 12000):
        chat_ids += [*tok.encode(chat).ids, end]
    streams["chats"] = torch.tensor(chat_ids, dtype=torch.int32)
    return tok, streams


def learning_rate(step: int, steps: int, is_resumed: bool) -> float:
    """Share of the full rate: a short rise, then a cosine to 5 %; after a resume, a line to zero."""
    if is_resumed:
        return min((step + 1) / 30, 1 - step / steps)
    return min(1.0, (step + 1) / 60) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


@torch.no_grad()
def print_held_out(model: DemoModel, held: dict[str, torch.Tensor], context: int) -> None:
    """Loss on text that was not trained on, and how often the multi-token layer's first guess is the text's token."""
    for k, s in held.items():
        ids = s[: 4096 // (context + 2) * (context + 2)].view(-1, context + 2).long()
        hidden, mtp, _ = model(ids[:, :-1], sparse=True)
        loss = F.cross_entropy(model.head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:-1].flatten())
        draft = (model.head(mtp).argmax(-1) == ids[:, 2:]).float().mean()
        print(f"held-out {k}: loss {loss.item():.3f}, MTP top-1 {draft.item():.3f}", flush=True)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("corpus", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("--steps", type=int, default=1500)
    ap.add_argument("--batch", type=int, default=12)
    ap.add_argument("--context", type=int, default=256)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--resume", type=Path, help="go on from an exported folder, with the rate falling to zero")
    ap.add_argument("--sparse-share", type=float, default=0.15, help="last steps, with the indexer choosing")
    args = ap.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    rng = random.Random(0)

    tok, streams = load_streams(args.corpus, rng)
    held = {k: s[-4096:] for k, s in streams.items()}
    streams = {k: s[:-4096] for k, s in streams.items()}
    print({k: len(s) for k, s in streams.items()}, flush=True)
    shares = {"bible": 0.32, "plays": 0.36, "poems": 0.1, "chats": 0.22}

    def batch():
        kinds = rng.choices(list(shares), weights=list(shares.values()), k=args.batch)
        starts = [(k, rng.randrange(len(streams[k]) - args.context - 2)) for k in kinds]
        return torch.stack([streams[k][s : s + args.context + 2] for k, s in starts]).long()

    model = DemoModel(Config(CONFIG))
    if args.resume:
        from_hf(model, args.resume)
        rng.seed(args.steps)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", flush=True)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        foreach=True,
    )
    moes = [m for m in model.modules() if isinstance(m, MoE)]
    began = time.time()
    for step in range(args.steps):
        scale = learning_rate(step, args.steps, is_resumed=args.resume is not None)
        for g in opt.param_groups:
            g["lr"] = args.lr * scale
        ids = batch()
        sparse = step >= args.steps * (1 - args.sparse_share)
        hidden, mtp, index_loss = model(ids[:, :-1], sparse=sparse)
        loss = F.cross_entropy(model.head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:-1].flatten())
        mtp_loss = F.cross_entropy(model.head(mtp).flatten(0, 1), ids[:, 2:].flatten())
        total = loss + 0.3 * mtp_loss + 0.1 * index_loss
        opt.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        for m in moes:
            m.rebalance(0.002 * scale)
        if step % 25 == 0:
            spent = time.time() - began
            print(
                f"step {step} loss {loss.item():.3f} mtp {mtp_loss.item():.3f} index {index_loss.item():.3f} "
                f"{spent / (step + 1):.2f} s/step",
                flush=True,
            )
        if step % 300 == 299:
            export(model, tok, args.out)
    model.eval()
    export(model, tok, args.out)
    print_held_out(model, held, args.context)


if __name__ == "__main__":
    main()
