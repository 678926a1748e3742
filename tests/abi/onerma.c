/* 1RMA (include/infiniband/stardv.h) between two processes: one has a region, the other READs, WRITEs and
 * changes its key. The first address of STARVERBS_ADDRS is the client's, that of the index SERVER (1) is the
 * server's, and the third has no card.
 * usage: onerma [SERVER]
 * Build: cc -Wall -I include -o onerma onerma.c -L dist/lib -libverbs */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#include <infiniband/stardv.h>

enum { LEN = 1 << 16, CLIENT = 0, NOBODY = 2, CLIENT_PID = 77 };

static const uint8_t key[16] = "a region's key!";
static char memory[LEN];
static struct stardv_onerma *onerma;
static struct ibv_context *ctx;
static uint32_t region, server_gid = 1;

static struct ibv_context *open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *opened = list && list[0] ? ibv_open_device(list[0]) : NULL;

	if (!opened) {
		perror("no device");
		exit(1);
	}
	ibv_free_device_list(list);
	return opened;
}

static struct stardv_onerma *open_card(uint32_t gid_index, uint32_t pid)
{
	struct stardv_onerma_attr attr = { .gid_index = gid_index, .pid = pid };

	return stardv_onerma_open(ctx, &attr, sizeof(attr));
}

static uint32_t open_region(void *addr, uint64_t length, uint32_t rights)
{
	struct stardv_onerma_region_attr attr = { .addr = addr, .length = length, .rights = rights };
	uint32_t id = 0xffffffff;

	memcpy(attr.key, key, sizeof(attr.key));
	CHECK(!stardv_onerma_create_region(onerma, &attr, sizeof(attr), &id));
	return id;
}

/* The process that has the region: says its name, and does nothing until it is ended. Its card serves. */
static void serve(int to, pid_t parent)
{
	ctx = open_device();
	onerma = open_card(server_gid, 0);
	if (!onerma) {
		perror("server");
		exit(1);
	}
	memset(memory, 's', LEN);
	region = open_region(memory, LEN,
			     STARDV_ONERMA_REMOTE_READ | STARDV_ONERMA_REMOTE_WRITE | STARDV_ONERMA_REMOTE_REKEY);
	if (write(to, &region, sizeof(region)) != sizeof(region))
		exit(1);
	while (getppid() == parent)
		sleep(1);
	exit(1);
}

static uint32_t remote;

static struct stardv_onerma_wr request(uint32_t op, const uint8_t *of, uint64_t length)
{
	struct stardv_onerma_wr wr = { .wr_id = 42 + op, .op = op, .local_offset = 3, .remote_offset = 5 };
	union ibv_gid own;

	wr.length = length;
	wr.remote_region = remote;
	wr.local_region = region;
	CHECK(!ibv_query_gid(ctx, 1, server_gid, &wr.remote) && !ibv_query_gid(ctx, 1, CLIENT, &own));
	CHECK(!stardv_onerma_derive_key(of, &own, CLIENT_PID, op, wr.key));
	return wr;
}

/* Posts it, and gives what it ends as. */
static struct stardv_onerma_wc finish(const struct stardv_onerma_wr *wr)
{
	struct stardv_onerma_wc wc = { .status = 99 };

	CHECK(!stardv_onerma_post(onerma, wr, sizeof(*wr)));
	CHECK(stardv_onerma_poll(onerma, 1, &wc, -1) == 1);
	CHECK(wc.wr_id == wr->wr_id && wc.issue_delay <= wc.total_delay);
	return wc;
}

static uint32_t run(uint32_t op, const uint8_t *of, uint64_t length)
{
	struct stardv_onerma_wr wr = request(op, of, length);

	return finish(&wr).status;
}

static int all(const char *bytes, size_t len, char value)
{
	while (len && bytes[len - 1] == value)
		len--;
	return !len;
}

static void moves_data(void)
{
	struct stardv_onerma_wr wr = request(STARDV_ONERMA_READ, key, 50000);
	struct stardv_onerma_wc wc;

	memset(memory, 'c', LEN);
	wc = finish(&wr);
	CHECK(wc.status == STARDV_ONERMA_OK && wc.total_delay > 0);
	CHECK(all(memory, 3, 'c') && all(memory + 3, 50000, 's') && all(memory + 50003, LEN - 50003, 'c'));

	memset(memory, 'w', LEN);
	CHECK(run(STARDV_ONERMA_WRITE, key, 10000) == STARDV_ONERMA_OK);
	CHECK(run(STARDV_ONERMA_READ, key, 20000) == STARDV_ONERMA_OK);
	CHECK(all(memory, 10003, 'w') && all(memory + 10003, 10000, 's') && all(memory + 20003, 999, 'w'));
	wr.low_priority = 1;
	CHECK(finish(&wr).status == STARDV_ONERMA_OK);
}

