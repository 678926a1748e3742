/* One end of a row of small exchanges between two cards: every operation with immediates, several SGEs,
 * inline data and SRQs, and every mistake that the other side must answer. Both ends walk through the
 * same table; each prints one line a step with what its own card said, so that the lines of two kinds of
 * cards can be laid side by side.
 *
 * usage: peer -p PORT [-d DEVICE] [-g GID_INDEX] [-m PATH_MTU] [-s FIRST_STEP] [SERVER]
 * The end that is given a SERVER is the client: it begins each operation. Fails only if it cannot go on. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { ROOM = 1 << 16, GRH = 40, QKEY = 0x11223344, IMM = 0x01020304, PATIENCE_MS = 20000, QUIET_MS = 150 };
/* Where the pieces of a message of several SGEs begin: far apart, at odd addresses. */
enum { PIECES = 3, STRIDE = 20001 };

enum mistake {
	NONE,
	BAD_RKEY,    /* a key that nobody registered */
	BEYOND,      /* the last byte is past the region's end */
	NO_ACCESS,   /* the region does not allow it */
	UNALIGNED,   /* an atomic's address is no multiple of 8 */
	BAD_LKEY,    /* the client's own key is wrong */
	LATE_RECV,   /* the receive is posted after some RNR NAKs */
	NO_RECV,     /* no receive is ever posted, and RNR retries end */
	SHORT_RECV,  /* the receive is too small */
	PEER_GONE,   /* the server's QP is in RESET */
	WRONG_QKEY,
};

struct step {
	const char *name;
	enum ibv_qp_type type;
	enum ibv_wr_opcode op;
	uint32_t length;
	int pieces;            /* SGEs at either end; 0 means 1 */
	unsigned flags;        /* beside IBV_SEND_SIGNALED */
	int srq;
	enum mistake mistake;
};

