/* An XRC domain of several processes: one has the queue pair, others have the shared receive queues, a third
 * sends. Each is a process of its own, which the test may kill or stop; each has a socket to the test.
 * Build: cc -Wall -o xrc xrc.c -libverbs; run with LD_LIBRARY_PATH naming the library under test. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>

#include "xrc.h"

#include "../../include/infiniband/stardv.h"

enum { BIG = 1 << 20, SLOTS = 16, ROUNDS = 6 };

/* What the sender is asked for, and says. */
struct order {
	uint32_t srq, count, len;
};
struct result {
	uint32_t done, failed, status;
};

/* Has a shared receive queue: keeps it full, looks at what comes, and counts it in `shared`. */
static void owner(int fd, volatile uint32_t *shared)
{
	struct ibv_context *ctx = open_card();
	struct ibv_xrcd *domain = open_domain(ctx);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 256, NULL, NULL, 0);
	struct ibv_srq_init_attr_ex init = { .attr = { .max_wr = SLOTS, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC,
		.pd = pd, .xrcd = domain, .cq = cq, .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
		IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ };
	struct ibv_srq *srq = ibv_create_srq_ex(ctx, &init);
	unsigned char *memory = aligned_alloc(4096, (size_t)SLOTS * BIG);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, (size_t)SLOTS * BIG, IBV_ACCESS_LOCAL_WRITE);
	struct hello hello;
	struct ibv_recv_wr *bad;
	struct ibv_wc wc;

	if (!srq || !mr || ibv_get_srq_num(srq, &hello.number))
		_exit(1);
	for (uint64_t n = 0; n < SLOTS; n++) {
		struct ibv_sge sge = { (uintptr_t)memory + n * BIG, BIG, mr->lkey };
		struct ibv_recv_wr wr = { n, NULL, &sge, 1 };

		CHECK(!ibv_post_srq_recv(srq, &wr, &bad));
	}
	say(fd, &hello, sizeof(hello));
	for (;;) {
		char byte;

		if (ibv_poll_cq(cq, 1, &wc) == 1) {
			unsigned char *at = memory + wc.wr_id * BIG;
			struct ibv_sge sge = { (uintptr_t)at, BIG, mr->lkey };
			struct ibv_recv_wr wr = { wc.wr_id, NULL, &sge, 1 };

			if (wc.status == IBV_WC_SUCCESS) {
				/* every byte of message n is n, which it also has as immediate data */
				for (uint32_t i = 0; i < wc.byte_len; i++)
					if (at[i] != (unsigned char)ntohl(wc.imm_data)) {
						fprintf(stderr, "byte %u of message %u is wrong\n", i, ntohl(wc.imm_data));
						_exit(1);
					}
				shared[0]++;
			} else {
				CHECK(wc.status == IBV_WC_WR_FLUSH_ERR);
				shared[1]++;
			}
			memset(at, 0, BIG);
			CHECK(!ibv_post_srq_recv(srq, &wr, &bad));
		}
		if (recv(fd, &byte, 1, MSG_DONTWAIT) == 0)
			_exit(failures != 0);
	}
}

/* How often this card was told that a receiver is not ready. Looks the call up, as the system's libibverbs,
 * which this is linked to, has none. */
static void count_rnr(struct ibv_context *ctx, volatile uint32_t *rnr)
{
	static __typeof__(_stardv_list_counters) *list_counters;
	static struct stardv_counter list[512];
	ssize_t count;

	if (!list_counters)
		list_counters = (__typeof__(list_counters))dlvsym(RTLD_DEFAULT, "_stardv_list_counters", "STARDV_1.0");
	if (!list_counters)
		_exit(1);
	count = list_counters(ctx, list, 512, 0, sizeof(list[0]));
	for (ssize_t i = 0; i < count && i < 512; i++) {
		if (!strcmp(list[i].name, "rcvd_rnr"))
			*rnr = (uint32_t)list[i].value;
	}
}

/* Sends what it is told to, one message after the other is acknowledged, two at a time. Counts in `waits`, if
 * there are any, the RNR NAKs of its card. */
