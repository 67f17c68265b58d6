/* A program in a container. It executes the commands of its standard input, one per line.
 *
 *   open FILE      -> ok | err N     loads this driver and creates a context on its first GPU
 *   raw FILE       -> ok | err N     loads this driver without a context
 *   alloc BYTES    -> ok | err N
 *   table BYTES    -> ok | err N     allocates through a private table of the simulated driver
 *   managed BYTES  -> ok | err N     allocates managed memory on the GPU by the same table
 *   info           -> ok FREE TOTAL | err N
 *   export BYTES   -> ok | err N     exports memory as a descriptor
 *   park           -> ok PID         starts a process that has only that descriptor, and stays
 *   fork           -> ok PID         forks a child with all of this process's state, which stays
 *   leave HOW      -> ok PID         goes on in a forked child. The first process changes its root
 *                                    (chroot) or ends its main thread (thread), and waits for it
 *   outlive        -> ok PID         goes on in a forked child with all of its files; it exits
 *   tell BYTES     -> ok | err N     writes this amount as exported into its credit page
 *   scribble       -> ok             overwrites its credit page
 *   truncate       -> ok | err N     truncates its credit page
 *   fault          -> ok | err N     launches a kernel that writes to address 0
 *   sync           -> ok | err N     returns the status of the context's work
 *   close          -> ok             closes every socket but its standard ones
 *   child BYTES MS -> ok PID         forks a child that waits for `crash`
 *   crash          -> ok | err N     lets the child open libcuda.so.1, fail to allocate BYTES, and
 *                                    exit after MS, and waits for the exit
 *   map COUNT FILE -> ok | err N     creates the file and maps it COUNT times
 *   environ GIB    -> ok | err N     sets an environment of this size without touching its pages
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <linux/prctl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void *driver;
static int exported = -1;

static int call(const char *name, void *a, uint64_t b, uint64_t c) {
    int (*function)(void *, uint64_t, uint64_t) = dlsym(driver, name);
    return function ? function(a, b, c) : -1;
}

static int begin(const char *file) {
    driver = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!driver) return -2;
    int (*init)(unsigned) = dlsym(driver, "cuInit");
    return init(0);
}

static int open_driver(const char *file) {
    void *context = NULL;
    int code = begin(file);
    if (!driver) return code;
    int (*retain)(void **, int) = dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*current)(void *) = dlsym(driver, "cuCtxSetCurrent");
    if (!code) code = retain(&context, 0);
    return code ? code : current(context);
}

static int export(uint64_t bytes) {
    /* CUmemAllocationProp: pinned, as a descriptor, on device 0. */
    int properties[8] = {1, 1, 1, 0}, code;
    uint64_t handle = 0;
    int (*create)(uint64_t *, size_t, const int *, uint64_t) = dlsym(driver, "cuMemCreate");
    int (*give)(int *, uint64_t, int, uint64_t) = dlsym(driver, "cuMemExportToShareableHandle");
    code = create(&handle, bytes, properties, 0);
    return code ? code : give(&exported, handle, 1, 0);
}

static int fault(void) {
    void *module = NULL, *function = NULL;
    int (*load)(void **, const void *) = dlsym(driver, "cuModuleLoadData");
    int (*get)(void **, void *, const char *) = dlsym(driver, "cuModuleGetFunction");
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) =
        dlsym(driver, "cuLaunchKernel");
    int code = load(&module, "");
    if (!code) code = get(&function, module, "fault");
    return code ? code : launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}

static int park(void) {
    int child = fork();
    if (child) return child;
    /* exec keeps the copy and drops everything else of the driver. */
    if (dup(exported) >= 0) execl("/proc/self/exe", "tenant", "stay", NULL);
    _exit(1);
}

static void *wait_for_child(void *child) {
    int status = 0;
    waitpid((int)(intptr_t)child, &status, 0);
    exit(0);
}

/* Forks a child that goes on. The first process stays in a way in which the kernel shows none of
 * its mounts, or exits. Returns the child's pid to the child. */
static int leave(const char *how) {
    pthread_t thread;
    int child = fork();
    if (!child) return getpid();
    if (!strcmp(how, "exit")) _exit(0);
    if (!strcmp(how, "chroot") && !mkdir("/empty", 0700) && !chroot("/empty")) wait_for_child((void *)(intptr_t)child);
    if (pthread_create(&thread, NULL, wait_for_child, (void *)(intptr_t)child)) exit(1);
    syscall(SYS_exit, 0);
    return -1;
}

static int gate[2];

/* Forks a child that allocates BYTES and exits. Its exit code is 0 where the driver refused. */
static int child(uint64_t bytes, unsigned milliseconds) {
    int code, process;
    uint64_t at = 0;
    char go;
    if (pipe(gate)) return -1;
    process = fork();
    if (process) return process;
    close(gate[1]);
    if (read(gate[0], &go, 1) != 1) _exit(99);
    code = open_driver("libcuda.so.1");
    if (!code) code = call("cuMemAlloc_v2", &at, bytes, 0) == 2 ? 0 : 98;
    usleep(1000 * milliseconds);
    _exit(code);
}

