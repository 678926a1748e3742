/* A process that keeps the protocol's set-up, by the library, and then writes whatever it likes into all
 * memory that it shares with its peer: heads, slots and data of their channels, lanes of their session, the
 * doorbell that a card with many peers has handed to all. One for each seed: words at random, small changes
 * of indices and flags, well-formed requests and answers with fields at random, those of other connections
 * among them. Then it ends, at any moment; some close their session first, and write on.
 *
 * Its victim talks with it, and with an honest third process; others that it is connected with say nothing.
 * After each of them
 *
 * - all calls of the victim have returned, and all that it asked of the hostile one is complete: done, or
 *   failed,
 * - memory of the victim that the hostile one has no key for is what it was,
 * - the honest connection has lost, added, repeated and changed nothing, and goes through shared memory,
 * - the victim has no more descriptors than before.
 *
 * What breaks the rules of a channel or a session is counted (local_broken).
 *
 * usage: hostile [ROUNDS [SEED]] */
#include "faults.h"
#include "counters.h"
#include <stddef.h>
#include <sys/mman.h>

enum { GUARD = 4096, LENGTH = 40000, AROUND = 0x11, RECEIVES = 8, UNDER_WAY = 4,
	WRITES = 400 };
/* Descriptors that a card may have more after many peers: their blocks' sockets, 32 of which it keeps. */
enum { MORE = 40 };
/* Requests to the honest process; beside each hostile one at least so many. */
enum { ECHO = 64, CELL = 4096, AT_LEAST = 20 };

/* As provider/backend/src/peer/channel.rs and memory.rs lay it out. */
enum { HEAD = 1024, SLOTS = 4096, REQUESTS = 512, ANSWERS = 128, SLOT = 64 };
enum { CHANNEL_LEN = (SLOTS + (REQUESTS + ANSWERS) * SLOT + 4095) / 4096 * 4096 + 2 * (1 << 19) };
enum { SESSION_LEN = 4096 + 6 * (1 << 20), DOORBELL_LEN = 4096 };
/* Connections that say nothing: so many that the victim's card awaits its doorbell. */
enum { QUIET = 8 };

/* As provider/verbs/src/device/soft/local/record.rs has it. */
struct slot {
	uint32_t stamp;
	uint8_t op, flags;
	uint16_t epoch;
	uint32_t to, from, seq, len, at, imm, rkey, total, addr[2];
	uint8_t body[16];
};
_Static_assert(sizeof(struct slot) == SLOT, "a slot");

/* What all know. */
static struct shared {
	/* the honest connection's queue pairs: the victim's, and the other one */
	volatile uint32_t honest[2];
	/* and the number of the victim's request on it, which would have to be guessed */
	volatile uint32_t number;
	/* what the victim counts, at the end */
	volatile uint64_t broken, honest_messages;
	volatile uint64_t done, failed;
	/* hostile processes that had its doorbell */
	volatile uint64_t doorbells;
} *shared;

static uint64_t state;

static uint32_t draw(uint32_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (uint32_t)(state >> 20) % below;
}

static int descriptors(void)
{
	int open = 0;

	for (int fd = 0; fd < 1024; fd++)
		open += fcntl(fd, F_GETFD) >= 0;
	return open;
}

static void receive(struct side *s, uint32_t at, uint32_t len, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)s->buffer + at, len, s->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	NEED(ibv_post_recv(s->qp, &wr, &bad) == 0);
}

/* Posts a request from `at` of the buffer. */
static int request(struct side *s, const struct peer *p, enum ibv_wr_opcode op, uint32_t at, uint64_t there,
		   uint32_t len, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)s->buffer + at, len, s->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = op,
			   .send_flags = IBV_SEND_SIGNALED }, *bad;

	if (op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = p->addr + there;
		wr.wr.atomic.rkey = p->rkey;
		wr.wr.atomic.compare_add = 1;
	} else {
		wr.wr.rdma.remote_addr = p->addr + there;
		wr.wr.rdma.rkey = p->rkey;
	}
	return ibv_post_send(s->qp, &wr, &bad);
}

