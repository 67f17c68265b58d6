/*
 * Kept memory: device memory that outlives the process that filled it.
 *
 * A lease is found by a name and a key: a digest of all that decides its content. Who opens one that is not there writes it,
 * and commits it; from then on it is read-only, and any process of the namespace finds it again, verified by a checksum. It
 * outlives a fault, an exec and a kill of whoever has it open. Bursar's documentation (docs/runtime.md) has the promises
 * and their limits.
 *
 * Every function is safe to call from any thread, and none panics or throws. A lease may be used by one thread at a
 * time or several; a call waits for another one on the same lease, but for bursar_close and bursar_discard: these end it, so
 * nobody may be using it then, or after. CUDA is the driver that the process has: in a container
 * of Bursar's, its quota.
 */
#ifndef BURSAR_H
#define BURSAR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a function answers. Numbers never change. */
typedef enum bursar_status {
    BURSAR_OK = 0,
    /* An argument is wrong: a null pointer, a name that is none, a lease that ended. */
    BURSAR_INVALID = 1,
    /* There is no such lease, and none was to be begun. */
    BURSAR_MISSING = 2,
    /* Another process writes it, or the agent is away: ask again. */
    BURSAR_BUSY = 3,
    /* The container's quota has no room for it. */
    BURSAR_QUOTA = 4,
    /* The content is not what was committed, or is lost; the lease is discarded. */
    BURSAR_CORRUPT = 5,
    /* The right to commit has ended; the lease is discarded, unless it is another's to write by now. */
    BURSAR_FENCED = 6,
    /* This node keeps no memory, or not for this container, or no more of it. */
    BURSAR_REFUSED = 7,
    /* The driver failed: bursar_cuda() has its CUresult. */
    BURSAR_DRIVER = 8,
    /* Bursar failed. */
    BURSAR_INTERNAL = 9
} bursar_status;

/* A lease that this process has open. */
typedef struct bursar_lease bursar_lease;

/* What to open. Set what is not used to zero. */
typedef struct bursar_question {
    /* 1 to 96 printable characters of ASCII. */
    const char *name;
    /* Where the agent listens; NULL is where a container of Bursar's has it. */
    const char *socket;
    /* A digest of all that decides the content. */
    uint8_t key[32];
    /* How large to begin a lease that is not there; 0 begins none. */
    uint64_t bytes;
    /* For how long to ask again while another process writes it or the agent is away. */
    uint64_t patience_ms;
    /* The device's ordinal, as the driver counts. Its primary context is used, as the CUDA runtime and PyTorch do. */
    int32_t device;
} bursar_question;

/* What is known of an open lease. */
typedef struct bursar_view {
    /* The first address, a CUdeviceptr; a multiple of 2 MiB. */
    uint64_t address;
    /* At least as many as were asked for. */
    uint64_t bytes;
    /* Names the lease; never another one on this node. */
    uint64_t lease;
    /* Higher than that of any lease of this name and key before. */
    uint64_t generation;
    /* 1: holds what was committed, read-only. 0: zeroed, this process's to write. */
    int32_t ready;
} bursar_view;

/* Opens a lease, or begins it. On success *lease is to be given to bursar_close or bursar_discard. */
bursar_status bursar_open(const bursar_question *question, bursar_lease **lease);

/* Tells where an open lease is. */
bursar_status bursar_look(const bursar_lease *lease, bursar_view *view);

/* Copies from a lease that is ready to the host, and waits for it. */
bursar_status bursar_read(const bursar_lease *lease, uint64_t at, void *to, uint64_t bytes);

/* Copies from the host to a lease that is not ready yet, and waits for it. */
bursar_status bursar_write(bursar_lease *lease, uint64_t at, const void *from, uint64_t bytes);

/*
 * Makes a lease what it will be: waits for all work of the context, makes the mapping read-only at the same address, and
 * states the checksum. Where it fails the lease is discarded, and only to be closed.
 */
bursar_status bursar_commit(bursar_lease *lease);

/* Gives a lease up, for all of the namespace, and closes it. */
bursar_status bursar_discard(bursar_lease *lease);

/* Unmaps a lease. One that was committed stays for others; one that was not is discarded. NULL is nothing. */
void bursar_close(bursar_lease *lease);

/* What went wrong in this thread's last call that did not answer BURSAR_OK. Valid until the thread's next such call. */
const char *bursar_error(void);

/* The CUresult behind BURSAR_DRIVER in this thread's last such call; 0 where it was not the driver. */
int32_t bursar_cuda(void);

#ifdef __cplusplus
}
#endif

#endif
