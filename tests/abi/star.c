/* StaR by the direct verbs: what stardv_create_qp(3), the flags of ibv_create_qp_ex(3) and
 * stardv_query_qp(3) promise, that two ends settle which of them keeps the connection, and that data
 * moves as in any RC connection.
 * Build: cc -Wall -I include -o star star.c -L dist/lib -libverbs. With an argument, that is the preference
 * which the setting STARVERBS_STAR stands for. */
#include <arpa/inet.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

#include <infiniband/stardv.h>

/* A struct of a header to come. */
struct newer {
	struct stardv_qp_init_attr known;
	uint64_t to_come;
};

enum { SIZE = 3000, HERE = 0, THERE = 4096 };

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cqs[2];
static struct ibv_mr *mr;
static uint8_t buf[8192] __attribute__((aligned(8)));

static struct ibv_qp_init_attr_ex wanted(int end, enum ibv_qp_type type)
{
	struct ibv_qp_init_attr_ex init = { .send_cq = cqs[end], .recv_cq = cqs[end], .qp_type = type, .pd = pd };

	init.comp_mask = IBV_QP_INIT_ATTR_PD;
	init.cap.max_send_wr = init.cap.max_recv_wr = 8;
	init.cap.max_send_sge = init.cap.max_recv_sge = 1;
	init.sq_sig_all = 1;
	return init;
}

static struct ibv_qp *with_role(int end, enum ibv_qp_type type, uint32_t role)
{
	struct ibv_qp_init_attr_ex init = wanted(end, type);
	struct stardv_qp_init_attr star = { .star = role };

	return stardv_create_qp(ctx, &init, &star, sizeof(star));
}

static struct ibv_qp *with_flags(int end, enum ibv_qp_type type, uint32_t flags)
{
	struct ibv_qp_init_attr_ex init = wanted(end, type);

	init.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
	init.create_flags = flags;
	return ibv_create_qp_ex(ctx, &init);
}

static struct stardv_qp_attr ask(struct ibv_qp *qp)
{
	struct stardv_qp_attr attr;

	memset(&attr, 0xee, sizeof(attr));
	attr.comp_mask = STARDV_QP_STAR;
	CHECK(!stardv_query_qp(qp, &attr, sizeof(attr)) && attr.comp_mask == STARDV_QP_STAR);
	return attr;
}

/* Made with this preference, which is then forgotten. */
static void made(struct ibv_qp *qp, uint32_t preference)
{
	CHECK(qp);
	if (!qp)
		return;
	CHECK(ask(qp).star_preference == preference);
	CHECK(ask(qp).star_role ==
	      (preference == STARDV_STAR_OFF ? STARDV_STAR_ROLE_PLAIN : STARDV_STAR_ROLE_WAITING));
	CHECK(!ibv_destroy_qp(qp));
}

#define REFUSED(create, why)                             \
	do {                                             \
		errno = 0;                               \
		CHECK(!(create) && errno == (why));      \
	} while (0)

static void preferences(uint32_t setting)
{
	struct ibv_qp_init_attr plain = { .send_cq = cqs[0], .recv_cq = cqs[0], .qp_type = IBV_QPT_RC };

	plain.cap.max_send_wr = plain.cap.max_recv_wr = 1;
	plain.cap.max_send_sge = plain.cap.max_recv_sge = 1;
	made(ibv_create_qp(pd, &plain), setting);
	made(with_role(0, IBV_QPT_RC, STARDV_STAR_DEFAULT), setting);
	made(with_flags(0, IBV_QPT_RC, 0), setting);
	for (uint32_t role = STARDV_STAR_OFF; role <= STARDV_STAR_STATEFUL; role++)
		made(with_role(0, IBV_QPT_RC, role), role);
	made(with_flags(0, IBV_QPT_RC, STARDV_QP_CREATE_STAR_OFF), STARDV_STAR_OFF);
	made(with_flags(0, IBV_QPT_RC, STARDV_QP_CREATE_AUTO), STARDV_STAR_AUTO);
	made(with_flags(0, IBV_QPT_RC, STARDV_QP_CREATE_STATELESS), STARDV_STAR_STATELESS);
	made(with_flags(0, IBV_QPT_RC, STARDV_QP_CREATE_STATEFUL), STARDV_STAR_STATEFUL);
	/* the setting is for those that can */
	made(with_role(0, IBV_QPT_UD, STARDV_STAR_DEFAULT), STARDV_STAR_OFF);
	made(with_role(0, IBV_QPT_UC, STARDV_STAR_OFF), STARDV_STAR_OFF);
}

