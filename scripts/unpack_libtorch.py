"""Extracts the C++ library and its headers from the wheels in a folder.

    python3 unpack_libtorch.py cpu|cuda FOLDER

libtorch.so of the wheel needs libtorch_cuda.so. For a CPU build it is replaced by a symbolic link to
libtorch_cpu.so, so that neither a GPU nor its libraries are needed.
"""

import glob
import os
import re
import sys
import zipfile

COMMON = [
    r"torch/include/",
    r"torch/lib/(libtorch_cpu|libc10)\.so$",
    r"torch/lib/libgomp",
    r"nvidia/cu13/lib/lib(cudart|cupti)\.so",
    r".*dist-info/.*(LICENSE|NOTICE)",
]
CUDA = [
    r"torch/lib/(libtorch|libtorch_cuda|libc10_cuda)\.so$",
    r"nvidia/cu13/include/",
    r"nvidia/nccl/include/",
]


def main() -> None:
    kind, folder = sys.argv[1], sys.argv[2]
    keep = re.compile("|".join(COMMON + (CUDA if kind == "cuda" else [])))
    for wheel in glob.glob(os.path.join(folder, "*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for item in archive.infolist():
                if keep.match(item.filename):
                    archive.extract(item, folder)
    library = os.path.join(folder, "torch", "lib")
    if kind == "cpu":
        os.symlink("libtorch_cpu.so", os.path.join(library, "libtorch.so"))
    for library_file in ("libtorch.so", "libtorch_cpu.so", "libc10.so"):
        if not os.path.exists(os.path.join(library, library_file)):
            sys.exit(f"unpack_libtorch: {library_file} is not in the wheels of {folder}")
    # torch-sys compares this with the version that it supports.
    with open(os.path.join(folder, "torch", "build-version"), "w") as out:
        out.write("2.11.0+cu130\n")


if __name__ == "__main__":
    main()
