"""Retained memory: named tensors on a GPU that outlive the process that loaded them.

    import bursar

    key = bursar.key(model="llama", revision="4f1c", dtype="bfloat16", torch=torch.__version__)
    with bursar.retained("weights", key) as lease:
        if lease.ready:
            lease.attach(model)
        else:
            lease.commit(load(model))

A lease is found by its name and key in the namespace of the pod. The first process commits the tensors that it loaded.
From then on they are read-only, and a process that starts after a crash, a fault or an exec finds them verified in
milliseconds.

    token = bursar.seal(7, lease)            # bytes, to send by any channel
    memory = bursar.redeem(token)            # in a container of the same node and namespace
    memory = bursar.verify(token, gpunode)   # anywhere, with the node's GpuNode
"""

from bursar._library import Busy, Corrupt, DriverError, Error, Fenced, Missing, Quota, Refused
from bursar._retained import Mismatch, RetainedLease, key, retained
from bursar._tokens import Memory, redeem, seal, verify

__all__ = [
    "Busy",
    "Corrupt",
    "DriverError",
    "Error",
    "Fenced",
    "Memory",
    "Mismatch",
    "Missing",
    "Quota",
    "Refused",
    "RetainedLease",
    "key",
    "redeem",
    "retained",
    "seal",
    "verify",
]
