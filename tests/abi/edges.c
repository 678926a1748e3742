/* What the C edge promises, seen from C: public fields, errno values, *bad_wr, NULL, acks, both
 * polling interfaces, objects that outlive ibv_close_device. One process, two queue pairs of one
 * card joined over its first GID.
 * Build: cc -Wall -o edges edges.c -libverbs -lpthread; run with LD_LIBRARY_PATH
 * naming the library under test. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

struct side {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	unsigned char *buf;
};

enum { SIZE = 8192 };

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static union ibv_gid gid;

static struct side make_side(struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { 16, 16, 2, 2, 32 } };
	struct side s = { .cq = cq, .buf = calloc(1, SIZE) };

	s.mr = ibv_reg_mr(pd, s.buf, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
						   IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
	s.qp = ibv_create_qp(pd, &init);
	if (!s.mr || !s.qp) {
		perror("a side of the connection");
		exit(1);
	}
	CHECK(init.cap.max_send_wr >= 16 && init.cap.max_inline_data >= 32);
	return s;
}

/* One completion, waited for by polling; the watchdog ends a test that never gets it. */
static struct ibv_wc one(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int n;

	do
		n = ibv_poll_cq(cq, 1, &wc);
	while (n == 0);
	CHECK(n == 1);
	return wc;
}

static void device_and_port(void)
{
	struct ibv_device_attr_ex ex;
	struct ibv_port_attr port;
	struct ibv_gid_entry entry, table[256];
	uint16_t pkey;

	CHECK(ctx->async_fd >= 0 && fcntl(ctx->async_fd, F_GETFD) >= 0);
	CHECK(ctx->cmd_fd >= 0 && ctx->num_comp_vectors >= 1 && ctx->device->node_type == IBV_NODE_CA);
	CHECK(!ibv_query_device_ex(ctx, NULL, &ex) && ex.orig_attr.phys_port_cnt == 1 && ex.phys_port_cnt_ex == 1);
	CHECK(ex.orig_attr.max_srq > 0 && ex.orig_attr.max_cqe >= 65535 && ex.orig_attr.max_sge >= 30);
	CHECK(!ibv_query_port(ctx, 1, &port) && port.state == IBV_PORT_ACTIVE);
	CHECK(port.link_layer == IBV_LINK_LAYER_ETHERNET && port.gid_tbl_len > 0);
	CHECK(ibv_query_port(ctx, 2, &port) == EINVAL);
	CHECK(!ibv_query_gid_ex(ctx, 1, 0, &entry, 0) && entry.gid_type == IBV_GID_TYPE_ROCE_V2);
	CHECK(entry.ndev_ifindex != 0 && !memcmp(&entry.gid, &gid, 16));
	CHECK(ibv_query_gid_ex(ctx, 1, 1 << 20, &entry, 0) != 0);
	CHECK(ibv_query_gid_table(ctx, table, 256, 0) >= 1);
	CHECK(ibv_query_gid(ctx, 1, -1, &gid) == -1);
	CHECK(!ibv_query_pkey(ctx, 1, 0, &pkey) && pkey == 0xffff);
	CHECK(ibv_get_pkey_index(ctx, 1, pkey) == 0 && ibv_get_pkey_index(ctx, 1, htons(5)) == -1);
}

