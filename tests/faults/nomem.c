/* No memory: each call that makes something is made to fail at each of its allocations, one at a time
 * and from each one on; then under a limit of the address space. It fails with ENOMEM or succeeds, the
 * process lives, nothing is left, and a connection that was there goes on. malloc is this program's:
 * the library's goes through it. */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../../include/infiniband/stardv.h"
#include "../abi/check.h"
#include "../abi/connect.h"
#include "kinds.h"

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

/* Allocations of this thread until one fails; then `run` of them do. */
static __thread long until = -1, run;
/* Every thread's allocations fail. */
static atomic_int dry;
static __thread long failed;

static int fails(void)
{
	if (dry) {
		failed++;
		return 1;
	}
	if (until < 0)
		return 0;
	if (until > 0) {
		until--;
		return 0;
	}
	if (run == 0)
		return 0;
	run--;
	failed++;
	return 1;
}

#define OR_FAIL(what) (fails() ? (errno = ENOMEM, NULL) : (what))
void *malloc(size_t size) { return OR_FAIL(__libc_malloc(size)); }
void *calloc(size_t n, size_t size) { return OR_FAIL(__libc_calloc(n, size)); }
void *realloc(void *p, size_t size) { return OR_FAIL(__libc_realloc(p, size)); }
void *memalign(size_t align, size_t size) { return OR_FAIL(__libc_memalign(align, size)); }
void *aligned_alloc(size_t align, size_t size) { return OR_FAIL(__libc_memalign(align, size)); }
int posix_memalign(void **p, size_t align, size_t size)
{
	if (fails())
		return ENOMEM;
	*p = __libc_memalign(align, size);
	return *p ? 0 : ENOMEM;
}

static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_comp_channel *channel;
static struct ibv_xrcd *xrcd;
static struct ibv_qp *a, *b;
static struct ibv_mr *mr;
static char buffer[1 << 16];

/* A WRITE to the program's own buffer, seen to its end. */
static int writes(struct ibv_qp *from)
{
	static char seq;
	struct ibv_sge sge = { (uintptr_t)buffer, 4096, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;
	int n;

	wr.wr.rdma.remote_addr = (uintptr_t)buffer + 32768;
	wr.wr.rdma.rkey = mr->rkey;
	memset(buffer, ++seq, 4096);
	if (ibv_post_send(from, &wr, &bad))
		return 0;
	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
		;
	return n == 1 && wc.status == IBV_WC_SUCCESS && !memcmp(buffer, buffer + 32768, 4096);
}

/* What lives on. */
static int lives(void) { return writes(a); }

static struct ibv_qp *make_qp(enum ibv_qp_type type, struct ibv_srq *from, int wr, int sge)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .srq = from, .qp_type = type,
					 .cap = { wr, wr, sge, sge, 64 } };

	return ibv_create_qp(pd, &init);
}

static void *make_pd(void) { return ibv_alloc_pd(ctx); }
static void *make_cq(void) { return ibv_create_cq(ctx, 1000, NULL, channel, 0); }
static void *make_rc(void) { return make_qp(IBV_QPT_RC, NULL, 500, 8); }
static void *make_ud(void) { return make_qp(IBV_QPT_UD, NULL, 100, 1); }
static void *make_shared(void) { return make_qp(IBV_QPT_RC, srq, 100, 2); }
static void *make_mr(void) { return ibv_reg_mr(pd, buffer, sizeof(buffer), 0xf); }
static void *make_td(void) { struct ibv_td_init_attr i = {0}; return ibv_alloc_td(ctx, &i); }
static void *make_mw(void) { return ibv_alloc_mw(pd, IBV_MW_TYPE_2); }

static void *make_cq_ex(void)
{
	struct ibv_cq_init_attr_ex i = { .cqe = 100, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP };

	return ibv_create_cq_ex(ctx, &i);
}

static void *make_srq(void)
{
	struct ibv_srq_init_attr i = { .attr = { 500, 4, 0 } };

	return ibv_create_srq(pd, &i);
}

static void *make_tags(void)
{
	struct ibv_srq_init_attr_ex i = { .attr = { 64, 1, 0 }, .srq_type = IBV_SRQT_TM, .pd = pd, .cq = cq,
					  .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
						       IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM };

	i.tm_cap.max_num_tags = 64;
	i.tm_cap.max_ops = 16;
	return ibv_create_srq_ex(ctx, &i);
}

