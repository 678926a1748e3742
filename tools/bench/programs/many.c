/* WRITEs of 8 B, or of so many, over many queue pairs, one after the other in an order that is shuffled
 * once: what perftest cannot do for latency, and sets up too slowly for a hundred thousand. Two processes, of
 * which the other is passive but for polling an empty completion queue, so that its card is run by
 * itself and not by the library's thread.
 * Build: cc -O2 -o many many.c -libverbs
 * With -l, one process and one thread are both sides, so that its CPU time is what a message costs at both
 * ends, whatever else the machine does; STARVERBS_PROGRESS_THREAD=off keeps it to one thread.
 * With -c, the other process and this one are held to a processor each. With -p, each queue pair is given
 * (its number mod 10) + 1 WRITEs in one list, of which the last is signaled: the workload of csRNA's paper.
 * usage: many [-l] [-p] [-q QPS] [-w UNDER_WAY] [-b BYTES] [-t SECONDS] [-n MESSAGES] [-c OTHER,THIS]
 * Prints millions of messages a second, the CPU time of a message in this process (us), the median, the 1st
 * and the 99th percentile of its time from post to completion with -w 1 (us), the seconds to create and
 * connect, acknowledges a message that came to this process's card, bytes of the process for each queue pair,
 * and, with -l, the seconds to destroy all. */
#define _GNU_SOURCE
#include "side.h"
#include "../../../include/infiniband/stardv.h"
#include <dlfcn.h>
#include <sched.h>

struct side {
	union ibv_gid gid;
	uint64_t addr;
	uint32_t rkey;
};

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_qp **qps;
/* Most WRITEs of a list. */
enum { LIST = 10 };

static uint32_t count = 1, under_way = 1, bytes = 8;
static int loop, in_lists, cpus[2] = { -1, -1 };
/* Of each queue pair, in the order in which they are posted to: how long its lists are. */
static uint8_t *lists;
static char *buffer;

static void hold_to(int cpu)
{
	cpu_set_t one;

	CPU_ZERO(&one);
	CPU_SET(cpu < 0 ? 0 : cpu, &one);
	if (cpu >= 0 && sched_setaffinity(0, sizeof(one), &one))
		die("sched_setaffinity");
}

static void open_card(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx)))
		die("no device");
	buffer = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
	if (!buffer)
		die("no memory");
	memset(buffer, 1, bytes);
	mr = ibv_reg_mr(pd, buffer, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	cq = ibv_create_cq(ctx, under_way + 16, NULL, NULL, 0);
	qps = calloc(2 * (size_t)count, sizeof(*qps));
	lists = calloc(count, 1);
	if (!mr || !cq || !qps || !lists)
		die("no memory region, or no completion queue");
}

static void create(uint32_t depth)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { depth, 1, 1, 1, 0 }, .sq_sig_all = !in_lists };

	for (uint32_t i = 0; i < (loop ? 2 * count : count); i++) {
		init.cap.max_send_wr = i < count ? depth : 1;
		if (!(qps[i] = ibv_create_qp(pd, &init)))
			die("ibv_create_qp");
	}
}

/* All queue pairs, each connected to the other side's. */
static struct side set_up(int fd, int first, uint32_t depth)
{
	uint32_t *mine = calloc(count, sizeof(*mine)), *theirs = calloc(count, sizeof(*theirs));
	struct side me, other;

	open_card();
	create(depth);
	if (!mine || !theirs || ibv_query_gid(ctx, 1, 0, &me.gid))
		die("no GID");
	me.addr = (uintptr_t)buffer;
	me.rkey = mr->rkey;
	for (uint32_t i = 0; loop && i < count; i++) {
		connect_to(qps[i], qps[count + i]->qp_num, &me.gid);
		connect_to(qps[count + i], qps[i]->qp_num, &me.gid);
	}
	if (loop)
		return me;
	for (uint32_t i = 0; i < count; i++)
		mine[i] = qps[i]->qp_num;
	exchange(fd, first, &me, &other, sizeof(me));
	exchange(fd, first, mine, theirs, count * sizeof(*mine));
	for (uint32_t i = 0; i < count; i++)
		connect_to(qps[i], theirs[i], &other.gid);
	exchange(fd, first, &me, &me, 1);
	free(mine);
	free(theirs);
	return other;
}

/* Until the client is done. */
static int serve(int fd)
{
	struct ibv_wc wc;
	char done;

	hold_to(cpus[0]);
	set_up(fd, 0, 1);
	for (uint32_t polls = 1;; polls++) {
		if (ibv_poll_cq(cq, 1, &wc))
			die("a completion of nothing");
		if (polls % 4096 == 0 && recv(fd, &done, 1, MSG_DONTWAIT) >= 0)
			return 0;
	}
}

/* Posts to one after the other, `under_way` in all at once, for so many messages or seconds; gives how many.
 * `wr` is a list of `LIST`, whose last ones are posted; the completion's ID is how many. */
