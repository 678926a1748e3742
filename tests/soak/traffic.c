/* Messages whose every byte is checked, and which must arrive once each.
 *
 * Groups of lanes (connected pairs of queue pairs). In the first group all is shared: three threads
 * post on three lanes with one send queue's completions, one shared receive queue, and whoever polls
 * takes what comes for anybody. The others are a thread with a lane and a queue of its own. Threads
 * register their memory anew under way. */
#define _GNU_SOURCE
#include "soak.h"

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>

enum { GROUPS = 3, LANES = 3, POSTERS = 3, DEPTH = 4, SLOT = 8192, RECVS = 64, ROUNDS_A_REGION = 64 };

enum state { IDLE, POSTED, DONE };
enum kind { SEND, SEND_INLINE, WRITE_AND_READ, ADD, KINDS };

/* One thing under way. Whoever polls its completion sets it DONE; the thread
 * that posted it looks at the data. */
struct op {
	_Atomic enum state state;
	enum kind kind;
	enum ibv_wc_opcode opcode;
	uint64_t seed;
	uint32_t len;
	unsigned char *local, *remote, *back;
};

struct lane {
	struct ibv_qp *a, *b;
	/* Messages and the sum of their seeds, mixed: none is lost, and none comes
	 * twice in the place of another. */
	atomic_ullong sent, sent_sum, got, got_sum, added;
	/* What additions go to. */
	_Alignas(8) uint64_t cell;
	struct ibv_mr *cell_mr;
};

struct poster {
	struct group *group;
	struct rng rng;
	pthread_t thread;
	struct op ops[DEPTH];
	unsigned char *memory;
	struct ibv_mr *mr;
	unsigned rounds;
};

struct group {
	unsigned lanes_used, posters_used;
	struct ibv_pd *pd;
	struct ibv_cq *send_cq, *recv_cq;
	struct ibv_comp_channel *channel;
	struct ibv_srq *srq;
	struct lane lanes[LANES];
	struct poster posters[POSTERS];
	unsigned char *recv_memory;
	struct ibv_mr *recv_mr;
};

struct header {
	uint64_t seed;
	uint32_t len, lane;
};

static struct group groups[GROUPS];
static pthread_t sleeper;
static atomic_bool all_in;

