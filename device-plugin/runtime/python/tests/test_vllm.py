"""The loader for vLLM against stand-ins of the parts of vLLM that it calls: it decides right, and calls as vLLM's are written.

Not a test against vLLM itself, which takes a GPU and gigabytes.
"""

import sys
import types
import unittest
from unittest import mock

import bursar
import bursar.vllm


def modules(loaders):
    """`vllm` and `torch` as far as they are called."""
    registered = {}

    class BaseModelLoader:
        def __init__(self, load_config):
            self.load_config = load_config

    def register_model_loader(name):
        return lambda loader: registered.setdefault(name, loader)

    found = {name: types.ModuleType(name) for name in (
        "torch", "torch.cuda", "torch.version", "vllm", "vllm.distributed", "vllm.distributed.parallel_state",
        "vllm.model_executor", "vllm.model_executor.model_loader", "vllm.model_executor.model_loader.base_loader",
    )}
    loader = found["vllm.model_executor.model_loader"]
    loader.register_model_loader = register_model_loader
    loader.get_model_loader = lambda config: loaders[config.load_format](config)
    found["vllm.model_executor.model_loader.base_loader"].BaseModelLoader = BaseModelLoader
    state = found["vllm.distributed.parallel_state"]
    state.get_tensor_model_parallel_rank = lambda: 0
    state.get_pp_group = lambda: types.SimpleNamespace(rank_in_group=0)
    found["vllm.distributed"].parallel_state = state
    found["vllm"].__version__ = found["torch"].__version__ = "1"
    found["torch"].cuda, found["torch"].version = found["torch.cuda"], found["torch.version"]
    found["torch.cuda"].current_device = lambda: 3
    found["torch.cuda"].get_device_name = lambda: "H200"
    found["torch.version"].cuda = "13.0"
    return found, registered


class Loader(unittest.TestCase):
    def load(self, ready, revision="main", extra=None, opening=None, committing=None):
        def inner(kind):
            def make(config):
                self.assertEqual(config.load_format, kind)
                self.inner.append((kind, config.model_loader_extra_config))
                return types.SimpleNamespace(load_model=lambda vllm_config, model_config, prefix="": f"model of {kind}")
            return make

        self.inner = []
        found, registered = modules({kind: inner(kind) for kind in ("auto", "dummy", "runai_streamer")})
        lease = mock.MagicMock(ready=ready)
        lease.__enter__.return_value = lease
        lease.__enter__.side_effect = opening
        lease.commit.side_effect = committing
        model_config = types.SimpleNamespace(
            model="m", revision=revision, dtype="bf16", quantization=None, compute_hash=lambda: "h"
        )
        parallel = types.SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_rank=0, enable_expert_parallel=False
        )
        config = types.SimpleNamespace(load_format="bursar", model_loader_extra_config=extra)
        with mock.patch.dict(sys.modules, found), mock.patch.object(bursar, "kept", return_value=lease) as kept:
            bursar.vllm.register()
            loader = registered["bursar"](config)
            vllm_config = types.SimpleNamespace(parallel_config=parallel)
            model = loader.load_model(vllm_config=vllm_config, model_config=model_config, prefix="p")
        (_, key), options = kept.call_args
        self.assertEqual(options, {"device": 3})
        self.assertEqual(config.load_format, "bursar")
        return model, lease, key

    def test_who_comes_first_loads_as_vllm_would_and_commits(self):
        model, lease, _ = self.load(False, extra={"load_format": "runai_streamer", "concurrency": 4})
        self.assertEqual(model, "model of runai_streamer")
        lease.commit.assert_called_once_with(model)
        self.assertEqual(self.inner, [("runai_streamer", {"concurrency": 4})])

    def test_who_comes_later_reads_no_weights_and_attaches(self):
        model, lease, _ = self.load(True)
        self.assertEqual(model, "model of dummy")
        lease.attach.assert_called_once_with(model)
        lease.commit.assert_not_called()

    def test_a_node_that_keeps_nothing_or_has_no_room_costs_a_worker_nothing_but_the_keeping(self):
        for why in (bursar.Refused, bursar.Busy, bursar.Quota, bursar.DriverError("no memory", 2)):
            with self.assertLogs("bursar.vllm", "WARNING"):
                self.assertEqual(self.load(False, opening=why)[0], "model of auto")
            with self.assertLogs("bursar.vllm", "WARNING"):
                self.assertEqual(self.load(False, committing=why)[0], "model of auto")
            self.assertEqual(self.inner, [("auto", {})])

    def test_another_revision_is_another_key(self):
        self.assertNotEqual(self.load(False)[2], self.load(False, revision="other")[2])
        self.assertEqual(self.load(False)[2], self.load(True)[2])


if __name__ == "__main__":
    unittest.main()
