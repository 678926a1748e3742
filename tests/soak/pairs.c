/* Processes of one host, each connected with each: messages, WRITEs, READs and additions of sizes, at times
 * and in numbers that a seed says, while their programs poll, sleep for events, or are away for a while.
 *
 * Every byte is looked at; nothing is lost, or comes twice. With more than nine processes each awaits its
 * doorbell instead of polling all channels.
 * usage: pairs PROCESSES SECONDS [SEED]; run.sh builds it and runs it. */
#define _GNU_SOURCE
#include "soak.h"

#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 32, DEPTH = 4, SLOT = 65536, RECVS = 8, PATIENCE = 60 };
enum kind { MESSAGE, THERE_AND_BACK, ADDITION, WRITE_AND_TELL, KINDS };

/* Of one process about one other, for that one to read. */
struct way {
	uint32_t qpn, rkey;
	uint64_t addr;
	/* Messages and the sum of their seeds */
	uint64_t sent, sum, added;
};

static struct shared {
	_Atomic unsigned at[4];
	_Atomic bool over;
	struct way ways[MOST][MOST];
	/* What additions go to, of each to each: looked at by who made them */
	uint64_t got[MOST][MOST], got_sum[MOST][MOST];
} *shared;

/* Where a connection's bytes lie: for each thing under way what is sent, what comes back, what the other end
 * writes here, and what it tells of; then a cell for additions, and receives. */
struct memory {
	unsigned char local[DEPTH][SLOT], back[DEPTH][SLOT], remote[DEPTH][SLOT], told[DEPTH][SLOT];
	_Alignas(64) uint64_t cell;
	_Alignas(64) unsigned char recvs[RECVS][SLOT];
};

struct op {
	bool busy;
	enum kind kind;
	uint64_t seed;
	uint32_t len;
};

static struct peer {
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	struct memory *memory;
	struct op ops[DEPTH];
	/* Messages until one told of what was written there: it is looked at before the next is */
	uint64_t told[DEPTH];
} peers[MOST];

static unsigned count, self;
static struct rng rng;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_comp_channel *channel;

/* All are there. */
static void meet(int place)
{
	atomic_fetch_add(&shared->at[place], 1);
	while (atomic_load(&shared->at[place]) < count)
		usleep(1000);
}

