/* kill -9 of one of two processes at random moments in the middle of what they do together: RC with SENDs,
 * WRITEs, READs and additions, a shared receive queue, UC, RPCs and streams that run kernels, XRC, UD,
 * multicast, imported memory. The other gets what it must get in bounded time, and its card is as good as
 * new; a pair beside them works all the while. usage: kill [KILLS [SEED]] */
#include "faults.h"
#include <dlfcn.h>
#include <stddef.h>
#include <infiniband/stardv.h>
#include <sys/mman.h>
#include <sys/uio.h>

enum what { RC, SHARED, UC, RPC, XRC, UD, MULTICAST, IMPORTED, KINDS };
static const char *const names[] = { "RC", "RC, shared receive queue", "UC", "RPC", "XRC", "UD", "multicast",
	"imported memory" };
/* Op-codes of RPCs and of RPC WRITEs. */
enum { OP_GET = 1, OP_HLL = 2 };
enum { QKEY = 0x11111111, GROUP = 239 << 24 | 77 << 16 | 5 };

/* Of the process that a role is run in; shared memory tells the parent how far it is. */
static enum what what;
static struct shared {
	volatile long steps[2];
	volatile int killed;
	volatile long bystander;
} *shared;

/* More than one queue pair. */
struct ends {
	struct side s;
	struct ibv_srq *srq;
	struct ibv_xrcd *xrcd;
	struct ibv_ah *ah;
};

/* What is sent to a peer beside `struct peer`. */
struct more {
	struct peer p;
	uint32_t srq, pd, mr;
};

static void need_still_good(struct ends *e)
{
	struct side again = e->s;
	struct peer self;

	NEED(again.cq = ibv_create_cq(again.ctx, 16, NULL, NULL, 0));
	NEED(again.qp = make_qp(&again, IBV_QPT_RC));
	self = describe(&again, again.qp);
	NEED(connect_to(again.qp, &self, 14, 7) == 0);
	for (int i = 0; i < 20; i++)
		NEED(one(&again, &self) == IBV_WC_SUCCESS);
	NEED(ibv_destroy_qp(again.qp) == 0 && ibv_destroy_cq(again.cq) == 0);
}

static void *named(const char *name)
{
	void *function = dlvsym(RTLD_DEFAULT, name, "STARDV_1.0");

	NEED(function);
	return function;
}

/* One that carries RPCs; the peer's run a kernel. */
static struct ibv_qp *rpc_qp(struct ends *e, int active)
{
	struct ibv_qp_init_attr_ex i = { .qp_type = IBV_QPT_RC, .send_cq = e->s.cq, .recv_cq = e->s.cq,
					 .pd = e->s.pd, .cap = { DEPTH, DEPTH, 2, 2, 64 },
					 .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS,
					 .create_flags = STARDV_QP_CREATE_RPC };
	__typeof__(stardv_load_kernel) *load = named("stardv_load_kernel");

	NEED(active || load(e->s.pd, OP_GET, STARDV_KERNEL_GET) == 0);
	NEED(active || load(e->s.pd, OP_HLL, STARDV_KERNEL_HLL) == 0);
	return ibv_create_qp_ex(e->s.ctx, &i);
}

static struct ibv_qp *xrc_qp(struct ends *e, int sends)
{
	struct ibv_qp_init_attr_ex i = { .qp_type = sends ? IBV_QPT_XRC_SEND : IBV_QPT_XRC_RECV };

	if (sends) {
		i.comp_mask = IBV_QP_INIT_ATTR_PD;
		i.pd = e->s.pd;
		i.send_cq = e->s.cq;
		i.cap = (struct ibv_qp_cap){ .max_send_wr = DEPTH, .max_send_sge = 1 };
	} else {
		i.comp_mask = IBV_QP_INIT_ATTR_XRCD;
		i.xrcd = e->xrcd;
	}
	return ibv_create_qp_ex(e->s.ctx, &i);
}

