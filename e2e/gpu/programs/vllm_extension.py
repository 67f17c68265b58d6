"""Methods that vLLM's worker has in addition (`--worker-extension-cls`), which tests call by `/collective_rpc`."""

import time

import torch
import triton
import triton.language as tl

MIB = 1 << 20
# The number of bytes that a checksum reads at once.
PART = 16 * MIB
MODULUS = (1 << 61) - 1


@triton.jit
def store(address):
    tl.store(address.to(tl.pointer_type(tl.int32)), 1)


class Worker:
    """The additional methods."""

    def bursar_memory(self):
        """Returns free and total memory in MiB as this process sees them."""
        free, total = torch.cuda.mem_get_info()
        return {"free_mib": free // MIB, "total_mib": total // MIB}

    def bursar_checksum(self):
        """Returns a checksum of all parameters, which depends on the position of each byte."""
        begun, total, count = time.monotonic(), 0, 0
        places = torch.arange(1, PART + 1, device="cuda", dtype=torch.int64)
        for name, parameter in sorted(self.model_runner.get_model().named_parameters()):
            # Reshaping keeps the order of a transposed weight, which a view as bytes may not.
            every = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
            for part in every.split(PART):
                weighted_sum = int((part.long() * places[: part.numel()]).sum().item())
                total = (total * 1_000_003 + weighted_sum) % MODULUS
            count += every.numel()
        del places
        torch.cuda.empty_cache()
        return {"checksum": f"{total:016x}", "mib": count // MIB, "s": round(time.monotonic() - begun, 3)}

    def bursar_fill(self):
        """Allocates until PyTorch is refused, and frees everything."""
        held, refused = [], None
        while refused is None:
            try:
                held.append(torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError as error:
                refused = str(error)
        got = len(held) * 256
        held.clear()
        torch.cuda.empty_cache()
        return {"got_mib": got, "refused": refused}

    def bursar_fault(self):
        """Writes to an address that is not mapped."""
        store[(1,)](0x7F00_0000_0000)
        torch.cuda.synchronize()
