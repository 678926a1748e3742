/* Requests that one process executes by itself on the memory of another, while one of the two is stopped
 * (SIGSTOP).
 *
 * - The target is stopped: WRITE and READ go on, as on a card that needs no program; on memory that both have
 *   mapped so do additions. A SEND waits for the target's card, and fails as towards a silent one.
 * - The initiator is stopped in the midst of a copy: ibv_dereg_mr of the target waits until the initiator
 *   goes on or is gone. What was deregistered is written no more. */
#include "faults.h"
#include <sys/mman.h>

enum { LONG_COPY = 4 << 20, TRIES = 200, LATER = 0xee };

/* What all know. */
static struct shared {
	volatile uint32_t rkey;
	volatile long done;
} *shared;

static struct side s;
static struct ibv_dm *dm;
static struct ibv_mr *dm_mr;

static int run(enum ibv_wr_opcode op, uint64_t addr, uint32_t rkey, void *local, uint32_t len, uint32_t lkey)
{
	struct ibv_sge sge = { (uintptr_t)local, len, lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED },
		*bad;
	struct ibv_wc wc;

	if (op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = addr;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = 1;
	} else {
		wr.wr.rdma.remote_addr = addr;
		wr.wr.rdma.rkey = rkey;
	}
	NEED(ibv_post_send(s.qp, &wr, &bad) == 0);
	return next_status(&s, &wc);
}

static void make_target(void)
{
	struct ibv_alloc_dm_attr a = { .length = LONG_COPY };

	open_side(&s);
	NEED(dm = ibv_alloc_dm(s.ctx, &a));
	NEED(dm_mr = ibv_reg_dm_mr(s.pd, dm, 0, LONG_COPY, 0xf | IBV_ACCESS_ZERO_BASED));
	shared->rkey = dm_mr->rkey;
}

static struct peer meet(int fd, int timeout, int retries)
{
	struct peer p = swap(fd, &s);

	NEED(connect_to(s.qp, &p, timeout, retries) == 0);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	return p;
}

/* Does nothing but be there. */
static void target(int fd)
{
	make_target();
	meet(fd, 14, 7);
	NEED(await_byte(fd) == 'e');
}

/* All kinds, alone and of each length, then a SEND. */
static void initiator(int fd)
{
	static const uint32_t lens[] = { 1, 8, 4096, BYTES };
	struct peer p;

	open_side(&s);
	p = meet(fd, 12, 3);
	/* a connection's first request is answered by the target's card */
	NEED(one(&s, &p) == IBV_WC_SUCCESS);
	say(fd, 'f');
	NEED(await_byte(fd) == 's');
	for (int round = 0; round < 100; round++) {
		for (int i = 0; i < 4; i++) {
			for (int mapped = 0; mapped < 2; mapped++) {
				uint64_t addr = mapped ? 0 : p.addr;
				uint32_t rkey = mapped ? shared->rkey : p.rkey;
				char *back = s.buffer + BYTES;

				memset(s.buffer, round + 1, lens[i]);
				memset(back, 0, lens[i]);
				NEED(run(IBV_WR_RDMA_WRITE, addr, rkey, s.buffer, lens[i], s.mr->lkey) == IBV_WC_SUCCESS);
				NEED(run(IBV_WR_RDMA_READ, addr, rkey, back, lens[i], s.mr->lkey) == IBV_WC_SUCCESS);
				NEED(memcmp(s.buffer, back, lens[i]) == 0);
			}
		}
		for (uint64_t n = 0, before; n < 2; n++) {
			if (n == 0)
				NEED(run(IBV_WR_RDMA_READ, 64, shared->rkey, s.buffer, 8, s.mr->lkey) == IBV_WC_SUCCESS);
			memcpy(&before, s.buffer, 8);
			NEED(run(IBV_WR_ATOMIC_FETCH_AND_ADD, 64, shared->rkey, s.buffer + 8, 8, s.mr->lkey) == IBV_WC_SUCCESS);
			before += n;
			NEED(memcmp(&before, s.buffer + 8, 8) == 0);
		}
	}
	NEED(run(IBV_WR_SEND, 0, 0, s.buffer, 8, s.mr->lkey) == IBV_WC_RETRY_EXC_ERR);
	say(fd, 'f');
	NEED(await_byte(fd) == 'e');
}