static void refusals(void)
{
	static const enum ibv_qp_type others[] = { IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_XRC_SEND };
	struct ibv_qp_init_attr_ex init = wanted(0, IBV_QPT_RC);
	struct newer newer = { .known = { .star = STARDV_STAR_AUTO } };
	struct stardv_qp_init_attr star = { .star = STARDV_STAR_STATEFUL };
	struct stardv_qp_attr attr = { .comp_mask = STARDV_QP_STAR };
	struct ibv_qp *qp;

	for (size_t at = 0; at < sizeof(others) / sizeof(others[0]); at++) {
		REFUSED(with_role(0, others[at], STARDV_STAR_STATELESS), EOPNOTSUPP);
		REFUSED(with_flags(0, others[at], STARDV_QP_CREATE_AUTO), EOPNOTSUPP);
	}
	REFUSED(with_role(0, IBV_QPT_RC, STARDV_STAR_STATEFUL + 1), EINVAL);
	REFUSED(with_flags(0, IBV_QPT_RC, STARDV_QP_CREATE_STAR_OFF | STARDV_QP_CREATE_STATEFUL), EINVAL);
	REFUSED(with_flags(0, IBV_QPT_RC, 1U << 30), EINVAL);
	REFUSED(stardv_create_qp(NULL, &init, &star, sizeof(star)), EINVAL);
	REFUSED(stardv_create_qp(ctx, NULL, &star, sizeof(star)), EINVAL);
	REFUSED(stardv_create_qp(ctx, &init, NULL, sizeof(star)), EINVAL);
	REFUSED(stardv_create_qp(ctx, &init, &star, offsetof(struct stardv_qp_init_attr, star)), EINVAL);
	star.comp_mask = 1;
	REFUSED(stardv_create_qp(ctx, &init, &star, sizeof(star)), EOPNOTSUPP);
	star.comp_mask = 0;
	star.reserved[3] = 1;
	REFUSED(stardv_create_qp(ctx, &init, &star, sizeof(star)), EOPNOTSUPP);
	star.reserved[3] = 0;
	/* both ways at once: the same, or nothing */
	init.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
	init.create_flags = STARDV_QP_CREATE_STATELESS;
	REFUSED(stardv_create_qp(ctx, &init, &star, sizeof(star)), EINVAL);
	init.create_flags = STARDV_QP_CREATE_STATEFUL;
	made(stardv_create_qp(ctx, &init, &star, sizeof(star)), STARDV_STAR_STATEFUL);
	/* of a release to come */
	init.comp_mask = IBV_QP_INIT_ATTR_PD;
	made(stardv_create_qp(ctx, &init, &newer.known, sizeof(newer)), STARDV_STAR_AUTO);
	newer.to_come = 1;
	REFUSED(stardv_create_qp(ctx, &init, &newer.known, sizeof(newer)), EOPNOTSUPP);

	qp = with_role(0, IBV_QPT_RC, STARDV_STAR_AUTO);
	CHECK(qp && stardv_query_qp(NULL, &attr, sizeof(attr)) == EINVAL &&
	      stardv_query_qp(qp, NULL, sizeof(attr)) == EINVAL);
	CHECK(stardv_query_qp(qp, &attr, sizeof(uint64_t) - 1) == EINVAL);
	/* half a group is none */
	memset(&attr, 0xff, sizeof(attr));
	CHECK(!stardv_query_qp(qp, &attr, sizeof(attr) - 1) && !attr.comp_mask && !attr.star_preference);
	CHECK(!ibv_destroy_qp(qp));
}

