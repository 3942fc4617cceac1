#!/usr/bin/env python3
"""Feedline's tokenizers compared with others: the same file, the same cores, runs in turn.

    make bench-tokenize                                  texts of the demo, repeated to 64 MB
    scripts/bench_tokenize.py --en EN.jsonl --zh ZH.jsonl [--rows gpt2,spm] [--big 20GB]

Each row runs both in turn and prints the medians of --runs runs, pinned with taskset to one core and
then to two. Feedline's time is all of `preprocess`, from the start of the process to synced and renamed
files; that of a peer is encoding alone, without imports, loading and JSON, unless it reads the file
itself. `cpu` compares CPU times, which are the numbers to use if other work shares the machine. If both
produce ids, their numbers of tokens are compared.

Without --en and --zh the texts are the documents of the demo, repeated and shuffled, so that both sides
mostly find words in their caches. The peers are installed into .bench-venv with the versions of
scripts/bench_peers.txt.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".bench-venv"
PYTHON = VENV / "bin/python"
PREPROCESS = ROOT / "target/release/preprocess"
FEEDLINE = ROOT / "target/release/feedline"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
ROWS = "gpt2 hf megatron program encdec spm threads memory merge".split()


def main():
    args = arguments()
    venv()
    for program in (PREPROCESS, FEEDLINE):
        if not program.exists():
            sys.exit(f"{program} does not exist (hint: cargo build --release -p preprocess -p tools)")
    print(f"{machine()}\n{datetime.date.today()}, medians of {args.runs}, cores {args.cores}\n")
    print("| what | at least | ratio | cpu | ours | theirs | our MB/s | cores |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.work) as work:
        bench = Bench(args, pathlib.Path(work))
        for row in args.rows.split(","):
            getattr(bench, row)()


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--en", type=pathlib.Path, help="JSON lines with the key text, English")
    parser.add_argument("--zh", type=pathlib.Path, help="the same, Chinese")
    parser.add_argument("--rows", help="default: all; program only with --program-python")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cores", type=lambda text: text.split(","), default=["0", "1"])
    parser.add_argument("--size", type=size, default="64MB", help="of the demo's text, repeated")
    parser.add_argument("--slow", type=size, default="4MB", help="of the input of slow peers")
    parser.add_argument("--whole", type=size, default="200MB", help="of the end-to-end row")
    parser.add_argument("--big", type=size, default="20GB", help="of the memory and merge rows")
    parser.add_argument("--encdec-vocab", type=pathlib.Path, help="vocab.txt; default: the tests' own")
    parser.add_argument(
        "--program-python", help="a Python with torch, megatron-core and gigatoken, for the row program"
    )
    parser.add_argument("--work", help="a folder for outputs; default: the system's temporary folder")
    args = parser.parse_args()
    if args.rows is None:
        args.rows = ",".join(row for row in ROWS if row != "program" or args.program_python)
    unknown = set(args.rows.split(",")) - set(ROWS)
    if unknown:
        parser.error(f"--rows: expected some of {', '.join(ROWS)}, found {', '.join(sorted(unknown))}")
    if "program" in args.rows.split(",") and not args.program_python:
        parser.error("--rows program needs --program-python")
    return args


def size(text):
    for unit, factor in sorted(UNITS.items(), key=lambda unit: -len(unit[0])):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    raise argparse.ArgumentTypeError(f"'{text}': expected a number and one of {', '.join(UNITS)}")


def venv():
    pins = ROOT / "scripts/bench_peers.txt"
    stamp = VENV / "stamp"
    if stamp.exists() and stamp.read_text() == pins.read_text():
        return
    print(f"creating {VENV} with the versions of {pins}", file=sys.stderr)
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    pip = [PYTHON, "-m", "pip", "install", "-q", "--only-binary=:all:"]
    # jieba is published only as source.
    subprocess.run([*pip, "--no-binary=jieba", "-r", pins], check=True)
    subprocess.run([*pip, "--no-deps", "megatron-core==0.16.1", "packaging==25.0"], check=True)
    stamp.write_text(pins.read_text())


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores of {cpu}, {gib:.0f} GiB, {platform.release()}, load {load:.1f}"


class Bench:
    def __init__(self, args, work):
        self.args, self.work = args, work
        self.gpt2_folder = work / "gpt2"
        run([PREPROCESS, "--export-vocab", self.gpt2_folder])
        self.en, self.zh = args.en, args.zh
        if not (args.en and args.zh):
            self.peer("corpus", ROOT / "demo/data/corpus.jsonl.zst", work)
            self.en, self.zh = (
                given or self.repeated(work / f"{name}.jsonl", args.size)
                for name, given in (("en", args.en), ("zh", args.zh))
            )

    # The rows.

    def gpt2(self):
        for name, file, at_least in (("English", self.en, "1.0x"), ("Chinese", self.zh, "3x")):
            for cores in (1, 2):
                self.row(
                    f"GPT-2, {name}, {mb(file)}: gigatoken", at_least, cores, file, file,
                    lambda: self.ours(file, cores),
                    lambda: self.peer("gigatoken", self.gpt2_folder, file, cores=cores),
                )

    def hf(self):
        for name, file, at_least in (("English", self.en, "50x"), ("Chinese", self.zh, "10x")):
            slow = self.cut(file, self.args.slow)
            self.row(
                f"GPT-2, {name}: Hugging Face tokenizers on {mb(slow)}", at_least, 1, file, slow,
                lambda: self.ours(file, 1),
                lambda: self.peer("hf", self.gpt2_folder, slow),
            )

    def megatron(self):
        whole = self.repeated(self.en, self.args.whole)
        for cores in (1, 2):
            self.row(
                f"end to end, {mb(whole)}: steps of preprocess_data_fast.py", "10x", cores, whole,
                whole,
                lambda: self.ours(whole, cores, "--append-eod"),
                lambda: self.peer("megatron", self.gpt2_folder, whole, self.out(), cores=cores),
            )

    def program(self):
        """Both from the start of the process to its end."""
        whole = self.repeated(self.en, self.args.whole)
        command = [self.args.program_python, ROOT / "scripts/bench_peers.py", "program"]
        for cores in (1, 2):
            pinned = self.args.cores[:cores]
            self.row(
                f"end to end, {mb(whole)}: preprocess_data_fast.py", "10x", cores, whole, whole,
                lambda: self.ours(whole, cores, "--append-eod"),
                lambda: run([*command, self.gpt2_folder, whole, self.out()], cores=pinned),
            )

    def encdec(self):
        vocab = self.args.encdec_vocab or ROOT / "tests/golden/encdec/vocab.txt"
        slow = self.cut(self.zh, self.args.slow // 4)
        self.row(
            f"EncDec of CPM-2, Chinese: Python on {mb(slow)}", "60x, 40 MB/s", 1, self.zh, slow,
            lambda: self.ours(self.zh, 1, "--tokenizer", "encdec", "--vocab-file", vocab),
            lambda: self.peer("encdec", vocab, slow),
        )

    def spm(self):
        for kind in ("unigram", "bpe"):
            for name, file in (("English", self.en), ("Chinese", self.zh)):
                model = self.work / f"{kind}-{name}.model"
                self.peer("train", model, kind, self.cut(file, 20 * 10**6), cores=2)
                slow = self.cut(file, self.args.slow)
                more = ("--tokenizer", "sentencepiece", "--tokenizer-model", model)
                self.row(
                    f"SentencePiece {kind}, {name}: C++ on {mb(slow)}", "2x", 1, file, slow,
                    lambda: self.ours(file, 1, *more),
                    lambda: self.peer("sentencepiece", model, slow),
                )

    def threads(self):
        for name, file in (("English", self.en), ("Chinese", self.zh)):
            file = self.repeated(file, self.args.whole)
            one, two = self.in_turn(lambda: self.ours(file, 2), lambda: self.ours(file, 1))
            name = f"GPT-2, {name}, {mb(file)}: two threads, one"
            self.print_row(name, "1.85x", "2, 1", file.stat().st_size, one, two)

    def memory(self):
        """The input is piped, so that it needs no disk space."""
        for part in (self.args.big // 20, self.args.big // 4, self.args.big):
            peak, seconds = self.stream(part)
            rate = part / seconds / 1e6
            print(
                f"| peak memory on {part / 1e9:g} GB through a pipe | under 768 MiB "
                f"| {peak / 2**20:.0f} MiB | | {seconds:.1f} s | | {rate:.0f} | 2 |",
                flush=True,
            )

    def merge(self):
        """The ids of the English text, repeated to a third of --big."""
        part = self.work / "part"
        self.ours(self.repeated(self.en, self.args.whole), 2, out=part)
        part = pathlib.Path(f"{part}_text_document")
        part_bin = part.with_name(part.name + ".bin")
        bytes_each = part_bin.stat().st_size
        times_it = max(2, self.args.big // 3 // bytes_each)
        done = times_it * bytes_each
        merged, copy = self.work / "merged", self.work / "copy"

        def ours():
            inputs = ["--input", *[part] * times_it]
            command = [FEEDLINE, "merge", *inputs, "--output-prefix", merged]
            found = run(command, cores=self.args.cores[:1])
            for output in self.work.glob("merged*"):
                output.unlink()
            return found

        def theirs():
            command = f"cat {f'{part_bin} ' * times_it} >{copy} && sync {copy}"
            found = run(["sh", "-c", command], cores=self.args.cores[:1])
            copy.unlink()
            return found

        times = self.in_turn(ours, theirs)
        peak = max(found["peak"] for found in times[0]) / 2**20
        name = f"merge of {done / 1e9:.1f} GB, peak {peak:.0f} MiB: cat and sync"
        self.print_row(name, "1x, 100 MiB", "1", done, *times)

    # Measuring.

    def row(self, name, at_least, cores, mine, others, ours, theirs):
        """`mine` and `others` are the input files; times on a smaller one are scaled up."""
        size, scale = mine.stat().st_size, mine.stat().st_size / others.stat().st_size
        times = self.in_turn(ours, theirs)
        tokens = {found["tokens"] for runs in times for found in runs if found.get("tokens")}
        if mine == others and len(tokens) > 1:
            name += f" (tokens differ: {sorted(tokens)})"
        self.print_row(name, at_least, cores, size, *times, scale)

    def in_turn(self, ours, theirs):
        mine, others = [], []
        for _ in range(self.args.runs):
            mine.append(ours())
            others.append(theirs())
        return mine, others

    def print_row(self, name, at_least, cores, size, mine, others, scale=1.0):
        def median(runs, key):
            return statistics.median(found[key] for found in runs)

        wall, wall_theirs = median(mine, "seconds"), median(others, "seconds") * scale
        cpu, cpu_theirs = median(mine, "cpu_seconds"), median(others, "cpu_seconds") * scale
        print(
            f"| {name} | {at_least} | {wall_theirs / wall:.2f}x | {cpu_theirs / cpu:.2f}x "
            f"| {wall:.2f} s, cpu {cpu:.2f} | {wall_theirs:.2f} s, cpu {cpu_theirs:.2f} "
            f"| {size / wall / 1e6:.0f}, cpu {size / cpu / 1e6:.0f} | {cores} |",
            flush=True,
        )

    def ours(self, file, cores, *more, out=None):
        to, report = out or self.out(), self.work / "out-report.json"
        more = more if "--tokenizer" in more else ("--tokenizer", "gpt2", *more)
        command = [PREPROCESS, "--json-in", file, "--out", to, "--quiet", "--report", report]
        found = run([*command, "--workers", cores, *more], cores=self.args.cores[:cores])
        found["tokens"] = json.loads(report.read_text()).get("tokens")
        self.tidy()
        return found

    def peer(self, name, *more, cores=1):
        command = [PYTHON, ROOT / "scripts/bench_peers.py", name, *more]
        found = run(command, cores=self.args.cores[:cores])
        self.tidy()
        return found

    def stream(self, size):
        """Pipes `size` bytes into `preprocess` and measures its peak memory."""
        block = self.en.read_bytes()
        out = self.out()
        command = [PREPROCESS, "--json-in", "-", "--out", out, "--quiet", "--workers", "2"]
        pinned = ["taskset", "-c", ",".join(self.args.cores), *map(str, command)]
        start = time.perf_counter()
        with subprocess.Popen(pinned, stdin=subprocess.PIPE) as child:
            peaks = [0]
            watcher = threading.Thread(target=watch, args=(child.pid, peaks))
            watcher.start()
            for _ in range(max(1, size // len(block))):
                child.stdin.write(block)
            child.stdin.close()
            if child.wait() != 0:
                sys.exit("preprocess failed")
            watcher.join()
        self.tidy()
        return peaks[0], time.perf_counter() - start

    # Files.

    def out(self):
        return self.work / "out"

    def tidy(self):
        for output in self.work.glob("out*"):
            output.unlink()

    def repeated(self, file, bytes_min):
        out = self.work / f"{file.stem}-{bytes_min}.jsonl"
        if not out.exists():
            self.peer("repeat", file, out, bytes_min)
        return out

    def cut(self, file, bytes_min):
        out = self.work / f"{file.stem}-to-{bytes_min}.jsonl"
        if file.stat().st_size <= bytes_min:
            return file
        with open(file, "rb") as lines, open(out, "wb") as to:
            while to.tell() < bytes_min:
                to.write(lines.readline())
        return out


def mb(file):
    return f"{file.stat().st_size / 1e6:.0f} MB"


def run(command, cores=()):
    """Wall and CPU seconds and peak memory of a command, and the fields of the JSON that it prints."""
    pinned = ["taskset", "-c", ",".join(cores)] if cores else []
    command = [*pinned, *map(str, command)]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        peaks = [0]
        threading.Thread(target=watch, args=(child.pid, peaks)).start()
        stdout, stderr = child.communicate()
        seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if child.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {child.returncode}\n{stderr.decode()}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    try:
        printed = json.loads(stdout)
    except ValueError:
        printed = {}
    return {"seconds": seconds, "cpu_seconds": cpu, "peak": peaks[0], **printed}


def watch(pid, peaks):
    while True:
        try:
            with open(f"/proc/{pid}/status", encoding="utf-8") as lines:
                peak = [line for line in lines if line.startswith("VmHWM")]
        except OSError:
            return
        if not peak:
            return
        peaks[0] = max(peaks[0], int(peak[0].split()[1]) * 1024)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
