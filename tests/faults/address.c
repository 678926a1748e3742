/* Addresses and links that go and come back under live connections, in two network namespaces of this
 * program's own: the port's events and state, the GID table, completions, and going on. Needs root. */
#include "faults.h"
#include <sched.h>

/* A shell command in this process's namespace. */
#define SH(command) NEED(system(command) == 0)

/* Async events, until one of this type; the others are to be of the port, too. */
static void await_event(struct side *s, enum ibv_event_type type)
{
	struct ibv_async_event event;

	do {
		NEED(ibv_get_async_event(s->ctx, &event) == 0);
		ibv_ack_async_event(&event);
		NEED(event.event_type == IBV_EVENT_GID_CHANGE || event.event_type == IBV_EVENT_PORT_ERR ||
		     event.event_type == IBV_EVENT_PORT_ACTIVE || event.event_type == IBV_EVENT_QP_FATAL);
	} while (event.event_type != type);
}

static enum ibv_port_state port_state(struct side *s)
{
	struct ibv_port_attr attr;

	NEED(ibv_query_port(s->ctx, 1, &attr) == 0);
	return attr.state;
}

static int has_gid(struct side *s)
{
	union ibv_gid gid;

	/* an entry that is empty is zero */
	NEED(ibv_query_gid(s->ctx, 1, 0, &gid) == 0);
	return gid.global.interface_id != 0;
}

/* It answers until it is told to end. */
static void passive(int fd)
{
	static struct side s;
	struct peer p;

	NEED(unshare(CLONE_NEWNET) == 0);
	say(fd, 'n');
	NEED(await_byte(fd) == 'l');
	SH("ip addr add 10.77.0.2/24 dev vb && ip link set vb up && ip link set lo up");
	setenv("STARVERBS_ADDRS", "10.77.0.2", 1);
	open_side(&s);
	p = swap(fd, &s);
	for (;;) {
		struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };

		NEED(connect_to(s.qp, &p, 14, 7) == 0);
		say(fd, 'c');
		if (await_byte(fd) != 'r')
			return;
		NEED(ibv_modify_qp(s.qp, &reset, IBV_QP_STATE) == 0);
	}
}

/* A connection that gives up when the peer stays away, in bounded time, and what it had posted with it. */
static void gives_up(struct side *s, const struct peer *p, int fd, const char *why)
{
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET }, attr;
	struct ibv_qp_init_attr init;
	struct ibv_wc wc;
	long begin = now_ms();

	for (int i = 0; i < 8; i++)
		NEED(post(s, p, IBV_WR_RDMA_WRITE, 4096, i) == 0);
	for (int i = 0; i < 8; i++) {
		int want = i ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR;

		NEED(next_status(s, &wc) == want && wc.wr_id == (uint64_t)i);
	}
	printf("%s: retries exceeded after %ld ms\n", why, now_ms() - begin);
	NEED(ibv_query_qp(s->qp, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_ERR);
	NEED(ibv_modify_qp(s->qp, &reset, IBV_QP_STATE) == 0);
	say(fd, 'r');
	NEED(await_byte(fd) == 'c');
}

/* Retries for two seconds, which is more than the neighbour takes to be
 * found again, and for half a minute. */
static const int SHORT[2] = { 14, 7 }, LONG[2] = { 18, 7 };

