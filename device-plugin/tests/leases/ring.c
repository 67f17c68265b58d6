// Registers its standard input with an io_uring and closes it, so that no descriptor table lists it
// and /proc does not show it (F4 in docs/internals/facts.md). Prints "holds" or "cannot", and
// stays.
#include <linux/io_uring.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void) {
    struct io_uring_params params = {0};
    int held = 0;
    int ring = syscall(SYS_io_uring_setup, 1, &params);
    int can = ring >= 0 && syscall(SYS_io_uring_register, ring, IORING_REGISTER_FILES, &held, 1) == 0;
    close(held);
    puts(can ? "holds" : "cannot");
    fflush(stdout);
    while (can) {
        pause();
    }
    return 0;
}
