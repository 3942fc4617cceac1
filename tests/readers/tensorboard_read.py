"""Prints the scalars that TensorBoard shows for a folder of event files, as one JSON object.

    python3 tensorboard_read.py FOLDER        {"loss": [[step, value], ...], ...}

Points that a restart of the run replaces are not included.
"""

import json
import sys

from tensorboard.backend.event_processing import event_accumulator


def main() -> None:
    everything = {event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}
    events = event_accumulator.EventAccumulator(sys.argv[1], size_guidance=everything)
    events.Reload()
    scalars = {
        tag: [[point.step, point.value] for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    json.dump(scalars, sys.stdout)


if __name__ == "__main__":
    main()
