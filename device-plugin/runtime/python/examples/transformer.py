"""Retains the weights of a small transformer across SIGKILL and across an illegal address.

usage: transformer.py [--socket PATH] [--layers N] [--width N] [--then exit|kill|fault]

Makes a decoder in PyTorch, takes its weights from retained memory or makes and commits them, computes, and prints one line
of JSON. Then it ends by itself, kills itself, or writes to a weight, which is an illegal address: retained memory is
read-only, and the fault poisons this process alone. Run it again: the weights are there, and the answer is the same to the
bit. So are a transposed weight, a part of a buffer and a scalar, each with its strides.
"""

import argparse
import json
import os
import signal
import time

STARTED = time.monotonic()

import torch  # noqa: E402
from torch import nn  # noqa: E402

import bursar  # noqa: E402

VOCABULARY = 32_000


class Block(nn.Module):
    """One layer of a decoder."""

    def __init__(self, width):
        super().__init__()
        self.heads = width // 64
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, 64)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """A decoder whose output shares its weights with the embedding: one tensor with two names."""

    def __init__(self, layers, width):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Views(nn.Module):
    """Tensors that reach parts of the same memory in other orders, and one without dimensions."""

    def __init__(self):
        super().__init__()
        base = torch.arange(10_000, dtype=torch.float32)
        self.weight = nn.Parameter(base.view(100, 100).T)
        self.register_buffer("whole", base)
        self.register_buffer("part", base[1:-1:3])
        self.register_buffer("scalar", torch.tensor(3.5, dtype=torch.float64))


def views_come_back(socket):
    """Whether retained tensors have the values, strides and distances of those that they were made of."""
    with torch.device("cuda"):
        made = Views()
    expected = described(made)
    with bursar.retained("views", bursar.key(torch=torch.__version__), socket=socket) as lease:
        if lease.ready:
            with torch.device("meta"):
                made = Views()
            lease.attach(made)
        else:
            lease.commit(made)
    return described(made) == expected


def described(views):
    """All that is to come back of each tensor."""
    start = views.whole.data_ptr()
    shared = {"weight": views.weight.data_ptr() - start, "part": views.part.data_ptr() - start}
    return shared, {
        name: (tensor.dtype, tensor.stride(), tensor.tolist()) for name, tensor in views.state_dict().items()
    }


def load(model):
    """Stands for reading a checkpoint: the same weights each time."""
    model.to_empty(device="cuda")
    model.head.weight = model.embedding.weight
    generator = torch.Generator("cuda").manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--socket")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--then", choices=["exit", "kill", "fault"], default="exit")
    arguments = parser.parse_args()

    torch.cuda.init()
    torch.empty(1, device="cuda")
    context = time.monotonic()
    with torch.device("meta"):
        model = Decoder(arguments.layers, arguments.width).to(torch.bfloat16)
    made = time.monotonic()
    key = bursar.key(layers=arguments.layers, width=arguments.width, seed=7, torch=torch.__version__)
    with bursar.retained("transformer", key, socket=arguments.socket) as lease:
        found = lease.ready
        if found:
            lease.attach(model)
        else:
            lease.commit(load(model))
        generation = lease.generation
    attached = time.monotonic()
    with torch.no_grad():
        tokens = torch.arange(256, device="cuda").view(2, 128) * 97 % VOCABULARY
        answer = model(tokens).float()
        digest = answer.double().sum().item()
    done = time.monotonic()
    milliseconds = lambda start, end: round((end - start) * 1000, 1)
    print(
        json.dumps(
            {
                "found": found,
                "generation": generation,
                "answer": digest.hex(),
                "views": views_come_back(arguments.socket),
                "tied": model.head.weight.data_ptr() == model.embedding.weight.data_ptr(),
                "mib": sum(p.numel() * p.element_size() for p in model.parameters()) >> 20,
                "context_ms": milliseconds(STARTED, context),
                "model_ms": milliseconds(context, made),
                "weights_ms": milliseconds(made, attached),
                "compute_ms": milliseconds(attached, done),
            }
        ),
        flush=True,
    )
    if arguments.then == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if arguments.then == "fault":
        try:
            model.blocks[0].up.weight.data.fill_(1)
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(json.dumps({"fault": str(error).splitlines()[0]}), flush=True)
            os._exit(3)
        raise SystemExit("a weight could be written")


if __name__ == "__main__":
    main()
