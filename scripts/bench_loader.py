#!/usr/bin/env python3
"""The loader compared with Megatron's GPTDataset, fio and boto3: the same files, in turn, medians.

    make bench-loader ARGS="--prefix /data/corpus_text_document"
    scripts/bench_loader.py --prefix PREFIX --rows cold,warm,sequential --runs 5
    scripts/bench_loader.py --s3 s3://bucket/corpus_text_document --rows s3

Rows:
  cold        random samples of a `.bin` whose pages were dropped, against torch's DataLoader over
              GPTDataset; and Feedline's reads against fio's with the same block size and depth
  warm        the same with the pages in memory
  sequential  samples in the order of the file, against fio reading 1 MiB blocks
  s3          samples from S3, against boto3 with its fastest number of threads; a dataset of
              `feedline materialize` is in the order `--s3-order file`

The peers are installed into .bench-venv-loader with the versions of scripts/bench_loader.txt; they
are large (PyTorch). fio must be installed. `read_ahead_kb` of the device is printed, because the
speed of Megatron's memory map depends on it; --read-ahead sets it for the run, as root.
"""

import argparse
import datetime
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".bench-venv-loader"
FEEDLINE = ROOT / "target/release/feedline"
PEERS = ROOT / "loader/benches/peers"
ROWS = "cold warm sequential s3".split()


def main():
    args = arguments()
    if not FEEDLINE.exists():
        sys.exit(f"{FEEDLINE} does not exist (hint: cargo build --release -p tools)")
    print(f"{datetime.date.today()}, medians of {args.runs}, seq_length {args.seq_length}")
    with tempfile.TemporaryDirectory(prefix="bench-") as cache:
        bench = Bench(args, cache)
        print(bench.device())
        print("\n| what | ours | theirs | ratio |\n|---|---|---|---|")
        for row in args.rows.split(","):
            getattr(bench, row)()


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefix", help="a GPT dataset on a local disk")
    parser.add_argument("--s3", help="a GPT dataset on S3, for the row s3")
    parser.add_argument("--s3-order", default="block", choices=["block", "file"])
    parser.add_argument("--rows", default="cold,warm,sequential")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=100_000, help="read by Feedline")
    parser.add_argument("--slow", type=int, default=2_000, help="samples of Megatron's when cold")
    parser.add_argument("--workers", type=int, default=2, help="of torch's DataLoader")
    parser.add_argument("--read-ahead", type=int, help="KiB; restored afterwards")
    parser.add_argument("--python", default=None, help="with the peers; default: .bench-venv-loader")
    args = parser.parse_args()
    unknown = set(args.rows.split(",")) - set(ROWS)
    if unknown:
        parser.error(f"--rows: expected some of {', '.join(ROWS)}, found {', '.join(sorted(unknown))}")
    if "s3" in args.rows and not args.s3:
        parser.error("--rows s3 needs --s3")
    if set(args.rows.split(",")) - {"s3"} and not args.prefix:
        parser.error("--prefix: expected the prefix of a dataset, found none")
    return args


