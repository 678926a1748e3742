/* The card and its queue pairs' states: what soak and growth stand on. */
#include "soak.h"

struct ibv_context *ctx;
union ibv_gid gid;
atomic_bool over;

struct ibv_context *another_context(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *opened;

	MUST(list && list[0]);
	opened = ibv_open_device(list[0]);
	MUST(opened);
	ibv_free_device_list(list);
	return opened;
}

void open_card(void)
{
	ctx = another_context();
	MUST(!ibv_query_gid(ctx, 1, 0, &gid));
}

uint64_t mix(uint64_t x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
	x = (x ^ x >> 27) * 0x94d049bb133111eb;
	return x ^ x >> 31;
}

uint64_t next(struct rng *rng)
{
	return mix(rng->state += 0x9e3779b97f4a7c15);
}

uint32_t below(struct rng *rng, uint32_t limit)
{
	return next(rng) % limit;
}

void fill(unsigned char *to, uint64_t seed, uint32_t len)
{
	for (uint32_t at = 0; at + 8 <= len; at += 8, seed += 0x9e3779b97f4a7c15)
		memcpy(to + at, &seed, 8);
}

bool holds(const unsigned char *at, uint64_t seed, uint32_t len)
{
	uint64_t word;

	for (uint32_t i = 0; i + 8 <= len; i += 8, seed += 0x9e3779b97f4a7c15) {
		memcpy(&word, at + i, 8);
		if (word != seed)
			return false;
	}
	return true;
}

struct ibv_ah_attr loopback_ah(void)
{
	return (struct ibv_ah_attr){ .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 1 } };
}

int to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x1234,
				 .qp_access_flags = ALL_RIGHTS & ~IBV_ACCESS_LOCAL_WRITE };
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;

	return ibv_modify_qp(qp, &a, mask | (qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
}

int to_rtr(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer,
				 .max_dest_rd_atomic = 4, .min_rnr_timer = 1, .ah_attr = loopback_ah() };
	int mask = IBV_QP_STATE;

	if (qp->qp_type != IBV_QPT_UD)
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (qp->qp_type == IBV_QPT_RC || qp->qp_type == IBV_QPT_XRC_RECV)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	return ibv_modify_qp(qp, &a, mask);
}

int to_rts(struct ibv_qp *qp)
{
	/* patience without end: a machine that is busy, or that runs valgrind, must not break a connection */
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7,
				 .max_rd_atomic = 4 };
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;

	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	return ibv_modify_qp(qp, &a, mask);
}

int to_state(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr a = { .qp_state = state };

	return ibv_modify_qp(qp, &a, IBV_QP_STATE);
}

void join(struct ibv_qp *a, struct ibv_qp *b)
{
	MUST(!to_init(a) && !to_init(b));
	MUST(!to_rtr(a, b->qp_num) && !to_rtr(b, a->qp_num));
	MUST(!to_rts(a) && !to_rts(b));
}

int poll_some(struct ibv_cq *cq, struct ibv_wc *wc)
{
	int got = ibv_poll_cq(cq, 16, wc);

	MUST(got >= 0);
	return got;
}
