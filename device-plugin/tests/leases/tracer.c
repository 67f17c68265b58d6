// Holds on to a process: while it is traced, its parent does not hear of its death, as of that of a process that the
// kernel does not let die. Prints "holds" or "cannot", and lets go when its standard input ends.
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <unistd.h>

int main(int count, char **words) {
    int can = count == 2 && ptrace(PTRACE_SEIZE, atoi(words[1]), 0, 0) == 0;
    puts(can ? "holds" : "cannot");
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0) {
    }
    return 0;
}
