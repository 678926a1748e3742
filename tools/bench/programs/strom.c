/* What StRoM's kernels save: GET of a key-value store, traversal of a list and a consistent read, each by one
 * RPC and by READs; the first two by TCP, too. Two processes, of which the server has memory and kernels,
 * and the client asks one thing after the other; both poll without a break.
 * Build: cc -O2 -o strom strom.c -libverbs
 * usage: KERNEL_MODULES=FOLDER strom [-t SECONDS]: get.wasm, traverse.wasm, consistent.wasm,
 * shuffle.wasm and hll.wasm lie there
 * Prints lines of a name and a number: the median and, with .p99, the 99th percentile of the time from the
 * post of the first request to the last byte (us). Each measurement takes so many seconds. */
#define _GNU_SOURCE
#include "side.h"
#include "../../../include/infiniband/stardv.h"
#include <dlfcn.h>
#include <endian.h>

/* A kernel that is a module has the op-code of the card's own, and MODULE. */
enum { OP_GET = 1, OP_TRAVERSE, OP_CONSISTENT, OP_SHUFFLE, OP_HLL, MODULE = 8 };
enum { LONGEST = 4096, LENGTH = 16, CRC = 8 };
/* Streams: bytes in all and of a message; messages under way; partitions, bytes of room of each, and how many
 * are described at a time; values that a sender gathers; log2 of a sketch's registers. */
enum { STREAM = 8 << 20, PIECE = 64 << 10, WINDOW = 64, PARTITIONS = 1024, ROOM = 10 << 10, DESCRIBED = 32,
       GATHERED = 16, REGISTERS = 16 };
static const uint32_t sizes[] = { 64, 256, 1024, LONGEST };
enum { SIZES = sizeof(sizes) / sizeof(sizes[0]) };

/* An element of the list: what stardv_traverse finds by slots of 4 bytes. */
struct element {
	uint64_t key, value, next, unused[5];
};

/* The server's. The entry of key k is entry k, its value has sizes[k - 1] bytes, and so has object k - 1. */
static struct {
	struct stardv_get_entry entries[SIZES + 1] __attribute__((aligned(64)));
	struct element list[LENGTH];
	uint8_t value[LONGEST];
	uint8_t objects[SIZES][LONGEST];
	uint8_t stream[STREAM] __attribute__((aligned(64)));
	uint8_t partitions[PARTITIONS][ROOM];
} store;

/* The client's. */
static struct {
	struct stardv_get_entry entry __attribute__((aligned(64)));
	struct element element;
	uint8_t data[LONGEST];
	uint8_t answer[LONGEST + sizeof(struct stardv_rpc_record)] __attribute__((aligned(8)));
	uint8_t request[LONGEST];
	uint64_t sketched;
	uint8_t stream[STREAM] __attribute__((aligned(64)));
} local;

struct where {
	union ibv_gid gid;
	uint64_t addr;
	uint32_t qpn, rkey;
};

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct where peer;
static int (*post_rpc)(struct ibv_qp *, const struct stardv_rpc_wr *, uint32_t);
static int (*post_rpc_write)(struct ibv_qp *, const struct stardv_rpc_wr *, uint32_t);
static int (*load_kernel)(struct ibv_pd *, uint64_t, uint32_t);
static int (*load_module)(struct ibv_pd *, uint64_t, const void *, size_t, uint32_t);

/* CRC64 (Jones), eight bytes a turn. */
static uint64_t tables[8][256];

static void make_tables(void)
{
	for (unsigned int byte = 0; byte < 256; byte++) {
		uint64_t crc = byte;

		for (int bit = 0; bit < 8; bit++)
			crc = crc & 1 ? crc >> 1 ^ 0x95ac9329ac4bc9b5u : crc >> 1;
		tables[0][byte] = crc;
	}
	for (int zeros = 1; zeros < 8; zeros++)
		for (int byte = 0; byte < 256; byte++)
			tables[zeros][byte] = tables[zeros - 1][byte] >> 8 ^ tables[0][tables[zeros - 1][byte] & 0xff];
}

