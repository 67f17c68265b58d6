"""The loader for vLLM against stand-ins of the parts of vLLM that it calls: it decides right, and calls as vLLM's are written.

e2e/gpu/against_vllm.py holds it against vLLM itself, which takes gigabytes.
"""

import inspect
import json
import os
import sys
import tempfile
import types
import unittest
from unittest import mock

import bursar
import bursar.vllm
import standins
from standins import Linear, Module, Parameter, Tensor


class Space(types.SimpleNamespace):
    """A configuration of vLLM's."""

    def compute_hash(self):
        return json.dumps(vars(self), default=str)


class Lease:
    """Retained memory as the package returns it."""

    content = None
    bytes = 4096

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def ready(self):
        return self.content is not None

    def commit(self, content):
        self.content = {name: Tensor(tensor.value, "cuda", True, tensor.address) for name, tensor in content.items()}
        return self.tensors(None)

    def discard(self):
        self.content = None

    def tensors(self, library):
        return {name: Tensor(tensor.value, "cuda", True, tensor.address) for name, tensor in self.content.items()}


def create(vllm_config, prefix):
    """A model as vLLM makes it: each of its layers is put on a list by its name, which may be there once, and a rotary
    embedding is that of an earlier model."""
    layers = vllm_config.compilation_config.static_forward_context
    if prefix + "attention" in layers:
        raise ValueError("Duplicate layer name")
    attention = Module(weight=Parameter("empty"), quant_method=Linear(), k_scale=Parameter("empty"))
    attention._buffers["_k_scale"] = Tensor(1.0)
    attention.kv_cache, attention._k_scale_float, attention._k_scale_cpu = Tensor(None), 1.0, Tensor(1.0)
    attention.weight.weight_loader = len
    layers[prefix + "attention"] = attention
    ropes = sys.modules["vllm.model_executor.layers.rotary_embedding"]._ROPE_DICT
    if "rope" not in ropes:
        ropes["rope"] = Module()
        ropes["rope"]._buffers["cosines"] = Tensor(0.5)
    model = Module(attention=attention, rope=ropes["rope"], head=Module(weight=attention.weight, quant_method=Linear()))
    model.has_own_lm_head = False
    return model


def process(model, processed):
    """Layers process their weights: most where they were not processed, what is no tensor always."""
    layer = model.attention
    if not processed:
        layer.weight.fill_("packed " + layer.weight.value)
        layer.weight.is_shuffled = True
        layer._buffers["_k_scale"].fill_(layer.k_scale.value)
    if not processed or "table" not in layer._parameters:
        layer._parameters["table"] = Parameter("of " + layer.weight.value)
    else:
        layer.table.fill_("of " + layer.weight.value)
    layer._buffers["_k_scale"].fill_(layer._k_scale.value)
    del layer._parameters["k_scale"]
    layer._k_scale_float = layer._k_scale.value
    layer._k_scale_cpu = Tensor(layer._k_scale.value, "cpu")


def safetensors(data):
    """The bytes of a checkpoint with one tensor of these bytes."""
    tensor = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + data


