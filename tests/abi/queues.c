/* What queues and keys do when they are used, from C: moderated events, overruns, the limit of a shared
 * receive queue, regions that count from 0, memory windows of a connection that is reset. Build: cc -Wall
 * -o queues queues.c -libverbs; run with LD_LIBRARY_PATH naming the library. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static char buf[4096];

struct pair {
	struct ibv_qp *a, *b;
};

static struct pair make(struct ibv_cq *of_a, struct ibv_cq *of_b, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = { .send_cq = of_a, .recv_cq = of_a, .qp_type = IBV_QPT_RC,
		.cap = { 16, 16, 1, 1, 0 } };
	struct pair p = { .a = ibv_create_qp(pd, &init) };

	init.send_cq = init.recv_cq = of_b;
	init.srq = srq;
	p.b = ibv_create_qp(pd, &init);
	CHECK(p.a && p.b && !connect_rc(p.a, p.b->qp_num) && !connect_rc(p.b, p.a->qp_num));
	return p;
}

static void end(struct pair p)
{
	CHECK(!ibv_destroy_qp(p.a) && !ibv_destroy_qp(p.b));
}

static int post(struct ibv_qp *qp, enum ibv_wr_opcode opcode, int flags)
{
	struct ibv_sge sge = { (uintptr_t)buf, 8, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode,
			   .send_flags = IBV_SEND_SIGNALED | flags }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)buf + 64;
	wr.wr.rdma.rkey = mr->rkey;
	return ibv_post_send(qp, &wr, &bad);
}

static void one(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int n;

	do
		n = ibv_poll_cq(cq, 1, &wc);
	while (n == 0);
	CHECK(n == 1 && wc.status == IBV_WC_SUCCESS);
}

static int readable(int fd, int timeout_ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	return poll(&p, 1, timeout_ms);
}

/* Takes async events until one of `type`. */
static int told(enum ibv_event_type type, void *element)
{
	struct ibv_async_event event;

	while (readable(ctx->async_fd, 20000) == 1 && !ibv_get_async_event(ctx, &event)) {
		ibv_ack_async_event(&event);
		if (event.event_type == type)
			return (void *)event.element.cq == element;
	}
	return 0;
}

static void moderation(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 64, NULL, channel, 0), *other = ibv_create_cq(ctx, 64, NULL, NULL, 0),
		*got;
	struct ibv_modify_cq_attr attr = { IBV_CQ_ATTR_MODERATE, { 3, 0 } };
	struct pair p = make(cq, other, NULL);
	void *context;
	int i;

	CHECK(!ibv_modify_cq(cq, &attr) && !ibv_req_notify_cq(cq, 0));
	for (i = 0; i < 3; i++) {
		CHECK(readable(channel->fd, 0) == 0 && !post(p.a, IBV_WR_RDMA_WRITE, 0));
		one(cq);
	}
	/* The card's thread may have told of the completion and not yet of the event. */
	CHECK(readable(channel->fd, 20000) == 1 && !ibv_get_cq_event(channel, &got, &context) && got == cq);
	attr.moderate = (struct ibv_moderate_cq){ UINT16_MAX, 2000 };
	CHECK(!ibv_modify_cq(cq, &attr) && !ibv_req_notify_cq(cq, 0) && !post(p.a, IBV_WR_RDMA_WRITE, 0));
	CHECK(readable(channel->fd, 20000) == 1 && !ibv_get_cq_event(channel, &got, &context) && got == cq);
	one(cq);
	attr.attr_mask = 0;
	CHECK(!ibv_modify_cq(cq, &attr));
	attr.attr_mask = IBV_CQ_ATTR_RESERVED;
	CHECK(ibv_modify_cq(cq, &attr) == EINVAL);
	ibv_ack_cq_events(cq, 2);
	end(p);
	CHECK(!ibv_destroy_cq(cq) && !ibv_destroy_cq(other) && !ibv_destroy_comp_channel(channel));
}

