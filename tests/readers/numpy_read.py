"""Reads a dataset with numpy by the layout of its files, and prints it as one JSON object.

    python3 numpy_read.py PREFIX

The fields are those of `megatron_read.py`; it needs numpy and nothing else.
"""

import hashlib
import json
import sys

import numpy

DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def main() -> None:
    prefix = sys.argv[1]
    with open(prefix + ".idx", "rb") as file:
        idx = file.read()
    magic, version, code = idx[:9], int.from_bytes(idx[9:17], "little"), idx[17]
    assert (magic, version) == (b"MMIDIDX\0\0", 1), (magic, version)
    sequences, entries = (int.from_bytes(idx[at : at + 8], "little") for at in (18, 26))

    lengths = numpy.frombuffer(idx, "<i4", sequences, 34)
    pointers = numpy.frombuffer(idx, "<i8", sequences, 34 + 4 * sequences)
    documents = numpy.frombuffer(idx, "<i8", entries, 34 + 12 * sequences)
    tokens = numpy.fromfile(prefix + ".bin", DTYPES[code])

    ends = numpy.cumsum(lengths, dtype="<i8")
    assert (pointers == (ends - lengths) * tokens.itemsize).all(), "pointers"
    assert (ends[-1] if sequences else 0) == len(tokens), "length of the .bin"
    assert documents[0] == 0 and documents[-1] == sequences, "ends of the document index"
    assert (numpy.diff(documents) >= 0).all(), "order of the document index"

    found = {
        "sequences": sequences,
        "documents": entries - 1,
        "tokens": len(tokens),
        "sha256": hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest(),
        "first_tokens": tokens[:16].tolist(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
