/* What the man pages say of librdmacm's calls, call by call, on one address of one card: return value, errno, events.
 * Build: cc -Wall -o rdmacm rdmacm.c -lrdmacm -libverbs; run with LD_LIBRARY_PATH naming the library under test. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* A call that must give -1 with this errno. */
#define REFUSED(call, error) CHECK((call) == -1 && errno == (error))

enum { PATIENCE = 20000 /* ms */ };

static struct sockaddr_in at(const char *ip, uint16_t port)
{
	struct sockaddr_in sin = { .sin_family = AF_INET, .sin_port = htons(port) };

	inet_pton(AF_INET, ip, &sin.sin_addr);
	return sin;
}

#define ADDR(sin) ((struct sockaddr *)&(sin))

/* The next event of a channel, which must be of this type; NULL if nothing comes in time. */
static struct rdma_cm_event *next(struct rdma_event_channel *ch, enum rdma_cm_event_type type)
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
		fprintf(stderr, "%s (%d) in place of %s\n", rdma_event_str(event->event), event->status, rdma_event_str(type));
		exit(1);
	}
	return event;
}

static void pass(struct rdma_event_channel *ch, enum rdma_cm_event_type type)
{
	rdma_ack_cm_event(next(ch, type));
}

static struct rdma_cm_id *id_of(struct rdma_event_channel *ch, enum rdma_port_space ps)
{
	struct rdma_cm_id *id = NULL;

	CHECK(!rdma_create_id(ch, &id, &id, ps) && id && id->context == &id && id->ps == ps && !id->verbs);
	return id;
}

static struct ibv_qp_init_attr attr_of(enum ibv_qp_type type)
{
	return (struct ibv_qp_init_attr){ .qp_type = type, .cap = { 4, 4, 1, 1, 0 } };
}

/* rdma_create_event_channel, rdma_get_cm_event, rdma_event_str */
static void channels(void)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct rdma_cm_event *event;
	struct pollfd p = { .fd = ch->fd, .events = POLLIN };

	CHECK(ch && ch->fd >= 0 && poll(&p, 1, 0) == 0);
	fcntl(ch->fd, F_SETFL, fcntl(ch->fd, F_GETFL) | O_NONBLOCK);
	REFUSED(rdma_get_cm_event(ch, &event), EAGAIN);
	REFUSED(rdma_get_cm_event(ch, NULL), EINVAL);
	REFUSED(rdma_ack_cm_event(NULL), EINVAL);
	CHECK(!strcmp(rdma_event_str(RDMA_CM_EVENT_CONNECT_REQUEST), "RDMA_CM_EVENT_CONNECT_REQUEST"));
	CHECK(!strcmp(rdma_event_str(99), "UNKNOWN EVENT"));
	rdma_destroy_event_channel(ch);
}

/* rdma_get_devices */
static void devices(void)
{
	int count = 0;
	struct ibv_context **list = rdma_get_devices(&count), **again = rdma_get_devices(NULL);

	CHECK(list && count == 1 && list[0] && !list[1] && again && again[0] == list[0]);
	rdma_free_devices(list);
	rdma_free_devices(again);
}

