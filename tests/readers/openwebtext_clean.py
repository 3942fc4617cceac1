"""Checks what `feedline clean` kept and dropped, with an independent implementation of its rules.

    feedline clean --json-in F.jsonl --out O --exact-dedup --near-dedup --dropped D.jsonl
    python openwebtext_clean.py F.jsonl O.jsonl D.jsonl [--jaccard 0.7] [--key text]
                                [--all-pairs N] [--megatron]

Every line must be kept or dropped, in order and byte for byte. Exact duplicates must be those of a
hash table. A near duplicate must have the requested Jaccard index with an earlier, kept document,
by the sets of runs of five characters. --all-pairs compares all pairs of the first N kept documents
and counts missed pairs; --megatron does the same for the documents that the method of Megatron's
tools/openwebtext keeps (100 hashes in 10 bands, connected groups). Both need numpy and scipy.
Prints what was compared; exits with 1 if there are faults.
"""

import argparse
import json
import sys

RUN = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("kept")
    parser.add_argument("dropped")
    parser.add_argument("--jaccard", type=float, default=0.7)
    parser.add_argument("--key", default="text")
    parser.add_argument("--all-pairs", type=int, metavar="N")
    parser.add_argument("--megatron", action="store_true")
    args = parser.parse_args()

    source, kept = lines(args.source), lines(args.kept)
    dropped = {}
    for line in lines(args.dropped):
        label = json.loads(line)
        dropped[label["document"]] = label, line
    faults = partition(source, kept, dropped)
    texts = [json.loads(line)[args.key] for line in source]
    faults += exact(texts, dropped)
    faults += near(texts, dropped, args.jaccard)
    causes = {}
    for label, _ in dropped.values():
        causes[label["cause"]] = causes.get(label["cause"], 0) + 1
    print(f"{len(source)} documents, {len(kept)} kept, dropped {causes}")
    if args.all_pairs:
        numbers = [nth for nth in range(len(texts)) if nth not in dropped][: args.all_pairs]
        part = range(numbers[-1] + 1) if numbers else []
        found = pairs([texts[nth] for nth in numbers], args.jaccard)
        print(f"{len(numbers)} of the first {len(part)} documents are kept, all pairs compared:")
        print_pairs("feedline", len(part) - len(numbers), found)
        if args.megatron:
            kept_by_megatron = megatron([texts[nth] for nth in part], args.jaccard)
            others = pairs([texts[nth] for nth in kept_by_megatron], args.jaccard)
            print_pairs("Megatron", len(part) - len(kept_by_megatron), others)
        faults += [f"a pair of index {j:.3f} is kept" for j in found if j >= 0.9]
    for fault in faults[:10]:
        print("wrong:", fault)
    print(f"{len(faults)} faults")
    sys.exit(1 if faults else 0)


def lines(path):
    with open(path, encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\n") for line in file if line.strip()]


def partition(source, kept, dropped):
    """Checks that kept and dropped lines together are the source, in order."""
    kept = iter(kept)
    faults = []
    for nth, line in enumerate(source):
        if nth in dropped:
            if not dropped[nth][1].endswith(f',"dropped":{line}}}'):
                faults.append(f"document {nth} was dropped as another line")
        elif next(kept, None) != line:
            return [f"document {nth} is neither kept nor dropped"]
    if next(kept, None) is not None:
        faults.append("more lines are kept than there were")
    return faults


def exact(texts, dropped):
    """Checks exact duplicates, if any were dropped, against a hash table of texts."""
    found = {nth: label["of"] for nth, (label, _) in dropped.items() if "exact" in label["cause"]}
    compared = {None, "exact-duplicate", "near-duplicate"}
    first, expected = {}, {}
    for nth, text in enumerate(texts):
        cause = dropped[nth][0]["cause"] if nth in dropped else None
        if cause in compared and first.setdefault(text, nth) != nth:
            expected[nth] = first[text]
    if not found or found == expected:
        return []
    wrong = sorted(set(found.items()) ^ set(expected.items()))
    counts = f"expected {len(expected)}, found {len(found)}"
    return [f"exact duplicates: {counts}, first difference {wrong[0]}"]


def near(texts, dropped, least):
    """Checks that near duplicates have the requested Jaccard index with a kept document."""
    faults = []
    for nth, (label, _) in dropped.items():
        if label["cause"] != "near-duplicate":
            continue
        of = label["of"]
        index = jaccard(runs(texts[nth]), runs(texts[of]))
        if of >= nth or of in dropped:
            faults.append(f"document {nth} duplicates {of}, which is not kept before it")
        if index < least or abs(index - label["jaccard"]) > 1e-9:
            faults.append(f"document {nth} has index {index} with {of}, not {label['jaccard']}")
    return faults


def runs(text):
    """All runs of five characters; a shorter text is one run."""
    if len(text) <= RUN:
        return {text} if text else set()
    return {text[at : at + RUN] for at in range(len(text) - RUN + 1)}


def jaccard(first, second):
    common = len(first & second)
    return common / (len(first) + len(second) - common) if common else 0.0


def incidence(texts):
    """A sparse matrix of documents and their runs."""
    import numpy
    from scipy.sparse import csr_array

    number, columns, ends = {}, [], [0]
    for text in texts:
        columns.extend(number.setdefault(run, len(number)) for run in runs(text))
        ends.append(len(columns))
    ones = numpy.ones(len(columns), dtype=numpy.int32)
    return csr_array((ones, columns, ends), shape=(len(texts), len(number)))


def pairs(texts, least):
    """The Jaccard indexes of all pairs with at least `least`, the highest first."""
    import numpy

    matrix = incidence(texts)
    sizes = numpy.diff(matrix.indptr)
    found = []
    for start in range(0, len(texts), 256):
        common = (matrix[start : start + 256] @ matrix.T).tocoo()
        rows = common.row + start
        index = common.data / (sizes[rows] + sizes[common.col] - common.data)
        found.extend(index[(rows < common.col) & (index >= least)].tolist())
    return sorted(found, reverse=True)


def megatron(texts, least, hashes=100, bands=10, seed=1234):
    """The documents that find_duplicates.py and group_duplicate_url.py keep: in every bucket one
    document, here the first, is compared with the others; one of each similar group is kept."""
    import numpy

    random = numpy.random.RandomState(seed)
    matrix, prime = incidence(texts), (1 << 31) - 1
    factors = random.randint(1, prime, size=(hashes, 2)).astype(numpy.int64)
    group = list(range(len(texts)))

    def root(nth):
        while group[nth] != nth:
            nth = group[nth]
        return nth

    buckets = {}
    for nth in range(len(texts)):
        own = matrix.indices[matrix.indptr[nth] : matrix.indptr[nth + 1]].astype(numpy.int64)
        if not len(own):
            continue
        least_of = ((own[:, None] * factors[:, 0] + factors[:, 1]) % prime).min(axis=0)
        for band, part in enumerate(numpy.split(least_of, bands)):
            buckets.setdefault((band, part.tobytes()), []).append(nth)
    for first, *others in buckets.values():
        for other in others:
            if jaccard(runs(texts[first]), runs(texts[other])) >= least:
                low, high = sorted((root(first), root(other)))
                group[high] = low
    return [nth for nth in range(len(texts)) if group[nth] == nth]


def print_pairs(who, removed, found):
    high = sum(index >= 0.85 for index in found)
    print(f"  {who}: {removed} removed, {len(found)} similar pairs kept, {high} of them by 0.85")


if __name__ == "__main__":
    main()
