/* ibv_modify_qp and ibv_query_qp from C: what each step needs, what it leaves
 * when it fails, what a query tells.
 * Build: cc -Wall -o states states.c -libverbs; run with LD_LIBRARY_PATH naming the library under test. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

enum { ALL = (1 << 26) - 1 };

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static char buf[4096];

static struct ibv_qp *make(enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = type, .cap = { 8, 8, 1, 1, 16 } };

	return ibv_create_qp(pd, &init);
}

static struct ibv_qp_attr query(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	memset(&attr, 0xee, sizeof(attr));
	CHECK(!ibv_query_qp(qp, &attr, ALL, &init));
	return attr;
}

/* Tries a step without each attribute that it requires, then with each that it does
 * not allow, then as it must be. */
static void step(struct ibv_qp *qp, struct ibv_qp_attr *attr, enum ibv_qp_state to, int required,
	int optional)
{
	enum ibv_qp_state from = query(qp).qp_state;
	int bit;

	attr->qp_state = to;
	attr->cur_qp_state = from;
	for (bit = 1; bit < 1 << 26; bit <<= 1) {
		if (bit == IBV_QP_STATE || optional & bit)
			continue;
		CHECK(ibv_modify_qp(qp, attr, required ^ bit) == EINVAL && query(qp).qp_state == from);
	}
	CHECK(qp->state == from && !ibv_modify_qp(qp, attr, required | optional));
	CHECK(qp->state == to && query(qp).qp_state == to && query(qp).cur_qp_state == to);
}

static void connected(void)
{
	struct ibv_qp *qp = make(IBV_QPT_RC), *peer = make(IBV_QPT_RC);
	struct ibv_qp_attr attr = way_to(ctx, peer->qp_num), now;
	struct ibv_qp_init_attr init;
	int later = IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE;

	CHECK(query(qp).qp_state == IBV_QPS_RESET && modify(qp, &attr, IBV_QPS_RTR, TO_RTR) == EINVAL);
	step(qp, &attr, IBV_QPS_INIT, TO_INIT, 0);
	step(qp, &attr, IBV_QPS_RTR, TO_RTR, IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX);
	step(qp, &attr, IBV_QPS_RTS, TO_RTS, later);
	step(qp, &attr, IBV_QPS_RTS, IBV_QP_STATE, later);
	step(qp, &attr, IBV_QPS_SQD, IBV_QP_STATE, IBV_QP_EN_SQD_ASYNC_NOTIFY);
	step(qp, &attr, IBV_QPS_RTS, IBV_QP_STATE, later);

	now = query(qp);
	CHECK(now.path_mtu == attr.path_mtu && now.dest_qp_num == peer->qp_num && now.rq_psn == 77 &&
	      now.sq_psn == 77);
	CHECK(now.qp_access_flags == attr.qp_access_flags && now.port_num == 1 && now.pkey_index == 0);
	CHECK(now.max_rd_atomic == 4 && now.max_dest_rd_atomic == 4 && now.min_rnr_timer == 12 && now.timeout == 14);
	CHECK(now.retry_cnt == 7 && now.rnr_retry == 7 && now.path_mig_state == IBV_MIG_MIGRATED &&
	      !now.sq_draining);
	CHECK(!memcmp(&now.ah_attr, &attr.ah_attr, sizeof(now.ah_attr)) && now.cap.max_send_wr >= 8);
	CHECK(!ibv_query_qp(qp, &now, IBV_QP_CAP, &init) && init.qp_type == IBV_QPT_RC && init.send_cq == cq);
	CHECK(ibv_query_qp(qp, NULL, ALL, &init) == EINVAL && !ibv_query_qp(qp, &now, ALL, NULL));
	CHECK(ibv_modify_qp(qp, NULL, IBV_QP_STATE) == EINVAL && ibv_modify_qp(NULL, &attr, IBV_QP_STATE) == EINVAL);

	/* The program is wrong about the state; migrating without an alternate path; a state that is none. */
	attr.cur_qp_state = IBV_QPS_SQE;
	CHECK(modify(qp, &attr, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_CUR_STATE) == EINVAL);
	attr.path_mig_state = IBV_MIG_ARMED;
	CHECK(modify(qp, &attr, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_PATH_MIG_STATE) == EINVAL);
	attr.path_mig_state = IBV_MIG_REARM;
	CHECK(modify(qp, &attr, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_PATH_MIG_STATE) == EINVAL);
	CHECK(modify(qp, &attr, IBV_QPS_UNKNOWN, IBV_QP_STATE) == EINVAL && qp->state == IBV_QPS_RTS);
	CHECK(!modify(qp, &attr, IBV_QPS_ERR, IBV_QP_STATE) && query(qp).qp_state == IBV_QPS_ERR);
	CHECK(modify(qp, &attr, IBV_QPS_RTS, IBV_QP_STATE) == EINVAL);
	CHECK(!modify(qp, &attr, IBV_QPS_RESET, IBV_QP_STATE) && query(qp).qp_state == IBV_QPS_RESET);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_qp(peer));
}

