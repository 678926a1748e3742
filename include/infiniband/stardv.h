/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Direct verbs of starverbs: what the card has and infiniband/verbs.h has no word for. See stardv(7).
 *
 * A program that calls them is linked with the card's own library:
 *
 *	cc prog.c $(pkg-config --cflags --libs starverbs)
 *	starverbs run -- ./a.out
 *
 * or, where it is not installed, cc -I dist/include prog.c -L dist/lib -libverbs and dist/bin/starverbs.
 *
 * One that is to start on any libibverbs looks the calls up at run time: dlvsym(RTLD_DEFAULT,
 * "stardv_query_counters", "STARDV_1.0") is NULL where there is no such card. Their version node is
 * STARDV_1.0 in libibverbs.so.1 and libstarverbs.so.
 *
 * How all of them grow: a struct begins with comp_mask and gets new fields at its end only; its size goes
 * with it (inlen what the call reads, outlen what it writes), so that a program and a library of different
 * releases understand each other. Bits of comp_mask that a release does not know are refused where they
 * change what a call does, and left out of the answer where they ask for something.
 */
#ifndef INFINIBAND_STARDV_H
#define INFINIBAND_STARDV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the calls of this file take the device and what is made on it. See stardv_is_supported(3). */
bool stardv_is_supported(struct ibv_device *device);

/* Groups of struct stardv_counters. */
enum stardv_counters_mask {
	/* The card's traffic */
	STARDV_COUNTERS_CARD = 1 << 0,
	/* Its queue pair contexts; only a card that has room for few of them
	 * (STARVERBS_QPC_CACHE) fills it */
	STARDV_COUNTERS_QPC = 1 << 1,
	/* The queue pairs of the context that is asked */
	STARDV_COUNTERS_CONTEXT = 1 << 2,
};

struct stardv_counters {
	/* In: groups asked for. Out: those of them that were filled; all others are 0. */
	uint64_t comp_mask;

	/* STARDV_COUNTERS_CARD: of the card of this process, which its contexts
	 * share, since it was opened first */
	uint64_t tx_packets;
	uint64_t tx_bytes;
	uint64_t rx_packets;
	uint64_t rx_bytes;
	uint64_t retransmitted;
	uint64_t timeouts;
	uint64_t completions;
	uint64_t error_completions;
	/* How many exist now */
	uint64_t qps;
	uint64_t mrs;

	/* STARDV_COUNTERS_QPC: requests for a context that was there; that had to be fetched; that waited
	 * behind others of its queue pair */
	uint64_t qpc_hits;
	uint64_t qpc_misses;
	uint64_t qpc_waited;
	/* Requests pending now, and the most there were */
	uint64_t qpc_pending;
	uint64_t qpc_pending_peak;
	/* Contexts fetched ahead; not fetched ahead, as too many were on their way; that left for others */
	uint64_t qpc_prefetched;
	uint64_t qpc_prefetch_dropped;
	uint64_t qpc_evicted;
	/* Doorbells answered from the SQ address table */
	uint64_t qpc_ring_reads;
	/* What doorbells, turns to send and requests waited, all together */
	uint64_t qpc_wait_ns;
	/* What a chip would need for it, bytes */
	uint64_t qpc_on_chip;

	/* STARDV_COUNTERS_CONTEXT: queue pairs of this context, those of them in RTS, those in ERR */
	uint64_t context_qps;
	uint64_t context_qps_rts;
	uint64_t context_qps_err;
};

/* 0, or EINVAL, EIO (a forked child). See stardv_query_counters(3). */
int stardv_query_counters(struct ibv_context *context, struct stardv_counters *counters, uint32_t outlen);

/* A counter as `starverbs stat` shows it. */
struct stardv_counter {
	/* Both live as long as the process */
	const char *name;
	const char *help;
	uint64_t value;
};

ssize_t _stardv_list_counters(struct ibv_context *context, struct stardv_counter *list, size_t max,
			      uint32_t flags, size_t entry_size);

/* Fills `list` with the first `max` counters of the card; gives how many there are, or -EINVAL, -EIO.
 * `flags` is 0. See stardv_query_counters(3). */
static inline ssize_t stardv_list_counters(struct ibv_context *context, struct stardv_counter *list,
					   size_t max, uint32_t flags)
{
	return _stardv_list_counters(context, list, max, flags, sizeof(*list));
}

/* What an end of an RC connection is to be (StaR): which of the two cards keeps the connection. */
enum stardv_star {
	/* What STARVERBS_STAR says */
	STARDV_STAR_DEFAULT = 0,
	/* Plain RoCEv2 */
	STARDV_STAR_OFF = 1,
	/* What suits both ends */
	STARDV_STAR_AUTO = 2,
	/* This card keeps nothing of it */
	STARDV_STAR_STATELESS = 3,
	/* This card keeps all of it */
	STARDV_STAR_STATEFUL = 4,
};

/* The same as create_flags of struct ibv_qp_init_attr_ex, with IBV_QP_INIT_ATTR_CREATE_FLAGS. The bits are
 * of those that the kernel leaves to each driver (IB_QP_CREATE_RESERVED_START). */
enum stardv_qp_create_flags {
	STARDV_QP_CREATE_STATELESS = 1 << 26,
	STARDV_QP_CREATE_STATEFUL = 1 << 27,
	STARDV_QP_CREATE_AUTO = STARDV_QP_CREATE_STATELESS | STARDV_QP_CREATE_STATEFUL,
	STARDV_QP_CREATE_STAR_OFF = 1 << 28,
};

struct stardv_qp_init_attr {
	/* 0 */
	uint64_t comp_mask;
	/* enum stardv_star */
	uint32_t star;
	uint8_t reserved[4];
};

/* As ibv_create_qp_ex(3): a queue pair, or NULL with errno. See stardv_create_qp(3). */
struct ibv_qp *stardv_create_qp(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr_ex,
				const struct stardv_qp_init_attr *stardv_attr, uint32_t inlen);

/* What an end has become. */
enum stardv_star_role {
	/* Nothing yet */
	STARDV_STAR_ROLE_WAITING = 0,
	/* Plain RoCEv2 */
	STARDV_STAR_ROLE_PLAIN = 1,
	STARDV_STAR_ROLE_STATELESS = 2,
	STARDV_STAR_ROLE_STATEFUL = 3,
};

/* Groups of struct stardv_qp_attr. */
enum stardv_qp_attr_mask {
	STARDV_QP_STAR = 1 << 0,
};

struct stardv_qp_attr {
	/* In: groups asked for. Out: those of them that were filled; all others are 0. */
	uint64_t comp_mask;

	/* STARDV_QP_STAR: what it was to be (enum stardv_star, never the default),
	 * what it is (enum stardv_star_role) */
	uint32_t star_wish;
	uint32_t star_role;
	/* What the card keeps of it, and what the library does because the card does
	 * not, beside the queues themselves */
	uint64_t star_card_bytes;
	uint64_t star_library_bytes;
};

/* 0, or EINVAL, EIO (a forked child). See stardv_query_qp(3). */
int stardv_query_qp(struct ibv_qp *qp, struct stardv_qp_attr *attr, uint32_t outlen);

/* What the end is to be from now on, also while the connection runs: comp_mask STARDV_QP_STAR,
 * and star_wish; other fields are not looked at. 0, or EINVAL, EOPNOTSUPP, EIO (a forked
 * child). See stardv_modify_qp(3). */
int stardv_modify_qp(struct ibv_qp *qp, const struct stardv_qp_attr *attr, uint32_t inlen);

#ifdef __cplusplus
}
#endif

#endif /* INFINIBAND_STARDV_H */