static void *make_xrcd(void)
{
	struct ibv_xrcd_init_attr i = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
					.oflags = O_CREAT };

	return ibv_open_xrcd(ctx, &i);
}

static void *make_xrc_recv(void)
{
	struct ibv_qp_init_attr_ex i = { .qp_type = IBV_QPT_XRC_RECV, .xrcd = xrcd,
		.comp_mask = IBV_QP_INIT_ATTR_XRCD };

	return ibv_create_qp_ex(ctx, &i);
}

/* One that asks its peer for StaR, with so many WQEs. */
static struct ibv_qp *make_end(uint32_t role, uint32_t wr, uint32_t inline_bytes)
{
	struct ibv_qp_init_attr_ex i = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd,
					 .comp_mask = IBV_QP_INIT_ATTR_PD, .cap = { wr, 16, 2, 2, inline_bytes } };
	struct stardv_qp_init_attr star = { .star = role };

	return stardv_create_qp(ctx, &i, &star, sizeof(star));
}

static void *make_stateless(void) { return make_end(STARDV_STAR_STATELESS, 16, 600); }

static void *make_ah(void)
{
	struct ibv_ah_attr i = { .is_global = 1, .port_num = 1 };
	static int last;

	/* a destination that the card has not met */
	ibv_query_gid(ctx, 1, 0, &i.grh.dgid);
	i.grh.dgid.raw[15] = (unsigned char)++last;
	i.grh.dgid.raw[14] = (unsigned char)(last >> 8);
	return ibv_create_ah(pd, &i);
}

static int end_pd(void *x) { return ibv_dealloc_pd(x); }
static int end_cq(void *x) { return ibv_destroy_cq(x); }
static int end_cq_ex(void *x) { return ibv_destroy_cq(ibv_cq_ex_to_cq(x)); }
static int end_qp(void *x) { return ibv_destroy_qp(x); }
static int end_mr(void *x) { return ibv_dereg_mr(x); }
static int end_td(void *x) { return ibv_dealloc_td(x); }
static int end_mw(void *x) { return ibv_dealloc_mw(x); }
static int end_srq(void *x) { return ibv_destroy_srq(x); }
static int end_xrcd(void *x) { return ibv_close_xrcd(x); }
static int end_ah(void *x) { return ibv_destroy_ah(x); }

static const struct kind kinds[] = {
	{ "context", make_context, end_context }, { "protection domain", make_pd, end_pd },
	{ "thread domain", make_td, end_td },	  { "completion queue", make_cq, end_cq },
	{ "extended CQ", make_cq_ex, end_cq_ex }, { "RC queue pair", make_rc, end_qp },
	{ "UD queue pair", make_ud, end_qp },	  { "queue pair of an SRQ", make_shared, end_qp },
	{ "memory region", make_mr, end_mr },	  { "memory window", make_mw, end_mw },
	{ "SRQ", make_srq, end_srq },		  { "SRQ with tags", make_tags, end_srq },
	{ "XRC domain", make_xrcd, end_xrcd },	  { "XRC receiver", make_xrc_recv, end_qp },
	{ "address handle", make_ah, end_ah },	  { "channel", make_channel, end_channel },
	{ "device memory", make_dm, end_dm },	  { "end of StaR", make_stateless, end_qp },
};
enum { KINDS = sizeof(kinds) / sizeof(kinds[0]) };

/* One kind, its n-th allocation failing, for each n, and `length` in a row. Gives how many tries failed. */
static int starve(const struct kind *kind, long length)
{
	int count = 0;

	for (long n = 0; n < 300; n++) {
		void *made;
		int why;

		failed = 0;
		run = length;
		until = n;
		errno = 0;
		made = kind->make();
		why = errno;
		until = -1;
		count += refused(kind, made, why, ENOMEM, n);
		if (!failed)
			return count;
	}
	failures++;
	fprintf(stderr, "%s: never succeeds\n", kind->name);
	return count;
}

