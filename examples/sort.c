/*
 * Sorts a file of numbers (8 bytes each, little-endian) with several processes, each of which has a card: a
 * distributed shuffle by StRoM. Each process streams the numbers of its part of the file to the process that
 * they belong to (RPC WRITE); the card there puts each into one of 1,024 partitions on its way to memory, so
 * that what is left to do is to sort the partitions. With -s each process's own card puts them into the
 * partitions of all processes, 1,024 in all, by WRITEs: the others' cards need no kernel.
 *
 *	sort [-s] PROCESSES FILE SORTED
 *
 * PROCESSES is a power of two, 16 at most. What the processes have to tell each other beforehand (queue
 * pairs, how many numbers each partition will get) lies in memory that they share; between hosts a connection
 * would carry it.
 */
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/stardv.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 16, BITS = 10, PARTITIONS = 1 << BITS, OP = 1, BATCH = 8192, ROOM = 4096, SELF = MOST };
enum { DESCRIBED = (ROOM - sizeof(struct stardv_shuffle)) / sizeof(struct stardv_partition) };

/* What all processes know. */
static struct shared {
	pthread_barrier_t barrier;
	union ibv_gid gid[MOST];
	/* Of process `from` the queue pair that leads to process `to` */
	uint32_t qpn[MOST][MOST];
	/* Where process `of` has its numbers */
	uint64_t to[MOST];
	uint32_t rkey[MOST];
	/* How many numbers of a process's part belong to each partition of each process */
	uint64_t counts[MOST][MOST][PARTITIONS];
} *shared;

static unsigned int me, processes, log_processes;
/* The sender's card has the partitions of all processes; a process has 2^bits. */
static int sending;
static unsigned int bits = BITS, partitions = PARTITIONS;
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qps[MOST];
static struct ibv_port_attr port;
/* Numbers that came, and where the partitions begin; numbers that leave, two batches for each process. */
static uint64_t *mine, begins[PARTITIONS + 1];
static uint64_t leaves[MOST][2][BATCH];
static uint8_t request[ROOM], answer[ROOM] __attribute__((aligned(8)));
static struct ibv_mr *mine_mr, *leaves_mr, *request_mr, *answer_mr;
/* RPC WRITEs that are not complete, and RPCs. */
static unsigned int under_way[MOST + 1];

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void together(void)
{
	int ret = pthread_barrier_wait(&shared->barrier);

	if (ret && ret != PTHREAD_BARRIER_SERIAL_THREAD)
		die("pthread_barrier_wait");
}

/* Whose a number is, by its first bits; and its partition there, by those behind them. */
static unsigned int owner(uint64_t number)
{
	return log_processes ? (unsigned int)(number >> (64 - log_processes)) : 0;
}

static unsigned int partition(uint64_t number)
{
	return (unsigned int)(number << log_processes >> (64 - bits));
}

/* The card looks at the last bits: the first ones go there for the way. */
static uint64_t turned(uint64_t number, unsigned int by)
{
	return number << by | number >> (64 - by);
}

static struct ibv_mr *registered(void *memory, size_t len, int access)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, len ? len : 1, access);

	if (!mr)
		die("ibv_reg_mr");
	return mr;
}

static void open_card(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1 };

	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])))
		die("no device");
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 256, NULL, NULL, 0);
	if (!pd || !cq || ibv_query_port(ctx, 1, &port) || ibv_query_gid(ctx, 1, 0, &shared->gid[me]))
		die("the card");
	attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
	attr.create_flags = STARDV_QP_CREATE_RPC;
	attr.cap.max_send_wr = 8;
	attr.cap.max_send_sge = attr.cap.max_recv_wr = attr.cap.max_recv_sge = 1;
	attr.pd = pd;
	attr.send_cq = attr.recv_cq = cq;
	for (unsigned int to = 0; to < processes; to++) {
		if (!(qps[to] = ibv_create_qp_ex(ctx, &attr)))
			die("ibv_create_qp_ex");
		shared->qpn[me][to] = qps[to]->qp_num;
	}
	if ((errno = stardv_load_kernel(pd, OP, STARDV_KERNEL_SHUFFLE)))
		die("stardv_load_kernel");
	leaves_mr = registered(leaves, sizeof(leaves), 0);
	request_mr = registered(request, sizeof(request), 0);
	answer_mr = registered(answer, sizeof(answer), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
}

