/* Two processes of one host SEND, WRITE, READ and add to each other's memory as fast as they can, both ways,
 * until one of them is killed, exits, executes another program, is stopped for a while, or ends the
 * connection and deregisters its memory while the other one still writes: at a random moment while they
 * connect, talk, or take leave. After that
 *
 * - the other one's requests fail in bounded time, and all its calls return,
 * - its memory has whole messages alone, those that their sender knows to be done among them; one message of
 *   a sender that failed may be there in part; nothing else has changed,
 * - what it deregistered is written by nobody, also not by one that goes on after a stop,
 * - it talks with the next process.
 *
 * usage: ends [ROUNDS [SEED]] */
#include "faults.h"
#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>

enum { GUARD = 4096, LINE = 64, AROUND = 0x11, LATER = 0xee, SOURCE = 0xa0, WINDOW = 8, RECEIVES = 32,
	LARGEST = 70000 };
enum { PATIENCE_MS = 60000 };

/* Where an operation goes. */
enum kind { PRIVATE, DEVICE, KINDS, MESSAGE = KINDS };

/* Each of them is under way once at most. Below and above what goes alone as a system call, what one use of a
 * reader's slot takes, and what one piece in the ring has. */
static const struct op {
	enum ibv_wr_opcode code;
	enum kind kind;
	uint32_t len;
} ops[] = {
	{ IBV_WR_SEND, MESSAGE, 8 }, { IBV_WR_SEND, MESSAGE, 3000 }, { IBV_WR_SEND, MESSAGE, 40000 },
	{ IBV_WR_RDMA_WRITE, PRIVATE, 8 }, { IBV_WR_RDMA_WRITE, PRIVATE, 100 },
	{ IBV_WR_RDMA_WRITE, PRIVATE, 20000 },
	{ IBV_WR_RDMA_WRITE, PRIVATE, LARGEST }, { IBV_WR_RDMA_READ, PRIVATE, 100 },
	{ IBV_WR_RDMA_READ, PRIVATE, LARGEST },
	{ IBV_WR_ATOMIC_FETCH_AND_ADD, PRIVATE, 8 },
	{ IBV_WR_RDMA_WRITE, DEVICE, 8 }, { IBV_WR_RDMA_WRITE, DEVICE, 100 }, { IBV_WR_RDMA_WRITE, DEVICE, 20000 },
	{ IBV_WR_RDMA_WRITE, DEVICE, LARGEST }, { IBV_WR_RDMA_READ, DEVICE, 100 },
	{ IBV_WR_RDMA_READ, DEVICE, LARGEST },
	{ IBV_WR_ATOMIC_FETCH_AND_ADD, DEVICE, 8 },
};
enum { OPS = sizeof(ops) / sizeof(*ops) };
/* Of an operation in the peer's memory of its kind. */
static uint32_t places[OPS];
/* Memory of either kind: guards, and what is registered between them. */
static uint32_t size;

/* What the parent and both processes know. */
static struct shared {
	struct {
		/* of each operation, how often it was posted, and how often it was done */
		volatile uint32_t posted[OPS], done[OPS];
		volatile long steps;
		volatile int ready;
	} side[2];
	volatile int end;
	/* gives up: 1 and the index of the process */
	volatile int gives_up;
} *shared;

/* What a process tells its peer. */
struct more {
	struct peer p;
	uint32_t rkeys[KINDS];
	uint64_t addrs[KINDS];
};

/* A process. */
static struct {
	struct side s;
	int index;
	uint8_t *memory, *local, *receives;
	struct ibv_mr *mrs[KINDS], *local_mr, *receives_mr;
	struct ibv_dm *dm;
	/* of this conversation */
	struct more peer;
	uint32_t got[OPS];
	int under_way, posted_receives, busy[OPS], failed, gave_up;
} me;

static uint8_t pattern(uint32_t n) { return (uint8_t)(n % 251 + 1) == AROUND ? 254 : (uint8_t)(n % 251 + 1); }

static int writes(const struct op *op) { return op->code == IBV_WR_RDMA_WRITE; }
static int adds(const struct op *op) { return op->code == IBV_WR_ATOMIC_FETCH_AND_ADD; }

static void lay_out(void)
{
	uint32_t ends[KINDS] = { GUARD, GUARD };

	for (int i = 0; i < OPS; i++) {
		if (ops[i].kind == MESSAGE)
			continue;
		places[i] = ends[ops[i].kind];
		ends[ops[i].kind] += (ops[i].len + 2 * LINE - 1) / LINE * LINE;
	}
	size = (ends[PRIVATE] > ends[DEVICE] ? ends[PRIVATE] : ends[DEVICE]) + GUARD;
	size = (size + 4095) / 4096 * 4096;
}

