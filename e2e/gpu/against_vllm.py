"""Checks the loader of the package bursar with vLLM itself: vLLM loads small models, is killed, and loads them again.

usage: against_vllm.py PROGRAMS [--simulated | --gpu UUID] [--python PATH]

PROGRAMS is a folder with bursar-fdstore, bursar-provisioner, fake_agent and the wheel of the package bursar, as for retained.py.
With --simulated the folder also has simgpu, libbursar_sim_cuda.so and libbursar_sim_nvml.so, and no GPU is needed.
PATH is a Python that has vLLM 0.33.0, or 0.26.0, where the row of the KV cache's scales fails. Without PATH the script
makes an environment in PROGRAMS/vllm of the packages in against_vllm.txt, the imports of vLLM's loaders, of about 5 GB.
CI does not run this script. It prints one table, and exits with 1 if a row fails.
"""

import argparse
import glob
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import zipfile

from retained import Machine
from table import Table

HERE = os.path.dirname(os.path.abspath(__file__))
WIDTH, INNER, WORDS, LAYERS = 64, 128, 512, 2
# Bytes beside the tensor in a file of torch.save.
FILE = 4096
SIMULATED = "GPU-00000000-0000-0000-0000-000000000001"
LINEAR = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH // 2, WIDTH),
    "self_attn.v_proj": (WIDTH // 2, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}


def write_model(folder, tied=False, head=True, scales=False, seed=1):
    """Writes a Llama of two layers with random weights. `tied` makes its output use the embedding's weights."""
    rng = random.Random(seed)

    def tensor(*shape):
        count = shape[0] * (shape[1] if shape[1:] else 1)
        # The upper half of a float is a bfloat16.
        return "BF16", shape, b"".join(struct.pack("<f", rng.gauss(0, 0.1))[2:] for _ in range(count))

    tensors = {"model.embed_tokens.weight": tensor(WORDS, WIDTH), "model.norm.weight": tensor(WIDTH)}
    if head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] if tied else tensor(WORDS, WIDTH)
    for layer in range(LAYERS):
        path = f"model.layers.{layer}"
        for name, shape in LINEAR.items():
            tensors[f"{path}.{name}.weight"] = tensor(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{path}.{name}.weight"] = tensor(WIDTH)
        if scales:
            tensors[f"{path}.self_attn.k_scale"] = ("F32", (), struct.pack("<f", 0.25))
            tensors[f"{path}.self_attn.v_scale"] = ("F32", (), struct.pack("<f", 0.5))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }
    if scales:
        ignored = [f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in LINEAR]
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ignored}
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + len(data))}
        end += len(data)
    text = json.dumps(header).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


