/* READs of 4 KiB on one queue pair, one after the other, beside queue pairs to another
 * process that is killed: how long they take before and after. All three processes are on one
 * host, so that all share one path.
 * Build: cc -O2 -o neighbours neighbours.c -libverbs
 * usage: neighbours [-q DEAD_QPS] [-r] [-l BYTES] [-b BACKLOG] [-c TIMEOUT_CODE] [-t SECONDS]; -r: the
 * dead ones are asked for READs, else WRITEs. Prints the median, the 99th percentile and the longest READ
 * before, and the same and the number beyond twice the former 99th percentile after (us). */
#define _GNU_SOURCE
#include "side.h"

enum { READ_BYTES = 4096, MOST = 1 << 20 };

struct side {
	union ibv_gid gid;
	uint64_t addr;
	uint32_t rkey;
};

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq, *other_cq;
static struct ibv_mr *mr;
static char *buffer;

static void open_card(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx)) ||
	    posix_memalign((void **)&buffer, 4096, MOST))
		die("no device");
	memset(buffer, 1, MOST);
	if (!(mr = ibv_reg_mr(pd, buffer, MOST, rights)) || !(cq = ibv_create_cq(ctx, 64, NULL, NULL, 0)) ||
	    !(other_cq = ibv_create_cq(ctx, 1 << 15, NULL, NULL, 0)))
		die("no memory region, or no completion queue");
}

/* `count` queue pairs, connected to the other side's. */
static struct side set_up(int fd, int first, struct ibv_qp **qps, uint32_t count, struct ibv_cq *to)
{
	struct ibv_qp_init_attr init = { .send_cq = to, .recv_cq = to, .qp_type = IBV_QPT_RC,
					 .cap = { 64, 1, 1, 1, 0 }, .sq_sig_all = 1 };
	struct side me = { .addr = (uintptr_t)buffer, .rkey = mr->rkey }, other;
	uint32_t mine[1024], theirs[1024];

	if (count > 1024 || ibv_query_gid(ctx, 1, 0, &me.gid))
		die("too many queue pairs, or no GID");
	for (uint32_t i = 0; i < count; i++) {
		if (!(qps[i] = ibv_create_qp(pd, &init)))
			die("ibv_create_qp");
		mine[i] = qps[i]->qp_num;
	}
	exchange(fd, first, &me, &other, sizeof(me));
	exchange(fd, first, mine, theirs, count * sizeof(*mine));
	for (uint32_t i = 0; i < count; i++)
		connect_to(qps[i], theirs[i], &other.gid);
	exchange(fd, first, mine, theirs, 1);
	return other;
}

static void post(struct ibv_qp *qp, const struct side *to, enum ibv_wr_opcode op, uint32_t len)
{
	struct ibv_sge sge = { (uintptr_t)buffer, len, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = op }, *bad;

	wr.wr.rdma.remote_addr = to->addr;
	wr.wr.rdma.rkey = to->rkey;
	if (ibv_post_send(qp, &wr, &bad))
		die("ibv_post_send");
}

/* Queue pairs of the process that begins next. */
static uint32_t peer_qps;

/* Is passive until its end. */
static int serve(int fd)
{
	struct ibv_qp *qps[1024];

	open_card();
	set_up(fd, 0, qps, peer_qps, cq);
	while (pause())
		;
	return 0;
}

static pid_t start_peer(int *fd, uint32_t count)
{
	peer_qps = count;
	return start_server(serve, fd);
}

static void measure(struct ibv_qp *qp, const struct side *to, double seconds)
{
	samples = 0;
	for (double end = now() + seconds, began; (began = now()) < end;) {
		struct ibv_wc wc;
		int n;

		post(qp, to, IBV_WR_RDMA_READ, READ_BYTES);
		while (!(n = ibv_poll_cq(cq, 1, &wc)))
			;
		if (n < 0 || wc.status)
			die("a READ failed");
		keep(now() - began);
	}
}

int main(int argc, char **argv)
{
	uint32_t dead = 1, len = 65536, backlog = 1;
	enum ibv_wr_opcode op = IBV_WR_RDMA_WRITE;
	double seconds = 3;
	int fd[2];

	for (int c; (c = getopt(argc, argv, "q:rl:b:c:t:")) != -1;) {
		switch (c) {
		case 'q': dead = atoi(optarg); break;
		case 'r': op = IBV_WR_RDMA_READ; break;
		case 'l': len = atoi(optarg); break;
		case 'b': backlog = atoi(optarg); break;
		case 'c': timeout_code = atoi(optarg); break;
		case 't': seconds = atof(optarg); break;
		default: return 2;
		}
	}
	pid_t lives = start_peer(&fd[0], 1), dies = start_peer(&fd[1], dead);
	struct ibv_qp *healthy, *others[1024];
	open_card();
	struct side near = set_up(fd[0], 1, &healthy, 1, cq), gone = set_up(fd[1], 1, others, dead, other_cq);
	if (!(took = malloc(SAMPLES * sizeof(*took))))
		die("no memory");
	measure(healthy, &near, seconds);
	float usual = percentile(0.99);
	printf("%.1f %.1f %.1f ", percentile(0.5), usual, percentile(1));
	kill(dies, SIGKILL);
	waitpid(dies, NULL, 0);
	for (uint32_t i = 0; i < dead; i++)
		for (uint32_t n = 0; n < backlog; n++)
			post(others[i], &gone, op, len);
	measure(healthy, &near, seconds);
	printf("%.1f %.1f %.1f ", percentile(0.5), percentile(0.99), percentile(1));
	uint32_t late = 0;
	while (late < samples && took[samples - 1 - late] > 2 * usual)
		late++;
	printf("%u %u\n", late, samples);
	kill(lives, SIGKILL);
	waitpid(lives, NULL, 0);
	return 0;
}
