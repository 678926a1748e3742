/* ATOMIC WRITE and FLUSH, seen from C: also from a program whose verbs.h is newer and has ibv_wr_flush.
 * Two queue pairs of one card joined over its first GID. Build and run as edges.c. */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

/* Names of later releases of verbs.h, by other names so that either header will do. */
enum {
	WC_FLUSH = 8,
	WR_FLUSH = 14,
	FLUSH_GLOBAL = 1 << 0,
	FLUSH_PERSISTENT = 1 << 1,
	FLUSH_RANGE = 0,
	FLUSH_MR = 1,
	ACCESS_FLUSH_GLOBAL = 1 << 8,
	ACCESS_FLUSH_PERSISTENT = 1 << 9,
	QP_EX_WITH_FLUSH = 1 << 11,
};

/* struct ibv_qp_ex of release 46, as far as release 44 lacks it */
struct newer_qp_ex {
	struct ibv_qp_ex older;
	void (*wr_flush)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr, size_t len, uint8_t type,
		uint8_t level);
};

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static uint64_t words[512];
static struct ibv_mr *mr;

static void flush(struct ibv_qp_ex *qp, size_t len, uint8_t type, uint8_t level)
{
	size_t at = offsetof(struct ibv_qp_ex, wr_atomic_write) + sizeof(void *);
	void (*call)(struct ibv_qp_ex *, uint32_t, uint64_t, size_t, uint8_t, uint8_t);

	CHECK(offsetof(struct newer_qp_ex, wr_flush) >= at);
	memcpy(&call, (char *)qp + at, sizeof(call));
	call(qp, mr->rkey, (uintptr_t)words, len, type, level);
}

static struct ibv_qp_ex *make_qp(enum ibv_qp_type type, uint64_t ops)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = type, .cap = { 16, 16, 2, 2, 0 }, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = ops,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &init);

	return qp ? ibv_qp_to_qp_ex(qp) : NULL;
}

static struct ibv_wc one(void)
{
	struct ibv_wc wc;

	while (!ibv_poll_cq(cq, 1, &wc))
		;
	return wc;
}

static void capabilities(void)
{
	struct ibv_device_attr_ex ex;
	const uint64_t flush_global = 1ULL << 38, flush_persistent = 1ULL << 39, atomic_write = 1ULL << 40;

	CHECK(!ibv_query_device_ex(ctx, NULL, &ex));
	CHECK((ex.device_cap_flags_ex & (flush_global | flush_persistent | atomic_write)) ==
	      (flush_global | atomic_write));
	CHECK(!ibv_reg_mr(pd, words, sizeof(words), ACCESS_FLUSH_PERSISTENT) && errno == EOPNOTSUPP);
	CHECK(!make_qp(IBV_QPT_UC, IBV_QP_EX_WITH_ATOMIC_WRITE) && errno == EOPNOTSUPP);
	CHECK(!make_qp(IBV_QPT_UD, QP_EX_WITH_FLUSH) && errno == EOPNOTSUPP);
}

static void creation(void)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD, .cap = { 1, 1, 1, 1, 0 }, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS,
	};
	const uint32_t frames[] = { IBV_QP_CREATE_SCATTER_FCS, IBV_QP_CREATE_CVLAN_STRIPPING,
				    IBV_QP_CREATE_SOURCE_QPN, IBV_QP_CREATE_PCI_WRITE_END_PADDING };
	size_t i;

	for (i = 0; i < sizeof(frames) / sizeof(frames[0]); i++) {
		init.create_flags = frames[i];
		CHECK(!ibv_create_qp_ex(ctx, &init) && errno == EOPNOTSUPP);
	}
	init.create_flags = 1 << 20;
	CHECK(!ibv_create_qp_ex(ctx, &init) && errno == EINVAL);
	init.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
	init.qp_type = IBV_QPT_RC;
	CHECK(!ibv_create_qp_ex(ctx, &init) && errno == EINVAL);
}

static void batches(struct ibv_qp_ex *qp)
{
	const struct { size_t len; uint8_t type, level; } bad[] = {
		{ 8, 0, FLUSH_RANGE }, { 8, 4, FLUSH_RANGE }, { 8, FLUSH_GLOBAL, 2 },
		{ 1ULL << 32, FLUSH_GLOBAL, FLUSH_RANGE },
	};
	uint64_t word = 0x1122334455667788;
	struct ibv_wc wc;
	size_t i;

	for (i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		ibv_wr_start(qp);
		flush(qp, bad[i].len, bad[i].type, bad[i].level);
		CHECK(ibv_wr_complete(qp) == EINVAL);
	}
	ibv_wr_start(qp);
	qp->wr_flags = IBV_SEND_SIGNALED;
	qp->wr_id = 1;
	ibv_wr_atomic_write(qp, mr->rkey, (uintptr_t)&words[1], &word);
	qp->wr_id = 2;
	flush(qp, 16, FLUSH_GLOBAL, FLUSH_RANGE);
	qp->wr_id = 3;
	flush(qp, 0, FLUSH_GLOBAL, FLUSH_MR);
	word = 0;
	CHECK(!ibv_wr_complete(qp));
	wc = one();
	CHECK(wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_ATOMIC_WRITE);
	wc = one();
	CHECK(wc.wr_id == 2 && wc.status == IBV_WC_SUCCESS && (int)wc.opcode == WC_FLUSH);
	CHECK(words[1] == 0x1122334455667788 && one().wr_id == 3);
}