class Loader(unittest.TestCase):
    def setUp(self):
        self.inner, self.lease, self.opening, self.hide, self.older = [], Lease(), None, None, False
        # Of each load, whether weights were retained beside it.
        self.beside = []
        self.world = types.SimpleNamespace(rank_in_group=0, world_size=1)
        self.cache = types.SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[])
        self.parallel = types.SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_rank=0, data_parallel_size=1,
            enable_expert_parallel=False, expert_placement_strategy="linear", enable_eplb=False,
        )
        self.model_config = Space(
            model="m", revision="main", dtype="bf16", quantization=None, enable_sleep_mode=False,
            hf_config=types.SimpleNamespace(_commit_hash="1"),
        )
        self.vllm_config = types.SimpleNamespace(
            model_config=self.model_config, parallel_config=self.parallel, cache_config=self.cache, kernel_config=Space(moe="auto"),
            attention_config=Space(backend="auto"), weight_transfer_config=None, device_config=types.SimpleNamespace(device="cuda"),
        )

    def created(self, vllm_config, prefix):
        model = create(vllm_config, prefix)
        if self.hide is not None:
            self.hide(model)
        return model

    def load(self, extra=None):
        """What a new process does, from the registration on; the model, and what it says it has from elsewhere."""
        self.vllm_config.compilation_config = types.SimpleNamespace(static_forward_context={}, static_all_moe_layers=[])

        def inner(kind):
            def load_model(vllm_config, model_config, prefix=""):
                self.beside.append(self.lease.ready)
                model = self.created(vllm_config, prefix)
                model.attention.weight.fill_("weights")
                model.attention.k_scale.fill_(0.25)
                model.has_own_lm_head = True
                process(model, False)
                return model.eval()

            def make(config):
                self.assertEqual(config.load_format, kind)
                self.inner.append((kind, config.model_loader_extra_config))
                return types.SimpleNamespace(load_model=load_model)

            return make

        loaders = {kind: inner(kind) for kind in ("auto", "runai_streamer")}
        found, registered = standins.modules(loaders, self.created, process, self.world)
        if self.older:
            standins.make_older(found, self.created, process)
        config = types.SimpleNamespace(load_format="bursar", model_loader_extra_config=extra)
        answer = {"side_effect": self.opening} if self.opening else {"return_value": self.lease}
        with mock.patch.dict(sys.modules, found), mock.patch.object(bursar, "retained", **answer) as self.retained:
            bursar.vllm.register()
            self.loader = registered["bursar"]
            loader = self.loader(config)
            external = loader.get_external_weight_memory(self.vllm_config)
            model = loader.load_model(vllm_config=self.vllm_config, model_config=self.model_config)
        self.assertEqual(config.load_format, "bursar")
        return model, external

    def key(self, extra=None):
        self.load(extra)
        return self.retained.call_args.args[1]

    def assert_as_loaded(self, model):
        layer = model.attention
        self.assertEqual((layer.weight.value, layer.table.value), ("packed weights", "of packed weights"))
        self.assertEqual((layer._k_scale.value, layer._k_scale_float, layer._k_scale_cpu.value), (0.25, 0.25, 0.25))
        self.assertEqual((layer._k_scale.device.type, layer._k_scale_cpu.device.type), ("cuda", "cpu"))
        self.assertEqual((model.rope.cosines.value, model.rope.cosines.device.type), (0.5, "cuda"))
        self.assertIs(model.head.weight, layer.weight)
        self.assertIs(layer.weight.weight_loader, len)
        self.assertTrue(layer.weight.is_shuffled and model.evaluated and model.has_own_lm_head)
        self.assertNotIn("k_scale", layer._parameters)

    def test_every_method_that_vllm_has_takes_what_vllms_takes(self):
        self.load()
        for name in ("get_external_weight_memory", "download_model", "load_weights", "load_model"):
            signature = inspect.signature(getattr(self.loader, name))
            self.assertEqual(signature, inspect.signature(getattr(standins.BaseModelLoader, name)), name)
        self.assertFalse(inspect.isabstract(self.loader))

    def test_first_worker_loads_as_vllm_would_and_has_retained_parameters(self):
        model, external = self.load({"load_format": "runai_streamer", "concurrency": 4})
        self.assertIn(("runai_streamer", {"concurrency": 4}), self.inner)
        self.assertEqual(external, 0)
        self.assert_as_loaded(model)
        self.assertTrue(model.attention.weight.retained and model.attention.table.retained)

    def test_who_comes_later_has_the_same_without_loading_and_says_that_it_has_the_memory_already(self):
        self.load()
        with self.assertNoLogs("bursar.vllm"):
            model, external = self.load()
        self.assertEqual(external, 4096)
        self.assert_as_loaded(model)
        self.assertTrue(model.attention.weight.retained and model.attention.table.retained)
        self.assertIs(self.vllm_config.compilation_config.static_forward_context["attention"], model.attention)

    def test_what_vllm_writes_to_while_it_serves_is_the_workers_own(self):
        for _ in range(2):
            model, _ = self.load()
            model.attention._k_scale.fill_(2.0)
            with self.assertRaises(standins.Fault):
                model.attention.weight.fill_("other")

    def hide_a_tensor(self, model):
        model.attention.impl = types.SimpleNamespace(slopes=[Tensor(1.0)])

    def assert_loaded_alone(self, model):
        self.assert_as_loaded(model)
        self.assertFalse(model.attention.weight.retained or self.lease.ready or any(self.beside))
        self.assertEqual(self.vllm_config.compilation_config.static_forward_context, {"attention": model.attention})

    def test_weights_that_cannot_be_attached_are_given_up_before_they_are_loaded(self):
        self.load()
        self.hide = self.hide_a_tensor
        with self.assertLogs("bursar.vllm", "WARNING") as logs:
            model, _ = self.load()
        self.assertIn("impl", logs.output[0])
        self.assert_loaded_alone(model)

    def test_weights_that_cannot_be_attached_are_loaded_though_nobody_takes_them_back(self):
        self.load()
        self.hide = self.hide_a_tensor
        with self.assertLogs("bursar.vllm", "WARNING"), mock.patch.object(Lease, "discard", side_effect=bursar.Busy):
            self.assert_as_loaded(self.load()[0])

    def test_a_model_that_could_not_be_attached_is_not_retained(self):
        self.hide = self.hide_a_tensor
        for _ in range(2):
            with self.assertLogs("bursar.vllm", "WARNING") as logs:
                model, external = self.load()
            self.assertIn("impl", logs.output[0])
            self.assertEqual(external, 0)
            self.assert_loaded_alone(model)

    def test_what_models_share_is_made_anew_for_the_one_that_is_tried(self):
        self.hide = lambda model: vars(model.rope).setdefault("hidden", [Tensor(1.0)])
        with self.assertLogs("bursar.vllm", "WARNING"):
            model, _ = self.load()
        self.assert_loaded_alone(model)
        self.assertFalse(model.rope.hidden[0].is_meta)

    def test_a_model_that_is_loaded_shares_nothing_with_one_without_memory(self):
        def fail(model):
            if model.attention.weight.is_meta:
                raise RuntimeError

        self.load()
        self.hide = fail
        with self.assertLogs("bursar.vllm", "WARNING"):
            self.assert_loaded_alone(self.load()[0])

    def test_whatever_fails_before_a_retained_tensor_is_placed_the_worker_starts(self):
        for why in (OSError, AttributeError, ImportError, RuntimeError, ValueError):
            self.opening = why
            with self.assertLogs("bursar.vllm", "WARNING") as logs:
                model, external = self.load()
            self.assertIn("Traceback", logs.output[0])
            self.assertEqual(external, 0)
            self.assert_loaded_alone(model)
            self.opening = None
            for holder, step in ((Lease, "commit"), (bursar.vllm, "_refuse_unknown"), (bursar.vllm, "_state")):
                with self.assertLogs("bursar.vllm", "WARNING"), mock.patch.object(holder, step, side_effect=why):
                    self.assert_loaded_alone(self.load()[0])

    def test_worker_starts_without_retained_memory_when_a_link_dangles(self):
        with tempfile.TemporaryDirectory() as self.model_config.model:
            os.symlink("nothing", os.path.join(self.model_config.model, "model.safetensors"))
            with self.assertLogs("bursar.vllm", "WARNING"):
                self.assert_loaded_alone(self.load()[0])

    def test_a_model_that_has_some_of_the_retained_tensors_is_not_served_with(self):
        place = bursar.vllm._modules.place

        def fail(model, tensors, kinds):
            place(model, tensors, kinds)
            # Only one that vLLM loaded has it by now.
            if model.has_own_lm_head:
                raise TypeError

        with mock.patch.object(bursar.vllm._modules, "place", fail), self.assertRaises(TypeError):
            self.load()

    def test_worker_starts_when_the_node_retains_nothing_or_has_no_room(self):
        for why in (bursar.Refused, bursar.Busy, bursar.Quota, bursar.DriverError("no memory", 2)):
            self.opening = why
            with self.assertLogs("bursar.vllm", "WARNING"):
                self.assert_as_loaded(self.load()[0])
            self.assertLess(self.retained.call_args.kwargs["timeout"], 30)
            self.opening = None
            with self.assertLogs("bursar.vllm", "WARNING"), mock.patch.object(Lease, "commit", side_effect=why):
                self.assert_as_loaded(self.load()[0])

    def test_what_vllm_cannot_make_of_processed_weights_is_not_retained(self):
        def other_method(model):
            model.head.quant_method = standins.QuantizeMethodBase()

        def own_hook(model):
            model.process_weights_after_loading = print

        def offloaded(model):
            model.attention._parameters["offloaded"] = Parameter("weights", "cpu")

        for self.hide in (other_method, own_hook, offloaded):
            with self.assertLogs("bursar.vllm", "WARNING"):
                self.load()
            self.assertFalse(self.lease.ready)

    def test_what_writes_to_weights_is_given_no_retained_ones(self):
        self.load()
        for holder, name in (
            (self.model_config, "enable_sleep_mode"),
            (self.parallel, "enable_eplb"),
            (self.vllm_config, "weight_transfer_config"),
        ):
            before = getattr(holder, name)
            setattr(holder, name, True)
            with self.assertLogs("bursar.vllm", "WARNING"):
                model, external = self.load()
            setattr(holder, name, before)
            self.assertEqual((model.attention.weight.retained, external), (False, 0))

    def test_older_vllm_attaches_unquantised_weights_only(self):
        def unquantised(model):
            model.attention.quant_method = model.head.quant_method = standins.UnquantizedLinearMethod()

        def quantised(model):
            model.attention.quant_method = standins.QuantizeMethodBase()

        self.older, self.hide = True, unquantised
        self.load()
        model, _ = self.load()
        self.assert_as_loaded(model)
        self.assertTrue(model.attention.weight.retained and self.lease.ready)
        self.lease, self.hide = Lease(), quantised
        with self.assertLogs("bursar.vllm", "WARNING"):
            self.assert_loaded_alone(self.load()[0])

    def test_whatever_decides_what_tensors_are_is_in_the_key(self):
        first = self.key()
        self.assertEqual(first, self.key())
        for holder, name in (
            (self.model_config, "revision"),
            (self.model_config.hf_config, "_commit_hash"),
            (self.cache, "cache_dtype"),
            (self.vllm_config.kernel_config, "moe"),
            (self.vllm_config.attention_config, "backend"),
            (self.parallel, "expert_placement_strategy"),
            (self.world, "rank_in_group"),
            (self.world, "world_size"),
        ):
            before = getattr(holder, name)
            setattr(holder, name, "other")
            self.assertNotEqual(first, self.key(), name)
            setattr(holder, name, before)
        extras = ({"load_format": "runai_streamer"}, {"pattern": "first"}, {"pattern": "second"})
        self.assertEqual(len({first, *map(self.key, extras)}), 4)

    def keys_of_files(self, name, *files):
        """Returns the key of each checkpoint of one file, under the same path: of its content and time."""
        with tempfile.TemporaryDirectory() as self.model_config.model:
            path = os.path.join(self.model_config.model, name)
            open(os.path.join(self.model_config.model, "other.pt"), "w", encoding="ascii").close()
            for content, at in files:
                with open(path, "wb") as file:
                    file.write(content)
                os.utime(path, (at, at))
                yield self.key()

    def test_checkpoint_keeps_its_key_when_it_is_downloaded_again(self):
        for name in ("model.safetensors", "model.bin", "model.gguf"):
            first, again = self.keys_of_files(name, (safetensors(bytes(20_000)), 1), (safetensors(bytes(20_000)), 2))
            self.assertEqual(first, again, name)

    def test_checkpoint_has_another_key_when_its_content_is_other(self):
        for name, wrap in (("model.safetensors", safetensors), ("model.bin", bytes), ("config.json", bytes)):
            for content in (b"weights", bytes(100_000)):
                middle = len(content) // 2
                other = content[:middle] + b"!" + content[middle + 1 :]
                first, second = self.keys_of_files(name, (wrap(content), 1), (wrap(other), 1))
                self.assertNotEqual(first, second, name)

    def test_checkpoint_of_many_tensors_is_sampled_a_bounded_number_of_times(self):
        spans = {str(number): {"data_offsets": [8 * number, 8 * number + 8]} for number in range(10_000)}
        header = json.dumps(spans).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(80_000)
        with mock.patch("os.pread", wraps=os.pread) as read:
            list(self.keys_of_files("model.safetensors", (content, 1)))
        # A load computes two keys, each from half of the samples for this file, and 64 blocks of the other file.
        self.assertLessEqual(read.call_count, 2 * (1 + 512 + 64))
        self.assertGreater(read.call_count, 512)

    def test_worker_loads_alone_when_the_content_is_not_known(self):
        self.model_config.hf_config._commit_hash = None
        with self.assertLogs("bursar.vllm", "WARNING") as logs:
            self.assert_loaded_alone(self.load()[0])
        self.assertIn("no commit", logs.output[0])
        with tempfile.TemporaryDirectory() as self.model_config.model:
            open(os.path.join(self.model_config.model, "config.json"), "w", encoding="ascii").close()
            with self.assertLogs("bursar.vllm", "WARNING"):
                self.assert_loaded_alone(self.load()[0])


if __name__ == "__main__":
    unittest.main()