/* --- the honest process: sends each message back, in order */

static void echo(int fd)
{
	struct side s;
	struct peer p;
	uint64_t next = 0;
	struct pollfd over = { .fd = fd, .events = POLLIN };

	open_side(&s);
	p = swap(fd, &s);
	NEED(connect_to(s.qp, &p, 18, 7) == 0);
	for (uint32_t n = 0; n < RECEIVES; n++)
		receive(&s, BYTES + n * ECHO, ECHO, n);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	for (uint32_t turn = 0;; turn++) {
		struct ibv_wc wc;
		uint64_t word;
		int n = ibv_poll_cq(s.cq, 1, &wc);

		NEED(n >= 0);
		if (n == 0) {
			if (turn % 256 == 0 && poll(&over, 1, 1) == 1)
				break;
			continue;
		}
		NEED(wc.status == IBV_WC_SUCCESS);
		if (wc.opcode != IBV_WC_RECV)
			continue;
		NEED(wc.byte_len == ECHO && wc.wr_id == next % RECEIVES);
		for (uint32_t at = 0; at < ECHO; at += 8) {
			memcpy(&word, s.buffer + BYTES + wc.wr_id * ECHO + at, 8);
			NEED(word == next);
		}
		memcpy(s.buffer + next % RECEIVES * ECHO, s.buffer + BYTES + wc.wr_id * ECHO, ECHO);
		receive(&s, BYTES + (uint32_t)wc.wr_id * ECHO, ECHO, wc.wr_id);
		NEED(request(&s, &p, IBV_WR_SEND, next % RECEIVES * ECHO, 0, ECHO, next) == 0);
		next++;
	}
	NEED(await_byte(fd) == 'e');
	shared->honest_messages = next;
}

/* --- a process that is connected, and says nothing */

static void quiet(int fd)
{
	struct side s;
	struct peer p;

	open_side(&s);
	p = swap(fd, &s);
	NEED(connect_to(s.qp, &p, 18, 7) == 0);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g' && await_byte(fd) == 'e');
}

/* --- the victim */

static struct side honest, other;
static struct peer echoes, foe;
/* What it has with the hostile one: memory between guards, where its requests take data from and to. */
static struct {
	int under_way, receives, failed;
	uint64_t posted, done;
} with;

/* One request to the honest process, whose outcome is known to the byte. */
static void talk_honestly(uint64_t n)
{
	struct ibv_wc wc;
	uint64_t word;
	int got = 0, sent = 0;

	shared->number = (uint32_t)n;
	switch (n % 4) {
	case 0:
		for (uint32_t at = 0; at < ECHO; at += 8)
			memcpy(honest.buffer + at, (uint64_t[]){ n / 4 }, 8);
		NEED(request(&honest, &echoes, IBV_WR_SEND, 0, 0, ECHO, n) == 0);
		while (!got || !sent) {
			NEED(next_status(&honest, &wc) == IBV_WC_SUCCESS);
			got += wc.opcode == IBV_WC_RECV;
			sent += wc.opcode != IBV_WC_RECV;
		}
		NEED(got == 1 && sent == 1);
		for (uint32_t at = 0; at < ECHO; at += 8) {
			memcpy(&word, honest.buffer + BYTES + at, 8);
			NEED(word == n / 4);
		}
		receive(&honest, BYTES, ECHO, 0);
		return;
	case 1:
		memset(honest.buffer, (int)(n % 255), CELL);
		NEED(request(&honest, &echoes, IBV_WR_RDMA_WRITE, 0, BYTES + CELL, CELL, n) == 0);
		break;
	case 2:
		memset(honest.buffer + CELL, AROUND, 3 * CELL);
		NEED(request(&honest, &echoes, IBV_WR_RDMA_READ, 2 * CELL, BYTES + CELL, CELL, n) == 0);
		break;
	default:
		NEED(request(&honest, &echoes, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, BYTES + 3 * CELL, 8, n) == 0);
	}
	NEED(next_status(&honest, &wc) == IBV_WC_SUCCESS && wc.wr_id == n);
	if (n % 4 == 2) {
		for (uint32_t at = 0; at < CELL; at++) {
			NEED(honest.buffer[2 * CELL + at] == (char)((n - 1) % 255));
			NEED(honest.buffer[CELL + at] == AROUND && honest.buffer[3 * CELL + at] == AROUND);
		}
	} else if (n % 4 == 3) {
		memcpy(&word, honest.buffer, 8);
		NEED(word == n / 4);
	}
}

