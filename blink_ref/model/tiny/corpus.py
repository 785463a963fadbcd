"""Make the text that the tiny model is trained on: Jane Austen's six novels, from a Debian package.

The novels (public domain) lie as R character vectors, one string a line, in Debian's r-cran-janeaustenr.
R is not needed, only the PyPI package ``rdata``, which reads R's serialisation:

    pip install rdata
    apt-get download r-cran-janeaustenr
    dpkg -x r-cran-janeaustenr_*.deb unpacked
    python corpus.py unpacked corpus.txt

In the text a paragraph is one line, paragraphs are parted by an empty line, and a chapter ends in
``<|endoftext|>``.
"""

import argparse
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import rdata

END_OF_TEXT = "<|endoftext|>"
CHAPTER_HEADING = re.compile(r"^chapter (?:\d+|[ivxl]+)$", re.IGNORECASE | re.MULTILINE)
EDITORS_NOTE = "A NOTE ON THE TEXT"
# Volume headings, the closing word, rows of stars, and bracketed remarks of later editors.
NOT_PROSE = re.compile(r"volume [ivx]+|\(end of volume one\.\)|finis|the end|[* ]+|\[.*", re.IGNORECASE)


def novels(unpacked: Path) -> Iterator[str]:
    """The text of each novel, as its lines stand in the package.

    R stores a package's data in a "lazy-load" pair: ``Rdata.rdx`` maps a name to (offset, length) in
    ``Rdata.rdb``, where an object is a 4-byte length followed by a zlib stream (R Internals, section 1.8).
    """
    folder = unpacked / "usr/lib/R/site-library/janeaustenr/data"
    index = rdata.read_rds(folder / "Rdata.rdx")
    blob = (folder / "Rdata.rdb").read_bytes()
    for offset, length in index["variables"].values():
        serialised = zlib.decompress(blob[offset + 4 : offset + length])
        yield "\n".join(rdata.conversion.convert(rdata.parser.parse_data(serialised, extension=".rds")))


def chapters(novel: str) -> Iterator[str]:
    """The chapters of a novel: title page and headings dropped, each paragraph unwrapped to one line."""
    prose = novel.partition(EDITORS_NOTE)[0]
    for chapter in CHAPTER_HEADING.split(prose)[1:]:
        # Underscores mark emphasis; they are typography, not text.
        paragraphs = [" ".join(p.split()).replace("_", "") for p in re.split(r"\n\s*\n", chapter)]
        yield "\n\n".join(p for p in paragraphs if p and not NOT_PROSE.fullmatch(p))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("unpacked", type=Path, help="folder into which `dpkg -x` unpacked the package")
    parser.add_argument("corpus", type=Path, help="text file to write")
    args = parser.parse_args()
    text = "".join(f"{chapter}{END_OF_TEXT}\n" for novel in novels(args.unpacked) for chapter in chapters(novel))
    args.corpus.write_text(text, encoding="utf-8")
    print(f"{args.corpus}: {text.count(END_OF_TEXT)} chapters, {len(text.encode())} bytes")


if __name__ == "__main__":
    main()
