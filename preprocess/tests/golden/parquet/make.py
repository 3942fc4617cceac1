"""Writes checksum.parquet: pages with CRC-32s, which the Parquet crate does not write."""

import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

texts = [f"row {n} of a column with checksums" for n in range(6)]
pq.write_table(
    pa.table({"text": texts}),
    pathlib.Path(__file__).with_name("checksum.parquet"),
    write_page_checksum=True,
    compression="none",
    use_dictionary=False,
    store_schema=False,
    write_statistics=False,
)
