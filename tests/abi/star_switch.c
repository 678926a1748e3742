/* Two processes whose connection leaves plain RoCEv2 while they talk, as one's card comes to have too many
 * connections, comes back when it has room again, and then has the roles that the programs ask for: but
 * for what they ask they see nothing of it. Run with STARVERBS_STAR=auto and a small
 * STARVERBS_STAR_THRESHOLD, which is the argument.
 * Build: cc -Wall -I include -o star_switch star_switch.c -L dist/lib -libverbs. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

#include <infiniband/stardv.h>

enum { SIZE = 4096, DEPTH = 16, MORE = 300, READ_AT = 2 * DEPTH };

/* What a process tells the other: where it is, and how far it is. */
struct word {
	uint32_t qpn, rkey;
	uint64_t addr;
};

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_qp *qp;
/* Messages that leave, messages that come, what the other reads */
static uint8_t buf[(2 * DEPTH + 1) * SIZE] __attribute__((aligned(8)));
static struct word peer;
static uint64_t sent, done, received;

static struct ibv_qp *make(uint32_t flags)
{
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd };

	init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
	init.create_flags = flags;
	init.cap.max_send_wr = init.cap.max_recv_wr = DEPTH;
	init.cap.max_send_sge = init.cap.max_recv_sge = 1;
	init.sq_sig_all = 1;
	return ibv_create_qp_ex(ctx, &init);
}

static void exchange(int other, const void *mine, void *theirs, size_t len)
{
	CHECK(write(other, mine, len) == (ssize_t)len);
	CHECK(recv(other, theirs, len, MSG_WAITALL) == (ssize_t)len);
}

static uint32_t *message(uint64_t n, int came)
{
	return (uint32_t *)(buf + (n % DEPTH + (came ? DEPTH : 0)) * SIZE);
}

static void receive(uint64_t n)
{
	struct ibv_sge into = { (uintptr_t)message(n, 1), SIZE, mr->lkey };
	struct ibv_recv_wr recv = { .wr_id = n, .sg_list = &into, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_recv(qp, &recv, &bad));
}

/* Message `n`: a SEND, or each fifth time a READ. */
static void say(void)
{
	uint64_t n = sent++;
	struct ibv_sge from = { (uintptr_t)message(n, 0), SIZE, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = n, .opcode = IBV_WR_SEND, .sg_list = &from, .num_sge = 1 }, *bad;

	if (n % 5 == 4) {
		wr.opcode = IBV_WR_RDMA_READ;
		wr.wr.rdma.remote_addr = peer.addr + READ_AT * SIZE;
		wr.wr.rdma.rkey = peer.rkey;
	} else {
		for (int at = 0; at < SIZE / 4; at++)
			message(n, 0)[at] = (uint32_t)n * 31 + (uint32_t)at;
	}
	CHECK(!ibv_post_send(qp, &wr, &bad));
}

static void heard(const struct ibv_wc *wc)
{
	int ok = wc->status == IBV_WC_SUCCESS && wc->qp_num == qp->qp_num;

	if (wc->opcode & IBV_WC_RECV) {
		/* of each five messages four are SENDs */
		uint64_t n = received / 4 * 5 + received % 4;

		ok = ok && wc->wr_id == received && wc->byte_len == SIZE;
		for (int at = 0; at < SIZE / 4; at++)
			ok = ok && message(received, 1)[at] == (uint32_t)n * 31 + (uint32_t)at;
		receive(received++ + DEPTH);
	} else {
		ok = ok && wc->wr_id == done;
		for (int at = 0; wc->opcode == IBV_WC_RDMA_READ && at < SIZE; at++)
			ok = ok && buf[(done % DEPTH) * SIZE + (size_t)at] == 0x5a;
		done++;
	}
	CHECK(ok);
}

/* Until so many messages each way are done. */
static void talk(uint64_t upto)
{
	struct ibv_wc wcs[8];

	while (done < upto || received < upto / 5 * 4 + upto % 5) {
		while (sent < upto && sent - done < DEPTH)
			say();
		int got = ibv_poll_cq(cq, 8, wcs);

		CHECK(got >= 0);
		for (int at = 0; at < got; at++)
			heard(&wcs[at]);
		if (failures > 5)
			exit(1);
	}
}

static uint32_t role(void)
{
	struct stardv_qp_attr attr = { .comp_mask = STARDV_QP_STAR };

	CHECK(!stardv_query_qp(qp, &attr, sizeof(attr)));
	return attr.star_role;
}

/* Both go on together until this end has become that and the other what it waits for. A round that comes
 * to nothing, as a process had no CPU, is tried again after a second, or two; the alarm ends who waits for
 * ever. */
static uint64_t until(int other, uint32_t wanted, uint64_t upto)
{
	uint32_t now, theirs;

	for (;;) {
		talk(upto += MORE);
		now = role() == wanted;
		exchange(other, &now, &theirs, sizeof(now));
		if (now && theirs)
			break;
	}
	CHECK(role() == wanted);
	talk(upto += MORE);
	CHECK(role() == wanted);
	/* neither asks for the next change while the other still looks */
	exchange(other, &now, &theirs, sizeof(now));
	return upto;
}

