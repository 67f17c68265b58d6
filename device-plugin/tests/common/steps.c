// Kills the process that preloads this library before or after one of its steps on disk: a rename,
// an fsync or an unlink. The library counts them in the file BURSAR_STEPS, and kills at the step
// BURSAR_STEP. While the file BURSAR_SYNC_FAILS exists, each fsync fails. Children of the process do
// not preload the library.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static atomic_int steps;
static int last, counts = -1;
static const char *sync_fails;

__attribute__((constructor)) static void start(void) {
    const char *at = getenv("BURSAR_STEP"), *file = getenv("BURSAR_STEPS");
    last = at ? atoi(at) : 0;
    sync_fails = getenv("BURSAR_SYNC_FAILS");
    counts = file ? open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600) : -1;
    unsetenv("LD_PRELOAD");
}

static void step(void) {
    int number = atomic_fetch_add(&steps, 1) + 1;
    char text[16];
    int length = snprintf(text, sizeof text, "%8d", number);
    if (counts >= 0 && pwrite(counts, text, length, 0) != length)
        abort();
    if (number == last)
        kill(getpid(), SIGKILL);
}

static int sync_fails_now(void) {
    int now = sync_fails && !access(sync_fails, F_OK);
    errno = EIO;
    return now;
}

#define STEP(name, parameters, arguments, fails)                           \
    int name parameters {                                                  \
        static int(*_Atomic next) parameters;                              \
        if (!next)                                                         \
            next = dlsym(RTLD_NEXT, #name);                                \
        step();                                                            \
        int result = fails ? -1 : next arguments;                          \
        step();                                                            \
        return result;                                                     \
    }

STEP(rename, (const char *from, const char *to), (from, to), 0)
STEP(fsync, (int file), (file), sync_fails_now())
STEP(fdatasync, (int file), (file), sync_fails_now())
STEP(unlink, (const char *path), (path), 0)
STEP(unlinkat, (int folder, const char *path, int flags), (folder, path, flags), 0)