static void refusals(struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RAW_PACKET };
	struct ibv_qp_init_attr_ex ex = { .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_MAX_TSO_HEADER,
					  .qp_type = IBV_QPT_RC, .pd = pd, .send_cq = cq, .recv_cq = cq };
	struct ibv_cq_init_attr_ex cq_ex = { .cqe = 16, .wc_flags = IBV_WC_EX_WITH_CVLAN };
	struct ibv_xrcd_init_attr xrcd = { 0 };
	char byte;

	CHECK(!ibv_create_cq(ctx, 0, NULL, NULL, 0) && errno == EINVAL);
	CHECK(!ibv_create_cq(ctx, -1, NULL, NULL, 0) && errno == EINVAL);
	CHECK(!ibv_create_cq(ctx, 1, NULL, NULL, ctx->num_comp_vectors) && errno == EINVAL);
	CHECK(!ibv_create_cq_ex(ctx, &cq_ex) && errno == EOPNOTSUPP);
	CHECK(!ibv_create_qp(pd, &init) && errno == EOPNOTSUPP);
	CHECK(!ibv_create_qp(NULL, &init) && errno == EINVAL);
	CHECK(!ibv_create_qp_ex(ctx, &ex) && errno == EOPNOTSUPP);
	CHECK(!ibv_open_xrcd(ctx, &xrcd) && errno == EINVAL);
	CHECK(!ibv_alloc_mw(pd, 3) && errno == EINVAL);
	CHECK(!ibv_reg_dmabuf_mr(pd, 0, 4096, 0, -1, 0) && errno == EBADF);
	CHECK(!ibv_reg_mr(pd, &byte, 1, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);
	CHECK(!ibv_reg_mr(pd, &byte, 1, 1 << 12) && errno == EINVAL);
	CHECK(ibv_dealloc_pd(pd) == EBUSY);
	CHECK(ibv_destroy_cq(cq) == EBUSY);
	CHECK(ibv_dealloc_pd(NULL) == EINVAL && ibv_destroy_qp(NULL) == EINVAL && ibv_destroy_cq(NULL) == EINVAL);
	CHECK(!ibv_open_device(NULL) && errno != 0);
}