/* Memory of one kind as it is before anybody writes it. */
static void make_fresh(uint8_t *to, enum kind kind)
{
	memset(to, AROUND, size);
	for (int i = 0; i < OPS; i++)
		if (ops[i].kind == kind)
			memset(to + places[i], adds(&ops[i]) ? 0 : writes(&ops[i]) ? pattern(0) : SOURCE, ops[i].len);
}

static int is_all(const uint8_t *at, uint8_t byte, size_t len)
{
	return *at == byte && memcmp(at, at + 1, len - 1) == 0;
}

/* Looks at memory of one kind after a conversation. Gives how many messages are there in part. */
static int look_at(uint8_t *memory, enum kind kind)
{
	int torn = 0;

	for (int i = 0; i < OPS; i++) {
		const struct op *op = &ops[i];
		uint8_t *at = memory + places[i];
		uint32_t done = shared->side[!me.index].done[i], posted = shared->side[!me.index].posted[i];

		if (op->kind != kind)
			continue;
		NEED(posted - done <= 1);
		if (adds(op)) {
			uint64_t sum;

			memcpy(&sum, at, sizeof(sum));
			NEED(sum == done || sum == posted);
		} else if (writes(op)) {
			int old = 0, new = 0;

			for (uint32_t n = 0; n < op->len; n++) {
				NEED(at[n] == pattern(done) || at[n] == pattern(posted));
				old += at[n] == pattern(done);
				new += at[n] == pattern(posted);
			}
			torn += done != posted && old && new;
		} else {
			NEED(is_all(at, SOURCE, op->len));
		}
		memset(at, AROUND, op->len);
	}
	NEED(is_all(memory, AROUND, size));
	return torn;
}

static void open_all(void)
{
	struct ibv_alloc_dm_attr dm = { .length = size };

	open_side(&me.s);
	me.memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	NEED(me.memory != MAP_FAILED);
	NEED((me.local = malloc(OPS * LARGEST)) && (me.receives = malloc(RECEIVES * LARGEST)));
	NEED(me.local_mr = ibv_reg_mr(me.s.pd, me.local, OPS * LARGEST, 1));
	NEED(me.receives_mr = ibv_reg_mr(me.s.pd, me.receives, RECEIVES * LARGEST, 1));
	NEED(me.dm = ibv_alloc_dm(me.s.ctx, &dm));
}

static void receive(int slot)
{
	struct ibv_sge sge = { (uintptr_t)me.receives + (size_t)slot * LARGEST, LARGEST, me.receives_mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1, .wr_id = OPS + slot }, *bad;

	NEED(ibv_post_recv(me.s.qp, &wr, &bad) == 0);
	me.posted_receives++;
}

/* A message is whole, and the next one of its length. */
static void look_at_message(const uint8_t *at, uint32_t len)
{
	int i = 0;

	while (ops[i].code != IBV_WR_SEND || ops[i].len != len)
		NEED(++i < OPS);
	me.got[i]++;
	NEED(me.got[i] <= shared->side[!me.index].posted[i]);
	NEED(is_all(at, pattern(me.got[i]), len));
}

static void post_op(int i)
{
	const struct op *op = &ops[i];
	uint8_t *local = me.local + (size_t)i * LARGEST;
	struct ibv_sge sge = { (uintptr_t)local, op->len, me.local_mr->lkey };
	struct ibv_send_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = op->code,
			   .send_flags = IBV_SEND_SIGNALED }, *bad;

	if (op->kind != MESSAGE) {
		wr.wr.rdma.remote_addr = me.peer.addrs[op->kind] + places[i] - GUARD;
		wr.wr.rdma.rkey = me.peer.rkeys[op->kind];
	}
	if (adds(op)) {
		wr.wr.atomic.remote_addr = wr.wr.rdma.remote_addr;
		wr.wr.atomic.rkey = me.peer.rkeys[op->kind];
		wr.wr.atomic.compare_add = 1;
	}
	shared->side[me.index].posted[i]++;
	memset(local, pattern(shared->side[me.index].posted[i]), op->len);
	NEED(ibv_post_send(me.s.qp, &wr, &bad) == 0);
	me.busy[i] = 1;
	me.under_way++;
}

