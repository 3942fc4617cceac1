#!/usr/bin/env python3
"""Bytes a second of boto3 reading one object of S3 in ranges, at its fastest number of threads.

    AWS_ENDPOINT_URL=... python3 s3_read.py s3://bucket/key [--part 8388608] [--bytes-max 1e9]

Ranged GETs by 4, 8, 16 and 32 threads that have a client each, as boto3's guide requires, and boto3's
own transfer of the whole object (TransferConfig) by 8. Prints the best as one JSON object:
{"bytes": N, "seconds": S, "bytes_per_second": R, "threads": T, "by": "get" or "transfer"}
"""

import argparse
import concurrent.futures
import json
import threading
import time
import urllib.parse

import boto3
import boto3.s3.transfer
import botocore.config

LOCAL = threading.local()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--part", type=int, default=8 << 20)
    parser.add_argument("--bytes-max", type=float, default=1e9)
    args = parser.parse_args()
    url = urllib.parse.urlparse(args.url)
    bucket, key = url.netloc, url.path.lstrip("/")
    whole = client().head_object(Bucket=bucket, Key=key)["ContentLength"]
    length = min(whole, int(args.bytes_max))
    runs = [read(bucket, key, length, args.part, threads) for threads in (4, 8, 16, 32)]
    if length == whole:
        runs.append(transfer(bucket, key, length, args.part, 8))
    print(json.dumps(max(runs, key=lambda run: run["bytes_per_second"])))


def client():
    if not hasattr(LOCAL, "s3"):
        config = botocore.config.Config(s3={"addressing_style": "path"})
        LOCAL.s3 = boto3.session.Session().client("s3", config=config)
    return LOCAL.s3


def read(bucket, key, length, part, threads):
    def get(first):
        last = min(first + part, length) - 1
        body = client().get_object(Bucket=bucket, Key=key, Range=f"bytes={first}-{last}")["Body"]
        return len(body.read())

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: client(), range(threads)))
        begin = time.perf_counter()
        received = sum(pool.map(get, range(0, length, part)))
        seconds = time.perf_counter() - begin
    return result(received, seconds, threads, "get")


def transfer(bucket, key, _length, part, threads):
    config = boto3.s3.transfer.TransferConfig(
        multipart_threshold=part, multipart_chunksize=part, max_concurrency=threads
    )
    sink, begin = Sink(), time.perf_counter()
    client().download_fileobj(bucket, key, sink, Config=config)
    return result(sink.received, time.perf_counter() - begin, threads, "transfer")


class Sink:
    """A file that counts and discards its bytes."""

    received = 0

    def write(self, data):
        self.received += len(data)

    def seek(self, *_):
        pass


def result(received, seconds, threads, by):
    return {
        "bytes": received,
        "seconds": round(seconds, 4),
        "bytes_per_second": round(received / seconds),
        "threads": threads,
        "by": by,
    }


if __name__ == "__main__":
    main()
