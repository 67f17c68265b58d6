/* A C program that knows the header only: run as `client SOCKET`, on the simulated driver, where device memory is the host's. */
#include <bursar.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define KEY "8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c"
#define TOKEN                                                                                                          \
    "028a88e3dd7409f195066e6f64652d61284750552d30303030303030302d303030302d303030302d303030302d3030303030"             \
    "30303030303031050000000000000003000000000000000e0000000000000002000000000000006300000000000000db17f4"             \
    "c94f73ca32563fd859cd128119d135d4e91ad1423e3ba917e07b2459cce2008267198546a4a0458e1fc119e6d5c0917d651a"             \
    "6ef7c4a6c32d110e952e0e"

#define MUST(what)                                                                                                     \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "line %d: %s: %s (%d)\n", __LINE__, #what, bursar_error(), bursar_cuda());                 \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

/* Verifies a token without an agent and a GPU. The token was signed by the Python code of RFC 8032. */
static int verify(void) {
    static const char text[] = TOKEN;
    static const char key_text[] = KEY;
    bursar_token token = {0};
    bursar_memory memory;
    uint8_t key[32];
    int32_t current = -1;
    unsigned byte;
    size_t at;

    for (at = 0; at < sizeof key; at++) {
        MUST(sscanf(key_text + 2 * at, "%2x", &byte) == 1);
        key[at] = (uint8_t)byte;
    }
    token.length = sizeof text / 2;
    for (at = 0; at < token.length; at++) {
        MUST(sscanf(text + 2 * at, "%2x", &byte) == 1);
        token.bytes[at] = (uint8_t)byte;
    }
    MUST(bursar_verify(&token, key, &memory) == BURSAR_OK);
    MUST(strcmp(memory.node, "node-a") == 0 && strcmp(memory.gpu, "GPU-00000000-0000-0000-0000-000000000001") == 0);
    MUST(memory.container == 5 && memory.gpu_generation == 3 && memory.process_generation == 14);
    MUST(memory.lease == 2 && memory.block == 99);
    MUST(bursar_is_current(&memory, memory.gpu, 3, &current) == BURSAR_OK && current == 1);
    MUST(bursar_is_current(&memory, memory.gpu, 4, &current) == BURSAR_OK && current == 0);
    MUST(bursar_is_current(&memory, "GPU-other", 3, &current) == BURSAR_INVALID);
    MUST(bursar_is_current(NULL, memory.gpu, 3, &current) == BURSAR_INVALID);
    MUST(bursar_is_current(&memory, NULL, 3, &current) == BURSAR_INVALID);
    MUST(bursar_is_current(&memory, memory.gpu, 3, NULL) == BURSAR_INVALID);
    token.bytes[token.length - 1] ^= 1;
    MUST(bursar_verify(&token, key, &memory) == BURSAR_REFUSED && strstr(bursar_error(), "signature") != NULL);
    token.bytes[token.length - 1] ^= 1;
    key[0] ^= 1;
    MUST(bursar_verify(&token, key, &memory) == BURSAR_REFUSED && strstr(bursar_error(), "another key") != NULL);
    token.length = 0;
    MUST(bursar_verify(&token, key, &memory) == BURSAR_INVALID);
    token.length = BURSAR_MAX_TOKEN + 1;
    MUST(bursar_verify(&token, key, &memory) == BURSAR_INVALID);
    MUST(bursar_verify(NULL, key, &memory) == BURSAR_INVALID && bursar_verify(&token, NULL, &memory) == BURSAR_INVALID);
    token.length = 1;
    MUST(bursar_verify(&token, key, NULL) == BURSAR_INVALID);
    return 0;
}