#define STEP(title, t, o, l, ...) \
	{ .name = title, .type = IBV_QPT_##t, .op = IBV_WR_##o, .length = l, __VA_ARGS__ }
#define RC(name, ...) STEP(name, RC, __VA_ARGS__)
#define UC(name, ...) STEP(name, UC, __VA_ARGS__)
#define UD(name, ...) STEP(name, UD, __VA_ARGS__)

static const struct step steps[] = {
	RC("rc send", SEND, 1000),
	RC("rc send, nothing", SEND, 0),
	RC("rc send, 9 packets", SEND, 9 * 4096 - 3),
	RC("rc send with immediate", SEND_WITH_IMM, 5000),
	RC("rc send, 3 pieces", SEND, 9001, .pieces = 3),
	RC("rc send, inline", SEND, 64, .flags = IBV_SEND_INLINE),
	RC("rc send, solicited", SEND, 100, .flags = IBV_SEND_SOLICITED),
	RC("rc send to srq", SEND, 3000, .srq = 1),
	RC("rc send with immediate to srq, 3 pieces", SEND_WITH_IMM, 9001, .pieces = 3, .srq = 1),
	RC("rc write", RDMA_WRITE, 12345),
	RC("rc write, nothing", RDMA_WRITE, 0),
	RC("rc write with immediate", RDMA_WRITE_WITH_IMM, 12345),
	RC("rc write with immediate, nothing", RDMA_WRITE_WITH_IMM, 0),
	RC("rc write with immediate to srq", RDMA_WRITE_WITH_IMM, 777, .srq = 1),
	RC("rc write, 3 pieces, inline", RDMA_WRITE, 60, .pieces = 3, .flags = IBV_SEND_INLINE),
	RC("rc read", RDMA_READ, 12345),
	RC("rc read, 3 pieces", RDMA_READ, 20000, .pieces = 3),
	RC("rc fetch and add", ATOMIC_FETCH_AND_ADD, 8),
	RC("rc compare and swap", ATOMIC_CMP_AND_SWP, 8),
	RC("rc send, receive posted late", SEND, 5000, .mistake = LATE_RECV),
	RC("rc send, no receive", SEND, 100, .mistake = NO_RECV),
	RC("rc write with immediate, no receive", RDMA_WRITE_WITH_IMM, 100, .mistake = NO_RECV),
	RC("rc send, receive too small", SEND, 100, .mistake = SHORT_RECV),
	RC("rc send of 3 packets, receive too small", SEND, 9000, .mistake = SHORT_RECV),
	RC("rc write, bad rkey", RDMA_WRITE, 100, .mistake = BAD_RKEY),
	RC("rc read, bad rkey", RDMA_READ, 100, .mistake = BAD_RKEY),
	RC("rc fetch and add, bad rkey", ATOMIC_FETCH_AND_ADD, 8, .mistake = BAD_RKEY),
	RC("rc write past the end", RDMA_WRITE, 9000, .mistake = BEYOND),
	RC("rc read past the end", RDMA_READ, 9000, .mistake = BEYOND),
	RC("rc write, not allowed", RDMA_WRITE, 100, .mistake = NO_ACCESS),
	RC("rc read, not allowed", RDMA_READ, 100, .mistake = NO_ACCESS),
	RC("rc fetch and add, not allowed", ATOMIC_FETCH_AND_ADD, 8, .mistake = NO_ACCESS),
	RC("rc compare and swap, odd address", ATOMIC_CMP_AND_SWP, 8, .mistake = UNALIGNED),
	RC("rc send, bad lkey", SEND, 100, .mistake = BAD_LKEY),
	RC("rc send, peer gone", SEND, 100, .mistake = PEER_GONE),
	UC("uc send", SEND, 9000),
	UC("uc send with immediate", SEND_WITH_IMM, 100),
	UC("uc write", RDMA_WRITE, 9000),
	UC("uc write with immediate", RDMA_WRITE_WITH_IMM, 9000),
	UC("uc write, bad rkey", RDMA_WRITE, 100, .mistake = BAD_RKEY),
	UC("uc send, receive too small", SEND, 9000, .mistake = SHORT_RECV),
	UD("ud send", SEND, 1000),
	UD("ud send with immediate", SEND_WITH_IMM, 200),
	UD("ud send, inline, to srq", SEND, 60, .flags = IBV_SEND_INLINE, .srq = 1),
	UD("ud send, wrong qkey", SEND, 100, .mistake = WRONG_QKEY),
};

/* What the ends tell each other, in network order. */
struct greeting {
	uint32_t qpn, psn, rkey, pad;
	uint64_t address;
	union ibv_gid gid;
};

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static union ibv_gid own_gid;
static unsigned char *own;
static int client, sock, gid_index = 0;
static enum ibv_mtu mtu = IBV_MTU_1024;

/* The objects of one step. */
static struct ibv_mr *mr;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_qp *qp;
static struct ibv_ah *ah;
static struct greeting peer;

static void die(const char *what)
{
	fprintf(stderr, "peer: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void try(int result, const char *what)
{
	if (result) {
		errno = result > 0 ? result : errno;
		die(what);
	}
}

static void swap(const void *out, void *in, size_t size)
{
	if (write(sock, out, size) != (ssize_t)size)
		die("write to the other end");
	if (recv(sock, in, size, MSG_WAITALL) != (ssize_t)size)
		die("the other end is gone");
}

/* Both ends have come so far. */
static void meet(void)
{
	char other;

	swap("=", &other, 1);
}

static long now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void dial(const char *server, const char *port)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = server ? 0 : AI_PASSIVE }, *a;
	int one = 1, listener;

	hints.ai_family = server ? AF_UNSPEC : AF_INET6;
	if (getaddrinfo(server, port, &hints, &a))
		die("address");
	listener = socket(a->ai_family, SOCK_STREAM, 0);
	if (server) {
		sock = listener;
		try(connect(sock, a->ai_addr, a->ai_addrlen), "connect");
	} else {
		setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
		try(bind(listener, a->ai_addr, a->ai_addrlen), "bind");
		try(listen(listener, 1), "listen");
		sock = accept(listener, NULL, NULL);
		if (sock < 0)
			die("accept");
		close(listener);
	}
	freeaddrinfo(a);
}

static void open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int i;

	for (i = 0; list && list[i] && name && strcmp(name, ibv_get_device_name(list[i])); i++)
		;
	if (!list || !list[i])
		die("no such device");
	ctx = ibv_open_device(list[i]);
	if (!ctx)
		die("open device");
	ibv_free_device_list(list);
	try(ibv_query_gid(ctx, 1, gid_index, &own_gid), "query gid");
	pd = ibv_alloc_pd(ctx);
	own = aligned_alloc(4096, ROOM);
	if (!pd || !own)
		die("alloc pd");
	try(fcntl(ctx->async_fd, F_SETFL, O_NONBLOCK), "async fd");
}

