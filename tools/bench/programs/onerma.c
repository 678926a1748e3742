/* What 1RMA's commands cost beside RC's: one operation after the other, many at once, small READs beside a
 * large one, and how long a client is without memory whose key changes, or whose connection is made anew. Two
 * processes, of which the server has the memory; both poll without a break. The first address of the process
 * is the client's 1RMA card's, and all of RC's, the second one the server's card's.
 * Build: cc -O2 -o onerma onerma.c -libverbs
 * usage: onerma [-t SECONDS]
 * Prints lines of a name and a number: the median and, with .p99, the 99th percentile (us), or GB/s (rate.).
 * Each measurement takes so many seconds. */
#define _GNU_SOURCE
#include "side.h"
#include "../../../include/infiniband/stardv.h"
#include <dlfcn.h>

enum { LARGEST = 4 << 20, KEY_LEN = STARDV_ONERMA_KEY_LEN, DEPTH = 8 };
enum { CLIENT = 0, SERVER = 1, CLIENT_PID = 7 };
static const uint32_t sizes[] = { 64, 4096, 65536, 1 << 20 };
/* Of the READ beside which small ones are measured; 0: none. */
static const uint32_t large[] = { 0, 4096, 65536, 1 << 20, LARGEST };
/* The region's, which take turns. */
static const uint8_t keys[2][KEY_LEN] = { "the region's key", "and the next one" };
enum { COUNT = sizeof(sizes) / sizeof(sizes[0]), LARGE = sizeof(large) / sizeof(large[0]) };

/* What the client asks the server for. */
enum { RC = 'r', ONERMA = '1', REKEY = 'k', CONNECT = 'c', END = 'e' };

static uint8_t memory[LARGEST] __attribute__((aligned(4096)));

struct where {
	/* Of RC, and of the 1RMA card */
	union ibv_gid gid, onerma;
	uint64_t addr;
	uint32_t qpn, rkey, region;
};

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct stardv_onerma *card;
static struct where mine, peer;
/* Of what the client does, by operation and the region's key */
static uint8_t derived[2][2][KEY_LEN];

static __typeof__(stardv_onerma_open) *open_onerma;
static __typeof__(stardv_onerma_create_region) *create_region;
static __typeof__(stardv_onerma_set_key) *set_key;
static __typeof__(stardv_onerma_derive_key) *derive_key;
static __typeof__(stardv_onerma_post) *post;
static __typeof__(_stardv_onerma_poll) *poll_onerma;

static void *named(const char *name)
{
	void *function = dlvsym(RTLD_DEFAULT, name, "STARDV_1.0");

	if (!function)
		die(name);
	return function;
}

static void make_qp(void)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
					 .cap = { 2 * DEPTH, 1, 1, 1, 0 } };

	qp = ibv_create_qp(pd, &attr);
	if (!qp)
		die("ibv_create_qp");
	mine.qpn = qp->qp_num;
}

static void open_cards(int fd, int side)
{
	struct stardv_onerma_attr attr = { .gid_index = side, .pid = CLIENT_PID, .slots = 256 };
	struct stardv_onerma_region_attr region = { .addr = memory, .length = sizeof(memory) };
	struct ibv_device **list = ibv_get_device_list(NULL);

	open_onerma = named("stardv_onerma_open");
	create_region = named("stardv_onerma_create_region");
	set_key = named("stardv_onerma_set_key");
	derive_key = named("stardv_onerma_derive_key");
	post = named("stardv_onerma_post");
	poll_onerma = named("_stardv_onerma_poll");
	region.rights = side == CLIENT ? STARDV_ONERMA_LOCAL_READ | STARDV_ONERMA_LOCAL_WRITE :
					 STARDV_ONERMA_REMOTE_READ | STARDV_ONERMA_REMOTE_WRITE;
	memcpy(region.key, keys[0], KEY_LEN);
	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx)))
		die("no device");
	card = open_onerma(ctx, &attr, sizeof(attr));
	if (!card || (errno = create_region(card, &region, sizeof(region), &mine.region)))
		die("no 1RMA");
	cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	mr = ibv_reg_mr(pd, memory, sizeof(memory),
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
	if (!cq || !mr || ibv_query_gid(ctx, 1, 0, &mine.gid) || ibv_query_gid(ctx, 1, side, &mine.onerma))
		die("no memory region");
	mine.addr = (uintptr_t)memory;
	mine.rkey = mr->rkey;
	make_qp();
	exchange(fd, side == CLIENT, &mine, &peer, sizeof(mine));
	connect_to(qp, peer.qpn, &peer.gid);
}