static void stop_the_target(void)
{
	int fds[2];
	pid_t pids[2] = { start(target, &fds[0]), start(initiator, &fds[1]) };

	introduce(fds);
	NEED(await_byte(fds[1]) == 'f');
	kill(pids[0], SIGSTOP);
	say(fds[1], 's');
	NEED(await_byte(fds[1]) == 'f');
	kill(pids[0], SIGCONT);
	for (int i = 0; i < 2; i++) {
		say(fds[i], 'e');
		CHECK(ended_well(pids[i]));
		close(fds[i]);
	}
	puts("target stopped: 1,600 WRITEs and READs and 200 additions done, a SEND failed");
}

/* Deregisters what is being written; then it is its own. */
static void owner(int fd)
{
	char *copy = malloc(LONG_COPY), *later = malloc(LONG_COPY);

	make_target();
	NEED(copy && later);
	meet(fd, 14, 7);
	NEED(await_byte(fd) == 'd');
	NEED(ibv_dereg_mr(dm_mr) == 0);
	NEED(ibv_memcpy_to_dm(dm, 0, memset(later, LATER, LONG_COPY), LONG_COPY) == 0);
	say(fd, 'f');
	NEED(await_byte(fd) == 'e');
	NEED(ibv_memcpy_from_dm(copy, dm, 0, LONG_COPY) == 0);
	NEED(memcmp(copy, later, LONG_COPY) == 0);
}

/* Writes without an end, until the key is gone. */
static void writer(int fd)
{
	char *local = calloc(1, LONG_COPY);
	struct ibv_mr *mr;
	int status;

	open_side(&s);
	NEED(local && (mr = ibv_reg_mr(s.pd, local, LONG_COPY, 1)));
	meet(fd, 14, 7);
	while ((status = run(IBV_WR_RDMA_WRITE, 0, shared->rkey, local, LONG_COPY, mr->lkey)) == IBV_WC_SUCCESS)
		shared->done++;
	NEED(status == IBV_WC_REM_ACCESS_ERR);
	say(fd, 'f');
	NEED(await_byte(fd) == 'e');
}

/* Stops the writer at some moment. Whether the owner waited for it. */
static int stop_the_writer(int is_killed, int try)
{
	int fds[2], waited;
	pid_t pids[2] = { start(owner, &fds[0]), start(writer, &fds[1]) };
	struct pollfd p = { .events = POLLIN };

	shared->done = 0;
	introduce(fds);
	while (shared->done < 3)
		nap(1);
	usleep((useconds_t)(try * 37 % 1000));
	kill(pids[1], SIGSTOP);
	NEED(waitpid(pids[1], NULL, WUNTRACED) == pids[1]);
	p.fd = fds[0];
	say(fds[0], 'd');
	/* who does not wait is done long before */
	waited = poll(&p, 1, 300) == 0;
	kill(pids[1], is_killed ? SIGKILL : SIGCONT);
	NEED(await_byte(fds[0]) == 'f');
	NEED(is_killed || await_byte(fds[1]) == 'f');
	for (int i = 0; i < 2; i++) {
		if (i == 1 && is_killed) {
			NEED(waitpid(pids[i], NULL, 0) == pids[i]);
		} else {
			say(fds[i], 'e');
			CHECK(ended_well(pids[i]));
		}
		close(fds[i]);
	}
	return waited;
}

int main(void)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm(300);
	NEED((shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) != MAP_FAILED);
	stop_the_target();
	for (int is_killed = 0; is_killed < 2; is_killed++) {
		int tries = 1;

		while (!stop_the_writer(is_killed, tries))
			NEED(++tries < TRIES && failures == 0);
		printf("initiator stopped in the midst of a copy, at try %d: ibv_dereg_mr waited until it %s\n", tries,
		       is_killed ? "was killed" : "went on");
	}
	return failures != 0;
}