static void keys_and_bounds(void)
{
	uint8_t other[16] = "another key....", next[16];
	struct stardv_onerma_wr wr;

	CHECK(run(STARDV_ONERMA_READ, other, 64) == STARDV_ONERMA_REMOTE_AUTHENTICATION_FAILURE);
	CHECK(run(STARDV_ONERMA_WRITE, other, 64) == STARDV_ONERMA_REMOTE_AUTHENTICATION_FAILURE);
	/* The key of one kind of operation is none of another. */
	wr = request(STARDV_ONERMA_READ, key, 64);
	wr.op = STARDV_ONERMA_WRITE;
	CHECK(finish(&wr).status == STARDV_ONERMA_REMOTE_AUTHENTICATION_FAILURE);

	memcpy(next, memory + 3, sizeof(next));
	CHECK(run(STARDV_ONERMA_REKEY, key, 16) == STARDV_ONERMA_OK);
	CHECK(run(STARDV_ONERMA_READ, key, 64) == STARDV_ONERMA_REMOTE_AUTHENTICATION_FAILURE);
	CHECK(run(STARDV_ONERMA_READ, next, 64) == STARDV_ONERMA_OK);
	memcpy(memory + 3, key, sizeof(key));
	CHECK(run(STARDV_ONERMA_REKEY, next, 16) == STARDV_ONERMA_OK);

	wr = request(STARDV_ONERMA_READ, key, 64);
	wr.remote_offset = LEN - 63;
	CHECK(finish(&wr).status == STARDV_ONERMA_REMOTE_ACCESS);
	wr.remote_offset = LEN - 64;
	CHECK(finish(&wr).status == STARDV_ONERMA_OK);
	wr.local_offset = LEN - 63;
	CHECK(finish(&wr).status == STARDV_ONERMA_LOCAL_ACCESS);
	wr = request(STARDV_ONERMA_READ, key, 64);
	CHECK(!ibv_query_gid(ctx, 1, NOBODY, &wr.remote));
	CHECK(finish(&wr).status == STARDV_ONERMA_TIMEOUT);
}

static void *one_more(void *status)
{
	struct stardv_onerma_wc wc = { .status = 99 };

	CHECK(stardv_onerma_poll(onerma, 1, &wc, -1) == 1);
	*(uint32_t *)status = wc.status;
	return NULL;
}

/* Threads that sleep get what another one posts, one each, also what ends by the clock alone. */
static void sleeping_threads(void)
{
	struct stardv_onerma_wr wr = request(STARDV_ONERMA_READ, key, 64);
	uint32_t statuses[2] = { 99, 99 };
	pthread_t threads[2];
	int i;

	for (i = 0; i < 2; i++)
		CHECK(!pthread_create(&threads[i], NULL, one_more, &statuses[i]));
	CHECK(!stardv_onerma_post(onerma, &wr, sizeof(wr)));
	CHECK(!ibv_query_gid(ctx, 1, NOBODY, &wr.remote));
	CHECK(!stardv_onerma_post(onerma, &wr, sizeof(wr)));
	for (i = 0; i < 2; i++)
		CHECK(!pthread_join(threads[i], NULL));
	CHECK((statuses[0] == STARDV_ONERMA_OK) + (statuses[1] == STARDV_ONERMA_OK) == 1);
	CHECK((statuses[0] == STARDV_ONERMA_TIMEOUT) + (statuses[1] == STARDV_ONERMA_TIMEOUT) == 1);
}

static struct stardv_onerma *asked;
static int polling = 1;

static void *sleep_long(void *unused)
{
	struct stardv_onerma_wc wc;

	CHECK(stardv_onerma_poll(asked, 1, &wc, 60000) == 1 && wc.status == STARDV_ONERMA_OK);
	return unused;
}

static void *poll_all_the_time(void *unused)
{
	while (__atomic_load_n(&polling, __ATOMIC_RELAXED))
		CHECK(!stardv_onerma_poll(asked, 0, NULL, 0));
	return unused;
}