static int want(uint32_t preference)
{
	struct stardv_qp_attr attr = { .comp_mask = STARDV_QP_STAR, .star_preference = preference };

	return stardv_modify_qp(qp, &attr, sizeof(attr));
}

/* What is no preference, and who has none. */
static void refusals(struct ibv_qp *off)
{
	struct stardv_qp_attr attr = { .comp_mask = STARDV_QP_STAR, .star_preference = STARDV_STAR_AUTO };

	CHECK(want(STARDV_STAR_STATEFUL + 1) == EINVAL);
	CHECK(stardv_modify_qp(NULL, &attr, sizeof(attr)) == EINVAL);
	CHECK(stardv_modify_qp(qp, NULL, sizeof(attr)) == EINVAL);
	CHECK(stardv_modify_qp(qp, &attr, 8) == EINVAL);
	CHECK(stardv_modify_qp(off, &attr, sizeof(attr)) == EOPNOTSUPP);
	attr.comp_mask = 0;
	CHECK(stardv_modify_qp(qp, &attr, sizeof(attr)) == EINVAL);
	attr.comp_mask = STARDV_QP_STAR | 1ull << 40;
	CHECK(stardv_modify_qp(qp, &attr, sizeof(attr)) == EOPNOTSUPP);
}

/* `crowded`: this process's card comes to have too many connections. */
static void run(int other, int crowded, int threshold)
{
	struct word mine;
	struct ibv_qp *crowd[2 * 32];
	uint64_t upto = 0;

	ctx = ibv_open_device(ibv_get_device_list(NULL)[0]);
	pd = ctx ? ibv_alloc_pd(ctx) : NULL;
	cq = pd ? ibv_create_cq(ctx, 4 * DEPTH, NULL, NULL, 0) : NULL;
	mr = cq ? ibv_reg_mr(pd, buf, sizeof(buf), 0xf) : NULL;
	qp = mr ? make(0) : NULL;
	if (!qp) {
		fprintf(stderr, "no card\n");
		exit(1);
	}
	memset(buf + READ_AT * SIZE, 0x5a, SIZE);
	mine = (struct word){ qp->qp_num, mr->rkey, (uintptr_t)buf };
	exchange(other, &mine, &peer, sizeof(mine));
	CHECK(!to_init(qp, 0xf));
	for (uint64_t n = 0; n < DEPTH; n++)
		receive(n);
	exchange(other, &mine, &peer, sizeof(mine));
	CHECK(!to_rts(qp, peer.qpn));

	talk(upto += MORE);
	CHECK(role() == STARDV_STAR_ROLE_PLAIN);
	exchange(other, &mine, &peer, sizeof(mine));
	for (int at = 0; crowded && at < 2 * threshold; at++)
		crowd[at] = make(STARDV_QP_CREATE_STAR_OFF);
	for (int at = 0; crowded && at < 2 * threshold; at++)
		CHECK(crowd[at] && !connect_rc(crowd[at], crowd[at ^ 1]->qp_num));
	upto = until(other, crowded ? STARDV_STAR_ROLE_STATELESS : STARDV_STAR_ROLE_STATEFUL, upto);
	if (crowded)
		refusals(crowd[0]);
	for (int at = 0; crowded && at < 2 * threshold; at++)
		CHECK(!ibv_destroy_qp(crowd[at]));
	upto = until(other, STARDV_STAR_ROLE_PLAIN, upto);
	if (!crowded)
		CHECK(!want(STARDV_STAR_STATELESS));
	upto = until(other, crowded ? STARDV_STAR_ROLE_STATEFUL : STARDV_STAR_ROLE_STATELESS, upto);
	if (!crowded)
		CHECK(!want(STARDV_STAR_STATEFUL));
	upto = until(other, crowded ? STARDV_STAR_ROLE_STATELESS : STARDV_STAR_ROLE_STATEFUL, upto);
	if (!crowded)
		CHECK(!want(STARDV_STAR_OFF));
	upto = until(other, STARDV_STAR_ROLE_PLAIN, upto);

	exchange(other, &mine, &peer, sizeof(mine));
	CHECK(!ibv_destroy_qp(qp) && !ibv_dereg_mr(mr) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(ctx));
	if (crowded)
		printf("a connection that changes%s after some of %" PRIu64 " messages each way: %s\n",
		       getenv("STARVERBS_FAULT") ? " on a bad wire" : "", upto, failures ? "FAILED" : "ok");
	exit(!!failures);
}

int main(int argc, char **argv)
{
	int ends[2], threshold = argc > 1 ? atoi(argv[1]) : 0, status = -1;
	pid_t child;

	if (threshold < 1 || threshold > 32 || socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) {
		fprintf(stderr, "usage: star_switch THRESHOLD\n");
		return 2;
	}
	child = fork();
	alarm(60);
	if (!child)
		run(ends[1], 0, threshold);
	if (fork() == 0)
		run(ends[0], 1, threshold);
	close(ends[0]);
	close(ends[1]);
	int bad = 0;

	while (wait(&status) > 0)
		bad |= status != 0;
	return bad;
}
