#!/usr/bin/env python3
"""Splits texts with NLTK's Punkt, the reference of Feedline's splitter.

    nltk_sentences.py CORPUS.jsonl... > cases.jsonl
    FEEDLINE_SENTENCES=$PWD/cases.jsonl cargo test --release -p preprocess --test it sentences::

Reads the key "text" of JSON lines, and prints NLTK's sentences of each text, with white space
between sentences dropped and kept, as Megatron's preprocess_data.py does with --split-sentences and
--keep-newlines. Needs nltk (3.9 or 3.10) and its data punkt_tab/english. With --soup N it generates
N difficult texts from --seed.
"""

import argparse
import json
import random

import nltk
from nltk.tokenize.punkt import PunktLanguageVars, PunktSentenceTokenizer, load_punkt_params

SLICE_CHARS = 1_000_000


class KeepNewlines(PunktLanguageVars):
    # The word before a mark, the mark and the space after it are one match; the next word, or one
    # character of punctuation, follows.
    _period_context_fmt = r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"


PIECES = (
    ". . . .. ... ? ! ?! -- --- - , ; : ' \" ` ( ) [ ] { } * @ # & % _ ~ / \\ ’ ” “ ‘ « » … 。".split()
    + [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\xa0", "\u2003"]
    + "Mr Dr U.S U.S.A J K the The He he It it However yet Fig fig No p.m a.m Inc Corp St".split()
    + "Bach J.S 1 12 3.5 1,000 -7 .5 ٣ ² Ⅷ é É ß İ Σ ΑΣ ό z Z 中 文 ǅ ʰ \u0301 x-ray anti-U.S i.e e.g".split()
    + "Edelman Levine Aron magnin pay-fone S.p.A Ph.D etc vs co-op Co sales Sales".split()
)


def soup(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        size = rng.choice([3, 10, 40])
        spaced = rng.random()
        parts = []
        for _ in range(rng.randint(1, size)):
            parts.append(rng.choice(PIECES))
            if rng.random() < spaced:
                parts.append(rng.choice([" ", " ", "\n", ". ", "."]))
        yield "".join(parts)


def texts(args):
    yield from soup(args.soup, args.seed)
    for name in args.corpus:
        with open(name, encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("corpus", nargs="*")
    parser.add_argument("--params", help="a folder of punkt_tab; default: the installed one")
    parser.add_argument("--soup", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = nltk.data.find(args.params or "tokenizers/punkt_tab/english/")
    params = load_punkt_params(folder)
    splitters = {
        "drop": PunktSentenceTokenizer(params),
        "keep": PunktSentenceTokenizer(params, lang_vars=KeepNewlines()),
    }
    version = ".".join(nltk.__version__.split(".")[:2])
    for text in texts(args):
        case = {"nltk": version, "text": text}
        for name, splitter in splitters.items():
            slices = [text[at : at + SLICE_CHARS] for at in range(0, len(text), SLICE_CHARS)]
            case[name] = [sentence for part in slices for sentence in splitter.tokenize(part)]
        print(json.dumps(case))


if __name__ == "__main__":
    main()