class Trial:
    """Loads models, each in a process of its own."""

    def __init__(self, machine, python, site, device):
        self.machine, self.python, self.site, self.device = machine, python, site, device

    def load(self, model, load_format="bursar", then="exit", engine=None, socket=None):
        """Loads a model in a process, and returns its exit and its output."""
        command = [self.python, os.path.join(HERE, "against_vllm_worker.py"), socket or self.machine.socket, model]
        command += ["--device", self.device, "--format", load_format, "--then", then, "--engine", json.dumps(engine or {})]
        path = os.pathsep.join([self.site, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "WARNING"}
        output = subprocess.run(command, check=False, text=True, env=environment, capture_output=True, timeout=300)
        lines = [line for line in output.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise RuntimeError(f"{model} was not loaded ({output.returncode}):\n{output.stderr[-3000:]}")
        return output.returncode, json.loads(lines[-1])


def again(trial, table, what, model, engine=None):
    """Loads a model without retained memory, then by two provisioners, the first of which is killed."""
    _, plain = trial.load(model, "auto", engine=engine)
    ended, first = trial.load(model, then="kill", engine=engine)
    _, second = trial.load(model, engine=engine)
    right = [ended == -signal.SIGKILL, second["external"] > 0 == first["external"], not first["log"] and not second["log"]]
    for loaded in (first, second):
        right += [loaded[part] == plain[part] for part in ("tensors", "scales", "classes", "marked")]
        right.append(loaded["read_only"] in (None, loaded["parameters"]))
    wrong = False if all(right) else json.dumps([right, first["log"], second["log"]])
    found = f"{len(second['parameters'])} parameters retained"
    table.add(f"{what}: a worker after SIGKILL", found, "all as vLLM loads them", wrong=wrong)
    return second


def run(trial, table, folder):
    """Runs all rows."""
    model = lambda name, **how: write_model(os.path.join(folder, name), **how) or os.path.join(folder, name)
    plain = model("plain")
    second = again(trial, table, "Llama", plain)
    chosen = [second["loader"], second["differ"]]
    table.add("vLLM's choice; methods that differ", chosen, "RetainedModelLoader, none", wrong=chosen != ["RetainedModelLoader", []])
    ended, _ = trial.load(plain, then="write")
    fault = ended == -signal.SIGSEGV if trial.device == "host" else ended == 3
    table.add("a write to a retained weight", f"ends with {ended}", "a fault", wrong=not fault)
    write_model(plain, seed=2)
    again(trial, table, "another checkpoint under the same path", plain)
    again(trial, table, "tied weights", model("tied", tied=True, head=False))
    tied = again(trial, table, "tied weights that the checkpoint repeats", model("repeated", tied=True))["storages"]
    larger = [name for name, (own, whole, _, saved) in tied.items() if whole != own or saved > own + FILE]
    places = {tuple(tied[name][1:3]) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    found = f"{len(larger)} larger storages or files, {len(places)} storages of the tied weights"
    table.add("storages", found, "0, 1", wrong=larger != [] or len(places) != 1)
    scaled = again(trial, table, "scales of the KV cache", model("scaled", scales=True), {"kv_cache_dtype": "fp8"})
    scale = scaled["scales"][0]
    table.add("the scale that attention has on the host", scale, "0.25", wrong=scale != [0.25, "cpu", 0.25])
    _, alone = trial.load(plain, socket=os.path.join(folder, "nobody"))
    wrong = len(alone["log"]) != 1 or alone["external"] != 0
    table.add("no agent", "; ".join(alone["log"])[:80], "the model, and a warning", wrong=wrong)


def environment(programs):
    """Returns a Python with the imports of vLLM's loaders, whose environment is made once."""
    folder = os.path.join(programs, "vllm")
    python = os.path.join(folder, "bin/python")
    if not os.path.exists(os.path.join(folder, "whole")):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "-r"]
        subprocess.run([*install, os.path.join(HERE, "against_vllm.txt")], check=True)
        open(os.path.join(folder, "whole"), "w", encoding="ascii").close()
    return python


def simulate(machine, folder):
    """Sets up a simulated GPU, which the programs and the provisioners use as a driver."""
    config = os.path.join(folder, "lab.toml")
    with open(config, "w", encoding="ascii") as file:
        file.write(f'[[gpu]]\nname = "NVIDIA H200"\nuuid = "{SIMULATED}"\nmemory = "16Gi"\nminor = 0\n')
    lab = os.path.join(folder, "lab")
    command = [machine.program("simgpu"), "init", "--dir", lab, "--config", config]
    for library in ("cuda", "nvml"):
        command += ["--lib", machine.program(f"libbursar_sim_{library}.so")]
    subprocess.run(command, check=True)
    (driver,) = glob.glob(os.path.join(lab, "driver/**/libcuda.so.1"), recursive=True)
    os.environ |= {"SIMGPU_DIR": lab, "SIMGPU_DEV": os.path.join(lab, "dev"), "LD_LIBRARY_PATH": os.path.dirname(driver)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--gpu", help="its UUID; the first that nvidia-smi lists")
    parser.add_argument("--python", help="a Python with vLLM 0.33.0")
    options = parser.parse_args()
    python = options.python or environment(options.programs)
    if options.simulated:
        options.gpu = SIMULATED
    elif options.gpu is None:
        command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        options.gpu = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.split()[0]
    machine, table = Machine(options.programs, options.gpu), Table("what", "as it is", "as it must be")
    (wheel,) = glob.glob(machine.program("bursar-*.whl"))
    with tempfile.TemporaryDirectory() as folder:
        if options.simulated:
            simulate(machine, folder)
        site = os.path.join(folder, "site")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        with machine.fake_agent():
            run(Trial(machine, python, site, "host" if options.simulated else "cuda"), table, folder)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
