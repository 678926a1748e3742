/* SET or GET of 64 B at a Valkey server, over RDMA or over TCP: one thread with so many connections, each
 * with one request under way. Valkey's transport, as its server speaks it: each end says where the other may
 * write (a command of 32 bytes, by SEND), writes the stream there with immediate data that says how much, and
 * to the last byte of that memory; then it is given it anew.
 * Build: cc -O2 -o valkey valkey.c -lrdmacm -libverbs
 * usage: valkey rdma|tcp SET|GET PORT [CONNECTIONS [REQUESTS [stop]]]; prints millions of requests a second,
 * and has the server end */
#define _GNU_SOURCE
#include "side.h"
#include <arpa/inet.h>
#include <endian.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <rdma/rdma_cma.h>

enum { VALUE = 64, RECEIVES = 128, ROOM = 64 << 10, REGISTER = 3, COMMAND = 32, MOST = 256 };

/* Says where its sender may be written to, in the network's byte order. */
struct command {
	uint16_t opcode;
	uint8_t reserved[14];
	uint64_t addr;
	uint32_t length, key;
};
_Static_assert(sizeof(struct command) == COMMAND, "a command");

struct connection {
	struct rdma_cm_id *id;
	int fd;
	/* what came, and how much of it was taken; the server writes there */
	char *rx;
	uint32_t filled, taken;
	struct command *commands;
	struct ibv_mr *rx_mr, *commands_mr;
	/* where it writes at the server */
	uint64_t addr;
	uint32_t length, key, used;
	/* of the request */
	uint32_t sent, got;
	int is_asking;
};

static struct connection all[MOST];
static char request[512], reply[128];
static uint32_t request_len, reply_len;
static struct ibv_cq *cq;
static struct ibv_mr *request_mr;
static long asked, done;

static void make_request(int is_get)
{
	char value[VALUE + 1] = "";

	memset(value, 'v', VALUE);
	request_len = is_get ? snprintf(request, sizeof(request), "*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n") :
			       snprintf(request, sizeof(request), "*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$%d\r\n%s\r\n", VALUE, value);
	reply_len = is_get ? snprintf(reply, sizeof(reply), "$%d\r\n%s\r\n", VALUE, value) :
			     snprintf(reply, sizeof(reply), "+OK\r\n");
}

/* What of a reply has come is right, or the run is worth nothing. */
static void take(struct connection *c, const char *bytes, uint32_t len)
{
	if (!c->is_asking || c->got + len > reply_len || memcmp(reply + c->got, bytes, len)) {
		fprintf(stderr, "valkey: another reply than '%.*s'\n", (int)reply_len - 2, reply);
		exit(1);
	}
	c->got += len;
	if (c->got == reply_len) {
		c->is_asking = 0;
		done++;
	}
}

/* --- over RDMA */

static void receive(struct connection *c, uint32_t n)
{
	struct ibv_sge sge = { (uintptr_t)&c->commands[n], COMMAND, c->commands_mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = n, .sg_list = &sge, .num_sge = 1 }, *bad;

	if ((errno = ibv_post_recv(c->id->qp, &wr, &bad)))
		die("ibv_post_recv");
}

/* The server may write from the beginning. */
static void give_room(struct connection *c)
{
	struct command *command = &c->commands[RECEIVES];
	struct ibv_sge sge = { (uintptr_t)command, COMMAND, c->commands_mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

	command->opcode = htons(REGISTER);
	command->addr = htobe64((uintptr_t)c->rx);
	command->length = htonl(ROOM);
	command->key = htonl(c->rx_mr->rkey);
	c->filled = c->taken = 0;
	wr.send_flags = IBV_SEND_SIGNALED;
	if ((errno = ibv_post_send(c->id->qp, &wr, &bad)))
		die("ibv_post_send");
}

/* As much of the request as there is room for at the server. */
static void write_request(struct connection *c)
{
	uint32_t left = request_len - c->sent, len = left < c->length - c->used ? left : c->length - c->used;
	struct ibv_sge sge = { (uintptr_t)request + c->sent, len, request_mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
				  .send_flags = IBV_SEND_SIGNALED, .imm_data = htonl(len) }, *bad;

	if (!len)
		return;
	wr.wr.rdma.remote_addr = c->addr + c->used;
	wr.wr.rdma.rkey = c->key;
	if ((errno = ibv_post_send(c->id->qp, &wr, &bad)))
		die("ibv_post_send");
	c->used += len;
	c->sent += len;
}

static void on_completion(struct connection *c, const struct ibv_wc *wc)
{
	const struct command *command = &c->commands[wc->wr_id % RECEIVES];

	if (wc->status != IBV_WC_SUCCESS) {
		fprintf(stderr, "valkey: %s\n", ibv_wc_status_str(wc->status));
		exit(1);
	}
	if (wc->opcode == IBV_WC_RECV && ntohs(command->opcode) == REGISTER) {
		c->addr = be64toh(command->addr);
		c->length = ntohl(command->length);
		c->key = ntohl(command->key);
		c->used = 0;
	} else if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
		c->filled += ntohl(wc->imm_data);
		take(c, c->rx + c->taken, c->filled - c->taken);
		c->taken = c->filled;
		if (c->taken == ROOM)
			give_room(c);
	}
	if (wc->opcode == IBV_WC_RECV || wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM)
		receive(c, wc->wr_id);
}

