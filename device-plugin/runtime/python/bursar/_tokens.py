"""Memory tokens: references to memory that the agent of its node has signed."""

import json
import typing

from bursar import _library
from bursar._library import Refused


class Memory(typing.NamedTuple):
    """What a token names."""

    node: str
    gpu: str
    container: int
    gpu_generation: int
    process_generation: int
    lease: int
    block: int
    # Whether the GPU's generation is the node's present one: None where the GpuNode does not list the GPU.
    current: typing.Optional[bool]


def seal(block, lease=None, *, device=0, socket=None):
    """Returns the bytes of a token for memory of this process, or for an open lease of `bursar.retained`.

    `block` is a number of your choice that identifies the memory. `socket` is the agent's socket, for tests.
    """
    return _library.seal(socket, device, None if lease is None else lease._ready(), block)


def redeem(token, *, socket=None):
    """Returns the Memory that a token of this node and namespace names, if it still exists.

    Raises Fenced if one of its generations has ended, and Refused for a token of another node or namespace.
    """
    return _memory(_library.redeem(socket, token), True)


def verify(token, gpunode):
    """Returns the Memory that a token names, anywhere: without an agent, a GPU or the token's node.

    `gpunode` is the GpuNode of the token's node, as JSON or as a dictionary: `kubectl get gpunode NODE -o json`.
    Raises Refused if the node's key has not signed the token.
    """
    if isinstance(gpunode, (str, bytes)):
        gpunode = json.loads(gpunode)
    status = gpunode.get("status") or {}
    key = (status.get("tokenKey") or {}).get("publicKey")
    if key is None:
        raise Refused("failed to verify the token: the GpuNode has no status.tokenKey; upgrade the node's agent")
    found = _library.verify(token, bytes.fromhex(key))
    name = gpunode["metadata"]["name"]
    if found.node.decode() != name:
        raise Refused(f"failed to verify the token: it names node {found.node.decode()}, and the GpuNode is of {name}")
    generations = {gpu["uuid"]: gpu["generation"] for gpu in status.get("gpus") or []}
    now = generations.get(found.gpu.decode())
    return _memory(found, None if now is None else now == found.gpu_generation)


def _memory(found, current):
    return Memory(
        node=found.node.decode(),
        gpu=found.gpu.decode(),
        container=found.container,
        gpu_generation=found.gpu_generation,
        process_generation=found.process_generation,
        lease=found.lease,
        block=found.block,
        current=current,
    )
