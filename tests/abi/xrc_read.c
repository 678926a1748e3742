/* READ, atomics and WRITE at memory of a process that has only a shared receive queue of an
 * XRC domain: another process has the queue pair, a third asks. Each is a process of its own,
 * which the test may kill or stop.
 * Build: cc -Wall -o xrc_read xrc_read.c -libverbs; run with LD_LIBRARY_PATH
 * naming the library under test. */
#include "xrc.h"

enum { BIG = 1 << 20, WORDS = 4096, DEEP = 4 };

/* Where the owner's memory is: words for atomics first, then bytes that are known,
 * then some that are written to. */
struct place {
	uint32_t srq, rkey, other;
	uint64_t addr;
};

/* What the asker is to do with it, `count` times; what became of it. */
struct order {
	enum ibv_wr_opcode op;
	uint32_t count, len, rkey, srq;
	uint64_t addr;
};
struct result {
	uint32_t done, failed, status;
};

static unsigned char byte_at(uint64_t i)
{
	return (unsigned char)(i * 7 + (i >> 10));
}

/* Has memory that is `shared` with the test, and a shared receive queue that nothing is posted to; a
 * second region is of another protection domain. */
static void owner(int fd, volatile uint32_t *shared)
{
	struct ibv_context *ctx = open_card();
	struct ibv_pd *pd = ibv_alloc_pd(ctx), *apart = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, NULL, NULL, 0);
	struct ibv_srq_init_attr_ex init = { .attr = { .max_wr = 1, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC,
		.pd = pd, .xrcd = open_domain(ctx), .cq = cq, .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
		IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ };
	struct ibv_srq *srq = ibv_create_srq_ex(ctx, &init);
	void *memory = (void *)(uintptr_t)shared;
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, WORDS + 2 * BIG, 0xf);
	struct ibv_mr *other = ibv_reg_mr(apart, memory, WORDS + 2 * BIG, 0xf);
	struct place place = { .addr = (uintptr_t)memory };
	char byte;

	if (!srq || !mr || !other || ibv_get_srq_num(srq, &place.srq))
		_exit(1);
	place.rkey = mr->rkey;
	place.other = other->rkey;
	say(fd, &place, sizeof(place));
	get(fd, &byte, 1);
	_exit(0);
}

/* Asks, some requests at a time. What READs bring is known; a fetch and add of
 * one must find one more each time. */
static void asker(int fd, volatile uint32_t *shared)
{
	struct ibv_context *ctx = open_card();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq,
		.cap = { .max_send_wr = DEEP, .max_send_sge = 1 }, .qp_type = IBV_QPT_XRC_SEND,
		.comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd, .sq_sig_all = 1 };
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &init);
	struct hello hello = { qp ? qp->qp_num : 0 }, peer;
	unsigned char *memory = aligned_alloc(4096, DEEP * BIG);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, DEEP * BIG, IBV_ACCESS_LOCAL_WRITE);
	struct order order;

	(void)shared;
	say(fd, &hello, sizeof(hello));
	get(fd, &peer, sizeof(peer));
	CHECK(mr && !connect_rc(qp, peer.number));
	for (;;) {
		struct result result = { 0 };
		uint32_t posted = 0, wrong = 0;
		uint64_t found = 0;

		get(fd, &order, sizeof(order));
		while (result.done + result.failed < order.count) {
			uint32_t out = posted - result.done - result.failed;
			struct ibv_wc wc;

			if (posted < order.count && out < DEEP && !result.failed) {
				unsigned char *at = memory + (size_t)(posted % DEEP) * BIG;
				struct ibv_sge sge = { (uintptr_t)at, order.len, mr->lkey };
				struct ibv_send_wr wr = { .wr_id = posted, .sg_list = &sge, .num_sge = 1, .opcode = order.op,
					.qp_type.xrc.remote_srqn = order.srq }, *bad;

				if (order.op == IBV_WR_RDMA_READ || order.op == IBV_WR_RDMA_WRITE) {
					wr.wr.rdma.remote_addr = order.addr;
					wr.wr.rdma.rkey = order.rkey;
				} else {
					wr.wr.atomic.remote_addr = order.addr;
					wr.wr.atomic.rkey = order.rkey;
					/* compare and swap: from nothing to one, which only the first does */
					wr.wr.atomic.compare_add = order.op == IBV_WR_ATOMIC_FETCH_AND_ADD;
					wr.wr.atomic.swap = 1;
				}
				for (uint32_t i = 0; i < order.len; i++)
					at[i] = order.op == IBV_WR_RDMA_WRITE ? byte_at(i) : 0xee;
				CHECK(!ibv_post_send(qp, &wr, &bad));
				posted++;
			}
			if (ibv_poll_cq(cq, 1, &wc) != 1) {
				if (result.failed && !out)
					break;
				continue;
			}
			if (wc.status != IBV_WC_SUCCESS) {
				if (!result.failed++)
					result.status = wc.status;
				continue;
			}
			unsigned char *at = memory + (size_t)(wc.wr_id % DEEP) * BIG;

			for (uint32_t i = 0; order.op == IBV_WR_RDMA_READ && i < order.len; i++)
				wrong += at[i] != byte_at(i);
			if (order.op == IBV_WR_ATOMIC_FETCH_AND_ADD || order.op == IBV_WR_ATOMIC_CMP_AND_SWP) {
				uint64_t value;

				memcpy(&value, at, sizeof(value));
				wrong += result.done && order.op == IBV_WR_ATOMIC_FETCH_AND_ADD && value != found + 1;
				wrong += order.op == IBV_WR_ATOMIC_CMP_AND_SWP && value != !!result.done;
				found = value;
			}
			result.done++;
		}
		if (wrong) {
			fprintf(stderr, "%u wrong, of %u with opcode %u, %u bytes\n", wrong, order.count, order.op, order.len);
			_exit(1);
		}
		say(fd, &result, sizeof(result));
	}
}

