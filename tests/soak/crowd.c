/* Many processes of one host, each with a card of its own, joined by RC connections through shared memory:
 * each with the next one in a ring, or all with the first. They send some messages; what memory and
 * descriptors they hold then is counted. usage: crowd PROCESSES [all] */
#include "../faults/faults.h"
#include <dirent.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>

/* With more peers than that a card awaits its doorbell. */
enum { MOST = 512, MESSAGES = 16, BYTES_EACH = 64, FEW = 9 };

/* All know it. */
static struct shared {
	/* of each process the queue pairs towards the next one and the one before; the first one's towards all */
	struct peer to_next[MOST], to_last[MOST];
	int at[3];
	/* 1: connect and send, 2: end */
	int phase;
} *shared;
static int count, is_star, number;
/* The parent's, to each process. */
static int fds[MOST];

/* Waits until all are there. */
static void all_come(int place)
{
	__atomic_fetch_add(&shared->at[place], 1, __ATOMIC_SEQ_CST);
	while (__atomic_load_n(&shared->at[place], __ATOMIC_SEQ_CST) < count)
		nap(1);
}

static void wait_for(struct side *s, int completions)
{
	struct ibv_wc wc;

	while (completions) {
		int n = ibv_poll_cq(s->cq, 1, &wc);

		NEED(n >= 0);
		if (n == 0) {
			sched_yield();
			continue;
		}
		NEED(wc.status == IBV_WC_SUCCESS);
		completions--;
	}
}

/* SENDs and WRITEs in turns, so many that the peer has receives for. */
static void send_some(struct side *s, struct ibv_qp *qp, const struct peer *p)
{
	struct side on = *s;

	on.qp = qp;
	for (int i = 0; i < MESSAGES; i++)
		NEED(post(&on, p, i % 2 ? IBV_WR_RDMA_WRITE : IBV_WR_SEND, BYTES_EACH, i) == 0);
}

static void member(int fd)
{
	static struct side s;
	static struct ibv_qp *qps[MOST], *other;
	int towards = is_star && number == 0 ? count - 1 : 1, receives = is_star && number != 0 ? 0 : towards;

	(void)fd;
	for (int i = 0; i < number; i++)
		close(fds[i]);
	open_side(&s);
	if (towards > 1) {
		NEED(ibv_destroy_qp(s.qp) == 0 && ibv_destroy_cq(s.cq) == 0);
		NEED(s.cq = ibv_create_cq(s.ctx, MOST * 2 * MESSAGES, NULL, NULL, 0));
		NEED(s.qp = make_qp(&s, IBV_QPT_RC));
	}
	qps[0] = s.qp;
	for (int i = 1; i < towards; i++)
		NEED(qps[i] = make_qp(&s, IBV_QPT_RC));
	if (!is_star)
		NEED(other = make_qp(&s, IBV_QPT_RC));
	for (int i = 0; i < towards; i++)
		(is_star && number ? shared->to_last : shared->to_next)[number + i] = describe(&s, qps[i]);
	if (other)
		shared->to_last[number] = describe(&s, other);
	all_come(0);
	while (!__atomic_load_n(&shared->phase, __ATOMIC_SEQ_CST))
		nap(1);

	/* in a star the first one's queue pair i goes to process i + 1 */
	for (int i = 0; i < towards; i++) {
		const struct peer *p = !is_star ? &shared->to_last[(number + 1) % count] :
				       number ? &shared->to_next[number - 1] : &shared->to_last[i + 1];

		NEED(connect_to(qps[i], p, 18, 7) == 0);
	}
	if (other)
		NEED(connect_to(other, &shared->to_next[(number + count - 1) % count], 18, 7) == 0);
	for (int i = 0; i < receives; i++)
		for (int n = 0; n < MESSAGES / 2; n++)
			NEED(post_recv(&s, other ? other : qps[i]) == 0);
	all_come(1);
	if (!is_star)
		send_some(&s, qps[0], &shared->to_last[(number + 1) % count]);
	else if (number)
		send_some(&s, qps[0], &shared->to_next[number - 1]);
	wait_for(&s, (is_star && number == 0 ? 0 : MESSAGES) + receives * MESSAGES / 2);
	all_come(2);
	while (__atomic_load_n(&shared->phase, __ATOMIC_SEQ_CST) < 2)
		nap(1);
}