static uint64_t drive(struct ibv_send_wr *wr, uint64_t messages, double seconds)
{
	struct ibv_send_wr *rest = NULL;
	struct ibv_wc wc[16];
	uint64_t posted = 0, done = 0;
	uint32_t at = 0;
	double start = now(), sent = 0, end = start + seconds;

	while (done < messages || done < posted) {
		while (posted < messages && posted - done < under_way) {
			if (took)
				sent = now();
			wr[LIST - 1].wr_id = lists[at];
			errno = ibv_post_send(qps[at], rest ? rest : wr + LIST - lists[at], &rest);
			if (errno == ENOMEM)
				break;
			if (errno)
				die("ibv_post_send");
			rest = NULL;
			posted += lists[at];
			at = at + 1 < count ? at + 1 : 0;
		}
		int got = ibv_poll_cq(cq, 16, wc);
		for (int i = 0; i < got; i++)
			if (wc[i].status != IBV_WC_SUCCESS) {
				fprintf(stderr, "many: %s\n", ibv_wc_status_str(wc[i].status));
				exit(1);
			}
		if (got > 0) {
			uint64_t before = done;
			for (int i = 0; i < got; i++)
				done += wc[i].wr_id;
			if (took)
				keep(now() - sent);
			if (before / 256 != done / 256 && now() > end)
				messages = posted;
		}
	}
	return done;
}

/* Acknowledges that came to the card; 0 where the library does not count. */
static uint64_t acks(void)
{
	__typeof__(_stardv_list_counters) *list_counters = dlsym(RTLD_DEFAULT, "_stardv_list_counters");
	struct stardv_counter list[512];
	ssize_t there = list_counters ? list_counters(ctx, list, 512, 0, sizeof(*list)) : 0;

	for (ssize_t i = 0; i < there && i < 512; i++)
		if (!strcmp(list[i].name, "rcvd_ack"))
			return list[i].value;
	return 0;
}

/* Seconds to destroy all queue pairs, of the first `count` in the order in which they were posted to. */
static double destroy(void)
{
	double start = now();

	for (uint32_t i = 0; i < 2 * count; i++)
		if ((errno = ibv_destroy_qp(qps[i])))
			die("ibv_destroy_qp");
	return now() - start;
}

static int work(int fd, uint64_t messages, double seconds)
{
	struct ibv_sge sge = { .length = bytes };
	struct ibv_send_wr wr[LIST];
	double start = now(), before = resident(), connected, each, cpu;
	struct side other;
	uint64_t done, acked;

	hold_to(cpus[1]);
	other = set_up(fd, 1, in_lists ? 2 * LIST : under_way / count + 2);
	connected = now() - start;
	shuffle(qps, count);
	for (uint32_t i = 0; i < count; i++)
		lists[i] = in_lists ? qps[i]->qp_num % LIST + 1 : 1;
	sge.addr = (uintptr_t)buffer;
	sge.lkey = mr->lkey;
	for (int i = 0; i < LIST; i++) {
		wr[i] = (struct ibv_send_wr){ .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE };
		wr[i].wr.rdma.remote_addr = other.addr;
		wr[i].wr.rdma.rkey = other.rkey;
		wr[i].next = i + 1 < LIST ? &wr[i + 1] : NULL;
	}
	wr[LIST - 1].send_flags = IBV_SEND_SIGNALED;
	/* every queue pair once, and all that warms up with time */
	drive(wr, in_lists ? (uint64_t)LIST * count : count, 60);
	each = (resident() - before) / (loop ? 2.0 * count : count);
	drive(wr, messages == UINT64_MAX ? messages : messages / 4 + 1, seconds / 4);
	took = under_way == 1 ? calloc(SAMPLES, sizeof(*took)) : NULL;
	acked = acks();
	start = now();
	cpu = at(CLOCK_PROCESS_CPUTIME_ID);
	done = drive(wr, messages, seconds);
	printf("%.6f %.4f", done / (now() - start) / 1e6, (at(CLOCK_PROCESS_CPUTIME_ID) - cpu) * 1e6 / done);
	printf(" %.3f %.3f %.3f", percentile(0.5), percentile(0.01), percentile(0.99));
	printf(" %.3f %.4f %.0f", connected, (double)(acks() - acked) / done, each);
	printf(" %.3f\n", loop ? destroy() : 0);
	if (!loop)
		put(fd, "", 1);
	return 0;
}

int main(int argc, char **argv)
{
	int fd, option;
	double seconds = 1;
	uint64_t messages = UINT64_MAX;
	pid_t server;

	while ((option = getopt(argc, argv, "lpq:w:b:t:n:c:")) != -1) {
		if (option == 'l')
			loop = 1;
		else if (option == 'p')
			in_lists = 1;
		else if (option == 'q')
			count = strtoul(optarg, NULL, 0);
		else if (option == 'w')
			under_way = strtoul(optarg, NULL, 0);
		else if (option == 'b')
			bytes = strtoul(optarg, NULL, 0);
		else if (option == 'n')
			messages = strtoull(optarg, NULL, 0);
		else if (option == 'c' && sscanf(optarg, "%d,%d", &cpus[0], &cpus[1]) == 2)
			continue;
		else if (option == 't')
			seconds = strtod(optarg, NULL);
		else
			return 2;
	}
	if (!count || !under_way || !bytes || !messages)
		return 2;
	if (loop) {
		work(-1, messages, seconds);
		fflush(stdout);
		_exit(0);
	}
	server = start_server(serve, &fd);
	work(fd, messages, seconds);
	end_with(server);
}
