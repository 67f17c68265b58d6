"""Runs one PyTorch process for each GPU of the container over NCCL. Prints one JSON object.

usage: ranks.py reduce|ddp|tensor|symmetric|greedy|refused [SECONDS]

`reduce` does nothing but the all-reduce that every mode but `refused` measures. `ddp` trains a model for SECONDS and
compares its weights on all ranks. `tensor` splits two matrix products over the ranks and compares the result with the
whole product. `greedy` lets rank 0 allocate until it is refused, and all ranks continue. `symmetric` reads the memory
of the next rank by torch's symmetric memory, and adds all ranks' in one kernel. `refused` lets the refusal end the last
rank, and prints how each rank ended and after how many seconds. (Rank 0 has the store through which NCCL's watchdogs
talk.)
"""

import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.multiprocessing as multiprocessing

MIB = 1 << 20
STEP = 64 * MIB
TIMEOUT = datetime.timedelta(seconds=30)
# After this time NCCL's watchdog gives up a collective call that a rank does not join.
ABANDONED = datetime.timedelta(seconds=10)
# The main process kills a rank that still runs after so many seconds: the watchdog first waits for a dump of its state.
LONGEST_END = 120


def bandwidth(rank, world):
    """Returns the bus bandwidth of an all-reduce of 256 MiB in GB/s, the median of 20."""
    data = torch.ones(64 * MIB, dtype=torch.float32, device=rank)
    times = []
    for _ in range(25):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        dist.all_reduce(data, op=dist.ReduceOp.AVG)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    seconds = sorted(times[5:])[10] / 1000
    assert data[12345].item() == 1.0
    return 2 * (world - 1) / world * data.numel() * 4 / seconds / 1e9


def train(rank, world, seconds):
    """Trains with DDP, and returns the steps and in how many of them the ranks' weights differed."""
    torch.manual_seed(7)
    layers = [torch.nn.Linear(2048, 2048), torch.nn.ReLU()] * 4
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    steps, wrong, deadline = 0, 0, time.monotonic() + seconds
    more = torch.ones(1, device=rank)
    while more.item():
        optimizer.zero_grad()
        model(torch.randn(512, 2048, device=rank)).square().mean().backward()
        optimizer.step()
        sums = torch.stack([weight.detach().double().sum() for weight in model.parameters()])
        most, least = sums.clone(), sums.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        wrong += bool((most != least).any())
        steps += 1
        # Ranks end together, or one of them would wait in a collective call.
        more.fill_(time.monotonic() < deadline)
        dist.broadcast(more, 0)
    return {"steps": steps, "wrong": wrong}


def split(rank, world, seconds):
    """Computes a column-split and a row-split product, and returns the rounds with a wrong result."""
    generator = torch.Generator(device="cpu").manual_seed(11)
    x, a, b = (torch.randn(size, size, generator=generator, dtype=torch.float64).to(rank) for size in (2048,) * 3)
    whole = (x @ a).relu() @ b
    part = 2048 // world
    columns, rows = a[:, rank * part : (rank + 1) * part].contiguous(), b[rank * part : (rank + 1) * part].contiguous()
    rounds, wrong, deadline = 0, 0, time.monotonic() + seconds
    more = torch.ones(1, device=rank)
    while more.item():
        sums = (x @ columns).relu() @ rows
        dist.all_reduce(sums)
        wrong += ((sums - whole).norm() / whole.norm()).item() > 1e-12
        rounds += 1
        more.fill_(time.monotonic() < deadline)
        dist.broadcast(more, 0)
    return {"rounds": rounds, "wrong": wrong}


def share(rank, world, seconds):
    """Reads the next rank's symmetric memory and adds all ranks', and returns the rounds with a wrong result."""
    group = dist.group.WORLD.group_name
    count = 4 * MIB
    block = symmetric_memory.empty(count, dtype=torch.float32, device=f"cuda:{rank}")
    handle = symmetric_memory.rendezvous(block, group)
    neighbour = handle.get_buffer((rank + 1) % world, (count,), torch.float32)
    rounds, wrong, deadline = 0, 0, time.monotonic() + seconds
    more = torch.ones(1, device=rank)
    while more.item():
        block.fill_(rounds * world + rank)
        handle.barrier()
        wrong += not bool((neighbour == rounds * world + (rank + 1) % world).all())
        total = torch.ops.symm_mem.one_shot_all_reduce(block, "sum", group)
        wrong += not bool((total == sum(rounds * world + other for other in range(world))).all())
        handle.barrier()
        rounds += 1
        more.fill_(time.monotonic() < deadline)
        dist.broadcast(more, 0)
    return {"rounds": rounds, "wrong": wrong}


def refuse(rank, world, answers):
    """Lets the last rank allocate until the refusal ends it, while the others wait for it in a collective call."""
    dist.all_reduce(torch.ones(1, device=rank))
    torch.cuda.synchronize()
    answers.put({"rank": rank})
    held = []
    while rank == world - 1:
        held.append(torch.empty(STEP, dtype=torch.uint8, device="cuda"))
    dist.all_reduce(torch.ones(1, device=rank))
    torch.cuda.synchronize()


def take():
    """Allocates until the driver refuses, and returns the MiB that were allocated."""
    held = []
    try:
        while True:
            held.append(torch.empty(STEP, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        got = len(held) * STEP // MIB
    held.clear()
    torch.cuda.empty_cache()
    return got


def work(rank, world, mode, seconds, answers):
    """Runs one rank, and puts its answer into the queue."""
    torch.cuda.set_device(rank)
    answer = {"rank": rank, "sees_mib": torch.cuda.mem_get_info()[1] // MIB}
    timeout = ABANDONED if mode == "refused" else TIMEOUT
    dist.init_process_group("nccl", rank=rank, world_size=world, timeout=timeout, device_id=torch.device(rank))
    if mode == "refused":
        return refuse(rank, world, answers)
    if mode == "greedy":
        answer["got_mib"] = take() if rank == 0 else 0
        ones = torch.ones(1, device=rank)
        dist.all_reduce(ones)
        answer["sum"] = ones.item()
    elif mode == "ddp":
        answer |= train(rank, world, seconds)
    elif mode == "symmetric":
        answer |= share(rank, world, seconds)
    elif mode == "tensor":
        answer |= split(rank, world, seconds)
    answer["gb_per_s"] = round(bandwidth(rank, world), 1)
    answers.put(answer)
    dist.barrier()
    dist.destroy_process_group()


def main():
    mode, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 5
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29500")}
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    world = torch.cuda.device_count()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=work, args=(rank, world, mode, seconds, answers)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    found = [answers.get(timeout=90 + seconds) for _ in ranks]
    found.sort(key=lambda answer: answer["rank"])
    begun = time.monotonic()
    for rank, answer in zip(ranks, found):
        rank.join(max(begun + LONGEST_END - time.monotonic(), 0))
        if mode == "refused":
            answer |= {"exit": rank.exitcode, "seconds": round(time.monotonic() - begun, 1)}
            rank.kill()
    print(json.dumps({"world": world, "uid": os.getuid(), "ranks": found}))


if __name__ == "__main__":
    main()