static unsigned char pattern(uint32_t i, int of_client)
{
	return (unsigned char)(i * 7 + i / 256 + (of_client ? 1 : 101));
}

/* The pieces that hold `length` bytes of a message from `base` on. */
static int pieces(struct ibv_sge *sge, const struct step *s, uint32_t base, uint32_t length)
{
	int n = s->pieces ? s->pieces : 1, i;

	for (i = 0; i < n; i++) {
		uint32_t part = i == n - 1 ? length : length / 3;

		sge[i] = (struct ibv_sge){ (uintptr_t)own + base + (uint32_t)i * STRIDE, part, mr->lkey };
		length -= part;
	}
	return n;
}

/* Walks over the bytes of the pieces; fills them, or says whether they are as the filler left them. */
static int each_byte(const struct step *s, uint32_t base, uint32_t length, int fill, int of_client)
{
	struct ibv_sge sge[PIECES];
	int n = pieces(sge, s, base, length), i;
	uint32_t at = 0, k;

	for (i = 0; i < n; i++)
		for (k = 0; k < sge[i].length; k++, at++) {
			unsigned char *byte = (unsigned char *)(uintptr_t)sge[i].addr + k;

			if (fill)
				*byte = pattern(at, of_client);
			else if (*byte != pattern(at, of_client))
				return 0;
		}
	return 1;
}

static uint32_t grh(const struct step *s)
{
	return s->type == IBV_QPT_UD ? GRH : 0;
}

static int receives(const struct step *s)
{
	return s->op == IBV_WR_SEND || s->op == IBV_WR_SEND_WITH_IMM || s->op == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static int is_atomic(const struct step *s)
{
	return s->op == IBV_WR_ATOMIC_FETCH_AND_ADD || s->op == IBV_WR_ATOMIC_CMP_AND_SWP;
}

static void create(const struct step *s)
{
	struct ibv_srq_init_attr sia = { .attr = { .max_wr = 8, .max_sge = PIECES } };
	struct ibv_qp_init_attr ia = { .qp_type = s->type, .cap = { 8, 8, PIECES, PIECES, 64 } };
	int access = IBV_ACCESS_LOCAL_WRITE;

	if (s->mistake != NO_ACCESS)
		access |= IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	mr = ibv_reg_mr(pd, own, ROOM, access);
	cq = ibv_create_cq(ctx, 32, NULL, NULL, 0);
	srq = s->srq ? ibv_create_srq(pd, &sia) : NULL;
	ia.send_cq = ia.recv_cq = cq;
	ia.srq = srq;
	qp = ibv_create_qp(pd, &ia);
	if (!mr || !cq || (s->srq && !srq) || !qp)
		die("create");
}

static void exchange(void)
{
	struct greeting mine = { htonl(qp->qp_num), htonl((uint32_t)rand() & 0xffffff), htonl(mr->rkey), 0,
				 (uintptr_t)own, own_gid };

	swap(&mine, &peer, sizeof(peer));
	peer.pad = ntohl(mine.psn);
	peer.qpn = ntohl(peer.qpn);
	peer.psn = ntohl(peer.psn);
	peer.rkey = ntohl(peer.rkey);
}

static void join(const struct step *s)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	int connected = s->type != IBV_QPT_UD, rc = s->type == IBV_QPT_RC;

	a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | (rc ? IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC : 0);
	if (s->mistake == WRONG_QKEY && !client)
		a.qkey++;
	try(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				  (connected ? IBV_QP_ACCESS_FLAGS : IBV_QP_QKEY)), "to INIT");
	if (s->mistake == PEER_GONE && !client)
		return;
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = peer.qpn,
				  .rq_psn = peer.psn, .max_dest_rd_atomic = 4, .min_rnr_timer = 12 };
	a.ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = 1 };
	a.ah_attr.grh = (struct ibv_global_route){ peer.gid, 0, (uint8_t)gid_index, 64, 0 };
	if (!connected && !(ah = ibv_create_ah(pd, &a.ah_attr)))
		die("create ah");
	try(ibv_modify_qp(qp, &a, IBV_QP_STATE | (connected ? IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				  IBV_QP_RQ_PSN : 0) | (rc ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0)), "to RTR");
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = peer.pad, .timeout = 14, .retry_cnt = 3,
				  .rnr_retry = s->mistake == NO_RECV ? 2 : 7, .max_rd_atomic = 4 };
	try(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | (rc ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
				  IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0)), "to RTS");
}

