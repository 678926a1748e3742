/* A program of libibverbs 1.0, bound to the symbols of node IBVERBS_1.0: every call of that release, with
 * transfers over RC, UD and a shared receive queue between queue pairs of its own.
 * Build: cc -Wall -o old old.c -libverbs -lpthread; run with LD_LIBRARY_PATH
 * naming the library under test. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "verbs-1.0.h"

enum { SIZE = 16384, DEPTH = 16, QKEY = 0x11111111, GRH = 40 };
enum { ALL_RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
	IBV_ACCESS_REMOTE_ATOMIC };

static struct ibv_device *device;
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static union ibv_gid gid;
static uint64_t buffer[SIZE / sizeof(uint64_t)];
/* What a program hands in and gets back. */
static int cq_tag, qp_tag, srq_tag;

/* A struct of that time, followed by bytes that nobody may touch. */
#define GUARDED(type, name)                    \
	struct {                               \
		struct type it;                \
		unsigned char guard[64];       \
	} name;                                \
	memset(&name, 0x5a, sizeof(name))
#define UNTOUCHED(name) (name.guard[0] == 0x5a && !memcmp(name.guard, name.guard + 1, sizeof(name.guard) - 1))

static void the_device(void)
{
	int count = -1;
	struct ibv_device **list = ibv_get_device_list(&count);
	GUARDED(ibv_device_attr, attr);
	GUARDED(ibv_port_attr, port);
	uint16_t pkey = 0;

	CHECK(list && count == 1 && list[0] && !list[1]);
	device = list[0];
	CHECK(!strcmp(ibv_get_device_name(device), "star0") && ibv_get_device_guid(device));
	CHECK(!ibv_open_device(NULL) && errno == EINVAL);
	ctx = ibv_open_device(device);
	CHECK(ctx && ctx->device == device && ctx->async_fd >= 0 && ctx->cmd_fd >= 0 && ctx->num_comp_vectors > 0);
	ibv_free_device_list(list);
	CHECK(!ibv_query_device(ctx, &attr.it) && attr.it.max_qp > 0 && attr.it.phys_port_cnt == 1 &&
	      UNTOUCHED(attr));
	CHECK(attr.it.node_guid == ibv_get_device_guid(device));
	CHECK(!ibv_query_port(ctx, 1, &port.it) && port.it.state == 4 && port.it.gid_tbl_len > 0 && UNTOUCHED(port));
	CHECK(ibv_query_port(ctx, 9, &port.it) == EINVAL);
	CHECK(!ibv_query_gid(ctx, 1, 0, &gid) && gid.global.interface_id);
	CHECK(!ibv_query_pkey(ctx, 1, 0, &pkey) && pkey == 0xffff);
}

static void the_objects(void)
{
	pd = ibv_alloc_pd(ctx);
	CHECK(pd && pd->context == ctx);
	CHECK(!ibv_alloc_pd(NULL) && errno == EINVAL);
	CHECK(!ibv_reg_mr(pd, buffer, sizeof(buffer), IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);
	CHECK(!ibv_reg_mr(NULL, buffer, sizeof(buffer), 0) && errno == EINVAL);
	mr = ibv_reg_mr(pd, buffer, sizeof(buffer), ALL_RIGHTS);
	CHECK(mr && mr->context == ctx && mr->pd == pd && mr->lkey && mr->rkey);
	channel = ibv_create_comp_channel(ctx);
	CHECK(channel && channel->fd >= 0);
	CHECK(!ibv_create_cq(ctx, 0, NULL, NULL, 0) && errno == EINVAL);
	cq = ibv_create_cq(ctx, DEPTH, &cq_tag, channel, 0);
	CHECK(cq && cq->context == ctx && cq->cq_context == &cq_tag && cq->cqe >= DEPTH);
	CHECK(!ibv_resize_cq(cq, 4 * DEPTH) && cq->cqe >= 4 * DEPTH);
	CHECK(ibv_resize_cq(NULL, 1) == EINVAL && ibv_dealloc_pd(NULL) == EINVAL && ibv_dereg_mr(NULL) == EINVAL);
	CHECK(ibv_dealloc_pd(pd) == EBUSY && ibv_destroy_comp_channel(channel) == EBUSY);
}

static struct ibv_qp *new_qp(int type, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = { &qp_tag, cq, cq, srq, { DEPTH, DEPTH, 2, 2, 0 }, type, 1 }, got;
	GUARDED(ibv_qp_attr, attr);
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(qp && qp->context == ctx && qp->qp_context == &qp_tag && qp->pd == pd && qp->send_cq == cq &&
	      qp->recv_cq == cq);
	CHECK(qp->srq == srq && qp->qp_num && qp->qp_type == type && qp->state == IBV_QPS_RESET);
	CHECK(init.cap.max_send_wr >= DEPTH && init.qp_context == &qp_tag && init.send_cq == cq);
	CHECK(!ibv_query_qp(qp, &attr.it, IBV_QP_STATE, &got) && attr.it.qp_state == IBV_QPS_RESET &&
	      UNTOUCHED(attr));
	CHECK(got.qp_context == &qp_tag && got.send_cq == cq && got.recv_cq == cq && got.srq == srq &&
	      got.qp_type == type);
	return qp;
}

static struct ibv_ah_attr address(void)
{
	struct ibv_ah_attr ah = { .is_global = 1, .port_num = 1 };

	ah.grh.dgid = gid;
	ah.grh.hop_limit = 64;
	return ah;
}

/* From RESET to RTS, towards QP number `peer`. */
static void connect_qp(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL_RIGHTS };

	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	CHECK(qp->state == IBV_QPS_INIT);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer,
				     .rq_psn = 77, .max_dest_rd_atomic = 1, .min_rnr_timer = 12, .ah_attr = address() };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
						IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				     .sq_psn = 77, .max_rd_atomic = 1 };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
						IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
	CHECK(qp->state == IBV_QPS_RTS && ibv_modify_qp(qp, &attr, 1 << 30) == EINVAL);
}

