/* Threads and processes that share one CPU, which polls have: what waits for it must get it.
 *
 * - lock: a thread polls an empty completion queue under a spin lock, another wants that lock now and then.
 *   It gets the lock only when the poller loses the CPU outside of it, so hardly a poll may yield.
 * - processes: two answer each other's messages. The one that waits must yield, or each message takes a slice
 *   of the scheduler's.
 * - threads: two of one process do. Neither holds a lock.
 * - beside: a process that computes a little, naps for next to nothing, and never yields. A poller that gave
 *   its CPU to that after each poll would hardly get it back.
 *
 * Nothing here looks at a clock: what must hold is counted in polls.
 * usage: one_cpu PART... */
#define _GNU_SOURCE
#include "soak.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* How often the waiter must get the lock, and in how many polls. */
enum { TIMES = 20, POLLS = 500 * 1000 * 1000 };
/* Yields that say nothing yet, before the library has looked who runs; and
 * how few they must be among polls. */
enum { BEFORE = 1000, SELDOM = 100 };
/* Messages each way; polls that hardly any message may take: about a slice of the scheduler's. */
enum { ROUNDS = 500, SLICE = 1000 };

static atomic_ulong yields, polls, taken;

/* Instead of the C library's. */
int sched_yield(void)
{
	yields++;
	return syscall(SYS_sched_yield);
}

static void share_a_cpu(void)
{
	cpu_set_t all, one;
	int cpu = 0;

	MUST(!sched_getaffinity(0, sizeof all, &all));
	while (!CPU_ISSET(cpu, &all))
		cpu++;
	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	MUST(!sched_setaffinity(0, sizeof one, &one));
}

static pthread_spinlock_t lock;

/* Each time the poller has had the lock meanwhile. */
static void *waiter(void *arg)
{
	while (taken < TIMES) {
		unsigned long before = polls;

		pthread_spin_lock(&lock);
		taken++;
		pthread_spin_unlock(&lock);
		while (taken < TIMES && polls == before)
			;
	}
	return arg;
}

static void lock_part(void)
{
	struct ibv_wc wc[16];
	struct ibv_cq *cq;
	pthread_t thread;

	open_card();
	MUST((cq = ibv_create_cq(ctx, 16, NULL, NULL, 0)));
	MUST(!pthread_spin_init(&lock, PTHREAD_PROCESS_PRIVATE) && !pthread_create(&thread, NULL, waiter, NULL));
	while (taken < TIMES) {
		pthread_spin_lock(&lock);
		poll_some(cq, wc);
		polls++;
		pthread_spin_unlock(&lock);
		MUST(polls < POLLS);
		MUST(yields < BEFORE + polls / SELDOM);
	}
	MUST(!pthread_join(thread, NULL) && !ibv_destroy_cq(cq) && !ibv_close_device(ctx));
	printf("lock: %lu times in %lu polls, %lu of which yielded\n", taken, polls, yields);
}

/* One end of a ping-pong. */
struct end {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	char bytes[8];
	/* Rounds that took as many polls as a slice has, and all polls */
	unsigned slow;
	unsigned long polls;
};

static void open_end(struct end *end)
{
	struct ibv_qp_init_attr init = { .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_RC };

	MUST((end->pd = ibv_alloc_pd(ctx)) && (end->cq = ibv_create_cq(ctx, 16, NULL, NULL, 0)));
	MUST((end->mr = ibv_reg_mr(end->pd, end->bytes, sizeof end->bytes, ALL_RIGHTS)));
	init.send_cq = init.recv_cq = end->cq;
	MUST((end->qp = ibv_create_qp(end->pd, &init)) && !to_init(end->qp));
}

static void close_end(struct end *end)
{
	MUST(!ibv_destroy_qp(end->qp) && !ibv_destroy_cq(end->cq));
	MUST(!ibv_dereg_mr(end->mr) && !ibv_dealloc_pd(end->pd));
}

static void post(struct end *end, bool receive)
{
	struct ibv_sge sge = { (uintptr_t)end->bytes, sizeof end->bytes, end->mr->lkey };
	struct ibv_recv_wr recv = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				    .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE }, *bad;

	if (receive)
		MUST(!ibv_post_recv(end->qp, &recv, &bad_recv));
	else
		MUST(!ibv_post_send(end->qp, &send, &bad));
}