static void complete(const struct ibv_wc *wc)
{
	int i = (int)wc->wr_id;
	const uint8_t *local = me.local + (size_t)i * LARGEST;
	uint64_t word;

	if (i >= OPS) {
		me.posted_receives--;
		NEED(wc->status == IBV_WC_SUCCESS || wc->status == IBV_WC_WR_FLUSH_ERR);
		if (wc->status == IBV_WC_SUCCESS) {
			look_at_message(me.receives + (size_t)(i - OPS) * LARGEST, wc->byte_len);
			receive(i - OPS);
		}
		return;
	}
	me.busy[i] = 0;
	me.under_way--;
	if (wc->status != IBV_WC_SUCCESS) {
		NEED(wc->status == (me.failed ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR));
		me.failed = 1;
		return;
	}
	NEED(!me.failed || me.gave_up);
	if (adds(&ops[i])) {
		memcpy(&word, local, sizeof(word));
		NEED(word == shared->side[me.index].done[i]);
	}
	if (ops[i].code == IBV_WR_RDMA_READ)
		NEED(is_all(local, SOURCE, ops[i].len));
	shared->side[me.index].done[i]++;
	shared->side[me.index].steps++;
}

static void poll_some(void)
{
	struct ibv_wc wc[8];
	int n = ibv_poll_cq(me.s.cq, 8, wc);

	NEED(n >= 0);
	for (int i = 0; i < n; i++)
		complete(&wc[i]);
}

static int goes_on(void) { return !me.failed && !shared->end && shared->gives_up != 1 + me.index; }

/* Until the end is near, or the peer has gone. */
static void talk(unsigned int *seed)
{
	struct ibv_qp_attr err = { .qp_state = IBV_QPS_ERR };

	while (goes_on()) {
		int window = rand_r(seed) % 2 ? 1 : WINDOW;

		for (int n = 0; n < window && me.under_way < window; n++) {
			int i = (int)(rand_r(seed) % OPS);

			if (!me.busy[i])
				post_op(i);
		}
		do
			poll_some();
		while (me.under_way >= window && goes_on());
	}
	if (!me.failed && shared->gives_up == 1 + me.index)
		me.failed = me.gave_up = 1;
	if (me.gave_up)
		NEED(ibv_modify_qp(me.s.qp, &err, IBV_QP_STATE) == 0);
	while (me.under_way)
		poll_some();
	shared->side[me.index].ready = 1;
	/* the peer needs this one's receives, as long as it is heard of */
	while (!me.failed && !shared->side[!me.index].ready)
		poll_some();
}

/* One connection, with its memory. A `patient` one must not fail. */
static void converse(int fd, int patient, unsigned int *seed)
{
	struct ibv_qp_attr err = { .qp_state = IBV_QPS_ERR };
	struct more mine = {0};
	uint8_t *copy, *private;

	NEED((copy = malloc(size)) && (private = malloc(size)));
	make_fresh(me.memory, PRIVATE);
	make_fresh(copy, DEVICE);
	NEED(ibv_memcpy_to_dm(me.dm, 0, copy, size) == 0);
	NEED(me.mrs[PRIVATE] = ibv_reg_mr(me.s.pd, me.memory + GUARD, size - 2 * GUARD, 0xf));
	NEED(me.mrs[DEVICE] = ibv_reg_dm_mr(me.s.pd, me.dm, GUARD, size - 2 * GUARD, 0xf | IBV_ACCESS_ZERO_BASED));
	if (!me.s.qp)
		NEED(me.s.qp = make_qp(&me.s, IBV_QPT_RC));
	mine.p = describe(&me.s, me.s.qp);
	mine.addrs[PRIVATE] = (uintptr_t)me.memory + GUARD;
	for (int i = 0; i < KINDS; i++)
		mine.rkeys[i] = me.mrs[i]->rkey;
	NEED(send(fd, &mine, sizeof(mine), MSG_NOSIGNAL) == sizeof(mine));
	NEED(recv(fd, &me.peer, sizeof(me.peer), MSG_WAITALL) == sizeof(me.peer));
	memset(me.got, 0, sizeof(me.got));
	me.failed = me.gave_up = 0;

	NEED(connect_to(me.s.qp, &me.peer.p, patient ? 16 : 10, patient ? 7 : 2) == 0);
	for (int i = 0; i < RECEIVES; i++)
		receive(i);
	talk(seed);
	NEED(!(patient && me.failed));
	NEED(ibv_modify_qp(me.s.qp, &err, IBV_QP_STATE) == 0);
	while (me.posted_receives)
		poll_some();
	for (int i = 0; i < KINDS; i++)
		NEED(ibv_dereg_mr(me.mrs[i]) == 0);
	NEED(ibv_destroy_qp(me.s.qp) == 0);
	me.s.qp = NULL;

	/* what came is put aside; from here on the memory is this process's alone */
	memcpy(private, me.memory, size);
	memset(me.memory, LATER, size);
	NEED(ibv_memcpy_from_dm(copy, me.dm, 0, size) == 0);
	NEED(ibv_memcpy_to_dm(me.dm, 0, me.memory, size) == 0);
	/* the peer counts until then */
	while (!shared->side[!me.index].ready)
		nap(1);
	for (int i = 0; i < OPS; i++)
		NEED(ops[i].kind != MESSAGE || me.got[i] >= shared->side[!me.index].done[i]);
	NEED(look_at(private, PRIVATE) + look_at(copy, DEVICE) <= 1);
	say(fd, 'f');
	NEED(await_byte(fd) == 'v');
	NEED(ibv_memcpy_from_dm(copy, me.dm, 0, size) == 0);
	NEED(is_all(me.memory, LATER, size) && is_all(copy, LATER, size));
	free(copy);
	free(private);
}