/* Takes completions until that of `wr_id`. */
static struct ibv_wc completion(uint64_t wr_id)
{
	struct ibv_wc wc = { 0 };
	int n;

	do {
		n = ctx->ops.poll_cq(cq, 1, &wc);
	} while (n == 0 || (n == 1 && wc.wr_id != wr_id));
	CHECK(n == 1 && wc.status == 0);
	return wc;
}

static struct ibv_sge piece(size_t offset, uint32_t length)
{
	return (struct ibv_sge){ (uintptr_t)buffer + offset, length, mr->lkey };
}

static int receive(struct ibv_qp *qp, uint64_t wr_id, struct ibv_sge *sge)
{
	struct ibv_recv_wr wr = { NULL, wr_id, sge, 1 }, *bad;

	return ctx->ops.post_recv(qp, &wr, &bad);
}

static void send_and_receive(struct ibv_qp *a, struct ibv_qp *b)
{
	struct ibv_sge from = piece(0, 3000), to = piece(SIZE / 2, 3000);
	struct ibv_send_wr wr = { NULL, 2, &from, 1, IBV_WR_SEND_WITH_IMM, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED,
		42, { { 0 } } };
	struct ibv_send_wr *bad;
	struct ibv_cq *of = NULL;
	void *tag = NULL;
	struct ibv_wc wc;

	memset(buffer, 7, 3000);
	CHECK(!ctx->ops.req_notify_cq(cq, 1) && !receive(b, 1, &to) && !ctx->ops.post_send(a, &wr, &bad));
	CHECK(!ibv_get_cq_event(channel, &of, &tag) && of == cq && tag == &cq_tag);
	ibv_ack_cq_events(cq, 1);
	wc = completion(1);
	CHECK(wc.opcode == IBV_WC_RECV && wc.byte_len == 3000 && wc.imm_data == 42 &&
	      wc.wc_flags == IBV_WC_WITH_IMM);
	CHECK(wc.qp_num == b->qp_num && !memcmp(buffer, buffer + SIZE / 16, 3000));
}

static void one_sided(struct ibv_qp *qp)
{
	struct ibv_sge sge[2] = { piece(0, 8), piece(8, 8) };
	struct ibv_send_wr wr[3] = {
		{ &wr[1], 3, &sge[0], 1, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, 0, { { 0 } } },
		{ &wr[2], 4, &sge[1], 1, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_SEND_SIGNALED, 0, { { 0 } } },
		{ NULL, 5, &sge[0], 1, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, 0, { { 0 } } },
	}, *bad = NULL;
	uint64_t *there = &buffer[SIZE / 16];

	buffer[0] = 1000;
	wr[0].wr.rdma.remote_addr = wr[1].wr.atomic.remote_addr = wr[2].wr.rdma.remote_addr = (uintptr_t)there;
	wr[0].wr.rdma.rkey = wr[1].wr.atomic.rkey = wr[2].wr.rdma.rkey = mr->rkey;
	wr[1].wr.atomic.compare_add = 5;
	CHECK(!ctx->ops.post_send(qp, wr, &bad));
	CHECK(completion(5).opcode == IBV_WC_RDMA_READ && *there == 1005 && buffer[1] == 1000 && buffer[0] == 1005);
	wr[1].num_sge = 9;
	CHECK(ctx->ops.post_send(qp, wr, &bad) != 0 && bad == &wr[1]);
	completion(3);
	CHECK(ctx->ops.post_send(NULL, wr, &bad) == EINVAL);
}

