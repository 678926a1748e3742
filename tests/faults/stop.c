/* Processes that are stopped (SIGSTOP), for less and for more than their peers' patience: the peer goes
 * on, or gets its errors in bounded time, and nobody else waits: not those who share the UDP port with the
 * stopped one, nor those who come meanwhile, nor those whose frames its full socket holds up. usage: stop
 * [SECONDS that the longest stop takes] */
#include "faults.h"
#include <stddef.h>
#include <sys/mman.h>

/* A second, which is more than a busy machine keeps a CPU from a process that is not stopped, and nine. */
static const int SHORT[2] = { 14, 3 }, LONG[2] = { 16, 7 };

/* What a worker reports, and its orders. */
static struct worker {
	volatile long done, failed, flushed, milliseconds;
	/* SHORT or LONG */
	const int *patience;
} *workers;
static int self;

/* Both ends of a connection: the active one writes until it is told to end or its connection fails. */
static void work(int fd, int active)
{
	static struct side s;
	struct worker *mine = &workers[self];
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	struct ibv_wc wc;
	struct peer p;

	open_side(&s);
	p = swap(fd, &s);
	for (;;) {
		struct pollfd end = { fd, POLLIN, 0 };

		NEED(connect_to(s.qp, &p, mine->patience[0], mine->patience[1]) == 0);
		say(fd, 'c');
		NEED(await_byte(fd) == 'g');
		while (active && poll(&end, 1, 0) == 0) {
			long begin = now_ms();

			for (int i = 0; i < 8; i++)
				NEED(post(&s, &p, i ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, 3000, i) == 0);
			for (int i = 0; i < 8; i++) {
				switch (next_status(&s, &wc)) {
				case IBV_WC_SUCCESS: mine->done++; break;
				case IBV_WC_RETRY_EXC_ERR: mine->failed++; break;
				case IBV_WC_WR_FLUSH_ERR: NEED(mine->failed); mine->flushed++; break;
				default: NEED(!"a status that nobody expects");
				}
			}
			if (mine->failed) {
				mine->milliseconds = now_ms() - begin;
				break;
			}
		}
		if (await_byte(fd) != 'r')
			return;
		NEED(ibv_modify_qp(s.qp, &reset, IBV_QP_STATE) == 0);
	}
}

static void active(int fd) { work(fd, 1); }
static void passive(int fd) { work(fd, 0); }

/* A pair of processes at work. */
struct pair {
	pid_t pids[2];
	int fds[2], index;
};

static struct pair begin(int index, const int *patience)
{
	struct pair pair = { .index = index };

	for (int i = 0; i < 2; i++) {
		self = 2 * index + i;
		workers[self].patience = patience;
		pair.pids[i] = start(i ? passive : active, &pair.fds[i]);
	}
	introduce(pair.fds);
	return pair;
}

static void finish(struct pair *pair)
{
	for (int i = 0; i < 2; i++)
		say(pair->fds[i], 'e');
	for (int i = 0; i < 2; i++) {
		CHECK(ended_well(pair->pids[i]));
		close(pair->fds[i]);
	}
}

static struct worker *of(const struct pair *pair) { return &workers[2 * pair->index]; }

/* Waits until a pair has done something more. */
static void moves(const struct pair *pair)
{
	long before = of(pair)->done;

	while (of(pair)->done < before + 8) {
		NEED(!of(pair)->failed);
		nap(1);
	}
}

/* One or the other of a pair stops for a moment, eight times; another pair goes on meanwhile. */
static void stops(const struct pair *pair, const struct pair *other)
{
	for (int i = 0; i < 8; i++) {
		kill(pair->pids[i % 2], SIGSTOP);
		for (long end = now_ms() + 300; now_ms() < end;)
			moves(other);
		kill(pair->pids[i % 2], SIGCONT);
		moves(pair);
	}
}

int main(int argc, char **argv)
{
	long longest = argc > 1 ? atol(argv[1]) * 1000 : 3000;
	struct pair patient, impatient, bystander, late;

	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm((unsigned int)(2 * longest / 1000 + 300));
	NEED((workers = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) != MAP_FAILED);
	patient = begin(0, LONG);
	bystander = begin(1, LONG);
	moves(&patient);
	moves(&bystander);

	/* shorter than the peer's patience, either side, many times: whoever has the first
	 * place at the port is among them */
	stops(&patient, &bystander);
	stops(&bystander, &patient);
	printf("stopped for less than the peer's patience: both sides, 16 times; %ld and %ld messages, "
	       "none failed\n",
	       of(&patient)->done, of(&bystander)->done);

	/* the requester itself, for longer than its own patience: nobody was silent */
	kill(patient.pids[0], SIGSTOP);
	/* how long it is stopped is what is meant */
	nap(longest);
	kill(patient.pids[0], SIGCONT);
	moves(&patient);
	moves(&patient);
	printf("requester stopped for %ld ms: goes on\n", longest);

	/* longer than the peer's patience: errors, and then a new connection; others come and go meanwhile */
	impatient = begin(2, SHORT);
	moves(&impatient);
	kill(impatient.pids[1], SIGSTOP);
	while (of(&impatient)->failed + of(&impatient)->flushed == 0)
		nap(1);
	NEED(of(&impatient)->failed == 1);
	for (long end = now_ms() + longest; now_ms() < end;) {
		late = begin(3, LONG);
		moves(&late);
		moves(&bystander);
		moves(&patient);
		finish(&late);
		memset((void *)of(&late), 0, 2 * sizeof(struct worker));
	}
	kill(impatient.pids[1], SIGCONT);
	printf("peer stopped for %ld ms: retries exceeded after %ld ms, %ld flushed, others go on and come new\n",
	       longest, of(&impatient)->milliseconds, of(&impatient)->flushed);
	memset((void *)of(&impatient), 0, offsetof(struct worker, patience));
	for (int i = 0; i < 2; i++)
		say(impatient.fds[i], 'r');
	let_go(impatient.fds);
	moves(&impatient);
	puts("connected anew: goes on");

	finish(&impatient);
	finish(&patient);
	finish(&bystander);
	return failures != 0;
}
