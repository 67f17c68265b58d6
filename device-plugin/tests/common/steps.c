// Kills the process that preloads this library before or after one of its steps: a rename, an fsync,
// an unlink, or the send of a message with a descriptor or on a socket that blocks. The library
// counts them in the file BURSAR_STEPS, and kills at the step BURSAR_STEP. While the file
// BURSAR_SYNC_FAILS exists, each fsync fails. Children of the process do not preload the library.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static atomic_int steps;
static int last, counts = -1;
static const char *sync_fails;

static void catch_sends(void);

__attribute__((constructor)) static void start(void) {
    const char *at = getenv("BURSAR_STEP"), *file = getenv("BURSAR_STEPS");
    last = at ? atoi(at) : 0;
    sync_fails = getenv("BURSAR_SYNC_FAILS");
    counts = file ? open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600) : -1;
    unsetenv("LD_PRELOAD");
    catch_sends();
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

ssize_t send(int socket, const void *bytes, size_t length, int flags) {
    int blocks = !(fcntl(socket, F_GETFL) & O_NONBLOCK);
    if (blocks)
        step();
    ssize_t result = sendto(socket, bytes, length, flags, NULL, 0);
    if (blocks)
        step();
    return result;
}

// The program calls sendmsg without the C library, so a filter of the program's own code traps it.
// Other code calls it freely: this handler, and the children, whose code is at other addresses.
static void sends(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    mcontext_t *of = &((ucontext_t *)context)->uc_mcontext;
#if defined(__x86_64__)
    greg_t *arguments[] = {&of->gregs[REG_RDI], &of->gregs[REG_RSI], &of->gregs[REG_RDX]},
           *result = &of->gregs[REG_RAX];
#else
    unsigned long long *arguments[] = {&of->regs[0], &of->regs[1], &of->regs[2]},
                       *result = &of->regs[0];
#endif
    step();
    long sent = syscall(SYS_sendmsg, *arguments[0], *arguments[1], *arguments[2]);
    *result = sent < 0 ? -errno : sent;
    step();
}

// Finds the code of the program, which is the first object.
static int find_code(struct dl_phdr_info *object, size_t size, void *found) {
    (void)size;
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_LOAD && object->dlpi_phdr[i].p_flags & PF_X) {
            ((uint64_t *)found)[0] = object->dlpi_addr + object->dlpi_phdr[i].p_vaddr;
            ((uint64_t *)found)[1] = object->dlpi_phdr[i].p_memsz;
        }
    return 1;
}

#define LOAD(at) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at)
#define SUBTRACT(value) BPF_STMT(BPF_ALU | BPF_SUB | BPF_K, value)

static void catch_sends(void) {
    uint64_t code[2] = {0, 0};
    dl_iterate_phdr(find_code, code);
    uint32_t low = code[0], high = code[0] >> 32, size = code[1];
    struct sock_filter filter[] = {
        LOAD(offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sendmsg, 0, 7),
        LOAD(offsetof(struct seccomp_data, instruction_pointer)),
        SUBTRACT(low),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, size, 4, 0),
        LOAD(offsetof(struct seccomp_data, instruction_pointer) + 4),
        SUBTRACT(high),
        // The code may cross a multiple of 4 GiB.
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, 1, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    struct sigaction action = {.sa_sigaction = sends, .sa_flags = SA_SIGINFO};
    if (sigaction(SIGSYS, &action, NULL) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        abort();
}
