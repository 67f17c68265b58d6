// Declares the part of NVIDIA's resource manager interface that sets a channel group's time slice.
// Numbers and layouts are those of NVIDIA/open-gpu-kernel-modules 580.142; each names its header.
// They are no stable ABI.
#pragma once
#include <stdint.h>

enum {
    RM_ESC_CONTROL = 0x2A,  // nv_escape.h
    RM_ESC_ALLOC = 0x2B,    // nv_escape.h

    RM_CLASS_CHANNEL_GROUP = 0xA06C,   // class/cla06c.h
    RM_CLASS_CHANNEL_SUFFIX = 0x6F,    // class/cl*6f.h: Hopper's channel is 0xC86F
    RM_CTRL_SET_TIMESLICE = 0xa06c0103,  // ctrl/ctrla06c.h
};

// NVOS54_PARAMETERS in nvos.h.
struct rm_control {
    uint32_t client, object, command, flags;
    uint64_t params;
    uint32_t params_size, status;
};

// NVOS21_PARAMETERS in nvos.h, the argument of the ioctl of 32 bytes.
struct rm_alloc {
    uint32_t client, parent, object, class_id;
    uint64_t params;
    uint32_t params_size, status;
};

// NVOS64_PARAMETERS in nvos.h, the argument of the ioctl of 48 bytes.
struct rm_alloc_rights {
    uint32_t client, parent, object, class_id;
    uint64_t params, rights;
    uint32_t params_size, flags, status;
};

// The first fields of NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS in nvos.h.
struct rm_group_params {
    uint32_t error, ecc_error, address_space, engine;
};

// Sends one control command as this process. Returns RM's status, or UINT32_MAX if the ioctl itself
// fails.
#ifdef __cplusplus
extern "C"
#endif
uint32_t rm_control(int fd, uint32_t client, uint32_t object, uint32_t command, void *params, uint32_t size);
