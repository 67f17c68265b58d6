/* A hostile process of a container. Its argument is the agent's socket. It executes the commands of
 * its standard input, one per line, and answers each with a number when it is done.
 *
 *   linger COUNT        opens connections, each with the last reference to a lingering TCP socket
 *                       whose peer never reads: the number that the agent accepted
 *   hellos COUNT        says hello COUNT times as the same process image and keeps the credit
 *                       pages: the number of pages
 *   crowd COUNT HOW     forks COUNT processes that wait: a line with the pid of each
 *   go                  lets all of them act at once and stay: the number that succeeded
 *                         grant   says hello and is granted memory
 *                         fault   says hello, and reports a poisoned context
 *                         linger  says hello and, once all have, passes a lingering socket
 *                         past    has a context and a MiB of a GPU, without the shim
 *   connect COUNT PORT  opens COUNT connections to this local port, each with 12 KiB of a header
 *                       that never ends, and keeps them: the number of connections
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* The time for which a passed socket lingers, in seconds. */
#define LINGERS 12

static const char *path;
static uint64_t image;

static int dial(void) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    strncpy(to.sun_path, path, sizeof to.sun_path - 1);
    if (connect(fd, (struct sockaddr *)&to, sizeof to)) {
        perror("connect");
        exit(1);
    }
    return fd;
}

/* Sends bytes, with the descriptor unless it is negative. */
static int give(int to, const void *bytes, size_t length, int fd) {
    struct iovec part = {(void *)bytes, length};
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(sizeof fd)];
    } with = {.head = {CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS}};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    memcpy(CMSG_DATA(&with.head), &fd, sizeof fd);
    if (fd >= 0) message.msg_control = &with, message.msg_controllen = sizeof with;
    return sendmsg(to, &message, MSG_NOSIGNAL) == (ssize_t)length;
}

/* Receives a frame and its descriptor, which is -1 where there is none. */
static int take(int from, unsigned char *bytes, size_t length, int *fd) {
    struct iovec part = {bytes, length};
    char space[CMSG_SPACE(sizeof(int))];
    struct msghdr message = {&(struct sockaddr_un){0}, 0, &part, 1, space, sizeof space, 0};
    struct cmsghdr *head;
    ssize_t received = recvmsg(from, &message, MSG_CMSG_CLOEXEC);
    *fd = -1;
    if (received > 0 && (head = CMSG_FIRSTHDR(&message)) && head->cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(head), sizeof *fd);
    return received > 2 ? bytes[2] : -1;
}

/* A connection after hello, and its credit page, which is -1 where there is none. */
static int hello(int *page) {
    unsigned char frame[14] = {12, 0, 1, 1, 0}, answer[4096];
    int fd = dial();
    image++;
    memcpy(frame + 5, &image, sizeof image);
    if (!give(fd, frame, sizeof frame, -1)) perror("hello");
    take(fd, answer, sizeof answer, page);
    return fd;
}

/* Sends a byte with the last reference to a lingering TCP socket whose peer never reads. */
static int pass(int to) {
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct linger on = {1, LINGERS}, off = {0, 0};
    socklen_t size = sizeof here;
    char many[1 << 16] = {0};
    int deaf = socket(AF_INET, SOCK_STREAM, 0), fd = socket(AF_INET, SOCK_STREAM, 0), taken;
    bind(deaf, (struct sockaddr *)&here, sizeof here);
    listen(deaf, 1);
    getsockname(deaf, (struct sockaddr *)&here, &size);
    if (connect(fd, (struct sockaddr *)&here, sizeof here)) perror("connect");
    fcntl(fd, F_SETFL, O_NONBLOCK);
    while (write(fd, many, sizeof many) > 0) {}
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &on, sizeof on);
    taken = give(to, many, 1, fd);
    if (!taken) setsockopt(fd, SOL_SOCKET, SO_LINGER, &off, sizeof off);
    close(fd);
    return taken;
}

static int linger(int count) {
    int to[count], taken = 0;
    for (int index = 0; index < count; index++) to[index] = dial();
    /* The agent accepts all of them before one of them can block it. */
    usleep(200000);
    for (int index = 0; index < count; index++) taken += pass(to[index]);
    return taken;
}

