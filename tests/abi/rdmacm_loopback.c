/* A bind to a loopback address is one to any address, as in Linux' rdma_cm: no device, and a listener there
 * is reached over all of the host's addresses. Once with all addresses of the host and, if it has others than
 * loopback's, once more with one of those alone (STARVERBS_ADDRS).
 * Build: cc -Wall -o rdmacm_loopback rdmacm_loopback.c -lrdmacm -libverbs; run with LD_LIBRARY_PATH
 * naming the library under test. */
#include "rdmacm.h"

/* An address of the card's in text that is not loopback's, "" if there is none. Prefers IPv4. */
static void other_address(struct ibv_context *verbs, char text[INET6_ADDRSTRLEN])
{
	union ibv_gid gid;

	text[0] = 0;
	for (int i = 0; !ibv_query_gid(verbs, 1, i, &gid); i++) {
		const struct in6_addr *ip = (void *)&gid;

		if (IN6_IS_ADDR_V4MAPPED(ip) && gid.raw[12] != 127) {
			inet_ntop(AF_INET, gid.raw + 12, text, INET6_ADDRSTRLEN);
			return;
		}
		if (!IN6_IS_ADDR_V4MAPPED(ip) && !IN6_IS_ADDR_UNSPECIFIED(ip) && !IN6_IS_ADDR_LOOPBACK(ip) &&
		    !IN6_IS_ADDR_LINKLOCAL(ip) && !text[0])
			inet_ntop(AF_INET6, gid.raw, text, INET6_ADDRSTRLEN);
	}
}

static struct sockaddr_storage ip_of(const char *text, __be16 port)
{
	struct sockaddr_storage all = {};
	struct sockaddr_in *sin = (void *)&all;
	struct sockaddr_in6 *sin6 = (void *)&all;

	if (inet_pton(AF_INET, text, &sin->sin_addr) == 1) {
		sin->sin_family = AF_INET;
		sin->sin_port = port;
	} else if (inet_pton(AF_INET6, text, &sin6->sin6_addr) == 1) {
		sin6->sin6_family = AF_INET6;
		sin6->sin6_port = port;
	}
	return all;
}

static struct rdma_cm_id *bound(struct rdma_event_channel *ch, enum rdma_port_space ps, const char *where)
{
	struct sockaddr_storage at = ip_of(where, 0);
	struct rdma_cm_id *id = id_of(ch, ps);

	CHECK(!rdma_bind_addr(id, ADDR(at)));
	return id;
}

/* No device, the address as it was given, and the port is held at all addresses. */
static void no_device(struct rdma_event_channel *ch, const char *where, const char *other)
{
	struct sockaddr_storage at = ip_of(where, 0), wild = ip_of(strchr(where, ':') ? "::" : "0.0.0.0", 0);
	struct ibv_qp_init_attr init = attr_of(IBV_QPT_RC);
	struct rdma_cm_id *id = bound(ch, RDMA_PS_TCP, where), *second = id_of(ch, RDMA_PS_TCP);
	struct sockaddr *shown = rdma_get_local_addr(id);

	CHECK(!id->verbs && !id->pd && !id->port_num && rdma_get_src_port(id));
	at = ip_of(where, rdma_get_src_port(id));
	CHECK(!memcmp(shown, &at, at.ss_family == AF_INET ? 8 : sizeof(struct sockaddr_in6)));
	REFUSED(rdma_create_qp(id, NULL, &init), EINVAL);
	REFUSED(rdma_bind_addr(second, ADDR(at)), EADDRINUSE);
	wild = ip_of(strchr(where, ':') ? "::" : "0.0.0.0", rdma_get_src_port(id));
	REFUSED(rdma_bind_addr(second, ADDR(wild)), EADDRINUSE);
	if (other[0] && !strchr(other, ':') == !strchr(where, ':')) {
		at = ip_of(other, rdma_get_src_port(id));
		REFUSED(rdma_bind_addr(second, ADDR(at)), EADDRNOTAVAIL);
	}
	CHECK(!rdma_destroy_id(second) && !rdma_destroy_id(id));
}

