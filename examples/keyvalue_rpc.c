/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A key-value store whose GET is one RPC, which the server's card answers by itself (StRoM): the kernel reads
 * the entry of the hash table, and then the value. Beside it the same by READs, of which one waits for the
 * other, and by TCP, for which a thread of the server's works.
 *
 *	keyvalue_rpc 7473			a server at port 7473 (of TCP, too), of one client
 *	keyvalue_rpc 192.0.2.1 7473 KEY ...	its client: KEYs are numbers
 */
#include <endian.h>
#include <inttypes.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <infiniband/stardv.h>
#include <rdma/rdma_cma.h>

/* Entries that keys hash to, and as many for chains; values 1 to 400 of up to 400 bytes. */
enum { ENTRIES = 64, KEYS = 400, ROOM = 512, HOPS = 16 };
/* Any number that both sides know. */
static const uint64_t OP_GET = 0x1000;

struct store {
	struct stardv_get_entry entries[2 * ENTRIES];
	char values[KEYS + 1][KEYS + 1];
};

/* What a client must know of it; big endian, as it goes over the wire. */
struct where {
	uint64_t addr;
	uint32_t rkey;
};

/* What a client's card reads and writes. */
struct local {
	/* The answer of an RPC ends where this does */
	_Alignas(8) char answer[ROOM];
	struct stardv_get_entry entry;
	char value[ROOM];
};

static struct store store;
static struct local local;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static uint32_t first_entry(uint64_t key)
{
	/* 0 ends a chain: no key hashes there */
	return 1 + key * 0x9e3779b97f4a7c15 % (ENTRIES - 1);
}

/* Puts a value of KEY bytes into the entry of its key, or into one of its chain. */
static void put(uint64_t key)
{
	static uint32_t chained = ENTRIES;
	struct stardv_get_entry *entry = &store.entries[first_entry(key)];

	snprintf(store.values[key], sizeof(store.values[key]), "%0*" PRIu64, (int)key, key);
	for (int at = 0;; at++) {
		if (at == 3) {
			if (!entry->next)
				entry->next = htole32(chained++);
			entry = &store.entries[le32toh(entry->next)];
			at = 0;
		}
		if (!entry->buckets[at].value) {
			entry->buckets[at].key = htole64(key);
			entry->buckets[at].value = htole64((uintptr_t)store.values[key]);
			entry->buckets[at].len = htole32((uint32_t)key);
			return;
		}
	}
}

/* The value of a key, in this process. */
static const char *look_up(uint64_t key, uint32_t *len)
{
	const struct stardv_get_entry *entry;

	for (uint32_t index = first_entry(key); index; index = le32toh(entry->next)) {
		entry = &store.entries[index];
		for (int at = 0; at < 3; at++) {
			if (entry->buckets[at].value && le64toh(entry->buckets[at].key) == key) {
				*len = le32toh(entry->buckets[at].len);
				return (const char *)(uintptr_t)le64toh(entry->buckets[at].value);
			}
		}
	}
	return NULL;
}

static struct rdma_cm_id *endpoint(const char *host, const char *port)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = host ? 0 : RAI_PASSIVE }, *to;
	struct rdma_cm_id *id;

	if (rdma_getaddrinfo(host, port, &hints, &to))
		die("rdma_getaddrinfo");
	if (rdma_create_ep(&id, to, NULL, NULL))
		die("rdma_create_ep");
	rdma_freeaddrinfo(to);
	return id;
}

/* A TCP socket that is connected to a host, or listens. */
static int tcp(const char *host, const char *port)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = host ? 0 : AI_PASSIVE }, *to;
	int one = 1, fd = getaddrinfo(host, port, &hints, &to) ? -1 : socket(to->ai_family, SOCK_STREAM, 0);

	if (fd < 0)
		die("getaddrinfo, socket");
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (host ? connect(fd, to->ai_addr, to->ai_addrlen) :
		   bind(fd, to->ai_addr, to->ai_addrlen) || listen(fd, 1))
		die("connect, bind, listen");
	freeaddrinfo(to);
	return fd;
}

static int read_all(int fd, void *to, size_t len)
{
	return recv(fd, to, len, MSG_WAITALL) == (ssize_t)len;
}

static void write_all(int fd, const void *from, size_t len)
{
	if (send(fd, from, len, MSG_NOSIGNAL) != (ssize_t)len)
		die("send");
}

/* Answers the client's GETs by TCP: a key of 8 bytes, its value's length in 4 and the value; no length is no
 * value. */