static void data(struct side *a, struct side *b)
{
	struct ibv_sge to = { (uintptr_t)b->buf, 64, b->mr->lkey }, from = { (uintptr_t)a->buf, 64, a->mr->lkey };
	struct ibv_recv_wr recv = { .wr_id = 1, .sg_list = &to, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr wr[3] = { { 0 } }, *bad;
	struct ibv_wc wc;
	int i;

	CHECK(a->mr->addr == a->buf && a->mr->length == SIZE && a->mr->pd == pd && a->mr->context == ctx);
	CHECK(a->qp->state == IBV_QPS_RTS && a->qp->qp_type == IBV_QPT_RC && a->qp->send_cq == a->cq);
	memset(a->buf, 0x5a, 64);
	CHECK(!ibv_post_recv(b->qp, &recv, &bad_recv));
	wr[0] = (struct ibv_send_wr){ .wr_id = 2, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM,
				      .send_flags = IBV_SEND_SIGNALED, .imm_data = htonl(0x01020304) };
	CHECK(!ibv_post_send(a->qp, wr, &bad));
	wc = one(b->cq);
	CHECK(wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.byte_len == 64);
	CHECK((wc.wc_flags & IBV_WC_WITH_IMM) && wc.imm_data == htonl(0x01020304) && wc.qp_num == b->qp->qp_num);
	wc = one(a->cq);
	CHECK(wc.wr_id == 2 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_SEND);
	CHECK(!memcmp(a->buf, b->buf, 64));

	/* A list: write, read back elsewhere, add; one completion at its end. */
	*(uint64_t *)(b->buf + 1024) = 40;
	for (i = 0; i < 3; i++) {
		wr[i] = (struct ibv_send_wr){ .wr_id = 10 + i, .sg_list = &from, .num_sge = 1,
					      .next = i < 2 ? &wr[i + 1] : NULL };
		wr[i].wr.rdma.remote_addr = (uintptr_t)b->buf + 512;
		wr[i].wr.rdma.rkey = b->mr->rkey;
	}
	struct ibv_sge back = { (uintptr_t)a->buf + 512, 64, a->mr->lkey };
	struct ibv_sge old = { (uintptr_t)a->buf + 1024, 8, a->mr->lkey };
	wr[0].opcode = IBV_WR_RDMA_WRITE;
	wr[1].opcode = IBV_WR_RDMA_READ;
	wr[1].sg_list = &back;
	wr[2].opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
	wr[2].sg_list = &old;
	wr[2].send_flags = IBV_SEND_SIGNALED;
	wr[2].wr.atomic.remote_addr = (uintptr_t)b->buf + 1024;
	wr[2].wr.atomic.compare_add = 2;
	wr[2].wr.atomic.rkey = b->mr->rkey;
	CHECK(!ibv_post_send(a->qp, wr, &bad));
	wc = one(a->cq);
	CHECK(wc.wr_id == 12 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_FETCH_ADD && wc.byte_len == 8);
	CHECK(!memcmp(a->buf, a->buf + 512, 64));
	CHECK(*(uint64_t *)(a->buf + 1024) == 40 && *(uint64_t *)(b->buf + 1024) == 42);

	/* The second request of a list is bad: the first is posted, the others are not. */
	wr[0].send_flags = IBV_SEND_SIGNALED;
	wr[1].opcode = IBV_WR_TSO;
	bad = NULL;
	CHECK(ibv_post_send(a->qp, wr, &bad) != 0);
	CHECK(bad == &wr[1]);
	CHECK(one(a->cq).wr_id == 10);
	CHECK(ibv_poll_cq(a->cq, 1, &wc) == 0 && ibv_poll_cq(a->cq, 0, NULL) == 0 &&
	      ibv_poll_cq(a->cq, -1, &wc) < 0);
	wr[0].num_sge = 1000;
	CHECK(ibv_post_send(a->qp, wr, &bad) != 0 && bad == &wr[0]);
	recv.num_sge = -1;
	CHECK(ibv_post_recv(b->qp, &recv, &bad_recv) == EINVAL && bad_recv == &recv);
}

/* Memory windows: keys, errno values, what stays while a window is bound. */
static void windows(struct side *a, struct side *b)
{
	unsigned char *buf = calloc(1, 4096);
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	struct ibv_mw *one_mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1), *two_mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_mw_bind bind = { .wr_id = 30, .send_flags = IBV_SEND_SIGNALED,
				    .bind_info = { mr, (uintptr_t)buf, 64, IBV_ACCESS_REMOTE_WRITE } };
	struct ibv_send_wr wr = { .wr_id = 31, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_sge from = { (uintptr_t)"through", 8, 0 };
	struct ibv_recv_wr recv = { .wr_id = 40 }, *bad_recv;
	struct ibv_wc wc;
	uint32_t before;

	CHECK(mr && one_mw && two_mw);
	if (!mr || !one_mw || !two_mw)
		return;
	CHECK(one_mw->pd == pd && one_mw->context == ctx && one_mw->type == IBV_MW_TYPE_1 && one_mw->rkey);
	before = one_mw->rkey;
	CHECK(ibv_bind_mw(b->qp, two_mw, &bind) == EINVAL);
	CHECK(!ibv_bind_mw(b->qp, one_mw, &bind) && one_mw->rkey == ibv_inc_rkey(before));
	wc = one(b->cq);
	CHECK(wc.wr_id == 30 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW);
	CHECK(ibv_dereg_mr(mr) == EBUSY);
	bind.bind_info.length = 0;
	CHECK(!ibv_bind_mw(b->qp, one_mw, &bind) && one(b->cq).status == IBV_WC_SUCCESS);

	wr.bind_mw.mw = one_mw;
	CHECK(ibv_post_send(b->qp, &wr, &bad) == EINVAL && bad == &wr);
	wr.bind_mw.mw = two_mw;
	wr.bind_mw.rkey = ibv_inc_rkey(two_mw->rkey);
	wr.bind_mw.bind_info = bind.bind_info;
	CHECK(ibv_post_send(b->qp, &wr, &bad) == EINVAL);
	wr.bind_mw.bind_info.length = 64;
	/* the low eight bits count: what a program writes above them is passed over,
	 * and the struct stays as it was */
	before = ibv_inc_rkey(two_mw->rkey);
	wr.bind_mw.rkey = before ^ 0x12345600;
	CHECK(!ibv_post_send(b->qp, &wr, &bad));
	wc = one(b->cq);
	CHECK(wc.wr_id == 31 && wc.status == IBV_WC_SUCCESS && ibv_inc_rkey(two_mw->rkey) == before);

	wr = (struct ibv_send_wr){ .wr_id = 32, .opcode = IBV_WR_RDMA_WRITE, .sg_list = &from, .num_sge = 1,
				   .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE };
	wr.wr.rdma.remote_addr = (uintptr_t)buf;
	wr.wr.rdma.rkey = before;
	CHECK(!ibv_post_send(a->qp, &wr, &bad) && one(a->cq).status == IBV_WC_SUCCESS);
	CHECK(!strcmp((char *)buf, "through"));
	CHECK(!ibv_post_recv(b->qp, &recv, &bad_recv));
	wr = (struct ibv_send_wr){ .wr_id = 33, .opcode = IBV_WR_SEND_WITH_INV, .invalidate_rkey = before,
				   .send_flags = IBV_SEND_SIGNALED };
	CHECK(!ibv_post_send(a->qp, &wr, &bad));
	wc = one(b->cq);
	CHECK(wc.wr_id == 40 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV);
	CHECK(wc.wc_flags == IBV_WC_WITH_INV && wc.invalidated_rkey == before);
	CHECK(one(a->cq).opcode == IBV_WC_SEND);
	wr.opcode = IBV_WR_LOCAL_INV;
	CHECK(!ibv_post_send(b->qp, &wr, &bad));
	wc = one(b->cq);
	CHECK(wc.wr_id == 33 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_LOCAL_INV);
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_mw(one_mw) && !ibv_dealloc_mw(two_mw));
	free(buf);
}

