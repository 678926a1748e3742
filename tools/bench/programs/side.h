/* What the programs of this folder share: clocks, the pipe between two processes, one RC
 * queue pair connected to another. */
#ifndef SIDE_H
#define SIDE_H
#include <infiniband/verbs.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void die(const char *what)
{
	fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, strerror(errno));
	exit(1);
}

/* Seconds. */
static double at(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static double now(void)
{
	return at(CLOCK_MONOTONIC);
}

/* Bytes of this process that are in memory. */
__attribute__((unused)) static double resident(void)
{
	FILE *file = fopen("/proc/self/statm", "r");
	long pages = 0;

	if (!file || fscanf(file, "%*d %ld", &pages) != 1)
		die("/proc/self/statm");
	fclose(file);
	return (double)pages * sysconf(_SC_PAGESIZE);
}

static void put(int fd, const void *from, size_t len)
{
	for (ssize_t done; len; from = (const char *)from + done, len -= done)
		if ((done = write(fd, from, len)) <= 0)
			die("write");
}

static void get(int fd, void *to, size_t len)
{
	for (ssize_t done; len; to = (char *)to + done, len -= done)
		if ((done = read(fd, to, len)) <= 0)
			die("the other side");
}

/* The one side writes first, the other reads first. */
static void exchange(int fd, int first, const void *mine, void *theirs, size_t len)
{
	if (first)
		put(fd, mine, len);
	get(fd, theirs, len);
	if (!first)
		put(fd, mine, len);
}

/* Has this process the `nth` of the CPUs that it may use for itself, if there is one for each of two: with
 * both on one CPU, where a scheduler leaves two that never sleep for seconds, all that is measured is a
 * third. */
__attribute__((unused)) static void take_cpu(int nth)
{
	cpu_set_t allowed, mine;
	int cpu, found = 0;

	if (sched_getaffinity(0, sizeof(allowed), &allowed) || CPU_COUNT(&allowed) < 2)
		return;
	CPU_ZERO(&mine);
	for (cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &allowed) && found++ == nth)
			CPU_SET(cpu, &mine);
	if (sched_setaffinity(0, sizeof(mine), &mine))
		die("sched_setaffinity");
}

/* Another process, which ends when `serve` returns, or with this one; `fd` is this one's end of the pipe. */
static pid_t start_server(int (*serve)(int), int *fd)
{
	int ends[2];
	pid_t server;

	if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) || (server = fork()) < 0)
		die("fork");
	if (!server) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(ends[0]);
		_exit(serve(ends[1]));
	}
	close(ends[1]);
	*fd = ends[0];
	return server;
}

/* Ends once the server has: nobody needs the connections to end one by one. */
__attribute__((unused)) static void end_with(pid_t server)
{
	int status;

	fflush(stdout);
	if (waitpid(server, &status, 0) != server || status)
		die("the other side failed");
	_exit(0);
}

/* Local ACK timeout. */
static uint8_t timeout_code = 14;

static enum ibv_mtu path_mtu = IBV_MTU_1024;
/* READs under way, each way. */
static uint8_t reads = 1;

/* From RESET to RTS. */
static void connect_to(struct ibv_qp *qp, uint32_t peer, const union ibv_gid *gid)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				 .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ, .path_mtu = path_mtu,
				 .dest_qp_num = peer, .max_dest_rd_atomic = reads, .min_rnr_timer = 12, .timeout = timeout_code,
				 .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = reads };

	a.ah_attr.is_global = 1;
	a.ah_attr.port_num = 1;
	a.ah_attr.grh.hop_limit = 1;
	a.ah_attr.grh.dgid = *gid;
	errno = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	a.qp_state = IBV_QPS_RTR;
	if (!errno)
		errno = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	a.qp_state = IBV_QPS_RTS;
	if (!errno)
		errno = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
						      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
	if (errno)
		die("ibv_modify_qp");
}

/* Puts pointers into an order in which no neighbour follows its neighbour (xorshift; always the same). */
static void shuffle(void *list, uint32_t count)
{
	void **items = list;
	uint64_t x = 88172645463325252u;

	for (uint32_t i = count; i-- > 1;) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		uint32_t at = x % (i + 1);
		void *item = items[i];
		items[i] = items[at];
		items[at] = item;
	}
}

enum { SAMPLES = 1 << 22 };

static float *took;
static uint32_t samples;

/* Keeps how long one message took, microseconds. */
static void keep(double seconds)
{
	if (took && samples < SAMPLES)
		took[samples++] = seconds * 1e6;
}

static int ascending(const void *a, const void *b)
{
	float x = *(const float *)a, y = *(const float *)b;

	return (x > y) - (x < y);
}

/* Of what was kept, the share-th (0.5: the median); 0 if nothing was. */
static float percentile(double share)
{
	if (!samples)
		return 0;
	qsort(took, samples, sizeof(*took), ascending);
	return took[(uint32_t)((samples - 1) * share)];
}
#endif