int main(void)
{
	static struct side s;
	struct peer p, mine;
	char command[128];
	int fd;
	pid_t other;

	alarm(120);
	if (geteuid() != 0 || unshare(CLONE_NEWNET) != 0) {
		puts("address: skipped, needs root and namespaces");
		return 0;
	}
	other = start(passive, &fd);
	NEED(await_byte(fd) == 'n');
	snprintf(command, sizeof(command), "ip link add va type veth peer name vb netns %d", (int)other);
	SH(command);
	SH("ip addr add 10.77.0.1/24 dev va && ip link set va up && ip link set lo up");
	say(fd, 'l');
	setenv("STARVERBS_ADDRS", "10.77.0.1", 1);
	/* the peer's end is up when it opens its card */
	NEED(recv(fd, &p, sizeof(p), MSG_WAITALL) == sizeof(p));
	open_side(&s);
	mine = describe(&s, s.qp);
	NEED(write(fd, &mine, sizeof(mine)) == sizeof(mine) && await_byte(fd) == 'c');
	NEED(has_gid(&s));
	/* the kernel says a while later that both ends of a link are up */
	while (port_state(&s) != IBV_PORT_ACTIVE)
		nap(1);

	NEED(connect_to(s.qp, &p, LONG[0], LONG[1]) == 0);
	NEED(one(&s, &p) == IBV_WC_SUCCESS);
	/* the address goes, and comes back in time: messages of meanwhile arrive */
	for (int i = 0; i < 3; i++) {
		struct ibv_wc wc;

		SH("ip addr del 10.77.0.1/24 dev va");
		await_event(&s, IBV_EVENT_PORT_ERR);
		NEED(port_state(&s) == IBV_PORT_DOWN && !has_gid(&s));
		NEED(post(&s, &p, IBV_WR_RDMA_WRITE, 4096, 9) == 0);
		/* no completion is to come: only time can show it */
		nap(100);
		NEED(ibv_poll_cq(s.cq, 1, &wc) == 0);
		SH("ip addr add 10.77.0.1/24 dev va");
		await_event(&s, IBV_EVENT_PORT_ACTIVE);
		NEED(port_state(&s) == IBV_PORT_ACTIVE && has_gid(&s));
		NEED(next_status(&s, &wc) == IBV_WC_SUCCESS);
	}
	puts("address: gone and back three times, the connection goes on");
	/* so does the link: the address stays, the port is down */
	SH("ip link set va down");
	await_event(&s, IBV_EVENT_PORT_ERR);
	NEED(port_state(&s) == IBV_PORT_DOWN && has_gid(&s));
	NEED(post(&s, &p, IBV_WR_RDMA_WRITE, 4096, 9) == 0);
	{
		struct ibv_wc wc;

		/* as above */
		nap(100);
		NEED(ibv_poll_cq(s.cq, 1, &wc) == 0);
		SH("ip link set va up");
		await_event(&s, IBV_EVENT_PORT_ACTIVE);
		NEED(next_status(&s, &wc) == IBV_WC_SUCCESS);
	}
	puts("link: down and up, the connection goes on");
	/* it stays away: gives up in time, and can be connected anew when it is back */
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };

		NEED(ibv_modify_qp(s.qp, &reset, IBV_QP_STATE) == 0);
		say(fd, 'r');
		NEED(await_byte(fd) == 'c');
		NEED(connect_to(s.qp, &p, SHORT[0], SHORT[1]) == 0);
		NEED(one(&s, &p) == IBV_WC_SUCCESS);
		SH(i ? "ip link set va down" : "ip addr del 10.77.0.1/24 dev va");
		gives_up(&s, &p, fd, i ? "link" : "address");
		SH(i ? "ip link set va up" : "ip addr add 10.77.0.1/24 dev va");
		await_event(&s, IBV_EVENT_PORT_ACTIVE);
	}
	NEED(connect_to(s.qp, &p, SHORT[0], SHORT[1]) == 0);
	NEED(one(&s, &p) == IBV_WC_SUCCESS);
	/* sending is refused: EACCES, EHOSTUNREACH, ENETUNREACH and EINVAL by turns */
	for (int i = 0; i < 3; i++) {
		static const char *const routes[] = { "prohibit", "unreachable", "blackhole" };

		snprintf(command, sizeof(command), "ip route add %s 10.77.0.2/32", routes[i]);
		SH(command);
		gives_up(&s, &p, fd, routes[i]);
		SH("ip route del 10.77.0.2/32");
		NEED(connect_to(s.qp, &p, SHORT[0], SHORT[1]) == 0);
		NEED(one(&s, &p) == IBV_WC_SUCCESS);
	}
	/* the peer's namespace goes with the peer, and the link with it */
	kill(other, SIGKILL);
	NEED(waitpid(other, NULL, 0) == other);
	await_event(&s, IBV_EVENT_PORT_ERR);
	NEED(port_state(&s) == IBV_PORT_DOWN && !has_gid(&s));
	for (int i = 0; i < 4; i++)
		NEED(post(&s, &p, IBV_WR_RDMA_WRITE, 4096, i) == 0);
	for (int i = 0; i < 4; i++) {
		struct ibv_wc wc;

		NEED(next_status(&s, &wc) == (i ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR));
	}
	NEED(ibv_destroy_qp(s.qp) == 0 && ibv_dereg_mr(s.mr) == 0 && ibv_destroy_cq(s.cq) == 0);
	NEED(ibv_dealloc_pd(s.pd) == 0 && ibv_close_device(s.ctx) == 0);
	puts("namespace: gone with the peer; retries exceeded, all can be destroyed");
	return failures != 0;
}