/* The objects of this kind. */
static void prepare(struct ends *e, int active)
{
	struct side *s = &e->s;

	open_side(s);
	if (what == SHARED && !active) {
		struct ibv_srq_init_attr i = { .attr = { DEPTH, 1, 0 } };
		struct ibv_qp_init_attr q = { .send_cq = s->cq, .recv_cq = s->cq, .qp_type = IBV_QPT_RC,
					      .cap = { DEPTH, 0, 1, 0, 0 } };

		NEED(ibv_destroy_qp(s->qp) == 0 && (e->srq = ibv_create_srq(s->pd, &i)));
		q.srq = e->srq;
		NEED(s->qp = ibv_create_qp(s->pd, &q));
	}
	if (what == UC)
		NEED(ibv_destroy_qp(s->qp) == 0 && (s->qp = make_qp(s, IBV_QPT_UC)));
	if (what == RPC)
		NEED(ibv_destroy_qp(s->qp) == 0 && (s->qp = rpc_qp(e, active)));
	if (what == XRC) {
		struct ibv_xrcd_init_attr x = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
						.oflags = O_CREAT };
		struct ibv_srq_init_attr_ex i = { .attr = { DEPTH, 1, 0 }, .srq_type = IBV_SRQT_XRC, .pd = s->pd,
						  .cq = s->cq, .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
							       IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_XRCD };

		NEED(ibv_destroy_qp(s->qp) == 0 && (e->xrcd = ibv_open_xrcd(s->ctx, &x)));
		i.xrcd = e->xrcd;
		if (!active)
			NEED(e->srq = ibv_create_srq_ex(s->ctx, &i));
		NEED(s->qp = xrc_qp(e, active));
	}
	if (what == UD || what == MULTICAST) {
		struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };

		NEED(ibv_destroy_qp(s->qp) == 0 && (s->qp = make_qp(s, IBV_QPT_UD)));
		NEED(ibv_modify_qp(s->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
		a.qp_state = IBV_QPS_RTR;
		NEED(ibv_modify_qp(s->qp, &a, IBV_QP_STATE) == 0);
		a.qp_state = IBV_QPS_RTS;
		NEED(ibv_modify_qp(s->qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
	}
}

static union ibv_gid group(void)
{
	union ibv_gid gid = { .raw = { [10] = 0xff, [11] = 0xff, GROUP >> 24, GROUP >> 16 & 255, GROUP >> 8 & 255,
		GROUP & 255 } };

	return gid;
}

static void receive(struct ends *e)
{
	struct ibv_sge sge = { (uintptr_t)e->s.buffer + BYTES, BYTES, e->s.mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1, .wr_id = 1000 }, *bad;

	NEED((e->srq ? ibv_post_srq_recv(e->srq, &wr, &bad) : ibv_post_recv(e->s.qp, &wr, &bad)) == 0);
}

/* Polls; receives go back, completions of sends are counted in `done`, by status in `last`. */
static void poll_some(struct ends *e, int *done, int *last)
{
	struct ibv_wc wc[8];
	int n = ibv_poll_cq(e->s.cq, 8, wc);

	NEED(n >= 0);
	for (int i = 0; i < n; i++) {
		if (wc[i].wr_id == 1000) {
			if (wc[i].status == IBV_WC_SUCCESS)
				receive(e);
			continue;
		}
		++*done;
		if (wc[i].status != IBV_WC_SUCCESS && (*last == IBV_WC_SUCCESS || *last == (int)wc[i].status))
			*last = wc[i].status;
	}
}

/* Looks for a key that the peer's memory has not. */
static void call_one(struct ends *e, const struct more *m)
{
	struct {
		struct stardv_rpc_target target;
		struct stardv_get get;
	} params = { { htole64((uintptr_t)e->s.buffer), htole32(e->s.mr->rkey),
		       htole32(sizeof(struct stardv_rpc_record)), 0, 0 },
		     { htole64(m->p.addr), htole64(7), htole32(1), htole32(m->p.rkey), htole32(m->p.rkey),
		       htole32(1) } };
	struct ibv_sge sge = { (uintptr_t)&params, sizeof(params), 0 };
	struct stardv_rpc_wr wr = { .op = OP_GET, .sg_list = &sge, .num_sge = 1,
				    .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE };
	__typeof__(stardv_post_rpc) *post_rpc = named("stardv_post_rpc");

	NEED(post_rpc(e->s.qp, &wr, sizeof(wr)) == 0);
}

/* Items of four bytes for a sketch, many packets of them. */
static void stream_one(struct ends *e, long n)
{
	struct ibv_sge sge = { (uintptr_t)e->s.buffer, 4 * (1 + n * 977 % (BYTES / 4)), e->s.mr->lkey };
	struct stardv_rpc_wr wr = { .op = OP_HLL, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED };
	__typeof__(stardv_post_rpc_write) *post_rpc_write = named("stardv_post_rpc_write");

	NEED(post_rpc_write(e->s.qp, &wr, sizeof(wr)) == 0);
}

static void send_one(struct ends *e, const struct more *m, long n)
{
	struct ibv_sge sge = { (uintptr_t)e->s.buffer, 1 + n * 977 % 3000, e->s.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED }, *bad;

	if (what == UD || what == MULTICAST) {
		wr.wr.ud.ah = e->ah;
		wr.wr.ud.remote_qpn = what == UD ? m->p.qpn : 0xffffff;
		wr.wr.ud.remote_qkey = QKEY;
		sge.length %= 1000;
	} else {
		static const enum ibv_wr_opcode ops[] = { IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ,
							  IBV_WR_ATOMIC_FETCH_AND_ADD };

		if (what == RPC && n % 4 == 3)
			return n % 8 == 3 ? call_one(e, m) : stream_one(e, n);
		wr.opcode = ops[n % (what == UC ? 2 : 4)];
		wr.qp_type.xrc.remote_srqn = m->srq;
		wr.wr.rdma.remote_addr = m->p.addr + BYTES;
		wr.wr.rdma.rkey = m->p.rkey;
		if (wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			sge.length = 8;
			wr.wr.atomic.remote_addr = m->p.addr;
			wr.wr.atomic.compare_add = 1;
			wr.wr.atomic.rkey = m->p.rkey;
		}
	}
	NEED(ibv_post_send(e->s.qp, &wr, &bad) == 0);
}

/* The messages of every kind but imports. The survivor goes on until it has seen what it must see. */
static void talk(int fd, int active)
{
	static struct ends e;
	struct more mine = {0}, m;
	int datagrams = what == UD || what == MULTICAST, sends = active || datagrams;
	/* requests fail whose peer is gone */
	int fails = active && !datagrams && what != UC;
	int last = IBV_WC_SUCCESS, after = 0, sent = 0, done = 0;

	prepare(&e, active);
	mine.p = describe(&e.s, e.s.qp);
	if (what == XRC && e.srq)
		NEED(ibv_get_srq_num(e.srq, &mine.srq) == 0);
	NEED(write(fd, &mine, sizeof(mine)) == sizeof(mine));
	NEED(recv(fd, &m, sizeof(m), MSG_WAITALL) == sizeof(m));
	if (datagrams) {
		struct ibv_ah_attr a = { .is_global = 1, .port_num = 1, .grh = { .dgid = what == UD ? m.p.gid : group(),
										 .hop_limit = 1 } };

		NEED(e.ah = ibv_create_ah(e.s.pd, &a));
		if (what == MULTICAST) {
			union ibv_gid gid = group();

			NEED(ibv_attach_mcast(e.s.qp, &gid, 0) == 0);
		}
	} else {
		NEED(connect_to(e.s.qp, &m.p, 10, 3) == 0);
	}
	for (int i = 0; i < DEPTH && !(what == XRC && active); i++)
		receive(&e);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	while (last == IBV_WC_SUCCESS && (!shared->killed || after < 500)) {
		if (sends && sent - done < 16)
			send_one(&e, &m, sent++);
		poll_some(&e, &done, &last);
		shared->steps[active]++;
		/* of a peer that is gone, those who do not wait for answers await_byte nothing */
		after += shared->killed && !fails;
	}
	if (fails) {
		/* the peer may have been killed before it agreed to carry RPCs */
		NEED(last == IBV_WC_RETRY_EXC_ERR || (what == RPC && last == IBV_WC_LOC_QP_OP_ERR));
		while (done < sent)
			poll_some(&e, &done, &last);
	} else {
		NEED(last == IBV_WC_SUCCESS);
	}
	need_still_good(&e);
	if (what == MULTICAST) {
		union ibv_gid gid = group();

		NEED(ibv_detach_mcast(e.s.qp, &gid, 0) == 0);
	}
	NEED(ibv_destroy_qp(e.s.qp) == 0 && (!e.srq || ibv_destroy_srq(e.srq) == 0));
	NEED((!e.xrcd || ibv_close_xrcd(e.xrcd) == 0) && (!e.ah || ibv_destroy_ah(e.ah) == 0));
	if (what == RPC && !active) {
		__typeof__(stardv_unload_kernel) *unload = named("stardv_unload_kernel");

		NEED(unload(e.s.pd, OP_GET) == 0 && unload(e.s.pd, OP_HLL) == 0);
	}
	NEED(ibv_dereg_mr(e.s.mr) == 0 && ibv_destroy_cq(e.s.cq) == 0 && ibv_dealloc_pd(e.s.pd) == 0);
	NEED(ibv_close_device(e.s.ctx) == 0);
}

/* Hands a descriptor over. */
static void pass_fd(int to, int fd)
{
	union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } room;
	char byte = 'f';
	struct iovec iov = { &byte, 1 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &room, .msg_controllen = sizeof(room) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);

	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(c), &fd, sizeof(fd));
	NEED(sendmsg(to, &m, MSG_NOSIGNAL) == 1);
}