static void join(struct process *b, struct process *a)
{
	struct hello at_bridge, at_asker;

	*b = start(run_bridge, NULL);
	*a = start(asker, NULL);
	at_bridge.number = number(*b);
	at_asker.number = number(*a);
	tell(*b, &at_asker, sizeof(at_asker));
	await_byte(*b);
	tell(*a, &at_bridge, sizeof(at_bridge));
}

static struct place place_of(struct process o)
{
	struct place place = { 0 };

	CHECK(read(o.fd, &place, sizeof(place)) == sizeof(place) && place.srq);
	return place;
}

static void begin(struct process a, const struct place *p, enum ibv_wr_opcode op, uint64_t offset,
	uint32_t count, uint32_t len)
{
	struct order order = { op, count, len, p->rkey, p->srq, p->addr + offset };

	tell(a, &order, sizeof(order));
}

static struct result finish(struct process a)
{
	struct result result = { 0 };

	CHECK(read(a.fd, &result, sizeof(result)) == sizeof(result));
	return result;
}

static void all_done(struct process a, uint32_t count)
{
	struct result r = finish(a);

	CHECK(r.done == count && !r.failed);
}

/* One request that fails, with the status of its fault. */
static void refused(const struct place *p, enum ibv_wr_opcode op, uint64_t offset, uint32_t status)
{
	struct process b, a;
	struct result r;

	join(&b, &a);
	begin(a, p, op, offset, 1, 8);
	r = finish(a);
	CHECK(!r.done && r.failed == 1 && r.status == status);
	stop(b, 0);
	stop(a, 0);
}

int main(void)
{
	unsigned char *memory = mmap(NULL, WORDS + 2 * BIG, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
				     -1, 0);
	volatile uint64_t *words = (volatile uint64_t *)memory;
	struct process b, a, o;
	struct place p, bad;
	struct result r;

	alarm(180);
	file = memfd_create("domain", 0);
	for (uint64_t i = 0; i < BIG; i++)
		memory[WORDS + i] = byte_at(i);
	o = start(owner, (volatile uint32_t *)memory);
	p = place_of(o);
	join(&b, &a);

	for (uint32_t len = 1; len <= BIG; len *= 32) {
		begin(a, &p, IBV_WR_RDMA_READ, WORDS, 20, len);
		all_done(a, 20);
	}
	begin(a, &p, IBV_WR_RDMA_READ, WORDS, 1, 0);
	all_done(a, 1);
	begin(a, &p, IBV_WR_RDMA_WRITE, WORDS + BIG, 4, BIG);
	all_done(a, 4);
	CHECK(!memcmp(memory + WORDS, memory + WORDS + BIG, BIG));
	begin(a, &p, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 1000, 8);
	all_done(a, 1000);
	begin(a, &p, IBV_WR_ATOMIC_CMP_AND_SWP, 8, 100, 8);
	all_done(a, 100);
	CHECK(words[0] == 1000 && words[1] == 1);

	/* who has the memory, or the queue pair, is stopped: it takes longer */
	for (int who = 0; who < 2; who++) {
		pid_t pid = who ? b.pid : o.pid;

		begin(a, &p, IBV_WR_ATOMIC_FETCH_AND_ADD, 16, 2000, 8);
		/* here and below, how long it is stopped is what is meant: for less than its peer's patience */
		kill(pid, SIGSTOP);
		nap(20000);
		kill(pid, SIGCONT);
		all_done(a, 2000);
		begin(a, &p, IBV_WR_RDMA_READ, WORDS, 100, 100000);
		kill(pid, SIGSTOP);
		nap(20000);
		kill(pid, SIGCONT);
		all_done(a, 100);
	}
	CHECK(words[2] == 4000);
	stop(b, 0);
	stop(a, 0);

	/* keys are those of the queue's protection domain */
	bad = p;
	bad.rkey = p.other;
	refused(&bad, IBV_WR_RDMA_READ, WORDS, IBV_WC_REM_ACCESS_ERR);
	refused(&bad, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, IBV_WC_REM_ACCESS_ERR);
	refused(&p, IBV_WR_RDMA_READ, WORDS + 2 * BIG - 7, IBV_WC_REM_ACCESS_ERR);
	CHECK(words[0] == 1000);

	/* the owner is killed under way */
	join(&b, &a);
	begin(a, &p, IBV_WR_RDMA_READ, WORDS, 1000000, 200000);
	/* the moment of the kill */
	nap(50000);
	stop(o, SIGKILL);
	r = finish(a);
	/* a READ that was asked for again meanwhile is left to the asker's retries: what
	 * it brings may have come before */
	CHECK(r.failed && (r.status == IBV_WC_REM_INV_REQ_ERR || r.status == IBV_WC_RETRY_EXC_ERR));
	stop(b, 0);
	stop(a, 0);
	if (!failures)
		puts("xrc_read: all as promised");
	return failures != 0;
}
