"""Builds the wheel of the package `bursar`, with the library in it.

usage: build_wheel.py LIBRARY FOLDER

LIBRARY is `libbursar.so` as `cargo build --release -p bursar-capi` makes it. Prints the wheel's path in FOLDER. The
package is pure Python over that library, so a wheel is an archive of both and three files about them (PyPA's "Binary
distribution format"); it needs nothing that a plain Python lacks. The same inputs make the same bytes.
"""

import base64
import hashlib
import os
import re
import sys
import sysconfig
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
NAME = "bursar"
# Files in an archive have a time; this is the first that it can have.
LONG_AGO = (1980, 1, 1, 0, 0, 0)


def version():
    """The workspace's version."""
    folder = HERE
    while not os.path.exists(os.path.join(folder, "Cargo.lock")):
        folder = os.path.dirname(folder)
    with open(os.path.join(folder, "Cargo.toml"), encoding="utf-8") as file:
        found = re.search(r'^\[workspace\.package\]\nversion = "([^"]+)"', file.read(), re.MULTILINE)
    return found.group(1)


def contents(library, about):
    """Every file of the wheel but the last: its path there, and its bytes."""
    package = os.path.join(HERE, NAME)
    for name in sorted(os.listdir(package)):
        if name.endswith(".py"):
            yield f"{NAME}/{name}", read(os.path.join(package, name))
    yield f"{NAME}/libbursar.so", read(library)
    tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    metadata = (
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version()}\n"
        "Summary: Named tensors on a GPU that outlive the process that loaded them\n"
        "License: Apache-2.0\nRequires-Python: >=3.9\n"
    )
    wheel = f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: false\nTag: {tag}\n"
    entry_points = f"[vllm.general_plugins]\n{NAME} = {NAME}.vllm:register\n"
    yield f"{about}/METADATA", metadata.encode()
    yield f"{about}/WHEEL", wheel.encode()
    yield f"{about}/entry_points.txt", entry_points.encode()


def read(path):
    with open(path, "rb") as file:
        return file.read()


def build(library, folder):
    """Writes the wheel; its path."""
    about = f"{NAME}-{version()}.dist-info"
    record, files = [], list(contents(library, about))
    tag = next(data for path, data in files if path.endswith("WHEEL")).decode().rsplit("Tag: ", 1)[1].strip()
    path = os.path.join(folder, f"{NAME}-{version()}-{tag}.whl")
    for name, data in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}\n")
    record.append(f"{about}/RECORD,,\n")
    files.append((f"{about}/RECORD", "".join(record).encode()))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files:
            entry = zipfile.ZipInfo(name, LONG_AGO)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(build(sys.argv[1], sys.argv[2]))