static int hellos(int count) {
    ino_t pages[count];
    int kept = 0, page;
    uint64_t same = image;
    while (count-- > 0) {
        struct stat status;
        int known = 0;
        image = same;
        close(hello(&page));
        if (page < 0 || fstat(page, &status)) continue;
        while (known < kept && pages[known] != status.st_ino) known++;
        pages[known] = status.st_ino;
        kept += known == kept;
    }
    return kept;
}

static int start[2], answers[2];

static int granted(void) {
    unsigned char frame[8] = {6, 0, 2, 0, 1, 0, 0, 0}, answer[64];
    int page, fd = hello(&page);
    return page >= 0 && give(fd, frame, sizeof frame, -1) && take(fd, answer, sizeof answer, &page) == 2;
}

static int faults(void) {
    /* Account 0, CUDA error 700, and no re-exec is possible. */
    unsigned char frame[9] = {7, 0, 8, 0, 0xbc, 2, 0, 0, 0}, answer[64];
    int page, fd = hello(&page);
    return page >= 0 && give(fd, frame, sizeof frame, -1) && take(fd, answer, sizeof answer, &page) >= 0;
}

/* The forked processes, and the number of them whose hello was answered. */
static int members;
static int *greeted;

static int lingers(void) {
    int page, fd = hello(&page);
    __atomic_add_fetch(greeted, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(greeted, __ATOMIC_SEQ_CST) < members) usleep(1000);
    return page >= 0 && pass(fd);
}

/* The program runs with the driver's folder as its library path. */
static int past(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context = NULL;
    uint64_t at = 0;
    if (!driver) return 0;
    int (*init)(unsigned) = dlsym(driver, "cuInit");
    int (*retain)(void **, int) = dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*current)(void *) = dlsym(driver, "cuCtxSetCurrent");
    int (*allocate)(uint64_t *, size_t) = dlsym(driver, "cuMemAlloc_v2");
    return !init(0) && !retain(&context, 0) && !current(context) && !allocate(&at, 1 << 20);
}

static void member(int (*act)(void)) {
    char done, end;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(start[1]);
    /* Reads until the other end is closed. */
    if (read(start[0], &end, 1) < 0) perror("read");
    done = act();
    if (write(answers[1], &done, 1) < 0) perror("write");
    close(answers[1]);
    for (;;) pause();
}

static int connections(int count, int port) {
    struct sockaddr_in to = {AF_INET, htons(port), {htonl(INADDR_LOOPBACK)}};
    char header[12 << 10] = "GET /metrics HTTP/1.1\r\nA: ";
    int opened;
    memset(header + strlen(header), 'a', sizeof header - strlen(header));
    for (opened = 0; opened < count; opened++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to)) {
            perror("connect");
            break;
        }
        /* The agent may have closed the connection already. */
        send(fd, header, sizeof header, MSG_NOSIGNAL);
    }
    return opened;
}

int main(int count, char **words) {
    struct rlimit files;
    char line[256], how[16], done;
    int number, port;
    path = words[count - 1];
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "linger %d", &number) == 1) {
            printf("%d\n", linger(number));
        } else if (sscanf(line, "hellos %d", &number) == 1) {
            printf("%d\n", hellos(number));
        } else if (sscanf(line, "connect %d %d", &number, &port) == 2) {
            printf("%d\n", connections(number, port));
        } else if (sscanf(line, "crowd %d %15s", &members, how) == 2) {
            int (*act)(void) = !strcmp(how, "grant")    ? granted
                               : !strcmp(how, "fault")  ? faults
                               : !strcmp(how, "linger") ? lingers
                                                        : past;
            if (pipe2(start, O_CLOEXEC) || pipe2(answers, O_CLOEXEC)) return 1;
            greeted = mmap(NULL, sizeof *greeted, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            for (number = 0; number < members; number++) {
                int child = fork();
                if (!child) member(act);
                printf("%d\n", child);
            }
        } else if (!strncmp(line, "go", 2)) {
            close(start[1]);
            close(answers[1]);
            /* Reads until each process has written or ended. */
            for (number = 0; read(answers[0], &done, 1) == 1;) number += done;
            printf("%d\n", number);
        }
    }
    return 0;
}
