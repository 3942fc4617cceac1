"""Checks what `feedline clean` kept and dropped, by a reading of its rules of its own.

    feedline clean --json-in F.jsonl --out O --exact-dedup --near-dedup --dropped D.jsonl
    python openwebtext_clean.py F.jsonl O.jsonl D.jsonl [--jaccard 0.7] [--key text]
                                [--all-pairs N] [--megatron]

Every line must be kept or dropped, in order and byte for byte; exact duplicates must be those of a
set; a near duplicate must be as much like an earlier, kept document as was asked for, by the sets
of its runs of five characters. --all-pairs compares each two of the first N documents that were
kept and tells which pairs were missed; --megatron does the same with what the method of Megatron's
tools/openwebtext leaves of those N documents (100 hashes in 10 bands, groups that are connected).
Both need numpy and scipy. Prints what was compared; exits 1 if something is wrong.
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
        left = [nth for nth in range(len(texts)) if nth not in dropped][: args.all_pairs]
        part = range(left[-1] + 1) if left else []
        found = pairs([texts[nth] for nth in left], args.jaccard)
        print(f"{len(left)} of the first {len(part)} documents are kept, each two compared:")
        tell("feedline", len(part) - len(left), found)
        if args.megatron:
            stay = megatron([texts[nth] for nth in part], args.jaccard)
            tell("Megatron", len(part) - len(stay), pairs([texts[n] for n in stay], args.jaccard))
        faults += [f"a pair of index {j:.3f} is kept" for j in found if j >= 0.9]
    for fault in faults[:10]:
        print("wrong:", fault)
    print(f"{len(faults)} faults")
    sys.exit(1 if faults else 0)


def lines(path):
    with open(path, encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\n") for line in file if line.strip()]


def partition(source, kept, dropped):
    """Whether kept and dropped lines together are the source, in order."""
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
    """Exact duplicates, if they were looked for, are those of a table of texts."""
    told = {nth: label["of"] for nth, (label, _) in dropped.items() if "exact" in label["cause"]}
    compared = {None, "exact-duplicate", "near-duplicate"}
    first, due = {}, {}
    for nth, text in enumerate(texts):
        cause = dropped[nth][0]["cause"] if nth in dropped else None
        if cause in compared and first.setdefault(text, nth) != nth:
            due[nth] = first[text]
    if not told or told == due:
        return []
    wrong = sorted(set(told.items()) ^ set(due.items()))
    return [f"exact duplicates: {len(told)} told, {len(due)} due, the first other {wrong[0]}"]


def near(texts, dropped, least):
    """Near duplicates are as much like what is kept as was asked for."""
    faults = []
    for nth, (label, _) in dropped.items():
        if label["cause"] != "near-duplicate":
            continue
        of = label["of"]
        index = jaccard(runs(texts[nth]), runs(texts[of]))
        if of >= nth or of in dropped:
            faults.append(f"document {nth} is like {of}, which is not kept before it")
        if index < least or abs(index - label["jaccard"]) > 1e-9:
            faults.append(f"document {nth} is like {of} by {index}, told {label['jaccard']}")
    return faults


def runs(text):
    """All runs of five characters; a shorter text is one."""
    if len(text) <= RUN:
        return {text} if text else set()
    return {text[at : at + RUN] for at in range(len(text) - RUN + 1)}


def jaccard(first, second):
    common = len(first & second)
    return common / (len(first) + len(second) - common) if common else 0.0


def incidence(texts):
    """A sparse matrix: which document has which run."""
    import numpy
    from scipy.sparse import csr_array

    number, columns, ends = {}, [], [0]
    for text in texts:
        columns.extend(number.setdefault(run, len(number)) for run in runs(text))
        ends.append(len(columns))
    ones = numpy.ones(len(columns), dtype=numpy.int32)
    return csr_array((ones, columns, ends), shape=(len(texts), len(number)))


def pairs(texts, least):
    """The Jaccard index of all pairs that have so much, the highest first."""
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
    """What find_duplicates.py and group_duplicate_url.py leave: in every bucket one document, here
    the first, is compared with the others; what is alike is a group, of which one stays."""
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


def tell(who, removed, found):
    high = sum(index >= 0.85 for index in found)
    print(f"  {who}: {removed} removed, {len(found)} pairs left alike, {high} of them by 0.85")


if __name__ == "__main__":
    main()