static void each_allocation(void)
{
	for (int k = 0; k < KINDS; k++) {
		int once = starve(&kinds[k], 1), all = starve(&kinds[k], 1L << 40);
		void *again = kinds[k].make();

		printf("%-22s refused %3d times for one allocation, %3d for all from one on\n", kinds[k].name, once, all);
		CHECK(again != NULL && kinds[k].end(again) == 0);
		CHECK(lives());
	}
}

/* All that a connected queue pair does, and its end, with no memory for anybody. */
static void transitions(void)
{
	struct ibv_qp *q[64];
	int made = 0, connected = 0;

	for (; made < 64; made++)
		CHECK((q[made] = make_rc()) != NULL);
	dry = 1;
	for (int i = 0; i < made; i++) {
		int ret = connect_rc(q[i], b->qp_num);

		connected += ret == 0;
		CHECK(ret == 0 || ret == ENOMEM);
	}
	for (int i = 0; i < 100; i++)
		CHECK(lives());
	dry = 0;
	printf("%d of %d queue pairs connected without memory\n", connected, made);
	for (int i = 0; i < made; i++)
		CHECK(ibv_destroy_qp(q[i]) == 0);
}

/* What a queue pair is, once that is settled; 0: it is in ERR, as there was no memory for it. */
static uint32_t role_of(struct ibv_qp *qp)
{
	struct stardv_qp_attr star = { .star_role = STARDV_STAR_ROLE_WAITING };
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	for (int i = 0; i < 10000 && star.star_role == STARDV_STAR_ROLE_WAITING; i++) {
		CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0);
		if (attr.qp_state == IBV_QPS_ERR)
			return 0;
		star.comp_mask = STARDV_QP_STAR;
		CHECK(stardv_query_qp(qp, &star, sizeof(star)) == 0);
		usleep(1000);
	}
	return star.star_role;
}

/* Both ends of a connection of StaR, connected; whether they could be. */
static int pair(struct ibv_qp *ends[2])
{
	int first = connect_rc(ends[0], ends[1]->qp_num), second = connect_rc(ends[1], ends[0]->qp_num);

	CHECK((first == 0 || first == ENOMEM) && (second == 0 || second == ENOMEM));
	return first == 0 && second == 0;
}

/* Ends of StaR begin without memory for anybody, and go back to RESET while each of their allocations
 * fails: those that cannot stay what they are. */
static void star(void)
{
	enum { PAIRS = 32 };
	struct ibv_qp *ends[PAIRS + 1][2];
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	int connected[PAIRS], begun = 0, refusals = 0, ret = ENOMEM;

	for (int i = 0; i <= PAIRS; i++) {
		/* what the last one needs to come back may be more than the library still has
		 * of what it keeps for bad times */
		uint32_t depth = i < PAIRS ? 16 : 1 << 16, room = i < PAIRS ? 600 : 0;
		CHECK((ends[i][0] = make_end(STARDV_STAR_STATELESS, depth, room)) != NULL);
		CHECK((ends[i][1] = make_end(STARDV_STAR_STATEFUL, 16, 600)) != NULL);
	}
	CHECK(pair(ends[PAIRS]));
	CHECK(role_of(ends[PAIRS][0]) == STARDV_STAR_ROLE_STATELESS && writes(ends[PAIRS][0]));
	dry = 1;
	for (int i = 0; i < PAIRS; i++)
		connected[i] = pair(ends[i]);
	for (int i = 0; i < 1000; i++)
		CHECK(lives() && writes(ends[PAIRS][1]));
	dry = 0;
	for (int i = 0; i < PAIRS; i++)
		begun += connected[i] && role_of(ends[i][0]) == STARDV_STAR_ROLE_STATELESS && role_of(ends[i][1]);
	for (int k = 0; k < KINDS; k++)
		if (kinds[k].make == make_mr || kinds[k].make == make_stateless)
			CHECK(starve(&kinds[k], 1L << 40) > 0);
	for (long n = 0; ret == ENOMEM && n < 100; n++) {
		run = 1L << 40;
		until = n;
		ret = ibv_modify_qp(ends[PAIRS][0], &attr, IBV_QP_STATE);
		until = -1;
		refusals += ret == ENOMEM;
		CHECK(ret == 0 || (ret == ENOMEM && writes(ends[PAIRS][0]) && writes(ends[PAIRS][1])));
	}
	CHECK(ret == 0);
	printf("%d of %d connections of StaR begun without memory, %d times not reset\n", begun, PAIRS, refusals);
	for (int i = 0; i <= PAIRS; i++)
		CHECK(ibv_destroy_qp(ends[i][0]) == 0 && ibv_destroy_qp(ends[i][1]) == 0);
	CHECK(lives());
}

