/* fork(2), from C: a child cannot use its parent's objects and harms nothing by ending them; it may open the
 * card anew; and it holds nothing of a killed parent's that peers see.
 * Build: cc -Wall -o fork fork.c -libverbs; run with LD_LIBRARY_PATH naming the library under test. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

struct card {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_qp *a, *b;
};

static char buf[4096];

static struct card open_card(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct card c = { .ctx = ibv_open_device(list[0]) };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };

	ibv_free_device_list(list);
	c.pd = ibv_alloc_pd(c.ctx);
	init.send_cq = init.recv_cq = c.cq = ibv_create_cq(c.ctx, 16, NULL, NULL, 0);
	c.mr = ibv_reg_mr(c.pd, buf, sizeof(buf), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	c.a = ibv_create_qp(c.pd, &init);
	c.b = ibv_create_qp(c.pd, &init);
	CHECK(c.mr && c.a && c.b && !connect_rc(c.a, c.b->qp_num) && !connect_rc(c.b, c.a->qp_num));
	return c;
}

static int post(struct card *c)
{
	struct ibv_sge sge = { (uintptr_t)buf, 64, c->mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)buf + 1024;
	wr.wr.rdma.rkey = c->mr->rkey;
	return ibv_post_send(c->a, &wr, &bad);
}

static void works(struct card *c)
{
	struct ibv_wc wc;

	CHECK(!post(c));
	while (!ibv_poll_cq(c->cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS);
}

static void close_card(struct card *c)
{
	CHECK(!ibv_destroy_qp(c->a) && !ibv_destroy_qp(c->b) && !ibv_dereg_mr(c->mr) && !ibv_destroy_cq(c->cq));
	CHECK(!ibv_dealloc_pd(c->pd) && !ibv_close_device(c->ctx));
}

/* The parent's objects are of no use in a child. */
static void child_of(struct card *c)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_async_event event;
	struct ibv_wc wc;

	CHECK(post(c) == EIO && ibv_poll_cq(c->cq, 1, &wc) < 0 && ibv_req_notify_cq(c->cq, 0) == EIO);
	CHECK(ibv_modify_qp(c->a, &attr, IBV_QP_STATE) == EIO && !ibv_alloc_pd(c->ctx) && errno == EIO);
	CHECK(!ibv_create_cq(c->ctx, 4, NULL, NULL, 0) && errno == EIO);
	CHECK(!ibv_create_comp_channel(c->ctx) && errno == EIO);
	CHECK(ibv_get_async_event(c->ctx, &event) == -1 && errno == EIO);
	CHECK(ibv_destroy_qp(c->a) == EIO && ibv_dereg_mr(c->mr) == EIO && ibv_destroy_cq(c->cq) != 0);
	CHECK(ibv_dealloc_pd(c->pd) == EIO && !ibv_close_device(c->ctx));
}

static void children(void)
{
	struct card c = open_card();
	int round, status;

	CHECK(!ibv_fork_init());
	for (round = 0; round < 3; round++) {
		pid_t child = fork();

		if (!child) {
			alarm(30);
			if (round == 1)
				child_of(&c);
			if (round == 2) {
				struct card own = open_card();

				works(&own);
				close_card(&own);
			}
			exit(failures != 0);
		}
		works(&c);
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		works(&c);
	}
	close_card(&c);
}

/* Whether some process holds the name of a queue pair number's block. */
static int held(uint32_t qpn)
{
	char line[512], name[64];
	FILE *names = fopen("/proc/net/unix", "r");
	const char *port = getenv("STARVERBS_PORT");
	int found = 0;

	if (port && strcmp(port, "4791"))
		snprintf(name, sizeof(name), "@starverbs/%s/qpn/%u\n", port, qpn >> 12);
	else
		snprintf(name, sizeof(name), "@starverbs/qpn/%u\n", qpn >> 12);
	while (fgets(line, sizeof(line), names))
		found |= strstr(line, name) != NULL;
	fclose(names);
	return found;
}

/* A parent is killed; its child lives on, and keeps nobody waiting for the parent. */
static void killed_parent(void)
{
	int told[2], status;
	struct {
		uint32_t qpn;
		pid_t child;
	} from = { 0 };
	pid_t parent;

	CHECK(!pipe(told));
	parent = fork();
	if (!parent) {
		struct card c = open_card();

		from.qpn = c.a->qp_num;
		from.child = fork();
		if (!from.child) {
			/* It has let go when it gets here: the parent may go. */
			from.child = getpid();
			CHECK(write(told[1], &from, sizeof(from)) == sizeof(from));
			alarm(30);
			pause();
			_exit(0);
		}
		works(&c);
		alarm(30);
		pause();
		_exit(1);
	}
	CHECK(read(told[0], &from, sizeof(from)) == sizeof(from));
	CHECK(held(from.qpn));
	CHECK(!kill(parent, SIGKILL) && waitpid(parent, &status, 0) == parent);
	CHECK(!kill(from.child, 0) && !held(from.qpn));
	kill(from.child, SIGKILL);
	close(told[0]);
	close(told[1]);
}

int main(void)
{
	alarm(100);
	killed_parent();
	children();
	if (!failures)
		puts("fork: all as promised");
	return failures != 0;
}