/* Each value beyond its range, one at a time: EINVAL, and all else stays as it was. */
static void ranges(void)
{
	struct ibv_qp *qp = make(IBV_QPT_RC);
	struct ibv_qp_attr good = way_to(ctx, 5), bad;

#define BAD(to, mask, spoil)                                                              \
	do {                                                                              \
		bad = good;                                                               \
		spoil;                                                                    \
		CHECK(modify(qp, &bad, to, mask) == EINVAL && query(qp).qp_state == to - 1); \
	} while (0)
	BAD(IBV_QPS_INIT, TO_INIT, bad.port_num = 0);
	BAD(IBV_QPS_INIT, TO_INIT, bad.port_num = 2);
	BAD(IBV_QPS_INIT, TO_INIT, bad.pkey_index = 1);
	BAD(IBV_QPS_INIT, TO_INIT, bad.qp_access_flags = 1 << 15);
	CHECK(!modify(qp, &good, IBV_QPS_INIT, TO_INIT));
	BAD(IBV_QPS_RTR, TO_RTR, bad.path_mtu = 0);
	BAD(IBV_QPS_RTR, TO_RTR, bad.path_mtu = 6);
	BAD(IBV_QPS_RTR, TO_RTR, bad.dest_qp_num = 1 << 24);
	BAD(IBV_QPS_RTR, TO_RTR, bad.max_dest_rd_atomic = 129);
	BAD(IBV_QPS_RTR, TO_RTR, bad.min_rnr_timer = 32);
	BAD(IBV_QPS_RTR, TO_RTR, bad.ah_attr.is_global = 0);
	BAD(IBV_QPS_RTR, TO_RTR, bad.ah_attr.port_num = 2);
	BAD(IBV_QPS_RTR, TO_RTR, bad.ah_attr.grh.sgid_index = 255);
	BAD(IBV_QPS_RTR, TO_RTR, bad.ah_attr.sl = 16);
	CHECK(query(qp).dest_qp_num == 0 && !modify(qp, &good, IBV_QPS_RTR, TO_RTR));
	BAD(IBV_QPS_RTS, TO_RTS, bad.timeout = 32);
	BAD(IBV_QPS_RTS, TO_RTS, bad.retry_cnt = 8);
	BAD(IBV_QPS_RTS, TO_RTS, bad.rnr_retry = 8);
	BAD(IBV_QPS_RTS, TO_RTS, bad.max_rd_atomic = 129);
	CHECK(query(qp).timeout == 0 && !modify(qp, &good, IBV_QPS_RTS, TO_RTS));
	CHECK(!ibv_destroy_qp(qp));
}

/* The async event that comes next and is not COMM_EST. */
static struct ibv_async_event next_event(void)
{
	struct pollfd fd = { .fd = ctx->async_fd, .events = POLLIN };
	struct ibv_async_event event = { .event_type = IBV_EVENT_CLIENT_REREGISTER };

	do {
		if (poll(&fd, 1, 20000) != 1)
			return event;
		CHECK(!ibv_get_async_event(ctx, &event));
		ibv_ack_async_event(&event);
	} while (event.event_type == IBV_EVENT_COMM_EST);
	return event;
}