static void reliable(void)
{
	struct ibv_qp *a = new_qp(IBV_QPT_RC, NULL), *b = new_qp(IBV_QPT_RC, NULL);

	connect_qp(a, b->qp_num);
	connect_qp(b, a->qp_num);
	send_and_receive(a, b);
	one_sided(a);
	CHECK(ibv_destroy_cq(cq) == EBUSY && ibv_dereg_mr(NULL) == EINVAL);
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b) && ibv_destroy_qp(NULL) == EINVAL);
}

static void datagrams(void)
{
	struct ibv_qp *qp = new_qp(IBV_QPT_UD, NULL);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	struct ibv_ah_attr to = address();
	struct ibv_ah *ah = ibv_create_ah(pd, &to);
	struct ibv_sge from = piece(0, 100), into = piece(SIZE / 2, GRH + 100);
	struct ibv_send_wr wr = { NULL, 7, &from, 1, IBV_WR_SEND, IBV_SEND_SIGNALED, 0, { { 0 } } }, *bad;
	struct ibv_wc wc;

	CHECK(ah && ah->context == ctx && ah->pd == pd);
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = qp->qp_num;
	wr.wr.ud.remote_qkey = QKEY;
	CHECK(!receive(qp, 6, &into) && !ctx->ops.post_send(qp, &wr, &bad));
	wc = completion(6);
	CHECK(wc.byte_len == GRH + 100 && wc.src_qp == qp->qp_num && wc.wc_flags == IBV_WC_GRH);
	CHECK(!memcmp(buffer, (char *)buffer + SIZE / 2 + GRH, 100));
	wr.wr.ud.ah = NULL;
	CHECK(ctx->ops.post_send(qp, &wr, &bad) == EINVAL && bad == &wr);
	CHECK(ibv_attach_mcast(qp, NULL, 0) && ibv_detach_mcast(qp, NULL, 0));
	CHECK(!ibv_destroy_ah(ah) && ibv_destroy_ah(NULL) == EINVAL && !ibv_destroy_qp(qp));
}

static void expect_event(int type, void *element)
{
	struct ibv_async_event event = { .event_type = -1 };

	CHECK(!ibv_get_async_event(ctx, &event) && event.event_type == type && event.element.qp == element);
	ibv_ack_async_event(&event);
}

static void shared_receives(void)
{
	struct ibv_srq_init_attr init = { &srq_tag, { DEPTH, 1, 0 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	struct ibv_srq_attr attr = { .srq_limit = 2 }, got;
	struct ibv_sge from = piece(0, 100), to = piece(SIZE / 2, 100);
	struct ibv_recv_wr recv[2] = { { &recv[1], 8, &to, 1 }, { NULL, 9, &to, 1 } }, *bad_recv;
	struct ibv_send_wr wr = { NULL, 10, &from, 1, IBV_WR_SEND, IBV_SEND_SIGNALED, 0, { { 0 } } }, *bad;
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct ibv_qp *a, *b;

	CHECK(srq && srq->context == ctx && srq->srq_context == &srq_tag && srq->pd == pd &&
	      init.attr.max_wr >= DEPTH);
	CHECK(!ibv_create_srq(NULL, &init) && errno == EINVAL);
	a = new_qp(IBV_QPT_RC, NULL);
	b = new_qp(IBV_QPT_RC, srq);
	connect_qp(a, b->qp_num);
	connect_qp(b, a->qp_num);
	CHECK(receive(b, 1, &to) == EINVAL && !ctx->ops.post_srq_recv(srq, recv, &bad_recv));
	CHECK(!ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT) && !ibv_query_srq(srq, &got) && got.srq_limit == 2);
	CHECK(!ctx->ops.post_send(a, &wr, &bad));
	CHECK(completion(8).qp_num == b->qp_num);
	expect_event(IBV_EVENT_SRQ_LIMIT_REACHED, srq);
	CHECK(ibv_destroy_srq(srq) == EBUSY);
	CHECK(!ibv_modify_qp(b, &error, IBV_QP_STATE) && b->state == IBV_QPS_ERR);
	expect_event(IBV_EVENT_QP_LAST_WQE_REACHED, b);
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b) && !ibv_destroy_srq(srq));
}

int main(void)
{
	the_device();
	the_objects();
	reliable();
	datagrams();
	shared_receives();
	CHECK(!ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel) && !ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(ctx) && ibv_close_device(NULL) == -1);
	if (!failures)
		printf("libibverbs 1.0: all as promised\n");
	return failures != 0;
}