/* The first word of a message is its seed. */
static void post_recv(unsigned from, uint64_t index)
{
	struct peer *p = &peers[from];
	struct ibv_sge sge = { (uintptr_t)p->memory->recvs[index], SLOT, p->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = from << 16 | 1 << 8 | index, .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(!ibv_post_recv(p->qp, &wr, &bad));
}

/* Lengths are short, of a record, of a page and long, as often as any. */
static uint32_t any_length(void)
{
	static const uint32_t near[] = { 8, 16, 64, 256, 4096, 16384, SLOT };
	uint32_t most = near[below(&rng, sizeof near / sizeof *near)];

	return 8 + below(&rng, most / 8) * 8;
}

static void begin(unsigned to, unsigned at)
{
	struct peer *p = &peers[to];
	struct op *op = &p->ops[at];
	const struct way *there = &shared->ways[to][self];
	uint64_t remote = there->addr + offsetof(struct memory, remote) + at * SLOT;
	struct ibv_sge sge = { (uintptr_t)p->memory->local[at], 0, p->mr->lkey };
	struct ibv_sge back = { (uintptr_t)p->memory->back[at], 0, p->mr->lkey };
	struct ibv_send_wr read = { .wr_id = to << 16 | at, .sg_list = &back, .num_sge = 1,
		.opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { remote, there->rkey } };
	struct ibv_send_wr wr = { .wr_id = to << 16 | at, .sg_list = &sge, .num_sge = 1,
		.opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct way *ours = &shared->ways[self][to];

	*op = (struct op){ true, below(&rng, KINDS), next(&rng), any_length() };
	if (op->kind == WRITE_AND_TELL && __atomic_load_n(&shared->got[to][self], __ATOMIC_ACQUIRE) < p->told[at])
		op->kind = MESSAGE;
	sge.length = back.length = op->len;
	fill(p->memory->local[at], op->seed, op->len);
	switch (op->kind) {
	case MESSAGE:
		if (op->len <= 64 && below(&rng, 2))
			wr.send_flags |= IBV_SEND_INLINE;
		if (below(&rng, 8) == 0)
			wr.send_flags |= IBV_SEND_SOLICITED;
		break;
	case THERE_AND_BACK:
		wr.opcode = IBV_WR_RDMA_WRITE;
		wr.send_flags = 0;
		wr.wr.rdma.remote_addr = remote;
		wr.wr.rdma.rkey = there->rkey;
		wr.next = &read;
		break;
	case ADDITION:
		wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
		sge = back;
		sge.length = 8;
		wr.wr.atomic.remote_addr = there->addr + offsetof(struct memory, cell);
		wr.wr.atomic.rkey = there->rkey;
		wr.wr.atomic.compare_add = 1;
		ours->added++;
		break;
	default:
		wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
		wr.wr.rdma.remote_addr = there->addr + offsetof(struct memory, told) + at * SLOT;
		wr.wr.rdma.rkey = there->rkey;
		wr.imm_data = htonl(at);
		p->told[at] = ours->sent + 1;
	}
	if (op->kind == MESSAGE || op->kind == WRITE_AND_TELL) {
		ours->sent++;
		ours->sum += mix(op->seed);
	}
	MUST(!ibv_post_send(p->qp, &wr, &bad));
}

static void received(const struct ibv_wc *wc)
{
	unsigned from = wc->wr_id >> 16, index = wc->wr_id & 0xff;
	struct memory *memory = peers[from].memory;
	const unsigned char *at = memory->recvs[index];
	uint64_t seed;

	MUST(wc->qp_num == peers[from].qp->qp_num);
	if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
		MUST(wc->wc_flags & IBV_WC_WITH_IMM && ntohl(wc->imm_data) < DEPTH);
		at = memory->told[ntohl(wc->imm_data)];
	} else {
		MUST(wc->opcode == IBV_WC_RECV);
	}
	memcpy(&seed, at, 8);
	MUST(wc->byte_len % 8 == 0 && wc->byte_len <= SLOT && holds(at, seed, wc->byte_len));
	shared->got_sum[self][from] += mix(seed);
	__atomic_store_n(&shared->got[self][from], shared->got[self][from] + 1, __ATOMIC_RELEASE);
	post_recv(from, index);
}

static int take(void)
{
	struct ibv_wc wc[16];
	int got = ibv_poll_cq(cq, 16, wc);

	MUST(got >= 0);
	for (int i = 0; i < got; i++) {
		struct peer *p = &peers[wc[i].wr_id >> 16];
		struct op *op = &p->ops[wc[i].wr_id & 0xff];

		if (wc[i].status != IBV_WC_SUCCESS)
			fprintf(stderr, "process %u, with %u: status %d\n", self, (unsigned)(p - peers), wc[i].status);
		MUST(wc[i].status == IBV_WC_SUCCESS);
		if (wc[i].wr_id & 1 << 8) {
			received(&wc[i]);
			continue;
		}
		MUST(op->busy);
		MUST(op->kind != THERE_AND_BACK || holds(p->memory->back[op - p->ops], op->seed, op->len));
		op->busy = false;
	}
	return got;
}

/* Sleeps until an event comes, but not for long. */
static void sleep_for_event(void)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
	struct ibv_cq *which;
	void *context;

	MUST(!ibv_req_notify_cq(cq, below(&rng, 4) == 0));
	if (take() || poll(&fd, 1, 5) <= 0)
		return;
	MUST(!ibv_get_cq_event(channel, &which, &context) && which == cq);
	ibv_ack_cq_events(cq, 1);
}

/* What a program does between two looks. */
static void pass_time(void)
{
	switch (below(&rng, 64)) {
	case 0:
		usleep(below(&rng, 3000));
		break;
	case 1:
		sleep_for_event();
		break;
	default:
		take();
	}
}