/* A card that a sleeping thread serves still does so when another thread has polled it for a while. */
static void sleeps_beside_polls(void)
{
	static char shared[4096], own[4096];
	uint32_t of_server = remote, mine = region;
	struct stardv_onerma *first = onerma;
	struct stardv_onerma_wr wr;
	pthread_t threads[2];
	int i;

	CHECK((asked = onerma = open_card(CLIENT, CLIENT_PID)) != NULL);
	remote = open_region(shared, sizeof(shared), STARDV_ONERMA_REMOTE_READ | STARDV_ONERMA_LOCAL_WRITE);
	CHECK(!pthread_create(&threads[0], NULL, sleep_long, NULL));
	onerma = first;
	region = open_region(own, sizeof(own), STARDV_ONERMA_LOCAL_WRITE);
	wr = request(STARDV_ONERMA_READ, key, 64);
	CHECK(!ibv_query_gid(ctx, 1, CLIENT, &wr.remote));
	CHECK(!pthread_create(&threads[1], NULL, poll_all_the_time, NULL));
	for (i = 0; i < 500; i++)
		CHECK(finish(&wr).status == STARDV_ONERMA_OK);
	__atomic_store_n(&polling, 0, __ATOMIC_RELAXED);
	CHECK(!pthread_join(threads[1], NULL));
	for (i = 0; i < 5; i++)
		CHECK(finish(&wr).status == STARDV_ONERMA_OK);
	/* what it has itself posted ends the sleep */
	wr.remote_region = remote;
	wr.local_region = remote;
	CHECK(!stardv_onerma_post(asked, &wr, sizeof(wr)));
	CHECK(!pthread_join(threads[0], NULL));
	CHECK(!stardv_onerma_destroy_region(onerma, region) && !stardv_onerma_close(asked));
	remote = of_server;
	region = mine;
}

/* What was posted goes on while the program does not call, and others are served: of its own region, too. */
static void without_calls(void)
{
	struct stardv_onerma_wr wr = request(STARDV_ONERMA_READ, key, LEN - 5);
	struct stardv_onerma_wc wc;
	volatile char *last = memory + 3 + LEN - 9;
	int i;

	wr.length = LEN - 8;
	memset(memory, 'c', LEN);
	CHECK(!stardv_onerma_post(onerma, &wr, sizeof(wr)));
	for (i = 0; i < 10000 && *last == 'c'; i++)
		usleep(1000);
	CHECK(*last != 'c');
	CHECK(stardv_onerma_poll(onerma, 1, &wc, -1) == 1 && wc.status == STARDV_ONERMA_OK);
}

/* Regions of this process: destroyed, and with another key. A card reaches itself as it does others. */
static void own_regions(void)
{
	static char more[4096];
	uint32_t old = remote, mine = open_region(more, sizeof(more), STARDV_ONERMA_REMOTE_READ);
	struct stardv_onerma_wr wr;

	remote = mine;
	wr = request(STARDV_ONERMA_READ, key, 64);
	CHECK(!ibv_query_gid(ctx, 1, CLIENT, &wr.remote));
	CHECK(finish(&wr).status == STARDV_ONERMA_OK);
	CHECK(!stardv_onerma_set_key(onerma, mine, (const uint8_t *)"not that key...."));
	CHECK(finish(&wr).status == STARDV_ONERMA_REMOTE_AUTHENTICATION_FAILURE);
	CHECK(!stardv_onerma_set_key(onerma, mine, key));
	CHECK(finish(&wr).status == STARDV_ONERMA_OK);
	CHECK(!stardv_onerma_destroy_region(onerma, mine));
	CHECK(finish(&wr).status == STARDV_ONERMA_REMOTE_AUTHENTICATION_FAILURE);
	CHECK(stardv_onerma_destroy_region(onerma, mine) == EINVAL);
	CHECK(stardv_onerma_set_key(onerma, mine, key) == EINVAL);
	remote = old;
}

