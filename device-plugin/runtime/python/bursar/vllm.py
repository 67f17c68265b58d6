"""Loads models of vLLM from retained memory: `vllm serve MODEL --load-format bursar`.

The first worker loads as vLLM would (`--model-loader-extra-config '{"load_format": "auto"}'` says how) and commits the tensors
after vLLM's own processing. A worker after a crash creates the model without memory, attaches, and lets vLLM derive the rest
from processed weights, as vLLM's loader `ipc_cache` does. Parameters are the retained ones; other tensors are the worker's own
copies, because vLLM writes to some of them. A model that cannot be retained is loaded as without this package, which is
logged: the committing worker attaches the weights once as a trial, and discards them if that fails. Follows vLLM 0.33. With
vLLM 0.26, unquantised weights are retained.
"""

import contextlib
import copy
import gc
import hashlib
import json
import logging
import os

import bursar
from bursar import _arrays, _modules

_LOG = logging.getLogger(__name__)
# Entry beside a model's tensors with further facts about them.
_ABOUT = "bursar::vllm"
# A writer opens its lease after loading and commits in a moment, and an agent restarts in two seconds. Without an agent, every
# start waits this long twice.
_TIMEOUT = 10.0
# Suffixes of a checkpoint's files.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".json")
# Bytes of one sample of a file, and samples of a file whose tensors are not listed.
_SAMPLE, _SAMPLES = 4096, 64
# Tensors of a checkpoint of which a sample is read, at least one in each file: a cold read over a network takes milliseconds.
_SAMPLED_TENSORS = 1024
# Methods of vLLM 0.26 that leave weights on a GPU as they are.
_UNQUANTISED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


class NotRetainable(bursar.Error):
    """This model's weights cannot be retained."""


def register():
    """Registers the load format `bursar`. vLLM calls this in each of its processes (group `vllm.general_plugins`)."""
    from vllm.model_executor.model_loader import get_model_loader, register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("bursar")
    class RetainedModelLoader(BaseModelLoader):
        """Attaches retained weights, or loads and commits them."""

        def __init__(self, load_config):
            super().__init__(load_config)
            self.extra = dict(load_config.model_loader_extra_config or {})
            self.load_format = self.extra.pop("load_format", "auto")
            self.loader = get_model_loader(_with(load_config, self.load_format, dict(self.extra)))

        def get_external_weight_memory(self, vllm_config):
            # Called before the worker measures free memory: the retained weights are in use by then and belong to the worker.
            try:
                with self._lease(vllm_config, vllm_config.model_config) as lease:
                    return lease.bytes if lease.ready else 0
            except Exception:
                # `load_model` fails in the same way later, and warns.
                _LOG.info("failed to count retained weights", exc_info=True)
                return 0

        def download_model(self, model_config):
            self.loader.download_model(model_config)

        def load_weights(self, model, model_config):
            # In place, into an existing model: nothing to retain.
            self.loader.load_weights(model, model_config)

        def load_model(self, vllm_config, model_config, prefix=""):
            arguments = {"vllm_config": vllm_config, "model_config": model_config, "prefix": prefix}
            with contextlib.ExitStack() as block:
                try:
                    before = _Made(vllm_config)
                    lease = block.enter_context(self._lease(vllm_config, model_config, prefix))
                except Exception as error:
                    # No failure of this package may prevent a worker's start.
                    _warn("weights are loaded without retained memory", error)
                    return self.loader.load_model(**arguments)
                if lease.ready:
                    try:
                        return self._attached(lease, **arguments)
                    except Exception as error:
                        _warn("retained weights cannot be attached; weights are loaded", error)
                    before.restore()
                    _give_up(lease)
                    return self.loader.load_model(**arguments)
                model = self.loader.load_model(**arguments)
                self._retain(lease, model, before, arguments)
                return model

        def _retain(self, lease, model, before, arguments):
            """Commits a model's tensors; its parameters are then the retained ones."""
            import torch

            loaded, retained = _Made(arguments["vllm_config"]), None
            try:
                committed = _commit(lease, model, arguments["vllm_config"])
                before.restore()
                # Attaches as the next worker will, which must not be the first to fail.
                self._attached(lease, **arguments)
                retained = committed
            except Exception as error:
                # The model is still as vLLM loaded it.
                _warn("weights are not retained", error)
            loaded.restore()
            if retained is None:
                _give_up(lease)
                return
            # No exception is caught from here on, because a partly attached model must not serve.
            _modules.place(model, *retained)
            # The attached model and the loaded weights.
            gc.collect()
            torch.cuda.empty_cache()

        def _lease(self, vllm_config, model_config, prefix=""):
            import torch

            _refuse_writers(vllm_config, model_config)
            key = _key(vllm_config, model_config, [self.load_format, self.extra], prefix)
            return bursar.retained("vllm", key, device=torch.cuda.current_device(), timeout=_TIMEOUT)

        def _attached(self, lease, vllm_config, model_config, prefix):
            import torch
            from vllm.model_executor.model_loader.utils import process_weights_after_loading
            from vllm.utils.torch_utils import set_default_torch_dtype

            views = lease.tensors(_arrays.Torch)
            about = json.loads(bytes(views.pop(_ABOUT).tolist()))
            kinds, retained = about["kinds"], _state(views, about)
            with set_default_torch_dtype(model_config.dtype):
                with torch.device("meta"):
                    model = _create(self, vllm_config, model_config, prefix)
                # Processing may write to tensors that it creates, so these are copies until it is done.
                made = retained.keys() - _modules.tensors(model).keys()
                _modules.place(model, {name: t.clone() if name in made else t for name, t in retained.items()}, kinds)
                with _weights_already_processed():
                    process_weights_after_loading(model, model_config, torch.device(vllm_config.device_config.device))
            there = _modules.tensors(model)
            missing = {name for name in retained if name not in there or kinds[name] == _modules.PARAMETER}
            _modules.place(model, {name: retained[name] for name in missing}, kinds)
            _modules.drop_meta(model)
            tensors = _modules.tensors(model)
            for name, marks in about["marks"].items():
                vars(tensors[name]).update(marks)
            for name, flag in about["flags"].items():
                setattr(model, name, flag)
            return model.eval()


