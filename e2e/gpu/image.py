"""Packs this machine's Python and compiler into a container image, for pods that run its programs.

The image lacks frameworks, whose folder pods mount, and files of the NVIDIA driver, which Bursar gives to pods.
Libraries of CUDA are left out for size.
"""

import hashlib
import io
import json
import os
import tarfile

FOLDERS = ["usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/libexec", "usr/include", "opt/gcc", "etc/alternatives"]
FILES = ["etc/passwd", "etc/group", "etc/nsswitch.conf"]
# The usr merge, and links that programs expect.
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64", "usr/local/cuda": "cuda-13.0"}
EMPTY = ["tmp", "proc", "sys", "dev", "run", "root", "usr/local"]
MOST = 48 << 20
NVIDIA = ("libcuda", "libnvidia", "libcudnn", "libnccl", "libcublas", "libnvrtc", "libnvjit", "libcufft", "libnpp")


def wanted(path):
    """Returns whether a file of this machine belongs into the image."""
    name = os.path.basename(path)
    if name.startswith(NVIDIA) or "/dist-packages/" in path or "/jvm/" in path:
        return False
    return os.path.islink(path) or os.path.getsize(path) <= MOST


def layer(out):
    """Writes the root file system to `out` as a tar archive."""
    with tarfile.open(out, "w") as archive:
        for folder in EMPTY:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(entry)
        for name, target in LINKS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
        for name in FILES:
            archive.add("/" + name, name)
        for folder in FOLDERS:
            for parent, _, names in os.walk("/" + folder):
                # Mount points of this machine's own container are left out.
                archive.add(parent, parent[1:], recursive=False)
                for name in names:
                    path = os.path.join(parent, name)
                    if (os.path.islink(path) or os.path.isfile(path)) and wanted(path):
                        archive.add(path, path[1:], recursive=False)
                for name in os.listdir(parent):
                    path = os.path.join(parent, name)
                    if os.path.islink(path) and os.path.isdir(path) and wanted(path):
                        archive.add(path, path[1:], recursive=False)


def write(reference, folder):
    """Makes the image `reference` below `folder`, and returns its archive in Docker's format (`docker save`)."""
    root = os.path.join(folder, "layer.tar")
    layer(root)
    digest = hashlib.sha256()
    with open(root, "rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/tmp"]},
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + digest.hexdigest()]},
        }
    ).encode()
    name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = json.dumps([{"Config": name, "RepoTags": [reference], "Layers": ["layer.tar"]}]).encode()
    path = os.path.join(folder, "image.tar")
    with tarfile.open(path, "w") as archive:
        for entry, content in ((name, config), ("manifest.json", manifest)):
            info = tarfile.TarInfo(entry)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        archive.add(root, "layer.tar")
    os.unlink(root)
    return path
