/* Direct verbs (include/infiniband/stardv.h): what each call promises, that structs of older and newer
 * headers are understood, and that all that `starverbs stat` shows can be had. With STARVERBS_QPC_CACHE set,
 * the card must fill the QPC group.
 * Build: cc -Wall -I include -o stardv stardv.c -L dist/lib -libverbs; also as C++. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

#include <infiniband/stardv.h>

/* A struct of a header to come: the mask's unknown bits, and fields behind. */
struct newer {
	struct stardv_counters known;
	uint64_t to_come[4];
};

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static char buf[64];

static struct stardv_counters ask(struct ibv_context *of, uint64_t mask)
{
	struct stardv_counters c;

	memset(&c, 0xee, sizeof(c));
	c.comp_mask = mask;
	CHECK(!stardv_query_counters(of, &c, sizeof(c)));
	return c;
}

static uint64_t listed(const char *name)
{
	struct stardv_counter list[512];
	ssize_t count = stardv_list_counters(ctx, list, 512, 0), i;

	for (i = 0; i < count && i < 512; i++)
		if (!strcmp(list[i].name, name))
			return list[i].value;
	fprintf(stderr, "no counter %s\n", name);
	failures++;
	return 0;
}

static void devices(struct ibv_device *device)
{
	struct ibv_device other;

	memset(&other, 0, sizeof(other));
	CHECK(stardv_is_supported(device) && !stardv_is_supported(&other) && !stardv_is_supported(NULL));
}

/* Groups are filled as asked for; what is not is 0. */
static void groups(int qpc_limited)
{
	const uint64_t all = STARDV_COUNTERS_CARD | STARDV_COUNTERS_QPC | STARDV_COUNTERS_CONTEXT;
	struct stardv_counters c = ask(ctx, 0);
	static const struct stardv_counters none;

	CHECK(!memcmp(&c, &none, sizeof(c)));
	c = ask(ctx, UINT64_MAX);
	CHECK(c.comp_mask == (qpc_limited ? all : (all & ~(uint64_t)STARDV_COUNTERS_QPC)));
	CHECK(!!c.qpc_on_chip == qpc_limited);
	c = ask(ctx, STARDV_COUNTERS_CONTEXT);
	CHECK(c.comp_mask == STARDV_COUNTERS_CONTEXT && !c.tx_packets && !c.qps);
}

/* Older programs have shorter structs, newer ones longer. */
static void sizes(void)
{
	struct stardv_counters c, before;
	struct newer newer;

	memset(&c, 0xee, sizeof(c));
	memset(&before, 0xee, sizeof(before));
	c.comp_mask = UINT64_MAX;
	CHECK(stardv_query_counters(ctx, &c, sizeof(uint64_t) - 1) == EINVAL && c.comp_mask == UINT64_MAX);
	CHECK(!stardv_query_counters(ctx, &c, offsetof(struct stardv_counters, qpc_hits)));
	CHECK(c.comp_mask == STARDV_COUNTERS_CARD);
	CHECK(!memcmp(&c.qpc_hits, &before.qpc_hits, sizeof(c) - offsetof(struct stardv_counters, qpc_hits)));
	c.comp_mask = UINT64_MAX;
	/* half a group is none */
	CHECK(!stardv_query_counters(ctx, &c, offsetof(struct stardv_counters, mrs)) && !c.comp_mask &&
	      !c.tx_packets);

	memset(&newer, 0xee, sizeof(newer));
	newer.known.comp_mask = UINT64_MAX;
	CHECK(!stardv_query_counters(ctx, &newer.known, sizeof(newer)));
	CHECK(newer.known.comp_mask && newer.known.comp_mask < 8 && !newer.to_come[0] && !newer.to_come[3]);
	CHECK(stardv_query_counters(NULL, &c, sizeof(c)) == EINVAL &&
	      stardv_query_counters(ctx, NULL, sizeof(c)) == EINVAL);
}

/* By name, in entries of this size and of a later one's. */
static void list(void)
{
	struct { struct stardv_counter known; uint64_t to_come; } wide[2];
	struct stardv_counter some[2];
	ssize_t count = stardv_list_counters(ctx, NULL, 0, 0);

	CHECK(count > 60);
	some[1].name = NULL;
	CHECK(stardv_list_counters(ctx, some, 1, 0) == count && !some[1].name);
	CHECK(!strcmp(some[0].name, "tx_packets") && !strcmp(some[0].help, "frames sent"));
	wide[1].to_come = 7;
	CHECK(_stardv_list_counters(ctx, &wide[0].known, 2, 0, sizeof(wide[0])) == count);
	CHECK(!strcmp(wide[1].known.name, "tx_bytes") && !wide[1].to_come);
	CHECK(_stardv_list_counters(ctx, some, 2, 0, sizeof(some[0]) - 8) == -EINVAL);
	CHECK(_stardv_list_counters(ctx, some, 2, 0, sizeof(some[0]) + 1) == -EINVAL);
	CHECK(stardv_list_counters(ctx, some, 2, 1) == -EINVAL && stardv_list_counters(ctx, NULL, 2, 0) == -EINVAL);
	CHECK(stardv_list_counters(NULL, some, 2, 0) == -EINVAL);
}

