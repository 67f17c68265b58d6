"""Stand-ins of the parts of PyTorch and of vLLM 0.33 that the package calls, with their signatures.

A tensor has a value and an address. One in retained memory is read-only: a write to it is a `Fault`, as it is on a GPU.
"""

import abc
import contextlib
import itertools
import types

ADDRESSES = itertools.count(4096, 4096)
NAMES = (
    "torch", "torch.cuda", "torch.nn", "torch.version", "vllm", "vllm.distributed", "vllm.envs", "vllm.model_executor",
    "vllm.model_executor.layers", "vllm.model_executor.layers.quantization",
    "vllm.model_executor.layers.quantization.base_config", "vllm.model_executor.layers.rotary_embedding",
    "vllm.model_executor.model_loader", "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.model_loader.utils", "vllm.model_executor.model_loader.weight_cache",
    "vllm.model_executor.model_loader.weight_cache.utils",
    "vllm.model_executor.utils", "vllm.utils", "vllm.utils.torch_utils",
)


class Fault(Exception):
    """A write to read-only memory."""


class Device:
    """`torch.device`, which is a block too."""

    default = ["cuda"]

    def __init__(self, kind):
        self.type = getattr(kind, "type", kind)

    def __enter__(self):
        Device.default.append(self.type)

    def __exit__(self, *_):
        Device.default.pop()


class Tensor:
    # What PyTorch has outside of an object's `__dict__`.
    __slots__ = ("value", "retained", "device", "address", "__dict__")
    shape, dtype = (1,), "float32"

    def __init__(self, value, device=None, retained=False, address=None):
        self.value, self.retained, self.device = value, retained, Device(device or Device.default[-1])
        self.address = address or next(ADDRESSES)

    @staticmethod
    def _make_subclass(cls, tensor, requires_grad=False):
        return cls(tensor.value, tensor.device, tensor.retained, tensor.address)

    @property
    def data(self):
        return self

    @data.setter
    def data(self, other):
        if self.is_meta:
            raise RuntimeError("incompatible tensor type")
        self.value, self.retained, self.device, self.address = other.value, other.retained, other.device, other.address

    @property
    def is_meta(self):
        return self.device.type == "meta"

    def fill_(self, value):
        if self.retained:
            raise Fault(self.value)
        self.value = value

    def to(self, device, copy):
        return Tensor(self.value, device)

    def clone(self):
        return self.to(self.device, copy=True)

    def numel(self):
        return 0 if self.value is None else 1

    def stride(self):
        return (1,)

    def data_ptr(self):
        return self.address

    def tolist(self):
        return self.value


class Parameter(Tensor):
    pass


class Module:
    def __init__(self, **parts):
        self._parameters, self._buffers, self._modules = {}, {}, {}
        for name, part in parts.items():
            if isinstance(part, Module):
                self._modules[name] = part
            elif isinstance(part, Parameter):
                self._parameters[name] = part
            else:
                setattr(self, name, part)

    def __getattr__(self, name):
        for parts in ("_parameters", "_buffers", "_modules"):
            if name in vars(self).get(parts, {}):
                return vars(self)[parts][name]
        raise AttributeError(name)

    def named_modules(self, prefix="", remove_duplicate=True):
        yield prefix, self
        for name, part in self._modules.items():
            yield from part.named_modules(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self):
        for prefix, module in self.named_modules():
            for name, parameter in module._parameters.items():
                yield f"{prefix}.{name}" if prefix else name, parameter

    def eval(self):
        self.evaluated = True
        return self


class QuantizeMethodBase:
    supports_pre_processed_weights = False


class Linear(QuantizeMethodBase):
    supports_pre_processed_weights = True


class UnquantizedLinearMethod(QuantizeMethodBase):
    """Of vLLM 0.26, which does not know the attribute."""

    supports_pre_processed_weights = None


class BaseModelLoader(abc.ABC):
    def __init__(self, load_config):
        self.load_config = load_config

    def get_external_weight_memory(self, vllm_config):
        return 0

    @abc.abstractmethod
    def download_model(self, model_config):
        raise NotImplementedError

    @abc.abstractmethod
    def load_weights(self, model, model_config):
        raise NotImplementedError

    def create_model(self, vllm_config, model_config, prefix=""):
        raise NotImplementedError

    def load_model(self, vllm_config, model_config, prefix=""):
        raise NotImplementedError


def modules(loaders, create, process, world):
    """`vllm` and `torch` as far as they are called, by name; and the loaders that are registered with it."""
    found, registered = {name: types.ModuleType(name) for name in NAMES}, {}
    for name, module in found.items():
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(found[parent], leaf, module)
    torch, processed = found["torch"], []
    torch.Tensor, torch.nn.Parameter, torch.nn.Module, torch.device = Tensor, Parameter, Module, Device
    torch.tensor = lambda value, dtype: Tensor(value, "cpu")
    torch.uint8, torch.__version__, torch.version.cuda = "uint8", "1", "13.0"
    torch.cuda.current_device, torch.cuda.get_device_name = lambda: 3, lambda: "H200"
    torch.cuda.empty_cache = torch.cuda.synchronize = lambda: None

    @contextlib.contextmanager
    def weights_already_processed():
        processed.append(True)
        try:
            yield
        finally:
            processed.pop()

    def process_weights_after_loading(model, model_config, target_device):
        process(model, bool(processed))

    BaseModelLoader.create_model = lambda self, vllm_config, model_config, prefix="": create(vllm_config, prefix)
    executor = found["vllm.model_executor"]
    executor.model_loader.register_model_loader = lambda name: lambda loader: registered.setdefault(name, loader)
    executor.model_loader.get_model_loader = lambda config: loaders[config.load_format](config)
    executor.model_loader.base_loader.BaseModelLoader = BaseModelLoader
    executor.model_loader.utils.process_weights_after_loading = process_weights_after_loading
    executor.model_loader.weight_cache.utils.export_model_attrs = lambda model: {"has_own_lm_head": model.has_own_lm_head}
    executor.layers.rotary_embedding._ROPE_DICT = {}
    executor.utils.weights_already_processed = weights_already_processed
    executor.layers.quantization.base_config.QuantizeMethodBase = QuantizeMethodBase
    found["vllm.utils.torch_utils"].set_default_torch_dtype = lambda dtype: contextlib.nullcontext()
    found["vllm.envs"].compile_factors = lambda: {"VLLM_USE_DEEP_GEMM": True}
    state = types.SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0)
    state.get_pp_group = lambda: types.SimpleNamespace(rank_in_group=0)
    state.get_world_group = lambda: world
    found["vllm.distributed"].parallel_state = state
    found["vllm"].__version__ = "0.33.0"
    return found, registered


def make_older(found, create, process):
    """Changes these modules into those of vLLM 0.26, whose unquantised layers never process weights."""
    executor = found["vllm.model_executor"]
    del BaseModelLoader.create_model, executor.utils.weights_already_processed
    del executor.model_loader.weight_cache.utils.export_model_attrs
    utils = executor.model_loader.utils
    utils.initialize_model = lambda vllm_config, model_config, prefix: create(vllm_config, prefix)
    utils.process_weights_after_loading = lambda model, model_config, target_device: process(model, True)
