/* Processes that share an XRC domain, for the C programs here. Each has a socket to the
 * test, which may kill or stop it. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

/* A process of the test. */
struct process {
	pid_t pid;
	int fd;
};

/* What it says first: the number of its queue pair or shared receive queue. */
struct hello {
	uint32_t number;
};

static int file;

static void get(int fd, void *to, size_t len)
{
	if (read(fd, to, len) != (ssize_t)len)
		_exit(0);
}

static void say(int fd, const void *what, size_t len)
{
	if (write(fd, what, len) != (ssize_t)len)
		_exit(0);
}

static struct ibv_context *open_card(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx = list && list[0] ? ibv_open_device(list[0]) : NULL;

	if (!ctx) {
		fputs("no device\n", stderr);
		_exit(1);
	}
	ibv_free_device_list(list);
	return ctx;
}

static struct ibv_xrcd *open_domain(struct ibv_context *ctx)
{
	struct ibv_xrcd_init_attr init = { IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, file, O_CREAT };
	struct ibv_xrcd *domain = ibv_open_xrcd(ctx, &init);

	if (!domain) {
		perror("ibv_open_xrcd");
		_exit(1);
	}
	return domain;
}

/* Has a queue pair: tells its number, is told its peer's, and then lets the library work. */
static void bridge(int fd)
{
	struct ibv_context *ctx = open_card();
	struct ibv_xrcd *domain = open_domain(ctx);
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD,
		.xrcd = domain };
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &init);
	struct hello hello = { qp ? qp->qp_num : 0 }, peer;
	struct ibv_qp_attr a;
	char byte;

	say(fd, &hello, sizeof(hello));
	get(fd, &peer, sizeof(peer));
	CHECK(!to_init(qp, 0xf));
	a = way_to(ctx, peer.number);
	a.min_rnr_timer = 5;
	CHECK(!modify(qp, &a, IBV_QPS_RTR, TO_RTR));
	CHECK(!modify(qp, &a, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_SQ_PSN));
	say(fd, "!", 1);
	get(fd, &byte, 1);
	_exit(0);
}

static struct process start(void (*what)(int, volatile uint32_t *), volatile uint32_t *shared)
{
	struct process p;
	int fds[2];

	CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds));
	p.fd = fds[0];
	p.pid = fork();
	if (!p.pid) {
		alarm(120);
		/* the test's end of all sockets: their children end with it */
		for (int fd = 3; fd < 64; fd++)
			if (fd != fds[1] && fd != file)
				close(fd);
		what(fds[1], shared);
		_exit(1);
	}
	close(fds[1]);
	return p;
}

static void run_bridge(int fd, volatile uint32_t *shared)
{
	(void)shared;
	bridge(fd);
}

static uint32_t number(struct process p)
{
	struct hello hello = { 0 };

	CHECK(read(p.fd, &hello, sizeof(hello)) == sizeof(hello) && hello.number);
	return hello.number;
}

static void stop(struct process p, int sig)
{
	int status = 0;

	if (sig)
		kill(p.pid, sig);
	close(p.fd);
	CHECK(waitpid(p.pid, &status, 0) == p.pid && (sig ? WIFSIGNALED(status) : status == 0));
}

static void nap(long us)
{
	struct timespec t = { us / 1000000, us % 1000000 * 1000 };

	nanosleep(&t, NULL);
}

static void tell(struct process p, const void *what, size_t len)
{
	CHECK(write(p.fd, what, len) == (ssize_t)len);
}

static void await_byte(struct process p)
{
	char byte;

	CHECK(read(p.fd, &byte, 1) == 1);
}