static int serve(int fd)
{
	struct ibv_wc wc;
	char asked = RC, heard;
	int key = 0;

	memset(memory, 's', sizeof(memory));
	open_cards(fd, SERVER);
	for (uint32_t polls = 1;; polls++) {
		if (asked == RC && ibv_poll_cq(cq, 1, &wc))
			die("a completion");
		if (asked == ONERMA && poll_onerma(card, 0, NULL, 0, sizeof(struct stardv_onerma_wc)) < 0)
			die("stardv_onerma_poll");
		if (polls % 256 || recv(fd, &heard, 1, MSG_DONTWAIT) != 1)
			continue;
		if (heard == END)
			return 0;
		if (heard == REKEY) {
			if ((errno = set_key(card, mine.region, keys[key ^= 1])))
				die("stardv_onerma_set_key");
		} else if (heard == CONNECT) {
			ibv_destroy_qp(qp);
			make_qp();
			exchange(fd, 0, &mine, &peer, sizeof(mine));
			connect_to(qp, peer.qpn, &peer.gid);
		} else {
			asked = heard;
			put(fd, &asked, 1);
		}
	}
}

static void ask(int fd, char what)
{
	char answer;

	put(fd, &what, 1);
	if (what == RC || what == ONERMA)
		get(fd, &answer, 1);
}

/* Posts an operation in either way; its number comes back with its completion. */
static void begin(char way, int write, uint64_t number, uint32_t size)
{
	if (way == RC) {
		struct ibv_sge sge = { (uintptr_t)memory, size, mr->lkey };
		struct ibv_send_wr wr = { .wr_id = number, .sg_list = &sge, .num_sge = 1,
					  .opcode = write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ }, *bad;

		wr.wr.rdma.remote_addr = peer.addr;
		wr.wr.rdma.rkey = peer.rkey;
		errno = ibv_post_send(qp, &wr, &bad);
	} else {
		struct stardv_onerma_wr wr = { .wr_id = number, .remote = peer.onerma, .length = size,
					       .op = write ? STARDV_ONERMA_WRITE : STARDV_ONERMA_READ };

		wr.remote_region = peer.region;
		wr.local_region = mine.region;
		memcpy(wr.key, derived[0][write], KEY_LEN);
		errno = post(card, &wr, sizeof(wr));
	}
	if (errno)
		die("an operation");
}

/* A completion's number, or -1 where there is none. */
static int64_t ended(char way)
{
	struct stardv_onerma_wc onerma;
	struct ibv_wc rc;
	int n = way == RC ? ibv_poll_cq(cq, 1, &rc) : poll_onerma(card, 1, &onerma, 0, sizeof(onerma));
	int status = n <= 0 ? n : way == RC ? (int)rc.status : (int)onerma.status;

	if (status) {
		fprintf(stderr, "onerma: an operation failed: %d\n", status);
		exit(1);
	}
	return !n ? -1 : way == RC ? (int64_t)rc.wr_id : (int64_t)onerma.wr_id;
}

static void report(const char *what, char way, uint32_t number)
{
	printf("%s.%s.%u %.3f\n", what, way == RC ? "rc" : "1rma", number, percentile(0.5));
	printf("%s.%s.%u.p99 %.3f\n", what, way == RC ? "rc" : "1rma", number, percentile(0.99));
	samples = 0;
}

/* One operation after the other. */
static void one_by_one(char way, int write, uint32_t size, double seconds)
{
	double began, end = now() + seconds;

	for (int i = 0; (began = now()) < end; i++) {
		begin(way, write, 1, size);
		while (ended(way) < 0)
			;
		if (i >= 10)
			keep(now() - began);
	}
	report(write ? "write" : "read", way, size);
}

