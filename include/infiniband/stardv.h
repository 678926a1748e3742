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
	/* RPCs (StRoM), where the peer's queue pair was made so, too; with StaR towards the stateful end. RC; not
	 * on a board: EOPNOTSUPP */
	STARDV_QP_CREATE_RPC = 1 << 29,
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
	uint32_t star_preference;
	uint32_t star_role;
	/* What the card keeps of it, and what the host does because the card does
	 * not, beside the queues themselves */
	uint64_t star_card_bytes;
	uint64_t star_host_bytes;
};

/* 0, or EINVAL, EIO (a forked child). See stardv_query_qp(3). */
int stardv_query_qp(struct ibv_qp *qp, struct stardv_qp_attr *attr, uint32_t outlen);

/* What the end is to be from now on, also while the connection runs: comp_mask STARDV_QP_STAR,
 * and star_preference; other fields are not looked at. 0, or EINVAL, EOPNOTSUPP, EIO (a forked
 * child). See stardv_modify_qp(3). */
int stardv_modify_qp(struct ibv_qp *qp, const struct stardv_qp_attr *attr, uint32_t inlen);

/* StRoM: code that runs on the card. See stardv_post_rpc(3), stardv_load_kernel(3) and docs/strom.md.
 * Numbers of parameters and answers are little-endian. */

/* The head of an RPC's parameters: where its answer goes. */
struct stardv_rpc_target {
	uint64_t addr;
	uint32_t rkey;
	/* Bytes of the region: 16 at least, or 0: no answer is wanted */
	uint32_t len;
	/* With STARDV_RPC_IMM; as for IBV_WR_RDMA_WRITE_WITH_IMM */
	uint32_t imm_data;
	/* STARDV_RPC_IMM, STARDV_RPC_BARE */
	uint32_t flags;
};

enum {
	/* The answer takes a receive, and completes it */
	STARDV_RPC_IMM = 1 << 0,
	/* With STARDV_RPC_IMM: one that ends well has no record, whose place is left as it was. The bytes are where
	 * they would be, as many as the receive's completion says: a packet less where they fill packets */
	STARDV_RPC_BARE = 1 << 1,
	/* stardv_rpc_record.magic, "StRM" */
	STARDV_RPC_MAGIC = 0x4d527453,
};

enum stardv_rpc_code {
	STARDV_RPC_OK = 0,
	STARDV_RPC_NO_KERNEL = 1,
	STARDV_RPC_BAD_PARAM = 2,
	STARDV_RPC_NOT_FOUND = 3,
	STARDV_RPC_RETRIES = 4,
	STARDV_RPC_ACCESS = 5,
	STARDV_RPC_OVERFLOW = 6,
	/* A kernel of a program's own broke a rule, and is loaded still */
	STARDV_RPC_FAULT = 7,
};

/* The last bytes of the region for an answer, which ends in front of them. A program clears `magic` before it
 * posts, and may poll it if the region ends at a multiple of 8. */
struct stardv_rpc_record {
	uint32_t op;
	uint32_t length;
	uint32_t code;
	uint32_t magic;
};

/* The record of an answer, or NULL: it has not come. Its bytes are `length` before the record. */
static inline const struct stardv_rpc_record *stardv_rpc_answer(const void *region, size_t len)
{
	const struct stardv_rpc_record *record =
		(const struct stardv_rpc_record *)((const char *)region + len - sizeof(*record));

	return __atomic_load_n(&record->magic, __ATOMIC_ACQUIRE) == STARDV_RPC_MAGIC ? record : NULL;
}

/* Makes a work request of a program's answer to an RPC: an RDMA WRITE of the bytes that its SGEs have,
 * `length` bytes of data and a struct stardv_rpc_record behind them; of STARDV_RPC_BARE without the record,
 * where all is well. The program fills in the rest. */
static inline void stardv_rpc_reply(struct ibv_send_wr *wr, const struct stardv_rpc_target *to,
				    uint32_t length)
{
	wr->opcode = to->flags & STARDV_RPC_IMM ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
	wr->imm_data = to->imm_data;
	wr->wr.rdma.remote_addr = to->addr + to->len - length - sizeof(struct stardv_rpc_record);
	wr->wr.rdma.rkey = to->rkey;
}

/* A request: the RPC op-code, and the bytes. Of an RPC these are its parameters, a struct stardv_rpc_target
 * first, path MTU bytes at most. */
struct stardv_rpc_wr {
	/* 0 */
	uint64_t comp_mask;
	uint64_t wr_id;
	uint64_t op;
	struct ibv_sge *sg_list;
	int num_sge;
	/* enum ibv_send_flags */
	unsigned int send_flags;
};

