// usage: timed N PROGRAM ARGUMENT...
//
// Starts a program N times, each time from its exec to its end, and prints the nanoseconds as JSON.
// The program's output is dropped. Exits with 1 if the program fails.
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>

extern char **environ;

int main(int count, char **words) {
    if (count < 3) return fprintf(stderr, "usage: timed N PROGRAM ARGUMENT...\n"), 2;
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
    printf("{\"ns\": [");
    for (long left = atol(words[1]); left > 0; left--) {
        struct timespec before, after;
        pid_t child;
        int status;
        clock_gettime(CLOCK_MONOTONIC, &before);
        if (posix_spawnp(&child, words[2], &files, 0, words + 2, environ)) return perror("spawn"), 1;
        if (waitpid(child, &status, 0) < 0 || status) return fprintf(stderr, "status %d\n", status), 1;
        clock_gettime(CLOCK_MONOTONIC, &after);
        long long ns = (after.tv_sec - before.tv_sec) * 1000000000ll + after.tv_nsec - before.tv_nsec;
        printf("%lld%s", ns, left > 1 ? "," : "");
    }
    printf("]}\n");
}
