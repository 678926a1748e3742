/* The calls of librdmacm that came after Debian 12's release (RDMACM_1.4 and 1.5), looked up by version since
 * no installed header has them: names looked up by way of an id, events of the
 * program's own, rsockets' epoll.
 * Build: cc -Wall -o rdmacm_newer rdmacm_newer.c -lrdmacm -libverbs -lpthread -ldl; run with LD_LIBRARY_PATH
 * naming the library under test. */
#include "rdmacm.h"
#include <dlfcn.h>
#include <netdb.h>
#include <pthread.h>

#define EVENT(number) ((enum rdma_cm_event_type)(number))
#define ADDRINFO_RESOLVED EVENT(16)
#define ADDRINFO_ERROR EVENT(17)
#define USER EVENT(18)
#define INTERNAL EVENT(19)

enum { SA = 0x10, DNS = 0x20 }; /* RAI_SA, RAI_DNS */

static int (*query_addrinfo)(struct rdma_cm_id *, struct rdma_addrinfo **);
static int (*resolve_addrinfo)(struct rdma_cm_id *, const char *, const char *, const struct rdma_addrinfo *);
static int (*write_cm_event)(struct rdma_cm_id *, enum rdma_cm_event_type, int, uint64_t);

static void *find(const char *name, const char *node)
{
	void *found = dlvsym(RTLD_DEFAULT, name, node);

	if (!found) {
		fprintf(stderr, "%s@%s is missing\n", name, node);
		exit(1);
	}
	return found;
}

/* A name, an event, a result that is taken once. */
static void lookups(struct rdma_event_channel *ch)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE | DNS, .ai_port_space = RDMA_PS_TCP }, *info = NULL;
	struct rdma_cm_id *id = id_of(ch, RDMA_PS_TCP);
	struct rdma_cm_event *event;

	REFUSED(resolve_addrinfo(NULL, "127.0.0.1", "7471", NULL), EINVAL);
	REFUSED(resolve_addrinfo(id, NULL, NULL, NULL), EINVAL);
	REFUSED(query_addrinfo(id, &info), ENOENT);
	CHECK(!resolve_addrinfo(id, "127.0.0.1", "7471", &hints));
	REFUSED(resolve_addrinfo(id, "127.0.0.1", "7471", NULL), EBUSY); /* nobody took the first one's result */
	event = next(ch, ADDRINFO_RESOLVED);
	CHECK(event->id == id && !event->status && !rdma_ack_cm_event(event));
	REFUSED(query_addrinfo(id, NULL), EINVAL);
	REFUSED(query_addrinfo(NULL, &info), EINVAL);
	CHECK(!query_addrinfo(id, &info) && info->ai_family == AF_INET && !info->ai_dst_len);
	CHECK(((struct sockaddr_in *)info->ai_src_addr)->sin_port == htons(7471));
	CHECK(!rdma_bind_addr(id, info->ai_src_addr) && rdma_get_src_port(id) == htons(7471));
	rdma_freeaddrinfo(info);
	REFUSED(query_addrinfo(id, &info), ENOENT);

	/* the id goes with a result that nobody took */
	CHECK(!resolve_addrinfo(id, "::1", "7471", NULL));
	pass(ch, ADDRINFO_RESOLVED);
	CHECK(!rdma_destroy_id(id));
}

