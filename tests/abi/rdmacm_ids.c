/* What the man pages say of librdmacm's calls that need no peer, call by call, on one address of one card:
 * return value, errno, events. Build: cc -Wall -o rdmacm_ids rdmacm_ids.c -lrdmacm -libverbs; run with
 * LD_LIBRARY_PATH naming the library under test. */
#include "rdmacm.h"
#include <fcntl.h>
#include <netdb.h>
#include <pthread.h>
#include <sys/wait.h>

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

/* rdma_getaddrinfo */
static void names(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *res = NULL;

	REFUSED(rdma_getaddrinfo(NULL, NULL, NULL, &res), EINVAL);
	CHECK(!rdma_getaddrinfo("127.0.0.1", "7471", &hints, &res));
	CHECK(res->ai_src_len == sizeof(struct sockaddr_in) && !res->ai_dst_len && res->ai_qp_type == IBV_QPT_RC);
	CHECK(res->ai_family == AF_INET && ((struct sockaddr_in *)res->ai_src_addr)->sin_port == htons(7471));
	rdma_freeaddrinfo(res);
	CHECK(!rdma_getaddrinfo("::1", "5", NULL, &res) && res->ai_family == AF_INET6 && res->ai_dst_len &&
	      !res->ai_src_len);
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

	/* any address binds to no device, nor does loopback's (rdmacm_loopback.c) */
	id = id_of(ch, RDMA_PS_TCP);
	CHECK(!rdma_bind_addr(id, ADDR(any)) && !id->verbs && rdma_get_src_port(id));
	REFUSED(rdma_bind_addr(id, ADDR(any)), EINVAL);
	CHECK(!rdma_destroy_id(id));
	id = id_of(ch, RDMA_PS_TCP);
	CHECK(!rdma_bind_addr(id, ADDR(local)) && !id->verbs && rdma_get_src_port(id));
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

	CHECK(!rdma_create_qp(id, NULL, &init) && id->qp && id->qp->state == IBV_QPS_INIT &&
	      init.cap.max_send_wr >= 4);
	CHECK(id->send_cq && id->recv_cq && id->send_cq_channel && id->recv_cq_channel && id->qp->pd == id->pd);
	CHECK(id->send_cq->cq_context == id);
	REFUSED(rdma_create_qp(id, NULL, &init), EINVAL);
	CHECK(!ibv_query_qp(id->qp, &now, IBV_QP_STATE, &past) && now.qp_state == IBV_QPS_INIT &&
	      !now.qp_access_flags);
	CHECK(!rdma_init_qp_attr(id, &attr, &mask) && attr.port_num == 1);
	CHECK(mask == (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	REFUSED(rdma_init_qp_attr(id, &attr, &mask), EINVAL); /* no peer yet */
	rdma_destroy_qp(id);
	CHECK(!id->qp && !id->send_cq && !id->recv_cq && !id->send_cq_channel);

	/* a queue pair for datagrams is ready at once */
	CHECK(!rdma_destroy_id(id));
	id = id_of(ch, RDMA_PS_UDP);
	CHECK(id->qp_type == IBV_QPT_UD && !rdma_resolve_addr(id, ADDR(here), ADDR(dst), 2000));
	pass(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	init = attr_of(IBV_QPT_UD);
	CHECK(!rdma_create_qp(id, NULL, &init) && id->qp->state == IBV_QPS_RTS);
	CHECK(!ibv_query_qp(id->qp, &now, IBV_QP_QKEY, &past) && now.qkey == RDMA_UDP_QKEY);
	rdma_destroy_qp(id);
	CHECK(!rdma_destroy_id(id));
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
	CHECK(!rdma_bind_addr(id, ADDR(local)));
	REFUSED(rdma_join_multicast(id, ADDR(group), NULL), EINVAL); /* no device yet */
	CHECK(!rdma_resolve_addr(id, NULL, ADDR(local), 2000));
	pass(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(!rdma_create_qp(id, NULL, &init));
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
	CHECK(ibv_detach_mcast(id->qp, &(union ibv_gid){ .raw = { [10] = 0xff, [11] = 0xff, [12] = 239, [13] = 77,
								   [14] = 1, [15] = 10 } }, 0) == EINVAL); /* sends only */
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
		REFUSED(rdma_bind_addr(id, ADDR(dst)), EIO);
		REFUSED(rdma_resolve_addr(id, NULL, ADDR(dst), 100), EIO);
		REFUSED(rdma_listen(id, 1), EIO);
		CHECK(!rdma_destroy_id(id));
		rdma_destroy_event_channel(ch);
		_exit(failures != 0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	pass(ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(!rdma_ack_cm_event(held) && !rdma_destroy_id(id));
	rdma_destroy_event_channel(ch);
}

/* A domain that is named and NULL is the library's own, for queue pairs as for shared receive queues. */
static void default_domain(struct rdma_event_channel *ch)
{
	struct sockaddr_in to = at("127.0.0.1", 7471);
	struct rdma_cm_id *id = routed(ch, RDMA_PS_TCP, to, 0);
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD };
	struct ibv_srq_init_attr_ex queue = { .attr = { 4, 1, 0 },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_XRCD, .srq_type = IBV_SRQT_XRC };

	CHECK(!rdma_create_qp_ex(id, &init) && id->qp && id->qp->qp_type == IBV_QPT_XRC_RECV);
	CHECK(!rdma_create_srq_ex(id, &queue) && id->srq && id->recv_cq);
	rdma_destroy_qp(id);
	rdma_destroy_srq(id);
	CHECK(!id->qp && !id->srq && !rdma_destroy_id(id));
}

/* What a thread of the program does with an id while another ends its queue pair. */
struct race {
	pthread_barrier_t both;
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id;
};

/* Takes the answer to a request to connect, which brings the queue pair to RTS if there is one still. */
static void *takes(void *arg)
{
	struct race *race = arg;
	struct rdma_cm_event *event = NULL;

	pthread_barrier_wait(&race->both);
	CHECK(!rdma_get_cm_event(race->ch, &event));
	CHECK(event->event == RDMA_CM_EVENT_ESTABLISHED || event->event == RDMA_CM_EVENT_CONNECT_RESPONSE ||
	      event->event == RDMA_CM_EVENT_CONNECT_ERROR);
	rdma_ack_cm_event(event);
	return NULL;
}

/* Releases the connection, which brings the queue pair to ERR if there is one still. */
static void *leaves(void *arg)
{
	struct race *race = arg;

	pthread_barrier_wait(&race->both);
	rdma_disconnect(race->id);
	return NULL;
}

/* A queue pair that ends by rdma_destroy_qp while a call on another thread changes its state. */
static void ends_meanwhile(struct rdma_event_channel *ch)
{
	enum { ROUNDS = 60 };
	struct rdma_event_channel *mine = rdma_create_event_channel();
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct sockaddr_in where;
	struct rdma_cm_id *l = listener(ch, RDMA_PS_TCP, &where);

	for (int round = 0; round < ROUNDS; round++) {
		struct ibv_qp_init_attr init = attr_of(IBV_QPT_RC);
		struct race race = { .ch = mine, .id = routed(mine, RDMA_PS_TCP, where, IBV_QPT_RC) };
		struct rdma_cm_event *event;
		struct rdma_cm_id *child;
		pthread_t thread;

		pthread_barrier_init(&race.both, NULL, 2);
		CHECK(!rdma_connect(race.id, &param));
		event = next(ch, RDMA_CM_EVENT_CONNECT_REQUEST);
		child = event->id;
		rdma_ack_cm_event(event);
		CHECK(!rdma_create_qp(child, NULL, &init) && !rdma_accept(child, &param));
		if (round % 2)
			pass(mine, RDMA_CM_EVENT_ESTABLISHED);
		CHECK(!pthread_create(&thread, NULL, round % 2 ? leaves : takes, &race));
		pthread_barrier_wait(&race.both);
		rdma_destroy_qp(race.id);
		CHECK(!race.id->qp && !pthread_join(thread, NULL));
		pthread_barrier_destroy(&race.both);
		rdma_destroy_qp(child);
		CHECK(!rdma_destroy_id(race.id) && !rdma_destroy_id(child));
	}
	CHECK(!rdma_destroy_id(l));
	rdma_destroy_event_channel(mine);
}

int main(void)
{
	struct rdma_event_channel *a = rdma_create_event_channel(), *b = rdma_create_event_channel();

	channels();
	devices();
	names();
	addresses(a);
	ways(a);
	groups(a);
	migration(a, b);
	forked();
	default_domain(a);
	ends_meanwhile(a);
	if (failures)
		fprintf(stderr, "rdmacm_ids: %d failed\n", failures);
	return failures != 0;
}