static struct ibv_qp *rc(void)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC };

	init.cap.max_send_wr = init.cap.max_recv_wr = 4;
	init.cap.max_send_sge = init.cap.max_recv_sge = 1;
	init.sq_sig_all = 1;
	return ibv_create_qp(pd, &init);
}

/* Counts follow what the program does, in both forms. */
static void counts(struct ibv_context *other, int qpc_limited)
{
	struct ibv_qp *a = rc(), *b = rc(), *idle = rc();
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, sizeof(buf), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_sge sge = { (uintptr_t)buf, 8, mr ? mr->lkey : 0 };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE }, *bad;
	struct ibv_qp_attr err = { .qp_state = IBV_QPS_ERR };
	struct stardv_counters before = ask(ctx, STARDV_COUNTERS_CARD), c;
	struct ibv_wc wc;
	int got;

	CHECK(a && b && idle && mr && !connect_rc(a, b->qp_num) && !connect_rc(b, a->qp_num));
	wr.wr.rdma.remote_addr = (uintptr_t)buf + 32;
	wr.wr.rdma.rkey = mr->rkey;
	CHECK(!ibv_post_send(a, &wr, &bad));
	while (!(got = ibv_poll_cq(cq, 1, &wc)))
		;
	CHECK(got == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(!ibv_modify_qp(idle, &err, IBV_QP_STATE));
	c = ask(ctx, UINT64_MAX);
	/* by packets, or through shared memory */
	CHECK(c.tx_packets >= before.tx_packets + 2 || listed("local_requests") >= 1);
	CHECK(c.completions == before.completions + 1 && c.qps == 3);
	CHECK(c.mrs == 1 && listed("qps") == 3 && listed("completions") == c.completions);
	CHECK(c.context_qps == 3 && c.context_qps_rts == 2 && c.context_qps_err == 1);
	CHECK(!qpc_limited || (c.qpc_misses && c.qpc_hits + c.qpc_misses >= 2 &&
	      c.qpc_misses == listed("qpc_misses") && c.qpc_pending <= c.qpc_pending_peak));
	/* the card is one, contexts are several */
	c = ask(other, UINT64_MAX);
	CHECK(c.qps == 3 && !c.context_qps && !c.context_qps_rts);
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b) && !ibv_destroy_qp(idle) && !ibv_dereg_mr(mr));
	CHECK(!ask(ctx, STARDV_COUNTERS_CONTEXT).context_qps);
}

static void in_a_child(void)
{
	struct stardv_counters c = { .comp_mask = STARDV_COUNTERS_CARD };
	int status = -1;
	pid_t child = fork();

	if (!child)
		_exit(stardv_query_counters(ctx, &c, sizeof(c)) != EIO || stardv_list_counters(ctx, NULL, 0, 0) != -EIO);
	CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
}

int main(void)
{
	const char *setting = getenv("STARVERBS_QPC_CACHE");
	int qpc_limited = setting && *setting && strcmp(setting, "off");
	struct ibv_device **devs = ibv_get_device_list(NULL);
	struct ibv_context *other;

	alarm(60);
	ctx = devs && devs[0] ? ibv_open_device(devs[0]) : NULL;
	other = ctx ? ibv_open_device(devs[0]) : NULL;
	pd = ctx ? ibv_alloc_pd(ctx) : NULL;
	cq = ctx ? ibv_create_cq(ctx, 16, NULL, NULL, 0) : NULL;
	if (!other || !pd || !cq) {
		fprintf(stderr, "no card\n");
		return 1;
	}
	devices(devs[0]);
	list();
	sizes();
	counts(other, qpc_limited);
	groups(qpc_limited);
	in_a_child();
	CHECK(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(other) && !ibv_close_device(ctx));
	ibv_free_device_list(devs);
	printf("stardv%s: %s\n", qpc_limited ? " QPC-limited" : "", failures ? "FAILED" : "ok");
	return !!failures;
}
