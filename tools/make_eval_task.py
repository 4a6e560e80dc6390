"""Write the offline multiple-choice task: which of four spans of a book goes on from a passage of it?

    python tools/make_eval_task.py

Passages come from glm_gpu/tasks/heldout, public-domain text the demo model was not trained on; wrong choices are spans
of the same length from elsewhere in the same book. The result, glm_gpu/tasks/continuations.jsonl, depends on nothing
else.
"""

import json
import random
from pathlib import Path

TASKS = Path(__file__).resolve().parent.parent / "glm_gpu/tasks"
CONTEXT_WORDS, CHOICE_WORDS, NUM_CHOICES, ITEMS_PER_BOOK = 24, 8, 4, 24


def items(book: str, words: list[str], rng: random.Random) -> list[dict]:
    """Items of one book; no word is in two correct continuations."""
    item_words = CONTEXT_WORDS + CHOICE_WORDS
    starts = rng.sample(range(0, len(words) - item_words, item_words), ITEMS_PER_BOOK)
    found = []
    for start in sorted(starts):
        begin = start + CONTEXT_WORDS
        far = [i for i in range(len(words) - CHOICE_WORDS) if abs(i - begin) > 4 * CONTEXT_WORDS]
        spans = [begin, *rng.sample(far, NUM_CHOICES - 1)]
        choices = [" ".join(words[i : i + CHOICE_WORDS]) for i in spans]
        order = rng.sample(range(NUM_CHOICES), NUM_CHOICES)
        found.append(
            {
                "book": book,
                "context": " ".join(words[start:begin]),
                "choices": [choices[i] for i in order],
                "answer": order.index(0),
            }
        )
    return found


def main() -> None:
    rng = random.Random(20)
    lines = []
    for book in ("bible", "plays", "poems"):
        words = (TASKS / "heldout" / f"{book}.txt").read_text(encoding="utf-8").split()
        lines += [json.dumps(item, ensure_ascii=False) for item in items(book, words, rng)]
    (TASKS / "continuations.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