static void post_recv(struct group *g, struct lane *lane, uint64_t index)
{
	struct ibv_sge sge = { (uintptr_t)g->recv_memory + index * SLOT, SLOT, g->recv_mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = index, .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(!(g->srq ? ibv_post_srq_recv(g->srq, &wr, &bad) : ibv_post_recv(lane->b, &wr, &bad)));
}

static void received(struct group *g, const struct ibv_wc *wc)
{
	const unsigned char *at = g->recv_memory + wc->wr_id * SLOT;
	struct header head;

	MUST(wc->status == IBV_WC_SUCCESS && wc->opcode == IBV_WC_RECV && wc->wr_id < RECVS);
	memcpy(&head, at, sizeof head);
	MUST(head.lane < g->lanes_used && wc->qp_num == g->lanes[head.lane].b->qp_num);
	MUST(head.len == wc->byte_len && wc->wc_flags & IBV_WC_WITH_IMM && ntohl(wc->imm_data) == head.lane);
	MUST(holds(at + sizeof head, head.seed, head.len - sizeof head));
	/* the sum first: who sees the count sees the sum */
	atomic_fetch_add(&g->lanes[head.lane].got_sum, mix(head.seed));
	atomic_fetch_add(&g->lanes[head.lane].got, 1);
	post_recv(g, &g->lanes[head.lane], wc->wr_id);
}

static int take_receives(struct group *g)
{
	struct ibv_wc wc[16];
	int got = poll_some(g->recv_cq, wc);

	for (int i = 0; i < got; i++)
		received(g, &wc[i]);
	return got;
}

static void take_sends(struct group *g)
{
	struct ibv_wc wc[16];
	int got = poll_some(g->send_cq, wc);

	for (int i = 0; i < got; i++) {
		struct op *op = (struct op *)wc[i].wr_id;

		MUST(wc[i].status == IBV_WC_SUCCESS && wc[i].opcode == op->opcode);
		MUST(atomic_exchange(&op->state, DONE) == POSTED);
	}
}

static void give_memory(struct poster *p)
{
	if (p->mr)
		MUST(!ibv_dereg_mr(p->mr));
	p->mr = ibv_reg_mr(p->group->pd, p->memory, 3 * DEPTH * SLOT, ALL_RIGHTS);
	MUST(p->mr);
}

/* SEND by ibv_post_send, of bytes in the slot or in the work request. */
static void post_message(struct poster *p, struct op *op, struct lane *lane)
{
	struct header head = { op->seed, op->len, lane - p->group->lanes };
	struct ibv_sge sge = { (uintptr_t)op->local, op->len, p->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = (uintptr_t)op, .sg_list = &sge, .num_sge = 1,
				  .opcode = IBV_WR_SEND_WITH_IMM, .send_flags = IBV_SEND_SIGNALED, .imm_data = htonl(head.lane) }, *bad;

	memcpy(op->local, &head, sizeof head);
	fill(op->local + sizeof head, op->seed, op->len - sizeof head);
	if (op->kind == SEND_INLINE)
		wr.send_flags |= IBV_SEND_INLINE;
	op->opcode = IBV_WC_SEND;
	atomic_fetch_add(&lane->sent, 1);
	atomic_fetch_add(&lane->sent_sum, mix(op->seed));
	MUST(!ibv_post_send(lane->a, &wr, &bad));
	if (op->kind == SEND_INLINE)
		memset(op->local, 0, op->len);
}

/* WRITE, and READ of the same bytes, in one batch built in place: one completion for both. */
static void post_there_and_back(struct poster *p, struct op *op, struct lane *lane)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(lane->a);

	fill(op->local, op->seed, op->len);
	op->opcode = IBV_WC_RDMA_READ;
	ibv_wr_start(qp);
	qp->wr_id = (uintptr_t)op;
	qp->wr_flags = 0;
	ibv_wr_rdma_write(qp, p->mr->rkey, (uintptr_t)op->remote);
	ibv_wr_set_sge(qp, p->mr->lkey, (uintptr_t)op->local, op->len);
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_read(qp, p->mr->rkey, (uintptr_t)op->remote);
	ibv_wr_set_sge(qp, p->mr->lkey, (uintptr_t)op->back, op->len);
	MUST(!ibv_wr_complete(qp));
}

static void post_addition(struct poster *p, struct op *op, struct lane *lane)
{
	struct ibv_sge sge = { (uintptr_t)op->back, 8, p->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = (uintptr_t)op, .sg_list = &sge, .num_sge = 1,
				  .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .send_flags = IBV_SEND_SIGNALED }, *bad;

	op->opcode = IBV_WC_FETCH_ADD;
	wr.wr.atomic.remote_addr = (uintptr_t)&lane->cell;
	wr.wr.atomic.rkey = lane->cell_mr->rkey;
	wr.wr.atomic.compare_add = 1;
	atomic_fetch_add(&lane->added, 1);
	MUST(!ibv_post_send(lane->a, &wr, &bad));
}

static void begin(struct poster *p, struct op *op)
{
	struct lane *lane = &p->group->lanes[below(&p->rng, p->group->lanes_used)];

	op->kind = below(&p->rng, KINDS);
	op->seed = next(&p->rng);
	op->len = sizeof(struct header) + 8 * below(&p->rng, op->kind == SEND_INLINE ? 6 : (SLOT - 64) / 8);
	atomic_store(&op->state, POSTED);
	if (op->kind == WRITE_AND_READ)
		post_there_and_back(p, op, lane);
	else if (op->kind == ADD)
		post_addition(p, op, lane);
	else
		post_message(p, op, lane);
}