static void connect_to(unsigned int to)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };

	if ((errno = ibv_modify_qp(qps[to], &attr,
				   IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)))
		die("INIT");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = port.active_mtu,
				     .dest_qp_num = shared->qpn[to][me], .min_rnr_timer = 1 };
	attr.ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = 1 };
	attr.ah_attr.grh = (struct ibv_global_route){ .dgid = shared->gid[to], .hop_limit = 64 };
	if ((errno = ibv_modify_qp(qps[to], &attr,
				   IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)))
		die("RTR");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 17, .retry_cnt = 7, .rnr_retry = 7 };
	if ((errno = ibv_modify_qp(qps[to], &attr,
				   IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					   IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)))
		die("RTS");
}

/* Polls once: what is complete is under way no more. */
static void poll_once(void)
{
	struct ibv_wc wc;
	int n = ibv_poll_cq(cq, 1, &wc);

	if (n < 0 || (n && wc.status != IBV_WC_SUCCESS)) {
		fprintf(stderr, "sort: %s\n", n < 0 ? "ibv_poll_cq" : ibv_wc_status_str(wc.status));
		exit(1);
	}
	if (n)
		under_way[wc.wr_id]--;
}

/* Asks this process's own card; gives the answer's bytes, `len` of them. */
static const uint8_t *ask(const struct stardv_shuffle *params, const void *more, size_t bytes, uint32_t len)
{
	uint32_t room = len + (uint32_t)sizeof(struct stardv_rpc_record);
	struct stardv_rpc_target target = { htole64((uintptr_t)answer), htole32(answer_mr->rkey), htole32(room),
					    0, 0 };
	struct ibv_sge sge = { (uintptr_t)request, (uint32_t)(sizeof(target) + sizeof(*params) + bytes),
			       request_mr->lkey };
	struct stardv_rpc_wr wr = { .wr_id = SELF, .op = OP, .sg_list = &sge, .num_sge = 1 };
	const struct stardv_rpc_record *record;

	memcpy(request, &target, sizeof(target));
	memcpy(request + sizeof(target), params, sizeof(*params));
	if (bytes)
		memcpy(request + sizeof(target) + sizeof(*params), more, bytes);
	memset(answer, 0, room);
	if ((errno = stardv_post_rpc(qps[me], &wr, sizeof(wr))))
		die("stardv_post_rpc");
	under_way[SELF]++;
	while (!(record = stardv_rpc_answer(answer, room)) || under_way[SELF])
		poll_once();
	if (le32toh(record->code) != STARDV_RPC_OK) {
		fprintf(stderr, "sort: the card's kernel ended with code %u\n", le32toh(record->code));
		exit(1);
	}
	return answer;
}

