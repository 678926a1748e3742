/* Objects of each kind, thousands at once, made and destroyed again and again: no heap byte,
 * descriptor or mapping may stay.
 *
 * The first rounds warm up: tables grow to their size (twice as many keys as were in use at once, so
 * that stale ones rest), blocks of queue pair numbers are claimed. The very first makes twice as many
 * objects: a hash table that is more than half full grows once more when what was taken out has left
 * marks enough, sooner or later as its keys have it. After that a round must end with what the one
 * before ended with. The heap is malloc's own count of bytes in use (mallinfo(3)), in which run.sh has
 * it keep nothing back (GLIBC_TUNABLES).
 * usage: growth [COUNT] */
#define _GNU_SOURCE
#include "soak.h"

#include <dirent.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>

enum { WARM = 4, ROUNDS = 3, PAGE = 4096 };
/* Heap bytes by which two equal states may differ: malloc does not split off pieces that are too small. */
enum { SPLINTERS = 512 };

/* What a round must leave as it was. */
struct held {
	size_t heap;
	unsigned files, mappings;
};

struct kind {
	const char *name;
	/* At most so many at once; 0: as many as COUNT says */
	unsigned most;
	void *(*make)(unsigned i);
	int (*end)(void *object);
};

static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_xrcd *domain;
static unsigned char page[PAGE];

static struct held now(void)
{
	struct mallinfo2 heap = mallinfo2();
	struct held held = { heap.uordblks + heap.hblkhd, 0, 0 };
	DIR *dir = opendir("/proc/self/fd");
	FILE *maps = fopen("/proc/self/maps", "r");
	int c;

	MUST(dir && maps);
	while (readdir(dir))
		held.files++;
	while ((c = getc(maps)) != EOF)
		held.mappings += c == '\n';
	closedir(dir);
	fclose(maps);
	return held;
}

static void *make_pd(unsigned i)
{
	(void)i;
	return ibv_alloc_pd(ctx);
}

static int end_pd(void *object)
{
	return ibv_dealloc_pd(object);
}

static void *make_mr(unsigned i)
{
	return ibv_reg_mr(pd, page, 1 + i % PAGE, i % 2 ? ALL_RIGHTS : ALL_RIGHTS | IBV_ACCESS_ON_DEMAND);
}

static int end_mr(void *object)
{
	return ibv_dereg_mr(object);
}

static void *make_mw(unsigned i)
{
	return ibv_alloc_mw(pd, i % 2 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2);
}

static int end_mw(void *object)
{
	return ibv_dealloc_mw(object);
}

static void *make_ah(unsigned i)
{
	struct ibv_ah_attr to = loopback_ah();

	to.grh.traffic_class = i;
	return ibv_create_ah(pd, &to);
}

static int end_ah(void *object)
{
	return ibv_destroy_ah(object);
}

static void *make_cq(unsigned i)
{
	return ibv_create_cq(ctx, 1 + i % 20, NULL, NULL, 0);
}

static void *make_cq_ex(unsigned i)
{
	struct ibv_cq_init_attr_ex init = { .cqe = 1 + i % 20, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP };

	return ibv_create_cq_ex(ctx, &init);
}

static int end_cq(void *object)
{
	return ibv_destroy_cq(object);
}

static void *make_srq(unsigned i)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 1 + i % 20, .max_sge = 1 + i % 3 } };

	return ibv_create_srq(pd, &init);
}

static void *make_xrc_srq(unsigned i)
{
	struct ibv_srq_init_attr_ex init = {
		.attr = { .max_wr = 1 + i % 20, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC, .pd = pd, .cq = cq,
		.xrcd = domain,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_XRCD,
	};

	return ibv_create_srq_ex(ctx, &init);
}

static int end_srq(void *object)
{
	return ibv_destroy_srq(object);
}

/* A queue pair with work requests in it, at any point of its life. */
static void *make_qp(unsigned i)
{
	static const enum ibv_qp_type types[] = { IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD };
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = types[i % 3],
		.cap = { 1, 1, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_recv_wr recv = { .wr_id = i }, *bad_recv;

	if (!qp || i % 4 == 0)
		return qp;
	MUST(!to_init(qp) && !ibv_post_recv(qp, &recv, &bad_recv));
	if (i % 4 > 1)
		MUST(!to_rtr(qp, qp->qp_num));
	if (i % 4 > 2)
		MUST(!to_rts(qp));
	return qp;
}

static void *make_qp_ex(unsigned i)
{
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_RC, .pd = pd, .send_cq = cq, .recv_cq = cq,
					    .cap = { 1 + i % 4, 1, 1, 1, 0 }, .send_ops_flags = IBV_QP_EX_WITH_SEND,
					    .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS };

	return ibv_create_qp_ex(ctx, &init);
}

static void *make_xrc_qp(unsigned i)
{
	struct ibv_qp_init_attr_ex recv = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD,
					    .xrcd = domain };
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &recv);

	if (qp && i % 2)
		MUST(!to_init(qp));
	return qp;
}