static void sender(int fd, volatile uint32_t *waits)
{
	struct ibv_context *ctx = open_card();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq,
		.cap = { .max_send_wr = 4, .max_send_sge = 1 }, .qp_type = IBV_QPT_XRC_SEND,
		.comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd, .sq_sig_all = 1 };
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &init);
	struct hello hello = { qp ? qp->qp_num : 0 }, peer;
	unsigned char *memory = malloc(2 * BIG);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, 2 * BIG, 0);
	struct order order;

	say(fd, &hello, sizeof(hello));
	get(fd, &peer, sizeof(peer));
	CHECK(mr && !connect_rc(qp, peer.number));
	for (;;) {
		struct result result = { 0 };
		uint32_t posted = 0;

		get(fd, &order, sizeof(order));
		while (result.done + result.failed < order.count) {
			struct ibv_wc wc;

			if (posted < order.count && posted - result.done - result.failed < 2) {
				unsigned char *at = memory + posted % 2 * BIG;
				struct ibv_sge sge = { (uintptr_t)at, order.len, mr->lkey };
				struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM,
					.imm_data = htonl(posted), .qp_type.xrc.remote_srqn = order.srq }, *bad;

				memset(at, (int)posted, order.len);
				CHECK(!ibv_post_send(qp, &wr, &bad));
				posted++;
			}
			if (ibv_poll_cq(cq, 1, &wc) == 1) {
				if (wc.status == IBV_WC_SUCCESS) {
					result.done++;
				} else {
					if (!result.failed)
						result.status = wc.status;
					result.failed++;
				}
			} else if (waits) {
				count_rnr(ctx, waits);
			}
		}
		say(fd, &result, sizeof(result));
	}
}

/* Makes a queue pair and leaves all else to who opens it; then gives up its own handle. */
static void creator(int fd, volatile uint32_t *shared)
{
	struct ibv_context *ctx = open_card();
	struct ibv_xrcd *domain = open_domain(ctx);
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD,
		.xrcd = domain };
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &init);
	struct hello hello = { qp ? qp->qp_num : 0 };
	char byte;

	(void)shared;
	say(fd, &hello, sizeof(hello));
	get(fd, &byte, 1);
	CHECK(!ibv_destroy_qp(qp) && ibv_close_xrcd(domain) == EBUSY);
	say(fd, "!", 1);
	get(fd, &byte, 1);
	/* it sees a little later that the last attached process is gone */
	while (ibv_close_xrcd(domain) == EBUSY)
		usleep(1000);
	say(fd, "!", 1);
	get(fd, &byte, 1);
}

/* Opens the queue pair of another process, connects it, and waits for its end;
 * or, asked to, closes it before. */
static void attached(int fd, volatile uint32_t *shared)
{
	struct ibv_context *ctx = open_card();
	struct ibv_qp_open_attr open = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD |
		IBV_QP_OPEN_ATTR_TYPE | IBV_QP_OPEN_ATTR_CONTEXT, .xrcd = open_domain(ctx), .qp_type = IBV_QPT_XRC_RECV,
		.qp_context = &open };
	struct ibv_qp_init_attr init;
	struct ibv_async_event event;
	struct hello made, peer;
	struct ibv_qp_attr a;
	struct ibv_qp *qp;
	char byte;

	(void)shared;
	get(fd, &made, sizeof(made));
	get(fd, &peer, sizeof(peer));
	open.qp_num = made.number + 1;
	CHECK(!ibv_open_qp(ctx, &open) && errno == EINVAL);
	open.qp_num = made.number;
	qp = ibv_open_qp(ctx, &open);
	if (!qp)
		_exit(1);
	CHECK(qp->qp_num == made.number && qp->state == IBV_QPS_RESET && qp->qp_context == &open);
	a = way_to(ctx, peer.number);
	CHECK(modify(qp, &a, IBV_QPS_RTR, TO_RTR) == EINVAL && !to_init(qp, 0xf));
	CHECK(!modify(qp, &a, IBV_QPS_RTR, TO_RTR));
	CHECK(!modify(qp, &a, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_SQ_PSN));
	CHECK(!ibv_query_qp(qp, &a, IBV_QP_STATE, &init) && a.qp_state == IBV_QPS_RTS);
	CHECK(a.dest_qp_num == peer.number && a.ah_attr.grh.traffic_class == 32 && init.qp_context == &open);
	say(fd, "!", 1);
	get(fd, &byte, 1);
	if (byte == 'c') {
		CHECK(!ibv_destroy_qp(qp) && !ibv_close_xrcd(open.xrcd));
		_exit(failures != 0);
	}
	do
		CHECK(!ibv_get_async_event(ctx, &event));
	while (event.event_type == IBV_EVENT_COMM_EST && (ibv_ack_async_event(&event), 1));
	CHECK(event.event_type == IBV_EVENT_QP_FATAL && event.element.qp == qp);
	ibv_ack_async_event(&event);
	CHECK(ibv_query_qp(qp, &a, IBV_QP_STATE, &init) == ENODEV && to_init(qp, 0) == ENODEV);
	CHECK(!ibv_destroy_qp(qp) && !ibv_open_qp(ctx, &open) && errno == EINVAL && !ibv_close_xrcd(open.xrcd));
	_exit(failures != 0);
}

/* A bridge and a sender, connected. The sender counts in `waits`. */
static void join(struct process *b, struct process *s, volatile uint32_t *waits)
{
	struct hello at_bridge, at_sender;
	char byte;

	*b = start(run_bridge, NULL);
	*s = start(sender, waits);
	at_bridge.number = number(*b);
	at_sender.number = number(*s);
	CHECK(write(b->fd, &at_sender, sizeof(at_sender)) == sizeof(at_sender));
	CHECK(read(b->fd, &byte, 1) == 1);
	CHECK(write(s->fd, &at_bridge, sizeof(at_bridge)) == sizeof(at_bridge));
}