static int take_fd(int from)
{
	union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } room;
	char byte;
	struct iovec iov = { &byte, 1 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &room, .msg_controllen = sizeof(room) };
	int fd;

	NEED(recvmsg(from, &m, MSG_WAITALL) == 1 && CMSG_FIRSTHDR(&m));
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof(fd));
	return fd;
}

/* The exporter registers and deregisters a second region all the time, which
 * waits for importers under way. */
static void export(int fd)
{
	static struct ends e;
	struct more mine = {0};
	int after = 0;

	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
	prepare(&e, 0);
	mine.p = describe(&e.s, e.s.qp);
	mine.pd = e.s.pd->handle;
	mine.mr = e.s.mr->handle;
	NEED(write(fd, &mine, sizeof(mine)) == sizeof(mine));
	pass_fd(fd, e.s.ctx->cmd_fd);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	while (after < 200) {
		struct ibv_mr *mr = ibv_reg_mr(e.s.pd, e.s.buffer, BYTES, 0xf);

		NEED(mr && ibv_dereg_mr(mr) == 0);
		shared->steps[0]++;
		after += shared->killed;
	}
	NEED(ibv_destroy_qp(e.s.qp) == 0 && ibv_dereg_mr(e.s.mr) == 0);
	NEED(e.s.mr = ibv_reg_mr(e.s.pd, e.s.buffer, 2 * BYTES, 0xf));
	need_still_good(&e);
}