/* How a process ends that is not killed: by a thread beside the one that talks. */
static sigset_t ends;

static void *wait_for_the_end(void *unused)
{
	int which = 0;

	(void)unused;
	sigwait(&ends, &which);
	if (which == SIGUSR1)
		exit(0);
	execlp("sleep", "sleep", "600", (char *)NULL);
	_exit(1);
}

/* Of the process that a role is run in. */
static int my_index, my_first;
static unsigned int my_seed;

static void role(int fd)
{
	pthread_t thread;

	NEED(pthread_create(&thread, NULL, wait_for_the_end, NULL) == 0);
	me.index = my_index;
	open_all();
	for (int phase = my_first; phase < 2; phase++)
		converse(fd, phase == 1, &my_seed);
	NEED(ibv_dereg_mr(me.s.mr) == 0 && ibv_dereg_mr(me.local_mr) == 0 && ibv_dereg_mr(me.receives_mr) == 0);
	NEED(ibv_free_dm(me.dm) == 0 && ibv_destroy_cq(me.s.cq) == 0 && ibv_dealloc_pd(me.s.pd) == 0);
	NEED(ibv_close_device(me.s.ctx) == 0);
}

static pid_t begin(int index, int first, unsigned int seed, int *fd)
{
	my_index = index;
	my_first = first;
	my_seed = seed;
	return start(role, fd);
}

/* What happens to one of two, and when. */
enum fate { KILLED, EXITS, EXECUTES, STOPS, GIVES_UP, FATES };
enum when { CONNECTING, TALKING, LEAVING, WHENS };
static const char *const fates[] = { "was killed", "exited", "executed another program", "was stopped",
	"gave up" };
static const char *const whens[] = { "connected", "talked", "took leave" };

/* Whether a process says what it should. */
static int says(int fd, char what)
{
	struct pollfd p = { fd, POLLIN, 0 };

	if (poll(&p, 1, PATIENCE_MS) == 1)
		return await_byte(fd) == what;
	fputs("it does not come to an end\n", stderr);
	return 0;
}

static long messages;
static void count_messages(void) { messages += shared->side[0].steps + shared->side[1].steps; }

/* Carries what two processes tell each other; they connect then. */
static int acquaint(const int *fds)
{
	struct more m[2];

	count_messages();
	memset(shared, 0, sizeof(*shared));
	for (int i = 0; i < 2; i++) {
		struct pollfd p = { fds[i], POLLIN, 0 };

		if (poll(&p, 1, PATIENCE_MS) != 1 || recv(fds[i], &m[i], sizeof(m[i]), MSG_WAITALL) != sizeof(m[i]))
			return 0;
	}
	for (int i = 0; i < 2; i++)
		NEED(send(fds[i], &m[!i], sizeof(m[i]), MSG_NOSIGNAL) == sizeof(m[i]));
	return 1;
}

/* Waits until both have done something more, or one has nothing more to say. */
static void talk_of(long steps)
{
	long end = now_ms() + PATIENCE_MS, until[2] = { shared->side[0].steps + steps,
						   shared->side[1].steps + steps };

	while ((shared->side[0].steps < until[0] || shared->side[1].steps < until[1]) && now_ms() < end &&
	       !shared->side[0].ready && !shared->side[1].ready)
		usleep(100);
}