static void post_recv(const struct step *s)
{
	struct ibv_sge sge[PIECES];
	struct ibv_recv_wr wr = { .wr_id = 2, .sg_list = sge }, *bad;
	uint32_t length = s->length + grh(s);

	wr.num_sge = pieces(sge, s, 0, s->mistake == SHORT_RECV ? length / 2 : length);
	try(srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad), "post receive");
}

/* Posts the operation; the card may refuse it at once. */
static int post_send(const struct step *s)
{
	struct ibv_sge sge[PIECES];
	struct ibv_send_wr wr = { .wr_id = 1, .sg_list = sge, .opcode = s->op,
				  .send_flags = s->flags | IBV_SEND_SIGNALED }, *bad;
	uint64_t address = peer.address;
	uint32_t rkey = peer.rkey;

	wr.num_sge = pieces(sge, s, 0, s->length);
	wr.imm_data = htonl(IMM);
	if (s->mistake == BAD_RKEY)
		rkey ^= 0x55;
	if (s->mistake == BEYOND)
		address += ROOM - s->length + 1;
	if (s->mistake == UNALIGNED)
		address += 4;
	if (s->mistake == BAD_LKEY)
		sge[0].lkey ^= 0x55;
	if (is_atomic(s)) {
		wr.wr.atomic.remote_addr = address;
		wr.wr.atomic.rkey = rkey;
		memcpy(&wr.wr.atomic.compare_add, (uint64_t[]){ 5 }, 8);
		if (s->op == IBV_WR_ATOMIC_CMP_AND_SWP) {
			wr.wr.atomic.compare_add = 1000;
			wr.wr.atomic.swap = 1005;
		}
	} else if (s->type == IBV_QPT_UD) {
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = peer.qpn;
		wr.wr.ud.remote_qkey = QKEY;
	} else {
		wr.wr.rdma.remote_addr = address;
		wr.wr.rdma.rkey = rkey;
	}
	return ibv_post_send(qp, &wr, &bad);
}

/* Says what a completion says. */
static void tell(const struct ibv_wc *wc)
{
	printf("; %s %s", wc->wr_id == 1 ? "sent" : "received", ibv_wc_status_str(wc->status));
	if (wc->status || wc->wr_id == 1)
		return;
	printf(" %u bytes", wc->byte_len);
	if (wc->wc_flags & IBV_WC_WITH_IMM)
		printf(" imm %x", ntohl(wc->imm_data));
	if (qp->qp_type == IBV_QPT_UD && (wc->wc_flags & IBV_WC_GRH))
		printf(" grh");
}

/* Tells of completions until `wanted` have come, or none comes for `patience` milliseconds. */
static int drain(int wanted, long patience)
{
	long end = now_ms() + patience;
	struct ibv_wc wc;
	int found = 0, n;

	while (found < wanted && now_ms() < end) {
		n = ibv_poll_cq(cq, 1, &wc);
		if (n < 0)
			die("poll");
		if (n) {
			tell(&wc);
			found++;
		}
	}
	return found;
}

static void tell_event(void)
{
	struct ibv_async_event event;

	while (!ibv_get_async_event(ctx, &event)) {
		printf("; event %s", ibv_event_type_str(event.event_type));
		ibv_ack_async_event(&event);
	}
}

static void tell_state(void)
{
	static const char *const names[] = { "RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR" };
	struct ibv_qp_init_attr ia;
	struct ibv_qp_attr a;

	try(ibv_query_qp(qp, &a, IBV_QP_STATE, &ia), "query qp");
	printf("; qp %s", names[a.qp_state]);
}