static int crash(void) {
    int status = 0;
    close(gate[0]);
    if (write(gate[1], "", 1) != 1) return -1;
    wait(&status);
    close(gate[1]);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int map(unsigned long long count, const char *file) {
    int fd = open(file, O_RDWR | O_CREAT, 0600), page = 4096;
    if (fd < 0 || ftruncate(fd, page)) return errno;
    /* Every mapping is of the same page, so the kernel cannot merge two of them. */
    while (count--)
        if (mmap(NULL, page, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED) return errno;
    return 0;
}

static int environment(unsigned long long gib) {
    char text[4096], *at;
    unsigned long long field[53] = {0};
    unsigned long long size = gib << 30;
    FILE *stat = fopen("/proc/self/stat", "r");
    size_t length = stat ? fread(text, 1, sizeof text - 1, stat) : 0;
    text[length] = 0;
    if (stat) fclose(stat);
    at = strrchr(text, ')');
    if (!at) return -3;
    at += 4;
    for (int number = 4; number <= 52; number++) field[number] = strtoull(at, &at, 10);
    void *where = mmap(NULL, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (where == MAP_FAILED) return errno;
    struct prctl_mm_map map = {
        .start_code = field[26], .end_code = field[27], .start_stack = field[28],
        .start_data = field[45], .end_data = field[46], .start_brk = field[47],
        .brk = (uintptr_t)sbrk(0), .arg_start = field[48], .arg_end = field[49],
        .env_start = (uintptr_t)where, .env_end = (uintptr_t)where + size, .exe_fd = -1,
    };
    return prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0) ? errno : 0;
}

/* The address range of the credit page; 0 where there is none. */
static int page(unsigned long *from, unsigned long *to) {
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    *from = 0;
    while (maps && fgets(line, sizeof line, maps))
        if (strstr(line, "bursar-credit") && sscanf(line, "%lx-%lx", from, to) == 2) break;
    if (maps) fclose(maps);
    return *from != 0;
}

int main(int count, char **words) {
    char line[512], word[512];
    while (count > 1 && words[1]) pause();
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    while (fgets(line, sizeof line, stdin)) {
        unsigned long long bytes = 0;
        unsigned long from, to;
        unsigned milliseconds = 0;
        int code = 0;
        if (sscanf(line, "open %511s", word) == 1) {
            code = open_driver(word);
        } else if (sscanf(line, "raw %511s", word) == 1) {
            code = begin(word);
        } else if (!strncmp(line, "fork", 4)) {
            int child = fork();
            if (!child) for (;;) pause();
            printf("ok %d\n", child);
            continue;
        } else if (sscanf(line, "leave %511s", word) == 1 || !strncmp(line, "outlive", 7)) {
            printf("ok %d\n", leave(*line == 'o' ? "exit" : word));
            continue;
        } else if (sscanf(line, "tell %llu", &bytes) == 1) {
            /* The first slot's `exported`, in units of 4 KiB. */
            if (page(&from, &to)) *(volatile uint32_t *)(from + 64 + 20) = bytes >> 12;
            else code = -3;
        } else if (sscanf(line, "alloc %llu", &bytes) == 1) {
            uint64_t at = 0;
            code = call("cuMemAlloc_v2", &at, bytes, 0);
        } else if (sscanf(line, "table %llu", &bytes) == 1 || sscanf(line, "managed %llu", &bytes) == 1) {
            uint64_t at = 0;
            struct { size_t size; int (*alloc[2])(uint64_t *, uint64_t); } *table;
            code = call("cuGetExportTable", &table, (uint64_t)(uintptr_t)"bursar-sim-alloc", 0);
            if (!code) code = table->alloc[*line == 'm'](&at, bytes);
        } else if (!strncmp(line, "info", 4)) {
            size_t free_bytes = 0, total = 0;
            code = call("cuMemGetInfo_v2", &free_bytes, (uint64_t)(uintptr_t)&total, 0);
            if (!code) {
                printf("ok %zu %zu\n", free_bytes, total);
                continue;
            }
        } else if (sscanf(line, "export %llu", &bytes) == 1) {
            code = export(bytes);
        } else if (!strncmp(line, "fault", 5)) {
            code = fault();
        } else if (!strncmp(line, "sync", 4)) {
            int (*synchronize)(void) = dlsym(driver, "cuCtxSynchronize");
            code = synchronize();
        } else if (!strncmp(line, "park", 4)) {
            printf("ok %d\n", park());
            continue;
        } else if (sscanf(line, "child %llu %u", &bytes, &milliseconds) == 2) {
            printf("ok %d\n", child(bytes, milliseconds));
            continue;
        } else if (sscanf(line, "map %llu %511s", &bytes, word) == 2) {
            code = map(bytes, word);
        } else if (sscanf(line, "environ %llu", &bytes) == 1) {
            code = environment(bytes);
        } else if (!strncmp(line, "crash", 5)) {
            code = crash();
        } else if (!strncmp(line, "scribble", 8)) {
            /* Every slot after the page's head. */
            if (page(&from, &to)) memset((char *)from + 64, 0x5a, to - from - 64);
            else code = -3;
        } else if (!strncmp(line, "truncate", 8)) {
            if (page(&from, &to)) {
                snprintf(word, sizeof word, "/proc/self/map_files/%lx-%lx", from, to);
                int file = open(word, O_RDWR);
                code = file < 0 || ftruncate(file, 0) ? errno : 0;
            } else code = -3;
        } else if (!strncmp(line, "close", 5)) {
            struct stat status;
            for (int file = 3; file < 256; file++)
                if (!fstat(file, &status) && S_ISSOCK(status.st_mode)) close(file);
        }
        if (code) printf("err %d\n", code);
        else puts("ok");
    }
    return 0;
}
