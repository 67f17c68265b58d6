// Records the channel groups and channels that libcuda allocates. The program that links this file
// exports `ioctl`, so that the dynamic linker binds libcuda's calls to it, as with LD_PRELOAD.
//
// RM_LOG names the file for a line on each: fd, class, client, parent, object, engine (groups
// only).
// RM_BIRTH_US is the time slice that a group gets right after its allocation, before it is
// scheduled.
#define _GNU_SOURCE
#include "rm.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

uint32_t rm_control(int fd, uint32_t client, uint32_t object, uint32_t command, void *params, uint32_t size) {
    struct rm_control call = {client, object, command, 0, (uint64_t)(uintptr_t)params, size, 0};
    if (syscall(SYS_ioctl, fd, _IOWR('F', RM_ESC_CONTROL, struct rm_control), &call)) return UINT32_MAX;
    return call.status;
}

static void note(int fd, const struct rm_alloc *made) {
    uint32_t engine = 0;
    if (made->class_id == RM_CLASS_CHANNEL_GROUP && made->params)
        engine = ((const struct rm_group_params *)(uintptr_t)made->params)->engine;
    const char *path = getenv("RM_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%d %x %x %x %x %u\n", fd, made->class_id, made->client, made->parent, made->object, engine);
        fclose(log);
    }
    const char *birth = getenv("RM_BIRTH_US");
    if (birth && made->class_id == RM_CLASS_CHANNEL_GROUP) {
        uint64_t slice = strtoull(birth, NULL, 10);
        uint32_t status = rm_control(fd, made->client, made->object, RM_CTRL_SET_TIMESLICE, &slice, sizeof slice);
        fprintf(stderr, "slice at birth of %x, engine %u: status %#x\n", made->object, engine, status);
    }
}

int ioctl(int fd, unsigned long request, ...) {
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    int result = (int)syscall(SYS_ioctl, fd, request, argument);
    if (result || _IOC_TYPE(request) != 'F' || _IOC_NR(request) != RM_ESC_ALLOC) return result;

    int kept = errno;
    const struct rm_alloc *made = argument;
    uint32_t status = _IOC_SIZE(request) == sizeof(struct rm_alloc_rights)
                          ? ((const struct rm_alloc_rights *)argument)->status
                          : made->status;
    if (!status && (made->class_id == RM_CLASS_CHANNEL_GROUP || (made->class_id & 0xff) == RM_CLASS_CHANNEL_SUFFIX))
        note(fd, made);
    errno = kept;
    return result;
}
