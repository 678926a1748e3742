/* What the programs of this folder share: the card, checks that end the program, numbers
 * at random, queue pairs joined. */
#ifndef SOAK_H
#define SOAK_H

#include <infiniband/verbs.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <errno.h>

/* Ends the program at the first thing that is not as it must be: later ones follow from it. */
#define MUST(what)                                                                                      \
	do {                                                                                            \
		if (!(what)) {                                                                          \
			fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno);    \
			fflush(stderr);                                                                 \
			abort();                                                                        \
		}                                                                                       \
	} while (0)

enum { ALL_RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
	IBV_ACCESS_REMOTE_ATOMIC };

/* The card, as every thread uses it. */
extern struct ibv_context *ctx;
extern union ibv_gid gid;
/* Threads go on until this is set. */
extern atomic_bool over;

/* Opens the first card. */
void open_card(void);
struct ibv_context *another_context(void);

/* A generator of its own for each thread: splitmix64. */
struct rng {
	uint64_t state;
};
uint64_t mix(uint64_t x);
uint64_t next(struct rng *rng);
/* A number below `limit`. */
uint32_t below(struct rng *rng, uint32_t limit);

/* Words that follow from a seed, and whether memory holds them. */
void fill(unsigned char *to, uint64_t seed, uint32_t len);
bool holds(const unsigned char *at, uint64_t seed, uint32_t len);

/* The ways of a queue pair, 0 or the errno value. */
int to_init(struct ibv_qp *qp);
int to_rtr(struct ibv_qp *qp, uint32_t peer);
int to_rts(struct ibv_qp *qp);
int to_state(struct ibv_qp *qp, enum ibv_qp_state state);
void join(struct ibv_qp *a, struct ibv_qp *b);
/* The way to this card itself. */
struct ibv_ah_attr loopback_ah(void);

/* Takes up to 16 completions of `cq`, which must be good ones of the library. */
int poll_some(struct ibv_cq *cq, struct ibv_wc *wc);

/* Messages with data that are checked (traffic.c). */
void traffic_start(uint64_t seed);
void traffic_end(void);
/* Says on standard error what is under way: for a soak that does not end. */
void traffic_tell(void);
/* Queue pairs that carry messages, for others to query and modify; NULL past the last. */
struct ibv_qp *traffic_qp(unsigned i);
struct ibv_srq *traffic_srq(void);
struct ibv_cq *traffic_cq(void);

/* Objects that come and go (churn.c). */
void churn_start(uint64_t seed);
void churn_end(void);
void churn_tell(void);
/* When nothing is left that has events. */
void churn_quiet(void);

#endif