/* 0, or as ibv_post_send(3). They complete with IBV_WC_RDMA_WRITE. */
int stardv_post_rpc(struct ibv_qp *qp, const struct stardv_rpc_wr *wr, uint32_t inlen);
int stardv_post_rpc_write(struct ibv_qp *qp, const struct stardv_rpc_wr *wr, uint32_t inlen);
/* The same between ibv_wr_start and ibv_wr_complete. */
void stardv_wr_rpc(struct ibv_qp_ex *qp, uint64_t op);
void stardv_wr_rpc_write(struct ibv_qp_ex *qp, uint64_t op);

/* Kernels that every card has. */
enum stardv_kernel {
	/* None: RPCs take receives, and the program answers. The bytes are the RPC's, struct stardv_rpc_target
	 * first; imm_data is the low half of the op-code, in network order. RPC WRITEs are refused */
	STARDV_KERNEL_PROGRAM = 0,
	STARDV_KERNEL_GET = 1,
	STARDV_KERNEL_TRAVERSE = 2,
	STARDV_KERNEL_CONSISTENT = 3,
	STARDV_KERNEL_SHUFFLE = 4,
	STARDV_KERNEL_HLL = 5,
};

/* An RPC op-code: all that nothing else was loaded for. */
#define STARDV_RPC_ANY UINT64_MAX

/* Has RPCs of an op-code, on queue pairs of this domain, answered by a kernel: 0, or EBUSY (it has one),
 * ENOMEM, EOPNOTSUPP. A domain with kernels cannot be deallocated (EBUSY). */
int stardv_load_kernel(struct ibv_pd *pd, uint64_t op, uint32_t kernel);

enum stardv_module_flags {
	/* It takes the place of the kernel that the op-code has, if it has one */
	STARDV_MODULE_REPLACE = 1 << 0,
};

/* As stardv_load_kernel, by a kernel that is a WebAssembly module: `len` bytes, which are not used any more
 * when it returns. EINVAL: it is no kernel, and the log says why; EOPNOTSUPP: there is no
 * libstarverbs-wasm.so beside this library. See <starverbs/kernel.h>. */
int stardv_load_module(struct ibv_pd *pd, uint64_t op, const void *module, size_t len, uint32_t flags);
/* Has the kernel of an op-code answer a request of this program's own, whose parameters are `len` bytes, 4096
 * at most: no queue pair, no struct stardv_rpc_target. `record` says how it ended; `record->length` bytes of
 * data stand at the front of `answer`, whose room may be 0. The kernel reads and writes the domain's regions
 * by their keys, writes with IBV_ACCESS_LOCAL_WRITE, and may send by its queue pairs that are for RPCs, ahead
 * of what is posted when this has returned; not between ibv_wr_start and ibv_wr_complete of those.
 * 0, or EINVAL, ENOMEM, EOPNOTSUPP, EIO (a forked
 * child). */
int stardv_call_kernel(struct ibv_pd *pd, uint64_t op, const void *params, size_t len, void *answer,
		       size_t room, struct stardv_rpc_record *record);
/* 0, or EINVAL: the op-code has none. */
int stardv_unload_kernel(struct ibv_pd *pd, uint64_t op);

/* STARDV_KERNEL_GET: an entry of a hash table. Buckets with value 0 are empty. */
struct stardv_get_bucket {
	uint64_t key;
	uint64_t value;
	uint32_t len;
} __attribute__((packed));

struct stardv_get_entry {
	struct stardv_get_bucket buckets[3];
	/* Index of the next entry of the chain; 0: none */
	uint32_t next;
} __attribute__((packed));

struct stardv_get {
	uint64_t table;
	uint64_t key;
	uint32_t index;
	uint32_t table_rkey;
	uint32_t value_rkey;
	/* Most entries to look at, 1024 at most */
	uint32_t hops;
};

/* STARDV_KERNEL_TRAVERSE: positions and the mask count 4 bytes. */
enum {
	STARDV_TRAVERSE_EQUAL = 0,
	STARDV_TRAVERSE_LESS = 1,
	STARDV_TRAVERSE_GREATER = 2,
	STARDV_TRAVERSE_NOT_EQUAL = 3,

	STARDV_TRAVERSE_RELATIVE = 1 << 0,
	STARDV_TRAVERSE_NEXT = 1 << 1,
	STARDV_TRAVERSE_FOLLOW = 1 << 2,
};

