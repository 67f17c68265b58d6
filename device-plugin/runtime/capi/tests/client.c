/* A C program that knows the header only: run as `client SOCKET`, on the simulated driver, where device memory is the host's. */
#include <bursar.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define MUST(what)                                                                                                     \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "line %d: %s: %s (%d)\n", __LINE__, #what, bursar_error(), bursar_cuda());                 \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

int main(int argc, char **argv) {
    bursar_question question = {.name = "weights", .key = {1, 2, 3}};
    bursar_lease *lease = NULL;
    bursar_view view;
    unsigned char *memory, text[8];
    uint64_t address;

    printf("question %zu %zu %zu %zu %zu %zu %zu\n", sizeof question, offsetof(bursar_question, socket),
           offsetof(bursar_question, key), offsetof(bursar_question, bytes), offsetof(bursar_question, patience_ms),
           offsetof(bursar_question, device), sizeof(bursar_status));
    printf("view %zu %zu %zu %zu %zu\n", sizeof view, offsetof(bursar_view, bytes), offsetof(bursar_view, lease),
           offsetof(bursar_view, generation), offsetof(bursar_view, ready));
    if (argc < 2) {
        return 0;
    }
    question.socket = argv[1];

    /* Wrong arguments are answers, not crashes. */
    MUST(bursar_open(NULL, &lease) == BURSAR_INVALID);
    MUST(bursar_open(&question, NULL) == BURSAR_INVALID);
    MUST(bursar_look(NULL, &view) == BURSAR_INVALID && bursar_commit(NULL) == BURSAR_INVALID);
    MUST(bursar_discard(NULL) == BURSAR_INVALID);
    bursar_close(NULL);
    question.device = 7;
    MUST(bursar_open(&question, &lease) == BURSAR_DRIVER && strstr(bursar_error(), "device 7") != NULL);
    question.device = 0;
    question.name = "";
    MUST(bursar_open(&question, &lease) == BURSAR_INVALID);
    question.name = "weights";
    question.socket = "/nowhere";
    MUST(bursar_open(&question, &lease) == BURSAR_BUSY);
    question.socket = argv[1];

    MUST(bursar_open(&question, &lease) == BURSAR_MISSING);
    question.bytes = (uint64_t)1 << 60;
    MUST(bursar_open(&question, &lease) == BURSAR_DRIVER && bursar_cuda() == 2);

    question.bytes = 3 << 20;
    MUST(bursar_open(&question, &lease) == BURSAR_OK);
    MUST(bursar_look(lease, &view) == BURSAR_OK);
    MUST(view.ready == 0 && view.bytes == 4 << 20 && view.address % (2 << 20) == 0);
    memory = (unsigned char *)(uintptr_t)view.address;
    MUST(memory[0] == 0 && memory[view.bytes - 1] == 0);
    memset(memory, 77, view.bytes);
    address = view.address;
    MUST(bursar_write(lease, view.bytes - 4, "last", 4) == BURSAR_OK && memcmp(memory + view.bytes - 4, "last", 4) == 0);
    MUST(bursar_write(lease, view.bytes - 3, "last", 4) == BURSAR_INVALID);
    MUST(bursar_write(lease, UINT64_MAX, "last", 4) == BURSAR_INVALID);
    MUST(bursar_read(lease, 0, text, 4) == BURSAR_INVALID);
    MUST(bursar_commit(lease) == BURSAR_OK && bursar_commit(lease) == BURSAR_OK);
    MUST(bursar_look(lease, &view) == BURSAR_OK && view.ready == 1 && view.address == address);
    bursar_close(lease);

    question.bytes = 0;
    MUST(bursar_open(&question, &lease) == BURSAR_OK);
    MUST(bursar_look(lease, &view) == BURSAR_OK && view.ready == 1 && view.bytes == 4 << 20 && view.generation != 0);
    memory = (unsigned char *)(uintptr_t)view.address;
    MUST(memory[0] == 77 && bursar_read(lease, view.bytes - 5, text, 5) == BURSAR_OK && memcmp(text, "\115last", 5) == 0);
    MUST(bursar_write(lease, 0, "last", 4) == BURSAR_INVALID);
    MUST(bursar_read(lease, 0, NULL, 4) == BURSAR_INVALID && bursar_write(NULL, 0, text, 4) == BURSAR_INVALID);
    MUST(bursar_discard(lease) == BURSAR_OK);
    MUST(bursar_open(&question, &lease) == BURSAR_MISSING);
    puts("done");
    return 0;
}