static struct ibv_wc completed(int end)
{
	struct ibv_wc wc = { .status = IBV_WC_GENERAL_ERR };
	int got = 0;

	while (!got)
		got = ibv_poll_cq(cqs[end], 1, &wc);
	CHECK(got == 1 && wc.status == IBV_WC_SUCCESS);
	return wc;
}

static void post(struct ibv_qp *qp, struct ibv_send_wr wr)
{
	struct ibv_sge sge = { (uintptr_t)buf + HERE, SIZE, mr->lkey };
	struct ibv_send_wr *bad;

	if (wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		sge.length = 8;
		wr.wr.atomic.remote_addr = (uintptr_t)buf + THERE;
		wr.wr.atomic.rkey = mr->rkey;
	} else {
		wr.wr.rdma.remote_addr = (uintptr_t)buf + THERE;
		wr.wr.rdma.rkey = mr->rkey;
	}
	wr.sg_list = &sge;
	wr.num_sge = 1;
	CHECK(!ibv_post_send(qp, &wr, &bad));
}

/* Every operation from `from` to the other. */
static void talk(struct ibv_qp *qps[2], int from)
{
	struct ibv_sge into = { (uintptr_t)buf + THERE, SIZE, mr->lkey };
	struct ibv_recv_wr recv = { .wr_id = 5, .sg_list = &into, .num_sge = 1 }, *bad;
	uint64_t before;
	struct ibv_wc wc;

	for (int at = 0; at < SIZE; at++) {
		buf[HERE + at] = (uint8_t)(at * 7 + from);
		buf[THERE + at] = 0;
	}
	CHECK(!ibv_post_recv(qps[!from], &recv, &bad));
	post(qps[from], (struct ibv_send_wr){ .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htonl(77) });
	completed(from);
	wc = completed(!from);
	CHECK(wc.wr_id == 5 && wc.byte_len == SIZE && wc.opcode == IBV_WC_RECV && ntohl(wc.imm_data) == 77);
	CHECK((wc.wc_flags & IBV_WC_WITH_IMM) && wc.qp_num == qps[!from]->qp_num &&
	      !memcmp(buf + HERE, buf + THERE, SIZE));

	buf[HERE] ^= 0xff;
	post(qps[from], (struct ibv_send_wr){ .opcode = IBV_WR_RDMA_WRITE });
	CHECK(completed(from).opcode == IBV_WC_RDMA_WRITE && !memcmp(buf + HERE, buf + THERE, SIZE));
	buf[THERE + 8] ^= 0xff;
	post(qps[from], (struct ibv_send_wr){ .opcode = IBV_WR_RDMA_READ });
	CHECK(completed(from).opcode == IBV_WC_RDMA_READ && !memcmp(buf + HERE, buf + THERE, SIZE));
	memcpy(&before, buf + THERE, 8);
	post(qps[from], (struct ibv_send_wr){ .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .wr.atomic.compare_add = 3 });
	CHECK(completed(from).opcode == IBV_WC_FETCH_ADD && !memcmp(buf + HERE, &before, 8));
	before += 3;
	CHECK(!memcmp(buf + THERE, &before, 8));
}