/* Says what has become of this end's buffer: who wrote last what is in it. */
static void tell_data(const struct step *s)
{
	uint64_t word;

	if (is_atomic(s)) {
		memcpy(&word, own, 8);
		printf("; word %llu", (unsigned long long)word);
	} else if (each_byte(s, 0, s->length + grh(s), 0, client)) {
		printf("; data own");
	} else if (each_byte(s, grh(s), s->length, 0, !client)) {
		printf("; data peer's");
	} else {
		printf("; data mixed");
	}
}

/* A datagram's first 40 bytes: the IP header, whose last addresses are the sender's and this end's. */
static void tell_grh(const struct step *s)
{
	int v4 = !memcmp(&own_gid, "\0\0\0\0\0\0\0\0\0\0\xff\xff", 12);
	const unsigned char *from = own + (v4 ? 32 : 8), *to = own + (v4 ? 36 : 24);
	size_t width = v4 ? 4 : 16, skip = v4 ? 12 : 0;

	if (s->type == IBV_QPT_UD && !client && s->mistake == NONE)
		printf("; addresses %s", !memcmp(from, peer.gid.raw + skip, width) &&
			       !memcmp(to, own_gid.raw + skip, width) ? "right" : "wrong");
}

static void act_as_client(const struct step *s)
{
	if (post_send(s))
		printf("; refused");
	else if (!drain(1, PATIENCE_MS))
		printf("; nothing came");
	meet();
	/* no more is to come: only time can show it */
	drain(8, QUIET_MS);
}

static void act_as_server(const struct step *s)
{
	int done = 0;

	if (s->mistake == LATE_RECV) {
		/* the delay is what is meant: the peer is told RNR meanwhile, which not every peer counts */
		usleep(100000);
		post_recv(s);
	}
	/* An RC client's completion says that all is here; datagrams and UC may still be on the way. */
	if (s->type == IBV_QPT_RC && s->mistake == NONE && receives(s))
		done = drain(1, PATIENCE_MS);
	meet();
	/* no more is to come, or datagrams may be lost: only time can show it */
	drain(8 - done, s->type == IBV_QPT_RC ? QUIET_MS : 3 * QUIET_MS);
}

/* What an RDMA operation or atomic touches at the server is in one piece. */
static struct step at_this_end(struct step s)
{
	if (!client && s.op != IBV_WR_SEND && s.op != IBV_WR_SEND_WITH_IMM)
		s.pieces = 1;
	return s;
}

static void walk(const struct step *s)
{
	create(s);
	exchange();
	join(s);
	memset(own, 0, ROOM);
	each_byte(s, 0, s->length + grh(s), 1, client);
	if (is_atomic(s))
		memcpy(own, (uint64_t[]){ client ? 7 : 1000 }, 8);
	if (!client && receives(s) && s->mistake != LATE_RECV && s->mistake != NO_RECV && s->mistake != PEER_GONE)
		post_recv(s);
	meet();
	printf("%s", s->name);
	if (client)
		act_as_client(s);
	else
		act_as_server(s);
	tell_data(s);
	tell_grh(s);
	tell_state();
	tell_event();
	printf("\n");
	fflush(stdout);
	meet();
	try(ibv_destroy_qp(qp), "destroy qp");
	if (srq)
		try(ibv_destroy_srq(srq), "destroy srq");
	if (ah)
		try(ibv_destroy_ah(ah), "destroy ah");
	ah = NULL;
	try(ibv_destroy_cq(cq), "destroy cq");
	try(ibv_dereg_mr(mr), "dereg mr");
}

int main(int argc, char **argv)
{
	const char *device = NULL, *port = "18515";
	size_t first = 0, i;
	int option;

	while ((option = getopt(argc, argv, "d:g:m:p:s:")) != -1)
		switch (option) {
		case 'd': device = optarg; break;
		case 'g': gid_index = atoi(optarg); break;
		case 'm': mtu = (enum ibv_mtu)(__builtin_ctz((unsigned)atoi(optarg)) - 7); break;
		case 'p': port = optarg; break;
		case 's': first = (size_t)atoi(optarg); break;
		default: return 2;
		}
	client = optind < argc;
	srand((unsigned)getpid());
	open_device(device);
	dial(client ? argv[optind] : NULL, port);
	for (i = first; i < sizeof(steps) / sizeof(*steps); i++) {
		struct step s = at_this_end(steps[i]);

		walk(&s);
	}
	ibv_dealloc_pd(pd);
	ibv_close_device(ctx);
	return 0;
}