/* Takes what is complete of the hostile connection. */
static void look_at_hostile(void)
{
	struct ibv_wc wc[16];
	int n = ibv_poll_cq(other.cq, 16, wc);

	NEED(n >= 0);
	for (int i = 0; i < n; i++) {
		/* a completion is of something that was posted, once */
		if (wc[i].wr_id >= 1000) {
			NEED(--with.receives >= 0);
		} else {
			NEED(--with.under_way >= 0);
			with.done++;
		}
		with.failed |= wc[i].status != IBV_WC_SUCCESS;
	}
}

static void talk_with_hostile(void)
{
	static const enum ibv_wr_opcode ops[] = { IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ,
		IBV_WR_ATOMIC_FETCH_AND_ADD };

	look_at_hostile();
	while (!with.failed && with.receives < RECEIVES) {
		receive(&other, GUARD, LENGTH, 1000);
		with.receives++;
	}
	while (!with.failed && with.under_way < UNDER_WAY) {
		enum ibv_wr_opcode op = ops[draw(4)];
		uint32_t len = op == IBV_WR_ATOMIC_FETCH_AND_ADD ? 8 : draw(4) ? draw(200) + 1 : draw(LENGTH) + 1;

		NEED(request(&other, &foe, op, GUARD + LENGTH - len, GUARD, len, 1) == 0);
		with.under_way++;
		with.posted++;
	}
}

static void be_a_victim_of(int fd, uint64_t *n)
{
	struct pollfd over = { .fd = fd, .events = POLLIN };
	long tries = 0;
	uint64_t until = *n + AT_LEAST;

	memset(&with, 0, sizeof(with));
	memset(other.buffer, AROUND, 2 * BYTES);
	NEED(other.qp = make_qp(&other, IBV_QPT_RC));
	foe = swap(fd, &other);
	NEED(connect_to(other.qp, &foe, 10, 2) == 0);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	while (*n < until || tries++ % 4 || poll(&over, 1, 0) == 0) {
		talk_with_hostile();
		talk_honestly((*n)++);
	}
	NEED(await_byte(fd) == 'd');
	while (with.under_way > 0)
		look_at_hostile();
	shared->failed += with.failed != 0;
	shared->done += with.done;
	NEED(ibv_destroy_qp(other.qp) == 0);
	for (uint32_t at = 0; at < 2 * BYTES; at++)
		NEED((at >= GUARD && at < GUARD + LENGTH) || other.buffer[at] == AROUND);
	/* those are of a queue pair that is gone */
	while (ibv_poll_cq(other.cq, 1, &(struct ibv_wc){ 0 }) > 0)
		;
	say(fd, 'f');
}

