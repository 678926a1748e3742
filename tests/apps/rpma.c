// A server and a client of librpma: the client writes, flushes, writes eight bytes atomically and reads all
// back; both sides compare.
// usage: rpma server|client ADDRESS PORT

#include <librpma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 4 << 20, BLOCK = 64 << 10, ROUNDS = 4 };

#define MUST(call) \
    do { \
        int error = (call); \
        if (error) { \
            fprintf(stderr, "%s: %s\n", #call, rpma_err_2str(error)); \
            exit(1); \
        } \
    } while (0)

struct side {
    struct rpma_peer *peer;
    struct rpma_mr_local *region;
    uint8_t *memory;
};

static uint8_t expected(size_t at, int round) { return (uint8_t)(at * 7 + at / 251 + (size_t)round * 13); }

static void compare(const uint8_t *memory, const char *what)
{
    for (size_t at = 0; at < SIZE; at++) {
        uint8_t right = at < 8 ? (uint8_t)('a' + at) : expected(at, ROUNDS - 1);
        if (memory[at] != right) {
            fprintf(stderr, "%s: byte %zu is %u, not %u\n", what, at, memory[at], right);
            exit(1);
        }
    }
}

static struct side prepare(const char *address, enum rpma_util_ibv_context_type where)
{
    struct side side;
    struct ibv_context *context;
    int usage = RPMA_MR_USAGE_READ_SRC | RPMA_MR_USAGE_READ_DST | RPMA_MR_USAGE_WRITE_SRC |
                RPMA_MR_USAGE_WRITE_DST | RPMA_MR_USAGE_FLUSH_TYPE_VISIBILITY;
    MUST(rpma_utils_get_ibv_context(address, where, &context));
    MUST(rpma_peer_new(context, &side.peer));
    side.memory = aligned_alloc(4096, SIZE);
    memset(side.memory, 0, SIZE);
    MUST(rpma_mr_reg(side.peer, side.memory, SIZE, usage, &side.region));
    return side;
}

static void await_event(struct rpma_conn *connection, enum rpma_conn_event wanted)
{
    enum rpma_conn_event event;
    MUST(rpma_conn_next_event(connection, &event));
    if (event != wanted) {
        fprintf(stderr, "%s, not %s\n", rpma_utils_conn_event_2str(event),
                rpma_utils_conn_event_2str(wanted));
        exit(1);
    }
}

static void await_completion(struct rpma_conn *connection, const void *operation)
{
    struct rpma_cq *completions;
    struct ibv_wc completion;
    MUST(rpma_conn_get_cq(connection, &completions));
    MUST(rpma_cq_wait(completions));
    MUST(rpma_cq_get_wc(completions, 1, &completion, NULL));
    if (completion.status != IBV_WC_SUCCESS || completion.wr_id != (uintptr_t)operation) {
        fprintf(stderr, "completion: %s\n", ibv_wc_status_str(completion.status));
        exit(1);
    }
}

static void serve(const char *address, const char *port)
{
    struct side side = prepare(address, RPMA_UTIL_IBV_CONTEXT_LOCAL);
    struct rpma_ep *endpoint;
    struct rpma_conn_req *request;
    struct rpma_conn *connection;
    uint8_t descriptor[256];
    size_t size;
    MUST(rpma_mr_get_descriptor_size(side.region, &size));
    MUST(rpma_mr_get_descriptor(side.region, descriptor));
    struct rpma_conn_private_data data = {descriptor, (uint8_t)size};
    MUST(rpma_ep_listen(side.peer, address, port, &endpoint));
    MUST(rpma_ep_next_conn_req(endpoint, NULL, &request));
    MUST(rpma_conn_req_connect(&request, &data, &connection));
    await_event(connection, RPMA_CONN_ESTABLISHED);
    await_event(connection, RPMA_CONN_CLOSED);
    compare(side.memory, "written");
    MUST(rpma_conn_disconnect(connection));
    MUST(rpma_conn_delete(&connection));
    MUST(rpma_ep_shutdown(&endpoint));
    MUST(rpma_mr_dereg(&side.region));
    MUST(rpma_peer_delete(&side.peer));
}

// Writes all of the memory in blocks, the last of them first, and has it flushed.
static void write_all(struct rpma_conn *connection, struct side *side, struct rpma_mr_remote *remote,
                      int round)
{
    for (size_t at = 0; at < SIZE; at++)
        side->memory[at] = expected(at, round);
    for (size_t end = SIZE; end > 0; end -= BLOCK) {
        size_t at = end - BLOCK;
        MUST(rpma_write(connection, remote, at, side->region, at, BLOCK, RPMA_F_COMPLETION_ALWAYS, &end));
        await_completion(connection, &end);
    }
    MUST(rpma_flush(connection, remote, 0, SIZE, RPMA_FLUSH_TYPE_VISIBILITY, RPMA_F_COMPLETION_ALWAYS, side));
    await_completion(connection, side);
}

static void connect_and_move(const char *address, const char *port)
{
    struct side side = prepare(address, RPMA_UTIL_IBV_CONTEXT_REMOTE);
    struct rpma_conn_req *request;
    struct rpma_conn *connection;
    struct rpma_conn_private_data data;
    struct rpma_mr_remote *remote;
    MUST(rpma_conn_req_new(side.peer, address, port, NULL, &request));
    MUST(rpma_conn_req_connect(&request, NULL, &connection));
    await_event(connection, RPMA_CONN_ESTABLISHED);
    MUST(rpma_conn_get_private_data(connection, &data));
    MUST(rpma_mr_remote_from_descriptor(data.ptr, data.len, &remote));
    for (int round = 0; round < ROUNDS; round++)
        write_all(connection, &side, remote, round);
    MUST(rpma_atomic_write(connection, remote, 0, "abcdefgh", RPMA_F_COMPLETION_ALWAYS, &side));
    await_completion(connection, &side);
    memset(side.memory, 0, SIZE);
    MUST(rpma_read(connection, side.region, 0, remote, 0, SIZE, RPMA_F_COMPLETION_ALWAYS, &data));
    await_completion(connection, &data);
    compare(side.memory, "read");
    MUST(rpma_conn_disconnect(connection));
    await_event(connection, RPMA_CONN_CLOSED);
    MUST(rpma_mr_remote_delete(&remote));
    MUST(rpma_conn_delete(&connection));
    MUST(rpma_mr_dereg(&side.region));
    MUST(rpma_peer_delete(&side.peer));
    printf("all %d bytes, %d times written, flushed and read, are right\n", SIZE, ROUNDS);
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: rpma server|client ADDRESS PORT\n");
        return 2;
    }
    if (strcmp(argv[1], "server") == 0)
        serve(argv[2], argv[3]);
    else
        connect_and_move(argv[2], argv[3]);
    return 0;
}