/* Tells this process's card where its partitions lie: exactly as large as what will come. */
static void lay_out(void)
{
	struct stardv_partition places[PARTITIONS];
	struct stardv_shuffle params = { htole32(STARDV_SHUFFLE_BEGIN), htole32(BITS), 0, 0 };
	uint32_t mtu = 128u << port.active_mtu;
	uint32_t most = (mtu - sizeof(struct stardv_rpc_target) - sizeof(params)) / sizeof(places[0]);

	for (unsigned int at = 0; at < partitions; at++) {
		begins[at + 1] = begins[at];
		for (unsigned int from = 0; from < processes; from++)
			begins[at + 1] += shared->counts[from][me][at];
	}
	mine = malloc(begins[partitions] * sizeof(*mine) + 1);
	if (!mine)
		die("malloc");
	mine_mr = registered(mine, begins[partitions] * sizeof(*mine),
			     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	shared->to[me] = (uintptr_t)mine;
	shared->rkey[me] = mine_mr->rkey;
	if (sending)
		return;
	for (unsigned int at = 0; at < partitions; at++) {
		places[at].to = htole64((uintptr_t)(mine + begins[at]));
		places[at].len = htole64((begins[at + 1] - begins[at]) * sizeof(*mine));
	}
	ask(&params, NULL, 0, 0);
	for (uint32_t first = 0; first < PARTITIONS; first += most) {
		uint32_t count = PARTITIONS - first < most ? PARTITIONS - first : most;

		params = (struct stardv_shuffle){ htole32(STARDV_SHUFFLE_HISTOGRAM), htole32(mine_mr->rkey),
						  htole32(first), 0 };
		ask(&params, places + first, count * sizeof(places[0]), 0);
	}
}

/* Sends a batch of numbers to the card of process `to`. */
static void stream(unsigned int to, const uint64_t *numbers, size_t count)
{
	struct ibv_sge sge = { (uintptr_t)numbers, (uint32_t)(count * sizeof(*numbers)), leaves_mr->lkey };
	struct stardv_rpc_wr wr = { .wr_id = to, .op = OP, .sg_list = &sge, .num_sge = 1 };

	if ((errno = stardv_post_rpc_write(qps[to], &wr, sizeof(wr))))
		die("stardv_post_rpc_write");
	under_way[to]++;
}

static void send_all(const uint64_t *numbers, size_t count)
{
	size_t filled[MOST] = { 0 };
	int half[MOST] = { 0 };

	for (size_t i = 0; i < count; i++) {
		uint64_t number = le64toh(numbers[i]);
		unsigned int to = owner(number);

		leaves[to][half[to]][filled[to]++] = htole64(turned(number, log_processes + bits));
		if (filled[to] == BATCH) {
			stream(to, leaves[to][half[to]], BATCH);
			half[to] ^= 1;
			filled[to] = 0;
			/* the other half has left when one batch at most is under way */
			while (under_way[to] > 1)
				poll_once();
		}
	}
	for (unsigned int to = 0; to < processes; to++) {
		if (filled[to])
			stream(to, leaves[to][half[to]], filled[to]);
		while (under_way[to])
			poll_once();
	}
}

/* Has the card write what waits in its buffers, and say how many numbers each partition has. */
static void flush(void)
{
	enum { RANGE = 256 };

	for (uint32_t first = 0; first < PARTITIONS; first += RANGE) {
		struct stardv_shuffle params = { htole32(STARDV_SHUFFLE_FLUSH), htole32(RANGE), htole32(first), 0 };
		const uint8_t *bytes = ask(&params, NULL, 0, (RANGE + 1) * sizeof(uint64_t));

		for (uint32_t at = 0; at < RANGE; at++) {
			uint64_t count;

			memcpy(&count, bytes + at * sizeof(count), sizeof(count));
			if (le64toh(count) != begins[first + at + 1] - begins[first + at]) {
				fprintf(stderr, "sort: partition %u has %llu numbers\n", first + at,
					(unsigned long long)le64toh(count));
				exit(1);
			}
		}
	}
}

/* Calls the kernel of this process's own card, without a queue pair. */
static void call(uint32_t command, uint32_t number, uint32_t first, uint32_t qpn,
		 const struct stardv_partition *places, size_t count)
{
	struct {
		struct stardv_shuffle shuffle;
		struct stardv_partition places[DESCRIBED];
	} params = { .shuffle = { htole32(command), htole32(number), htole32(first), htole32(qpn) } };
	struct stardv_rpc_record record;
	uint64_t lost;

	if (count)
		memcpy(params.places, places, count * sizeof(*places));
	if ((errno = stardv_call_kernel(pd, OP, &params, sizeof(params.shuffle) + count * sizeof(*places), &lost,
					sizeof(lost), &record)))
		die("stardv_call_kernel");
	if (le32toh(record.code) != STARDV_RPC_OK) {
		fprintf(stderr, "sort: the card's kernel ended with code %u\n", le32toh(record.code));
		exit(1);
	}
}

/* Tells this process's card where its numbers go: behind those of the processes before it. */
static void describe(unsigned int to)
{
	struct stardv_partition places[PARTITIONS];
	uint64_t at = shared->to[to];

	for (unsigned int part = 0; part < partitions; part++) {
		places[part].to = at;
		for (unsigned int from = 0; from < processes; from++) {
			at += shared->counts[from][to][part] * sizeof(uint64_t);
			if (from < me)
				places[part].to = at;
		}
		places[part].to = htole64(places[part].to);
		places[part].len = htole64(shared->counts[me][to][part] * sizeof(uint64_t));
	}
	for (uint32_t first = 0; first < partitions; first += DESCRIBED) {
		uint32_t count = partitions - first < DESCRIBED ? partitions - first : DESCRIBED;

		call(STARDV_SHUFFLE_HISTOGRAM, shared->rkey[to], (to << bits) + first, qps[to]->qp_num,
		     places + first, count);
	}
}

/* This process's own card sends its part of the numbers to their partitions. */
static void scatter(const uint64_t *numbers, size_t count)
{
	uint64_t *turned_ones = malloc(count * sizeof(*numbers) + 1);
	struct stardv_partition region = { htole64((uintptr_t)turned_ones), htole64(count * sizeof(*numbers)) };
	struct ibv_mr *mr;

	if (!turned_ones)
		die("malloc");
	for (size_t i = 0; i < count; i++)
		turned_ones[i] = htole64(turned(le64toh(numbers[i]), log_processes + bits));
	mr = registered(turned_ones, count * sizeof(*numbers), 0);
	call(STARDV_SHUFFLE_BEGIN, log_processes + bits, 0, 0, NULL, 0);
	for (unsigned int to = 0; to < processes; to++)
		describe(to);
	call(STARDV_SHUFFLE_STREAM, mr->lkey, 0, 0, &region, 1);
	call(STARDV_SHUFFLE_FLUSH, 0, 0, 0, NULL, 0);
	/* an empty WRITE is complete when all before it is there */
	for (unsigned int to = 0; to < processes; to++) {
		struct ibv_send_wr wr = { .wr_id = to, .opcode = IBV_WR_RDMA_WRITE }, *bad;

		wr.wr.rdma.remote_addr = shared->to[to];
		wr.wr.rdma.rkey = shared->rkey[to];
		if ((errno = ibv_post_send(qps[to], &wr, &bad)))
			die("ibv_post_send");
		under_way[to]++;
	}
	for (unsigned int to = 0; to < processes; to++)
		while (under_way[to])
			poll_once();
	ibv_dereg_mr(mr);
	free(turned_ones);
}

static int compare(const void *a, const void *b)
{
	uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;

	return left < right ? -1 : left > right;
}

static void sort_and_write(int to)
{
	uint64_t before = 0;
	size_t bytes = begins[partitions] * sizeof(*mine), done = 0;

	for (size_t i = 0; i < begins[partitions]; i++)
		mine[i] = turned(le64toh(mine[i]), 64 - log_processes - bits);
	for (unsigned int at = 0; at < partitions; at++)
		qsort(mine + begins[at], begins[at + 1] - begins[at], sizeof(*mine), compare);
	for (size_t i = 0; i < begins[partitions]; i++)
		mine[i] = htole64(mine[i]);
	for (unsigned int from = 0; from < processes; from++)
		for (unsigned int owner = 0; owner < me; owner++)
			for (unsigned int at = 0; at < partitions; at++)
				before += shared->counts[from][owner][at];
	while (done < bytes) {
		ssize_t n = pwrite(to, (char *)mine + done, bytes - done, (off_t)(before * sizeof(*mine) + done));

		if (n <= 0)
			die("pwrite");
		done += (size_t)n;
	}
}

static void work(const uint64_t *numbers, size_t count, int to)
{
	size_t from = count * me / processes, end = count * (me + 1) / processes;

	for (size_t i = from; i < end; i++)
		shared->counts[me][owner(le64toh(numbers[i]))][partition(le64toh(numbers[i]))]++;
	open_card();
	together();
	for (unsigned int other = 0; other < processes; other++)
		connect_to(other);
	together();
	lay_out();
	together();
	if (sending)
		scatter(numbers + from, end - from);
	else
		send_all(numbers + from, end - from);
	together();
	if (!sending)
		flush();
	sort_and_write(to);
	/* a card that goes may owe others an answer */
	together();
}

int main(int argc, char **argv)
{
	pthread_barrierattr_t attr;
	const uint64_t *numbers = NULL;
	struct stat stat;
	int from, to, status, failed = 0;
	pid_t pids[MOST];

	if (argc > 1 && !strcmp(argv[1], "-s")) {
		sending = 1;
		argv++;
		argc--;
	}
	if (argc != 4 || (processes = (unsigned int)atoi(argv[1])) < 1 || processes > MOST ||
	    (processes & (processes - 1))) {
		fprintf(stderr, "usage: sort [-s] PROCESSES FILE SORTED: 1, 2, 4, 8 or 16 processes\n");
		return 2;
	}
	while (1u << log_processes < processes)
		log_processes++;
	if (sending) {
		bits -= log_processes;
		partitions = 1u << bits;
	}
	from = open(argv[2], O_RDONLY);
	to = open(argv[3], O_RDWR | O_CREAT | O_TRUNC, 0666);
	if (from < 0 || to < 0 || fstat(from, &stat) || ftruncate(to, stat.st_size))
		die("files");
	if (stat.st_size % (off_t)sizeof(*numbers)) {
		fprintf(stderr, "sort: %s is not of numbers of 8 bytes\n", argv[2]);
		return 1;
	}
	if (stat.st_size)
		numbers = mmap(NULL, (size_t)stat.st_size, PROT_READ, MAP_PRIVATE, from, 0);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (numbers == MAP_FAILED || shared == MAP_FAILED)
		die("mmap");
	pthread_barrierattr_init(&attr);
	pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(&shared->barrier, &attr, processes);
	for (me = 0; me < processes; me++) {
		pids[me] = fork();
		if (pids[me] < 0)
			die("fork");
		if (!pids[me]) {
			work(numbers, (size_t)stat.st_size / sizeof(*numbers), to);
			_exit(0);
		}
	}
	/* One that fails leaves the others waiting: they end with it. */
	while (wait(&status) > 0)
		if (status && !failed++)
			for (me = 0; me < processes; me++)
				kill(pids[me], SIGTERM);
	if (!failed)
		printf("sorted %llu numbers with %u processes\n",
		       (unsigned long long)stat.st_size / sizeof(*numbers), processes);
	return failed != 0;
}