/* Both end a conversation, and find it as it must be. */
static int concluded(const int *fds)
{
	for (int i = 0; i < 2; i++)
		if (!says(fds[i], 'f'))
			return 0;
	for (int i = 0; i < 2; i++)
		say(fds[i], 'v');
	return 1;
}

static unsigned int random_state;
static unsigned int draw(unsigned int below) { return (unsigned int)rand_r(&random_state) % below; }

/* What is done to the victim, whose PID is 0 when it is gone, and what the other one makes of it. */
static int suffer(enum fate fate, int victim, pid_t *pids, int *fds)
{
	int status = -1;

	if (fate == STOPS) {
		kill(pids[victim], SIGSTOP);
		/* for more than the other one's patience, or for less */
		nap(draw(2) ? 100 : draw(20));
		kill(pids[victim], SIGCONT);
		shared->end = 1;
		return concluded(fds) && acquaint(fds);
	}
	if (fate == GIVES_UP) {
		shared->gives_up = 1 + victim;
		return concluded(fds) && acquaint(fds);
	}
	kill(pids[victim], fate == KILLED ? SIGKILL : fate == EXITS ? SIGUSR1 : SIGUSR2);
	if (fate != EXECUTES) {
		NEED(waitpid(pids[victim], &status, 0) == pids[victim]);
		pids[victim] = 0;
		if (fate == EXITS && status != 0)
			return 0;
	}
	shared->side[victim].ready = 1;
	if (!says(fds[!victim], 'f'))
		return 0;
	say(fds[!victim], 'v');
	if (fate == EXECUTES) {
		if (waitpid(pids[victim], &status, WNOHANG) != 0)
			return 0;
		kill(pids[victim], SIGKILL);
		NEED(waitpid(pids[victim], NULL, 0) == pids[victim]);
		pids[victim] = 0;
	}
	close(fds[victim]);
	pids[victim] = begin(victim, 1, draw(RAND_MAX), &fds[victim]);
	return acquaint(fds);
}

static void play(int round, unsigned int seed)
{
	enum fate fate = draw(FATES);
	enum when when = draw(4) ? TALKING : draw(2) ? CONNECTING : LEAVING;
	int fds[2], victim = (int)draw(2), good;
	long moment = draw(1u << draw(15)), steps = 0;
	pid_t pids[2];

	for (int i = 0; i < 2; i++)
		pids[i] = begin(i, 0, draw(RAND_MAX), &fds[i]);
	NEED(acquaint(fds));
	if (when != CONNECTING)
		talk_of(1);
	if (when == LEAVING)
		shared->end = 1;
	/* the moment at which it happens */
	usleep((useconds_t)moment);
	steps = shared->side[0].steps + shared->side[1].steps;
	good = suffer(fate, victim, pids, fds);
	if (good) {
		talk_of(30);
		shared->end = 1;
		good = concluded(fds);
	}
	for (int i = 0; i < 2; i++) {
		if (pids[i]) {
			if (!good)
				kill(pids[i], SIGKILL);
			good &= ended_well(pids[i]);
		}
		close(fds[i]);
	}
	if (!good) {
		failures++;
		fprintf(stderr, "round %d, seed %u: one of two %s as it %s, after %ld us and %ld messages; "
			"again: ends 1 %u\n", round,
			seed, fates[fate], whens[when], moment, steps, seed + (unsigned int)round);
	}
}

int main(int argc, char **argv)
{
	int rounds = argc > 1 ? atoi(argv[1]) : 100;
	unsigned int seed = argc > 2 ? (unsigned int)atoi(argv[2]) : 1;

	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm((unsigned int)(120 + 2 * rounds));
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	NEED(shared != MAP_FAILED);
	sigemptyset(&ends);
	sigaddset(&ends, SIGUSR1);
	sigaddset(&ends, SIGUSR2);
	sigprocmask(SIG_BLOCK, &ends, NULL);
	lay_out();
	printf("seed %u\n", seed);
	for (int i = 0; i < rounds && failures == 0; i++) {
		/* a round can be tried alone */
		random_state = seed + (unsigned int)i;
		play(i, seed);
		if ((i + 1) % 100 == 0)
			printf("%d rounds\n", i + 1);
	}
	count_messages();
	printf("%d rounds, seed %u: one of two was killed, exited, executed another program, was stopped or "
	       "gave up; %ld messages\n",
	       rounds, seed, messages);
	return failures != 0;
}