/* Looks at what is done; gives how many operations are under way still. */
static int look(struct poster *p)
{
	int busy = 0;

	for (int i = 0; i < DEPTH; i++) {
		struct op *op = &p->ops[i];

		if (atomic_load(&op->state) == DONE) {
			MUST(op->kind != WRITE_AND_READ || holds(op->back, op->seed, op->len));
			atomic_store(&op->state, IDLE);
		}
		busy += atomic_load(&op->state) != IDLE;
	}
	return busy;
}

static void *post_and_poll(void *arg)
{
	struct poster *p = arg;
	struct group *g = p->group;

	while (!atomic_load(&over)) {
		if (++p->rounds % ROUNDS_A_REGION == 0) {
			while (look(p)) {
				take_sends(g);
				take_receives(g);
			}
			give_memory(p);
		}
		for (int i = 0; i < DEPTH; i++)
			if (atomic_load(&p->ops[i].state) == IDLE)
				begin(p, &p->ops[i]);
		take_sends(g);
		if (!g->channel || below(&p->rng, 4) == 0)
			take_receives(g);
		look(p);
	}
	while (look(p)) {
		take_sends(g);
		take_receives(g);
	}
	return NULL;
}

/* Receives of the first group, slept for. Posters take some of them away, so an event may find none. */
static void *sleep_for_receives(void *arg)
{
	struct group *g = arg;
	struct pollfd fd = { .fd = g->channel->fd, .events = POLLIN };
	struct ibv_cq *cq;
	void *context;

	while (!atomic_load(&all_in)) {
		MUST(!ibv_req_notify_cq(g->recv_cq, 0));
		while (take_receives(g))
			;
		if (poll(&fd, 1, 20) <= 0)
			continue;
		while (ibv_get_cq_event(g->channel, &cq, &context))
			MUST(errno == EINTR);
		MUST(cq == g->recv_cq && context == g);
		ibv_ack_cq_events(cq, 1);
	}
	return NULL;
}

static struct ibv_qp *lane_end(struct group *g, bool sends)
{
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_RC, .pd = g->pd, .send_cq = g->send_cq, .recv_cq = g->recv_cq,
		.srq = sends ? NULL : g->srq,
		.cap = { 2 * POSTERS * DEPTH, sends ? 1 : RECVS, 1, 1, 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &init);

	MUST(qp);
	return qp;
}

static void open_lane(struct group *g, struct lane *lane)
{
	lane->a = lane_end(g, true);
	lane->b = lane_end(g, false);
	join(lane->a, lane->b);
	lane->cell_mr = ibv_reg_mr(g->pd, &lane->cell, 8, ALL_RIGHTS);
	MUST(lane->cell_mr);
}

static void open_poster(struct group *g, struct poster *p, uint64_t seed)
{
	p->group = g;
	p->rng.state = seed;
	p->memory = calloc(3 * DEPTH, SLOT);
	MUST(p->memory);
	for (int i = 0; i < DEPTH; i++) {
		p->ops[i].local = p->memory + 3 * i * SLOT;
		p->ops[i].remote = p->ops[i].local + SLOT;
		p->ops[i].back = p->ops[i].remote + SLOT;
	}
	give_memory(p);
}

static void open_group(struct group *g, bool shared, uint64_t seed)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = RECVS, .max_sge = 1 } };

	g->lanes_used = shared ? LANES : 1;
	g->posters_used = shared ? POSTERS : 1;
	MUST((g->pd = ibv_alloc_pd(ctx)));
	if (shared) {
		MUST((g->channel = ibv_create_comp_channel(ctx)));
		MUST((g->srq = ibv_create_srq(g->pd, &init)));
	}
	MUST((g->send_cq = ibv_create_cq(ctx, 2 * RECVS, g, NULL, 0)));
	MUST((g->recv_cq = ibv_create_cq(ctx, 2 * RECVS, g, g->channel, 0)));
	MUST((g->recv_memory = calloc(RECVS, SLOT)));
	MUST((g->recv_mr = ibv_reg_mr(g->pd, g->recv_memory, RECVS * SLOT, IBV_ACCESS_LOCAL_WRITE)));
	for (unsigned i = 0; i < g->lanes_used; i++)
		open_lane(g, &g->lanes[i]);
	for (uint64_t i = 0; i < RECVS; i++)
		post_recv(g, &g->lanes[0], i);
	for (unsigned i = 0; i < g->posters_used; i++)
		open_poster(g, &g->posters[i], mix(seed + i + 1));
}