static void connect_rdma(struct connection *c, struct sockaddr_in *to)
{
	struct rdma_conn_param how = { .responder_resources = 1, .initiator_depth = 1, .retry_count = 7,
		.rnr_retry_count = 7 };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { RECEIVES, RECEIVES, 1, 1, 0 } };

	if (rdma_create_id(NULL, &c->id, NULL, RDMA_PS_TCP) || rdma_resolve_addr(c->id, NULL, (void *)to, 5000) ||
	    rdma_resolve_route(c->id, 5000))
		die("rdma_resolve_addr");
	if (!cq && (!(cq = ibv_create_cq(c->id->verbs, 2 * RECEIVES * MOST, NULL, NULL, 0)) ||
		    !(request_mr = ibv_reg_mr(c->id->pd, request, sizeof(request), IBV_ACCESS_LOCAL_WRITE))))
		die("ibv_create_cq");
	init.send_cq = init.recv_cq = cq;
	c->rx = aligned_alloc(4096, ROOM);
	c->commands = calloc(RECEIVES + 1, COMMAND);
	if (!c->rx || !c->commands || rdma_create_qp(c->id, c->id->pd, &init))
		die("rdma_create_qp");
	c->rx_mr = ibv_reg_mr(c->id->pd, c->rx, ROOM, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	c->commands_mr = ibv_reg_mr(c->id->pd, c->commands, (RECEIVES + 1) * COMMAND, IBV_ACCESS_LOCAL_WRITE);
	if (!c->rx_mr || !c->commands_mr)
		die("ibv_reg_mr");
	for (uint32_t n = 0; n < RECEIVES; n++)
		receive(c, n);
	if (rdma_connect(c->id, &how))
		die("rdma_connect");
	give_room(c);
}

static void poll_rdma(int connections)
{
	struct ibv_wc wc[16];
	int n = ibv_poll_cq(cq, 16, wc);

	for (int i = 0; i < n; i++)
		for (int at = 0; at < connections; at++)
			if (all[at].id->qp->qp_num == wc[i].qp_num)
				on_completion(&all[at], &wc[i]);
}

/* --- over TCP */

static void poll_tcp(struct pollfd *fds, int connections)
{
	char bytes[256];

	if (poll(fds, connections, -1) < 0)
		die("poll");
	for (int at = 0; at < connections; at++) {
		ssize_t len;

		if (!fds[at].revents)
			continue;
		if ((len = recv(fds[at].fd, bytes, sizeof(bytes), MSG_DONTWAIT)) <= 0)
			die("recv");
		take(&all[at], bytes, len);
	}
}

/* A connection of its own, over TCP, on which nothing is to come back. */
static void stop_server(struct sockaddr_in *to)
{
	static const char stop[] = "SHUTDOWN NOSAVE\r\n";
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	char end;

	if (connect(fd, (void *)to, sizeof(*to)))
		die("connect");
	put(fd, stop, sizeof(stop) - 1);
	while (read(fd, &end, 1) > 0)
		;
}

static void ask(struct connection *c, int is_rdma, long requests)
{
	if (!c->is_asking && asked < requests) {
		c->sent = c->got = 0;
		c->is_asking = 1;
		asked++;
	}
	if (!c->is_asking || c->sent == request_len)
		return;
	if (is_rdma)
		write_request(c);
	else
		put(c->fd, request, c->sent = request_len);
}

int main(int argc, char **argv)
{
	int is_rdma = argc > 3 && !strcmp(argv[1], "rdma"), connections = argc > 4 ? atoi(argv[4]) : 50, one = 1;
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	long requests = argc > 5 ? atol(argv[5]) : 100000;
	struct pollfd fds[MOST];
	double start;

	if (argc < 4 || connections < 1 || connections > MOST)
		return 2;
	to.sin_port = htons(atoi(argv[3]));
	for (int at = 0; at < connections; at++) {
		if (is_rdma) {
			connect_rdma(&all[at], &to);
			continue;
		}
		fds[at].fd = all[at].fd = socket(AF_INET, SOCK_STREAM, 0);
		fds[at].events = POLLIN;
		if (connect(all[at].fd, (void *)&to, sizeof(to)) ||
			setsockopt(all[at].fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one))) die("connect");
	}
	/* a GET finds what the warm-up has set */
	for (int warm = 1; warm >= 0; warm--) {
		long until = warm ? connections : requests;

		make_request(!warm && !strcmp(argv[2], "GET"));
		asked = done = 0;
		start = now();
		while (done < until) {
			for (int at = 0; at < connections; at++)
				ask(&all[at], is_rdma, until);
			if (is_rdma)
				poll_rdma(connections);
			else
				poll_tcp(fds, connections);
		}
	}
	printf("%.6f\n", requests / (now() - start) / 1e6);
	if (argc > 6)
		stop_server(&to);
	return 0;
}