static void open_peer(unsigned with)
{
	struct peer *p = &peers[with];
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq,
					 .cap = { 4 * DEPTH, RECVS, 1, 1, 64 } };

	MUST((p->memory = aligned_alloc(4096, (sizeof(*p->memory) + 4095) & ~4095ul)));
	memset(p->memory, 0, sizeof(*p->memory));
	MUST((p->mr = ibv_reg_mr(pd, p->memory, sizeof(*p->memory), ALL_RIGHTS)));
	MUST((p->qp = ibv_create_qp(pd, &init)));
	MUST(!to_init(p->qp));
	for (uint64_t i = 0; i < RECVS; i++)
		post_recv(with, i);
	shared->ways[self][with] = (struct way){ p->qp->qp_num, p->mr->rkey, (uintptr_t)p->memory, 0, 0, 0 };
}

static bool is_busy(void)
{
	for (unsigned with = 0; with < count; with++)
		for (unsigned at = 0; at < DEPTH; at++)
			if (peers[with].ops[at].busy)
				return true;
	return false;
}

/* Has what the others sent come? They send no more. */
static bool is_all_there(void)
{
	for (unsigned from = 0; from < count; from++)
		if (from != self && shared->got[self][from] != shared->ways[from][self].sent)
			return false;
	return true;
}

static void member(uint64_t seed)
{
	rng.state = mix(seed + self);
	open_card();
	MUST((pd = ibv_alloc_pd(ctx)) && (channel = ibv_create_comp_channel(ctx)));
	MUST((cq = ibv_create_cq(ctx, MOST * (RECVS + 4 * DEPTH), NULL, channel, 0)));
	for (unsigned with = 0; with < count; with++)
		if (with != self)
			open_peer(with);
	meet(0);
	for (unsigned with = 0; with < count; with++)
		if (with != self)
			MUST(!to_rtr(peers[with].qp, shared->ways[with][self].qpn) && !to_rts(peers[with].qp));
	meet(1);
	while (!atomic_load(&shared->over)) {
		unsigned with = below(&rng, count), at = below(&rng, DEPTH);

		if (with != self && !peers[with].ops[at].busy)
			begin(with, at);
		pass_time();
	}
	while (is_busy())
		pass_time();
	atomic_fetch_add(&shared->at[2], 1);
	while (atomic_load(&shared->at[2]) < count || !is_all_there())
		pass_time();
	/* who has all may leave when all have all */
	atomic_fetch_add(&shared->at[3], 1);
	while (atomic_load(&shared->at[3]) < count)
		pass_time();
	for (unsigned from = 0; from < count; from++) {
		if (from == self)
			continue;
		MUST(shared->got_sum[self][from] == shared->ways[from][self].sum);
		MUST(peers[from].memory->cell == shared->ways[from][self].added);
	}
}

int main(int argc, char **argv)
{
	uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 0) : (uint64_t)time(NULL), messages = 0;
	unsigned seconds = argc > 2 ? atoi(argv[2]) : 3, failed = 0;
	pid_t pids[MOST];

	count = argc > 1 ? atoi(argv[1]) : 2;
	MUST(count > 1 && count <= MOST);
	alarm(seconds + PATIENCE);
	printf("pairs: %u processes, %u seconds, seed %llu\n", count, seconds, (unsigned long long)seed);
	fflush(stdout);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	MUST(shared != MAP_FAILED);
	for (self = 0; self < count; self++) {
		MUST((pids[self] = fork()) >= 0);
		if (pids[self] == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			member(seed);
			_exit(0);
		}
	}
	while (atomic_load(&shared->at[1]) < count && waitpid(-1, NULL, WNOHANG) == 0)
		usleep(10000);
	sleep(seconds);
	atomic_store(&shared->over, true);
	for (unsigned i = 0; i < count; i++) {
		int status;

		MUST(waitpid(pids[i], &status, 0) == pids[i]);
		failed += status != 0;
		for (unsigned j = 0; j < count; j++)
			messages += shared->ways[i][j].sent;
	}
	printf("pairs: %llu messages, %s\n", (unsigned long long)messages, failed ? "FAILED" : "each once");
	return failed != 0;
}