static uint64_t crc64(const uint8_t *data, size_t len)
{
	uint64_t crc = 0, word;

	for (; len >= 8; data += 8, len -= 8) {
		memcpy(&word, data, 8);
		word = le64toh(word) ^ crc;
		crc = 0;
		for (int at = 0; at < 8; at++)
			crc ^= tables[7 - at][word >> 8 * at & 0xff];
	}
	while (len--)
		crc = crc >> 8 ^ tables[0][(crc ^ *data++) & 0xff];
	return crc;
}

static void *named(const char *name)
{
	void *function = dlvsym(RTLD_DEFAULT, name, "STARDV_1.0");

	if (!function)
		die(name);
	return function;
}

static void open_card(int fd, int first, void *memory, size_t len, int access)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
					    .cap = { 2 * WINDOW, 16, 1, 1, 128 },
					    .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS,
					    .create_flags = STARDV_QP_CREATE_RPC };
	struct where mine = { .addr = (uintptr_t)memory };

	post_rpc = named("stardv_post_rpc");
	post_rpc_write = named("stardv_post_rpc_write");
	load_kernel = named("stardv_load_kernel");
	load_module = named("stardv_load_module");
	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx)))
		die("no device");
	cq = ibv_create_cq(ctx, 4 * WINDOW, NULL, NULL, 0);
	mr = ibv_reg_mr(pd, memory, len, IBV_ACCESS_LOCAL_WRITE | access);
	attr.pd = pd;
	attr.send_cq = attr.recv_cq = cq;
	if (!cq || !mr || !(qp = ibv_create_qp_ex(ctx, &attr)) || ibv_query_gid(ctx, 1, 0, &mine.gid))
		die("no queue pair that carries RPCs");
	mine.qpn = qp->qp_num;
	mine.rkey = mr->rkey;
	exchange(fd, first, &mine, &peer, sizeof(mine));
	connect_to(qp, peer.qpn, &peer.gid);
}

/* Loads the card's own kernel, and the same as a module. */
static void load(uint64_t op, uint32_t kernel, const char *name)
{
	static char module[1 << 20];
	const char *folder = getenv("KERNEL_MODULES");
	char file[4096];
	size_t len;
	FILE *from;

	snprintf(file, sizeof(file), "%s/%s.wasm", folder ? folder : ".", name);
	from = fopen(file, "rb");
	if (!from || !(len = fread(module, 1, sizeof(module), from)) || fclose(from))
		die(file);
	if ((errno = load_kernel(pd, op, kernel)) || (errno = load_module(pd, op | MODULE, module, len, 0)))
		die("stardv_load_kernel, stardv_load_module");
}

/* What is measured: its size or length, what it got, and its completions that were not looked at. */
static uint32_t size, length, which;
/* MODULE, or 0. */
static uint64_t by;
static const uint8_t *got;
static int owed;
/* Bytes of an answer that came, or -1. */
static int64_t answered;

/* One poll; with `all`, until nothing is owed. */
static void complete(int all)
{
	struct ibv_wc wc;
	int n;

	do {
		n = ibv_poll_cq(cq, 1, &wc);
		if (n < 0 || (n && wc.status)) {
			fprintf(stderr, "strom: %s\n", n < 0 ? "ibv_poll_cq" : ibv_wc_status_str(wc.status));
			exit(1);
		}
		if (n && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM)
			answered = wc.byte_len;
		else
			owed -= n;
	} while (all && owed);
}

static void fetch(void *to, uint32_t len, uint64_t from)
{
	struct ibv_sge sge = { (uintptr_t)to, len, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ }, *bad;

	wr.wr.rdma.remote_addr = from;
	wr.wr.rdma.rkey = peer.rkey;
	if ((errno = ibv_post_send(qp, &wr, &bad)))
		die("ibv_post_send");
	owed++;
	complete(1);
}

