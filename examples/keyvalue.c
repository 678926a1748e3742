/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A key-value store whose readers never ask its program: they READ its table.
 *
 *	keyvalue 7471				a server at port 7471, of one client
 *	keyvalue 192.0.2.1 7471 KEY ...		its client: prints the values
 *
 * The server tells address, key and size of its table when it accepts, as private data; after that it only
 * changes values. The client hashes the key, READs that slot, and goes on to the next one while another key
 * is there (linear probing). A READ may see a slot that is just being written: the slot's version is odd
 * meanwhile, and its sum fits no other bytes.
 */
#include <endian.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

enum { SLOTS = 64, KEY = 24, VALUE = 88, TRIES = 1000 };

/* 128 bytes, the same on every machine. */
struct slot {
	/* Odd while it is written; 0: empty */
	uint64_t version;
	char key[KEY];
	char value[VALUE];
	/* Of all before it */
	uint64_t sum;
};

/* What a client must know of the table; big endian, as it goes over the wire. */
struct table {
	uint64_t addr;
	uint32_t rkey;
	uint32_t slots;
};

static struct slot slots[SLOTS];

static void die(const char *what)
{
	perror(what);
	exit(1);
}

/* FNV-1a. */
static uint64_t hash(const void *bytes, size_t length)
{
	uint64_t sum = 0xcbf29ce484222325;

	for (const unsigned char *at = bytes; length--; at++)
		sum = (sum ^ *at) * 0x100000001b3;
	return sum;
}

static uint64_t sum_of(const struct slot *slot)
{
	return hash(slot, offsetof(struct slot, sum));
}

static size_t first_slot(const char *key, uint32_t count)
{
	return hash(key, strlen(key)) % count;
}

/* Writes a value so that a reader of any moment knows whether it has it whole. */
static void put(const char *key, const char *value)
{
	struct slot *slot = &slots[first_slot(key, SLOTS)], next = { 0 };

	while (slot->version && strcmp(slot->key, key))
		slot = slot == &slots[SLOTS - 1] ? slots : slot + 1;
	next.version = slot->version + 2;
	snprintf(next.key, KEY, "%s", key);
	snprintf(next.value, VALUE, "%s", value);
	next.sum = sum_of(&next);
	__atomic_store_n(&slot->version, next.version - 1, __ATOMIC_RELAXED);
	__atomic_thread_fence(__ATOMIC_RELEASE);
	memcpy((char *)slot + sizeof(slot->version), (char *)&next + sizeof(next.version),
	       sizeof(next) - sizeof(next.version));
	__atomic_store_n(&slot->version, next.version, __ATOMIC_RELEASE);
}

static struct rdma_cm_id *endpoint(const char *host, const char *port)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = host ? 0 : RAI_PASSIVE }, *where;
	struct ibv_qp_init_attr qp = { .sq_sig_all = 1 };
	struct rdma_cm_id *id;

	qp.cap.max_send_wr = qp.cap.max_recv_wr = 1;
	qp.cap.max_send_sge = qp.cap.max_recv_sge = 1;
	if (rdma_getaddrinfo(host, port, &hints, &where))
		die("rdma_getaddrinfo");
	if (rdma_create_ep(&id, where, NULL, &qp))
		die("rdma_create_ep");
	rdma_freeaddrinfo(where);
	return id;
}

static void server(const char *port)
{
	struct rdma_cm_id *listener = endpoint(NULL, port), *id;
	struct rdma_conn_param param = { .responder_resources = 1 };
	struct pollfd events;
	struct table table;
	struct ibv_mr *mr;
	char text[VALUE];

	put("colour", "green");
	put("city", "Delft");
	put("clock", "changed 0 times");
	if (rdma_listen(listener, 1))
		die("rdma_listen");
	if (rdma_get_request(listener, &id))
		die("rdma_get_request");
	mr = rdma_reg_read(id, slots, sizeof(slots));
	if (!mr)
		die("rdma_reg_read");
	table = (struct table){ htobe64((uintptr_t)slots), htobe32(mr->rkey), htobe32(SLOTS) };
	param.private_data = &table;
	param.private_data_len = sizeof(table);
	if (rdma_accept(id, &param))
		die("rdma_accept");

	/* Until the client leaves. It is never answered: its READs are the card's work. */
	events = (struct pollfd){ .fd = id->channel->fd, .events = POLLIN };
	for (unsigned long count = 1; poll(&events, 1, 0) == 0; count++) {
		snprintf(text, sizeof(text), "changed %lu times", count);
		put("clock", text);
	}
	rdma_disconnect(id);
	rdma_dereg_mr(mr);
	rdma_destroy_ep(id);
	rdma_destroy_ep(listener);
}

/* READs one slot until it is whole. */
static void read_slot(struct rdma_cm_id *id, const struct table *table, size_t at, struct slot *slot,
		      struct ibv_mr *mr)
{
	struct ibv_wc wc;

	for (int tries = 0; tries < TRIES; tries++) {
		if (rdma_post_read(id, NULL, slot, sizeof(*slot), mr, 0, table->addr + at * sizeof(*slot),
				   table->rkey))
			die("rdma_post_read");
		if (rdma_get_send_comp(id, &wc) != 1)
			die("rdma_get_send_comp");
		if (wc.status) {
			fprintf(stderr, "READ: %s\n", ibv_wc_status_str(wc.status));
			exit(1);
		}
		if (!slot->version || (slot->version % 2 == 0 && slot->sum == sum_of(slot)))
			return;
	}
	fprintf(stderr, "slot %zu was being written in %d READs\n", at, TRIES);
	exit(1);
}

/* The value of `key`, in `slot`; false if there is none. */
static int get(struct rdma_cm_id *id, const struct table *table, const char *key, struct slot *slot,
	       struct ibv_mr *mr)
{
	size_t at = first_slot(key, table->slots);

	for (uint32_t seen = 0; seen < table->slots; seen++, at = (at + 1) % table->slots) {
		read_slot(id, table, at, slot, mr);
		if (!slot->version)
			return 0;
		if (!strncmp(slot->key, key, KEY))
			return 1;
	}
	return 0;
}

static int client(const char *host, const char *port, char **keys)
{
	struct rdma_conn_param param = { .initiator_depth = 1 };
	struct rdma_cm_id *id = endpoint(host, port);
	int missing = 0;
	struct table table;
	struct slot slot;
	struct ibv_mr *mr = rdma_reg_msgs(id, &slot, sizeof(slot));

	if (!mr)
		die("rdma_reg_msgs");
	if (rdma_connect(id, &param))
		die("rdma_connect");
	memcpy(&table, id->event->param.conn.private_data, sizeof(table));
	table = (struct table){ be64toh(table.addr), be32toh(table.rkey), be32toh(table.slots) };
	for (; *keys; keys++) {
		if (get(id, &table, *keys, &slot, mr))
			printf("%s: %s\n", *keys, slot.value);
		else
			missing = printf("%s is not there\n", *keys);
	}
	rdma_disconnect(id);
	rdma_dereg_mr(mr);
	rdma_destroy_ep(id);
	return missing ? 1 : 0;
}

int main(int argc, char **argv)
{
	if (argc == 2)
		return server(argv[1]), 0;
	if (argc > 3)
		return client(argv[1], argv[2], argv + 3);
	return fprintf(stderr, "usage: keyvalue PORT | keyvalue ADDRESS PORT KEY ...\n"), 2;
}
