/* Objects of every kind that come and go while others carry messages: made, used,
 * changed, asked and ended at random.
 *
 * Queue pairs of several threads complete in one shared queue, half of them; each thread ends its own
 * with completions still in there. A completion's wr_id names the thread and the generation of its queue
 * pairs, so that what is left of an earlier one does not count. */
#define _GNU_SOURCE
#include "soak.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>

enum { CHURNERS = 3, MOST_WRS = 8, PAGE = 4096 };

struct churner {
	pthread_t thread;
	struct rng rng;
	/* Generation of its queue pairs, and completions of that one so far. */
	atomic_ullong counted;
	unsigned char *memory;
	unsigned long long rounds;
	/* Which of the kinds below is under way, for churn_tell. */
	atomic_uint kind;
};

static struct churner churners[CHURNERS];
static struct ibv_pd *shared_pd;
static struct ibv_cq *shared_cq;
static pthread_t asker, teller;
static atomic_ullong events_told;

/* Counts a completion for the generation that it is of. */
static void count(const struct ibv_wc *wc)
{
	struct churner *of = &churners[wc->wr_id & 0xff];
	unsigned long long generation = wc->wr_id >> 8, seen = atomic_load(&of->counted);

	MUST((wc->wr_id & 0xff) < CHURNERS);
	MUST(wc->status == IBV_WC_SUCCESS || wc->status == IBV_WC_WR_FLUSH_ERR ||
	     wc->status == IBV_WC_RNR_RETRY_EXC_ERR || wc->status == IBV_WC_RETRY_EXC_ERR);
	while (seen >> 16 == generation && !atomic_compare_exchange_weak(&of->counted, &seen, seen + 1))
		;
}

static unsigned polled(struct churner *c, struct ibv_cq *cq)
{
	struct ibv_wc wc[16];
	int got = poll_some(cq, wc);

	for (int i = 0; i < got; i++)
		count(&wc[i]);
	return atomic_load(&c->counted) & 0xffff;
}

static struct ibv_qp *new_qp(struct ibv_pd *pd, struct ibv_cq *cq, enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = type, .sq_sig_all = 1,
					 .cap = { MOST_WRS, MOST_WRS, 1, 1, 16 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_qp_attr attr;

	MUST(qp && !ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_RESET);
	return qp;
}

static void post(struct churner *c, struct ibv_qp *a, struct ibv_qp *b, struct ibv_mr *mr, unsigned wrs)
{
	struct ibv_sge sge = { (uintptr_t)c->memory, 1 + below(&c->rng, PAGE / 2), mr->lkey };
	uint64_t wr_id = atomic_load(&c->counted) >> 16 << 8 | (c - churners);
	struct ibv_recv_wr recv = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

	for (unsigned i = 0; i < wrs; i++) {
		MUST(!ibv_post_recv(b, &recv, &bad_recv));
		MUST(!ibv_post_send(a, &wr, &bad));
	}
}

/* Two queue pairs, some messages, and an end at any moment: every work request completes once, unless its
 * queue pair is destroyed before. */
static void queue_pairs(struct churner *c)
{
	bool share = below(&c->rng, 2), wait = below(&c->rng, 2);
	struct ibv_pd *pd = share ? shared_pd : ibv_alloc_pd(ctx);
	struct ibv_cq *cq = share ? shared_cq : ibv_create_cq(ctx, 2 * MOST_WRS, NULL, NULL, 0);
	enum ibv_qp_type type = below(&c->rng, 4) ? IBV_QPT_RC : IBV_QPT_UC;
	unsigned wrs = below(&c->rng, MOST_WRS + 1);
	struct ibv_qp *a, *b;
	struct ibv_mr *mr;

	MUST(pd && cq);
	MUST((mr = ibv_reg_mr(pd, c->memory, PAGE, ALL_RIGHTS)));
	a = new_qp(pd, cq, type);
	b = new_qp(pd, cq, type);
	atomic_store(&c->counted, ((atomic_load(&c->counted) >> 16) + 1) << 16);
	join(a, b);
	post(c, a, b, mr, wrs);
	if (wait && type == IBV_QPT_RC)
		while (polled(c, cq) < 2 * wrs)
			;
	if (below(&c->rng, 2)) {
		MUST(!to_state(a, IBV_QPS_ERR) && !to_state(b, IBV_QPS_ERR));
		while (polled(c, cq) < 2 * wrs)
			;
	}
	MUST((atomic_load(&c->counted) & 0xffff) <= 2 * wrs);
	MUST(!ibv_destroy_qp(a) && !ibv_destroy_qp(b));
	MUST(!ibv_dereg_mr(mr));
	if (!share)
		MUST(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd));
}