static void overrun(void)
{
	struct ibv_cq_init_attr_ex ex = { .cqe = 2, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
					  .flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN | IBV_CREATE_CQ_ATTR_SINGLE_THREADED };
	struct ibv_cq *cq = ibv_create_cq(ctx, 2, NULL, NULL, 0), *other = ibv_create_cq(ctx, 64, NULL, NULL, 0),
		*lax;
	struct pair p = make(cq, other, NULL);
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct ibv_wc wc;
	int i;

	for (i = 0; i < cq->cqe + 1; i++)
		CHECK(!post(p.a, IBV_WR_RDMA_WRITE, 0));
	CHECK(told(IBV_EVENT_CQ_ERR, cq) && ibv_resize_cq(cq, 1) == EINVAL && cq->cqe >= 2);
	CHECK(!ibv_query_qp(p.a, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_ERR);
	for (i = 0; i < cq->cqe; i++)
		one(cq);
	CHECK(ibv_poll_cq(cq, 1, &wc) < 0);
	end(p);
	CHECK(!ibv_destroy_cq(cq));

	lax = ibv_cq_ex_to_cq(ibv_create_cq_ex(ctx, &ex));
	p = make(lax, other, NULL);
	for (i = 0; i < lax->cqe + 3; i++)
		CHECK(!post(p.a, IBV_WR_RDMA_WRITE, 0));
	/* Behind them all: its receive says that they are done. */
	struct ibv_sge eight = { (uintptr_t)buf, 8, mr->lkey };
	struct ibv_recv_wr receive = { .num_sge = 1, .sg_list = &eight }, *bad;
	CHECK(!ibv_post_recv(p.b, &receive, &bad) && !post(p.a, IBV_WR_SEND, 0));
	one(other);
	CHECK(!ibv_query_qp(p.a, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_RTS);
	for (i = 0; i < lax->cqe; i++)
		one(lax);
	end(p);
	CHECK(!ibv_destroy_cq(lax) && !ibv_destroy_cq(other));
}

static void limit(void)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, 64, NULL, NULL, 0), *other = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	struct ibv_srq_init_attr init = { .attr = { 8, 1, 0 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	struct pair p = make(cq, other, srq);
	struct ibv_sge sge = { (uintptr_t)buf + 512, 8, mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_srq_attr attr = { .srq_limit = 2 };
	int round, i;

	for (round = 0; round < 2; round++) {
		for (i = 0; i < 3; i++)
			CHECK(!ibv_post_srq_recv(srq, &wr, &bad));
		CHECK(!ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT) && !ibv_query_srq(srq, &attr) && attr.srq_limit == 2);
		for (i = 0; i < 3; i++) {
			CHECK(!post(p.a, IBV_WR_SEND, 0));
			one(other);
		}
		CHECK(told(IBV_EVENT_SRQ_LIMIT_REACHED, srq));
		CHECK(!ibv_query_srq(srq, &attr) && attr.srq_limit == 0 && readable(ctx->async_fd, 0) == 0);
		attr.srq_limit = 2;
	}
	end(p);
	CHECK(!ibv_destroy_srq(srq) && !ibv_destroy_cq(cq) && !ibv_destroy_cq(other));
}

/* IBV_ACCESS_ZERO_BASED: addresses are offsets, here and for peers, whatever iova says. */
static void zero_based(void)
{
	int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ZERO_BASED;
	struct ibv_mr *regions[] = { ibv_reg_mr(pd, buf + 100, 64, rights),
				     ibv_reg_mr_iova(pd, buf + 100, 64, (uintptr_t)buf, rights) };
	struct ibv_cq *cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	struct pair p = make(cq, cq, NULL);
	struct ibv_sge sge = { 0, 8, 0 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;
	int i;

	for (i = 0; i < 2; i++) {
		CHECK(regions[i] && regions[i]->addr == buf + 100 && regions[i]->length == 64);
		sge.lkey = wr.wr.rdma.rkey = regions[i]->lkey;
		wr.wr.rdma.remote_addr = 56;
		strcpy(buf + 100, "offsets");
		CHECK(!ibv_post_send(p.a, &wr, &bad));
		one(cq);
		CHECK(!strcmp(buf + 156, "offsets"));
		memset(buf + 100, 0, 64);
	}
	wr.wr.rdma.remote_addr = (uintptr_t)buf + 100;
	CHECK(!ibv_post_send(p.a, &wr, &bad));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_REM_ACCESS_ERR);
	end(p);
	CHECK(!ibv_dereg_mr(regions[0]) && !ibv_dereg_mr(regions[1]) && !ibv_destroy_cq(cq));
}

/* A window of type 2 belongs to the connection that it was bound on. */
static void window(void)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	struct pair p = make(cq, cq, NULL);
	struct ibv_mr *under = ibv_reg_mr(pd, buf, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_mw_bind bind = { .send_flags = IBV_SEND_SIGNALED };
	struct ibv_qp_attr attr = { 0 };

	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){ under, (uintptr_t)buf, 64, IBV_ACCESS_REMOTE_READ };
	CHECK(!ibv_post_send(p.a, &wr, &bad));
	one(cq);
	CHECK(ibv_dereg_mr(under) == EBUSY && !modify(p.a, &attr, IBV_QPS_RESET, IBV_QP_STATE));
	CHECK(!ibv_dereg_mr(under) && !ibv_dealloc_mw(mw));

	/* ibv_dealloc_mw unbinds. */
	under = ibv_reg_mr(pd, buf, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	bind.bind_info = (struct ibv_mw_bind_info){ under, (uintptr_t)buf, 64, IBV_ACCESS_REMOTE_READ };
	CHECK(!connect_rc(p.a, p.b->qp_num) && !ibv_bind_mw(p.a, mw, &bind));
	one(cq);
	CHECK(ibv_dereg_mr(under) == EBUSY && !ibv_dealloc_mw(mw) && !ibv_dereg_mr(under));
	end(p);
	CHECK(!ibv_destroy_cq(cq));
}

/* No promise is made of the order in which bytes are written, whatever the state and the operation. */
static void in_order(void)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, 4, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .cap = { 1, 1, 1, 1, 0 },
		.qp_type = IBV_QPT_RC };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	for (int live = 0; live < 2; live++) {
		for (enum ibv_wr_opcode op = IBV_WR_RDMA_WRITE; op <= IBV_WR_ATOMIC_FETCH_AND_ADD; op++)
			CHECK(ibv_query_qp_data_in_order(qp, op, 0) == 0);
		CHECK(live || !connect_rc(qp, qp->qp_num));
	}
	CHECK(qp->state == IBV_QPS_RTS && !ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	alarm(100);
	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx)) ||
	    !(mr = ibv_reg_mr(pd, buf, sizeof(buf), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE))) {
		perror("opening the card");
		return 1;
	}
	ibv_free_device_list(list);
	moderation();
	overrun();
	limit();
	zero_based();
	window();
	in_order();
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	if (!failures)
		puts("queues: all as promised");
	return failures != 0;
}