/* The importer writes from the exporter's memory into its own, through a connection of its own. */
static void import(int fd)
{
	static struct ends e;
	struct more m;
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct side s;
	struct peer self;
	int status = IBV_WC_SUCCESS;

	NEED(recv(fd, &m, sizeof(m), MSG_WAITALL) == sizeof(m));
	prepare(&e, 1);
	NEED((ctx = ibv_import_device(take_fd(fd))) && (pd = ibv_import_pd(ctx, m.pd)) &&
	     (mr = ibv_import_mr(pd, m.mr)));
	s = e.s;
	s.pd = pd;
	s.ctx = ctx;
	NEED(s.cq = ibv_create_cq(ctx, 64, NULL, NULL, 0));
	NEED(s.mr = ibv_reg_mr(pd, e.s.buffer, 2 * BYTES, 0xf));
	NEED(s.qp = make_qp(&s, IBV_QPT_RC));
	self = describe(&s, s.qp);
	NEED(connect_to(s.qp, &self, 14, 7) == 0);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	while (status == IBV_WC_SUCCESS) {
		struct ibv_sge sge = { m.p.addr, 20000, mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
					  .send_flags = IBV_SEND_SIGNALED }, *bad;
		struct ibv_wc wc;

		wr.wr.rdma.remote_addr = self.addr;
		wr.wr.rdma.rkey = self.rkey;
		NEED(ibv_post_send(s.qp, &wr, &bad) == 0);
		status = next_status(&s, &wc);
		shared->steps[1]++;
	}
	/* the memory went with its owner, as if it had been deregistered */
	while (!shared->killed)
		nap(1);
	NEED(status == IBV_WC_LOC_PROT_ERR);
	ibv_unimport_mr(mr);
	NEED(ibv_destroy_qp(s.qp) == 0 && ibv_dereg_mr(s.mr) == 0 && ibv_destroy_cq(s.cq) == 0);
	ibv_unimport_pd(pd);
	NEED(ibv_close_device(ctx) == 0);
	need_still_good(&e);
}

