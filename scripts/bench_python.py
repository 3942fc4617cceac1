#!/usr/bin/env python3
"""The Python package compared with the usual packages: the same files, in turn, medians.

    make bench-python ARGS="--prefix /data/corpus_text_document --texts lines.jsonl --vocab FOLDER"
    scripts/bench_python.py --prefix PREFIX --rows warm --runs 5 --python VENV/bin/python

Rows:
  cold      batches of 8 x 2048 of a `.bin` whose pages were dropped; Megatron's GPTDataset in a
            DataLoader of two workers
  warm      the same with the pages in memory; a DataLoader without workers
  cost      the time that Python adds to the Rust loader, warm
  resume    from opening an order of 10^9 samples to the first batch after its middle
  encode    ids of a file of JSON lines, in memory, on all cores; gigatoken and Hugging Face
  import    `import feedline`
  save      dcp.save of a state of --bytes, durable; DCP's FileSystemWriter, and the save of
            `feedline ckpt bench`, without Python
  load      dcp.load of it, the page cache dropped, as root; DCP's FileSystemReader, and its weights
            by the package safetensors
  stall     how long dcp.async_save blocks a training loop; DCP's own staging

PREFIX is a GPT corpus of 16-bit ids larger than a few hundred megabytes; FOLDER has GPT-2's
vocab.json and merges.txt. --folder, for the last three rows, is on the disk to measure. The peers and
the wheel are installed into .bench-venv-python, unless --python has them. `read_ahead_kb` of the device
is printed: the speed of Megatron's memory map depends on it; --read-ahead sets it for the run, as root.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".bench-venv-python"
SIDE = ROOT / "python/benches/side.py"
CHECKPOINTS = ROOT / "python/benches/checkpoints.py"
MEGATRON = ROOT / "loader/benches/peers/megatron_loader.py"
ROWS = "cold warm cost resume encode import save load stall".split()


def main():
    args = arguments()
    python = args.python or environment()
    print(f"{datetime.date.today()}, medians of {args.runs}, seq_length {args.seq_length}")
    with tempfile.TemporaryDirectory(prefix="bench-") as cache, read_ahead(args):
        bench = Bench(args, python, cache)
        print("\n| what | ours | theirs | ratio |\n|---|---|---|---|")
        for row in args.rows.split(","):
            getattr(bench, f"row_{row}")()


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefix", help="a GPT corpus on a local disk")
    parser.add_argument("--texts", help="a JSON-lines file, for the row encode")
    parser.add_argument("--vocab", help="a folder with GPT-2's vocabulary, for the row encode")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=100_000, help="read by Feedline")
    parser.add_argument("--slow", type=int, default=2_000, help="samples of Megatron's when cold")
    parser.add_argument("--folder", help="for the rows save, load and stall")
    parser.add_argument("--bytes", type=float, default=4e9, help="of their state")
    parser.add_argument("--read-ahead", type=int, help="KiB; restored afterwards")
    parser.add_argument("--python", help="a Python with the peers and the package")
    parser.add_argument(
        "--program", default=ROOT / "target/release/feedline", help="the Rust loader, for cost"
    )
    args = parser.parse_args()
    rows = set(args.rows.split(","))
    if unknown := rows - set(ROWS):
        parser.error(f"--rows: expected some of {', '.join(ROWS)}, found {', '.join(unknown)}")
    of_checkpoints = {"save", "load", "stall"}
    if rows & of_checkpoints and not args.folder:
        parser.error("--folder: expected a folder on the disk to measure, found none")
    if rows - {"encode", "import"} - of_checkpoints and not args.prefix:
        parser.error("--prefix: expected the prefix of a corpus, found none")
    if "encode" in rows and not (args.texts and args.vocab):
        parser.error("--rows encode: expected --texts and --vocab")
    return args


def environment():
    python = VENV / "bin/python"
    if not python.exists():
        subprocess.run([newest_python(), "-m", "venv", VENV], check=True)
        lists = [ROOT / "scripts/sockets.txt", ROOT / "scripts/bench_python.txt"]
        for each in lists:
            command = [VENV / "bin/pip", "install", "-q", "--no-deps", "-r", each]
            subprocess.run(command, check=True)
    wheel = next((ROOT / "target/wheels").glob("feedline-*.whl"), None)
    if wheel is None:
        sys.exit("cannot install the package: expected a wheel in target/wheels (hint: make wheel)")
    command = [VENV / "bin/pip", "install", "-q", "--no-deps", "--force-reinstall", wheel]
    subprocess.run(command, check=True)
    return python


def newest_python():
    """The Python of the tests with the same packages."""
    command = [ROOT / "scripts/setup.sh", "--sockets", "newest"]
    return subprocess.check_output(command, text=True).strip()


class read_ahead:  # noqa: N801, a context manager is named as it reads
    """Prints the device's read-ahead, and sets it during the run."""

    def __init__(self, args):
        self.wanted, self.queue = args.read_ahead, None
        if args.prefix:
            device = os.stat(args.prefix + ".bin").st_dev
            name = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/read_ahead_kb"
            self.queue = pathlib.Path(name)

    def __enter__(self):
        if self.queue is None:
            return
        self.before = self.queue.read_text()
        if self.wanted is not None:
            self.queue.write_text(str(self.wanted))
        print(f"read_ahead_kb {self.queue.read_text().strip()}")

    def __exit__(self, *_):
        if self.queue is not None and self.wanted is not None:
            self.queue.write_text(self.before)