/* An RPC whose answer has `len` bytes, and no record: its receive says that it came. */
static void call(uint64_t op, const void *params, uint32_t bytes, uint32_t len)
{
	uint32_t room = len + sizeof(struct stardv_rpc_record);
	struct stardv_rpc_record *record = (void *)(local.answer + len);
	struct stardv_rpc_target target = { htole64((uintptr_t)local.answer), htole32(mr->rkey), htole32(room), 0,
					    htole32(STARDV_RPC_IMM | STARDV_RPC_BARE) };
	struct ibv_sge sge = { (uintptr_t)local.request, sizeof(target) + bytes, mr->lkey };
	struct stardv_rpc_wr wr = { 0, 0, op, &sge, 1, sge.length <= 128 ? IBV_SEND_INLINE : 0 };
	struct ibv_recv_wr receive = { 0 }, *bad;

	memcpy(local.request, &target, sizeof(target));
	memcpy(local.request + sizeof(target), params, bytes);
	record->magic = 0;
	answered = -1;
	if ((errno = ibv_post_recv(qp, &receive, &bad)) || (errno = post_rpc(qp, &wr, sizeof(wr))))
		die("ibv_post_recv, stardv_post_rpc");
	owed++;
	while (answered < 0)
		complete(0);
	if (stardv_rpc_answer(local.answer, room) || answered != len) {
		fprintf(stderr, "strom: RPC %d ended with code %u\n", (int)op, le32toh(record->code));
		exit(1);
	}
	got = local.answer;
}

#define STORED(field) (peer.addr + ((char *)&(field) - (char *)&store))

static void get_by_rpc(void)
{
	struct stardv_get get = { htole64(peer.addr), htole64(which + 1), htole32(which + 1), htole32(peer.rkey),
				  htole32(peer.rkey), htole32(1) };

	call(OP_GET | by, &get, sizeof(get), size);
}

static void get_by_reads(void)
{
	fetch(&local.entry, sizeof(local.entry), STORED(store.entries[which + 1]));
	for (int at = 0; at < 3; at++)
		if (le64toh(local.entry.buckets[at].key) == which + 1)
			fetch(local.data, le32toh(local.entry.buckets[at].len), le64toh(local.entry.buckets[at].value));
	got = local.data;
}

static void read_value(void)
{
	fetch(local.data, size, STORED(store.value));
	got = local.data;
}

static void traverse_by_rpc(void)
{
	struct stardv_traverse list = { .element = htole64(STORED(store.list)), .key = htole64(length),
					.rkey = htole32(peer.rkey), .len = htole32(size), .mask = htole16(1),
					.predicate = STARDV_TRAVERSE_EQUAL, .value = 2, .next = 4,
					.flags = STARDV_TRAVERSE_NEXT, .hops = LENGTH };

	call(OP_TRAVERSE | by, &list, sizeof(list), size);
}

static void traverse_by_reads(void)
{
	uint64_t at = STORED(store.list);

	do {
		fetch(&local.element, sizeof(local.element), at);
		at = le64toh(local.element.next);
	} while (le64toh(local.element.key) != length);
	fetch(local.data, size, le64toh(local.element.value));
	got = local.data;
}

static void read_object(void)
{
	fetch(local.data, size, STORED(store.objects[which]));
	got = local.data;
}

static void read_and_check(void)
{
	uint64_t crc;

	do {
		read_object();
		memcpy(&crc, local.data + size - CRC, CRC);
	} while (le64toh(crc) != crc64(local.data, size - CRC));
}

static void check_by_rpc(void)
{
	struct stardv_consistent object = { htole64(STORED(store.objects[which])), htole32(peer.rkey), htole32(size),
					    htole32(16), 0 };

	call(OP_CONSISTENT | by, &object, sizeof(object), size);
}

/* Measures for `seconds`, and prints under the name and a number. */
static void measure(const char *name, uint32_t number, void (*operation)(void), double seconds)
{
	double began, end;

	for (int i = 0; i < (size > CRC ? 200 : 3); i++) {
		operation();
		complete(1);
	}
	samples = 0;
	for (end = now() + seconds; (began = now()) < end;) {
		operation();
		keep(now() - began);
		complete(1);
		for (uint32_t i = 0; i < size - CRC; i += 13)
			if (got[i] != (uint8_t)(i * 7 + 1)) {
				fprintf(stderr, "strom: %s.%u brought wrong bytes\n", name, number);
				exit(1);
			}
	}
	printf("%s.%u %.3f\n", name, number, percentile(0.5));
	printf("%s.%u.p99 %.3f\n", name, number, percentile(0.99));
}

