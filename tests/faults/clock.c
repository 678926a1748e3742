/* Clocks that jump (jump.c is preloaded) in the middle of traffic between two processes: each of them, by
 * hours forwards and by less backwards, at many moments. No message fails or is lost, none waits long. A jump
 * costs a message one try: the next one waits until what the last one met is done. */
#include "faults.h"
#include <sys/mman.h>

/* The clocks' jumps; then how many batches each process has done, and how many processes have begun. */
static volatile int64_t *jumps;
enum { REAL, MONOTONIC, DONE, BEGUN = DONE + 2, WORDS };
static const int64_t SECOND = 1000000000, HOUR = 3600 * INT64_C(1000000000);

static void role(int fd)
{
	static struct side s;
	struct peer p;
	struct ibv_wc wc;
	volatile int64_t *done = &jumps[DONE + __atomic_fetch_add(&jumps[BEGUN], 1, __ATOMIC_RELAXED)];
	long count = 0;

	open_side(&s);
	p = swap(fd, &s);
	/* far less than the jumps; a jump costs a try, a very busy machine another, the third is the last */
	NEED(connect_to(s.qp, &p, 18, 2) == 0);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	for (;;) {
		struct pollfd end = { fd, POLLIN, 0 };

		for (int i = 0; i < 16; i++)
			NEED(post(&s, &p, i % 4 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, 1 + i * 4000, count + i) == 0);
		for (int i = 0; i < 16; i++) {
			int status = next_status(&s, &wc);

			if (status != IBV_WC_SUCCESS)
				fprintf(stderr, "message %ld: %s\n", count + i, ibv_wc_status_str(status));
			NEED(status == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)(count + i));
		}
		count += 16;
		++*done;
		if (poll(&end, 1, 0) == 1)
			break;
	}
	NEED(await_byte(fd) == 's' && write(fd, &count, sizeof(count)) == sizeof(count));
	NEED(await_byte(fd) == 'e');
}

/* Until each process has done what it had posted when this began, or has ended. */
static void settle(const int *ends)
{
	int64_t before[2] = { jumps[DONE], jumps[DONE + 1] };

	for (int i = 0; i < 2; i++)
		while (jumps[DONE + i] < before[i] + 2 && poll(&(struct pollfd){ ends[i], 0, 0 }, 1, 1) == 0)
			;
}

int main(int argc, char **argv)
{
	int rounds = argc > 1 ? atoi(argv[1]) : 40, ends[2], fd = open(getenv("JUMP"), O_RDWR);
	pid_t pids[2];
	long counts[2], most = 0;

	alarm(550 + (unsigned int)rounds / 10);
	NEED(fd >= 0 && ftruncate(fd, WORDS * sizeof(*jumps)) == 0);
	NEED((jumps = mmap(NULL, WORDS * sizeof(*jumps), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) != MAP_FAILED);
	for (int i = 0; i < 2; i++)
		pids[i] = start(role, &ends[i]);
	introduce(ends);
	for (int round = 0; round < rounds; round++) {
		static const int64_t by[] = { HOUR, -HOUR / 2, 24 * HOUR, -SECOND / 1000 };
		static const int64_t small[] = { 10 * HOUR, SECOND, -SECOND / 1000, -SECOND / 50, HOUR / 60, -SECOND / 5 };

		/* the moments of the jumps are what is meant */
		nap(20 + round * 7 % 31);
		jumps[REAL] += by[round % 4];
		jumps[MONOTONIC] += small[round % 6];
		settle(ends);
	}
	for (int i = 0; i < 2; i++) {
		say(ends[i], 's');
		NEED(recv(ends[i], &counts[i], sizeof(long), MSG_WAITALL) == sizeof(long));
		most += counts[i];
	}
	for (int i = 0; i < 2; i++) {
		say(ends[i], 'e');
		CHECK(ended_well(pids[i]));
	}
	printf("clocks: %d jumps, %ld messages, none failed\n", 2 * rounds, most);
	return failures != 0;
}