static void regions(struct churner *c)
{
	static const int access[] = { 0, IBV_ACCESS_LOCAL_WRITE, ALL_RIGHTS, ALL_RIGHTS | IBV_ACCESS_ON_DEMAND,
				      ALL_RIGHTS | IBV_ACCESS_MW_BIND, ALL_RIGHTS | IBV_ACCESS_ZERO_BASED };
	struct ibv_mr *mr[4];
	struct ibv_mw *mw = ibv_alloc_mw(shared_pd, below(&c->rng, 2) ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2);

	MUST(mw);
	for (int i = 0; i < 4; i++)
		MUST((mr[i] = ibv_reg_mr(shared_pd, c->memory, 1 + below(&c->rng, PAGE), access[below(&c->rng, 6)])));
	MUST(mr[0]->lkey != mr[1]->lkey && mr[2]->lkey != mr[3]->lkey);
	MUST(!ibv_rereg_mr(mr[0], IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS, NULL, c->memory, 64,
	     ALL_RIGHTS));
	for (int i = 0; i < 4; i++)
		MUST(!ibv_dereg_mr(mr[i]));
	MUST(!ibv_dealloc_mw(mw));
}

static void shared_queues(struct churner *c)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 16, .max_sge = 2 } };
	struct ibv_srq *srq = ibv_create_srq(shared_pd, &init);
	struct ibv_srq_attr attr = { .srq_limit = 4 };
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;

	MUST(srq);
	for (unsigned i = below(&c->rng, 16); i > 0; i--)
		MUST(!ibv_post_srq_recv(srq, &wr, &bad));
	MUST(!ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
	MUST(!ibv_query_srq(srq, &attr) && attr.max_wr >= 16);
	MUST(!ibv_destroy_srq(srq));
}

static void xrc(struct churner *c)
{
	struct ibv_xrcd_init_attr on = { IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, -1, O_CREAT };
	struct ibv_xrcd *domain = ibv_open_xrcd(ctx, &on);
	struct ibv_cq *cq = ibv_create_cq(ctx, 16, NULL, NULL, 0);
	struct ibv_srq_init_attr_ex init = {
		.attr = { .max_wr = 4, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC, .pd = shared_pd, .cq = cq, .xrcd = domain,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_XRCD,
	};
	struct ibv_qp_init_attr_ex target = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD,
					      .xrcd = domain };
	struct ibv_srq *srq = ibv_create_srq_ex(ctx, &init);
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &target);

	MUST(domain && cq && srq && qp && !to_init(qp));
	if (below(&c->rng, 2))
		MUST(!to_rtr(qp, 0x1234));
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_srq(srq) && !ibv_destroy_cq(cq) && !ibv_close_xrcd(domain));
}

static void small_things(struct churner *c)
{
	struct ibv_ah_attr to = loopback_ah();
	struct ibv_ah *ah = ibv_create_ah(shared_pd, &to);
	struct ibv_alloc_dm_attr size = { .length = 64 };
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &size);
	struct ibv_td_init_attr td_init = { 0 };
	struct ibv_parent_domain_init_attr parent = { .pd = shared_pd, .td = ibv_alloc_td(ctx, &td_init) };
	struct ibv_pd *pd = ibv_alloc_parent_domain(ctx, &parent);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 1 + below(&c->rng, 300), NULL, channel, 0);
	uint64_t word = next(&c->rng), same = 0;

	MUST(ah && dm && parent.td && pd && channel && cq);
	MUST(!ibv_memcpy_to_dm(dm, 8, &word, 8) && !ibv_memcpy_from_dm(&same, dm, 8, 8) && same == word);
	MUST(!ibv_req_notify_cq(cq, 0) && !ibv_resize_cq(cq, 1 + below(&c->rng, 300)));
	MUST(!ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel));
	MUST(!ibv_dealloc_pd(pd) && !ibv_dealloc_td(parent.td) && !ibv_free_dm(dm) && !ibv_destroy_ah(ah));
}

/* Another hold on the card, whose objects come and go with it. */
static void contexts(struct churner *c)
{
	struct ibv_context *other = another_context();
	struct ibv_pd *pd = ibv_alloc_pd(other);
	struct ibv_cq *cq = ibv_create_cq(other, 16, NULL, NULL, 0);
	struct ibv_qp *qp;

	MUST(pd && cq);
	qp = new_qp(pd, cq, IBV_QPT_UD);
	MUST(!to_init(qp) && !to_rtr(qp, 0));
	if (below(&c->rng, 2))
		MUST(!to_rts(qp));
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(other));
}