class _Made:
    """vLLM's caches of created models: layers by unique name, and rotary embeddings that later models share."""

    def __init__(self, vllm_config):
        from vllm.model_executor.layers import rotary_embedding

        compilation = vllm_config.compilation_config
        self.by_key = compilation.static_forward_context, rotary_embedding._ROPE_DICT
        self.experts = compilation.static_all_moe_layers
        self.then = [dict(made) for made in self.by_key], list(self.experts)

    def restore(self):
        """Restores vLLM's caches to this state."""
        for made, then in zip(self.by_key, self.then[0]):
            made.clear()
            made.update(then)
        self.experts[:] = self.then[1]


def _commit(lease, model, vllm_config):
    """Commits a model's tensors without changing the model. Returns the retained parameters and all kinds."""
    import torch

    device = torch.device(vllm_config.device_config.device).type
    _refuse_unknown(model, device)
    kinds, tensors = _modules.kinds(model), _modules.tensors(model)
    parameters = [name for name, kind in kinds.items() if kind == _modules.PARAMETER]
    about = {
        "kinds": kinds,
        "host": [name for name, tensor in tensors.items() if tensor.device.type != device],
        "marks": {name: marks for name in parameters if (marks := _plain(vars(tensors[name])))},
        "flags": _flags(model),
    }
    text = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    views = lease.commit({**tensors, _ABOUT: text})
    return {name: views[name] for name in parameters}, kinds


def _create(loader, vllm_config, model_config, prefix):
    """Creates a model without its weights."""
    if hasattr(loader, "create_model"):
        return loader.create_model(vllm_config, model_config, prefix)
    # vLLM 0.26.
    from vllm.model_executor.model_loader.utils import initialize_model

    return initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)


def _weights_already_processed():
    """Returns the block in which vLLM leaves processed weights as they are. vLLM 0.26 lacks it."""
    try:
        from vllm.model_executor.utils import weights_already_processed
    except ImportError:
        return contextlib.nullcontext()
    return weights_already_processed()


def _flags(model):
    """Returns a model's attributes that depend on the loaded weights."""
    try:
        from vllm.model_executor.model_loader.weight_cache.utils import export_model_attrs
    except ImportError:
        # vLLM 0.26 sets these two, on draft models.
        return {name: vars(model)[name] for name in ("has_own_embed_tokens", "has_own_lm_head") if name in vars(model)}
    return export_model_attrs(model)


def _starts_from_processed(method):
    """Returns whether a layer's method can start from processed weights. vLLM 0.26 does not know."""
    known = getattr(method, "supports_pre_processed_weights", None)
    return type(method).__name__ in _UNQUANTISED if known is None else known


def _give_up(lease):
    """Discards weights that cannot be attached, because they would take memory beside the loaded ones."""
    import torch

    # A model is a reference cycle.
    gc.collect()
    try:
        if lease.ready:
            # The memory is unmapped at once, and running kernels may still read it.
            torch.cuda.synchronize()
            lease.discard()
    except Exception as error:
        _warn("weights that cannot be attached stay in retained memory", error)


def _warn(what, error):
    """Logs a warning, with a traceback unless the error is this package's own."""
    _LOG.warning("%s: %s", what, error, exc_info=not isinstance(error, bursar.Error))


