/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Ping-pong over a connection that librdmacm makes: the smallest whole RDMA program with two sides.
 *
 *	pingpong 7471			a server at port 7471, of one client
 *	pingpong 192.0.2.1 7471		its client
 *
 * The client sends 1,000 messages, each of which the server sends back; then the client prints the mean
 * round trip. Nothing in it is of starverbs: it runs on every RDMA card. Build it with -lrdmacm -libverbs.
 */
#include <errno.h>
#include <netdb.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

enum { ROUNDS = 1000, SIZE = 64 };

/* The message that goes, and the one that comes. */
static char out[SIZE], in[SIZE];
static struct ibv_mr *out_mr, *in_mr;

/* Ends the program with what failed and errno's reason. */
static void die(const char *what)
{
	perror(what);
	exit(1);
}

/* An endpoint of librdmacm: an id with a queue pair of its own, connected (or to
 * be listened on) at that address. */
static struct rdma_cm_id *endpoint(const char *host, const char *port)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = host ? 0 : RAI_PASSIVE }, *where;
	struct ibv_qp_init_attr qp = { .sq_sig_all = 1 };
	struct rdma_cm_id *id;
	int ret = rdma_getaddrinfo(host, port, &hints, &where);

	if (ret) {
		fprintf(stderr, "%s port %s: %s\n", host ? host : "any", port,
			ret == -1 ? strerror(errno) : gai_strerror(ret));
		exit(1);
	}
	qp.cap.max_send_wr = qp.cap.max_recv_wr = 2;
	qp.cap.max_send_sge = qp.cap.max_recv_sge = 1;
	if (rdma_create_ep(&id, where, NULL, &qp))
		die("rdma_create_ep");
	rdma_freeaddrinfo(where);
	return id;
}

/* A receive must be posted before the peer can send: the first one before the connection is made. */
static void prepare(struct rdma_cm_id *id)
{
	out_mr = rdma_reg_msgs(id, out, SIZE);
	in_mr = rdma_reg_msgs(id, in, SIZE);
	if (!out_mr || !in_mr)
		die("rdma_reg_msgs");
	if (rdma_post_recv(id, NULL, in, SIZE, in_mr))
		die("rdma_post_recv");
}

/* Sends `out` and waits until the peer's card has it. */
static void send_message(struct rdma_cm_id *id)
{
	struct ibv_wc wc;

	if (rdma_post_send(id, NULL, out, SIZE, out_mr, 0))
		die("rdma_post_send");
	if (rdma_get_send_comp(id, &wc) != 1)
		die("rdma_get_send_comp");
	if (wc.status) {
		fprintf(stderr, "send: %s\n", ibv_wc_status_str(wc.status));
		exit(1);
	}
}

/* Waits for a message in `in`; false when the peer has gone. */
static int receive_message(struct rdma_cm_id *id)
{
	struct ibv_wc wc;

	return rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS;
}

/* Posts the next receive; before the answer to what came goes out, as the peer sends again at once. */
static void receive_again(struct rdma_cm_id *id)
{
	if (rdma_post_recv(id, NULL, in, SIZE, in_mr))
		die("rdma_post_recv");
}

static void server(const char *port)
{
	struct rdma_cm_id *listener = endpoint(NULL, port), *id;
	int rounds = 0;

	if (rdma_listen(listener, 1))
		die("rdma_listen");
	if (rdma_get_request(listener, &id))
		die("rdma_get_request");
	prepare(id);
	if (rdma_accept(id, NULL))
		die("rdma_accept");
	for (; rounds < ROUNDS && receive_message(id); rounds++) {
		memcpy(out, in, SIZE);
		receive_again(id);
		send_message(id);
	}
	rdma_disconnect(id);
	rdma_dereg_mr(out_mr);
	rdma_dereg_mr(in_mr);
	rdma_destroy_ep(id);
	rdma_destroy_ep(listener);
	printf("answered %d messages\n", rounds);
}

static void client(const char *host, const char *port)
{
	struct rdma_cm_id *id = endpoint(host, port);
	struct timespec from, to;

	prepare(id);
	if (rdma_connect(id, NULL))
		die("rdma_connect");
	clock_gettime(CLOCK_MONOTONIC, &from);
	for (int round = 0; round < ROUNDS; round++) {
		snprintf(out, SIZE, "message %d", round);
		send_message(id);
		if (!receive_message(id) || strcmp(in, out)) {
			fprintf(stderr, "message %d did not come back\n", round);
			exit(1);
		}
		if (round + 1 < ROUNDS)
			receive_again(id);
	}
	clock_gettime(CLOCK_MONOTONIC, &to);
	rdma_disconnect(id);
	rdma_dereg_mr(out_mr);
	rdma_dereg_mr(in_mr);
	rdma_destroy_ep(id);
	printf("%d round trips, %.1f us each\n", ROUNDS,
	       ((to.tv_sec - from.tv_sec) * 1e6 + (to.tv_nsec - from.tv_nsec) / 1e3) / ROUNDS);
}

int main(int argc, char **argv)
{
	if (argc == 2)
		server(argv[1]);
	else if (argc == 3)
		client(argv[1], argv[2]);
	else
		return fprintf(stderr, "usage: pingpong [ADDRESS] PORT\n"), 2;
	return 0;
}