/* As many of each kind as the limit of the address space lets be, all at once. */
static void limit(void)
{
	enum { MANY = 100000 };
	static void *made[MANY];
	static int of[MANY];
	struct rlimit old, less;
	int count = 0, no = 0;
	long pages = 0;
	FILE *f = fopen("/proc/self/statm", "r");

	CHECK(f && fscanf(f, "%ld", &pages) == 1);
	fclose(f);
	getrlimit(RLIMIT_AS, &old);
	less = old;
	less.rlim_cur = (rlim_t)pages * sysconf(_SC_PAGESIZE) + (48 << 20);
	CHECK(setrlimit(RLIMIT_AS, &less) == 0);
	/* the contexts and channels are bounded by descriptors, not memory: few of those */
	while (count < MANY && no < 200) {
		int k = 1 + rand() % (KINDS - 1);
		void *x;

		if (kinds[k].make == make_channel || kinds[k].make == make_dm)
			continue;
		errno = 0;
		x = kinds[k].make();
		if (x) {
			of[count] = k;
			made[count++] = x;
		} else {
			no += refused(&kinds[k], NULL, errno, ENOMEM, count);
		}
		if (count % 1000 == 0)
			CHECK(lives());
	}
	CHECK(no > 0 && lives());
	printf("%d objects in 48 MiB, then %d refused\n", count, no);
	while (count-- > 0)
		CHECK(kinds[of[count]].end(made[count]) == 0);
	for (int k = 1; k < KINDS; k++) {
		void *x = NULL;
		int why;

		/* a mapping of its own, and malloc may keep the address space that it had for the others */
		if (kinds[k].make == make_dm)
			continue;
		errno = 0;
		x = kinds[k].make();
		why = x ? kinds[k].end(x) : errno;
		if (!x || why) {
			failures++;
			fprintf(stderr, "%s: not %s again: %s\n", kinds[k].name, x ? "ended" : "made", strerror(why));
		}
	}
	CHECK(setrlimit(RLIMIT_AS, &old) == 0 && lives());
}

/* The first context of all opens the card: sockets, buffers, a thread. */
static void opening(void)
{
	struct kind opens = { "the card", make_context, end_context };

	printf("%-22s refused %3d times for one allocation, %3d for all from one on\n", opens.name,
	       starve(&opens, 1), starve(&opens, 1L << 40));
}

/* With an argument, StaR alone: over packets, as queue pairs of one host need none. */
int main(int argc, char **argv)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);

	if (!list || n != 1)
		return 1;
	dev = list[0];
	opening();
	CHECK((ctx = ibv_open_device(dev)) != NULL);
	CHECK((pd = ibv_alloc_pd(ctx)) != NULL);
	CHECK((cq = ibv_create_cq(ctx, 100, NULL, NULL, 0)) != NULL);
	CHECK((channel = ibv_create_comp_channel(ctx)) != NULL);
	CHECK((srq = make_srq()) != NULL);
	CHECK((xrcd = make_xrcd()) != NULL);
	CHECK((mr = make_mr()) != NULL);
	CHECK((a = make_rc()) != NULL && (b = make_rc()) != NULL);
	CHECK(connect_rc(a, b->qp_num) == 0 && connect_rc(b, a->qp_num) == 0);
	CHECK(lives());
	if (argc > 1) {
		star();
	} else {
		each_allocation();
		transitions();
		limit();
	}
	CHECK(ibv_destroy_qp(a) == 0 && ibv_destroy_qp(b) == 0 && ibv_dereg_mr(mr) == 0);
	CHECK(ibv_close_xrcd(xrcd) == 0 && ibv_destroy_srq(srq) == 0);
	CHECK(ibv_destroy_comp_channel(channel) == 0 && ibv_destroy_cq(cq) == 0);
	CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(ctx) == 0);
	ibv_free_device_list(list);
	if (!failures)
		printf("no memory%s: refused, and all else goes on\n", argc > 1 ? argv[1] : "");
	return failures != 0;
}
