/* Multicast seen from C: return values, and datagrams between processes.
 * usage: multicast                       checks of the calls, and of copies within one process
 *        multicast receive GROUP COUNT   attaches, says "ready", takes COUNT datagrams, none of them twice
 *        multicast send GROUP COUNT      sends COUNT datagrams to the group, slowly if they are many
 * Build: cc -Wall -o multicast multicast.c -libverbs; run with LD_LIBRARY_PATH
 * naming the library under test. */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { GRH = 40, SIZE = 100, DEPTH = 128, MOST = 4096, QKEY = 0x1234, MULTICAST_QPN = 0xffffff,
	PATIENCE = 20 };

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static char memory[(DEPTH + 1) * (GRH + SIZE)];

static union ibv_gid gid(const char *text)
{
	union ibv_gid gid;

	if (inet_pton(AF_INET6, text, gid.raw) != 1)
		exit(2);
	return gid;
}

/* A UD queue pair; with `ready` in RTS. */
static struct ibv_qp *queue_pair(uint32_t create_flags, int ready)
{
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD, .pd = pd,
		.sq_sig_all = 1 };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	struct ibv_qp *qp;

	init.cap = (struct ibv_qp_cap){ DEPTH, DEPTH, 1, 1, 0 };
	init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
	init.create_flags = create_flags;
	qp = ibv_create_qp_ex(ctx, &init);
	CHECK(qp);
	if (!qp || !ready)
		return qp;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	return qp;
}

static void post_recv(struct ibv_qp *qp, int slot)
{
	struct ibv_sge sge = { (uintptr_t)memory + slot * (GRH + SIZE), GRH + SIZE, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_recv(qp, &wr, &bad));
}

static struct ibv_ah *address(const union ibv_gid *group)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = *group, .hop_limit = 9 } };
	struct ibv_ah *ah = ibv_create_ah(pd, &attr);

	CHECK(ah);
	return ah;
}

/* Sends a datagram that says which it is. */
static void send_one(struct ibv_qp *qp, struct ibv_ah *ah, int number)
{
	struct ibv_sge sge = { (uintptr_t)memory + DEPTH * (GRH + SIZE), SIZE, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 1000, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM },
		*bad;

	memset(memory + DEPTH * (GRH + SIZE), number, SIZE);
	wr.imm_data = htonl(number);
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = MULTICAST_QPN;
	wr.wr.ud.remote_qkey = QKEY;
	CHECK(!ibv_post_send(qp, &wr, &bad));
}

/* The next completion; 0 after some seconds without. */
static int completion(struct ibv_wc *wc)
{
	time_t end = time(NULL) + PATIENCE;
	int got;

	while (!(got = ibv_poll_cq(cq, 1, wc)) && time(NULL) < end)
		;
	CHECK(got == 1 && wc->status == IBV_WC_SUCCESS);
	return got == 1;
}

static void rules(void)
{
	union ibv_gid group = gid("::ffff:239.70.1.1"), other = gid("::ffff:239.70.1.2"),
		host = gid("::ffff:10.1.2.3");
	struct ibv_qp_init_attr rc_init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC };
	struct ibv_device_attr device;
	struct ibv_qp *qp = queue_pair(0, 0), *rc = ibv_create_qp(pd, &rc_init);

	CHECK(!ibv_query_device(ctx, &device));
	CHECK(device.max_mcast_grp > 0 && device.max_mcast_qp_attach > 0);
	CHECK(device.max_total_mcast_qp_attach == device.max_mcast_grp * device.max_mcast_qp_attach);
	CHECK(ibv_attach_mcast(rc, &group, 0) == EINVAL && ibv_detach_mcast(rc, &group, 0) == EINVAL);
	CHECK(ibv_attach_mcast(qp, &host, 0) == EINVAL && ibv_attach_mcast(qp, NULL, 0) == EINVAL);
	CHECK(ibv_attach_mcast(NULL, &group, 0) == EINVAL && ibv_detach_mcast(NULL, &group, 0) == EINVAL);
	CHECK(ibv_detach_mcast(qp, &group, 0) == EINVAL && ibv_detach_mcast(qp, NULL, 0) == EINVAL);
	CHECK(!ibv_attach_mcast(qp, &group, 0xc000) && !ibv_attach_mcast(qp, &group, 0) &&
	      !ibv_attach_mcast(qp, &other, 0));
	CHECK(ibv_destroy_qp(qp) == EBUSY);
	CHECK(!ibv_detach_mcast(qp, &group, 0) && ibv_detach_mcast(qp, &group, 0) == EINVAL);
	CHECK(ibv_destroy_qp(qp) == EBUSY && !ibv_detach_mcast(qp, &other, 0));
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_qp(rc));
}