/* By the card's own kernel, then by a module. */
static void measure_rpc(const char *name, uint32_t number, void (*operation)(void), double seconds)
{
	char full[64];

	for (by = 0; by <= MODULE; by += MODULE) {
		snprintf(full, sizeof(full), "%s.%s", name, by ? "wasm" : "rpc");
		measure(full, number, operation, seconds);
	}
}

#include "streams.h"
#include "tcp.h"

static int serve(int fd)
{
	struct ibv_wc wc;
	char order;

	make_tables();
	for (size_t i = 0; i < LONGEST; i++)
		store.value[i] = i * 7 + 1;
	for (int k = 0; k < SIZES; k++) {
		struct stardv_get_bucket *bucket = &store.entries[k + 1].buckets[1];
		uint64_t crc;

		*bucket = (struct stardv_get_bucket){ htole64(k + 1), htole64((uintptr_t)store.value), htole32(sizes[k]) };
		memcpy(store.objects[k], store.value, sizes[k] - CRC);
		crc = htole64(crc64(store.value, sizes[k] - CRC));
		memcpy(store.objects[k] + sizes[k] - CRC, &crc, CRC);
	}
	for (int i = 0; i < LENGTH; i++) {
		store.list[i].key = htole64(i + 1);
		store.list[i].value = htole64((uintptr_t)store.value);
		store.list[i].next = htole64(i + 1 < LENGTH ? (uintptr_t)&store.list[i + 1] : 0);
	}
	open_card(fd, 0, &store, sizeof(store), IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
	load(OP_GET, STARDV_KERNEL_GET, "get");
	load(OP_TRAVERSE, STARDV_KERNEL_TRAVERSE, "traverse");
	load(OP_CONSISTENT, STARDV_KERNEL_CONSISTENT, "consistent");
	load(OP_SHUFFLE, STARDV_KERNEL_SHUFFLE, "shuffle");
	load(OP_HLL, STARDV_KERNEL_HLL, "hll");
	await_stream();
	put(fd, "", 1);
	accept_client(fd);
	for (uint32_t polls = 1;; polls++) {
		int n = ibv_poll_cq(cq, 1, &wc);

		if (n < 0 || (n && wc.status))
			die("a completion");
		if (n && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM)
			sketch_stream();
		if (polls % 4096 || recv(fd, &order, 1, MSG_DONTWAIT) < 0)
			continue;
		if (order != BY_TCP)
			return 0;
		answer_questions();
	}
}

static void work(int fd, double seconds)
{
	char ready;

	make_tables();
	open_card(fd, 1, &local, sizeof(local), IBV_ACCESS_REMOTE_WRITE);
	get(fd, &ready, 1);
	connect_to_server(fd);
	took = calloc(SAMPLES, sizeof(*took));
	for (which = 0; which < SIZES; which++) {
		size = sizes[which];
		measure("get.reads", size, get_by_reads, seconds);
		measure_rpc("get", size, get_by_rpc, seconds);
		measure_tcp(fd, "get.tcp", size, OF_ENTRY, seconds);
		measure("get.read", size, read_value, seconds);
		measure("check.read", size, read_object, seconds);
		measure("check.software", size, read_and_check, seconds);
		measure_rpc("check", size, check_by_rpc, seconds);
	}
	size = sizes[0];
	for (length = 1; length <= LENGTH; length *= 2) {
		measure("list.reads", length, traverse_by_reads, seconds);
		measure_rpc("list", length, traverse_by_rpc, seconds);
		measure_tcp(fd, "list.tcp", length, OF_LIST, seconds);
	}
	measure_streams(seconds);
	put(fd, "", 1);
}

int main(int argc, char **argv)
{
	int fd, option;
	double seconds = 0.5;
	pid_t server;

	while ((option = getopt(argc, argv, "t:")) != -1) {
		if (option != 't')
			return 2;
		seconds = strtod(optarg, NULL);
	}
	server = start_server(serve, &fd);
	work(fd, seconds);
	end_with(server);
}
