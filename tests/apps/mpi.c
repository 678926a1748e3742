// An MPI program that checks every byte it moves: point-to-point, collectives, one-sided; several sizes and
// types. Any number of ranks from 2 on. Prints one line at rank 0 if all is right; aborts at the first wrong
// value.

#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ELEMENTS 200000
#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))

// Counts of elements, from nothing over eager messages to rendezvous.
static const int counts[] = {0, 1, 7, 256, 1000, 8192, 50001, ELEMENTS};
static int rank, ranks;
static long checked;

// The value at `at` in what `from` sends to `to` in round `round`: small, so that sums are exact in every
// type.
static int value(int from, int to, int round, int at)
{
    return (from * 31 + to * 17 + round * 7 + at) % 1009;
}

static void wrong(const char *what, int at, double got, double expected)
{
    fprintf(stderr, "rank %d: %s: element %d is %g, not %g\n", rank, what, at, got, expected);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void expect(const char *what, int at, double got, double expected)
{
    checked++;
    if (got != expected)
        wrong(what, at, got, expected);
}

// Arrays of a type of MPI: how an element is set and read.
struct type {
    const char *name;
    MPI_Datatype mpi;
    size_t size;
};

static void set(const struct type *type, void *array, int at, int to)
{
    if (type->mpi == MPI_INT)
        ((int *)array)[at] = to;
    else if (type->mpi == MPI_DOUBLE)
        ((double *)array)[at] = to;
    else
        ((uint16_t *)array)[at] = (uint16_t)to;
}

static double get(const struct type *type, const void *array, int at)
{
    if (type->mpi == MPI_INT)
        return ((const int *)array)[at];
    if (type->mpi == MPI_DOUBLE)
        return ((const double *)array)[at];
    return ((const uint16_t *)array)[at];
}

static void fill(const struct type *type, void *array, int to, int round, int count)
{
    for (int at = 0; at < count; at++)
        set(type, array, at, value(rank, to, round, at));
}

static void compare(const char *what, const struct type *type, const void *array, int from, int to, int round,
                    int count)
{
    for (int at = 0; at < count; at++)
        expect(what, at, get(type, array, at), value(from, to, round, at));
}

static void *array_of(const struct type *type, size_t count)
{
    void *array = calloc(count + 1, type->size);
    if (!array)
        MPI_Abort(MPI_COMM_WORLD, 1);
    return array;
}

// Blocking messages around the ring: the even ranks send first.
static void ring(const struct type *type, void *out, void *in, int round, int count)
{
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    MPI_Status status;
    fill(type, out, next, round, count);
    if (rank % 2 == 0) {
        MPI_Ssend(out, count, type->mpi, next, round, MPI_COMM_WORLD);
        MPI_Recv(in, count, type->mpi, previous, round, MPI_COMM_WORLD, &status);
    } else {
        MPI_Recv(in, count, type->mpi, previous, round, MPI_COMM_WORLD, &status);
        MPI_Send(out, count, type->mpi, next, round, MPI_COMM_WORLD);
    }
    int got;
    MPI_Get_count(&status, type->mpi, &got);
    expect("count of a message", 0, got, count);
    compare("send and receive", type, in, previous, rank, round, count);
}

// All pairs at once, both ways; receives are posted last for one half of the sources, so messages come
// unexpected.
static void all_pairs(const struct type *type, int round, int count)
{
    void *out = array_of(type, (size_t)ranks * count), *in = array_of(type, (size_t)ranks * count);
    MPI_Request requests[2 * ranks];
    MPI_Status statuses[2 * ranks];
    size_t stride = count * type->size;
    int posted = 0;
    for (int peer = rank % 2; peer < ranks; peer += 2)
        MPI_Irecv((char *)in + peer * stride, count, type->mpi, peer, round, MPI_COMM_WORLD,
                  &requests[posted++]);
    for (int peer = 0; peer < ranks; peer++) {
        fill(type, (char *)out + peer * stride, peer, round, count);
        MPI_Isend((char *)out + peer * stride, count, type->mpi, peer, round, MPI_COMM_WORLD,
                  &requests[posted++]);
    }
    for (int peer = 1 - rank % 2; peer < ranks; peer += 2)
        MPI_Irecv((char *)in + peer * stride, count, type->mpi, peer, round, MPI_COMM_WORLD,
                  &requests[posted++]);
    MPI_Waitall(posted, requests, statuses);
    for (int peer = 0; peer < ranks; peer++)
        compare("isend and irecv", type, (char *)in + peer * stride, peer, rank, round, count);
    free(out);
    free(in);
}

// Many small messages in a row from everyone to rank 0, which probes for them in whatever order they come.
static void many(const struct type *type, void *in)
{
    enum { EACH = 200 };
    int next[ranks];
    memset(next, 0, sizeof next);
    if (rank != 0)
        for (int i = 0; i < EACH; i++) {
            fill(type, in, 0, i, i);
            MPI_Send(in, i, type->mpi, 0, 99, MPI_COMM_WORLD);
        }
    for (int i = 0; rank == 0 && i < EACH * (ranks - 1); i++) {
        MPI_Status status;
        int count;
        MPI_Probe(MPI_ANY_SOURCE, 99, MPI_COMM_WORLD, &status);
        MPI_Get_count(&status, type->mpi, &count);
        MPI_Recv(in, count, type->mpi, status.MPI_SOURCE, 99, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        expect("order of messages", i, count, next[status.MPI_SOURCE]++);
        compare("probe and receive", type, in, status.MPI_SOURCE, 0, count, count);
    }
}

// Every second element of an array.
static void strided(const struct type *type, void *out, void *in)
{
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks, count = ELEMENTS / 2;
    MPI_Datatype every_second;
    MPI_Type_vector(count, 1, 2, type->mpi, &every_second);
    MPI_Type_commit(&every_second);
    fill(type, out, next, 5, ELEMENTS);
    memset(in, 0, ELEMENTS * type->size);
    MPI_Sendrecv(out, 1, every_second, next, 3, in, 1, every_second, previous, 3, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    for (int at = 0; at < ELEMENTS; at++)
        expect("strided", at, get(type, in, at), at % 2 ? 0 : value(previous, rank, 5, at));
    MPI_Type_free(&every_second);
}

static void one_to_all(const struct type *type, void *out, void *in, int root, int round, int count)
{
    int part = count / ranks;
    if (rank == root)
        fill(type, in, root, round, count);
    MPI_Bcast(in, count, type->mpi, root, MPI_COMM_WORLD);
    compare("bcast", type, in, root, root, round, count);
    fill(type, out, root, round, part * ranks);
    MPI_Scatter(out, part, type->mpi, in, part, type->mpi, root, MPI_COMM_WORLD);
    for (int at = 0; at < part; at++)
        expect("scatter", at, get(type, in, at), value(root, root, round, rank * part + at));
    fill(type, out, root, round, part);
    MPI_Gather(out, part, type->mpi, in, part, type->mpi, root, MPI_COMM_WORLD);
    for (int from = 0; rank == root && from < ranks; from++)
        compare("gather", type, (char *)in + from * part * type->size, from, root, round, part);
}

static int sum(int to, int round, int at)
{
    int total = 0;
    for (int from = 0; from < ranks; from++)
        total += value(from, to, round, at);
    return total;
}

static void reductions(const struct type *type, void *out, void *in, int root, int round, int count)
{
    MPI_Request request;
    fill(type, out, 0, round, count);
    MPI_Reduce(out, in, count, type->mpi, MPI_SUM, root, MPI_COMM_WORLD);
    for (int at = 0; rank == root && at < count; at++)
        expect("reduce", at, get(type, in, at), sum(0, round, at));
    memset(in, 0, count * type->size);
    MPI_Iallreduce(out, in, count, type->mpi, MPI_SUM, MPI_COMM_WORLD, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    for (int at = 0; at < count; at++)
        expect("iallreduce", at, get(type, in, at), sum(0, round, at));
    MPI_Allreduce(out, in, count, type->mpi, MPI_MAX, MPI_COMM_WORLD);
    for (int at = 0; at < count; at++) {
        int most = 0;
        for (int from = 0; from < ranks; from++)
            if (value(from, 0, round, at) > most)
                most = value(from, 0, round, at);
        expect("allreduce", at, get(type, in, at), most);
    }
    int part = count / ranks;
    MPI_Reduce_scatter_block(out, in, part, type->mpi, MPI_SUM, MPI_COMM_WORLD);
    for (int at = 0; at < part; at++)
        expect("reduce_scatter", at, get(type, in, at), sum(0, round, rank * part + at));
    MPI_Scan(out, in, count, type->mpi, MPI_SUM, MPI_COMM_WORLD);
    for (int at = 0; at < count; at++) {
        int so_far = 0;
        for (int from = 0; from <= rank; from++)
            so_far += value(from, 0, round, at);
        expect("scan", at, get(type, in, at), so_far);
    }
}

static void all_to_all(const struct type *type, void *out, void *in, int round, int count)
{
    int part = count / ranks, lengths[ranks], places[ranks];
    size_t stride = part * type->size;
    for (int to = 0; to < ranks; to++)
        fill(type, (char *)out + to * stride, to, round, part);
    MPI_Alltoall(out, part, type->mpi, in, part, type->mpi, MPI_COMM_WORLD);
    for (int from = 0; from < ranks; from++)
        compare("alltoall", type, (char *)in + from * stride, from, rank, round, part);
    MPI_Allgather(out, part, type->mpi, in, part, type->mpi, MPI_COMM_WORLD);
    for (int from = 0; from < ranks; from++)
        compare("allgather", type, (char *)in + from * stride, from, 0, round, part);
    // Each pair its own length: the smaller, the farther the ranks are from each other.
    for (int peer = 0; peer < ranks; peer++) {
        lengths[peer] = part / (1 + abs(peer - rank));
        places[peer] = peer * part;
    }
    memset(in, 0, part * ranks * type->size);
    MPI_Alltoallv(out, lengths, places, type->mpi, in, lengths, places, type->mpi, MPI_COMM_WORLD);
    for (int from = 0; from < ranks; from++)
        compare("alltoallv", type, (char *)in + from * stride, from, rank, round, lengths[from]);
}

// Put, get and accumulate between fences: each rank has a part of every window.
static void fences(const struct type *type, void *out, void *in, int round, int count)
{
    int part = count / ranks;
    size_t stride = part * type->size;
    char *base;
    MPI_Win window;
    MPI_Win_allocate(part * ranks * type->size, type->size, MPI_INFO_NULL, MPI_COMM_WORLD, &base, &window);
    memset(base, 0, part * ranks * type->size);
    MPI_Win_fence(0, window);
    for (int to = 0; to < ranks; to++) {
        fill(type, (char *)out + to * stride, to, round, part);
        MPI_Put((char *)out + to * stride, part, type->mpi, to, rank * part, part, type->mpi, window);
    }
    MPI_Win_fence(0, window);
    for (int from = 0; from < ranks; from++)
        compare("put", type, base + from * stride, from, rank, round, part);
    MPI_Win_fence(0, window);
    for (int from = 0; from < ranks; from++)
        MPI_Get((char *)in + from * stride, part, type->mpi, from, rank * part, part, type->mpi, window);
    MPI_Win_fence(0, window);
    for (int from = 0; from < ranks; from++)
        compare("get", type, (char *)in + from * stride, rank, from, round, part);
    // Everyone adds to the same part of everyone: to what it put there.
    for (int to = 0; to < ranks; to++)
        MPI_Accumulate((char *)out + to * stride, part, type->mpi, to, 0, part, type->mpi, MPI_SUM, window);
    MPI_Win_fence(0, window);
    for (int at = 0; at < part; at++)
        expect("accumulate", at, get(type, base, at), value(0, rank, round, at) + sum(rank, round, at));
    MPI_Win_free(&window);
}

// Counters at every rank that all ranks add to, and one that they take turns to swap, in an epoch that all
// share.
static void counters(void)
{
    enum { ROUNDS = 100 };
    int64_t *base, one = 1, before, last = -1;
    MPI_Win window;
    MPI_Win_allocate(2 * sizeof *base, sizeof *base, MPI_INFO_NULL, MPI_COMM_WORLD, &base, &window);
    base[0] = base[1] = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock_all(0, window);
    for (int round = 0; round < ROUNDS; round++)
        for (int to = 0; to < ranks; to++) {
            MPI_Fetch_and_op(&one, &before, MPI_INT64_T, to, 0, MPI_SUM, window);
            MPI_Win_flush(to, window);
            if (to == 0) {
                expect("fetch_and_op went backwards", round, before > last, 1);
                last = before;
            }
        }
    for (int round = 0; round < ROUNDS; round++) {
        int64_t seen = -1, read = 0, more;
        while (seen != read) {
            if (seen >= 0)
                read = seen;
            more = read + 1;
            MPI_Compare_and_swap(&more, &read, &seen, MPI_INT64_T, 0, 1, window);
            MPI_Win_flush(0, window);
        }
    }
    MPI_Win_unlock_all(window);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, rank, 0, window);
    expect("fetch_and_op", 0, (double)base[0], ROUNDS * ranks);
    expect("compare_and_swap", 0, (double)base[1], rank == 0 ? ROUNDS * ranks : 0);
    MPI_Win_unlock(rank, window);
    MPI_Win_free(&window);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const struct type types[] = {
        {"uint16", MPI_UINT16_T, 2}, {"int", MPI_INT, sizeof(int)}, {"double", MPI_DOUBLE, sizeof(double)}};
    int one_sided = argc < 2 || strcmp(argv[1], "two-sided") != 0;
    for (size_t t = 0; t < LENGTH(types); t++) {
        const struct type *type = &types[t];
        void *out = array_of(type, ELEMENTS), *in = array_of(type, ELEMENTS);
        for (size_t c = 0; c < LENGTH(counts); c++) {
            int round = (int)(t * LENGTH(counts) + c), root = round % ranks;
            ring(type, out, in, round, counts[c]);
            all_pairs(type, round, counts[c] / ranks);
            one_to_all(type, out, in, root, round, counts[c]);
            reductions(type, out, in, root, round, counts[c]);
            all_to_all(type, out, in, round, counts[c]);
            if (one_sided)
                fences(type, out, in, round, counts[c]);
        }
        many(type, in);
        strided(type, out, in);
        free(out);
        free(in);
    }
    if (one_sided)
        counters();
    long all = 0;
    MPI_Reduce(&checked, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%d ranks: %ld values are right\n", ranks, all);
    MPI_Finalize();
    return 0;
}
