/* Which memory of a peer is mapped, by the counters of who asks for it: memory of malloc where the library
 * serves that from a file (STARVERBS_SHARE=malloc), and the program's own files if they are sealed. One that
 * can be made shorter is copied, so that its owner harms itself alone when it does so. Needs
 * LD_PRELOAD=libstarverbs-share.so:libstarverbs.so.
 * usage: ways */
#include "faults.h"
#include "counters.h"
#include <stdio.h>
#include <sys/mman.h>

enum { LEN = 4 << 20, ROUNDS = 20 };
enum { OF_MALLOC, OF_SEALED, OF_UNSEALED, KINDS };

/* What all know. */
static struct shared {
	uint64_t addr[KINDS];
	uint32_t rkey[KINDS];
} *shared;

static const char *const names[KINDS] = { "memory of malloc", "a sealed file", "a file that is not sealed" };
static struct side s;

/* A file in memory, mapped; its descriptor in `fd`, if anybody wants it. */
static char *map_file(int is_sealed, int *fd)
{
	int file = memfd_create("program", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	char *at;

	NEED(file >= 0 && ftruncate(file, LEN) == 0);
	NEED((at = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)) != MAP_FAILED);
	NEED(!is_sealed || fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
	*fd = file;
	return at;
}

static void meet(int fd)
{
	struct peer p = swap(fd, &s);

	NEED(connect_to(s.qp, &p, 12, 3) == 0);
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	while (count(s.ctx, "local_qps") != 1)
		nap(1);
	say(fd, 'l');
}

/* Owns memory of each kind. At the end its unsealed file has no bytes any more. */
static void target(int fd)
{
	char *at[KINDS];
	int file;

	open_side(&s);
	NEED(at[OF_MALLOC] = calloc(1, LEN));
	at[OF_SEALED] = map_file(1, &file);
	at[OF_UNSEALED] = map_file(0, &file);
	for (int kind = 0; kind < KINDS; kind++) {
		struct ibv_mr *mr;

		NEED(mr = ibv_reg_mr(s.pd, at[kind], LEN, 0xf));
		shared->addr[kind] = (uintptr_t)at[kind];
		shared->rkey[kind] = mr->rkey;
	}
	meet(fd);
	NEED(await_byte(fd) == 't');
	NEED(ftruncate(file, 0) == 0);
	say(fd, 't');
	NEED(await_byte(fd) == 'e');
}

static int run(int kind, enum ibv_wr_opcode op, void *local, uint32_t len, struct ibv_mr *mr)
{
	struct ibv_sge sge = { (uintptr_t)local, len, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED },
		*bad;
	struct ibv_wc wc;

	if (op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = shared->addr[kind];
		wr.wr.atomic.rkey = shared->rkey[kind];
		wr.wr.atomic.compare_add = 1;
	} else {
		wr.wr.rdma.remote_addr = shared->addr[kind];
		wr.wr.rdma.rkey = shared->rkey[kind];
	}
	NEED(ibv_post_send(s.qp, &wr, &bad) == 0);
	return next_status(&s, &wc);
}

/* One request after the other: what is written is read, and counted on. */
static uint64_t work_on(int kind, char *local, struct ibv_mr *mr)
{
	static const uint32_t lens[] = { 8, 4096, LEN };
	uint64_t requests = 0, before;
	char *back = local + LEN;

	for (int round = 0; round < ROUNDS; round++) {
		for (int i = 0; i < 3; i++, requests += 2) {
			memset(local, round + 1, lens[i]);
			memset(back, 0, lens[i]);
			NEED(run(kind, IBV_WR_RDMA_WRITE, local, lens[i], mr) == IBV_WC_SUCCESS);
			NEED(run(kind, IBV_WR_RDMA_READ, back, lens[i], mr) == IBV_WC_SUCCESS);
			NEED(memcmp(local, back, lens[i]) == 0);
		}
		memcpy(&before, local, 8);
		NEED(run(kind, IBV_WR_ATOMIC_FETCH_AND_ADD, back, 8, mr) == IBV_WC_SUCCESS);
		NEED(memcmp(&before, back, 8) == 0);
		requests++;
	}
	return requests;
}

static void initiator(int fd)
{
	char *local;
	struct ibv_mr *mr;

	open_side(&s);
	NEED((local = malloc(2 * LEN)) && (mr = ibv_reg_mr(s.pd, local, 2 * LEN, 0xf)));
	meet(fd);
	/* a connection's first request is answered by the target's card */
	NEED(run(OF_MALLOC, IBV_WR_RDMA_WRITE, local, 8, mr) == IBV_WC_SUCCESS);
	for (int kind = 0; kind < KINDS; kind++) {
		uint64_t mapped = count(s.ctx, "local_mapped"), requests = work_on(kind, local, mr);

		mapped = count(s.ctx, "local_mapped") - mapped;
		printf("%s: %lu requests, %lu of them on mapped memory\n", names[kind], requests, mapped);
		NEED(mapped == (kind == OF_UNSEALED ? 0 : requests));
	}
	say(fd, 't');
	NEED(await_byte(fd) == 't');
	/* no byte is there to be written: whoever is to notice, it is not this process by a signal */
	NEED(run(OF_UNSEALED, IBV_WR_RDMA_WRITE, local, LEN, mr) != IBV_WC_SUCCESS);
	say(fd, 'f');
	NEED(await_byte(fd) == 'e');
}

int main(void)
{
	int fds[2], status;

	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm(120);
	NEED((shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) != MAP_FAILED);
	pid_t pids[2] = { start(target, &fds[0]), start(initiator, &fds[1]) };

	introduce(fds);
	for (int i = 0; i < 2; i++)
		NEED(await_byte(fds[i]) == 'l');
	NEED(await_byte(fds[1]) == 't');
	say(fds[0], 't');
	NEED(await_byte(fds[0]) == 't');
	say(fds[1], 't');
	NEED(await_byte(fds[1]) == 'f');
	/* the owner may have died of what it did to its own memory */
	kill(pids[0], SIGKILL);
	NEED(waitpid(pids[0], &status, 0) == pids[0]);
	say(fds[1], 'e');
	CHECK(ended_well(pids[1]));
	printf("a file was made shorter: who wrote there lives\n");
	return failures != 0;
}