static void *churn(void *arg)
{
	static void (*const kinds[])(struct churner *) = { queue_pairs, queue_pairs, regions, shared_queues, xrc,
							   small_things, contexts };
	struct churner *c = arg;

	for (; !atomic_load(&over); c->rounds++) {
		unsigned kind = below(&c->rng, sizeof kinds / sizeof *kinds);

		atomic_store(&c->kind, kind);
		kinds[kind](c);
	}
	atomic_store(&c->kind, ~0u);
	return NULL;
}

void churn_tell(void)
{
	for (unsigned i = 0; i < CHURNERS; i++)
		fprintf(stderr, "churner %u: kind %d, %llu completions of generation %llu\n", i, (int)churners[i].kind,
			churners[i].counted & 0xffff, churners[i].counted >> 16);
}

/* Asks and changes queue pairs that carry messages, and what they use. */
static void ask_once(struct rng *rng, struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .min_rnr_timer = 1 + below(rng, 5) };
	struct ibv_srq_attr limit = { .srq_limit = 1 + below(rng, 60) };
	struct ibv_qp_init_attr init;
	struct ibv_port_attr port;
	union ibv_gid same;

	MUST(!ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_RTS);
	MUST(!ibv_modify_qp(qp, &attr, IBV_QP_MIN_RNR_TIMER));
	if (below(rng, 4) == 0) {
		MUST(!to_state(qp, IBV_QPS_SQD));
		MUST(!ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_SQD);
		MUST(!to_state(qp, IBV_QPS_RTS));
	}
	MUST(!ibv_modify_srq(traffic_srq(), &limit, IBV_SRQ_LIMIT));
	MUST(!ibv_resize_cq(traffic_cq(), 100 + below(rng, 400)));
	MUST(!ibv_query_port(ctx, 1, &port) && port.state == IBV_PORT_ACTIVE);
	MUST(!ibv_query_gid(ctx, 1, 0, &same) && !memcmp(&same, &gid, sizeof gid));
}

static void *ask(void *arg)
{
	struct rng rng = { (uintptr_t)arg };
	struct ibv_qp *qp;

	while (!atomic_load(&over)) {
		for (unsigned i = 0; (qp = traffic_qp(i)) && !atomic_load(&over); i++)
			ask_once(&rng, qp);
		poll(NULL, 0, 2);
	}
	return NULL;
}

/* Takes the events of all: a queue pair is destroyed only when its events were acknowledged. */
static void *tell(void *arg)
{
	struct pollfd fd = { .fd = ctx->async_fd, .events = POLLIN };
	struct ibv_async_event event;

	while (!atomic_load((atomic_bool *)arg)) {
		if (poll(&fd, 1, 20) <= 0 || ibv_get_async_event(ctx, &event))
			continue;
		MUST(event.event_type != IBV_EVENT_CQ_ERR && event.event_type != IBV_EVENT_DEVICE_FATAL);
		atomic_fetch_add(&events_told, 1);
		ibv_ack_async_event(&event);
	}
	return NULL;
}

static atomic_bool all_ended;

void churn_start(uint64_t seed)
{
	MUST(!fcntl(ctx->async_fd, F_SETFL, O_NONBLOCK));
	MUST((shared_pd = ibv_alloc_pd(ctx)));
	MUST((shared_cq = ibv_create_cq(ctx, 4 * CHURNERS * MOST_WRS, NULL, NULL, 0)));
	MUST(!pthread_create(&teller, NULL, tell, &all_ended));
	MUST(!pthread_create(&asker, NULL, ask, (void *)(uintptr_t)mix(seed)));
	for (unsigned i = 0; i < CHURNERS; i++) {
		churners[i].rng.state = mix(seed + i + 1);
		MUST((churners[i].memory = calloc(1, PAGE)));
		MUST(!pthread_create(&churners[i].thread, NULL, churn, &churners[i]));
	}
}

void churn_end(void)
{
	unsigned long long rounds = 0;

	MUST(!pthread_join(asker, NULL));
	for (unsigned i = 0; i < CHURNERS; i++) {
		MUST(!pthread_join(churners[i].thread, NULL));
		rounds += churners[i].rounds;
		free(churners[i].memory);
	}
	MUST(!ibv_destroy_cq(shared_cq) && !ibv_dealloc_pd(shared_pd));
	printf("churn: %llu rounds, %llu events\n", rounds, (unsigned long long)atomic_load(&events_told));
}

void churn_quiet(void)
{
	atomic_store(&all_ended, true);
	MUST(!pthread_join(teller, NULL));
}