static void victim(int fd)
{
	uint64_t n = 0, rounds = 0;
	int before = 0, now;

	open_side(&honest);
	echoes = swap(fd, &honest);
	NEED(connect_to(honest.qp, &echoes, 18, 7) == 0);
	receive(&honest, BYTES, ECHO, 0);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	for (int i = 0; i < QUIET; i++) {
		struct side with_quiet = honest;
		struct peer p;

		NEED(with_quiet.qp = make_qp(&honest, IBV_QPT_RC));
		p = swap(fd, &with_quiet);
		NEED(connect_to(with_quiet.qp, &p, 18, 7) == 0);
		say(fd, 'c');
		NEED(await_byte(fd) == 'g');
	}
	while (count(honest.ctx, "local_qps") != 1 + QUIET)
		nap(1);
	shared->honest[0] = honest.qp->qp_num;
	shared->honest[1] = echoes.qpn;
	/* the same card, but nothing of the honest connection's: another domain, key and completion queue */
	other = honest;
	NEED(other.pd = ibv_alloc_pd(other.ctx));
	NEED(other.cq = ibv_create_cq(other.ctx, 4 * DEPTH, NULL, NULL, 0));
	NEED(other.buffer = malloc(2 * BYTES));
	NEED(other.mr = ibv_reg_mr(other.pd, other.buffer + GUARD, LENGTH, 0xf));
	say(fd, 'r');
	while (await_byte(fd) == 'n') {
		state = 0x9e3779b97f4a7c15u + n;
		be_a_victim_of(fd, &n);
		now = descriptors();
		if (rounds++ == 3)
			before = now;
		NEED(rounds < 5 || now <= before + MORE);
	}
	while (n % 4)
		talk_honestly(n++);
	CHECK(count(honest.ctx, "local_qps") == 1 + QUIET);
	shared->broken = count(honest.ctx, "local_broken");
	say(fd, 'f');
	NEED(await_byte(fd) == 'e');
	CHECK(shared->honest_messages == n / 4);
}

/* --- the hostile process */

static struct { uint8_t *at; size_t len; } maps[16];
static int mapped;

/* Where its own memory of a doorbell's length lies: its tables are no one's to trust but their readers', who
 * have no business with it here. */
static unsigned long own[16];

/* All that it shares with its victim: it has no other peer. Before it is connected, its own. */
static void find_maps(int is_connected)
{
	FILE *file = fopen("/proc/self/maps", "re");
	char line[512];

	NEED(file);
	int owned = 0, doorbells = 0;

	mapped = 0;
	while (mapped < 16 && fgets(line, sizeof(line), file)) {
		unsigned long begin, end;
		char rights[8];

		if (!strstr(line, "/memfd:starverbs ") || sscanf(line, "%lx-%lx %7s", &begin, &end, rights) != 3)
			continue;
		if (strcmp(rights, "rw-s"))
			continue;
		if (end - begin == DOORBELL_LEN) {
			int is_own = 0;

			if (!is_connected && owned < 16)
				own[owned++] = begin;
			for (int i = 0; i < 16; i++)
				is_own |= own[i] == begin;
			if (is_own)
				continue;
			doorbells++;
		} else if (end - begin != CHANNEL_LEN && end - begin != SESSION_LEN) {
			continue;
		}
		maps[mapped].at = (uint8_t *)begin;
		maps[mapped++].len = end - begin;
	}
	fclose(file);
	shared->doorbells += doorbells > 0;
}

/* The library has taken away what it shared: it was thrown out. */
static void thrown_out(int signal, siginfo_t *info, void *context)
{
	(void)context;
	for (int i = 0; i < mapped; i++)
		if ((uint8_t *)info->si_addr >= maps[i].at && (uint8_t *)info->si_addr < maps[i].at + maps[i].len)
			_exit(0);
	/* anything else is a crash, of its library on memory that its victim may write */
	sigaction(signal, &(struct sigaction){ .sa_handler = SIG_DFL }, NULL);
}

/* A word anywhere, heads and slots above all. */
static void write_anything(void)
{
	int which = (int)draw((uint32_t)mapped);
	size_t heads = SLOTS + (REQUESTS + ANSWERS) * SLOT;
	size_t len = draw(3) && heads < maps[which].len ? heads : maps[which].len;
	uint32_t word = draw(2) ? draw(1 << 10) : (uint32_t)state;

	__atomic_store_n((uint32_t *)(maps[which].at + (draw((uint32_t)(len / 4)) * 4)), word, __ATOMIC_RELAXED);
}

/* Indices and flags, a little wrong. */
static void change_heads(void)
{
	int which = (int)draw((uint32_t)mapped);
	uint32_t *word = (uint32_t *)(maps[which].at + draw(4096 / 64) * 64 + draw(2) * 4 * draw(16));

	__atomic_fetch_add(word, draw(2) ? 1 : draw(64) - 32, __ATOMIC_RELAXED);
}