/* READs of 1 MiB, so many at once. */
static void many(char way, double seconds)
{
	uint64_t bytes = 0;
	double began;

	for (int i = 0; i < DEPTH; i++)
		begin(way, 0, 1, 1 << 20);
	for (began = now(); now() < began + seconds;)
		if (ended(way) > 0) {
			bytes += 1 << 20;
			begin(way, 0, 1, 1 << 20);
		}
	printf("rate.%s.%u %.3f\n", way == RC ? "rc" : "1rma", 1 << 20, bytes / (now() - began) / 1e9);
	for (int left = DEPTH; left;)
		left -= ended(way) > 0;
}

/* Small READs, a new one 100 us after the last one began, beside a large one, which another one follows. */
static void beside(char way, uint32_t size, double seconds)
{
	double next = now(), end = next + seconds, began = 0;
	int small = 0, under_way = 0;

	while (now() < end || small || under_way) {
		if (size && !under_way && now() < end) {
			begin(way, 0, 2, size);
			under_way = 1;
		}
		if (!small && now() >= next && now() < end) {
			began = now();
			next = began + 100e-6;
			begin(way, 0, 1, 64);
			small = 1;
		}
		switch (ended(way)) {
		case 1:
			keep(now() - began);
			small = 0;
			break;
		case 2:
			under_way = 0;
		}
	}
	report("beside", way, size);
}

/* Changes the key so often, while small READs go on with the key that worked last. */
static void rekey(int fd, int times)
{
	struct stardv_onerma_wr wr = { .op = STARDV_ONERMA_READ, .remote = peer.onerma, .length = 64 };
	struct stardv_onerma_wc wc;
	double last = now();
	int key = 0, asked = 0;

	wr.remote_region = peer.region;
	wr.local_region = mine.region;
	for (int reads = 1; times; reads++) {
		memcpy(wr.key, derived[key][0], KEY_LEN);
		if ((errno = post(card, &wr, sizeof(wr))))
			die("stardv_onerma_post");
		while (!poll_onerma(card, 1, &wc, 0, sizeof(wc)))
			;
		if (wc.status == STARDV_ONERMA_OK) {
			if (asked == 2) {
				keep(now() - last);
				asked = 0;
				times--;
			}
			last = now();
			if (reads % 64 == 0 && !asked) {
				ask(fd, REKEY);
				asked = 1;
			}
		} else if (wc.status == STARDV_ONERMA_REMOTE_AUTHENTICATION_FAILURE && asked == 1) {
			key ^= 1;
			asked = 2;
		} else {
			fprintf(stderr, "onerma: a READ failed with status %u\n", wc.status);
			exit(1);
		}
	}
	report("outage", ONERMA, 0);
}

/* Makes a new connection so often: from the end of the old one to the first READ on the new one. */
static void reconnect(int fd, int times)
{
	while (times--) {
		double began = now();

		ibv_destroy_qp(qp);
		ask(fd, CONNECT);
		make_qp();
		exchange(fd, 1, &mine, &peer, sizeof(mine));
		connect_to(qp, peer.qpn, &peer.gid);
		begin(RC, 0, 1, 64);
		while (ended(RC) < 0)
			;
		keep(now() - began);
	}
	report("outage", RC, 0);
}

int main(int argc, char **argv)
{
	int fd, option;
	double seconds = 0.5;
	pid_t server;

	while ((option = getopt(argc, argv, "t:")) != -1) {
		if (option != 't')
			return 2;
		seconds = strtod(optarg, NULL);
	}
	/* Packets of both carry 4 KB. */
	path_mtu = IBV_MTU_4096;
	reads = DEPTH;
	server = start_server(serve, &fd);
	open_cards(fd, CLIENT);
	for (int key = 0; key < 2; key++)
		for (int write = 0; write < 2; write++)
			derive_key(keys[key], &mine.onerma, CLIENT_PID,
				   write ? STARDV_ONERMA_WRITE : STARDV_ONERMA_READ, derived[key][write]);
	took = calloc(SAMPLES, sizeof(*took));
	for (const char *way = (const char[]){ RC, ONERMA, 0 }; *way; way++) {
		ask(fd, *way);
		for (int i = 0; i < COUNT; i++) {
			one_by_one(*way, 0, sizes[i], seconds);
			one_by_one(*way, 1, sizes[i], seconds);
		}
		many(*way, 2 * seconds);
		for (int i = 0; i < LARGE; i++)
			beside(*way, large[i], seconds);
	}
	rekey(fd, 200);
	ask(fd, RC);
	reconnect(fd, 200);
	ask(fd, END);
	end_with(server);
}
