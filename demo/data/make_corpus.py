"""Makes corpus.jsonl from what ORIGIN.md names; kept so that the file can be made again.

    python3 make_corpus.py RUST_DOC_HTML CHINESE_POETRY > corpus.jsonl

RUST_DOC_HTML is usr/share/doc/rust-doc/html of Debian's package rust-doc, CHINESE_POETRY the
folder `package` of the npm package chinese-poetry. One document a line: {"text", "source"}.
Of the English pages only prose is kept: paragraphs and list items that end like a sentence, one a
line, without headings, tables and code blocks. Documents of the two languages alternate in a fixed
order, so that a split by document number has both in every part.
"""

import hashlib
import html.parser
import json
import pathlib
import re
import sys

BOOKS = ["book", "reference", "nomicon", "rust-by-example", "edition-guide", "rustc"]
# Collections of a thousand poems each, the first ones.
POETRY_FILES = 3
BLOCKS = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "blockquote", "dt", "dd"}
SKIPPED = {"script", "style", "button", "svg", "pre", "table"}
# Characters of the shortest paragraph.
PARAGRAPH_MIN = 40


class Chapter(html.parser.HTMLParser):
    """The prose of <main>, a line a block."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.depth, self.skip = [], 0, 0

    def handle_starttag(self, tag, attributes):
        if tag == "main":
            self.depth += 1
        if tag in SKIPPED:
            self.skip += 1
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        if tag == "main":
            self.depth -= 1
        if tag in SKIPPED:
            self.skip -= 1
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if self.depth and not self.skip:
            self.parts.append(re.sub(r"\s+", " ", data))

    def text(self):
        lines = (re.sub(r"\s+", " ", line).strip() for line in "".join(self.parts).split("\n"))
        return "\n".join(line for line in lines
                         if len(line) >= PARAGRAPH_MIN and line.endswith((".", ":", "!", "?", ")")))


def chapters(root):
    for book in BOOKS:
        for page in sorted((root / book).glob("**/*.html")):
            if page.name in ("print.html", "toc.html", "404.html", "index.html"):
                continue
            if "edition" in page.parent.name and book == "book":
                continue  # older editions of the same book
            source = page.read_text(encoding="utf-8")
            if 'http-equiv="refresh"' in source.lower():
                continue
            chapter = Chapter()
            chapter.feed(source)
            text = chapter.text()
            if len(text) > 400:
                yield {"text": text, "source": f"rust-doc/{book}/{page.relative_to(root / book)}"}


def poems(root):
    """Poems in order of file and place, about a page of one author's together."""
    files = sorted((root / "dist" / "quantangshi").glob("poet.tang.*.json"),
                   key=lambda f: int(f.name.split(".")[2]))
    for file in files[:POETRY_FILES]:
        page, author = [], None
        for poem in json.loads(file.read_text(encoding="utf-8")):
            text = "\n".join([f"{poem['title']}（{poem['author']}）", *poem["paragraphs"]])
            if page and (poem["author"] != author or sum(map(len, page)) > 1500):
                yield {"text": "\n\n".join(page), "source": f"chinese-poetry/{file.stem}"}
                page = []
            author = poem["author"]
            page.append(text)
        if page:
            yield {"text": "\n\n".join(page), "source": f"chinese-poetry/{file.stem}"}


def main():
    rust, poetry = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    seen, documents = set(), []
    for document in [*chapters(rust), *poems(poetry)]:
        name = hashlib.sha256(document["text"].encode()).hexdigest()
        if name not in seen:
            seen.add(name)
            documents.append((name, document))
    documents = [document for _, document in sorted(documents, key=lambda pair: pair[0])]
    for document in interleaved(documents):
        print(json.dumps(document, ensure_ascii=False))


def interleaved(documents):
    """English and Chinese documents, each kind in its order and evenly spread, English first."""
    kinds = [[d for d in documents if d["source"].startswith(kind)] for kind in ("rust", "chinese")]
    placed = [((number + kind / 2) / len(of), document)
              for kind, of in enumerate(kinds) for number, document in enumerate(of)]
    return [document for _, document in sorted(placed, key=lambda pair: pair[0])]


if __name__ == "__main__":
    main()