static void nonsense(void)
{
	struct stardv_onerma_region_attr attr = { .addr = memory, .length = 1, .rights = 32 };
	struct stardv_onerma_attr card = { .gid_index = 99 };
	struct stardv_onerma_wr wr = request(STARDV_ONERMA_READ, key, 64);
	struct stardv_onerma_wc wc;
	uint32_t id;
	uint8_t made[16];

	CHECK(!stardv_onerma_open(ctx, &card, sizeof(card)) && errno == ENODATA);
	CHECK(!stardv_onerma_open(NULL, &card, sizeof(card)) && errno == EINVAL);
	card.gid_index = CLIENT;
	card.slots = 257;
	CHECK(!stardv_onerma_open(ctx, &card, sizeof(card)) && errno == EINVAL);
	card.comp_mask = 1;
	CHECK(!stardv_onerma_open(ctx, &card, sizeof(card)) && errno == EOPNOTSUPP);

	CHECK(stardv_onerma_create_region(onerma, &attr, sizeof(attr), &id) == EINVAL);
	attr.rights = STARDV_ONERMA_LOCAL_READ;
	CHECK(stardv_onerma_create_region(onerma, &attr, sizeof(attr) - 1, &id) == EINVAL);
	CHECK(stardv_onerma_create_region(onerma, &attr, sizeof(attr), NULL) == EINVAL);
	attr.length = UINT64_MAX;
	CHECK(stardv_onerma_create_region(onerma, &attr, sizeof(attr), &id) == EINVAL);
	CHECK(stardv_onerma_derive_key(key, &wr.remote, 1, 4, made) == EINVAL);
	CHECK(stardv_onerma_derive_key(NULL, &wr.remote, 1, 1, made) == EINVAL);

	CHECK(stardv_onerma_post(onerma, &wr, sizeof(wr) - 1) == EINVAL);
	CHECK(stardv_onerma_post(NULL, &wr, sizeof(wr)) == EINVAL);
	wr.length = 0;
	CHECK(stardv_onerma_post(onerma, &wr, sizeof(wr)) == EINVAL);
	wr.length = 64, wr.op = 0;
	CHECK(stardv_onerma_post(onerma, &wr, sizeof(wr)) == EINVAL);
	wr.op = STARDV_ONERMA_REKEY;
	CHECK(stardv_onerma_post(onerma, &wr, sizeof(wr)) == EINVAL);
	wr.comp_mask = 1;
	CHECK(stardv_onerma_post(onerma, &wr, sizeof(wr)) == EOPNOTSUPP);

	CHECK(stardv_onerma_poll(onerma, 1, &wc, 0) == 0);
	CHECK(stardv_onerma_poll(onerma, -1, &wc, 0) == -EINVAL);
	CHECK(stardv_onerma_poll(onerma, 1, NULL, 0) == -EINVAL);
	CHECK(_stardv_onerma_poll(onerma, 1, &wc, 0, 8) == -EINVAL);
	CHECK(stardv_onerma_query_counters(onerma, NULL, 8) == EINVAL);
	CHECK(stardv_onerma_close(NULL) == EINVAL);
}

static void counts(void)
{
	struct stardv_onerma_counters c, before;
	struct {
		struct stardv_onerma_counters known;
		uint64_t to_come;
	} newer = { .to_come = 7 };

	CHECK(!stardv_onerma_query_counters(onerma, &before, sizeof(before)));
	CHECK(run(STARDV_ONERMA_READ, key, 64) == STARDV_ONERMA_OK);
	CHECK(!stardv_onerma_query_counters(onerma, &c, sizeof(c)));
	/* each try of a command is counted, and on a busy machine one may be tried again */
	CHECK(c.completed > before.completed && c.received > before.received);
	CHECK(!c.comp_mask && !c.forged && !c.foreign && !c.malformed && !c.lost_completions);
	CHECK(!stardv_onerma_query_counters(onerma, &newer.known, sizeof(newer)));
	CHECK(newer.known.completed == c.completed && !newer.to_come);
}