/* XRC: a domain on a file is one for all its openers; it stays while something is in it. */
static void xrc(struct ibv_cq *cq)
{
	FILE *file = tmpfile();
	struct ibv_xrcd_init_attr on = { IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, fileno(file), 0 };
	struct ibv_qp_init_attr_ex recv = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD };
	struct ibv_qp_init_attr_ex send = { .qp_type = IBV_QPT_XRC_SEND, .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd,
					    .send_cq = cq, .cap = { .max_send_wr = 4, .max_send_sge = 1 } };
	struct ibv_srq_init_attr_ex init = { .attr = { .max_wr = 4, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC,
					     .pd = pd, .cq = cq };
	struct ibv_qp_open_attr open = { .qp_type = IBV_QPT_XRC_RECV };
	struct ibv_xrcd *first, *second;
	struct ibv_srq *srq;
	struct ibv_qp *qp, *same, *sender;
	struct ibv_recv_wr wr = { 0 }, *bad_recv;
	struct ibv_send_wr swr = { .opcode = IBV_WR_SEND }, *bad;
	uint32_t number = ~0;

	CHECK(!ibv_open_xrcd(ctx, &on) && errno == EAGAIN);
	on.oflags = O_CREAT;
	first = ibv_open_xrcd(ctx, &on);
	on.oflags = 0;
	second = ibv_open_xrcd(ctx, &on);
	CHECK(first && second && first->context == ctx);
	if (!first || !second)
		return;
	on.oflags = O_CREAT | O_EXCL;
	CHECK(!ibv_open_xrcd(ctx, &on) && errno == EINVAL);
	on = (struct ibv_xrcd_init_attr){ on.comp_mask, -1, 0 };
	CHECK(!ibv_open_xrcd(ctx, &on) && errno == EINVAL);

	init.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ;
	CHECK(!ibv_create_srq_ex(ctx, &init) && errno == EINVAL);
	init.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD;
	init.xrcd = first;
	recv.xrcd = second;
	srq = ibv_create_srq_ex(ctx, &init);
	qp = ibv_create_qp_ex(ctx, &recv);
	sender = ibv_create_qp_ex(ctx, &send);
	CHECK(srq && qp && sender && qp->qp_type == IBV_QPT_XRC_RECV && !qp->pd && !qp->recv_cq);
	if (!srq || !qp || !sender)
		return;
	CHECK(!ibv_get_srq_num(srq, &number) && number < 1 << 24);
	CHECK(!to_init(qp, 0xf) && qp->state == IBV_QPS_INIT && !to_init(sender, 0xf));
	CHECK(ibv_post_recv(sender, &wr, &bad_recv) == EINVAL && ibv_post_recv(qp, &wr, &bad_recv) == EINVAL);
	CHECK(ibv_post_send(qp, &swr, &bad) == EINVAL);
	open.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
	open.xrcd = first;
	open.qp_num = sender->qp_num;
	CHECK(!ibv_open_qp(ctx, &open) && errno == EINVAL);
	open.qp_num = qp->qp_num;
	same = ibv_open_qp(ctx, &open);
	CHECK(same && same->qp_num == qp->qp_num && same->state == IBV_QPS_INIT);
	CHECK(!ibv_close_xrcd(second) && ibv_close_xrcd(first) == EBUSY && ibv_destroy_cq(cq) == EBUSY);
	CHECK(!ibv_destroy_qp(qp) && same && !ibv_destroy_qp(same));
	CHECK(!ibv_open_qp(ctx, &open) && errno == EINVAL);
	CHECK(ibv_close_xrcd(first) == EBUSY && !ibv_destroy_srq(srq) && !ibv_close_xrcd(first));
	CHECK(!ibv_destroy_qp(sender));
	fclose(file);
}

