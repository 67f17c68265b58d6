"""Computes with vLLM in one process, and faults, so that its process is executed again. Prints a JSON object per image.

usage: vllm_in_place.py STATE MODEL FAULTS FORMAT

STATE is a file that outlives the images of the process. The time to the first token counts from the fault.
"""

import json
import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams  # noqa: E402


def main():
    state, model, faults, load_format = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    past = []
    if os.path.exists(state):
        with open(state, encoding="ascii") as file:
            past = json.load(file)
    begun = time.time()
    llm = LLM(
        model=model, load_format=load_format, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=8192, seed=0,
        gpu_memory_utilization=0.8, enable_prefix_caching=False, worker_extension_cls="vllm_extension.Worker",
    )  # fmt: skip
    prompt = [{"prompt_token_ids": list(range(1000, 1128))}]
    options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    llm.generate(prompt, SamplingParams(max_tokens=1, **options), use_tqdm=False)
    first = time.time()
    answer = llm.generate(prompt, SamplingParams(max_tokens=32, **options), use_tqdm=False)
    (weights,) = llm.collective_rpc("bursar_checksum")
    report = {
        "image": len(past),
        "s": round(first - past[-1], 2) if past else None,
        "since_main_s": round(first - begun, 2),
        "pid": os.getpid(),
        "checksum": weights["checksum"],
        "answer": list(answer[0].outputs[0].token_ids),
    }
    print(json.dumps(report), flush=True)
    if len(past) < faults:
        with open(state, "w", encoding="ascii") as file:
            json.dump([*past, time.time()], file)
        llm.collective_rpc("bursar_fault")


if __name__ == "__main__":
    main()