class Bench:
    def __init__(self, args, python, cache):
        self.args, self.python, self.cache = args, python, cache

    def row_cold(self):
        ours, theirs = self.in_turn(
            lambda: self.ours("torch", "--cold"),
            lambda: self.megatron(self.args.slow, 2, "--cold"),
        )
        self.rates("cold samples/s; GPTDataset, 2 workers", ours, theirs)

    def row_warm(self):
        self.ours("loader")
        sides = self.in_turn(
            lambda: self.ours("torch"),
            lambda: self.ours("loader"),
            lambda: self.ours("getitems"),
            lambda: self.megatron(self.args.samples // 4, 0),
        )
        for name, ours in zip(("torch.Loader", "Loader", "__getitems__"), sides, strict=False):
            self.rates(f"warm samples/s, {name}; GPTDataset, no workers", ours, sides[3])

    def row_cost(self):
        rust = [self.args.program, "samples", self.args.prefix, "--json", "--order", "megatron"]
        rust += ["--samples", str(self.args.samples), "--seq-length", str(self.args.seq_length)]
        rust += ["--cache", self.cache + "/rust"]
        run(rust)
        alone, ours = self.in_turn(lambda: run(rust), lambda: self.ours("loader"))
        alone = median(alone, "samples_per_second")
        ours = median(ours, "per_second")
        cost = 100 * (alone / ours - 1)
        print(f"| time of a batch compared with the Rust loader alone, samples/s | {ours:,.0f} | "
              f"{alone:,.0f} | {cost:+.1f} % |")

    def row_resume(self):
        options = ["--first", str(5 * 10**8), "--samples", str(5 * 10**8), "--seq-length", "8"]
        for order in ("megatron", "blocks"):
            run_side = lambda: self.side("resume", self.args.prefix, *options, "--order", order)  # noqa: E731, B023
            run_side()  # builds the order
            took = statistics.median(run_side()["seconds"] for _ in range(self.args.runs))
            print(f"| resume at sample 500,000,000 of 10^9, {order}, seconds | {took:.3f} | | |")

    def row_encode(self):
        options = [self.args.texts, "--vocab", self.args.vocab]
        ours, giga, theirs = self.in_turn(
            lambda: self.side("encode", *options),
            lambda: self.side("gigatoken", *options),
            lambda: self.side("huggingface", *options),
        )
        if not ours[0]["tokens"] == giga[0]["tokens"] == theirs[0]["tokens"]:
            sys.exit(f"the numbers of ids differ: {ours[0]}, {giga[0]}, {theirs[0]}")
        self.rates("characters/s of encode_batch; gigatoken", ours, giga)
        self.rates("characters/s of encode_batch; Hugging Face", ours, theirs)

    def row_import(self):
        took = statistics.median(self.side("import")["seconds"] for _ in range(self.args.runs))
        print(f"| import feedline, milliseconds | {1000 * took:.0f} | | |")

    def row_save(self):
        found = self.checkpoints("save", "--program", self.args.program)
        ours, theirs = found["bytes_per_s"]
        rust = statistics.median(each["rates"][0]["median_bytes_per_s"] for each in found["rust"])
        print(f"| GB/s of dcp.save, durable; FileSystemWriter | {gb(ours)} | {gb(theirs)} | "
              f"{ours / theirs:.2f} |")
        print(f"| GB/s of dcp.save; feedline ckpt bench, no Python | {gb(ours)} | {gb(rust)} | "
              f"{ours / rust:.2f} |", flush=True)

    def row_load(self):
        found = self.checkpoints("load")
        ours, theirs = found["bytes_per_s"]
        print(f"| GB/s of dcp.load, cold, verified; FileSystemReader | {gb(ours)} | {gb(theirs)} | "
              f"{ours / theirs:.2f} |")
        weights = [found["weights_bytes"] / statistics.median(found[side])
                   for side in ("weights", "weights_mmap", "weights_pread")]
        for backend, rate in zip(("mmap", "pread"), weights[1:], strict=True):
            peer = f"safetensors {found['safetensors']}, {backend}"
            print(f"| GB/s of load_file, cold, verified; {peer} | {gb(weights[0])} | {gb(rate)} | "
                  f"{weights[0] / rate:.2f} |", flush=True)

    def row_stall(self):
        found = self.checkpoints("stall")
        theirs = statistics.median(found["theirs"])
        for side, what in (("ours", "with optimizer="), ("eager", "copied at once")):
            ours = statistics.median(found[side])
            print(f"| milliseconds of async_save, {what}; DCP's staging | {1000 * ours:.1f} | "
                  f"{1000 * theirs:.1f} | {theirs / ours:.1f} |", flush=True)

    def checkpoints(self, side, *options):
        folder = pathlib.Path(self.args.folder) / "bench-checkpoints"
        options += ("--bytes", self.args.bytes, "--runs", self.args.runs)
        found = run([self.python, CHECKPOINTS, side, folder, *options])
        seconds = [statistics.median(found[each]) for each in ("ours", "theirs")]
        return found | {"bytes_per_s": [found["bytes"] / each for each in seconds]}

    def in_turn(self, *sides):
        """Runs each function in turn, and repeats that --runs times."""
        results = tuple([] for _ in sides)
        for _ in range(self.args.runs):
            for side, kept in zip(sides, results, strict=True):
                kept.append(side())
        return results

    def ours(self, side, *options):
        options += ("--samples", str(self.args.samples), "--seq-length", str(self.args.seq_length))
        return self.side(side, self.args.prefix, *options)

    def side(self, side, *options):
        return run([self.python, SIDE, side, *options, "--cache", self.cache + "/ours"])

    def megatron(self, samples, workers, *options):
        command = [self.python, MEGATRON, self.args.prefix, "--samples", str(samples)]
        command += ["--built-for", str(self.args.samples), "--workers", str(workers)]
        command += ["--seq-length", str(self.args.seq_length), *options]
        return run([*command, "--cache", self.cache + "/megatron"])

    def rates(self, what, ours, theirs):
        theirs_key = "samples_per_second" if "samples_per_second" in theirs[0] else "per_second"
        ours, theirs = median(ours, "per_second"), median(theirs, theirs_key)
        print(f"| {what} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f} |", flush=True)


def gb(bytes):
    return f"{bytes / 1e9:.2f}"


def median(results, key):
    return statistics.median(result[key] for result in results)


def run(command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}:\n{done.stderr}")
    try:
        return json.loads(done.stdout)
    except ValueError:  # after other lines
        return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