static void query(struct side *a, struct side *b)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	CHECK(!ibv_query_qp(a->qp, &attr, IBV_QP_STATE, &init));
	CHECK(attr.qp_state == IBV_QPS_RTS && attr.dest_qp_num == b->qp->qp_num && attr.path_mtu == IBV_MTU_1024);
	CHECK(attr.timeout == 14 && attr.retry_cnt == 7 && attr.port_num == 1 && attr.qp_access_flags == 0xf);
	CHECK(attr.ah_attr.is_global && !memcmp(&attr.ah_attr.grh.dgid, &gid, 16));
	CHECK(init.send_cq == a->cq && init.qp_type == IBV_QPT_RC && init.cap.max_send_wr >= 16);
	CHECK(ibv_modify_qp(a->qp, &attr, 1 << 30) == EINVAL);
	attr.qp_state = IBV_QPS_INIT;
	CHECK(ibv_modify_qp(a->qp, &attr, IBV_QP_STATE) == EINVAL && a->qp->state == IBV_QPS_RTS);
}

static volatile pid_t destroyer;

static void *destroy(void *cq)
{
	destroyer = gettid();
	return (void *)(intptr_t)ibv_destroy_cq(cq);
}

/* Waits until that thread sleeps in its call, or has ended. */
static void await_sleep(void)
{
	char path[64], state = 0;

	for (int tries = 0; tries < 10000 && state != 'S'; tries++) {
		FILE *file = NULL;

		usleep(1000);
		snprintf(path, sizeof(path), "/proc/self/task/%d/stat", (int)destroyer);
		if (destroyer && !(file = fopen(path, "r")))
			return;
		/* a thread that has not begun has no number yet */
		if (file) {
			CHECK(fscanf(file, "%*d (%*[^)]) %c", &state) == 1);
			fclose(file);
		}
	}
	CHECK(state == 'S');
}

static void events(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 16, &failures, channel, 0), *got;
	struct side a = make_side(cq), b = make_side(cq);
	struct ibv_sge sge = { (uintptr_t)a.buf, 8, a.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_async_event event;
	struct pollfd fd = { .events = POLLIN };
	pthread_t thread;
	void *context, *ret;

	CHECK(cq->channel == channel && channel->refcnt == 1 && ibv_destroy_comp_channel(channel) == EBUSY);
	CHECK(!fcntl(channel->fd, F_SETFL, O_NONBLOCK) && ibv_get_cq_event(channel, &got, &context) == -1 &&
	      errno == EAGAIN);
	CHECK(!to_init(a.qp, 0xf) && !to_init(b.qp, 0xf) && !to_rts(a.qp, b.qp->qp_num) &&
	      !to_rts(b.qp, a.qp->qp_num));
	CHECK(!ibv_req_notify_cq(cq, 0));
	wr.wr.rdma.remote_addr = (uintptr_t)b.buf;
	wr.wr.rdma.rkey = b.mr->rkey;
	CHECK(!ibv_post_send(a.qp, &wr, &bad));
	fd.fd = channel->fd;
	CHECK(poll(&fd, 1, 5000) == 1);
	CHECK(!ibv_get_cq_event(channel, &got, &context) && got == cq && context == &failures);
	CHECK(one(cq).status == IBV_WC_SUCCESS);

	/* A wrong rkey: both sides learn of it, the responder through an async event. */
	wr.wr.rdma.rkey ^= 0x5500;
	CHECK(!ibv_post_send(a.qp, &wr, &bad) && one(cq).status == IBV_WC_REM_ACCESS_ERR);
	fd.fd = ctx->async_fd;
	CHECK(poll(&fd, 1, 5000) == 1);
	CHECK(!ibv_get_async_event(ctx, &event) && event.event_type == IBV_EVENT_QP_ACCESS_ERR &&
	      event.element.qp == b.qp);
	ibv_ack_async_event(&event);

	/* Destroying the CQ waits for the ack of the completion event. */
	CHECK(!ibv_destroy_qp(a.qp) && !ibv_destroy_qp(b.qp));
	CHECK(!pthread_create(&thread, NULL, destroy, cq));
	await_sleep();
	CHECK(channel->refcnt <= 1 && pthread_tryjoin_np(thread, &ret) == EBUSY);
	ibv_ack_cq_events(cq, 1);
	CHECK(!pthread_join(thread, &ret) && !ret);
	CHECK(!ibv_destroy_comp_channel(channel));
	CHECK(!ibv_dereg_mr(a.mr) && !ibv_dereg_mr(b.mr));
	free(a.buf);
	free(b.buf);
}

