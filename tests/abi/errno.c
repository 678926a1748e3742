/* Calls that return an errno value leave it in errno too, as programs print it with perror(3); calls that
 * succeed, and a completion queue that is empty, leave errno alone.
 * Build: cc -Wall -o errno errno.c -libverbs; run with LD_LIBRARY_PATH naming the library under test. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

#define FAILS(call, error) CHECK((call) == (error) && errno == (error))
/* This one returns what it says, and errno stays what it was. */
#define KEEPS(call, result)                                                                       \
	do {                                                                                      \
		errno = ERANGE;                                                                   \
		int got = (call), now = errno;                                                    \
		if (got != (result) || now != ERANGE) {                                           \
			failures++;                                                               \
			fprintf(stderr, "line %d: %s: %d, errno %d\n", __LINE__, #call, got, now); \
		}                                                                                 \
	} while (0)

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static char buf[4096];

/* What belongs to the device, a domain, or a region. */
static void objects(void)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, sizeof(buf), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_device_attr dev;
	struct ibv_port_attr port;
	struct ibv_gid_entry gid;
	struct ibv_sge sge = { (uintptr_t)buf, 8, 0 };

	FAILS(ibv_query_port(ctx, 9, &port), EINVAL);
	FAILS(ibv_query_gid_ex(ctx, 1, 1 << 20, &gid, 0), EINVAL);
	FAILS(ibv_dealloc_pd(pd), EBUSY);
	FAILS(ibv_advise_mr(pd, 99, 0, &sge, 1), EOPNOTSUPP);
	KEEPS(ibv_query_device(ctx, &dev), 0);
	KEEPS(ibv_query_port(ctx, 1, &port), 0);
	KEEPS(ibv_dealloc_mw(mw), 0);
	KEEPS(ibv_dereg_mr(mr), 0);
}

static void completion_queue(void)
{
	struct ibv_cq_init_attr_ex init = { .cqe = 4 };
	struct ibv_cq_ex *ex = ibv_create_cq_ex(ctx, &init);
	struct ibv_poll_cq_attr poll = { 0 }, more = { .comp_mask = 1 };
	struct ibv_modify_cq_attr change = { .attr_mask = 1u << 20 };
	struct ibv_wc wc;

	FAILS(ibv_resize_cq(cq, 0), EINVAL);
	FAILS(ibv_modify_cq(cq, &change), EINVAL);
	FAILS(ibv_start_poll(ex, &more), EINVAL);
	KEEPS(ibv_start_poll(ex, &poll), ENOENT);
	KEEPS(ibv_poll_cq(cq, 1, &wc), 0);
	KEEPS(ibv_req_notify_cq(cq, 0), 0);
	KEEPS(ibv_destroy_cq(ibv_cq_ex_to_cq(ex)), 0);
}

static void queue_pair(void)
{
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd,
					    .cap = { 4, 4, 1, 1, 0 }, .send_ops_flags = IBV_QP_EX_WITH_SEND,
					    .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS };
	struct ibv_srq_init_attr shared = { .attr = { 4, 1, 0 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &shared);
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &init);
	struct ibv_qp_ex *ex = qp ? ibv_qp_to_qp_ex(qp) : NULL;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND }, *bad_send;
	struct ibv_recv_wr recv = { .num_sge = 99 }, *bad_recv;
	struct ibv_srq_attr limit = { .max_wr = 0 };
	struct ibv_ece ece;
	union ibv_gid group = { 0 };

	CHECK(srq && qp && ex);
	if (!srq || !qp || !ex)
		return;
	FAILS(ibv_modify_qp(qp, &attr, IBV_QP_STATE), EINVAL);
	FAILS(ibv_post_send(qp, &send, &bad_send), EINVAL);
	FAILS(ibv_post_recv(qp, &recv, &bad_recv), EINVAL);
	FAILS(ibv_post_srq_recv(srq, &recv, &bad_recv), EINVAL);
	FAILS(ibv_modify_srq(srq, &limit, IBV_SRQ_MAX_WR), EINVAL);
	FAILS(ibv_attach_mcast(qp, &group, 0), EINVAL);
	FAILS(ibv_query_ece(qp, &ece), EOPNOTSUPP);
	FAILS(ibv_destroy_cq(cq), EBUSY);
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	FAILS(ibv_wr_complete(ex), EINVAL);
	KEEPS(to_init(qp, 0), 0);
	recv.num_sge = 0;
	KEEPS(ibv_post_recv(qp, &recv, &bad_recv), 0);
	KEEPS(ibv_post_srq_recv(srq, &recv, &bad_recv), 0);
	KEEPS(to_rts(qp, qp->qp_num), 0);
	KEEPS(ibv_post_send(qp, &send, &bad_send), 0);
	KEEPS(ibv_destroy_qp(qp), 0);
	KEEPS(ibv_destroy_srq(srq), 0);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	alarm(60);
	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx)) ||
	    !(cq = ibv_create_cq(ctx, 16, NULL, NULL, 0))) {
		perror("opening the card");
		return 1;
	}
	ibv_free_device_list(list);
	objects();
	completion_queue();
	queue_pair();
	CHECK(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	if (!failures)
		puts("errno: set by what fails, and by nothing else");
	return failures != 0;
}