/* A name that is none is told by the event, hints that are wrong by the call. */
static void failed_lookups(struct rdma_event_channel *ch)
{
	struct rdma_addrinfo number = { .ai_flags = RAI_NUMERICHOST }, flags = { .ai_flags = 1 << 20 }, *info;
	struct rdma_cm_id *id = id_of(ch, RDMA_PS_TCP);
	struct rdma_cm_event *event;

	CHECK(!resolve_addrinfo(id, "not.a.number", "5", &number));
	event = next(ch, ADDRINFO_ERROR);
	CHECK(event->id == id && event->status == -ENOENT && !rdma_ack_cm_event(event));
	REFUSED(query_addrinfo(id, &info), ENOENT);
	REFUSED(resolve_addrinfo(id, "127.0.0.1", "5", &flags), EINVAL);
	CHECK(!strcmp(rdma_event_str(ADDRINFO_RESOLVED), "RDMA_CM_EVENT_ADDRINFO_RESOLVED"));
	CHECK(!strcmp(rdma_event_str(ADDRINFO_ERROR), "RDMA_CM_EVENT_ADDRINFO_ERROR"));
	CHECK(!resolve_addrinfo(id, "127.0.0.1", "5", NULL)); /* what failed is over */
	pass(ch, ADDRINFO_RESOLVED);
	CHECK(!rdma_destroy_id(id));

	/* an id without a channel waits for the event */
	CHECK(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
	REFUSED(resolve_addrinfo(id, "not.a.number", "5", &number), ENOENT);
	CHECK(!resolve_addrinfo(id, "127.0.0.1", "5", NULL) && id->event->event == ADDRINFO_RESOLVED);
	CHECK(!query_addrinfo(id, &info) && info->ai_dst_len);
	rdma_freeaddrinfo(info);
	CHECK(!rdma_destroy_id(id));
}

/* RoCE has no subnet administrator. */
static void no_sa(struct rdma_event_channel *ch)
{
	struct rdma_addrinfo sa = { .ai_flags = SA }, both = { .ai_flags = SA | DNS }, *info;
	struct sockaddr_in to = at("127.0.0.1", 7);
	struct rdma_cm_id *id = id_of(ch, RDMA_PS_TCP);

	REFUSED(resolve_addrinfo(id, NULL, "service", &both), EOPNOTSUPP);
	REFUSED(resolve_addrinfo(id, "127.0.0.1", "service", &sa), EOPNOTSUPP);
	REFUSED(resolve_addrinfo(id, NULL, NULL, &sa), EINVAL);
	REFUSED(resolve_addrinfo(id, NULL, "service", &sa), EINVAL); /* not bound to a port */
	CHECK(!rdma_resolve_addr(id, NULL, ADDR(to), 2000));
	pass(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	REFUSED(resolve_addrinfo(id, NULL, "service", &sa), EOPNOTSUPP);
	REFUSED(rdma_getaddrinfo(NULL, "service", &sa, &info), EOPNOTSUPP);
	REFUSED(query_addrinfo(id, &info), ENOENT);
	CHECK(!rdma_destroy_id(id));
}

static void *waits(void *ch)
{
	struct rdma_cm_event *event = NULL;

	CHECK(!rdma_get_cm_event(ch, &event));
	return event;
}

/* An event of the program's own comes in order, to an id in any state, and wakes who sleeps. */
static void own_events(struct rdma_event_channel *ch)
{
	const uint64_t arg = 0xfedcba9876543210;
	struct sockaddr_in where;
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct rdma_cm_id *l = listener(ch, RDMA_PS_TCP, &where), *id = id_of(ch, RDMA_PS_TCP), *child;
	struct pollfd p = { .fd = ch->fd, .events = POLLIN };
	struct rdma_cm_event *event;
	pthread_t thread;
	void *got;

	REFUSED(write_cm_event(NULL, USER, 0, 0), EINVAL);
	REFUSED(write_cm_event(id, INTERNAL, 0, 0), EINVAL);
	REFUSED(write_cm_event(id, RDMA_CM_EVENT_ESTABLISHED, 0, 0), EINVAL);
	CHECK(!poll(&p, 1, 0) && !write_cm_event(id, USER, -5, arg) && poll(&p, 1, 0) == 1);
	CHECK(!write_cm_event(id, USER, 6, 7));
	event = next(ch, USER);
	CHECK(event->id == id && !event->listen_id && event->status == -5);
	CHECK(!memcmp(&event->param, &arg, sizeof(arg)) && !rdma_ack_cm_event(event));
	event = next(ch, USER);
	CHECK(event->status == 6 && *(uint64_t *)&event->param == 7 && !rdma_ack_cm_event(event));

	CHECK(!pthread_create(&thread, NULL, waits, ch));
	CHECK(!write_cm_event(id, USER, 0, 8) && !pthread_join(thread, &got));
	event = got;
	CHECK(event->event == USER && *(uint64_t *)&event->param == 8 && !rdma_ack_cm_event(event));

	/* of a request that is not answered nothing else is told */
	CHECK(!rdma_destroy_id(id));
	id = routed(ch, RDMA_PS_TCP, where, IBV_QPT_RC);
	CHECK(!rdma_connect(id, &param));
	event = next(ch, RDMA_CM_EVENT_CONNECT_REQUEST);
	child = event->id;
	CHECK(!rdma_ack_cm_event(event) && !write_cm_event(child, USER, 0, 9));
	event = next(ch, USER);
	CHECK(event->id == child && !rdma_ack_cm_event(event));
	CHECK(!resolve_addrinfo(child, "127.0.0.1", "5", NULL));
	pass(ch, ADDRINFO_RESOLVED);
	CHECK(!write_cm_event(child, USER, 0, 10) && !rdma_destroy_id(child)); /* drops what waits */
	pass(ch, RDMA_CM_EVENT_REJECTED);
	rdma_destroy_qp(id);
	CHECK(!rdma_destroy_id(id) && !rdma_destroy_id(l) && !poll(&p, 1, 0));
}

int main(void)
{
	static const char *const repoll[] = { "repoll_create", "repoll_ctl", "repoll_wait" };
	struct rdma_event_channel *ch = rdma_create_event_channel();

	query_addrinfo = find("rdma_query_addrinfo", "RDMACM_1.4");
	resolve_addrinfo = find("rdma_resolve_addrinfo", "RDMACM_1.4");
	write_cm_event = find("rdma_write_cm_event", "RDMACM_1.4");
	for (int i = 0; i < 3; i++) {
		int (*call)(int, int, int, void *) = find(repoll[i], "RDMACM_1.5");

		REFUSED(call(0, 0, 0, NULL), EOPNOTSUPP);
	}
	lookups(ch);
	failed_lookups(ch);
	no_sa(ch);
	own_events(ch);
	rdma_destroy_event_channel(ch);
	if (!failures)
		printf("librdmacm's calls of later releases: all as promised\n");
	return failures != 0;
}