static void *serve_tcp(void *listener)
{
	int fd = accept(*(int *)listener, NULL, NULL);
	uint64_t key;

	while (fd >= 0 && read_all(fd, &key, sizeof(key))) {
		uint32_t len = 0, said;
		const char *value = look_up(be64toh(key), &len);

		said = htobe32(len);
		write_all(fd, &said, sizeof(said));
		if (value)
			write_all(fd, value, len);
	}
	close(fd);
	return NULL;
}

/* A queue pair that carries RPCs. */
static void make_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1 };

	attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
	attr.create_flags = STARDV_QP_CREATE_RPC;
	attr.cap.max_send_wr = attr.cap.max_recv_wr = 4;
	attr.cap.max_send_sge = attr.cap.max_recv_sge = 1;
	attr.cap.max_inline_data = 64;
	attr.pd = ibv_alloc_pd(id->verbs);
	attr.send_cq = attr.recv_cq = ibv_create_cq(id->verbs, 16, NULL, NULL, 0);
	if (!attr.pd || !attr.send_cq)
		die("ibv_alloc_pd, ibv_create_cq");
	if (rdma_create_qp_ex(id, &attr))
		die("rdma_create_qp_ex");
}

static void end(struct rdma_cm_id *id, struct ibv_mr *mr)
{
	struct ibv_pd *pd = mr->pd;
	struct ibv_cq *cq = id->qp->send_cq;

	rdma_disconnect(id);
	rdma_destroy_qp(id);
	ibv_dereg_mr(mr);
	ibv_destroy_cq(cq);
	ibv_dealloc_pd(pd);
	rdma_destroy_ep(id);
}

static void server(const char *port)
{
	struct rdma_cm_id *listener = endpoint(NULL, port), *id;
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4, .rnr_retry_count = 7 };
	struct pollfd events;
	struct where where;
	struct ibv_mr *mr;
	pthread_t thread;
	int socket;

	for (uint64_t key = 1; key <= KEYS; key++)
		put(key);
	socket = tcp(NULL, port);
	if (pthread_create(&thread, NULL, serve_tcp, &socket) || pthread_detach(thread))
		die("pthread_create");
	if (rdma_listen(listener, 1) || rdma_get_request(listener, &id))
		die("rdma_listen, rdma_get_request");
	make_qp(id);
	mr = ibv_reg_mr(id->qp->pd, &store, sizeof(store), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
	if (!mr)
		die("ibv_reg_mr");
	if (stardv_load_kernel(id->qp->pd, OP_GET, STARDV_KERNEL_GET))
		die("stardv_load_kernel");
	where = (struct where){ htobe64((uintptr_t)store.entries), htobe32(mr->rkey) };
	param.private_data = &where;
	param.private_data_len = sizeof(where);
	if (rdma_accept(id, &param))
		die("rdma_accept");
	/* Until the client leaves: all else is the card's work. */
	events = (struct pollfd){ .fd = id->channel->fd, .events = POLLIN };
	if (poll(&events, 1, -1) < 0)
		die("poll");
	stardv_unload_kernel(id->qp->pd, OP_GET);
	end(id, mr);
	rdma_destroy_ep(listener);
}

static void complete(struct rdma_cm_id *id)
{
	struct ibv_wc wc;
	int n;

	do
		n = ibv_poll_cq(id->qp->send_cq, 1, &wc);
	while (!n);
	if (n < 0 || wc.status) {
		fprintf(stderr, "a request failed: %s\n", n < 0 ? "ibv_poll_cq" : ibv_wc_status_str(wc.status));
		exit(1);
	}
}

/* The value of a key, of `len` bytes, or NULL: by one RPC. */
static const char *get(struct rdma_cm_id *id, const struct where *where, struct ibv_mr *mr, uint64_t key,
		       uint32_t *len)
{
	struct stardv_rpc_record *clear = (void *)(local.answer + ROOM - sizeof(*clear));
	const struct stardv_rpc_record *record;
	struct {
		struct stardv_rpc_target target;
		struct stardv_get get;
	} params = {
		{ htole64((uintptr_t)local.answer), htole32(mr->rkey), htole32(ROOM), 0, 0 },
		{ htole64(where->addr), htole64(key), htole32(first_entry(key)), htole32(where->rkey),
		  htole32(where->rkey), htole32(HOPS) },
	};
	struct ibv_sge sge = { (uintptr_t)&params, sizeof(params), 0 };
	struct stardv_rpc_wr wr = { 0, key, OP_GET, &sge, 1, IBV_SEND_INLINE };
	struct ibv_wc wc;
	int failed = 0;

	clear->magic = 0;
	if (stardv_post_rpc(id->qp, &wr, sizeof(wr)))
		die("stardv_post_rpc");
	/* The answer does not wait for the completion, which says that the kernel has run. */
	while (!(record = stardv_rpc_answer(local.answer, ROOM)))
		if (ibv_poll_cq(id->qp->send_cq, 1, &wc) > 0)
			failed = wc.status ? (int)wc.status : -1;
		else if (failed > 0)
			break;
	if (failed > 0) {
		fprintf(stderr, "the RPC failed: %s\n", ibv_wc_status_str((enum ibv_wc_status)failed));
		exit(1);
	}
	if (!failed)
		complete(id);
	*len = le32toh(record->length);
	if (le32toh(record->code) == STARDV_RPC_OK)
		return (const char *)record - *len;
	if (le32toh(record->code) == STARDV_RPC_NOT_FOUND)
		return NULL;
	fprintf(stderr, "the kernel failed: %" PRIu32 "\n", le32toh(record->code));
	exit(1);
}

