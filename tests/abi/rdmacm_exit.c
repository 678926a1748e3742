/* A process that ends as soon as it has told its peer of it, by _exit(2), so that no library comes to clean
 * up: what it said last arrives all the same, also beside other processes of the address that come and end
 * meanwhile. Each process has a card of its own, as young as can be.
 * Build: cc -Wall -o rdmacm_exit rdmacm_exit.c -lrdmacm -libverbs -lpthread; run with LD_LIBRARY_PATH
 * naming the library under test. */
#include <sys/wait.h>

#include "rdmacm.h"

enum { ROUNDS = 60, LANES = 4 };

/* Says where it listens, takes one request, and refuses it, or accepts it and disconnects. */
static void serve(int say, int refuses)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct rdma_conn_param param = { .rnr_retry_count = 7 };
	struct ibv_qp_init_attr init = attr_of(IBV_QPT_RC);
	struct rdma_cm_event *event;
	struct sockaddr_in where;
	struct rdma_cm_id *id;

	listener(ch, RDMA_PS_TCP, &where);
	CHECK(write(say, &where.sin_port, sizeof(where.sin_port)) == sizeof(where.sin_port));
	event = next(ch, RDMA_CM_EVENT_CONNECT_REQUEST);
	id = event->id;
	rdma_ack_cm_event(event);
	if (refuses) {
		CHECK(!rdma_reject(id, "not today", 10));
		_exit(failures != 0);
	}
	CHECK(!rdma_create_qp(id, NULL, &init) && !rdma_accept(id, &param));
	pass(ch, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(!rdma_disconnect(id));
	_exit(failures != 0);
}

static void ask(struct sockaddr_in to, int refused)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct rdma_cm_id *id = routed(ch, RDMA_PS_TCP, to, IBV_QPT_RC);
	struct rdma_cm_event *event;

	CHECK(!rdma_connect(id, &param));
	if (refused) {
		event = next(ch, RDMA_CM_EVENT_REJECTED);
		CHECK(event->status == 28 && !strcmp(event->param.conn.private_data, "not today"));
		rdma_ack_cm_event(event);
	} else {
		pass(ch, RDMA_CM_EVENT_ESTABLISHED);
		event = next(ch, RDMA_CM_EVENT_DISCONNECTED);
		CHECK(event->status == 0);
		rdma_ack_cm_event(event);
	}
	_exit(failures != 0);
}

/* Pairs of processes, one after the other. */
static int lane(void)
{
	struct sockaddr_in to = at("127.0.0.1", 0);
	int round, status, i, say[2];

	alarm(100);
	for (round = 0; round < ROUNDS && !failures; round++) {
		CHECK(!pipe(say));
		if (!fork())
			serve(say[1], round % 2);
		close(say[1]);
		CHECK(read(say[0], &to.sin_port, sizeof(to.sin_port)) == sizeof(to.sin_port));
		close(say[0]);
		if (!fork())
			ask(to, round % 2);
		for (i = 0; i < 2; i++)
			CHECK(wait(&status) > 0 && status == 0);
	}
	return failures != 0;
}

int main(void)
{
	const char *link = getenv("STARVERBS_LINK");
	/* By the wire alone, what a process that ends has not read is lost, another's message with it. */
	int lanes = link && !strcmp(link, "udp") ? 1 : LANES, status, i;

	for (i = 0; i < lanes; i++)
		if (!fork())
			_exit(lane());
	for (i = 0; i < lanes; i++)
		CHECK(wait(&status) > 0 && status == 0);
	if (!failures)
		puts("rdmacm_exit: all as promised");
	return failures != 0;
}