def _state(views, about):
    """Returns the tensors for a module: retained parameters, and copies of the rest. Shared tensors stay shared."""
    found, host = {}, set(about["host"])
    for name, view in views.items():
        own = about["kinds"][name] != _modules.PARAMETER
        place = (own, view.data_ptr(), view.shape, view.stride(), view.dtype)
        if place not in found:
            found[place] = view.to("cpu" if name in host else view.device, copy=True) if own else view
        views[name] = found[place]
    return views


def _refuse_writers(vllm_config, model_config):
    """Refuses features that write to weights while vLLM serves, because retained weights are read-only."""
    for name, used in {
        "sleep mode": model_config.enable_sleep_mode,
        "expert load balancing": vllm_config.parallel_config.enable_eplb,
        "weight transfer": vllm_config.weight_transfer_config is not None,
    }.items():
        if used:
            raise NotRetainable(f"failed to retain weights: {name} writes to them; turn it off")


def _refuse_unknown(model, device):
    """Refuses a model that vLLM cannot create from processed weights."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    if hasattr(model, "process_weights_after_loading"):
        raise NotRetainable(f"failed to retain weights: {type(model).__name__} processes weights itself")
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not _starts_from_processed(method):
            raise NotRetainable(f"failed to retain {path}: vLLM's {type(method).__name__} does not start from processed weights")
    for path, parameter in model.named_parameters():
        if parameter.device.type != device:
            raise NotRetainable(f"failed to retain {path}: it is on {parameter.device}, not on {device}")


def _plain(values):
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}


def _with(load_config, load_format, extra):
    config = copy.copy(load_config)
    config.load_format = load_format
    config.model_loader_extra_config = extra
    return config


def _key(vllm_config, model_config, loader, prefix):
    """Returns the key of everything that decides a worker's tensors after loading."""
    import torch
    import vllm
    from vllm import envs
    from vllm.distributed import parallel_state

    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    world = parallel_state.get_world_group()
    configs = (model_config, vllm_config.kernel_config, vllm_config.attention_config)
    return bursar.key(
        model=model_config.model,
        revision=model_config.revision,
        checkpoint=_checkpoint(model_config),
        dtype=model_config.dtype,
        quantization=model_config.quantization,
        configs=[config.compute_hash() for config in configs],
        environment=envs.compile_factors(),
        cache=[cache.cache_dtype, sorted(cache.kv_cache_dtype_skip_layers)],
        loader=loader,
        prefix=prefix,
        ranks=[
            world.rank_in_group,
            world.world_size,
            parallel_state.get_tensor_model_parallel_rank(),
            parallel.tensor_parallel_size,
            parallel_state.get_pp_group().rank_in_group,
            parallel.pipeline_parallel_size,
            parallel.data_parallel_rank,
            parallel.data_parallel_size,
            parallel.enable_expert_parallel,
            parallel.expert_placement_strategy,
        ],
        device=torch.cuda.get_device_name(),
        versions=[vllm.__version__, torch.__version__, torch.version.cuda],
    )


def _checkpoint(model_config):
    """Identifies a checkpoint: the content of its files, or the hub's commit.

    Files have no reliable times: each download has new ones, and all files of an image may have the same.
    """
    path = model_config.model
    if os.path.isdir(path):
        files = sorted(entry.path for entry in os.scandir(path) if entry.name.endswith(_WEIGHTS))
    else:
        files = [path] if os.path.isfile(path) else []
    if any(not file.endswith(".json") for file in files):
        tensors = max(_SAMPLED_TENSORS // len(files), 1)
        return [(os.path.basename(file), *_content(file, tensors)) for file in files]
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    if commit is None:
        raise NotRetainable(f"failed to identify the weights of {path}: the hub names no commit; pass a folder with the weights")
    return commit


def _content(path, tensors):
    """Returns a file's size and a digest: of all of a JSON file, otherwise of samples, because weights are large."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if path.endswith(".json"):
            parts = [(0, size)]
        elif path.endswith(".safetensors"):
            # The header, and the middle of `tensors` tensors. Training changes a tensor everywhere, and most tensors.
            begin = min(8 + int.from_bytes(file.read(8), "little"), size)
            header = json.loads(file.read(begin - 8))
            spans = sorted(tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__")
            spans = spans[:: max(-(-len(spans) // tensors), 1)]
            middles = [(max(low, (low + high - _SAMPLE) // 2), min(_SAMPLE, high - low)) for low, high in spans]
            parts = [(0, begin), *((begin + at, length) for at, length in middles)]
        else:
            last = max(size - _SAMPLE, 0)
            parts = [(last * number // (_SAMPLES - 1), _SAMPLE) for number in range(_SAMPLES)]
        digest = hashlib.sha256()
        for at, length in parts:
            digest.update(os.pread(file.fileno(), length, at))
    return size, digest.hexdigest()
