/* Tag matching, seen from C: capabilities, ibv_post_srq_ops and its errno values, extended completions.
 * One process, two queue pairs of one card joined over its first GID. Build and run as edges.c. */
#include <endian.h>
#include <infiniband/tm_types.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq_ex *cq;
static struct ibv_srq *srq;
static struct ibv_mr *mr;
static char buf[8192];

/* The next completion, at which polling then is. */
static void next(void)
{
	struct ibv_poll_cq_attr attr = {};

	while (ibv_start_poll(cq, &attr))
		;
}

static void shape(struct ibv_device_attr_ex *ex)
{
	struct ibv_srq_init_attr_ex init = {
		.attr = { .max_wr = 8, .max_sge = 1 }, .srq_type = IBV_SRQT_TM, .pd = pd, .cq = ibv_cq_ex_to_cq(cq),
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ,
		.tm_cap = { .max_num_tags = 2, .max_ops = 4 },
	};

	CHECK(!ibv_query_device_ex(ctx, NULL, ex) && ex->tm_caps.flags == IBV_TM_CAP_RC && ex->tm_caps.max_num_tags);
	CHECK(ex->tm_caps.max_rndv_hdr_size >= sizeof(struct ibv_tmh) + sizeof(struct ibv_rvh) &&
	      ex->tm_caps.max_ops);
	CHECK(!ibv_create_srq_ex(ctx, &init) && errno == EINVAL);
	init.comp_mask |= IBV_SRQ_INIT_ATTR_TM;
	init.tm_cap.max_num_tags = ex->tm_caps.max_num_tags + 1;
	CHECK(!ibv_create_srq_ex(ctx, &init) && errno == EINVAL);
	init.tm_cap.max_num_tags = 2;
	srq = ibv_create_srq_ex(ctx, &init);
	CHECK(srq && init.attr.max_wr >= 8);
}

static void operations(uint32_t max_sge)
{
	struct ibv_sge many[64] = {}, sge = { (uintptr_t)buf + 4096, 1024, mr->lkey };
	struct ibv_ops_wr wr[3] = {
		{ .wr_id = 1, .next = &wr[1], .opcode = IBV_WR_TAG_ADD, .flags = IBV_OPS_SIGNALED | IBV_OPS_TM_SYNC,
		  .tm.add = { .recv_wr_id = 11, .sg_list = &sge, .num_sge = 1, .tag = 5, .mask = ~0ULL } },
		{ .wr_id = 2, .next = &wr[2], .opcode = IBV_WR_TAG_ADD,
		  .tm.add = { .recv_wr_id = 12, .sg_list = &sge, .num_sge = 1, .tag = 6, .mask = ~0ULL } },
		{ .wr_id = 3, .opcode = IBV_WR_TAG_ADD },
	}, *bad = NULL;
	struct ibv_wc_tm_info info = { 1, 1 };

	CHECK(ibv_post_srq_ops(srq, wr, &bad) == ENOMEM && bad == &wr[2] && wr[0].tm.handle != wr[1].tm.handle);
	next();
	ibv_wc_read_tm_info(cq, &info);
	CHECK(cq->wr_id == 1 && ibv_wc_read_opcode(cq) == IBV_WC_TM_ADD && info.tag == 0 && info.priv == 0);
	ibv_end_poll(cq);
	wr[1].next = NULL;
	wr[1].opcode = IBV_WR_TAG_DEL;
	wr[1].flags = IBV_OPS_SIGNALED;
	CHECK(!ibv_post_srq_ops(srq, &wr[1], &bad));
	next();
	CHECK(cq->wr_id == 2 && cq->status == IBV_WC_SUCCESS && ibv_wc_read_opcode(cq) == IBV_WC_TM_DEL);
	ibv_end_poll(cq);
	CHECK(!ibv_post_srq_ops(srq, &wr[1], &bad));
	next();
	CHECK(cq->status == IBV_WC_TM_ERR);
	ibv_end_poll(cq);
	wr[2].tm.add.sg_list = many;
	wr[2].tm.add.num_sge = max_sge + 1;
	CHECK(ibv_post_srq_ops(srq, &wr[2], &bad) == EINVAL && bad == &wr[2]);
	wr[2].opcode = 9;
	CHECK(ibv_post_srq_ops(srq, &wr[2], &bad) == EINVAL);
}

static void traffic(struct ibv_qp *qp)
{
	struct ibv_tmh tmh = { .opcode = IBV_TMH_EAGER, .app_ctx = htobe32(7), .tag = htobe64(5) };
	struct ibv_sge sge = { (uintptr_t)buf, sizeof(tmh) + 6, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	struct ibv_wc_tm_info info;

	memcpy(buf, &tmh, sizeof(tmh));
	memcpy(buf + sizeof(tmh), "tagged", 6);
	CHECK(!ibv_post_send(qp, &wr, &bad));
	next();
	ibv_wc_read_tm_info(cq, &info);
	CHECK(cq->wr_id == 11 && cq->status == IBV_WC_SUCCESS && ibv_wc_read_opcode(cq) == IBV_WC_TM_RECV);
	CHECK(ibv_wc_read_wc_flags(cq) == (IBV_WC_TM_MATCH | IBV_WC_TM_DATA_VALID) && info.tag == 5 &&
	      info.priv == 7);
	CHECK(ibv_wc_read_byte_len(cq) == 6 && ibv_wc_read_src_qp(cq) == 0 && !memcmp(buf + 4096, "tagged", 6));
	ibv_end_poll(cq);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_cq_init_attr_ex cq_init = { .cqe = 32,
		.wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_TM_INFO };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 2, 2, 0 } };
	struct ibv_device_attr_ex ex;
	struct ibv_qp *a, *b;

	alarm(60);
	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx))) {
		perror("opening the card");
		return 1;
	}
	ibv_free_device_list(list);
	cq = ibv_create_cq_ex(ctx, &cq_init);
	mr = ibv_reg_mr(pd, buf, sizeof(buf), 0xf);
	CHECK(cq && mr);
	shape(&ex);
	init.send_cq = init.recv_cq = ibv_cq_ex_to_cq(cq);
	a = ibv_create_qp(pd, &init);
	init.srq = srq;
	b = ibv_create_qp(pd, &init);
	if (!srq || !a || !b) {
		perror("the queues");
		return 1;
	}
	CHECK(!connect_rc(a, b->qp_num) && !connect_rc(b, a->qp_num));
	operations(ex.tm_caps.max_sge);
	traffic(a);
	CHECK(ibv_destroy_srq(srq) == EBUSY && !ibv_destroy_qp(a) && !ibv_destroy_qp(b) && !ibv_destroy_srq(srq));
	CHECK(!ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) && !ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) &&
	      !ibv_close_device(ctx));
	if (!failures)
		puts("tags: all as promised");
	return failures != 0;
}
