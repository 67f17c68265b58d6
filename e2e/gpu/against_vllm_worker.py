"""Loads a model once by vLLM with the load format `bursar`, as vLLM's worker does, and prints the result as JSON.

usage: against_vllm_worker.py SOCKET MODEL [--device host|cuda] [--format FORMAT] [--engine JSON] [--then exit|kill|write]

With `host`, vLLM runs on an out-of-tree platform whose device is the CPU. PyTorch's tensors then lie in the simulated
driver's memory, which is host memory, so that PyTorch cannot write to memory that is read-only there.
"""

import argparse
import functools
import hashlib
import inspect
import io
import json
import logging
import os
import signal
import tempfile


METHODS = ("get_external_weight_memory", "download_model", "load_weights", "load_model")


class Log(logging.Handler):
    """Collects the loader's log messages."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        text = record.getMessage()
        if record.exc_info:
            text += f": {record.exc_info[1]!r}"
        self.lines.append(text)


def on_the_host():
    """Makes the CPU the device of vLLM, into which retained memory is mapped."""
    import numpy
    import torch
    import vllm.platforms
    from bursar import _arrays

    class Host(vllm.platforms.Platform):
        _enum = vllm.platforms.PlatformEnum.OOT
        device_name = device_type = "cpu"
        dist_backend = "gloo"

        @classmethod
        def get_attn_backend_cls(cls, *_, **__):
            return "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"

    class Memory:
        def __init__(self, owner, address, size):
            self.owner = owner
            self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}

    vllm.platforms._current_platform = Host()
    _arrays._bytes = lambda owner, address, size, device: torch.from_numpy(numpy.asarray(Memory(owner, address, size)))
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda: "simulated"


def read_only(address):
    """Returns whether the kernel denies this process writes to the address."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            span, rights = line.split()[:2]
            low, high = (int(end, 16) for end in span.split("-"))
            if low <= address < high:
                return "w" not in rights
    raise ValueError(f"nothing at {address:#x}")


def tensors(model):
    """Returns the shape and a digest of every parameter and buffer, under every name."""
    import torch

    found = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        data = tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor.detach().reshape(1).view(torch.uint8)
        found[name] = [list(tensor.shape), str(tensor.dtype), hashlib.sha256(data.cpu().numpy().tobytes()).hexdigest()]
    return found


def storages(model):
    """Returns each parameter's bytes, its storage's bytes and address, and the size of its file, under every name."""
    import torch

    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        storage, file = parameter.untyped_storage(), io.BytesIO()
        torch.save(parameter.data, file)
        found[name] = [parameter.numel() * parameter.element_size(), storage.nbytes(), storage.data_ptr(), len(file.getvalue())]
    return found


def parameters_of(loader, name):
    """Returns the names of a method's parameters without `self`."""
    return [parameter for parameter in inspect.signature(getattr(loader, name)).parameters if parameter != "self"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("socket")
    parser.add_argument("model")
    parser.add_argument("--device", choices=["host", "cuda"], default="host")
    parser.add_argument("--format", default="bursar")
    parser.add_argument("--engine", type=json.loads, default={})
    parser.add_argument("--then", choices=["exit", "kill", "write"], default="exit")
    options = parser.parse_args()

    import bursar

    if options.device == "host":
        on_the_host()
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import BaseModelLoader, get_model_loader
    from vllm.plugins import load_general_plugins

    log = Log()
    logging.getLogger("bursar").addHandler(log)
    bursar.retained = functools.partial(bursar.retained, socket=options.socket)
    load_general_plugins()
    arguments = {"model": options.model, "load_format": options.format, "skip_tokenizer_init": True, "enforce_eager": True}
    config = EngineArgs(**arguments, **options.engine).create_engine_config()
    with tempfile.NamedTemporaryFile() as rendezvous, set_current_vllm_config(config):
        backend = "gloo" if options.device == "host" else "nccl"
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, backend)
        initialize_model_parallel(1, 1)
        loader = get_model_loader(config.load_config)
        # vLLM 0.26 does not ask.
        external = getattr(loader, "get_external_weight_memory", lambda config: 0)(config)
        model = loader.load_model(vllm_config=config, model_config=config.model_config)
    parameters = dict(model.named_parameters())
    retained = None
    if options.device == "host":
        retained = sorted(name for name, parameter in parameters.items() if read_only(parameter.data_ptr()))
    attention = [module for module in model.modules() if hasattr(module, "_k_scale_float")]
    report = {
        "loader": type(loader).__name__,
        "differ": [name for name in METHODS if hasattr(BaseModelLoader, name) and parameters_of(loader, name) != parameters_of(BaseModelLoader, name)],
        "external": external,
        "log": log.lines,
        "tensors": tensors(model),
        "storages": storages(model),
        "parameters": sorted(parameters),
        "read_only": retained,
        "scales": [[a._k_scale_float, a._k_scale_cpu.device.type, a._k_scale_cpu.item()] for a in attention],
        "classes": {name: type(parameter).__name__ for name, parameter in parameters.items()},
        "marked": sorted(name for name, parameter in parameters.items() if hasattr(parameter, "weight_loader")),
    }
    print(json.dumps(report), flush=True)
    if options.then == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if options.then == "write":
        try:
            next(iter(parameters.values())).data.fill_(1)
            torch.accelerator.synchronize()
        except RuntimeError:
            # After an illegal address the context is lost, and a regular exit would call into the context.
            os._exit(3)


if __name__ == "__main__":
    main()
