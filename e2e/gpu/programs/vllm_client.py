"""Asks a server with vLLM's OpenAI API. Prints one JSON object.

usage: vllm_client.py ADDRESS PORT [--netns PATH] load [--requests N] [--at-once N] [--tokens N] [--seed N]
       vllm_client.py ADDRESS PORT [--netns PATH] first [--seconds N]
       vllm_client.py ADDRESS PORT [--netns PATH] answer
       vllm_client.py ADDRESS PORT [--netns PATH] cached
       vllm_client.py ADDRESS PORT [--netns PATH] post PATH [BODY]

`load` sends N requests, of which some are under way at once. `first` waits for a server, and prints the time of its
first token. `answer` prints the tokens of one fixed request. `cached` prints how many tokens of a prompt were in the KV
cache at a first and at a second request. `post` prints the response to a request of its own.
With --netns the client connects in another network namespace.
"""

import argparse
import asyncio
import http.client
import json
import os
import random
import time

PROMPT = list(range(1000, 1128))


def percentile(values, part):
    """Returns the smallest value that `part` hundredths of the values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * part // 100) - 1)]


def body(prompt, tokens, **more):
    """Returns a completion request of exactly `tokens` tokens."""
    asked = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps(asked | more).encode()


async def ask(reader, writer, content):
    """Sends one request over an open connection, and returns the status and the response."""
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    writer.write(f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    length = 0
    while (line := (await reader.readline()).strip().lower()) != b"":
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return status, await reader.readexactly(length)


async def load(arguments):
    """Sends all requests, and returns the figures."""
    rng = random.Random(arguments.seed)
    prompts = [[rng.randrange(300, 32_000) for _ in range(arguments.prompt)] for _ in range(arguments.requests)]
    latencies, answered, failed_with = [], 0, None

    async def work():
        nonlocal answered, failed_with
        reader, writer = await asyncio.open_connection(arguments.address, arguments.port)
        while prompts:
            content = body(prompts.pop(), arguments.tokens)
            at = time.monotonic()
            try:
                status, response = await asyncio.wait_for(ask(reader, writer, content), 60)
                right = status == 200 and json.loads(response)["usage"]["completion_tokens"] == arguments.tokens
                failure = None if right else f"{status}: {response[:300]!r}"
            except (OSError, ValueError, KeyError, IndexError, EOFError, TimeoutError) as error:
                failure = repr(error)
            latencies.append(time.monotonic() - at)
            if failure is None:
                answered += 1
                continue
            failed_with = failure
            writer.close()
            reader, writer = await asyncio.open_connection(arguments.address, arguments.port)
        writer.close()

    begun = time.monotonic()
    ended = await asyncio.gather(*(work() for _ in range(arguments.at_once)), return_exceptions=True)
    took = time.monotonic() - begun
    failed_with = next((repr(error) for error in ended if isinstance(error, BaseException)), failed_with)
    return {
        "requests": arguments.requests,
        "answered": answered,
        "failure": failed_with,
        "tokens_per_s": round(answered * arguments.tokens / took, 1),
        "p50_ms": round(percentile(latencies or [0], 50) * 1000, 1),
        "p99_ms": round(percentile(latencies or [0], 99) * 1000, 1),
        "s": round(took, 2),
    }


def post(arguments, path, content, seconds):
    """Sends one request on a connection of its own, and returns the status and the response."""
    connection = http.client.HTTPConnection(arguments.address, arguments.port, timeout=seconds)
    try:
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", "replace")
    finally:
        connection.close()


def cached(arguments):
    """Asks twice, and returns the number of tokens of the prompt that each request found in the KV cache."""
    found = []
    for _ in range(2):
        status, text = post(arguments, "/v1/completions", body(list(range(5000, 5512)), 1), 60)
        usage = json.loads(text)["usage"] if status == 200 else {}
        found.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return {"first": found[0], "second": found[1]}


def first(arguments):
    """Asks until a server answers, and returns the clock time of its first token."""
    deadline, failure = time.monotonic() + arguments.seconds, None
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(arguments.address, arguments.port, timeout=max(1.0, deadline - time.monotonic()))
        try:
            connection.request("POST", "/v1/completions", body(PROMPT, 1, stream=True), {"Content-Type": "application/json"})
            response = connection.getresponse()
            line = response.readline() if response.status == 200 else b""
            if line.startswith(b"data: {") and b'"choices"' in line:
                return {"at": time.time()}
            failure = f"{response.status}: {(line or response.read(300))!r}"
        except (OSError, http.client.HTTPException) as error:
            failure = repr(error)
        finally:
            connection.close()
        time.sleep(0.02)
    return {"at": None, "failure": failure}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("--netns")
    commands = parser.add_subparsers(dest="command", required=True)
    of_load = commands.add_parser("load")
    for name, value in {"requests": 1000, "at-once": 32, "tokens": 64, "prompt": 128, "seed": 1}.items():
        of_load.add_argument(f"--{name}", type=int, default=value)
    commands.add_parser("first").add_argument("--seconds", type=float, default=120)
    commands.add_parser("answer")
    commands.add_parser("cached")
    of_post = commands.add_parser("post")
    of_post.add_argument("path")
    of_post.add_argument("body", nargs="?", default="")
    of_post.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    if arguments.netns:
        descriptor = os.open(arguments.netns, os.O_RDONLY)
        os.setns(descriptor, os.CLONE_NEWNET)
        os.close(descriptor)
    if arguments.command == "load":
        report = asyncio.run(load(arguments))
    elif arguments.command == "first":
        report = first(arguments)
    elif arguments.command == "cached":
        report = cached(arguments)
    elif arguments.command == "answer":
        status, text = post(arguments, "/v1/completions", body(PROMPT, 32, return_token_ids=True), 60)
        choice = json.loads(text)["choices"][0] if status == 200 else {}
        report = {"status": status, "tokens": choice.get("token_ids"), "text": text[:300]}
    else:
        status, text = post(arguments, arguments.path, arguments.body.encode(), arguments.seconds)
        report = {"status": status, "text": text[:2000]}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