/* Two attached queue pairs: the second does not want its own datagrams. */
static void copies(void)
{
	union ibv_gid group = gid("::ffff:239.70.1.3");
	struct ibv_qp *qp[2] = { queue_pair(0, 1), queue_pair(IBV_QP_CREATE_BLOCK_SELF_MCAST_LB, 1) };
	struct ibv_ah *ah = address(&group);
	struct ibv_wc wc;

	for (int i = 0; i < 2; i++) {
		post_recv(qp[i], 2 * i);
		post_recv(qp[i], 2 * i + 1);
		CHECK(!ibv_attach_mcast(qp[i], &group, 0));
	}
	for (int from = 0; from < 2; from++) {
		int copies = 0, own = 0;

		send_one(qp[from], ah, from);
		for (int left = from == 0 ? 3 : 2; left > 0 && completion(&wc); left--) {
			if (wc.opcode != IBV_WC_RECV)
				continue;
			copies++;
			own += wc.qp_num == qp[from]->qp_num;
			CHECK(wc.src_qp == qp[from]->qp_num && wc.wc_flags == (IBV_WC_GRH | IBV_WC_WITH_IMM));
		}
		CHECK(copies == 2 - from && own == 1 - from);
	}
	CHECK(!ibv_destroy_ah(ah));
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_detach_mcast(qp[i], &group, 0) && !ibv_destroy_qp(qp[i]));
}

/* Whether the 40 bytes before a datagram name the group. */
static int header_names(const char *grh, const union ibv_gid *group)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	if (!memcmp(group->raw, mapped, 12))
		return !memcmp(grh + 36, group->raw + 12, 4);
	return !memcmp(grh + 24, group->raw, 16);
}

static void receive(union ibv_gid group, int count)
{
	struct ibv_qp *qp = queue_pair(0, 1);
	struct ibv_wc wc;
	int seen[MOST] = { 0 }, got = 0;

	for (int i = 0; i < count; i++)
		post_recv(qp, i);
	CHECK(!ibv_attach_mcast(qp, &group, 0));
	puts("ready");
	fflush(stdout);
	for (; got < count && completion(&wc); got++) {
		const char *at = memory + wc.wr_id * (GRH + SIZE);
		unsigned number = ntohl(wc.imm_data);

		CHECK(wc.byte_len == GRH + SIZE && header_names(at, &group));
		CHECK(number < MOST && !seen[number]++ && at[GRH] == (char)number && at[GRH + SIZE - 1] == (char)number);
	}
	if (got < count)
		fprintf(stderr, "only %d of %d datagrams came\n", got, count);
	CHECK(!ibv_detach_mcast(qp, &group, 0) && !ibv_destroy_qp(qp));
}

static void send_all(union ibv_gid group, int count)
{
	struct ibv_qp *qp = queue_pair(0, 1);
	struct ibv_ah *ah = address(&group);
	struct ibv_wc wc;

	for (int i = 0; i < count; i++) {
		send_one(qp, ah, i);
		completion(&wc);
		/* the pace is what is meant: the queues on the way are short */
		if (count > DEPTH)
			usleep(1000);
	}
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_ah(ah));
}

int main(int argc, char **argv)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	ctx = list && list[0] ? ibv_open_device(list[0]) : NULL;
	if (!ctx)
		return perror("ibv_open_device"), 2;
	pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 4 * DEPTH, NULL, NULL, 0);
	mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	CHECK(pd && cq && mr);
	if (argc == 4 && atoi(argv[3]) <= (argv[1][0] == 'r' ? DEPTH : MOST)) {
		(argv[1][0] == 'r' ? receive : send_all)(gid(argv[2]), atoi(argv[3]));
	} else {
		rules();
		copies();
	}
	CHECK(!ibv_dereg_mr(mr) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	return failures != 0;
}