/* A record where its reader looks next, as an honest end would write it, with fields at random. `forge`: an
 * answer to the honest connection. */
static void write_record(const struct side *s, int forge)
{
	int which = (int)draw((uint32_t)mapped), answers = forge ? 1 : (int)draw(2);
	uint32_t slots = answers ? ANSWERS : REQUESTS, last = 0;
	struct slot *ring = (struct slot *)(maps[which].at + SLOTS + (answers ? REQUESTS * SLOT : 0)), *to;
	static const uint8_t ops[] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0x80, 0x81, 0x82 };

	if (maps[which].len != CHANNEL_LEN)
		return;
	for (uint32_t i = 0; i < slots; i++)
		if (ring[i].stamp > last && ring[i].stamp < 1u << 30 && (ring[i].stamp - 1) % slots == i)
			last = ring[i].stamp;
	to = &ring[last % slots];
	to->op = forge ? (uint8_t)(1 + draw(6)) : answers ? (uint8_t)draw(7) : ops[draw(sizeof(ops))];
	to->flags = (uint8_t)draw(128);
	/* a card counts its proposals from 1 on; the honest one was the first */
	to->epoch = (uint16_t)(forge ? 1 + draw(2) : draw(64));
	to->to = forge || draw(4) == 0 ? shared->honest[0] : foe.qpn;
	to->from = forge || draw(4) == 0 ? shared->honest[1] : s->qp->qp_num;
	to->seq = to->to == shared->honest[0] ? shared->number + draw(3) : draw(2) ? draw(8) : draw(4096);
	to->len = forge || draw(3) ? draw(17) : draw(3) ? draw(1 << 15) : (uint32_t)state;
	to->at = draw(2) ? draw(1 << 19) : (uint32_t)state;
	to->imm = draw(32);
	to->rkey = draw(2) ? foe.rkey : (uint32_t)state;
	to->total = draw(2) ? to->len : draw(1 << 16);
	to->addr[0] = (uint32_t)(foe.addr + draw(GUARD + LENGTH));
	to->addr[1] = (uint32_t)(foe.addr >> 32);
	__atomic_store_n(&to->stamp, last + 1, __ATOMIC_RELEASE);
}

/* Keeps the rings moving, as its own library believes it does. */
static void ask_something(struct side *s, int *asked)
{
	static const enum ibv_wr_opcode ops[] = { IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ };
	struct ibv_wc wc[8];
	int n = ibv_poll_cq(s->cq, 8, wc);

	for (int i = 0; i < n; i++)
		*asked -= wc[i].opcode != IBV_WC_RECV;
	if (*asked < UNDER_WAY && request(s, &foe, ops[draw(3)], 0, GUARD + draw(LENGTH - 64), draw(64) + 1, 1) == 0)
		++*asked;
}

/* Its session is over, and it goes on to write what its victim reads. */
static void write_on(const struct side *s, int fd)
{
	NEED(close_range(3, (unsigned)fd - 1, 0) == 0 && close_range((unsigned)fd + 1, ~0U, 0) == 0);
	for (uint32_t n = 10 * WRITES; n > 0 && mapped > 0; n--)
		write_record(s, 0);
}

