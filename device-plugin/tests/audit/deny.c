/* Attaches a BPF program to the cgroup of v2 in the argument. The program permits devices of major 1
 * only, as a container runtime's program permits the GPUs of the container only. */
#include <fcntl.h>
#include <linux/bpf.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int count, char **words) {
    /* r2 = context->major; r0 = 1; if r2 is 1, exit; r0 = 0; exit */
    struct bpf_insn program[] = {
        {.code = BPF_LDX | BPF_MEM | BPF_W, .dst_reg = 2, .src_reg = 1, .off = 4},
        {.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 0, .imm = 1},
        {.code = BPF_JMP | BPF_JEQ | BPF_K, .dst_reg = 2, .off = 1, .imm = 1},
        {.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 0, .imm = 0},
        {.code = BPF_JMP | BPF_EXIT},
    };
    union bpf_attr load = {
        .prog_type = BPF_PROG_TYPE_CGROUP_DEVICE,
        .insns = (uintptr_t)program,
        .insn_cnt = sizeof program / sizeof *program,
        .license = (uintptr_t)"Apache-2.0",
    };
    int cgroup = open(words[count - 1], O_RDONLY | O_DIRECTORY);
    int loaded = syscall(SYS_bpf, BPF_PROG_LOAD, &load, sizeof load);
    union bpf_attr attach = {
        .target_fd = cgroup,
        .attach_bpf_fd = loaded,
        .attach_type = BPF_CGROUP_DEVICE,
    };
    if (cgroup < 0 || loaded < 0 || syscall(SYS_bpf, BPF_PROG_ATTACH, &attach, sizeof attach)) {
        perror("bpf");
        return 1;
    }
    return 0;
}
