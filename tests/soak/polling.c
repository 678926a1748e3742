/* Two processes of one host answer each other's messages and poll all the while, each on a CPU of its own.
 * The library's threads have nothing to do but to look once a millisecond whether the program still polls:
 * how often they ran is counted in the kernel's context switches, for some messages and ten times as many.
 * It is bounded by the time, whatever the messages.
 *
 * - send: SENDs, found in the completion queue.
 * - write: WRITEs, found in memory; the initiator polls its completion queue for each.
 * - read: one process READs, the other one polls an empty completion queue.
 * usage: polling [WAYS] */
#include "../faults/faults.h"
#include <dirent.h>
#include <sched.h>
#include <sys/mman.h>

enum { TIMES = 10, WARM = 2000, AT_ONCE = 64, TRIES = 8 };
enum how { SEND, WRITE, READ, HOWS };
static const enum ibv_wr_opcode ops[] = { IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ };
static const char *const names[] = { "send", "write", "read" };
/* Who spins on memory lets nobody else have the CPU. */
static const long few[] = { 20000, 2000, 10000 };
/* Fewer where others have the CPUs for most of the time, so that these many last so long, ms. */
enum { LEAST = 200, LONG = 1000 };

static enum how how;
/* What the library's threads of both did, in the first and in the second count. */
static struct shared {
	volatile long switches[2][2], ms[2][2];
	volatile int at[4];
	/* Messages of the first count, once that is known */
	volatile long few;
} *shared;

/* Context switches of all threads but this one. */
static long switches_of_others(void)
{
	char path[400], line[256];
	struct dirent *e;
	DIR *d = opendir("/proc/self/task");
	long sum = 0, n;

	NEED(d);
	while ((e = readdir(d))) {
		FILE *f;

		if (e->d_name[0] == '.' || atoi(e->d_name) == getpid())
			continue;
		snprintf(path, sizeof(path), "/proc/self/task/%s/status", e->d_name);
		NEED(f = fopen(path, "r"));
		while (fgets(line, sizeof(line), f))
			if (sscanf(line, "voluntary_ctxt_switches: %ld", &n) == 1 ||
			    sscanf(line, "nonvoluntary_ctxt_switches: %ld", &n) == 1)
				sum += n;
		fclose(f);
	}
	closedir(d);
	return sum;
}

static void take_a_cpu(int which)
{
	cpu_set_t all, one;
	int cpu = -1;

	NEED(sched_getaffinity(0, sizeof(all), &all) == 0);
	which %= CPU_COUNT(&all);
	while (which >= 0)
		which -= CPU_ISSET(++cpu, &all) != 0;
	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	NEED(sched_setaffinity(0, sizeof(one), &one) == 0);
}

/* Completions taken: of requests, and of receives; and how many of the latter are wanted so far. */
static long done[2], wanted;

static void take(struct side *s)
{
	struct ibv_wc wc;
	int n = ibv_poll_cq(s->cq, 1, &wc);

	NEED(n == 0 || (n == 1 && wc.status == IBV_WC_SUCCESS));
	if (n)
		done[wc.opcode == IBV_WC_RECV]++;
}

static void take_until(struct side *s, int received, long count)
{
	while (done[received] < count)
		take(s);
}

static void play(struct side *s, const struct peer *p, int first, long count, int place)
{
	volatile char *in = s->buffer + BYTES;

	for (long n = 0; n < count; n++) {
		char byte = (char)(n % 100 + 1);

		for (int turn = 0; turn < 2; turn++) {
			if (turn != first) {
				if (how == READ && !first)
					continue;
				*s->buffer = byte;
				NEED(post(s, p, ops[how], 1, 1) == 0);
				take_until(s, 0, done[0] + 1);
			} else if (how == SEND) {
				take_until(s, 1, ++wanted);
				NEED(post_recv(s, s->qp) == 0);
			} else if (how == WRITE) {
				while (*in != byte)
					;
			}
		}
	}
	__atomic_fetch_add(&shared->at[place], 1, __ATOMIC_SEQ_CST);
	/* who polls still is no sleeper */
	while (shared->at[place] < 2)
		take(s);
}

/* How many messages are sent, as far as what the first ones took says. */
static long as_many(long ms)
{
	long in_time = ms ? WARM * (long)LONG / ms : few[how];

	return in_time < LEAST ? LEAST : in_time < few[how] ? in_time : few[how];
}

static void member(int fd, int first)
{
	static struct side s;
	struct peer p;
	long began;

	take_a_cpu(first);
	open_side(&s);
	p = swap(fd, &s);
	NEED(connect_to(s.qp, &p, 18, 7) == 0);
	for (int i = 0; i < DEPTH; i++)
		NEED(post_recv(&s, s.qp) == 0);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	began = now_ms();
	play(&s, &p, first, WARM, 0);
	if (first)
		shared->few = as_many(now_ms() - began);
	while (!shared->few)
		take(&s);
	for (int i = 0; i < 2; i++) {
		long before = switches_of_others(), begin = now_ms();

		play(&s, &p, first, i ? TIMES * shared->few : shared->few, 1 + i);
		shared->switches[i][first] = switches_of_others() - before;
		shared->ms[i][first] = now_ms() - begin;
	}
	say(fd, 'f');
	NEED(await_byte(fd) == 'e');
}

static void first(int fd) { member(fd, 1); }
static void second(int fd) { member(fd, 0); }

/* Whether the library's threads of two processes did no more than to look. */
static int is_quiet(void)
{
	int fds[2], quiet = 1;
	pid_t pids[2] = { start(first, &fds[0]), start(second, &fds[1]) };

	memset(shared, 0, sizeof(*shared));
	introduce(fds);
	for (int i = 0; i < 2; i++)
		NEED(await_byte(fds[i]) == 'f');
	for (int i = 0; i < 2; i++) {
		printf("%s: %ld times, %ld and %ld context switches of the library's threads in %ld ms\n", names[how],
		       i ? TIMES * shared->few : shared->few, shared->switches[i][1], shared->switches[i][0],
		       shared->ms[i][0]);
		for (int n = 0; n < 2; n++)
			quiet &= shared->switches[i][n] <= 2 * shared->ms[i][n] + AT_ONCE;
	}
	for (int i = 0; i < 2; i++) {
		say(fds[i], 'e');
		CHECK(ended_well(pids[i]));
		close(fds[i]);
	}
	return quiet;
}

int main(int argc, char **argv)
{
	cpu_set_t cpus;

	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm(900);
	NEED((shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) != MAP_FAILED);
	NEED(sched_getaffinity(0, sizeof(cpus), &cpus) == 0);
	if (CPU_COUNT(&cpus) < 2) {
		is_quiet();
		puts("one CPU, on which nobody polls all the while: counted, not judged");
		return failures != 0;
	}
	for (how = 0; how < HOWS; how++) {
		int quiet = argc > 1 && !strstr(argv[1], names[how]);

		/* others of the machine may take the CPUs away, so that a program does not poll either */
		for (int tries = 0; tries < TRIES && !quiet; tries++)
			quiet = is_quiet();
		CHECK(quiet);
	}
	return failures != 0;
}