/* Kilobytes of a process, shared ones by parts. */
static long pss(pid_t pid)
{
	char path[64], line[256];
	long kb = -1;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/smaps_rollup", pid);
	NEED(f = fopen(path, "r"));
	while (kb < 0 && fgets(line, sizeof(line), f))
		sscanf(line, "Pss: %ld kB", &kb);
	fclose(f);
	return kb;
}

/* Entries of a folder of a process; of those, links to a memory file. */
static int entries(pid_t pid, const char *of, int *memory_files)
{
	char path[400], to[64];
	int n = 0;
	struct dirent *e;
	DIR *d;

	snprintf(path, sizeof(path), "/proc/%d/%s", pid, of);
	NEED(d = opendir(path));
	while ((e = readdir(d))) {
		snprintf(path, sizeof(path), "/proc/%d/%s/%s", pid, of, e->d_name);
		n += e->d_name[0] != '.';
		*memory_files += readlink(path, to, sizeof(to)) > 7 && memcmp(to, "/memfd:", 7) == 0;
	}
	closedir(d);
	return n;
}

/* What they hold. */
static void account(const char *when, const pid_t *pids)
{
	long sum = 0, most = 0;
	int all_fds = 0, most_fds = 0, threads = 0, unused = 0;

	for (int i = 0; i < count; i++) {
		long kb = pss(pids[i]);
		int open = entries(pids[i], "fd", &unused);

		sum += kb;
		most = kb > most ? kb : most;
		all_fds += open;
		most_fds = open > most_fds ? open : most_fds;
		threads += entries(pids[i], "task", &unused);
	}
	printf("%d processes, %s: %ld KiB in all, %ld each, %ld at most; %d descriptors each, "
	       "%d at most; %d threads each\n", count, when,
	       sum, sum / count, most, all_fds / count, most_fds, threads / count);
}

static int open_memory_files(const pid_t *pids)
{
	int sum = 0;

	for (int i = 0; i < count; i++)
		entries(pids[i], "fd", &sum);
	return sum;
}

static void wait_until_all_are(int place)
{
	while (__atomic_load_n(&shared->at[place], __ATOMIC_SEQ_CST) < count)
		nap(1);
}

int main(int argc, char **argv)
{
	struct rlimit files;
	int memory_files;
	static pid_t pids[MOST];

	count = argc > 1 ? atoi(argv[1]) : 32;
	is_star = argc > 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm(600);
	NEED(count > 2 && count <= MOST);
	NEED(getrlimit(RLIMIT_NOFILE, &files) == 0);
	files.rlim_cur = files.rlim_max;
	NEED(setrlimit(RLIMIT_NOFILE, &files) == 0);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	NEED(shared != MAP_FAILED);
	for (number = 0; number < count; number++)
		pids[number] = start(member, &fds[number]);
	wait_until_all_are(0);
	account("open", pids);
	memory_files = open_memory_files(pids);
	__atomic_store_n(&shared->phase, 1, __ATOMIC_SEQ_CST);
	wait_until_all_are(2);
	account(is_star ? "all with the first one" : "each with the next one", pids);
	/* what was mapped is not kept open, once it was taken in; who has many peers keeps its doorbell's file */
	memory_files += is_star && count > FEW;
	for (int tries = 0; open_memory_files(pids) != memory_files; tries++) {
		NEED(tries < 1000);
		nap(10);
	}
	__atomic_store_n(&shared->phase, 2, __ATOMIC_SEQ_CST);
	for (int i = 0; i < count; i++)
		CHECK(ended_well(pids[i]));
	return failures != 0;
}
