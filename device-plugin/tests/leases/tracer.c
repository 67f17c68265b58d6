// Traces a process, so that its parent does not learn of its death, as with a process that the
// kernel cannot end. Prints "holds" or "cannot", and detaches when its standard input ends.
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