void traffic_start(uint64_t seed)
{
	for (unsigned i = 0; i < GROUPS; i++)
		open_group(&groups[i], i == 0, mix(seed ^ (i + 1) << 8));
	MUST(!pthread_create(&sleeper, NULL, sleep_for_receives, &groups[0]));
	for (unsigned i = 0; i < GROUPS; i++)
		for (unsigned j = 0; j < groups[i].posters_used; j++)
			MUST(!pthread_create(&groups[i].posters[j].thread, NULL, post_and_poll, &groups[i].posters[j]));
}

struct ibv_qp *traffic_qp(unsigned i)
{
	return i < 2 * LANES ? i % 2 ? groups[0].lanes[i / 2].b : groups[0].lanes[i / 2].a : NULL;
}

struct ibv_srq *traffic_srq(void)
{
	return groups[0].srq;
}

struct ibv_cq *traffic_cq(void)
{
	return groups[0].send_cq;
}

static void close_lane(struct group *g, struct lane *lane, unsigned long long *messages)
{
	while (atomic_load(&lane->got) < atomic_load(&lane->sent))
		take_receives(g);
	MUST(atomic_load(&lane->got) == atomic_load(&lane->sent));
	MUST(atomic_load(&lane->got_sum) == atomic_load(&lane->sent_sum));
	MUST(lane->cell == atomic_load(&lane->added));
	*messages += atomic_load(&lane->got);
}

static void close_group(struct group *g)
{
	for (unsigned i = 0; i < g->lanes_used; i++) {
		MUST(!ibv_destroy_qp(g->lanes[i].a) && !ibv_destroy_qp(g->lanes[i].b));
		MUST(!ibv_dereg_mr(g->lanes[i].cell_mr));
	}
	for (unsigned i = 0; i < g->posters_used; i++) {
		MUST(!ibv_dereg_mr(g->posters[i].mr));
		free(g->posters[i].memory);
	}
	MUST(!g->srq || !ibv_destroy_srq(g->srq));
	MUST(!ibv_destroy_cq(g->send_cq) && !ibv_destroy_cq(g->recv_cq));
	MUST(!g->channel || !ibv_destroy_comp_channel(g->channel));
	MUST(!ibv_dereg_mr(g->recv_mr) && !ibv_dealloc_pd(g->pd));
	free(g->recv_memory);
}

void traffic_tell(void)
{
	for (unsigned i = 0; i < GROUPS; i++) {
		for (unsigned j = 0; j < groups[i].lanes_used; j++) {
			struct lane *l = &groups[i].lanes[j];

			fprintf(stderr, "lane %u.%u: %llu sent, %llu received\n", i, j, l->sent, l->got);
		}
		for (unsigned j = 0; j < groups[i].posters_used; j++)
			for (unsigned k = 0; k < DEPTH; k++)
				fprintf(stderr, "poster %u.%u: operation %u of kind %u in state %u\n", i, j, k,
					groups[i].posters[j].ops[k].kind, groups[i].posters[j].ops[k].state);
	}
}

void traffic_end(void)
{
	unsigned long long messages = 0, additions = 0;

	for (unsigned i = 0; i < GROUPS; i++)
		for (unsigned j = 0; j < groups[i].posters_used; j++)
			MUST(!pthread_join(groups[i].posters[j].thread, NULL));
	for (unsigned i = 0; i < GROUPS; i++)
		for (unsigned j = 0; j < groups[i].lanes_used; j++) {
			close_lane(&groups[i], &groups[i].lanes[j], &messages);
			additions += atomic_load(&groups[i].lanes[j].added);
		}
	atomic_store(&all_in, true);
	MUST(!pthread_join(sleeper, NULL));
	for (unsigned i = 0; i < GROUPS; i++)
		close_group(&groups[i]);
	printf("traffic: %llu messages, %llu additions, each once\n", messages, additions);
}