static void extended_poll(void)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS |
					    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
					    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK };
	struct ibv_values_ex before = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK }, after = before,
		wrong = { .comp_mask = 2 };
	struct ibv_modify_cq_attr moderate = { .attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = { 1, 0 } };
	struct ibv_device_attr_ex device;
	struct ibv_poll_cq_attr none = { 0 };
	struct ibv_cq_ex *cq = ibv_create_cq_ex(ctx, &attr);
	struct side a, b;
	struct ibv_sge sge;
	struct ibv_send_wr wr = { .wr_id = 77, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE }, *bad;
	int ret;

	CHECK(cq != NULL);
	if (!cq)
		return;
	a = make_side(ibv_cq_ex_to_cq(cq));
	b = make_side(ibv_cq_ex_to_cq(cq));
	sge = (struct ibv_sge){ (uintptr_t)"inline!", 8, 0 };
	CHECK(!to_init(a.qp, 0xf) && !to_init(b.qp, 0xf) && !to_rts(a.qp, b.qp->qp_num) &&
	      !to_rts(b.qp, a.qp->qp_num));
	wr.wr.rdma.remote_addr = (uintptr_t)b.buf;
	wr.wr.rdma.rkey = b.mr->rkey;
	CHECK(ibv_start_poll(cq, &none) == ENOENT);
	CHECK(!ibv_query_device_ex(ctx, NULL, &device) && device.hca_core_clock == 1000000 &&
	      device.completion_timestamp_mask == UINT64_MAX && device.cq_mod_caps.max_cq_count == UINT16_MAX);
	CHECK(!ibv_modify_cq(ibv_cq_ex_to_cq(cq), &moderate));
	moderate.moderate.cq_count = 2;
	CHECK(!ibv_modify_cq(ibv_cq_ex_to_cq(cq), &moderate));
	moderate.attr_mask = 1 << 4;
	CHECK(ibv_modify_cq(ibv_cq_ex_to_cq(cq), &moderate) == EINVAL);
	CHECK(ibv_query_rt_values_ex(ctx, &wrong) == EINVAL && !ibv_query_rt_values_ex(ctx, &before));
	CHECK(!ibv_post_send(a.qp, &wr, &bad));
	do
		ret = ibv_start_poll(cq, &none);
	while (ret == ENOENT);
	CHECK(ret == 0 && cq->wr_id == 77 && cq->status == IBV_WC_SUCCESS);
	CHECK(ibv_wc_read_opcode(cq) == IBV_WC_RDMA_WRITE && ibv_wc_read_qp_num(cq) == a.qp->qp_num);
	CHECK(!ibv_query_rt_values_ex(ctx, &after) && before.raw_clock.tv_sec == 0);
	CHECK((uint64_t)before.raw_clock.tv_nsec <= ibv_wc_read_completion_ts(cq) &&
	      ibv_wc_read_completion_ts(cq) <= (uint64_t)after.raw_clock.tv_nsec);
	CHECK(ibv_wc_read_completion_wallclock_ns(cq) / 1000000000 + 60 > (uint64_t)time(NULL));
	CHECK(ibv_next_poll(cq) == ENOENT);
	ibv_end_poll(cq);
	CHECK(!strcmp((char *)b.buf, "inline!"));
	CHECK(!ibv_destroy_qp(a.qp) && !ibv_destroy_qp(b.qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
	CHECK(!ibv_dereg_mr(a.mr) && !ibv_dereg_mr(b.mr));
	free(a.buf);
	free(b.buf);
}

static int given, taken, context_of_domain;

static void *from_program(struct ibv_pd *domain, void *context, size_t size, size_t alignment, uint64_t type)
{
	void *memory = NULL;

	CHECK(domain && context == &context_of_domain && size > 0 && type >= 1 && type <= 3);
	if (context_of_domain == ENOMEM)
		return NULL;
	if (context_of_domain)
		return IBV_ALLOCATOR_USE_DEFAULT;
	given++;
	return posix_memalign(&memory, alignment < sizeof(void *) ? sizeof(void *) : alignment, size)
		       ? NULL : memory;
}

static void to_program(struct ibv_pd *domain, void *context, void *memory, uint64_t type)
{
	CHECK(domain && context == &context_of_domain && type >= 1 && type <= 3);
	taken++;
	free(memory);
}

/* ibv_alloc_td(3), ibv_alloc_parent_domain(3): rings of its objects lie in the program's memory. */
static void domains(void)
{
	struct ibv_td_init_attr td_init = { 0 };
	struct ibv_td *td = ibv_alloc_td(ctx, &td_init);
	struct ibv_parent_domain_init_attr init = {
		.pd = pd, .td = td, .alloc = from_program, .free = to_program, .pd_context = &context_of_domain,
		.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
	};
	struct ibv_pd *parent = ibv_alloc_parent_domain(ctx, &init);
	struct ibv_cq_init_attr_ex cq_init = { .cqe = 16, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD,
		.parent_domain = parent };
	struct ibv_cq *cq = ibv_cq_ex_to_cq(ibv_create_cq_ex(ctx, &cq_init));
	struct ibv_qp_init_attr qp_init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp *qp;

	CHECK(td && td->context == ctx && parent && parent->context == ctx && cq && given == 1);
	qp = ibv_create_qp(parent, &qp_init);
	CHECK(qp && qp->pd == parent && given == 2 && !ibv_resize_cq(cq, 1000) && given == 3 && taken == 1);
	CHECK(ibv_dealloc_pd(parent) == EBUSY && ibv_dealloc_td(td) == EBUSY && ibv_dealloc_pd(pd) == EBUSY);
	CHECK(!ibv_destroy_qp(qp) && taken == 2);
	context_of_domain = ENOMEM;
	CHECK(!ibv_create_qp(parent, &qp_init) && errno == ENOMEM);
	context_of_domain = 1;
	qp = ibv_create_qp(parent, &qp_init);
	CHECK(qp && !ibv_destroy_qp(qp) && taken == 2);
	context_of_domain = 0;
	CHECK(!ibv_destroy_cq(cq) && taken == 3 && given == 3);

	init.free = NULL;
	CHECK(!ibv_alloc_parent_domain(ctx, &init) && errno == EINVAL);
	init.comp_mask = 1 << 5;
	CHECK(!ibv_alloc_parent_domain(ctx, &init) && errno == EINVAL);
	init.comp_mask = 0;
	init.pd = NULL;
	CHECK(!ibv_alloc_parent_domain(ctx, &init) && errno == EINVAL);
	cq_init.parent_domain = pd;
	CHECK(!ibv_create_cq_ex(ctx, &cq_init) && errno == EINVAL);
	CHECK(!ibv_dealloc_pd(parent) && !ibv_dealloc_td(td));
}

/* ibv_wr_post(3): what is built is posted together or not at all, and only by a QP that was made for it. */
static void work_requests(struct side *plain)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, 32, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 16, 16, 2, 2, 32 }, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_SEND,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &init), *self;
	struct ibv_qp_ex *x = qp ? ibv_qp_to_qp_ex(qp) : NULL;
	struct side b = make_side(cq);
	struct ibv_data_buf pieces[2] = { { (void *)"in", 2 }, { (void *)"line", 5 } };
	struct ibv_sge two[2] = { { (uintptr_t)b.buf + 64, 4, b.mr->lkey },
		{ (uintptr_t)b.buf + 96, 3, b.mr->lkey } };
	struct ibv_wc wc;

	CHECK(qp && x && &x->qp_base == qp && init.cap.max_send_wr >= 16 && !ibv_qp_to_qp_ex(plain->qp));
	if (!x)
		return;
	self = &x->qp_base;
	CHECK(!to_init(self, 0xf) && !to_init(b.qp, 0xf) && !to_rts(self, b.qp->qp_num) &&
	      !to_rts(b.qp, self->qp_num));

	ibv_wr_start(x);
	x->wr_id = 1;
	x->wr_flags = 0;
	ibv_wr_rdma_write(x, b.mr->rkey, (uintptr_t)b.buf);
	ibv_wr_set_inline_data_list(x, 2, pieces);
	x->wr_id = 2;
	x->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_read(x, b.mr->rkey, (uintptr_t)b.buf);
	ibv_wr_set_sge_list(x, 2, two);
	CHECK(ibv_poll_cq(cq, 1, &wc) == 0 && !ibv_wr_complete(x));
	wc = one(cq);
	CHECK(wc.wr_id == 2 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RDMA_READ);
	CHECK(!strcmp((char *)b.buf, "inline") && !memcmp(b.buf + 64, "inli", 4) && !memcmp(b.buf + 96, "ne", 3));

	ibv_wr_start(x);
	ibv_wr_send(x);
	ibv_wr_abort(x);
	ibv_wr_start(x);
	ibv_wr_rdma_write(x, b.mr->rkey, (uintptr_t)b.buf);
	ibv_wr_send_tso(x, b.buf, 4, 4);
	CHECK(ibv_wr_complete(x) == EOPNOTSUPP);
	ibv_wr_start(x);
	ibv_wr_send_imm(x, 0);
	CHECK(ibv_wr_complete(x) == EINVAL);
	ibv_wr_start(x);
	ibv_wr_send(x);
	ibv_wr_set_inline_data(x, b.buf, SIZE);
	CHECK(ibv_wr_complete(x) == EINVAL);
	CHECK(ibv_poll_cq(cq, 1, &wc) == 0);

	/* A batch that is left behind does not keep the queue pair; operations follow the transport. */
	ibv_wr_start(x);
	ibv_wr_send(x);
	CHECK(!ibv_destroy_qp(qp));
	init.qp_type = IBV_QPT_UD;
	CHECK(!ibv_create_qp_ex(ctx, &init) && errno == EOPNOTSUPP);
	CHECK(!ibv_destroy_qp(b.qp) && !ibv_destroy_cq(cq) && !ibv_dereg_mr(b.mr));
	free(b.buf);
}

