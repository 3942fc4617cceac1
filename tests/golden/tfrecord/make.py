"""Makes the files of this folder: examples as BERT's create_pretraining_data.py writes them.

    pip install tfrecord tensorboard && python make.py

`bert.tfrecord` and `text.tfrecord` are written by the package tfrecord, whose lists are packed.
The lists of `unpacked.tfrecord` are not; protobuf writes the messages, and TensorBoard the records.
"""

import json
import random

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tensorboard.summary.writer.record_writer import RecordWriter
from tfrecord.writer import TFRecordWriter

CLS, SEP, MASK, VOCAB = 101, 102, 103, 30522
SEQ_LENGTH, PREDICTIONS = 32, 6


def example(rng, lengths, is_random_next):
    """The lists of an example, and the segments that it hides."""
    a, b = ([rng.randrange(1000, VOCAB) for _ in range(count)] for count in lengths)
    text = [CLS, *a, SEP, *b, SEP]
    segments = [0] * (len(a) + 2) + [1] * (len(b) + 1)
    places = [place for place, token in enumerate(text) if token not in (CLS, SEP)]
    masked = sorted(rng.sample(places, min(PREDICTIONS, max(1, round(0.15 * len(text))))))
    shown = list(text)
    for place in masked:
        kind = rng.random()
        shown[place] = MASK if kind < 0.8 else text[place] if kind < 0.9 else rng.randrange(VOCAB)
    pad, unused = SEQ_LENGTH - len(text), PREDICTIONS - len(masked)
    lists = {
        "input_ids": shown + [0] * pad,
        "input_mask": [1] * len(text) + [0] * pad,
        "segment_ids": segments + [0] * pad,
        "masked_lm_positions": masked + [0] * unused,
        "masked_lm_ids": [text[place] for place in masked] + [0] * unused,
        "masked_lm_weights": [1.0] * len(masked) + [0.0] * unused,
        "next_sentence_labels": [int(is_random_next)],
    }
    return lists, [[a], [b]] if is_random_next else [[a, b]]


def is_float(name):
    return name == "masked_lm_weights"


def unpacked_message():
    """tf.Example with lists that are not packed, from a descriptor of our own."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="unpacked.proto", package="unpacked")
    file.syntax = "proto3"

    def message(name, *fields):
        made = file.message_type.add(name=name)
        for number, (label, kind, of, key) in enumerate(fields, 1):
            item = made.field.add(name=key, number=number, label=label, type=kind)
            if kind == field.TYPE_MESSAGE:
                item.type_name = f".unpacked.{of}"
            elif label == field.LABEL_REPEATED:
                item.options.packed = False

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    message("BytesList", (one, field.TYPE_BYTES, None, "value"))
    message("FloatList", (many, field.TYPE_FLOAT, None, "value"))
    message("Int64List", (many, field.TYPE_INT64, None, "value"))
    kinds = [("BytesList", "bytes"), ("FloatList", "floats"), ("Int64List", "ints")]
    message("Feature", *[(one, field.TYPE_MESSAGE, of, key) for of, key in kinds])
    key = (one, field.TYPE_STRING, None, "key")
    message("Entry", key, (one, field.TYPE_MESSAGE, "Feature", "value"))
    message("Features", (many, field.TYPE_MESSAGE, "Entry", "feature"))
    message("Example", (one, field.TYPE_MESSAGE, "Features", "features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("unpacked.Example"))


def main():
    rng = random.Random(20260101)
    shapes = [((9, 11), False), ((1, 1), True), ((14, 15), False), ((5, 3), True), ((20, 2), False)]
    made = [example(rng, *shape) for shape in shapes]

    writer = TFRecordWriter("bert.tfrecord")
    for lists, _ in made:
        kinds = {key: "float" if is_float(key) else "int" for key in lists}
        writer.write({key: (values, kinds[key]) for key, values in lists.items()})
    writer.close()

    Example = unpacked_message()
    with open("unpacked.tfrecord", "wb") as file:
        writer = RecordWriter(file)
        for lists, _ in made:
            message = Example()
            for key, values in lists.items():
                entry = message.features.feature.add(key=key)
                (entry.value.floats if is_float(key) else entry.value.ints).value.extend(values)
            writer.write(message.SerializeToString())

    two = ["One.", "Two \"quoted\" \\ \t \u6625\u98a8."]
    texts = [["Hello, world"], two, [""], ["line\nbreak"]]
    writer = TFRecordWriter("text.tfrecord")
    for number, values in enumerate(texts):
        data = {"text": ([value.encode() for value in values], "byte"), "id": (number, "int")}
        writer.write(data)
    writer.close()

    documents = [document for _, documents in made for document in documents]
    with open("manifest.json", "w") as file:
        json.dump({"documents": documents, "texts": texts}, file)
        file.write("\n")


main()