/* Two ends with these preferences become this. */
static void settle(struct ibv_qp *a, struct ibv_qp *b, uint32_t role_a, uint32_t role_b)
{
	struct ibv_qp *qps[2] = { a, b };
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	struct stardv_qp_attr attrs[2];

	CHECK(a && b);
	if (!a || !b)
		return;
	CHECK(!connect_rc(a, b->qp_num) && !connect_rc(b, a->qp_num));
	talk(qps, 0);
	talk(qps, 1);
	for (int at = 0; at < 2; at++)
		attrs[at] = ask(qps[at]);
	CHECK(attrs[0].star_role == role_a && attrs[1].star_role == role_b);
	for (int at = 0; at < 2; at++) {
		int stateless = attrs[at].star_role == STARDV_STAR_ROLE_STATELESS;

		CHECK((attrs[at].star_card_bytes == 0) == stateless && (attrs[at].star_host_bytes != 0) == stateless);
	}
	CHECK(!ibv_modify_qp(a, &reset, IBV_QP_STATE) && !ibv_modify_qp(b, &reset, IBV_QP_STATE));
	for (int at = 0; at < 2; at++) {
		int off = attrs[at].star_preference == STARDV_STAR_OFF;
		uint32_t fresh = off ? STARDV_STAR_ROLE_PLAIN : STARDV_STAR_ROLE_WAITING;

		CHECK(ask(qps[at]).star_role == fresh);
	}
	/* and anew */
	CHECK(!connect_rc(b, a->qp_num) && !connect_rc(a, b->qp_num));
	talk(qps, 1);
	CHECK(ask(a).star_role == role_a && ask(b).star_role == role_b);
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b));
}

static void roles(void)
{
	const uint32_t plain = STARDV_STAR_ROLE_PLAIN, sl = STARDV_STAR_ROLE_STATELESS,
		sf = STARDV_STAR_ROLE_STATEFUL;

	settle(with_role(0, IBV_QPT_RC, STARDV_STAR_STATELESS), with_role(1, IBV_QPT_RC, STARDV_STAR_STATEFUL), sl,
		sf);
	settle(with_flags(0, IBV_QPT_RC, STARDV_QP_CREATE_STATEFUL),
		with_flags(1, IBV_QPT_RC, STARDV_QP_CREATE_AUTO), sf, sl);
	settle(with_flags(0, IBV_QPT_RC, STARDV_QP_CREATE_AUTO), with_role(1, IBV_QPT_RC, STARDV_STAR_STATEFUL), sl,
		sf);
	settle(with_role(0, IBV_QPT_RC, STARDV_STAR_AUTO), with_role(1, IBV_QPT_RC, STARDV_STAR_AUTO), plain, plain);
	settle(with_role(0, IBV_QPT_RC, STARDV_STAR_STATELESS), with_role(1, IBV_QPT_RC, STARDV_STAR_STATELESS),
		plain, plain);
	settle(with_role(0, IBV_QPT_RC, STARDV_STAR_STATELESS), with_role(1, IBV_QPT_RC, STARDV_STAR_OFF), plain,
		plain);
}

static void in_a_child(void)
{
	struct ibv_qp *qp = with_role(0, IBV_QPT_RC, STARDV_STAR_AUTO);
	struct stardv_qp_attr attr = { .comp_mask = STARDV_QP_STAR };
	int status = -1;
	pid_t child = fork();

	if (!child)
		_exit(stardv_query_qp(qp, &attr, sizeof(attr)) != EIO);
	CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
	CHECK(!ibv_destroy_qp(qp));
}

int main(int argc, char **argv)
{
	struct ibv_device **devs = ibv_get_device_list(NULL);
	uint32_t setting = argc > 1 ? (uint32_t)atoi(argv[1]) : STARDV_STAR_OFF;

	alarm(60);
	ctx = devs && devs[0] ? ibv_open_device(devs[0]) : NULL;
	pd = ctx ? ibv_alloc_pd(ctx) : NULL;
	for (int at = 0; at < 2 && pd; at++)
		cqs[at] = ibv_create_cq(ctx, 16, NULL, NULL, 0);
	mr = pd ? ibv_reg_mr(pd, buf, sizeof(buf), 0xf) : NULL;
	if (!mr || !cqs[0] || !cqs[1]) {
		fprintf(stderr, "no card\n");
		return 1;
	}
	preferences(setting);
	refusals();
	roles();
	in_a_child();
	CHECK(!ibv_dereg_mr(mr) && !ibv_destroy_cq(cqs[0]) && !ibv_destroy_cq(cqs[1]) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(ctx));
	ibv_free_device_list(devs);
	printf("star%s%s: %s\n", argc > 1 ? " with a setting" : "",
	       getenv("STARVERBS_STAR_KEY") ? " under a key" : "", failures ? "FAILED" : "ok");
	return !!failures;
}
