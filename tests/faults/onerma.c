/* kill -9 of one of two processes at random moments in the middle of 1RMA's READs and WRITEs. Without their
 * target all commands end in bounded time, and the next process of its address serves the same initiator.
 * Without an initiator its target serves a third process all the while, and the next one of that address and
 * number. Nothing but what was written is written. The addresses of STARVERBS_ADDRS are the initiator's, the
 * target's and the third's. usage: onerma [KILLS [SEED]] */
#include "faults.h"
#include <infiniband/stardv.h>
#include <sys/mman.h>

enum { INITIATOR, TARGET, THIRD };
/* Bytes that are read, and as many behind them that are written; commands under way. */
enum { LEN = 1 << 16, SLOTS = 8 };

static const uint8_t key[STARDV_ONERMA_KEY_LEN] = "a region's key!";
static volatile struct shared {
	long steps;
	int killed, stop;
} *shared;

static struct ibv_context *ctx;
static struct stardv_onerma *card;
static char *memory;
static uint32_t region;
/* Since the process began: commands, and those that have ended. */
static long posted, done;

static uint32_t number(int who) { return 70 + (uint32_t)who; }

/* The card of an address, with a region. */
static void open_card(int who, size_t length, char fill, uint32_t rights)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct stardv_onerma_attr attr = { .gid_index = (uint32_t)who, .slots = SLOTS, .pid = number(who) };
	struct stardv_onerma_region_attr of = { .length = length, .rights = rights };

	NEED(list && list[0] && (ctx = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	NEED(memory = malloc(length));
	memset(memory, fill, length);
	memcpy(of.key, key, sizeof(key));
	of.addr = memory;
	NEED(card = stardv_onerma_open(ctx, &attr, sizeof(attr)));
	NEED(stardv_onerma_create_region(card, &of, sizeof(of), &region) == 0);
}

static void close_card(void)
{
	NEED(stardv_onerma_destroy_region(card, region) == 0 && stardv_onerma_close(card) == 0);
	NEED(ibv_close_device(ctx) == 0);
	free(memory);
}

static int all(const char *bytes, size_t len, char a, char b)
{
	while (len && (bytes[len - 1] == a || bytes[len - 1] == b))
		len--;
	return !len;
}

/* Has a region until it is told to end. Its card serves. */
static void target(int fd)
{
	open_card(TARGET, 2 * LEN, 's', STARDV_ONERMA_REMOTE_READ | STARDV_ONERMA_REMOTE_WRITE);
	NEED(write(fd, &region, sizeof(region)) == sizeof(region));
	NEED(await_byte(fd) == 'e');
	NEED(all(memory, LEN, 's', 's') && all(memory + LEN, LEN, 's', 'w'));
	close_card();
}

static size_t length_of(long n) { return 1 + (size_t)(n * 7919 % (LEN - 1)); }

/* Every third command is a WRITE. */
static int writes(long n) { return n % 3 == 2; }

static void post_one(int who, uint32_t remote)
{
	const uint32_t op = writes(posted) ? STARDV_ONERMA_WRITE : STARDV_ONERMA_READ;
	struct stardv_onerma_wr wr = { .wr_id = (uint64_t)posted, .op = op, .remote_region = remote,
				       .local_region = region, .length = length_of(posted) };
	char *here = memory + posted % SLOTS * LEN;
	union ibv_gid own;

	wr.local_offset = (uint64_t)(here - memory);
	wr.remote_offset = writes(posted) ? LEN : 0;
	memset(here, writes(posted) ? 'w' : 0, wr.length);
	NEED(ibv_query_gid(ctx, 1, TARGET, &wr.remote) == 0 && ibv_query_gid(ctx, 1, who, &own) == 0);
	NEED(stardv_onerma_derive_key(key, &own, number(who), op, wr.key) == 0);
	NEED(stardv_onerma_post(card, &wr, sizeof(wr)) == 0);
	posted++;
}

/* What the next command has ended as; READs that are done have brought what is there. */
static uint32_t next_end(void)
{
	struct stardv_onerma_wc wc = { .status = 99 };
	const char *here;

	NEED(stardv_onerma_poll(card, 1, &wc, -1) == 1);
	here = memory + wc.wr_id % SLOTS * LEN;
	if (wc.status == STARDV_ONERMA_OK && !writes((long)wc.wr_id))
		NEED(all(here, length_of((long)wc.wr_id), 's', 's'));
	done++;
	return wc.status;
}

/* One command after the other. */
static void run_some(int who, uint32_t remote, int count)
{
	while (count--) {
		post_one(who, remote);
		NEED(next_end() == STARDV_ONERMA_OK);
	}
}

static uint32_t take_region(int fd)
{
	uint32_t remote;

	NEED(recv(fd, &remote, sizeof(remote), MSG_WAITALL) == sizeof(remote));
	return remote;
}

/* Keeps its slots full until its target is gone, and goes on with the next one. Slots are used in turn: a
 * command's memory is its own until all of the SLOTS have ended. */
static void initiator(int fd)
{
	uint32_t remote, status = STARDV_ONERMA_OK;

	open_card(INITIATOR, (size_t)SLOTS * LEN, 0, STARDV_ONERMA_LOCAL_READ | STARDV_ONERMA_LOCAL_WRITE);
	remote = take_region(fd);
	while (status == STARDV_ONERMA_OK) {
		while (posted < done + SLOTS)
			post_one(INITIATOR, remote);
		while (done < posted && status == STARDV_ONERMA_OK)
			status = next_end();
		shared->steps++;
	}
	NEED(shared->killed);
	for (;; status = next_end()) {
		NEED(status == STARDV_ONERMA_OK || status == STARDV_ONERMA_TIMEOUT ||
		     status == STARDV_ONERMA_DISPATCH_TIMEOUT);
		if (done == posted)
			break;
	}
	say(fd, 'l');
	run_some(INITIATOR, take_region(fd), 20);
	close_card();
}

/* The next process of the initiator's address and number. */
static void successor(int fd)
{
	open_card(INITIATOR, (size_t)SLOTS * LEN, 0, STARDV_ONERMA_LOCAL_READ | STARDV_ONERMA_LOCAL_WRITE);
	run_some(INITIATOR, take_region(fd), 20);
	close_card();
}

/* Works beside the initiator. */
static void third(int fd)
{
	uint32_t remote;

	open_card(THIRD, (size_t)SLOTS * LEN, 0, STARDV_ONERMA_LOCAL_READ | STARDV_ONERMA_LOCAL_WRITE);
	remote = take_region(fd);
	while (!shared->stop)
		run_some(THIRD, remote, 1);
	close_card();
}

static void end(pid_t pid)
{
	NEED(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
}

/* A process that runs `role`, with the target's region. */
static pid_t start_with(void (*role)(int fd), int *fd, uint32_t remote)
{
	pid_t pid = start(role, fd);

	NEED(write(*fd, &remote, sizeof(remote)) == sizeof(remote));
	return pid;
}

/* The next target of that address. */
static pid_t start_target(int *fd, uint32_t *remote)
{
	pid_t pid = start(target, fd);

	*remote = take_region(*fd);
	return pid;
}

static int kill_target(pid_t *pid, int *fd, int of_initiator, pid_t waits)
{
	uint32_t remote;

	/* before: commands may be given up while the dead one is buried */
	shared->killed = 1;
	end(*pid);
	if (await_byte(of_initiator) != 'l')
		return 0;
	close(*fd);
	*pid = start_target(fd, &remote);
	NEED(write(of_initiator, &remote, sizeof(remote)) == sizeof(remote));
	return ended_well(waits);
}

static int kill_initiator(pid_t pid, uint32_t remote, pid_t beside)
{
	int fd, good;

	end(pid);
	good = ended_well(start_with(successor, &fd, remote));
	close(fd);
	shared->stop = 1;
	return ended_well(beside) && good;
}

static void kill_one(int victim, long moment)
{
	int fds[3], good;
	pid_t pids[3] = { 0 };
	uint32_t remote;

	memset((void *)shared, 0, sizeof(*shared));
	pids[TARGET] = start_target(&fds[TARGET], &remote);
	pids[INITIATOR] = start_with(initiator, &fds[INITIATOR], remote);
	if (victim == INITIATOR)
		pids[THIRD] = start_with(third, &fds[THIRD], remote);
	while (shared->steps == 0 && waitpid(pids[INITIATOR], NULL, WNOHANG) == 0)
		nap(1);
	usleep((useconds_t)moment);
	good = victim == TARGET ? kill_target(&pids[TARGET], &fds[TARGET], fds[INITIATOR], pids[INITIATOR])
				: kill_initiator(pids[INITIATOR], remote, pids[THIRD]);
	say(fds[TARGET], 'e');
	if (!ended_well(pids[TARGET]) || !good) {
		failures++;
		fprintf(stderr, "1RMA: the %s killed after %ld us\n", victim == TARGET ? "target" : "initiator", moment);
	}
	for (int i = 0; i < (victim == INITIATOR ? 3 : 2); i++)
		close(fds[i]);
}

int main(int argc, char **argv)
{
	int kills = argc > 1 ? atoi(argv[1]) : 24;
	unsigned int seed = argc > 2 ? (unsigned int)atoi(argv[2]) : 1;

	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm((unsigned int)(60 + 3 * kills));
	NEED((shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) != MAP_FAILED);
	srand(seed);
	for (int i = 0; i < kills; i++)
		kill_one(i % 2, rand() % (1 << rand() % 17));
	printf("%d kills, seed %u\n", kills, seed);
	return failures != 0;
}
