"""Retained memory: named tensors on a GPU that outlive the process that loaded them.

    import bursar

    key = bursar.key(model="llama", revision="4f1c", dtype="bfloat16", torch=torch.__version__)
    with bursar.kept("weights", key) as k:
        if k.ready:
            k.attach(model)
        else:
            k.commit(load(model))

A lease is found by its name and key in the namespace of the pod. The first process commits the tensors that it loaded.
From then on they are read-only, and a process that starts after a crash, a fault or an exec finds them verified in
milliseconds.
"""

from bursar._kept import Kept, Mismatch, kept, key
from bursar._library import Busy, Corrupt, DriverError, Error, Fenced, Missing, Quota, Refused

__all__ = [
    "Busy",
    "Corrupt",
    "DriverError",
    "Error",
    "Fenced",
    "Kept",
    "Mismatch",
    "Missing",
    "Quota",
    "Refused",
    "kept",
    "key",
]
