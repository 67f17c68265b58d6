/*
 * Retained memory: device memory that outlives the process that filled it. Memory tokens: signed
 * references to memory.
 *
 * A lease of it is found by a name and a key, which is a digest of everything that decides the
 * content. The process that opens a missing lease writes and commits it. From then on the lease is
 * read-only, and any process of the namespace finds it, verified by a checksum. A lease survives a
 * fault, an exec and a kill of each process that has it open. Bursar's documentation
 * (docs/internals/runtime.md) has the promises and their limits.
 *
 * Every function is safe to call from any thread, and none panics or throws. Several threads may use
 * one lease; a call waits for another call on the same lease. bursar_retained_close and
 * bursar_retained_discard end the lease, so no other thread may use it then or later. The functions
 * use the process's CUDA driver: in a container of Bursar, within its quota.
 */
#ifndef BURSAR_H
#define BURSAR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Result of a function. The numbers never change. */
typedef enum bursar_status {
    BURSAR_OK = 0,
    /* An argument is invalid: a null pointer, a malformed name, a lease that has ended. */
    BURSAR_INVALID = 1,
    /* There is no such lease, and the call was not to create one. */
    BURSAR_MISSING = 2,
    /* Another process writes the lease, or the agent is busy or does not respond: retry. */
    BURSAR_BUSY = 3,
    /* The container's quota, or what the node lends of the GPU, has no room for the lease. */
    BURSAR_QUOTA = 4,
    /* The content differs from the commit, or is lost; the lease was discarded. */
    BURSAR_CORRUPT = 5,
    /* The right to commit has ended; the lease is discarded, unless another writer has it by now. */
    BURSAR_FENCED = 6,
    /* This node retains no memory, or not for this container, or no more of it. */
    BURSAR_REFUSED = 7,
    /* The driver failed: bursar_cuda() returns its CUresult. */
    BURSAR_DRIVER = 8,
    /* Bursar failed. */
    BURSAR_INTERNAL = 9
} bursar_status;

/* A lease that this process has open. */
typedef struct bursar_lease bursar_lease;

/* Arguments of bursar_retained_open. Set unused fields to zero. */
typedef struct bursar_open_args {
    /* 1 to 96 printable characters of ASCII. */
    const char *name;
    /* Path of the agent's socket; NULL for the socket of the container. */
    const char *socket;
    /* Digest of everything that decides the content. */
    uint8_t key[32];
    /* Size of the lease if the call creates it; 0 creates none. */
    uint64_t bytes;
    /* Time to retry while another process writes the lease, or the agent is busy or does not
     * respond. */
    uint64_t timeout_ms;
    /* Ordinal of the device. The library uses its primary context, as the CUDA runtime and PyTorch
     * do. */
    int32_t device;
} bursar_open_args;

/* Description of an open lease. */
typedef struct bursar_lease_state {
    /* First address, a CUdeviceptr; a multiple of 2 MiB. */
    uint64_t address;
    /* Size, at least as requested. */
    uint64_t bytes;
    /* Number of the lease, unique on the node. */
    uint64_t lease;
    /* Higher than the generation of any earlier lease of this name and key. */
    uint64_t generation;
    /* 1: committed and read-only. 0: zeroed, and this process is the writer. */
    int32_t ready;
} bursar_lease_state;

/*
 * Opens a lease, or creates it. The caller passes *lease to bursar_retained_close or
 * bursar_retained_discard later; it is NULL after a failure.
 */
bursar_status bursar_retained_open(const bursar_open_args *args, bursar_lease **lease);

/* Returns a description of an open lease. */
bursar_status bursar_retained_describe(const bursar_lease *lease, bursar_lease_state *view);

/* Copies from a committed lease to the host, and waits for the copy. */
bursar_status bursar_retained_read(const bursar_lease *lease, uint64_t at, void *to, uint64_t bytes);

/* Copies from the host to an uncommitted lease, and waits for the copy. */
bursar_status bursar_retained_write(bursar_lease *lease, uint64_t at, const void *from, uint64_t bytes);

/*
 * Commits a lease: waits for all work of the context, makes the mapping read-only at the same
 * address, and reports the checksum. After a failure the lease is discarded and can only be closed.
 */
bursar_status bursar_retained_commit(bursar_lease *lease);

/* Discards a lease for the whole namespace, and closes it as bursar_retained_close does. */
bursar_status bursar_retained_discard(bursar_lease *lease);

/*
 * Waits for all work of the context, and unmaps a lease. A committed lease stays; an uncommitted one
 * is discarded. Accepts NULL. Do not call it while a stream of the context is captured: that ends the
 * capture, and the memory stays mapped until the process ends.
 */
void bursar_retained_close(bursar_lease *lease);

/* The longest token. */
#define BURSAR_MAX_TOKEN 512

/*
 * A memory token: a reference to memory that the node's agent has signed. Send its first `length`
 * bytes by any channel. A token grants no access to the memory.
 */
typedef struct bursar_token {
    uint64_t length;
    uint8_t bytes[BURSAR_MAX_TOKEN];
} bursar_token;

/* What a token names. */
typedef struct bursar_memory {
    /* Container whose process has the memory. */
    uint64_t container;
    /* The memory exists as long as its generations are current. */
    uint64_t gpu_generation;
    uint64_t process_generation;
    /* Number of the lease; 0 for memory without one. */
    uint64_t lease;
    /* The number that the issuer gave to bursar_seal. */
    uint64_t block;
    /* Name of the node, and UUID of the GPU as NVML prints it. */
    char node[256];
    char gpu[256];
} bursar_memory;

/*
 * Seals a token for memory of this process on a device, or for a committed lease that is not NULL.
 * `socket` is the path of the agent's socket; NULL for the socket of the container.
 */
bursar_status bursar_seal(const char *socket, int32_t device, const bursar_lease *lease, uint64_t block,
                          bursar_token *token);

/*
 * Returns what a token of this node and namespace names, if the memory still exists. BURSAR_FENCED:
 * one of its generations has ended. BURSAR_REFUSED: it is another node's or namespace's, or forged.
 */
bursar_status bursar_redeem(const char *socket, const bursar_token *token, bursar_memory *memory);

/*
 * Returns what a token names, if the node with this public key has signed it; BURSAR_REFUSED
 * otherwise. Needs no agent and no GPU. The node's GpuNode has the key in status.tokenKey.publicKey,
 * as hex digits, and the present generation of each GPU in status.gpus.
 */
bursar_status bursar_verify(const bursar_token *token, const uint8_t public_key[32], bursar_memory *memory);

/*
 * Sets *current to 1 if the GPU still has the memory that a verified token names, and to 0 if the
 * memory is lost. `gpu` and `generation` are the uuid and the generation of that GPU in status.gpus
 * of the node's GpuNode; BURSAR_INVALID if `gpu` is not the memory's. If the GpuNode does not list
 * the GPU, nothing is known. Where *current is 1, the process or the lease may still have ended:
 * only bursar_redeem on the memory's node knows.
 */
bursar_status bursar_is_current(const bursar_memory *memory, const char *gpu, uint64_t generation,
                                int32_t *current);

/*
 * Returns the text of this thread's last failure. Valid until the thread's next failure. A
 * destructor of thread-local data may get a text that says that the thread is ending.
 */
const char *bursar_error(void);

/* Returns the CUresult of this thread's last BURSAR_DRIVER; 0 if the driver did not fail. */
int32_t bursar_cuda(void);

#ifdef __cplusplus
}
#endif

#endif
