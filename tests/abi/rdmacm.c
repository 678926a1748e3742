/* What the man pages say of librdmacm's calls on connections and endpoints, call by call, on one address
 * of one card: return value, errno, events. Build: cc -Wall -o rdmacm rdmacm.c -lrdmacm -libverbs; run
 * with LD_LIBRARY_PATH naming the library under test. */
#include "rdmacm.h"
#include <sys/wait.h>

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
	CHECK(event->listen_id == listen && server != listen && server->context == listen->context &&
	      event->status == 0);
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
	param = (struct rdma_conn_param){ .private_data = long_data, .private_data_len = 197,
					  .responder_resources = 2, .initiator_depth = 3, .rnr_retry_count = 4 };
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
	CHECK(!rdma_get_request(listen, &id) && id->qp && id->event &&
	      id->event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
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
	CHECK(!rdma_getaddrinfo("127.0.0.1", port, &hints, &res) && !rdma_create_ep(&id, res, NULL, &init) &&
	      id->qp);
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

	connections(a, b);
	refusals(a, b);
	own_queue_pairs(a, b);
	datagrams(a, b);
	backlog(a, b);
	leaving(a);
	endpoints();
	if (failures)
		fprintf(stderr, "rdmacm: %d failed\n", failures);
	return failures != 0;
}
