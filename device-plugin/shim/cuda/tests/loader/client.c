// A program that looks for the CUDA driver in one way, and takes memory from what it finds.
//
//     client BYTES open NAME        dlopen
//     client BYTES new NAME         dlmopen, in a namespace of its own
//     client BYTES deep NAME        dlopen with RTLD_DEEPBIND
//     client BYTES version NAME     dlopen, then dlvsym
//     client BYTES next NAME        dlopen with RTLD_GLOBAL, then dlsym(RTLD_NEXT)
//     client BYTES linked NAME      cuInit as the linker bound it (built with -DLINKED)
//     client BYTES close NAME       dlopen; closes every socket before it takes BYTES
//     client BYTES table NAME       dlopen; takes BYTES by a function of a private table of the simulated driver's
//     client BYTES missing NAME     dlopen, then dlsym of a name that the node's driver lacks
//
// NAME may be anything where it is not used. It prints what it found, a line each, and then stays until its standard
// input ends:
//
//     none WHY                      no driver, or no function of it
//     alloc CODE CODE               cuMemAlloc of 1 MiB, and then of BYTES
//     mapped PATH                   each file with "cuda" in its name that is mapped
//     end
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int function();

#ifdef LINKED
extern function cuInit, cuDevicePrimaryCtxRetain, cuCtxSetCurrent, cuMemAlloc_v2;
#endif

static void *library;
static const char *way;

static function *find(const char *name) {
#ifdef LINKED
    if (!strcmp(way, "linked")) {
        if (!strcmp(name, "cuInit")) return cuInit;
        if (!strcmp(name, "cuDevicePrimaryCtxRetain")) return cuDevicePrimaryCtxRetain;
        if (!strcmp(name, "cuCtxSetCurrent")) return cuCtxSetCurrent;
        return cuMemAlloc_v2;
    }
#endif
    if (!strcmp(way, "next")) return (function *)dlsym(RTLD_NEXT, name);
#ifdef __GLIBC__
    if (!strcmp(way, "version")) return (function *)dlvsym(library, name, "libcuda.so.1");
#endif
    return (function *)dlsym(library, name);
}

static int none(const char *why) {
    printf("none %s\n", why ? why : "without a reason");
    return 0;
}

static int look(const char *name, size_t bytes) {
    int mode = RTLD_NOW;
#ifndef __GLIBC__
    if (!strcmp(way, "new") || !strcmp(way, "deep") || !strcmp(way, "version"))
        return none("this C library has no such function");
#else
    if (!strcmp(way, "deep")) mode |= RTLD_DEEPBIND;
#endif
    if (!strcmp(way, "next")) mode |= RTLD_GLOBAL;
    if (strcmp(way, "linked")) {
#ifdef __GLIBC__
        library = strcmp(way, "new") ? dlopen(name, mode) : dlmopen(LM_ID_NEWLM, name, mode);
#else
        library = dlopen(name, mode);
#endif
        if (!library) return none(dlerror());
    }
    if (!strcmp(way, "missing"))
        return none(dlsym(library, "cuVDPAUGetDevice") ? "a name that the driver lacks was found" : dlerror());
    function *init = find("cuInit");
    if (!init) return none(dlerror());
    int code = init(0);
    void *context = 0;
    unsigned long long pointer;
    if (!code) code = find("cuDevicePrimaryCtxRetain")(&context, 0);
    if (!code) code = find("cuCtxSetCurrent")(context);
    if (code) {
        char why[40];
        sprintf(why, "CUDA error %d", code);
        return none(why);
    }
    function *alloc = find("cuMemAlloc_v2");
    int little = alloc(&pointer, (size_t)1 << 20);
    struct { size_t size; function *alloc; } *table;
    if (!strcmp(way, "table")) {
        if (find("cuGetExportTable")(&table, "bursar-sim-alloc")) return none("no such table");
        alloc = table->alloc;
    }
    for (int fd = 3; fd < 1024 && !strcmp(way, "close"); fd++) {
        struct stat file;
        if (!fstat(fd, &file) && S_ISSOCK(file.st_mode)) close(fd);
    }
    printf("alloc %d %d\n", little, alloc(&pointer, bytes));
    return 0;
}

static void maps(void) {
    char line[4096], last[4096] = "";
    FILE *file = fopen("/proc/self/maps", "r");
    while (file && fgets(line, sizeof line, file)) {
        char *path = strchr(line, '/');
        if (path && strstr(path, "cuda") && strcmp(path, last)) printf("mapped %s", strcpy(last, path));
    }
    if (file) fclose(file);
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    way = arguments[2];
    look(arguments[3], strtoull(arguments[1], 0, 10));
    maps();
    puts("end");
    fflush(stdout);
    while (getchar() != EOF);
    return 0;
}
