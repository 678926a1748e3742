/* What the device says that a program may have, it can have, one kind at a time: so many are made,
 * one more is refused with ENOMEM, and the process lives. Queues of all sizes together take no
 * more than STARVERBS_MEMORY allows.
 * usage: limits, with STARVERBS_MEMORY set to some megabytes */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../abi/check.h"
#include "../abi/connect.h"

static struct ibv_context *ctx;
static struct ibv_device_attr dev;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static char buffer[64];

static struct ibv_qp *make(int wr, int sge, int inline_bytes)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { wr, wr, sge, sge, inline_bytes } };

	return ibv_create_qp(pd, &init);
}

static void *make_qp(void) { return make(128, 1, 0); }
static void *make_cq(void) { return ibv_create_cq(ctx, 128, NULL, NULL, 0); }
static void *make_pd(void) { return ibv_alloc_pd(ctx); }
static void *make_mr(void) { return ibv_reg_mr(pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE); }
static void *make_mw(void) { return ibv_alloc_mw(pd, IBV_MW_TYPE_2); }

static void *make_srq(void)
{
	struct ibv_srq_init_attr init = { .attr = { 128, 1, 0 } };

	return ibv_create_srq(pd, &init);
}

static void *make_ah(void)
{
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1 };

	ibv_query_gid(ctx, 1, 0, &to.grh.dgid);
	return ibv_create_ah(pd, &to);
}

static int end_qp(void *x) { return ibv_destroy_qp(x); }
static int end_cq(void *x) { return ibv_destroy_cq(x); }
static int end_pd(void *x) { return ibv_dealloc_pd(x); }
static int end_mr(void *x) { return ibv_dereg_mr(x); }
static int end_mw(void *x) { return ibv_dealloc_mw(x); }
static int end_srq(void *x) { return ibv_destroy_srq(x); }
static int end_ah(void *x) { return ibv_destroy_ah(x); }

/* `limit`, of which `others` are there already. */
static void all_of(const char *name, int limit, int others, void *(*make_one)(void), int (*end)(void *))
{
	void **made = calloc(limit + 1, sizeof(*made));
	int n = 0, error;

	errno = 0;
	while (made && n <= limit && (made[n] = make_one()))
		n++;
	error = errno;
	if (n + others != limit || error != ENOMEM) {
		failures++;
		fprintf(stderr, "%s: %d of %d, errno %d\n", name, n + others, limit, error);
	}
	CHECK(n > 0 && !end(made[--n]) && (made[n] = make_one()));
	do
		CHECK(!end(made[n]));
	while (n--);
	free(made);
}

/* Bytes of memory that the process has. */
static long resident(void)
{
	long pages = 0;
	FILE *f = fopen("/proc/self/statm", "r");

	CHECK(f && fscanf(f, "%*d %ld", &pages) == 1 && !fclose(f));
	return pages * sysconf(_SC_PAGESIZE);
}

/* Until there is no more: large queues first, then smaller ones. */
static void greed(long most)
{
	static struct ibv_qp *made[100000];
	long before = resident(), taken;
	int n = 0, wr;

	for (wr = dev.max_qp_wr; wr; wr /= 2)
		while (n < 100000 && (made[n] = make(wr, 2, 100)))
			n++;
	CHECK(!make(1, 2, 100) && errno == ENOMEM);
	taken = resident() - before;
	printf("limits: %d queue pairs of all sizes in %ld MiB\n", n, taken >> 20);
	CHECK(n > 3 && taken > most / 3 && taken < most);
	while (n--)
		CHECK(!ibv_destroy_qp(made[n]));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	const char *memory = getenv("STARVERBS_MEMORY");

	alarm(300);
	if (!memory || !list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx)) ||
	    !(cq = ibv_create_cq(ctx, 16, NULL, NULL, 0)) || ibv_query_device(ctx, &dev)) {
		perror("opening the card");
		return 1;
	}
	ibv_free_device_list(list);
	/* first, as the card's tables keep the room that they once had */
	greed(atol(memory) << 20);
	all_of("queue pairs", dev.max_qp, 0, make_qp, end_qp);
	all_of("completion queues", dev.max_cq, 1, make_cq, end_cq);
	all_of("shared receive queues", dev.max_srq, 0, make_srq, end_srq);
	all_of("protection domains", dev.max_pd, 1, make_pd, end_pd);
	all_of("regions", dev.max_mr, 0, make_mr, end_mr);
	all_of("windows", dev.max_mw, 0, make_mw, end_mw);
	all_of("address handles", dev.max_ah, 0, make_ah, end_ah);
	CHECK(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	if (!failures)
		puts("limits: as many as the device says, and no more");
	return failures != 0;
}