static void hostile(int fd)
{
	struct side s;
	int asked = 0, way = (int)draw(6);
	uint32_t writes = draw(WRITES);

	/* another user, where that can be had; its process ends with its parent all the same */
	if (geteuid() == 0 && draw(2) && setresuid(54321, 54321, 54321) == 0)
		NEED(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
	open_side(&s);
	find_maps(0);
	foe = swap(fd, &s);
	/* its memory has the guards' places, too */
	NEED(connect_to(s.qp, &foe, 10, 2) == 0);
	for (int i = 0; i < RECEIVES; i++)
		NEED(post_recv(&s, s.qp) == 0);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	for (int i = 0; i < 50 && count(s.ctx, "local_qps") != 1; i++)
		nap(1);
	find_maps(1);
	NEED(sigaction(SIGSEGV, &(struct sigaction){ .sa_sigaction = thrown_out, .sa_flags = SA_SIGINFO }, NULL) ==
	     0);
	for (uint32_t n = 0; n < writes && mapped > 0; n++) {
		switch (way) {
		case 0: write_anything(); break;
		case 1: change_heads(); break;
		case 2: write_record(&s, 0); break;
		case 3:
		case 4: write_record(&s, 1); break;
		default: draw(2) ? write_anything() : write_record(&s, (int)draw(2));
		}
		if (draw(8) == 0)
			ask_something(&s, &asked);
		if (draw(64) == 0)
			nap(1);
	}
	if (draw(4) == 0)
		write_on(&s, fd);
	say(fd, 'x');
	if (draw(2))
		kill(getpid(), SIGKILL);
	_exit(0);
}

/* --- all of them */

static void swap_between(int a, int b)
{
	struct peer p[2];
	int fds[2] = { a, b };

	for (int i = 0; i < 2; i++)
		NEED(recv(fds[i], &p[i], sizeof(p[i]), MSG_WAITALL) == sizeof(p[i]));
	for (int i = 0; i < 2; i++)
		NEED(write(fds[i], &p[!i], sizeof(p[i])) == sizeof(p[i]));
	let_go(fds);
}

int main(int argc, char **argv)
{
	long rounds = argc > 1 ? atol(argv[1]) : 60, ended_badly = 0;
	uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
	int fds[2], mute[QUIET], fd;
	pid_t pids[2], mutes[QUIET], pid;

	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm(120 + (unsigned)rounds / 4);
	/* who is trusted has the other's memory in any case */
	NEED(setenv("STARVERBS_LINK_TRUST", "none", 1) == 0);
	NEED((shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) != MAP_FAILED);
	pids[0] = start(victim, &fds[0]);
	pids[1] = start(echo, &fds[1]);
	introduce(fds);
	for (int i = 0; i < QUIET; i++) {
		mutes[i] = start(quiet, &mute[i]);
		swap_between(fds[0], mute[i]);
	}
	NEED(await_byte(fds[0]) == 'r');
	for (long n = 0; n < rounds; n++) {
		int status;

		state = 0x9e3779b97f4a7c15u * (seed + (uint64_t)n) | 1;
		for (int i = 0; i < 16; i++)
			draw(2);
		pid = start(hostile, &fd);
		say(fds[0], 'n');
		swap_between(fds[0], fd);
		await_byte(fd);
		NEED(waitpid(pid, &status, 0) == pid);
		ended_badly += WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL;
		close(fd);
		say(fds[0], 'd');
		if (await_byte(fds[0]) != 'f') {
			fprintf(stderr, "hostile: the victim of seed %llu\n", (unsigned long long)(seed + (uint64_t)n));
			return 1;
		}
	}
	say(fds[0], 'q');
	NEED(await_byte(fds[0]) == 'f');
	for (int i = 1; i >= 0; i--) {
		say(fds[i], 'e');
		CHECK(ended_well(pids[i]));
	}
	for (int i = 0; i < QUIET; i++) {
		say(mute[i], 'e');
		CHECK(ended_well(mutes[i]));
	}
	CHECK(ended_badly == 0);
	printf("%ld hostile processes from seed %llu: %llu requests of the victim to them done, "
	       "%llu connections failed, %llu ended for breaking the rules, %ld crashed; %llu had the doorbell; "
	       "%llu honest messages\n",
	       rounds, (unsigned long long)seed, (unsigned long long)shared->done,
	       (unsigned long long)shared->failed, (unsigned long long)shared->broken, ended_badly,
	       (unsigned long long)shared->doorbells, (unsigned long long)shared->honest_messages);
	CHECK(rounds < 50 || (shared->broken > 0 && shared->doorbells > 0));
	return failures != 0;
}