/* rdma_create_id, rdma_bind_addr, rdma_listen, rdma_get_src_port, rdma_set_option */
static void addresses(struct rdma_event_channel *ch)
{
	struct rdma_cm_id *id, *other;
	struct sockaddr_in any = at("0.0.0.0", 0), local = at("127.0.0.1", 0), foreign = at("192.0.2.77", 0), port;
	struct sockaddr_storage odd = { .ss_family = AF_UNIX };
	uint8_t tos = 8;
	int yes = 1;

	REFUSED(rdma_create_id(ch, &id, NULL, 0x7777), EINVAL);
	REFUSED(rdma_create_id(ch, NULL, NULL, RDMA_PS_TCP), EINVAL);
	id = id_of(ch, RDMA_PS_TCP);
	CHECK(!rdma_get_src_port(id) && !rdma_get_dst_port(id));
	REFUSED(rdma_bind_addr(id, NULL), EINVAL);
	REFUSED(rdma_bind_addr(id, ADDR(odd)), EAFNOSUPPORT);
	REFUSED(rdma_bind_addr(id, ADDR(foreign)), EADDRNOTAVAIL);
	REFUSED(rdma_resolve_route(id, 100), EINVAL);
	REFUSED(rdma_connect(id, NULL), EINVAL);
	REFUSED(rdma_accept(id, NULL), EINVAL);
	REFUSED(rdma_reject(id, NULL, 0), EINVAL);
	REFUSED(rdma_disconnect(id), EINVAL);
	REFUSED(rdma_establish(id), EINVAL);
	REFUSED(rdma_notify(id, IBV_EVENT_COMM_EST), EINVAL);
	CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1));
	REFUSED(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 4), EINVAL);
	CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes, sizeof(yes)));
	CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &yes, sizeof(yes)));
	CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &tos, 1));
	REFUSED(rdma_set_option(id, RDMA_OPTION_ID, 99, &tos, 1), ENOSYS);
	REFUSED(rdma_set_option(id, 99, 0, &tos, 1), ENOSYS);
	CHECK(!rdma_destroy_id(id));

	/* any address binds to no device, one of the card's does */
	id = id_of(ch, RDMA_PS_TCP);
	CHECK(!rdma_bind_addr(id, ADDR(any)) && !id->verbs && rdma_get_src_port(id));
	REFUSED(rdma_bind_addr(id, ADDR(any)), EINVAL);
	CHECK(!rdma_destroy_id(id));
	id = id_of(ch, RDMA_PS_TCP);
	CHECK(!rdma_bind_addr(id, ADDR(local)) && id->verbs && id->port_num == 1 && id->pd && rdma_get_src_port(id));
	port = *(struct sockaddr_in *)rdma_get_local_addr(id);
	CHECK(port.sin_port == rdma_get_src_port(id) && port.sin_addr.s_addr == local.sin_addr.s_addr);

	/* the address is taken, and free again */
	other = id_of(ch, RDMA_PS_TCP);
	REFUSED(rdma_bind_addr(other, ADDR(port)), EADDRINUSE);
	CHECK(!rdma_listen(id, 0));
	REFUSED(rdma_listen(id, 0), EINVAL);
	CHECK(!rdma_destroy_id(id) && !rdma_bind_addr(other, ADDR(port)) && !rdma_destroy_id(other));

	/* without an address, any */
	id = id_of(ch, RDMA_PS_TCP);
	CHECK(!rdma_listen(id, 5) && rdma_get_src_port(id) && !rdma_destroy_id(id));
	REFUSED(rdma_destroy_id(NULL), EINVAL);
}