static void begin(struct process s, uint32_t srq, uint32_t count, uint32_t len)
{
	struct order order = { srq, count, len };

	CHECK(write(s.fd, &order, sizeof(order)) == sizeof(order));
}

static struct result finish(struct process s)
{
	struct result result = { 0 };

	CHECK(read(s.fd, &result, sizeof(result)) == sizeof(result));
	return result;
}

/* Waits until a process has counted so far. */
static void await(volatile uint32_t *count, uint32_t least)
{
	for (int tries = 0; *count < least && tries < 60000; tries++)
		nap(1000);
	CHECK(*count >= least);
}

/* A queue pair of one process that another opens and connects. Its owner gives its own handle up, and is
 * killed, or the other closes it. Messages are for a third process. */
static void opened(uint32_t srq, int killed)
{
	struct process h = start(creator, NULL), g = start(attached, NULL), s = start(sender, NULL);
	struct hello made = { number(h) }, peer = { number(s) };
	struct result r;

	tell(g, &made, sizeof(made));
	tell(g, &peer, sizeof(peer));
	await_byte(g);
	tell(h, "d", 1);
	await_byte(h);
	tell(s, &made, sizeof(made));
	begin(s, srq, 40, 5000);
	r = finish(s);
	CHECK(r.done == 40 && !r.failed);
	stop(s, 0);
	if (killed) {
		stop(h, SIGKILL);
		tell(g, "w", 1);
		stop(g, 0);
		return;
	}
	tell(g, "c", 1);
	stop(g, 0);
	tell(h, "e", 1);
	await_byte(h);
	stop(h, SIGKILL);
}

int main(void)
{
	volatile uint32_t *counts = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct process b, s, one, two;
	uint32_t n1, n2, since;
	struct result r;

	alarm(180);
	file = memfd_create("domain", 0);
	one = start(owner, counts);
	two = start(owner, counts + 2);
	n1 = number(one);
	n2 = number(two);
	CHECK(n1 != n2);
	join(&b, &s, counts + 4);

	/* all sizes, to both */
	for (uint32_t len = 1; len <= BIG; len *= 32) {
		begin(s, n1, 40, len);
		r = finish(s);
		CHECK(r.done == 40 && !r.failed);
		begin(s, n2, 40, len);
		r = finish(s);
		CHECK(r.done == 40 && !r.failed);
	}
	await(counts, 200);
	await(counts + 2, 200);
	CHECK(counts[0] == 200 && counts[2] == 200 && !counts[1] && !counts[3]);

	/* an owner that is stopped: the sender is told to come again, and goes on */
	kill(two.pid, SIGSTOP);
	since = counts[4];
	begin(s, n2, 200, 50000);
	await(counts + 4, since + 50);
	kill(two.pid, SIGCONT);
	r = finish(s);
	CHECK(r.done == 200 && !r.failed);
	await(counts + 2, 400);

	/* a stopped bridge; how long is what is meant: for less than the sender's patience */
	begin(s, n1, 200, 50000);
	kill(b.pid, SIGSTOP);
	nap(20000);
	kill(b.pid, SIGCONT);
	r = finish(s);
	CHECK(r.done == 200 && !r.failed);
	await(counts, 400);

	/* the bridge is killed under way: its leases come back, so the next one finds all of the queue */
	for (int round = 0; round < ROUNDS; round++) {
		uint32_t before = counts[0], flushed = counts[1];

		begin(s, n1, 100000, 200000);
		await(counts, before + 5 + (uint32_t)round);
		stop(b, SIGKILL);
		stop(s, SIGKILL);
		join(&b, &s, NULL);
		before = counts[0];
		begin(s, n1, 4 * SLOTS, 1000);
		r = finish(s);
		CHECK(r.done == 4 * SLOTS && !r.failed);
		await(counts, before + 4 * SLOTS);
		CHECK(counts[1] - flushed <= 1);
	}

	/* an owner is killed under way: the sender learns that there is no such
	 * queue; the other one has its own */
	begin(s, n2, 100000, 200000);
	await(counts + 2, counts[2] + 5);
	stop(two, SIGKILL);
	r = finish(s);
	CHECK(r.failed && r.status == IBV_WC_REM_INV_REQ_ERR);
	stop(b, 0);
	stop(s, 0);
	join(&b, &s, NULL);
	begin(s, n1, 100, 5000);
	r = finish(s);
	CHECK(r.done == 100 && !r.failed);
	stop(b, 0);
	stop(s, 0);
	opened(n1, 0);
	opened(n1, 1);
	stop(one, 0);
	if (!failures)
		puts("xrc: all as promised");
	return failures != 0;
}