static void shared_receives(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 16, .max_sge = 2, .srq_limit = 99 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	struct ibv_srq_attr attr;
	struct ibv_recv_wr wr[2] = { { .next = &wr[1] }, { .num_sge = 1000 } }, *bad = NULL;

	CHECK(srq && init.attr.max_wr >= 16 && init.attr.max_sge >= 2 && srq->pd == pd);
	if (!srq)
		return;
	CHECK(!ibv_query_srq(srq, &attr) && attr.max_wr >= 16 && attr.srq_limit == 0);
	CHECK(ibv_post_srq_recv(srq, wr, &bad) == EINVAL && bad == &wr[1]);
	CHECK(ibv_modify_srq(srq, &attr, 1 << 5) == EINVAL);
	CHECK(!ibv_destroy_srq(srq));
}

static void late_destroy(struct ibv_device *device)
{
	struct ibv_context *second = ibv_open_device(device);
	struct ibv_pd *late = ibv_alloc_pd(second);

	CHECK(late && late->context == second && !ibv_close_device(second));
	CHECK(!ibv_dealloc_pd(late));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_cq *cq;
	struct side a, b;

	alarm(60);
	if (!list || !list[0] || !(ctx = ibv_open_device(list[0]))) {
		perror("opening the card");
		return 1;
	}
	ibv_free_device_list(list);
	CHECK(!ibv_query_gid(ctx, 1, 0, &gid));
	device_and_port();
	pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 32, NULL, NULL, 0);
	CHECK(pd && pd->context == ctx && cq && cq->cqe >= 32 && cq->context == ctx);
	if (!pd || !cq)
		return 1;
	a = make_side(cq);
	b = make_side(ibv_create_cq(ctx, 32, NULL, NULL, 0));
	CHECK(a.qp->state == IBV_QPS_RESET && !to_init(a.qp, 0xf) && a.qp->state == IBV_QPS_INIT &&
	      !to_init(b.qp, 0xf));
	CHECK(!to_rts(a.qp, b.qp->qp_num) && !to_rts(b.qp, a.qp->qp_num));
	refusals(cq);
	data(&a, &b);
	windows(&a, &b);
	xrc(cq);
	query(&a, &b);
	events();
	extended_poll();
	work_requests(&a);
	domains();
	shared_receives();
	late_destroy(ctx->device);
	CHECK(!ibv_destroy_qp(a.qp) && !ibv_destroy_qp(b.qp) && !ibv_destroy_cq(a.cq) && !ibv_destroy_cq(b.cq));
	CHECK(!ibv_dereg_mr(a.mr) && !ibv_dereg_mr(b.mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	free(a.buf);
	free(b.buf);
	if (!failures)
		puts("edges: all as promised");
	return failures != 0;
}
