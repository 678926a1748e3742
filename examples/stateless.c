/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Direct verbs: connections of which one end's card keeps nothing (StaR), and the card's counters.
 *
 *	stateless [CONNECTIONS]
 *
 * Makes pairs of queue pairs on one card (64, if not told), one end stateless and the other
 * stateful, connects them, WRITEs a line through each, and prints what card and library
 * keep of either end. See stardv(7).
 */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <infiniband/stardv.h>

enum { LINE = 64 };

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

/* A reliable connection's end with a role. All else is as in ibv_create_qp_ex. */
static struct ibv_qp *create(uint32_t role)
{
	struct stardv_qp_init_attr star = { .star = role };
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq, .pd = pd, .comp_mask = IBV_QP_INIT_ATTR_PD,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 }, .sq_sig_all = 1,
	};
	struct ibv_qp *qp = stardv_create_qp(ctx, &init, &star, sizeof(star));

	if (!qp)
		die("stardv_create_qp");
	return qp;
}

/* RESET to INIT to RTR to RTS, with a peer at the first GID of the same card. */
static void connect_to(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
		.path_mtu = IBV_MTU_1024, .dest_qp_num = peer, .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } },
	};

	if (ibv_query_gid(ctx, 1, 0, &attr.ah_attr.grh.dgid))
		die("ibv_query_gid");
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		die("INIT");
	attr.qp_state = IBV_QPS_RTR;
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
		die("RTR");
	attr.qp_state = IBV_QPS_RTS;
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				     IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
		die("RTS");
}

static struct stardv_qp_attr ask(struct ibv_qp *qp)
{
	struct stardv_qp_attr attr = { .comp_mask = STARDV_QP_STAR };

	if (stardv_query_qp(qp, &attr, sizeof(attr)))
		die("stardv_query_qp");
	return attr;
}

/* The two ends agree on their roles by messages of their own: a moment. */
static void wait_for_role(struct ibv_qp *qp, uint32_t role)
{
	for (int ms = 0; ask(qp).star_role == STARDV_STAR_ROLE_WAITING && ms < 60000; ms++)
		usleep(1000);
	if (ask(qp).star_role != role) {
		fprintf(stderr, "an end has role %u, not %u\n", ask(qp).star_role, role);
		exit(1);
	}
}

/* WRITEs a line through the connection and waits for its completion. */
static void write_line(struct ibv_qp *qp, struct ibv_mr *mr, char *from, char *to)
{
	struct ibv_sge sge = { (uintptr_t)from, LINE, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE }, *bad;
	struct ibv_wc wc = { 0 };

	wr.wr.rdma.remote_addr = (uintptr_t)to;
	wr.wr.rdma.rkey = mr->rkey;
	if (ibv_post_send(qp, &wr, &bad))
		die("ibv_post_send");
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	if (wc.status || memcmp(from, to, LINE)) {
		fprintf(stderr, "WRITE: %s\n", ibv_wc_status_str(wc.status));
		exit(1);
	}
}

static void print_counters(void)
{
	struct stardv_counter list[256];
	ssize_t count = stardv_list_counters(ctx, list, 256, 0);

	for (ssize_t at = 0; at < count && at < 256; at++)
		if (list[at].value && !strncmp(list[at].name, "star_", 5))
			printf("  %-24s %8" PRIu64 "  %s\n", list[at].name, list[at].value, list[at].help);
}

int main(int argc, char **argv)
{
	struct ibv_device **devices;
	int count = argc > 1 ? atoi(argv[1]) : 64;
	struct ibv_qp *(*pairs)[2] = calloc(count > 0 ? count : 1, sizeof(*pairs));
	char (*lines)[2][LINE] = aligned_alloc(4096, (count * sizeof(*lines) | 4095) + 1);
	struct ibv_mr *mr;

	if (argc > 2 || count < 1 || !pairs || !lines)
		return fprintf(stderr, "usage: stateless [CONNECTIONS]\n"), 2;
	/* Both ends are of one host, whose memory carries connections unless they are to go by packets. */
	if (setenv("STARVERBS_LINK", "udp", 0))
		die("setenv");
	devices = ibv_get_device_list(NULL);
	if (!devices || !devices[0] || !stardv_is_supported(devices[0]))
		return fprintf(stderr, "no card of starverbs; start me with `starverbs run -- ...`\n"), 1;
	ctx = ibv_open_device(devices[0]);
	pd = ctx ? ibv_alloc_pd(ctx) : NULL;
	cq = ctx ? ibv_create_cq(ctx, 16, NULL, NULL, 0) : NULL;
	mr = pd ? ibv_reg_mr(pd, lines, count * sizeof(*lines), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)
		: NULL;
	if (!cq || !mr)
		die("the card");

	for (int at = 0; at < count; at++) {
		pairs[at][0] = create(STARDV_STAR_STATELESS);
		pairs[at][1] = create(STARDV_STAR_STATEFUL);
		for (int end = 0; end < 2; end++)
			connect_to(pairs[at][end], pairs[at][1 - end]->qp_num);
	}
	for (int at = 0; at < count; at++) {
		wait_for_role(pairs[at][0], STARDV_STAR_ROLE_STATELESS);
		wait_for_role(pairs[at][1], STARDV_STAR_ROLE_STATEFUL);
		snprintf(lines[at][0], LINE, "through connection %d", at);
		write_line(pairs[at][0], mr, lines[at][0], lines[at][1]);
	}
	printf("%d connections; of the first one, bytes kept by card and library:\n", count);
	for (int end = 0; end < 2; end++)
		printf("  %-10s %6" PRIu64 " %6" PRIu64 "\n", end ? "stateful" : "stateless",
		       ask(pairs[0][end]).star_card_bytes, ask(pairs[0][end]).star_host_bytes);
	print_counters();

	for (int at = 0; at < count; at++)
		for (int end = 0; end < 2; end++)
			ibv_destroy_qp(pairs[at][end]);
	ibv_dereg_mr(mr);
	ibv_destroy_cq(cq);
	ibv_dealloc_pd(pd);
	ibv_close_device(ctx);
	ibv_free_device_list(devices);
	free(lines);
	free(pairs);
	return 0;
}