/* rdma_resolve_addr, rdma_resolve_route, rdma_create_qp, rdma_init_qp_attr */
static void ways(struct rdma_event_channel *ch)
{
	struct ibv_qp_init_attr init = attr_of(IBV_QPT_RC);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
	struct sockaddr_in dst = at("127.0.0.1", 7);
	struct sockaddr_in here = at("127.0.0.1", 0);
	struct ibv_qp_attr now;
	struct ibv_qp_init_attr past;
	struct rdma_cm_id *id = id_of(ch, RDMA_PS_TCP);
	int mask;

	REFUSED(rdma_create_qp(id, NULL, &init), EINVAL);
	REFUSED(rdma_init_qp_attr(id, &attr, &mask), EINVAL);
	REFUSED(rdma_resolve_addr(id, NULL, NULL, 100), EINVAL);
	CHECK(!rdma_resolve_addr(id, NULL, ADDR(dst), 2000));
	pass(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(id->verbs && id->port_num == 1 && rdma_get_dst_port(id) == htons(7) && rdma_get_src_port(id));
	CHECK(id->route.addr.addr.ibaddr.dgid.raw[12] == 127 && id->route.addr.addr.ibaddr.sgid.raw[12] == 127);
	REFUSED(rdma_resolve_addr(id, NULL, ADDR(dst), 2000), EINVAL);
	REFUSED(rdma_connect(id, NULL), EINVAL);
	CHECK(!rdma_resolve_route(id, 2000));
	pass(ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(id->route.num_paths == 1 && id->route.path_rec && id->route.path_rec->pkey == 0xffff);
	REFUSED(rdma_resolve_route(id, 2000), EINVAL);
	REFUSED(rdma_connect(id, NULL), EINVAL); /* neither a queue pair nor its number */

	CHECK(!rdma_create_qp(id, NULL, &init) && id->qp && id->qp->state == IBV_QPS_INIT && init.cap.max_send_wr >= 4);
	CHECK(id->send_cq && id->recv_cq && id->send_cq_channel && id->recv_cq_channel && id->qp->pd == id->pd);
	CHECK(id->send_cq->cq_context == id);
	REFUSED(rdma_create_qp(id, NULL, &init), EINVAL);
	CHECK(!ibv_query_qp(id->qp, &now, IBV_QP_STATE, &past) && now.qp_state == IBV_QPS_INIT && !now.qp_access_flags);
	CHECK(!rdma_init_qp_attr(id, &attr, &mask) && attr.port_num == 1);
	CHECK(mask == (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	REFUSED(rdma_init_qp_attr(id, &attr, &mask), EINVAL); /* no peer yet */
	rdma_destroy_qp(id);
	CHECK(!id->qp && !id->send_cq && !id->recv_cq && !id->send_cq_channel);

	/* a queue pair for datagrams is ready at once */
	CHECK(!rdma_destroy_id(id));
	id = id_of(ch, RDMA_PS_UDP);
	CHECK(id->qp_type == IBV_QPT_UD && !rdma_bind_addr(id, ADDR(here)));
	init = attr_of(IBV_QPT_UD);
	CHECK(!rdma_create_qp(id, NULL, &init) && id->qp->state == IBV_QPS_RTS);
	CHECK(!ibv_query_qp(id->qp, &now, IBV_QP_QKEY, &past) && now.qkey == RDMA_UDP_QKEY);
	rdma_destroy_qp(id);
	CHECK(!rdma_destroy_id(id));
}

/* A listening id on 127.0.0.1 and its address. */
static struct rdma_cm_id *listener(struct rdma_event_channel *ch, enum rdma_port_space ps, struct sockaddr_in *where)
{
	struct rdma_cm_id *id = id_of(ch, ps);

	*where = at("127.0.0.1", 0);
	CHECK(!rdma_bind_addr(id, ADDR(*where)) && !rdma_listen(id, 4));
	where->sin_port = rdma_get_src_port(id);
	return id;
}

/* An id with a route, and a queue pair of this type unless it is 0. */
static struct rdma_cm_id *routed(struct rdma_event_channel *ch, enum rdma_port_space ps, struct sockaddr_in to, int type)
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

static void one_message(struct rdma_cm_id *from, struct rdma_cm_id *to)
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

/* rdma_connect, rdma_accept, rdma_disconnect; what the events say */
static void connections(struct rdma_event_channel *active, struct rdma_event_channel *passive)
{
	struct rdma_conn_param param = { .private_data = "knock", .private_data_len = 6, .responder_resources = 3,
					 .initiator_depth = 2, .retry_count = 5, .rnr_retry_count = 6 };
	struct ibv_qp_init_attr init = attr_of(IBV_QPT_RC), past;
	struct rdma_cm_id *listen, *client, *server;
	struct rdma_cm_event *event;
	struct sockaddr_in where;
	struct ibv_qp_attr now, client_has;
	char long_data[255] = "";

	listen = listener(passive, RDMA_PS_TCP, &where);
	client = routed(active, RDMA_PS_TCP, where, IBV_QPT_RC);
	param.private_data_len = 57;
	REFUSED(rdma_connect(client, &param), EINVAL);
	param.private_data_len = 6;
	param.responder_resources = 200;
	REFUSED(rdma_connect(client, &param), EINVAL);
	param.responder_resources = 3;
	CHECK(!rdma_connect(client, &param));
	REFUSED(rdma_connect(client, &param), EINVAL);

	event = next(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
	server = event->id;
	CHECK(event->listen_id == listen && server != listen && server->context == listen->context && event->status == 0);
	CHECK(server->verbs == client->verbs && server->port_num == 1 && server->channel == passive && !server->qp);
	CHECK(rdma_get_src_port(server) == where.sin_port && rdma_get_dst_port(server) == rdma_get_src_port(client));
	CHECK(event->param.conn.private_data_len == 56 && !strcmp(event->param.conn.private_data, "knock"));
	CHECK(event->param.conn.responder_resources == 2 && event->param.conn.initiator_depth == 3);
	CHECK(event->param.conn.retry_count == 5 && event->param.conn.rnr_retry_count == 6);
	CHECK(event->param.conn.qp_num == client->qp->qp_num && !event->param.conn.srq);
	CHECK(!rdma_ack_cm_event(event));
	REFUSED(rdma_disconnect(server), EINVAL);
	REFUSED(rdma_connect(server, NULL), EINVAL);

	CHECK(!rdma_create_qp(server, NULL, &init));
	param = (struct rdma_conn_param){ .private_data = long_data, .private_data_len = 197, .responder_resources = 2,
					  .initiator_depth = 3, .rnr_retry_count = 4 };
	REFUSED(rdma_accept(server, &param), EINVAL);
	rdma_destroy_qp(server);
	init = attr_of(IBV_QPT_RC);
	CHECK(!rdma_create_qp(server, NULL, &init));
	param.private_data_len = 5;
	param.private_data = "come";
	CHECK(!rdma_accept(server, &param) && server->qp->state == IBV_QPS_RTS);
	REFUSED(rdma_accept(server, &param), EINVAL);

	event = next(active, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->id == client && !event->listen_id && client->qp->state == IBV_QPS_RTS);
	CHECK(event->param.conn.private_data_len == 196 && !strcmp(event->param.conn.private_data, "come"));
	CHECK(event->param.conn.responder_resources == 3 && event->param.conn.initiator_depth == 2);
	CHECK(event->param.conn.qp_num == server->qp->qp_num);
	CHECK(!rdma_ack_cm_event(event));
	pass(passive, RDMA_CM_EVENT_ESTABLISHED);

	CHECK(!ibv_query_qp(client->qp, &now, IBV_QP_STATE, &past) && now.dest_qp_num == server->qp->qp_num);
	CHECK(now.max_rd_atomic == 2 && now.max_dest_rd_atomic == 3 && now.retry_cnt == 5 && now.rnr_retry == 4);
	CHECK(now.qp_access_flags == (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC));
	client_has = now;
	CHECK(!ibv_query_qp(server->qp, &now, IBV_QP_STATE, &past) && now.dest_qp_num == client->qp->qp_num);
	CHECK(now.rq_psn == client_has.sq_psn && now.sq_psn == client_has.rq_psn);
	CHECK(now.max_rd_atomic == 3 && now.max_dest_rd_atomic == 2 && now.retry_cnt == 5 && now.rnr_retry == 6);
	one_message(client, server);
	one_message(server, client);
	REFUSED(rdma_reject(server, NULL, 0), EINVAL);
	REFUSED(rdma_establish(client), EINVAL);
	REFUSED(rdma_notify(server, IBV_EVENT_SQ_DRAINED), EINVAL);

	CHECK(!rdma_disconnect(client));
	CHECK(!ibv_query_qp(client->qp, &now, IBV_QP_STATE, &past) && now.qp_state == IBV_QPS_ERR);
	pass(passive, RDMA_CM_EVENT_DISCONNECTED);
	pass(active, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(!rdma_disconnect(server));
	rdma_destroy_qp(client);
	rdma_destroy_qp(server);
	CHECK(!rdma_destroy_id(client) && !rdma_destroy_id(server) && !rdma_destroy_id(listen));
}

/* rdma_reject; nobody there; a request that nobody answers is rejected with its listener */
static void refusals(struct rdma_event_channel *active, struct rdma_event_channel *passive)
{
	struct rdma_cm_id *listen, *client, *server, *late;
	struct rdma_cm_event *event;
	struct sockaddr_in where;
	struct ibv_qp_attr now;
	struct ibv_qp_init_attr past;
	char data[149] = "not today";

	listen = listener(passive, RDMA_PS_TCP, &where);
	client = routed(active, RDMA_PS_TCP, where, IBV_QPT_RC);
	CHECK(!rdma_connect(client, NULL));
	event = next(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(event->param.conn.responder_resources == 128 && event->param.conn.retry_count == 7);
	server = event->id;
	CHECK(!rdma_ack_cm_event(event));
	REFUSED(rdma_reject(server, data, 149), EINVAL);
	CHECK(!rdma_reject(server, data, 148));
	REFUSED(rdma_reject(server, data, 148), EINVAL);
	event = next(active, RDMA_CM_EVENT_REJECTED);
	CHECK(event->status == 28 && event->param.conn.private_data_len == 148);
	CHECK(!strcmp(event->param.conn.private_data, data) && !rdma_ack_cm_event(event));
	CHECK(!ibv_query_qp(client->qp, &now, IBV_QP_STATE, &past) && now.qp_state == IBV_QPS_ERR);
	rdma_destroy_qp(client);
	CHECK(!rdma_destroy_id(client) && !rdma_destroy_id(server));

	client = routed(active, RDMA_PS_TCP, where, IBV_QPT_RC);
	CHECK(!rdma_connect(client, NULL));
	event = next(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
	server = event->id;
	CHECK(!rdma_ack_cm_event(event));
	rdma_destroy_qp(client);
	CHECK(!rdma_destroy_id(client)); /* which takes the request back: timeout */

	/* of which nothing is told: the next event is the next request */
	client = routed(active, RDMA_PS_TCP, where, IBV_QPT_RC);
	CHECK(!rdma_connect(client, NULL));
	event = next(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(event->listen_id == listen && event->id != server);
	late = server;
	server = event->id;
	CHECK(!rdma_ack_cm_event(event) && !rdma_reject(server, NULL, 0) && !rdma_destroy_id(server));
	pass(active, RDMA_CM_EVENT_REJECTED);
	CHECK(!rdma_destroy_id(late));
	rdma_destroy_qp(client);
	CHECK(!rdma_destroy_id(client));

	client = routed(active, RDMA_PS_TCP, where, IBV_QPT_RC);
	CHECK(!rdma_connect(client, NULL));
	CHECK(!rdma_destroy_id(listen));
	event = next(active, RDMA_CM_EVENT_REJECTED);
	CHECK(event->status == 28 || event->status == 8);
	CHECK(!rdma_ack_cm_event(event));
	rdma_destroy_qp(client);
	CHECK(!rdma_destroy_id(client));

	client = routed(active, RDMA_PS_TCP, where, IBV_QPT_RC);
	CHECK(!rdma_connect(client, NULL));
	event = next(active, RDMA_CM_EVENT_REJECTED);
	CHECK(event->status == 8 && !rdma_ack_cm_event(event)); /* invalid service ID */
	rdma_destroy_qp(client);
	CHECK(!rdma_destroy_id(client));
}

/* A queue pair that is not the id's: rdma_init_qp_attr, rdma_establish, ECE */
static void own_queue_pairs(struct rdma_event_channel *active, struct rdma_event_channel *passive)
{
	struct rdma_cm_id *listen, *ids[2];
	struct ibv_qp *qp[2];
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1, .retry_count = 7 };
	struct rdma_cm_event *event;
	struct ibv_ece ece = { .vendor_id = 0x15b3, .options = 9 };
	struct sockaddr_in where;
	struct ibv_cq *cq;
	int i, state, mask;

	listen = listener(passive, RDMA_PS_TCP, &where);
	ids[0] = routed(active, RDMA_PS_TCP, where, 0);
	cq = ibv_create_cq(ids[0]->verbs, 16, NULL, NULL, 0);
	for (i = 0; i < 2; i++) {
		struct ibv_qp_init_attr init = attr_of(IBV_QPT_RC);

		init.send_cq = init.recv_cq = cq;
		qp[i] = ibv_create_qp(ids[0]->pd, &init);
		CHECK(qp[i]);
	}
	CHECK(!rdma_set_local_ece(ids[0], &ece));
	param.qp_num = qp[0]->qp_num;
	CHECK(!rdma_connect(ids[0], &param));
	event = next(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
	ids[1] = event->id;
	CHECK(event->param.conn.qp_num == qp[0]->qp_num && !rdma_ack_cm_event(event));
	memset(&ece, 0, sizeof(ece));
	CHECK(!rdma_get_remote_ece(ids[1], &ece) && ece.vendor_id == 0x15b3 && ece.options == 9);
	param.qp_num = qp[1]->qp_num;
	CHECK(!rdma_accept(ids[1], &param));
	pass(active, RDMA_CM_EVENT_CONNECT_RESPONSE);
	for (i = 0; i < 2; i++)
		for (state = IBV_QPS_INIT; state <= IBV_QPS_RTS; state++) {
			struct ibv_qp_attr attr = { .qp_state = state };

			CHECK(!rdma_init_qp_attr(ids[i], &attr, &mask) && !ibv_modify_qp(qp[i], &attr, mask));
		}
	CHECK(!rdma_establish(ids[0]));
	pass(passive, RDMA_CM_EVENT_ESTABLISHED);
	ece.vendor_id = 0;
	REFUSED(rdma_set_local_ece(ids[0], &ece), EINVAL);
	for (i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(qp[i]) && !rdma_destroy_id(ids[i]));
	CHECK(!ibv_destroy_cq(cq) && !rdma_destroy_id(listen));
}

/* Datagram ids: rdma_connect asks for a queue pair */
static void datagrams(struct rdma_event_channel *active, struct rdma_event_channel *passive)
{
	struct rdma_conn_param param = { .private_data = "who", .private_data_len = 4 };
	struct ibv_qp_init_attr init = attr_of(IBV_QPT_UD);
	struct rdma_cm_id *listen, *client, *server;
	struct rdma_cm_event *event;
	struct sockaddr_in where;
	struct ibv_ah *ah;

	listen = listener(passive, RDMA_PS_UDP, &where);
	client = routed(active, RDMA_PS_UDP, where, IBV_QPT_UD);
	CHECK(!rdma_connect(client, &param));
	event = next(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
	server = event->id;
	CHECK(event->listen_id == listen && server->qp_type == IBV_QPT_UD);
	CHECK(event->param.ud.private_data_len == 180 && !strcmp(event->param.ud.private_data, "who"));
	CHECK(!rdma_ack_cm_event(event) && !rdma_create_qp(server, NULL, &init));
	CHECK(!rdma_accept(server, &param));
	REFUSED(rdma_disconnect(server), EINVAL);
	event = next(active, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->param.ud.qp_num == server->qp->qp_num && event->param.ud.qkey == RDMA_UDP_QKEY);
	CHECK(event->param.ud.private_data_len == 136 && !strcmp(event->param.ud.private_data, "who"));
	ah = ibv_create_ah(client->pd, &event->param.ud.ah_attr);
	CHECK(ah && !ibv_destroy_ah(ah) && !rdma_ack_cm_event(event));
	rdma_destroy_qp(server);
	CHECK(!rdma_destroy_id(server));
	rdma_destroy_qp(client);
	CHECK(!rdma_destroy_id(client));

	client = routed(active, RDMA_PS_UDP, where, IBV_QPT_UD);
	CHECK(!rdma_connect(client, &param));
	event = next(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
	server = event->id;
	CHECK(!rdma_ack_cm_event(event) && !rdma_reject(server, NULL, 0) && !rdma_destroy_id(server));
	event = next(active, RDMA_CM_EVENT_UNREACHABLE);
	CHECK(event->status == 2 && !rdma_ack_cm_event(event));
	rdma_destroy_qp(client);
	CHECK(!rdma_destroy_id(client) && !rdma_destroy_id(listen));
}

/* rdma_join_multicast, rdma_join_multicast_ex, rdma_leave_multicast */
static void groups(struct rdma_event_channel *ch)
{
	struct sockaddr_in local = at("127.0.0.1", 0), group = at("239.77.1.9", 0), other = at("239.77.1.10", 0);
	struct rdma_cm_join_mc_attr_ex attr = { .comp_mask = 3, .addr = ADDR(other),
						.join_flags = RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER };
	struct ibv_qp_init_attr init = attr_of(IBV_QPT_UD);
	struct rdma_cm_id *id = id_of(ch, RDMA_PS_UDP);
	struct rdma_cm_event *event;
	struct ibv_ah *ah;

	REFUSED(rdma_join_multicast(id, ADDR(group), NULL), EINVAL);
	CHECK(!rdma_bind_addr(id, ADDR(local)) && !rdma_create_qp(id, NULL, &init));
	REFUSED(rdma_join_multicast(id, ADDR(local), NULL), EINVAL);
	REFUSED(rdma_leave_multicast(id, ADDR(group)), EADDRNOTAVAIL);
	CHECK(!rdma_join_multicast(id, ADDR(group), &group));
	event = next(ch, RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(event->status == 0 && event->param.ud.private_data == &group && event->param.ud.qp_num == 0xffffff);
	CHECK(event->param.ud.qkey == RDMA_UDP_QKEY && event->param.ud.ah_attr.grh.dgid.raw[12] == 239);
	ah = ibv_create_ah(id->pd, &event->param.ud.ah_attr);
	CHECK(ah && !ibv_destroy_ah(ah) && !rdma_ack_cm_event(event));
	CHECK(ibv_destroy_qp(id->qp) == EBUSY); /* attached */

	attr.comp_mask = 1 << 7;
	REFUSED(rdma_join_multicast_ex(id, &attr, NULL), ENOTSUP);
	attr.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS;
	REFUSED(rdma_join_multicast_ex(id, &attr, NULL), EINVAL);
	attr.comp_mask = 3;
	CHECK(!rdma_join_multicast_ex(id, &attr, NULL));
	pass(ch, RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(ibv_detach_mcast(id->qp, &(union ibv_gid){ .raw = { [10] = 0xff, [11] = 0xff, [12] = 239, [13] = 77, [14] = 1,
								   [15] = 10 } }, 0) == EINVAL); /* sends only */
	CHECK(!rdma_leave_multicast(id, ADDR(other)) && !rdma_leave_multicast(id, ADDR(group)));
	REFUSED(rdma_leave_multicast(id, ADDR(group)), EADDRNOTAVAIL);
	CHECK(!rdma_join_multicast(id, ADDR(group), NULL));
	pass(ch, RDMA_CM_EVENT_MULTICAST_JOIN);
	rdma_destroy_qp(id); /* leaves */
	CHECK(!id->qp && !rdma_destroy_id(id));
}

/* rdma_migrate_id: what waits goes along */
static void migration(struct rdma_event_channel *from, struct rdma_event_channel *to)
{
	struct sockaddr_in dst = at("127.0.0.1", 7);
	struct rdma_cm_id *id = id_of(from, RDMA_PS_TCP);
	struct pollfd p = { .fd = from->fd, .events = POLLIN };

	CHECK(!rdma_resolve_addr(id, NULL, ADDR(dst), 100) && poll(&p, 1, 0) == 1);
	CHECK(!rdma_migrate_id(id, to) && id->channel == to && poll(&p, 1, 0) == 0);
	pass(to, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(!rdma_migrate_id(id, NULL) && id->channel != to);
	CHECK(!rdma_resolve_route(id, 100) && id->event && id->event->event == RDMA_CM_EVENT_ROUTE_RESOLVED);
	REFUSED(rdma_migrate_id(id, NULL), EINVAL);
	CHECK(!rdma_migrate_id(id, to) && !id->event && !rdma_destroy_id(id));
	/* destroying drops what waits */
	id = id_of(from, RDMA_PS_TCP);
	CHECK(!rdma_resolve_addr(id, NULL, ADDR(dst), 100) && poll(&p, 1, 0) == 1);
	CHECK(!rdma_destroy_id(id) && poll(&p, 1, 0) == 0);
}

/* a process that ends without a word: its peer is told, as where a kernel closes its files */
static void leaving(struct rdma_event_channel *ch)
{
	struct ibv_qp_init_attr init = attr_of(IBV_QPT_RC);
	struct rdma_cm_id *listen, *server;
	struct rdma_cm_event *event;
	struct sockaddr_in where;
	int status = -1, go[2];
	pid_t child;
	char end;

	CHECK(!pipe(go));
	listen = listener(ch, RDMA_PS_TCP, &where);
	child = fork();
	if (!child) {
		struct rdma_event_channel *own = rdma_create_event_channel();
		struct rdma_cm_id *client = routed(own, RDMA_PS_TCP, where, IBV_QPT_RC);

		CHECK(!rdma_connect(client, NULL));
		pass(own, RDMA_CM_EVENT_ESTABLISHED);
		close(go[1]);
		CHECK(!read(go[0], &end, 1));
		exit(failures != 0);
	}
	close(go[0]);
	event = next(ch, RDMA_CM_EVENT_CONNECT_REQUEST);
	server = event->id;
	CHECK(!rdma_ack_cm_event(event) && !rdma_create_qp(server, NULL, &init) && !rdma_accept(server, NULL));
	pass(ch, RDMA_CM_EVENT_ESTABLISHED);
	close(go[1]);
	pass(ch, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	rdma_destroy_qp(server);
	CHECK(!rdma_destroy_id(server) && !rdma_destroy_id(listen));
}

/* rdma_getaddrinfo */
static void names(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *res = NULL;

	REFUSED(rdma_getaddrinfo(NULL, NULL, NULL, &res), EINVAL);
	CHECK(!rdma_getaddrinfo("127.0.0.1", "7471", &hints, &res));
	CHECK(res->ai_src_len == sizeof(struct sockaddr_in) && !res->ai_dst_len && res->ai_qp_type == IBV_QPT_RC);
	CHECK(res->ai_family == AF_INET && ((struct sockaddr_in *)res->ai_src_addr)->sin_port == htons(7471));
	rdma_freeaddrinfo(res);
	CHECK(!rdma_getaddrinfo("::1", "5", NULL, &res) && res->ai_family == AF_INET6 && res->ai_dst_len && !res->ai_src_len);
	CHECK(res->ai_port_space == RDMA_PS_TCP && !res->ai_next);
	rdma_freeaddrinfo(res);
	hints = (struct rdma_addrinfo){ .ai_qp_type = IBV_QPT_UD };
	CHECK(!rdma_getaddrinfo("127.0.0.1", "5", &hints, &res) && res->ai_port_space == RDMA_PS_UDP);
	rdma_freeaddrinfo(res);
	hints = (struct rdma_addrinfo){ .ai_flags = 1 << 20 };
	CHECK(rdma_getaddrinfo("127.0.0.1", "5", &hints, &res) == EAI_BADFLAGS);
	hints = (struct rdma_addrinfo){ .ai_flags = RAI_NUMERICHOST };
	CHECK(rdma_getaddrinfo("not.a.number", "5", &hints, &res) == EAI_NONAME);
}

/* rdma_listen: the backlog is of requests that the program has not seen */
static void backlog(struct rdma_event_channel *active, struct rdma_event_channel *passive)
{
	struct rdma_cm_id *listen = id_of(passive, RDMA_PS_TCP), *clients[3], *servers[3];
	struct sockaddr_in where = at("127.0.0.1", 0);
	struct rdma_cm_event *event;

	CHECK(!rdma_bind_addr(listen, ADDR(where)) && !rdma_listen(listen, 1));
	where.sin_port = rdma_get_src_port(listen);
	for (int i = 0; i < 3; i++) {
		clients[i] = routed(active, RDMA_PS_TCP, where, IBV_QPT_RC);
		CHECK(!rdma_connect(clients[i], NULL));
		event = next(passive, RDMA_CM_EVENT_CONNECT_REQUEST);
		servers[i] = event->id;
		CHECK(!rdma_ack_cm_event(event));
	}
	for (int i = 0; i < 3; i++) {
		CHECK(!rdma_destroy_id(servers[i]));
		pass(active, RDMA_CM_EVENT_REJECTED);
		rdma_destroy_qp(clients[i]);
		CHECK(!rdma_destroy_id(clients[i]));
	}
	CHECK(!rdma_destroy_id(listen));
}

/* A forked child leaves its parent's events alone, and waits for none of them. */
static void forked(void)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct rdma_cm_id *id = id_of(ch, RDMA_PS_TCP), *more;
	struct sockaddr_in dst = at("127.0.0.1", 7);
	struct rdma_cm_event *held, *event;
	int status = -1;
	pid_t child;

	CHECK(!rdma_resolve_addr(id, NULL, ADDR(dst), 100));
	held = next(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(!rdma_resolve_route(id, 100));
	child = fork();
	if (!child) {
		failures = 0;
		alarm(PATIENCE / 1000);
		REFUSED(rdma_get_cm_event(ch, &event), EIO);
		REFUSED(rdma_create_id(ch, &more, NULL, RDMA_PS_TCP), EIO);
		REFUSED(rdma_migrate_id(id, NULL), EIO);
		REFUSED(rdma_connect(id, NULL), EIO);
		CHECK(!rdma_destroy_id(id));
		rdma_destroy_event_channel(ch);
		_exit(failures != 0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	pass(ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(!rdma_ack_cm_event(held) && !rdma_destroy_id(id));
	rdma_destroy_event_channel(ch);
}

/* Endpoints, which wait: the server in a child process. */
static void endpoints(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *res;
	struct ibv_qp_init_attr init = attr_of(IBV_QPT_RC);
	struct rdma_cm_id *listen, *id;
	struct sockaddr_in where;
	struct rdma_event_channel *ch = rdma_create_event_channel();
	char port[8];

	CHECK(!rdma_getaddrinfo("127.0.0.1", "0", &hints, &res));
	CHECK(!rdma_create_ep(&listen, res, NULL, &init) && !rdma_listen(listen, 1) && listen->channel);
	rdma_freeaddrinfo(res);
	REFUSED(rdma_get_request(NULL, &id), EINVAL);
	where = at("127.0.0.1", ntohs(rdma_get_src_port(listen)));

	/* an asynchronous client asks, so that one thread does both */
	struct rdma_cm_id *client = routed(ch, RDMA_PS_TCP, where, IBV_QPT_RC);

	REFUSED(rdma_get_request(client, &id), EINVAL);
	CHECK(!rdma_connect(client, NULL));
	CHECK(!rdma_get_request(listen, &id) && id->qp && id->event && id->event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(!rdma_migrate_id(id, ch) && !id->event && !rdma_accept(id, NULL));
	pass(ch, RDMA_CM_EVENT_ESTABLISHED);
	pass(ch, RDMA_CM_EVENT_ESTABLISHED);
	one_message(client, id);
	rdma_destroy_ep(client);
	rdma_destroy_ep(id);
	rdma_destroy_ep(listen);
	rdma_destroy_event_channel(ch);

	/* nobody there: the call itself says so */
	hints = (struct rdma_addrinfo){ .ai_port_space = RDMA_PS_TCP };
	snprintf(port, sizeof(port), "%u", ntohs(where.sin_port));
	init = attr_of(IBV_QPT_RC);
	CHECK(!rdma_getaddrinfo("127.0.0.1", port, &hints, &res) && !rdma_create_ep(&id, res, NULL, &init) && id->qp);
	rdma_freeaddrinfo(res);
	REFUSED(rdma_connect(id, NULL), ECONNREFUSED);
	CHECK(id->event && id->event->event == RDMA_CM_EVENT_REJECTED && id->event->status == 8);
	alarm(PATIENCE / 1000);
	CHECK(!rdma_disconnect(id)); /* of which nothing is told any more */
	alarm(0);
	rdma_destroy_ep(id);
}

int main(void)
{
	struct rdma_event_channel *a = rdma_create_event_channel(), *b = rdma_create_event_channel();

	channels();
	devices();
	names();
	addresses(a);
	ways(a);
	connections(a, b);
	refusals(a, b);
	own_queue_pairs(a, b);
	datagrams(a, b);
	groups(a);
	migration(a, b);
	backlog(a, b);
	forked();
	leaving(a);
	endpoints();
	if (failures)
		fprintf(stderr, "rdmacm: %d failed\n", failures);
	return failures != 0;
}