static void lists(struct ibv_qp *qp)
{
	struct ibv_sge sge = { (uintptr_t)&words[8], 8, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 4, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_WRITE,
				  .send_flags = IBV_SEND_SIGNALED }, *bad = NULL;
	struct ibv_wc wc;

	wr.wr.rdma.remote_addr = (uintptr_t)&words[16];
	wr.wr.rdma.rkey = mr->rkey;
	words[8] = 77;
	CHECK(!ibv_post_send(qp, &wr, &bad));
	wc = one();
	CHECK(wc.wr_id == 4 && wc.opcode == IBV_WC_ATOMIC_WRITE && words[16] == 77);
	/* such a request has no place for what to flush */
	wr.opcode = (enum ibv_wr_opcode)WR_FLUSH;
	CHECK(ibv_post_send(qp, &wr, &bad) == EOPNOTSUPP && bad == &wr);
	wr.opcode = IBV_WR_ATOMIC_WRITE;
	wr.wr.rdma.remote_addr += 4;
	CHECK(!ibv_post_send(qp, &wr, &bad) && one().status == IBV_WC_REM_INV_REQ_ERR);
}

/* Flags that this card does not offer, are none, or do not go with the operation:
 * EINVAL, and nothing is posted. */
static void flags(struct ibv_qp_ex *x)
{
	const unsigned int bad_flags[] = { IBV_SEND_IP_CSUM, IBV_SEND_IP_CSUM | IBV_SEND_SIGNALED, 1 << 5, 1 << 8,
		1u << 31 };
	const enum ibv_wr_opcode answered[] = { IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD,
		IBV_WR_ATOMIC_CMP_AND_SWP };
	struct ibv_sge sge = { (uintptr_t)&words[8], 8, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE }, *bad;
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_mw_bind bind = { .bind_info = { mr, (uintptr_t)words, 8, IBV_ACCESS_REMOTE_READ } };
	uint64_t word = 1;
	struct ibv_wc wc;
	size_t i;

	for (i = 0; i < sizeof(bad_flags) / sizeof(bad_flags[0]); i++) {
		wr.send_flags = bad_flags[i];
		bad = NULL;
		CHECK(ibv_post_send(&x->qp_base, &wr, &bad) == EINVAL && bad == &wr);
		ibv_wr_start(x);
		x->wr_flags = bad_flags[i];
		ibv_wr_atomic_write(x, mr->rkey, (uintptr_t)&words[1], &word);
		CHECK(ibv_wr_complete(x) == EINVAL);
		bind.send_flags = bad_flags[i];
		CHECK(mw && ibv_bind_mw(&x->qp_base, mw, &bind) == EINVAL);
	}
	wr.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
	for (i = 0; i < sizeof(answered) / sizeof(answered[0]); i++) {
		wr.opcode = answered[i];
		bad = NULL;
		CHECK(ibv_post_send(&x->qp_base, &wr, &bad) == EINVAL && bad == &wr);
	}
	CHECK(!ibv_dealloc_mw(mw) && ibv_poll_cq(cq, 1, &wc) == 0);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_qp_ex *a, *b;

	alarm(60);
	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx))) {
		perror("opening the card");
		return 1;
	}
	ibv_free_device_list(list);
	cq = ibv_create_cq(ctx, 32, NULL, NULL, 0);
	CHECK(cq);
	mr = ibv_reg_mr(pd, words, sizeof(words), 0xf | ACCESS_FLUSH_GLOBAL);
	capabilities();
	creation();
	a = make_qp(IBV_QPT_RC, IBV_QP_EX_WITH_ATOMIC_WRITE | QP_EX_WITH_FLUSH);
	b = make_qp(IBV_QPT_RC, 0);
	if (!mr || !a || !b) {
		perror("the queue pairs");
		return 1;
	}
	CHECK(!to_init(&a->qp_base, 0xf | ACCESS_FLUSH_GLOBAL) && !to_init(&b->qp_base, 0xf | ACCESS_FLUSH_GLOBAL));
	CHECK(!to_rts(&a->qp_base, b->qp_base.qp_num) && !to_rts(&b->qp_base, a->qp_base.qp_num));
	flags(a);
	batches(a);
	lists(&a->qp_base);
	CHECK(!ibv_destroy_qp(&a->qp_base) && !ibv_destroy_qp(&b->qp_base) && !ibv_destroy_cq(cq));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	if (!failures)
		puts("operations: all as promised");
	return failures != 0;
}
