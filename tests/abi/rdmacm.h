/* What the programs that look at librdmacm's calls share: ids on one address
 * of one card, and their events. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

/* A call that must give -1 with this errno. */
#define REFUSED(call, error) CHECK((call) == -1 && errno == (error))

enum { PATIENCE = 20000 /* ms */ };

__attribute__((unused)) static struct sockaddr_in at(const char *ip, uint16_t port)
{
	struct sockaddr_in sin = { .sin_family = AF_INET, .sin_port = htons(port) };

	inet_pton(AF_INET, ip, &sin.sin_addr);
	return sin;
}

#define ADDR(sin) ((struct sockaddr *)&(sin))

/* The next event of a channel, which must be of this type; NULL if nothing comes in time. */
__attribute__((unused)) static struct rdma_cm_event *next(struct rdma_event_channel *ch,
	enum rdma_cm_event_type type)
{
	struct pollfd p = { .fd = ch->fd, .events = POLLIN };
	struct rdma_cm_event *event = NULL;

	if (poll(&p, 1, PATIENCE) != 1 || rdma_get_cm_event(ch, &event)) {
		failures++;
		fprintf(stderr, "no event, %s is missing\n", rdma_event_str(type));
		exit(1);
	}
	if (event->event != type) {
		failures++;
		fprintf(stderr, "%s (%d) in place of %s\n", rdma_event_str(event->event), event->status,
			rdma_event_str(type));
		exit(1);
	}
	return event;
}

__attribute__((unused)) static void pass(struct rdma_event_channel *ch, enum rdma_cm_event_type type)
{
	rdma_ack_cm_event(next(ch, type));
}

__attribute__((unused)) static struct rdma_cm_id *id_of(struct rdma_event_channel *ch,
	enum rdma_port_space ps)
{
	struct rdma_cm_id *id = NULL;

	CHECK(!rdma_create_id(ch, &id, &id, ps) && id && id->context == &id && id->ps == ps && !id->verbs);
	return id;
}

__attribute__((unused)) static struct ibv_qp_init_attr attr_of(enum ibv_qp_type type)
{
	return (struct ibv_qp_init_attr){ .qp_type = type, .cap = { 4, 4, 1, 1, 0 } };
}

/* A listening id on 127.0.0.1 and its address. */
__attribute__((unused)) static struct rdma_cm_id *listener(struct rdma_event_channel *ch,
	enum rdma_port_space ps, struct sockaddr_in *where)
{
	struct rdma_cm_id *id = id_of(ch, ps);

	*where = at("127.0.0.1", 0);
	CHECK(!rdma_bind_addr(id, ADDR(*where)) && !rdma_listen(id, 4));
	where->sin_port = rdma_get_src_port(id);
	return id;
}

/* An id with a route, and a queue pair of this type unless it is 0. */
__attribute__((unused)) static struct rdma_cm_id *routed(struct rdma_event_channel *ch,
	enum rdma_port_space ps, struct sockaddr_in to, int type)
{
	struct ibv_qp_init_attr init = attr_of(type);
	struct rdma_cm_id *id = id_of(ch, ps);

	CHECK(!rdma_resolve_addr(id, NULL, ADDR(to), 2000));
	pass(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(!rdma_resolve_route(id, 2000));
	pass(ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(!type || !rdma_create_qp(id, NULL, &init));
	return id;
}

__attribute__((unused)) static void one_message(struct rdma_cm_id *from, struct rdma_cm_id *to)
{
	static char buf[128];
	struct ibv_mr *mr = rdma_reg_msgs(from, buf, sizeof(buf));
	struct ibv_wc wc;

	CHECK(mr && !rdma_post_recv(to, NULL, buf + 64, 64, mr));
	strcpy(buf, "by way of the connection manager");
	CHECK(!rdma_post_send(from, NULL, buf, 64, mr, IBV_SEND_SIGNALED));
	CHECK(rdma_get_send_comp(from, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(rdma_get_recv_comp(to, &wc) == 1 && wc.status == IBV_WC_SUCCESS && !strcmp(buf, buf + 64));
	CHECK(!rdma_dereg_mr(mr));
}