class Bench:
    def __init__(self, args, cache):
        self.args = args
        self.cache = cache

    def cold(self):
        ours, theirs = self.in_turn(
            lambda: self.ours(self.args.prefix, self.args.samples, "megatron", cold=True),
            lambda: self.megatron(self.args.slow, cold=True),
        )
        self.same_stream(self.args.slow)
        self.line("cold random samples/s; Megatron's DataLoader", ours, theirs, "samples_per_second")
        moved = statistics.median(run["loader"]["moved_per_wanted"] for run in ours)
        print(f"| bytes moved over bytes wanted, cold | {moved:.3f} | | |")
        self.against_fio(ours)

    def warm(self):
        self.ours(self.args.prefix, self.args.samples, "megatron", cold=False)
        ours, theirs = self.in_turn(
            lambda: self.ours(self.args.prefix, self.args.samples, "megatron", cold=False),
            lambda: self.megatron(self.args.samples // 4, cold=False),
        )
        self.line("warm random samples/s; Megatron's DataLoader", ours, theirs, "samples_per_second")

    def sequential(self):
        size = pathlib.Path(self.args.prefix + ".bin").stat().st_size
        count = min(self.args.samples * 4, size // (self.args.seq_length * 2) - 1)
        ours, raw, theirs = self.in_turn(
            lambda: self.ours(self.args.prefix, count, "block", cold=True),
            lambda: self.ours(self.args.prefix, count, "block", cold=True, raw=True),
            lambda: self.fio("read", 1 << 20, 32),
        )
        what = "bytes/s of a block shuffle as"
        self.line(f"{what} tensors; fio in order, 1 MiB", ours, theirs, "bytes_per_second")
        self.line(f"{what} they are stored; fio in order, 1 MiB", raw, theirs, "bytes_per_second")

    def s3(self):
        ours, theirs = self.in_turn(
            lambda: self.ours(self.args.s3, self.args.samples, self.args.s3_order, cold=False, raw=True),
            lambda: self.peer("s3_read.py", self.args.s3 + ".bin"),
        )
        what = f"S3 bytes/s ({self.args.s3_order} order); boto3"
        self.line(what, ours, theirs, "bytes_per_second")
        moved = statistics.median(run["loader"]["moved_per_wanted"] for run in ours)
        print(f"| bytes moved over bytes wanted, S3 | {moved:.3f} | | |")

    def in_turn(self, *sides):
        """Runs each function in turn, and repeats that --runs times."""
        results = tuple([] for _ in sides)
        for _ in range(self.args.runs):
            for side, kept in zip(sides, results):
                kept.append(side())
        return results

    def ours(self, prefix, samples, order, cold, raw=False):
        if cold:
            drop_pages(prefix + ".bin")
        command = [FEEDLINE, "samples", prefix, "--samples", str(samples), "--json"]
        command += ["--seq-length", str(self.args.seq_length), "--order", order]
        command += ["--cache", self.cache] + (["--raw"] if raw else [])
        return run(command)

    def megatron(self, samples, cold):
        options = ["--samples", str(samples), "--built-for", str(self.args.samples)]
        options += ["--seq-length", str(self.args.seq_length), "--cache", self.cache + "/megatron"]
        options += ["--workers", str(self.args.workers)] + (["--cold"] if cold else [])
        return self.peer("megatron_loader.py", self.args.prefix, *options)

    def peer(self, script, *options):
        python = self.args.python or VENV / "bin/python"
        if not pathlib.Path(python).exists():
            subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
            wanted = ["-r", ROOT / "scripts/bench_loader.txt"]
            subprocess.run([VENV / "bin/pip", "install", "-q", *wanted], check=True)
        return run([python, PEERS / script, *options])

    def same_stream(self, samples):
        """Exits if the two streams of samples differ."""
        options = ["--samples", str(samples), "--built-for", str(self.args.samples), "--hash"]
        options += ["--seq-length", str(self.args.seq_length), "--cache", self.cache, "--json"]
        ours = run([FEEDLINE, "samples", self.args.prefix, *options])["sha256"]
        theirs = self.megatron(samples, cold=False)["sha256"]
        if ours != theirs:
            sys.exit(f"the streams differ: ours {ours}, Megatron's {theirs}")

    def against_fio(self, ours):
        """Requests per second of the same size and depth, from the same disk."""
        reads = statistics.median(run["loader"]["reads"] / run["seconds"] for run in ours)
        size = statistics.median(run["loader"]["moved_bytes"] / run["loader"]["reads"] for run in ours)
        depth = ours[0]["loader"]["depth"]
        block = max(512, round(size / 512) * 512)
        theirs = [self.fio("randread", block, depth) for _ in range(self.args.runs)]
        iops = statistics.median(run["iops"] for run in theirs)
        what = f"cold random reads/s; fio io_uring direct, {block} bytes, depth {depth}"
        print(f"| {what} | {reads:,.0f} | {iops:,.0f} | {reads / iops:.2f} |")

    def fio(self, pattern, block, depth):
        if not shutil.which("fio"):
            sys.exit("fio is not installed (hint: apt-get install fio)")
        command = ["fio", "--name=peer", f"--filename={self.args.prefix}.bin", "--readonly"]
        command += [f"--rw={pattern}", f"--bs={block}", f"--iodepth={depth}", "--direct=1"]
        command += ["--ioengine=io_uring", "--runtime=5", "--time_based", "--output-format=json"]
        # Its fastest options, as in tools/src/bench/fio/mod.rs: huge pages, several requests per call.
        command += ["--iomem_align=2m", "--gtod_reduce=1", "--registerfiles=1", "--norandommap"]
        command += [f"--iodepth_batch_submit={-(-depth // 4)}", f"--iodepth_batch_complete_max={depth}"]
        large = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
        read = run(command, env=large)["jobs"][0]["read"]
        return {"iops": read["iops"], "bytes_per_second": read["bw_bytes"]}

    def line(self, what, ours, theirs, key):
        ours, theirs = (statistics.median(run[key] for run in side) for side in (ours, theirs))
        print(f"| {what} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f} |")

    def device(self):
        if not self.args.prefix:
            return ""
        device = os.stat(self.args.prefix + ".bin").st_dev
        queue = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/read_ahead_kb"
        if self.args.read_ahead is not None:
            before = pathlib.Path(queue).read_text()
            pathlib.Path(queue).write_text(str(self.args.read_ahead))
            import atexit

            atexit.register(lambda: pathlib.Path(queue).write_text(before))
        try:
            return f"read_ahead_kb of the device: {pathlib.Path(queue).read_text().strip()}"
        except OSError as error:
            return f"read_ahead_kb of the device: {error}"


def drop_pages(path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def run(command, env=None):
    """The JSON object that a command prints last."""
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stderr}")
    text = done.stdout.strip()
    return json.loads(text[text.index("{") :])


if __name__ == "__main__":
    main()