/* Answers ROUNDS messages; the one that begins sends the first. A receive is posted already. */
static void play(struct end *end, bool begins)
{
	struct ibv_wc wc[16];
	unsigned sent = 0;

	for (unsigned round = 0; round < ROUNDS; round++) {
		unsigned long before = end->polls;
		bool came = false;

		if (begins)
			post(end, false);
		while (!came) {
			int got = poll_some(end->cq, wc);

			end->polls++;
			for (int i = 0; i < got; i++) {
				MUST(wc[i].status == IBV_WC_SUCCESS);
				came |= wc[i].wr_id == 1;
				sent += wc[i].wr_id == 0;
			}
		}
		end->slow += end->polls - before > SLICE;
		post(end, true);
		if (!begins)
			post(end, false);
	}
	/* the last answer must have arrived before this end closes */
	while (sent < ROUNDS)
		for (int i = 0, got = poll_some(end->cq, wc); i < got; i++)
			sent += wc[i].wr_id == 0;
}

static void check(const char *name, const struct end *ends)
{
	unsigned slow = ends[0].slow > ends[1].slow ? ends[0].slow : ends[1].slow;

	printf("%s: %u rounds, %lu polls and at the other end %lu, %u of more than %u\n", name, ROUNDS,
	       ends[0].polls, ends[1].polls, slow, SLICE);
	MUST(slow < ROUNDS / 2);
}

static void *player(void *end)
{
	play(end, false);
	return NULL;
}

static void threads_part(void)
{
	static struct end ends[2];
	pthread_t thread;

	open_card();
	for (int i = 0; i < 2; i++)
		open_end(&ends[i]);
	for (int i = 0; i < 2; i++) {
		MUST(!to_rtr(ends[i].qp, ends[!i].qp->qp_num) && !to_rts(ends[i].qp));
		post(&ends[i], true);
	}
	MUST(!pthread_create(&thread, NULL, player, &ends[1]));
	play(&ends[0], true);
	MUST(!pthread_join(thread, NULL));
	close_end(&ends[0]);
	close_end(&ends[1]);
	MUST(!ibv_close_device(ctx));
	check("threads", ends);
}

/* What the two processes tell each other. */
struct board {
	atomic_uint qpns[2], ready[2], closed[2];
	struct end ends[2];
};

static void process(struct board *board, int me)
{
	struct end *end = &board->ends[me];

	open_card();
	open_end(end);
	board->qpns[me] = end->qp->qp_num;
	while (!board->qpns[!me])
		usleep(1000);
	MUST(!to_rtr(end->qp, board->qpns[!me]) && !to_rts(end->qp));
	post(end, true);
	board->ready[me] = 1;
	while (!board->ready[!me])
		usleep(1000);
	play(end, me == 0);
	/* until then the peer may ask again for an ACK that was lost */
	board->closed[me] = 1;
	while (!board->closed[!me])
		usleep(1000);
	close_end(end);
	MUST(!ibv_close_device(ctx));
}

static void processes_part(void)
{
	struct board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int status;
	pid_t child;

	MUST(board != MAP_FAILED);
	child = fork();
	MUST(child >= 0);
	process(board, child ? 0 : 1);
	if (!child)
		_exit(0);
	MUST(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
	check("processes", board->ends);
}

/* Turns of the other process, and of its loop in each: some 20 us. */
enum { TURNS = 20000, WORK = 40000 };

static void computes(atomic_uint *turns)
{
	struct timespec nap = { .tv_nsec = 2000 };

	prctl(PR_SET_TIMERSLACK, 1);
	while ((*turns)++ < TURNS) {
		for (volatile unsigned work = 0; work < WORK; work++)
			;
		nanosleep(&nap, NULL);
	}
}

static void beside_part(void)
{
	atomic_uint *turns = mmap(NULL, sizeof *turns, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct ibv_wc wc[16];
	struct ibv_cq *cq;
	pid_t child;

	MUST(turns != MAP_FAILED);
	child = fork();
	MUST(child >= 0);
	if (!child) {
		computes(turns);
		_exit(0);
	}
	open_card();
	MUST((cq = ibv_create_cq(ctx, 16, NULL, NULL, 0)));
	while (*turns < TURNS) {
		poll_some(cq, wc);
		polls++;
	}
	MUST(waitpid(child, NULL, 0) == child && !ibv_destroy_cq(cq) && !ibv_close_device(ctx));
	printf("beside: %lu polls beside %u turns\n", polls, TURNS);
	MUST(polls > TURNS / 2);
}

int main(int argc, char **argv)
{
	share_a_cpu();
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "lock"))
			lock_part();
		else if (!strcmp(argv[i], "threads"))
			threads_part();
		else if (!strcmp(argv[i], "processes"))
			processes_part();
		else if (!strcmp(argv[i], "beside"))
			beside_part();
		else
			return 2;
	}
	return 0;
}
