"""Makes a Llama of random weights with a tokenizer, as a local folder for vLLM. Prints one JSON object.

usage: vllm_model.py FOLDER [--layers N] [--device cuda|cpu]

FOLDER/plain has bfloat16 weights, FOLDER/fp8 the same with FP8 layers and one scale for each. The tokenizer is a
byte-level BPE that is trained on Python files of this machine. Nothing is downloaded.
"""

import argparse
import glob
import json
import os

import tokenizers
import torch
import transformers
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, WORDS = 2048, 5632, 32, 4, 32_000
FP8_MOST = 448.0
# The size of the text that the tokenizer is trained on.
TEXT = 12 << 20
END = "</s>"


def text():
    """Returns the content of Python files."""
    size = 0
    for folder in os.path.dirname(transformers.__file__), os.path.dirname(torch.__file__):
        for path in sorted(glob.glob(f"{folder}/**/*.py", recursive=True)):
            with open(path, encoding="utf-8", errors="replace") as file:
                content = file.read()
            size += len(content)
            if size > TEXT:
                return
            yield content


def tokenizer(folders):
    """Trains a tokenizer, and writes it into the folders. Returns its number of tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=["<s>", END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(text(), trainer)
    for folder in folders:
        made.save(os.path.join(folder, "tokenizer.json"))
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as file:
            config = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": END,
                "model_max_length": 131072,
            }
            json.dump(config, file)
    return made.get_vocab_size()


def weights(layers, device):
    """Makes the weights by the names of Llama's checkpoints."""
    torch.manual_seed(7)
    head = HIDDEN // HEADS

    def random(*shape):
        return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(torch.bfloat16)

    made = {"model.embed_tokens.weight": random(WORDS, HIDDEN) * 32, "lm_head.weight": random(WORDS, HIDDEN)}
    made["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    linear = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    for layer in range(layers):
        for name, shape in linear.items():
            made[f"model.layers.{layer}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    return made


def quantized(plain):
    """Returns the weights with FP8 layers."""
    made = {}
    for name, tensor in plain.items():
        if not name.endswith("_proj.weight"):
            made[name] = tensor
            continue
        scale = tensor.abs().max().float() / FP8_MOST
        made[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        made[name + "_scale"] = scale.reshape(())
    return made


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    folders = [os.path.join(arguments.folder, name) for name in ("plain", "fp8")]
    for folder in folders:
        os.makedirs(folder, exist_ok=True)
    words = tokenizer(folders)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": arguments.layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS, "vocab_size": WORDS, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    plain = weights(arguments.layers, arguments.device)
    for folder, tensors in zip(folders, (plain, quantized(plain))):
        if tensors is not plain:
            config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
        save_file(
            {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, f"{folder}/model.safetensors", {"format": "pt"}
        )
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
    print(json.dumps({"parameters": sum(tensor.numel() for tensor in plain.values()), "words": words}))


if __name__ == "__main__":
    main()