struct stardv_traverse {
	uint64_t element;
	uint64_t key;
	uint32_t rkey;
	uint32_t len;
	uint16_t mask;
	uint8_t predicate;
	uint8_t value;
	uint8_t next;
	uint8_t child;
	uint8_t flags;
	uint8_t hops;
};

/* STARDV_KERNEL_CONSISTENT: an object whose last 8 bytes are the CRC64 of those before. */
struct stardv_consistent {
	uint64_t object;
	uint32_t rkey;
	uint32_t len;
	/* Times that it is read, 1024 at most */
	uint32_t tries;
	uint32_t reserved;
};

/* STARDV_KERNEL_SHUFFLE. */
enum {
	STARDV_SHUFFLE_BEGIN = 0,
	STARDV_SHUFFLE_HISTOGRAM = 1,
	STARDV_SHUFFLE_FLUSH = 2,
	/* The stream is a region: key `number`, behind the parameters its struct stardv_partition */
	STARDV_SHUFFLE_STREAM = 3,
};

struct stardv_shuffle {
	uint32_t command;
	uint32_t number;
	uint32_t first;
	/* HISTOGRAM, of a program's own card (stardv_call_kernel): the queue pair whose peer has the partitions */
	uint32_t qpn;
};

struct stardv_partition {
	uint64_t to;
	uint64_t len;
};

/* STARDV_KERNEL_HLL. */
enum { STARDV_HLL_ESTIMATE = 0, STARDV_HLL_RESET = 1, STARDV_HLL_TO = 2 };

struct stardv_hll {
	uint32_t command;
	uint32_t rkey;
	uint64_t to;
	uint64_t len;
};

struct stardv_hll_estimate {
	uint64_t distinct;
	uint64_t items;
	uint64_t lost;
};

/* 1RMA: one-shot, connection-free, encrypted access to remote memory. See stardv_onerma_open(3),
 * stardv_onerma_create_region(3), stardv_onerma_post(3) and docs/onerma.md. While the program does not call,
 * a thread of the library serves others and goes on with what was posted. */
struct stardv_onerma;

struct stardv_onerma_attr {
	/* 0 */
	uint64_t comp_mask;
	/* The card's address: it is this process's until the card is closed */
	uint32_t gid_index;
	/* Commands under way, 256 at most; 0: 64 */
	uint32_t slots;
	/* The process's number, which keys are bound to; 0: getpid() */
	uint32_t pid;
	uint32_t reserved;
};

/* A card, or NULL with errno: EADDRINUSE, EINVAL, ENODATA, ENOMEM, EOPNOTSUPP, EIO (a forked child). */
struct stardv_onerma *stardv_onerma_open(struct ibv_context *context, const struct stardv_onerma_attr *attr,
					 uint32_t inlen);
/* Its regions are closed, its commands end without completions: 0, or EINVAL. */
int stardv_onerma_close(struct stardv_onerma *onerma);

enum { STARDV_ONERMA_KEY_LEN = 16 };

enum stardv_onerma_rights {
	/* This process's commands write to it: data of READs */
	STARDV_ONERMA_LOCAL_WRITE = 1 << 0,
	/* They read it: data of WRITEs, new keys */
	STARDV_ONERMA_LOCAL_READ = 1 << 1,
	/* Who has a key of it reads it, writes it, changes its key */
	STARDV_ONERMA_REMOTE_READ = 1 << 2,
	STARDV_ONERMA_REMOTE_WRITE = 1 << 3,
	STARDV_ONERMA_REMOTE_REKEY = 1 << 4,
};

struct stardv_onerma_region_attr {
	/* 0 */
	uint64_t comp_mask;
	/* Memory that stays until the region is destroyed */
	void *addr;
	uint64_t length;
	/* enum stardv_onerma_rights */
	uint32_t rights;
	uint8_t key[STARDV_ONERMA_KEY_LEN];
	uint32_t reserved;
};

/* 0 and the region's ID, or EINVAL, ENOMEM, EOPNOTSUPP, EIO. */
int stardv_onerma_create_region(struct stardv_onerma *onerma, const struct stardv_onerma_region_attr *attr,
				uint32_t inlen, uint32_t *region);
/* 0, or EINVAL, EIO. When it returns nobody reaches the region. */
int stardv_onerma_destroy_region(struct stardv_onerma *onerma, uint32_t region);
/* 0, or EINVAL, EIO. When it returns the old key opens nothing. */
int stardv_onerma_set_key(struct stardv_onerma *onerma, uint32_t region,
			  const uint8_t key[STARDV_ONERMA_KEY_LEN]);