/* SQD tells when the queue is drained, if asked; what is posted then waits for RTS. */
static void draining(void)
{
	struct ibv_qp *qp = make(IBV_QPT_RC), *peer = make(IBV_QPT_RC);
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, sizeof(buf), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_sge sge = { (uintptr_t)buf, 64, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_qp_attr attr = { .en_sqd_async_notify = 1 };
	struct ibv_async_event event;
	struct ibv_wc wc;

	wr.wr.rdma.remote_addr = (uintptr_t)buf + 1024;
	wr.wr.rdma.rkey = mr->rkey;
	CHECK(!connect_rc(qp, peer->qp_num) && !connect_rc(peer, qp->qp_num));
	CHECK(!ibv_post_send(qp, &wr, &bad));
	CHECK(!modify(qp, &attr, IBV_QPS_SQD, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
	event = next_event();
	CHECK(event.event_type == IBV_EVENT_SQ_DRAINED && event.element.qp == qp);
	CHECK(query(qp).qp_state == IBV_QPS_SQD && !query(qp).sq_draining && query(qp).en_sqd_async_notify);
	CHECK(ibv_poll_cq(cq, 1, &wc) == 1 && wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS);
	wr.wr_id = 2;
	CHECK(!ibv_post_send(qp, &wr, &bad) && ibv_poll_cq(cq, 1, &wc) == 0);
	CHECK(!modify(qp, &attr, IBV_QPS_RTS, IBV_QP_STATE));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(wc.wr_id == 2 && wc.status == IBV_WC_SUCCESS);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_qp(peer) && !ibv_dereg_mr(mr));
}

/* A send that fails here takes a datagram queue pair to SQE; cur_qp_state names it on the way back. */
static void send_error(void)
{
	struct ibv_qp *qp = make(IBV_QPT_UD);
	struct ibv_qp_attr attr = { .port_num = 1, .qkey = 5 };
	struct ibv_ah_attr to = way_to(ctx, 0).ah_attr;
	struct ibv_ah *ah = ibv_create_ah(pd, &to);
	struct ibv_sge sge = { (uintptr_t)buf, 64, 0x12345600 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
			   .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;
	int back = IBV_QP_STATE | IBV_QP_CUR_STATE;

	step(qp, &attr, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0);
	step(qp, &attr, IBV_QPS_RTR, IBV_QP_STATE, IBV_QP_PKEY_INDEX | IBV_QP_QKEY);
	step(qp, &attr, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN, IBV_QP_CUR_STATE | IBV_QP_QKEY);
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = qp->qp_num;
	wr.wr.ud.remote_qkey = 5;
	CHECK(!ibv_post_send(qp, &wr, &bad));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_LOC_PROT_ERR && query(qp).qp_state == IBV_QPS_SQE);
	attr.cur_qp_state = IBV_QPS_RTS;
	CHECK(modify(qp, &attr, IBV_QPS_RTS, back) == EINVAL && query(qp).qp_state == IBV_QPS_SQE);
	attr.cur_qp_state = IBV_QPS_SQE;
	CHECK(!modify(qp, &attr, IBV_QPS_RTS, back) && query(qp).qp_state == IBV_QPS_RTS && query(qp).qkey == 5);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_ah(ah));
}

/* A datagram with another Q_Key is for nobody, and the port counts it. */
static void violation(void)
{
	struct ibv_qp *qp = make(IBV_QPT_UD);
	struct ibv_qp_attr attr = { .port_num = 1, .qkey = 5 };
	struct ibv_ah_attr to = way_to(ctx, 0).ah_attr;
	struct ibv_ah *ah = ibv_create_ah(pd, &to);
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, sizeof(buf), IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge sge = { (uintptr_t)buf, 64, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
			   .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_recv_wr recv = { .num_sge = 0 }, *bad_recv;
	struct ibv_port_attr before, after;
	struct ibv_device_attr dev;
	struct ibv_wc wc;
	int tries, n;

	CHECK(!ibv_query_device(ctx, &dev) && dev.device_cap_flags & IBV_DEVICE_BAD_QKEY_CNTR &&
	      dev.device_cap_flags & IBV_DEVICE_BAD_PKEY_CNTR &&
	      dev.device_cap_flags & IBV_DEVICE_PORT_ACTIVE_EVENT);
	CHECK(!modify(qp, &attr, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	CHECK(!modify(qp, &attr, IBV_QPS_RTR, IBV_QP_STATE) &&
	      !modify(qp, &attr, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN));
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = qp->qp_num;
	wr.wr.ud.remote_qkey = 6;
	CHECK(!ibv_query_port(ctx, 1, &before) && !ibv_post_recv(qp, &recv, &bad_recv) &&
	      !ibv_post_send(qp, &wr, &bad));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_SEND);
	for (tries = 0; tries < 20000; tries++) {
		n = ibv_poll_cq(cq, 1, &wc);
		CHECK(n == 0 && !ibv_query_port(ctx, 1, &after));
		if (after.qkey_viol_cntr > before.qkey_viol_cntr)
			break;
		usleep(1000);
	}
	CHECK(after.qkey_viol_cntr == before.qkey_viol_cntr + 1 && after.bad_pkey_cntr == before.bad_pkey_cntr);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_ah(ah) && !ibv_dereg_mr(mr));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	alarm(60);
	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx)) ||
	    !(cq = ibv_create_cq(ctx, 64, NULL, NULL, 0))) {
		perror("opening the card");
		return 1;
	}
	ibv_free_device_list(list);
	connected();
	ranges();
	draining();
	send_error();
	violation();
	CHECK(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	if (!failures)
		puts("states: all as promised");
	return failures != 0;
}