/* A forked child has no card, and does not harm its parent's. */
static void forked(void)
{
	struct stardv_onerma_wr wr = request(STARDV_ONERMA_READ, key, 64);
	struct stardv_onerma_wc wc;
	int status;
	pid_t pid = fork();

	if (!pid) {
		CHECK(stardv_onerma_post(onerma, &wr, sizeof(wr)) == EIO);
		CHECK(stardv_onerma_poll(onerma, 1, &wc, 0) == -EIO);
		CHECK(!stardv_onerma_close(onerma));
		_exit(failures != 0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && !status);
	CHECK(finish(&wr).status == STARDV_ONERMA_OK);
}

/* A process of its own, with a card of its own: READs with the key that it gets through the socket. */
static void tenant(const struct sockaddr_un *at, socklen_t len, uint32_t expected)
{
	int s = socket(AF_UNIX, SOCK_STREAM, 0);
	struct stardv_onerma_wr wr;
	uint8_t mine[16];

	CHECK(!connect(s, (const struct sockaddr *)at, len) && read(s, mine, sizeof(mine)) == sizeof(mine));
	ctx = open_device();
	CHECK((onerma = open_card(CLIENT, 0)) != NULL);
	region = open_region(memory, LEN, STARDV_ONERMA_LOCAL_WRITE);
	wr = request(STARDV_ONERMA_READ, key, 64);
	memcpy(wr.key, mine, sizeof(mine));
	CHECK(finish(&wr).status == expected);
	exit(failures != 0);
}

/* Keys for processes of this host, which the kernel names: that of one opens nothing to another. */
static void peer_keys(void)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	socklen_t len = sizeof(at);
	int s = socket(AF_UNIX, SOCK_STREAM, 0), inet = socket(AF_INET, SOCK_STREAM, 0), pipes[2];
	union ibv_gid own, other = { .raw = { 0x20, 1, 0xd, 0xb8, [15] = 1 } };
	uint8_t of_peer[16], claimed[16], first[16];
	uint32_t pid, op = STARDV_ONERMA_READ;

	CHECK(!ibv_query_gid(ctx, 1, CLIENT, &own) && !pipe(pipes));
	CHECK(!bind(s, (struct sockaddr *)&at, sizeof(sa_family_t)) && !listen(s, 2));
	CHECK(!getsockname(s, (struct sockaddr *)&at, &len));
	for (int thief = 0; thief < 2; thief++) {
		int status, to;
		pid_t child = fork();

		if (!child)
			tenant(&at, len, thief ? STARDV_ONERMA_REMOTE_AUTHENTICATION_FAILURE : STARDV_ONERMA_OK);
		CHECK((to = accept(s, NULL, NULL)) >= 0);
		CHECK(stardv_onerma_derive_peer_key(to, key, &other, op, of_peer, &pid) == EACCES);
		CHECK(!stardv_onerma_derive_peer_key(to, key, &own, op, of_peer, &pid) && pid == (uint32_t)child);
		CHECK(!stardv_onerma_derive_key(key, &own, pid, op, claimed) && !memcmp(of_peer, claimed, 16));
		if (!thief)
			memcpy(first, of_peer, sizeof(first));
		CHECK(write(to, first, sizeof(first)) == sizeof(first));
		CHECK(waitpid(child, &status, 0) == child && !status);
		close(to);
	}
	CHECK(stardv_onerma_derive_peer_key(-1, key, &own, op, of_peer, &pid) == EBADF);
	CHECK(stardv_onerma_derive_peer_key(pipes[0], key, &own, op, of_peer, &pid) == ENOTSOCK);
	CHECK(stardv_onerma_derive_peer_key(inet, key, &own, op, of_peer, &pid) == EACCES);
	CHECK(stardv_onerma_derive_peer_key(s, key, &own, 4, of_peer, &pid) == EINVAL);
	CHECK(stardv_onerma_derive_peer_key(s, key, &own, op, of_peer, NULL) == EINVAL);
	close(s), close(inet), close(pipes[0]), close(pipes[1]);
}

/* A process may have several cards of one address, and an address a fixed number. */
static void several_cards(void)
{
	struct stardv_onerma *more[64];
	int n = 0, error;

	while (n < 64 && (more[n] = open_card(CLIENT, 0)))
		n++;
	error = errno;
	CHECK(n == 63 - (server_gid == CLIENT) && error == EADDRINUSE);
	while (n)
		CHECK(!stardv_onerma_close(more[--n]));
}

int main(int argc, char **argv)
{
	int ends[2], status;
	pid_t server, parent = getpid();

	if (argc > 1)
		server_gid = atoi(argv[1]);
	if (pipe(ends) || (server = fork()) < 0)
		return 1;
	if (!server)
		serve(ends[1], parent);
	close(ends[1]);
	CHECK(read(ends[0], &remote, sizeof(remote)) == sizeof(remote));
	ctx = open_device();
	CHECK((onerma = open_card(CLIENT, CLIENT_PID)) != NULL);
	if (onerma && !failures) {
		region = open_region(memory, LEN, STARDV_ONERMA_LOCAL_READ | STARDV_ONERMA_LOCAL_WRITE);
		moves_data();
		sleeping_threads();
		sleeps_beside_polls();
		without_calls();
		keys_and_bounds();
		own_regions();
		nonsense();
		several_cards();
		peer_keys();
		counts();
		forked();
		CHECK(!stardv_onerma_close(onerma));
		/* The address is free again. */
		CHECK((onerma = open_card(CLIENT, 0)) != NULL && !stardv_onerma_close(onerma));
	}
	CHECK(!kill(server, SIGTERM) && waitpid(server, &status, 0) == server);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
	CHECK(!ibv_close_device(ctx));
	if (!failures)
		puts("onerma: ok");
	return failures != 0;
}