static void read_remote(struct rdma_cm_id *id, struct ibv_mr *mr, void *to, uint32_t len, uint64_t from,
			uint32_t rkey)
{
	struct ibv_sge sge = { (uintptr_t)to, len, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ }, *bad;

	wr.wr.rdma.remote_addr = from;
	wr.wr.rdma.rkey = rkey;
	if (ibv_post_send(id->qp, &wr, &bad))
		die("ibv_post_send");
	complete(id);
}

/* The same by READs; adds how many there were. */
static const char *get_by_read(struct rdma_cm_id *id, const struct where *where, struct ibv_mr *mr,
			       uint64_t key, uint32_t *len, unsigned int *reads)
{
	struct stardv_get_entry *entry = &local.entry;

	for (uint32_t index = first_entry(key); index; index = le32toh(entry->next)) {
		read_remote(id, mr, entry, sizeof(*entry), where->addr + index * sizeof(*entry), where->rkey);
		(*reads)++;
		for (int at = 0; at < 3; at++) {
			if (!entry->buckets[at].value || le64toh(entry->buckets[at].key) != key)
				continue;
			*len = le32toh(entry->buckets[at].len);
			read_remote(id, mr, local.value, *len, le64toh(entry->buckets[at].value), where->rkey);
			(*reads)++;
			return local.value;
		}
	}
	return NULL;
}

/* The same by TCP. */
static const char *get_by_tcp(int fd, uint64_t key, uint32_t *len)
{
	static char value[ROOM];
	uint64_t asked = htobe64(key);

	write_all(fd, &asked, sizeof(asked));
	if (!read_all(fd, len, sizeof(*len)))
		die("recv");
	*len = be32toh(*len);
	if (!*len)
		return NULL;
	if (*len > sizeof(value) || !read_all(fd, value, *len))
		die("recv");
	return value;
}

static int same(const char *a, uint32_t a_len, const char *b, uint32_t b_len)
{
	return !a == !b && (!a || (a_len == b_len && !memcmp(a, b, a_len)));
}

static int client(const char *host, const char *port, char **keys)
{
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4, .rnr_retry_count = 7 };
	struct rdma_cm_id *id = endpoint(host, port);
	int wrong = 0, fd;
	struct where where;
	struct ibv_mr *mr;

	param.retry_count = 7;
	make_qp(id);
	mr = ibv_reg_mr(id->qp->pd, &local, sizeof(local), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	if (!mr)
		die("ibv_reg_mr");
	if (rdma_connect(id, &param))
		die("rdma_connect");
	memcpy(&where, id->event->param.conn.private_data, sizeof(where));
	where = (struct where){ be64toh(where.addr), be32toh(where.rkey) };
	fd = tcp(host, port);
	for (; *keys; keys++) {
		uint64_t key = strtoull(*keys, NULL, 10);
		uint32_t len = 0, read_len = 0, tcp_len = 0;
		unsigned int reads = 0;
		const char *value = get(id, &where, mr, key, &len);
		const char *read = get_by_read(id, &where, mr, key, &read_len, &reads);
		const char *told = get_by_tcp(fd, key, &tcp_len);

		if (!same(value, len, read, read_len) || !same(value, len, told, tcp_len))
			wrong = printf("%s: an RPC, READs and TCP find different values\n", *keys);
		else if (value)
			printf("%s: %" PRIu32 " bytes by 1 RPC, %u READs or TCP\n", *keys, len, reads);
		else
			printf("%s is not there\n", *keys);
	}
	close(fd);
	end(id, mr);
	return wrong ? 1 : 0;
}

int main(int argc, char **argv)
{
	if (argc == 2)
		return server(argv[1]), 0;
	if (argc > 3)
		return client(argv[1], argv[2], argv + 3);
	return fprintf(stderr, "usage: keyvalue_rpc PORT | keyvalue_rpc ADDRESS PORT KEY ...\n"), 2;
}