static void active(int fd) { what == IMPORTED ? import(fd) : talk(fd, 1); }
static void passive(int fd) { what == IMPORTED ? export(fd) : talk(fd, 0); }

/* Carries what the two tell each other until both are connected. */
static void acquaint(const int *fds)
{
	struct more m[2];

	NEED(recv(fds[0], &m[0], sizeof(m[0]), MSG_WAITALL) == sizeof(m[0]));
	NEED(write(fds[1], &m[0], sizeof(m[0])) == sizeof(m[0]));
	if (what == IMPORTED) {
		int fd = take_fd(fds[0]);

		pass_fd(fds[1], fd);
		close(fd);
	} else {
		NEED(recv(fds[1], &m[1], sizeof(m[1]), MSG_WAITALL) == sizeof(m[1]));
		NEED(write(fds[0], &m[1], sizeof(m[1])) == sizeof(m[1]));
	}
	let_go(fds);
}

/* Works without an end. */
static void bystander(int fd)
{
	static struct side s;
	struct peer p;

	open_side(&s);
	p = swap(fd, &s);
	NEED(connect_to(s.qp, &p, 16, 7) == 0);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	for (;;) {
		NEED(one(&s, &p) == IBV_WC_SUCCESS);
		shared->bystander++;
	}
}

/* The others of a pair, held by one socket each. */
static void bystanders(pid_t *pids, int *fds)
{
	for (int i = 0; i < 2; i++)
		pids[i] = start(bystander, &fds[i]);
	introduce(fds);
}

static void kill_one(enum what kind, int victim, long moment)
{
	int fds[2];
	pid_t pids[2];
	long before;

	what = kind;
	memset((void *)shared, 0, offsetof(struct shared, bystander));
	for (int i = 0; i < 2; i++)
		pids[i] = start(i ? active : passive, &fds[i]);
	acquaint(fds);
	while (shared->steps[0] == 0 || shared->steps[1] == 0)
		nap(1);
	usleep((useconds_t)moment);
	NEED(kill(pids[victim], SIGKILL) == 0 && waitpid(pids[victim], NULL, 0) == pids[victim]);
	shared->killed = 1;
	before = shared->bystander;
	if (!ended_well(pids[!victim])) {
		failures++;
		fprintf(stderr, "%s: the %s end killed after %ld us\n", names[kind], victim ? "active" : "passive", moment);
	}
	while (shared->bystander < before + 10)
		nap(1);
	close(fds[0]);
	close(fds[1]);
}

int main(int argc, char **argv)
{
	int kills = argc > 1 ? atoi(argv[1]) : 24, fds[2];
	unsigned int seed = argc > 2 ? (unsigned int)atoi(argv[2]) : 1;
	pid_t pids[2];

	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm((unsigned int)(60 + 3 * kills));
	NEED((shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) != MAP_FAILED);
	bystanders(pids, fds);
	srand(seed);
	for (int i = 0; i < kills; i++)
		kill_one(i % KINDS, i / KINDS % 2, rand() % (1 << rand() % 17));
	for (int i = 0; i < 2; i++)
		NEED(kill(pids[i], SIGKILL) == 0 && waitpid(pids[i], NULL, 0) == pids[i]);
	printf("%d kills, seed %u: %ld messages beside them\n", kills, seed, shared->bystander);
	return failures != 0;
}