static int end_qp(void *object)
{
	return ibv_destroy_qp(object);
}

static void *make_xrcd(unsigned i)
{
	struct ibv_xrcd_init_attr on = { IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, -1, O_CREAT };

	(void)i;
	return ibv_open_xrcd(ctx, &on);
}

static int end_xrcd(void *object)
{
	return ibv_close_xrcd(object);
}

static void *make_dm(unsigned i)
{
	struct ibv_alloc_dm_attr size = { .length = 8 + i % 100 };

	return ibv_alloc_dm(ctx, &size);
}

static int end_dm(void *object)
{
	return ibv_free_dm(object);
}

static void *make_channel(unsigned i)
{
	(void)i;
	return ibv_create_comp_channel(ctx);
}

static int end_channel(void *object)
{
	return ibv_destroy_comp_channel(object);
}

static void *make_context(unsigned i)
{
	(void)i;
	return another_context();
}

static int end_context(void *object)
{
	return ibv_close_device(object);
}

static const struct kind kinds[] = {
	{ "protection domains", 0, make_pd, end_pd },
	{ "memory regions", 0, make_mr, end_mr },
	{ "memory windows", 0, make_mw, end_mw },
	{ "address handles", 0, make_ah, end_ah },
	{ "completion queues", 0, make_cq, end_cq },
	{ "extended completion queues", 0, make_cq_ex, end_cq },
	{ "shared receive queues", 0, make_srq, end_srq },
	{ "XRC shared receive queues", 0, make_xrc_srq, end_srq },
	{ "queue pairs", 0, make_qp, end_qp },
	{ "extended queue pairs", 0, make_qp_ex, end_qp },
	{ "XRC receiving queue pairs", 0, make_xrc_qp, end_qp },
	{ "XRC domains", 0, make_xrcd, end_xrcd },
	{ "device memories", 1000, make_dm, end_dm },
	{ "completion channels", 200, make_channel, end_channel },
	{ "contexts", 100, make_context, end_context },
};

/* Makes `count`, and ends them in the order made, backwards, or odd ones first.
 * Gives the most heap bytes held. */
static size_t round_of(const struct kind *kind, unsigned count, unsigned round)
{
	void **objects = calloc(count, sizeof *objects);
	size_t most;

	MUST(objects);
	for (unsigned i = 0; i < count; i++) {
		objects[i] = kind->make(i);
		if (!objects[i])
			fprintf(stderr, "%s: number %u\n", kind->name, i);
		MUST(objects[i]);
	}
	most = now().heap;
	for (unsigned i = 0; i < count; i++) {
		unsigned odd_first = 2 * i + 1 < count ? 2 * i + 1 : 2 * (i - count / 2);
		unsigned at = round % 3 == 0 ? i : round % 3 == 1 ? count - 1 - i : odd_first;

		MUST(!kind->end(objects[at]));
	}
	free(objects);
	return most;
}

static void check(const char *name, const struct held *before, const struct held *after)
{
	bool same = after->heap <= before->heap + SPLINTERS && after->files == before->files &&
		    after->mappings <= before->mappings;

	if (!same)
		fprintf(stderr, "%s: heap %zu -> %zu, descriptors %u -> %u, mappings %u -> %u\n", name, before->heap,
			after->heap, before->files, after->files, before->mappings, after->mappings);
	MUST(same);
}

/* The card itself, opened by its first context and closed with its last. */
static void cards(void)
{
	struct held before = { 0 }, after = { 0 };

	for (unsigned i = 0; i < 50; i++) {
		open_card();
		MUST((pd = ibv_alloc_pd(ctx)) && (cq = make_cq(8)));
		MUST(!end_qp(make_qp(3)));
		MUST(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
		if (i == 9)
			before = now();
	}
	after = now();
	check("cards", &before, &after);
	printf("%-28s %6u   one after the other\n", "cards", 50);
}

int main(int argc, char **argv)
{
	unsigned count = argc > 1 ? atoi(argv[1]) : 10000;
	struct held before, after;

	open_card();
	MUST((pd = ibv_alloc_pd(ctx)) && (cq = make_cq(16)) && (domain = make_xrcd(0)));
	for (const struct kind *kind = kinds; kind < kinds + sizeof kinds / sizeof *kinds; kind++) {
		unsigned many = kind->most && kind->most < count ? kind->most : count;
		size_t most = 0;

		for (unsigned round = 0; round < WARM; round++)
			round_of(kind, round ? many : 2 * many, round);
		before = now();
		for (unsigned round = 0; round < ROUNDS; round++)
			most = round_of(kind, many, round);
		after = now();
		check(kind->name, &before, &after);
		printf("%-28s %6u   %zu bytes each\n", kind->name, many, (most - before.heap) / many);
	}
	MUST(!end_xrcd(domain) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	cards();
	puts("growth: none");
	return 0;
}