int main(int argc, char **argv) {
    bursar_open_args args = {.name = "weights", .key = {1, 2, 3}};
    bursar_lease *lease = NULL;
    bursar_lease_state view;
    bursar_token token;
    bursar_memory named;
    unsigned char *memory, text[8];
    uint64_t address;

    printf("args %zu %zu %zu %zu %zu %zu %zu\n", sizeof args, offsetof(bursar_open_args, socket),
           offsetof(bursar_open_args, key), offsetof(bursar_open_args, bytes), offsetof(bursar_open_args, timeout_ms),
           offsetof(bursar_open_args, device), sizeof(bursar_status));
    printf("view %zu %zu %zu %zu %zu\n", sizeof view, offsetof(bursar_lease_state, bytes), offsetof(bursar_lease_state, lease),
           offsetof(bursar_lease_state, generation), offsetof(bursar_lease_state, ready));
    printf("token %zu %zu memory %zu %zu %zu %zu %zu\n", sizeof(bursar_token), offsetof(bursar_token, bytes),
           sizeof(bursar_memory), offsetof(bursar_memory, process_generation), offsetof(bursar_memory, lease),
           offsetof(bursar_memory, node), offsetof(bursar_memory, gpu));
    if (verify() != 0) {
        return 1;
    }
    if (argc < 2) {
        return 0;
    }
    args.socket = argv[1];

    /* Wrong arguments are answers, not crashes. */
    MUST(bursar_retained_open(NULL, &lease) == BURSAR_INVALID);
    MUST(bursar_retained_open(&args, NULL) == BURSAR_INVALID);
    MUST(bursar_retained_describe(NULL, &view) == BURSAR_INVALID && bursar_retained_commit(NULL) == BURSAR_INVALID);
    MUST(bursar_retained_discard(NULL) == BURSAR_INVALID);
    bursar_retained_close(NULL);
    args.device = 7;
    lease = (bursar_lease *)&view;
    MUST(bursar_retained_open(&args, &lease) == BURSAR_DRIVER && strstr(bursar_error(), "device 7") != NULL && lease == NULL);
    args.device = 0;
    args.name = "";
    MUST(bursar_retained_open(&args, &lease) == BURSAR_INVALID);
    args.name = "weights";
    args.socket = "/nowhere";
    MUST(bursar_retained_open(&args, &lease) == BURSAR_BUSY);
    args.socket = argv[1];

    MUST(bursar_retained_open(&args, &lease) == BURSAR_MISSING);
    args.bytes = (uint64_t)1 << 60;
    MUST(bursar_retained_open(&args, &lease) == BURSAR_DRIVER && bursar_cuda() == 2);

    args.bytes = 3 << 20;
    MUST(bursar_retained_open(&args, &lease) == BURSAR_OK);
    MUST(bursar_retained_describe(lease, &view) == BURSAR_OK);
    MUST(view.ready == 0 && view.bytes == 4 << 20 && view.address % (2 << 20) == 0);
    memory = (unsigned char *)(uintptr_t)view.address;
    MUST(memory[0] == 0 && memory[view.bytes - 1] == 0);
    memset(memory, 77, view.bytes);
    address = view.address;
    MUST(bursar_retained_write(lease, view.bytes - 4, "last", 4) == BURSAR_OK && memcmp(memory + view.bytes - 4, "last", 4) == 0);
    MUST(bursar_retained_write(lease, view.bytes - 3, "last", 4) == BURSAR_INVALID);
    MUST(bursar_retained_write(lease, UINT64_MAX, "last", 4) == BURSAR_INVALID);
    MUST(bursar_retained_read(lease, 0, text, 4) == BURSAR_INVALID);
    MUST(bursar_retained_commit(lease) == BURSAR_OK && bursar_retained_commit(lease) == BURSAR_OK);
    MUST(bursar_retained_describe(lease, &view) == BURSAR_OK && view.ready == 1 && view.address == address);
    bursar_retained_close(lease);

    args.bytes = 0;
    MUST(bursar_retained_open(&args, &lease) == BURSAR_OK);
    MUST(bursar_retained_describe(lease, &view) == BURSAR_OK && view.ready == 1 && view.bytes == 4 << 20 && view.generation != 0);
    memory = (unsigned char *)(uintptr_t)view.address;
    MUST(memory[0] == 77 && bursar_retained_read(lease, view.bytes - 5, text, 5) == BURSAR_OK && memcmp(text, "\115last", 5) == 0);
    MUST(bursar_retained_write(lease, 0, "last", 4) == BURSAR_INVALID);
    MUST(bursar_seal(argv[1], 0, lease, 8, NULL) == BURSAR_INVALID);
    MUST(bursar_seal("/nowhere", 0, lease, 8, &token) == BURSAR_BUSY);
    MUST(bursar_seal("/nowhere", 7, NULL, 8, &token) == BURSAR_DRIVER);
    MUST(bursar_seal(argv[1], 0, lease, 8, &token) == BURSAR_OK);
    MUST(bursar_redeem(argv[1], &token, &named) == BURSAR_OK && named.lease == view.lease && named.block == 8);
    MUST(bursar_seal(argv[1], 0, NULL, 9, &token) == BURSAR_OK);
    MUST(bursar_redeem(argv[1], &token, &named) == BURSAR_OK && named.lease == 0 && named.block == 9);
    token.bytes[token.length - 1] ^= 1;
    MUST(bursar_redeem(argv[1], &token, &named) == BURSAR_REFUSED);
    MUST(bursar_redeem(argv[1], &token, NULL) == BURSAR_INVALID);
    MUST(bursar_retained_read(lease, 0, NULL, 4) == BURSAR_INVALID && bursar_retained_write(NULL, 0, text, 4) == BURSAR_INVALID);
    MUST(bursar_retained_discard(lease) == BURSAR_OK);
    MUST(bursar_retained_open(&args, &lease) == BURSAR_MISSING);
    puts("done");
    return 0;
}
