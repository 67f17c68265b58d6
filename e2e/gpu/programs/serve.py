"""Serves requests with a language model of `transformers` for a while. Prints one JSON object.

usage: serve.py SECONDS [--begin TIME] [--batch N]

The model is a Llama of 1.2 billion random weights in bfloat16. A request is a batch of prompts of 64 tokens, and 32 new
tokens of each. TIME is a clock time in seconds at which all servers begin, so that they compute at the same time. The
first request is repeated throughout, and each answer is compared with the first one.
"""

import argparse
import json
import time

import torch
import transformers

MIB = 1 << 20
PROMPT, ANSWER = 64, 32


def percentile(values, part):
    """Returns the smallest value that `part` hundredths of the values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * part // 100) - 1)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    parser.add_argument("--begin", type=float, default=0)
    parser.add_argument("--batch", type=int, default=4)
    arguments = parser.parse_args()
    sees = torch.cuda.mem_get_info()[1] // MIB
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 32_000, (arguments.batch, PROMPT), device="cuda")
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0, "min_new_tokens": ANSWER}
    with torch.inference_mode():
        expected = model.generate(prompt, max_new_tokens=ANSWER, **options)
        torch.cuda.synchronize()
        print("begun", flush=True)
        time.sleep(max(0.0, arguments.begin - time.time()))
        latencies, wrong, begun = [], 0, time.monotonic()
        while time.monotonic() < begun + arguments.seconds:
            at = time.monotonic()
            answer = model.generate(prompt, max_new_tokens=ANSWER, **options)
            wrong += not torch.equal(answer, expected)
            latencies.append(time.monotonic() - at)
        took = time.monotonic() - begun
    print(
        json.dumps(
            {
                "sees_mib": sees,
                "took_mib": torch.cuda.max_memory_reserved() // MIB,
                "requests": len(latencies),
                "wrong": wrong,
                "tokens_per_s": round(len(latencies) * arguments.batch * ANSWER / took, 1),
                "p50_ms": round(percentile(latencies, 50) * 1000, 1),
                "p99_ms": round(percentile(latencies, 99) * 1000, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
