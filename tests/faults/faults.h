/* What the programs here share: processes that each have a card of their own, RC connections between them,
 * and what comes of one operation. A limit on everything is the alarm: nothing here may take for ever. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../abi/check.h"

enum { BYTES = 1 << 16, DEPTH = 64, NOTHING = -1 };

/* A process's end of a connection. */
struct side {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	char *buffer;
};

/* What the other end must know. */
struct peer {
	uint32_t qpn, rkey;
	uint64_t addr;
	union ibv_gid gid;
};

/* Ends the program with its line number. */
#define NEED(what)                                                                              \
	do {                                                                                    \
		errno = 0;                                                                      \
		if (!(what)) {                                                                  \
			fprintf(stderr, "%s line %d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno); \
			_exit(1);                                                               \
		}                                                                               \
	} while (0)

/* Milliseconds by the kernel's clock, whatever a shim makes of clock_gettime. */
__attribute__((unused)) static long now_ms(void)
{
	struct timespec t;

	syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* A nap by the kernel's clock. */
__attribute__((unused)) static void nap(long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };

	while (syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &t, &t) != 0)
		;
}

__attribute__((unused)) static struct ibv_qp *make_qp(struct side *s, enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = { .send_cq = s->cq, .recv_cq = s->cq, .qp_type = type,
					 .cap = { DEPTH, DEPTH, 2, 2, 64 } };

	return ibv_create_qp(s->pd, &init);
}

/* The card of this process, and a queue pair of it. */
__attribute__((unused)) static void open_side(struct side *s)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	NEED(list && list[0]);
	NEED(s->ctx = ibv_open_device(list[0]));
	ibv_free_device_list(list);
	NEED(s->pd = ibv_alloc_pd(s->ctx));
	NEED(s->cq = ibv_create_cq(s->ctx, 4 * DEPTH, NULL, NULL, 0));
	NEED(s->buffer = calloc(2, BYTES));
	NEED(s->mr = ibv_reg_mr(s->pd, s->buffer, 2 * BYTES, 0xf));
	NEED(s->qp = make_qp(s, IBV_QPT_RC));
}

__attribute__((unused)) static struct peer describe(const struct side *s, const struct ibv_qp *qp)
{
	struct peer p = { qp->qp_num, s->mr->rkey, (uintptr_t)s->buffer, {{0}} };

	NEED(ibv_query_gid(s->ctx, 1, 0, &p.gid) == 0);
	return p;
}

/* To RTS, with the local ACK timeout and retries given, which UC has not. */
__attribute__((unused)) static int connect_to(struct ibv_qp *qp, const struct peer *p, int timeout,
	int retries)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 0xf,
				 .path_mtu = IBV_MTU_1024, .dest_qp_num = p->qpn, .max_dest_rd_atomic = 4, .min_rnr_timer = 12,
				 .timeout = timeout, .retry_cnt = retries, .rnr_retry = 7, .max_rd_atomic = 4 };
	const int reliable = qp->qp_type != IBV_QPT_UC;
	int ret;

	a.ah_attr.is_global = 1;
	a.ah_attr.port_num = 1;
	a.ah_attr.grh.hop_limit = 64;
	a.ah_attr.grh.dgid = p->gid;
	ret = ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	a.qp_state = IBV_QPS_RTR;
	ret = ret ? ret : ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
					IBV_QP_RQ_PSN |
					(reliable ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0));
	a.qp_state = IBV_QPS_RTS;
	return ret ? ret : ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN |
					 (reliable ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
						     IBV_QP_MAX_QP_RD_ATOMIC : 0));
}

/* Swaps descriptions over a socket. */
__attribute__((unused)) static struct peer swap(int fd, const struct side *s)
{
	struct peer mine = describe(s, s->qp), other;

	NEED(write(fd, &mine, sizeof(mine)) == sizeof(mine));
	NEED(recv(fd, &other, sizeof(other), MSG_WAITALL) == sizeof(other));
	return other;
}

/* One signalled operation on `bytes`; 0 or the errno. */
__attribute__((unused)) static int post(struct side *s, const struct peer *p, enum ibv_wr_opcode op,
	uint32_t bytes, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)s->buffer, bytes, s->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = op,
			   .send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.wr.rdma.remote_addr = p->addr + BYTES;
	wr.wr.rdma.rkey = p->rkey;
	return ibv_post_send(s->qp, &wr, &bad);
}

__attribute__((unused)) static int post_recv(struct side *s, struct ibv_qp *qp)
{
	struct ibv_sge sge = { (uintptr_t)s->buffer + BYTES, BYTES, s->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	return ibv_post_recv(qp, &wr, &bad);
}

/* Status of the next completion, which comes before the alarm. */
__attribute__((unused)) static int next_status(struct side *s, struct ibv_wc *wc)
{
	int n;

	while ((n = ibv_poll_cq(s->cq, 1, wc)) == 0)
		;
	NEED(n == 1);
	return wc->status;
}

/* Status of one WRITE to the peer. */
__attribute__((unused)) static int one(struct side *s, const struct peer *p)
{
	struct ibv_wc wc;

	NEED(post(s, p, IBV_WR_RDMA_WRITE, 4096, 1) == 0);
	return next_status(s, &wc);
}

/* A process that runs `role` with one end of a socket, and dies with its
 * parent; the parent's end is given. */
__attribute__((unused)) static pid_t start(void (*role)(int fd), int *end)
{
	int ends[2];
	pid_t pid;

	NEED(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
	NEED((pid = fork()) >= 0);
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(ends[0]);
		failures = 0;
		alarm(1800);
		role(ends[1]);
		_exit(failures != 0);
	}
	close(ends[1]);
	*end = ends[0];
	return pid;
}

__attribute__((unused)) static char await_byte(int fd)
{
	char c = 0;

	return read(fd, &c, 1) == 1 ? c : 0;
}

__attribute__((unused)) static void say(int fd, char c)
{
	NEED(send(fd, &c, 1, MSG_NOSIGNAL) == 1);
}

/* Two processes that have connected go on. */
__attribute__((unused)) static void let_go(const int *fds)
{
	for (int i = 0; i < 2; i++)
		NEED(await_byte(fds[i]) == 'c');
	for (int i = 0; i < 2; i++)
		say(fds[i], 'g');
}

/* Carries what two processes tell each other (`swap`), and lets them go. */
__attribute__((unused)) static void introduce(const int *fds)
{
	struct peer p[2];

	for (int i = 0; i < 2; i++)
		NEED(recv(fds[i], &p[i], sizeof(p[i]), MSG_WAITALL) == sizeof(p[i]));
	for (int i = 0; i < 2; i++)
		NEED(write(fds[i], &p[!i], sizeof(p[i])) == sizeof(p[i]));
	let_go(fds);
}

/* Whether a process ended well. */
__attribute__((unused)) static int ended_well(pid_t pid)
{
	int status = -1;

	NEED(waitpid(pid, &status, 0) == pid);
	return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}