/* A connection over `over` to a port that is listened on at `there`. */
static void reached(struct rdma_event_channel *ch, const char *there, const char *over)
{
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct ibv_qp_init_attr init = attr_of(IBV_QPT_RC);
	struct rdma_cm_id *l = bound(ch, RDMA_PS_TCP, there), *id = id_of(ch, RDMA_PS_TCP), *child;
	struct sockaddr_storage to;
	struct rdma_cm_event *event;

	CHECK(!rdma_listen(l, 4) && !l->verbs);
	to = ip_of(over, rdma_get_src_port(l));
	CHECK(!rdma_resolve_addr(id, NULL, ADDR(to), 2000));
	pass(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(id->verbs && id->pd && id->port_num == 1);
	CHECK(!rdma_resolve_route(id, 2000));
	pass(ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(!rdma_create_qp(id, NULL, &init) && !rdma_connect(id, &param));
	event = next(ch, RDMA_CM_EVENT_CONNECT_REQUEST);
	child = event->id;
	CHECK(event->listen_id == l && child->verbs == id->verbs);
	CHECK(rdma_get_local_addr(child)->sa_family == to.ss_family &&
	      rdma_get_src_port(child) == rdma_get_src_port(l));
	rdma_ack_cm_event(event);
	CHECK(!rdma_create_qp(child, NULL, &init) && !rdma_accept(child, &param));
	pass(ch, RDMA_CM_EVENT_ESTABLISHED);
	pass(ch, RDMA_CM_EVENT_ESTABLISHED);
	one_message(id, child);
	rdma_destroy_qp(id);
	rdma_destroy_qp(child);
	CHECK(!rdma_destroy_id(id) && !rdma_destroy_id(child) && !rdma_destroy_id(l));
}

/* An id whose source is loopback resolves loopback and the host's own addresses, and has a device then. */
static void resolves(struct rdma_event_channel *ch, const char *from, const char *to)
{
	struct sockaddr_storage dst = ip_of(to, htons(7)), src = ip_of(from, 0);
	struct ibv_qp_init_attr init = attr_of(IBV_QPT_UD);
	struct rdma_cm_id *id = bound(ch, RDMA_PS_UDP, from), *in_one = id_of(ch, RDMA_PS_UDP);
	__be16 port = rdma_get_src_port(id);

	CHECK(!rdma_resolve_addr(id, NULL, ADDR(dst), 2000));
	pass(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(id->verbs && id->pd && rdma_get_src_port(id) == port && rdma_get_dst_port(id) == htons(7));
	CHECK(!rdma_create_qp(id, NULL, &init) && id->qp->state == IBV_QPS_RTS);
	rdma_destroy_qp(id);
	CHECK(!rdma_resolve_addr(in_one, ADDR(src), ADDR(dst), 2000));
	pass(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(in_one->verbs && !rdma_destroy_id(in_one) && !rdma_destroy_id(id));
}

static int all(const char *other)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct sockaddr_storage far = ip_of("192.0.2.77", htons(7));
	struct rdma_cm_id *id;

	no_device(ch, "127.0.0.1", other);
	no_device(ch, "::1", other);
	reached(ch, "127.0.0.1", "127.0.0.1");
	reached(ch, "::1", "127.0.0.1"); /* as :: */
	resolves(ch, "127.0.0.1", "127.0.0.1");
	resolves(ch, "127.0.0.1", "0.0.0.0");
	if (other[0]) {
		reached(ch, strchr(other, ':') ? "::1" : "127.0.0.1", other);
		resolves(ch, strchr(other, ':') ? "::1" : "127.0.0.1", other);
	}
	/* the kernel's routing has no way from loopback to another host */
	id = bound(ch, RDMA_PS_TCP, "127.0.0.1");
	CHECK(rdma_resolve_addr(id, NULL, ADDR(far), 2000) == -1 && (errno == EINVAL || errno == ENETUNREACH));
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(ch);
	return failures != 0;
}

int main(int argc, char **argv)
{
	struct ibv_context **list = rdma_get_devices(NULL);
	char other[INET6_ADDRSTRLEN];
	int failed;

	other_address(list[0], other);
	rdma_free_devices(list);
	failed = all(other);
	if (argc == 1 && !failed && other[0] && !strchr(other, ':')) {
		setenv("STARVERBS_ADDRS", other, 1);
		execl("/proc/self/exe", argv[0], "without loopback", NULL);
		perror("execl");
		return 1;
	}
	if (!other[0])
		printf("rdmacm_loopback: the card has loopback's addresses only\n");
	return failed;
}
