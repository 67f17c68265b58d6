"""Loads models of vLLM from kept memory: `vllm serve MODEL --load-format bursar`.

A worker that comes first loads as vLLM would (`--model-loader-extra-config '{"load_format": "auto"}'` says how) and commits
what it has after vLLM's own processing; one that comes after a crash makes the model with random weights, and attaches. So
for a moment it has both. Tensors are found as parameters, buffers and plain attributes of modules; a layer that
hides one elsewhere cannot be kept. Where the node keeps nothing, or has no room, the worker runs all the same. Follows vLLM's `BaseModelLoader` (vllm/model_executor/model_loader/base_loader.py) as of 2026.
"""

import contextlib
import copy
import logging

import bursar

_LOG = logging.getLogger(__name__)


def register():
    """Makes the load format `bursar` known. vLLM calls it in each of its processes (group `vllm.general_plugins`)."""
    from vllm.model_executor.model_loader import get_model_loader, register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("bursar")
    class KeptModelLoader(BaseModelLoader):
        """Takes weights from kept memory where they are, and keeps them where they are not."""

        def __init__(self, load_config):
            super().__init__(load_config)
            extra = dict(load_config.model_loader_extra_config or {})
            self.load_format = extra.pop("load_format", "auto")
            self.loader = get_model_loader(_with(load_config, self.load_format, extra))

        def download_model(self, model_config):
            self.loader.download_model(model_config)

        def load_weights(self, model, model_config):
            # In place, into a model that exists already: nothing to keep.
            self.loader.load_weights(model, model_config)

        def load_model(self, vllm_config, model_config, **others):
            import torch

            key = _key(vllm_config, model_config, self.load_format, others)
            arguments = {"vllm_config": vllm_config, "model_config": model_config, **others}
            with contextlib.ExitStack() as block:
                try:
                    k = block.enter_context(bursar.kept("vllm", key, device=torch.cuda.current_device()))
                except bursar.Error as error:
                    _LOG.warning("weights are loaded without kept memory: %s", error)
                    return self.loader.load_model(**arguments)
                if k.ready:
                    random = get_model_loader(_with(self.load_config, "dummy", {}))
                    model = random.load_model(**arguments)
                    k.attach(model)
                    return model
                model = self.loader.load_model(**arguments)
                try:
                    k.commit(model)
                except bursar.Error as error:
                    # The model is as vLLM loaded it.
                    _LOG.warning("weights are not kept: %s", error)
                return model


def _with(load_config, load_format, extra):
    config = copy.copy(load_config)
    config.load_format = load_format
    config.model_loader_extra_config = extra
    return config


def _key(vllm_config, model_config, load_format, others):
    """Of all that decides what a worker's tensors are after they are loaded."""
    import torch
    import vllm
    from vllm.distributed import parallel_state

    parallel = vllm_config.parallel_config
    return bursar.key(
        model=model_config.model,
        revision=model_config.revision,
        dtype=model_config.dtype,
        quantization=model_config.quantization,
        config=model_config.compute_hash(),
        load_format=load_format,
        others=others,
        ranks=[
            parallel_state.get_tensor_model_parallel_rank(),
            parallel.tensor_parallel_size,
            parallel_state.get_pp_group().rank_in_group,
            parallel.pipeline_parallel_size,
            parallel.data_parallel_rank,
            parallel.enable_expert_parallel,
        ],
        device=torch.cuda.get_device_name(),
        versions=[vllm.__version__, torch.__version__, torch.version.cuda],
    )