enum stardv_onerma_op {
	STARDV_ONERMA_READ = 1,
	STARDV_ONERMA_WRITE = 2,
	/* 16 bytes, the region's new key */
	STARDV_ONERMA_REKEY = 3,
};

/* The key with which a process of an address does one kind of operation, from a region's key: 0, or
 * EINVAL. */
int stardv_onerma_derive_key(const uint8_t region_key[STARDV_ONERMA_KEY_LEN], const union ibv_gid *initiator,
			     uint32_t pid, uint32_t op, uint8_t key[STARDV_ONERMA_KEY_LEN]);

/* The same for the process at the other end of a connected Unix socket, whose number is the kernel's word and
 * goes to pid: 0, EACCES (it has no number here, or the address is not this host's), EBADF, ENOTSOCK or
 * EINVAL. */
int stardv_onerma_derive_peer_key(int socket, const uint8_t region_key[STARDV_ONERMA_KEY_LEN],
				  const union ibv_gid *initiator, uint32_t op,
				  uint8_t key[STARDV_ONERMA_KEY_LEN], uint32_t *pid);

struct stardv_onerma_wr {
	/* 0 */
	uint64_t comp_mask;
	uint64_t wr_id;
	/* enum stardv_onerma_op */
	uint32_t op;
	/* 0; 1: behind others */
	uint32_t low_priority;
	/* The target's address, the region there and where in it */
	union ibv_gid remote;
	uint64_t remote_offset;
	/* The same of the region here; bytes */
	uint64_t local_offset;
	uint64_t length;
	uint32_t remote_region;
	uint32_t local_region;
	/* Of stardv_onerma_derive_key */
	uint8_t key[STARDV_ONERMA_KEY_LEN];
};

/* 0, or EINVAL, ENOMEM, EOPNOTSUPP, EIO. Memory and keys are looked at later: completions say it. */
int stardv_onerma_post(struct stardv_onerma *onerma, const struct stardv_onerma_wr *wr, uint32_t inlen);

enum stardv_onerma_status {
	STARDV_ONERMA_OK = 0,
	STARDV_ONERMA_REMOTE_AUTHENTICATION_FAILURE = 1,
	STARDV_ONERMA_NACK = 2,
	STARDV_ONERMA_TIMEOUT = 3,
	STARDV_ONERMA_DISPATCH_TIMEOUT = 4,
	STARDV_ONERMA_REMOTE_ACCESS = 5,
	STARDV_ONERMA_LOCAL_ACCESS = 6,
	STARDV_ONERMA_EXHAUSTED = 7,
};

struct stardv_onerma_wc {
	uint64_t wr_id;
	/* enum stardv_onerma_status */
	uint32_t status;
	/* Of its commands of 4 KB, the longest: until it entered service, and in all; ns */
	uint32_t issue_delay;
	uint32_t total_delay;
	uint32_t reserved;
};

int _stardv_onerma_poll(struct stardv_onerma *onerma, int max, struct stardv_onerma_wc *wc, int timeout_ms,
			uint32_t entry_size);

/* Serves others, goes on with what was posted, and gives up to `max` completions: how many, or -EINVAL,
 * -EIO. Where there is none it waits for one, `timeout_ms` at most; -1: without an end; 0: not. */
static inline int stardv_onerma_poll(struct stardv_onerma *onerma, int max, struct stardv_onerma_wc *wc,
				     int timeout_ms)
{
	return _stardv_onerma_poll(onerma, max, wc, timeout_ms, sizeof(*wc));
}

/* What a card has counted since it was opened. */
struct stardv_onerma_counters {
	/* 0 */
	uint64_t comp_mask;
	/* Packets that came; of them, that no card sends; for nothing that is under way; with data that was
	 * there; with a wrong tag */
	uint64_t received;
	uint64_t malformed;
	uint64_t late;
	uint64_t copies;
	uint64_t forged;
	/* Requests refused: not authenticated; too much to do; bounds or rights */
	uint64_t auth_failures;
	uint64_t nacks;
	uint64_t access_failures;
	/* Keys changed by REKEY; WRITEs and REKEYs of others that ended for want of data */
	uint64_t rekeys;
	uint64_t transfer_timeouts;
	/* Commands completed; completions lost */
	uint64_t completed;
	uint64_t lost_completions;
	/* Packets that the socket did not take; datagrams from another UDP port */
	uint64_t unsent;
	uint64_t foreign;
};

/* 0, or EINVAL, EIO. */
int stardv_onerma_query_counters(struct stardv_onerma *onerma, struct stardv_onerma_counters *counters,
				 uint32_t outlen);

#ifdef __cplusplus
}
#endif

#endif /* INFINIBAND_STARDV_H */
