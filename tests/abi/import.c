/* Objects of one process imported by another: what works, what is refused, and what ends a use that is under
 * way. The parent exports, a child imports; each test has a child of its own, and a socket to it.
 * Build: cc -Wall -o import import.c -libverbs; run with LD_LIBRARY_PATH naming the library under test. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

enum { PAGE = 4096, BIG = 64 * PAGE, ROUNDS = 40, NOBODY = 65534,
       REMOTE = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		IBV_ACCESS_REMOTE_ATOMIC };

/* What an exporter tells beside the descriptor. */
struct offer {
	uint32_t pd, other_pd, mr, rkey, demand, null, dm;
	uint64_t addr;
};

static void nap(long us)
{
	struct timespec t = { us / 1000000, us % 1000000 * 1000 };

	nanosleep(&t, NULL);
}

/* One byte each way keeps the two sides in step. */
static void tell(int to)
{
	CHECK(write(to, "!", 1) == 1);
}

static void await_byte(int from)
{
	char byte;

	CHECK(read(from, &byte, 1) == 1);
}

static void send_fd(int to, int fd, const struct offer *offer)
{
	union { struct cmsghdr head; char room[CMSG_SPACE(sizeof(int))]; } control = { 0 };
	struct iovec part = { (void *)offer, sizeof(*offer) };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
		.msg_controllen = sizeof(control) };

	control.head = (struct cmsghdr){ CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS };
	memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
	CHECK(sendmsg(to, &message, 0) == sizeof(*offer));
}

static int get_fd(int from, struct offer *offer)
{
	union { struct cmsghdr head; char room[CMSG_SPACE(sizeof(int))]; } control;
	struct iovec part = { offer, sizeof(*offer) };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
		.msg_controllen = sizeof(control) };
	int fd = -1;

	CHECK(recvmsg(from, &message, MSG_CMSG_CLOEXEC) == sizeof(*offer));
	memcpy(&fd, CMSG_DATA(&control.head), sizeof(fd));
	return fd;
}

/* The exporter's things, and an importer's. */
struct exporter {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	char *memory;
	struct offer offer;
};

struct importer {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_mr *mr, *own;
	struct ibv_cq *cq;
	struct ibv_qp *a, *b;
	char *memory;
	struct offer offer;
};

static struct ibv_context *open_card(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx = list && list[0] ? ibv_open_device(list[0]) : NULL;

	ibv_free_device_list(list);
	if (!ctx) {
		perror("opening the card");
		exit(1);
	}
	return ctx;
}

static void export_all(struct exporter *e)
{
	e->memory = mmap(NULL, BIG, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	e->ctx = open_card();
	e->pd = ibv_alloc_pd(e->ctx);
	e->mr = ibv_reg_mr(e->pd, e->memory, BIG, REMOTE);
	CHECK(e->pd && e->mr);
	e->offer = (struct offer){ .pd = e->pd->handle, .mr = e->mr->handle, .rkey = e->mr->rkey,
				   .addr = (uintptr_t)e->memory };
}

static void end_export(struct exporter *e)
{
	CHECK(!ibv_dereg_mr(e->mr) && !ibv_dealloc_pd(e->pd) && !ibv_close_device(e->ctx));
	munmap(e->memory, BIG);
}

/* Two connected queue pairs in the imported domain, and memory of the importer's own. */
static void import_all(struct importer *i, int fd)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 1, 1, 0 } };

	i->memory = mmap(NULL, BIG, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	i->ctx = ibv_import_device(fd);
	CHECK(i->ctx && i->ctx->cmd_fd == fd);
	i->pd = ibv_import_pd(i->ctx, i->offer.pd);
	i->mr = i->pd ? ibv_import_mr(i->pd, i->offer.mr) : NULL;
	CHECK(i->pd && i->pd->handle == i->offer.pd && i->pd->context == i->ctx);
	CHECK(i->mr && i->mr->lkey == i->offer.mr && i->mr->rkey == i->offer.rkey && !i->mr->addr &&
	      i->mr->length == BIG);
	if (!i->mr)
		_exit(1);
	i->own = ibv_reg_mr(i->pd, i->memory, BIG, REMOTE);
	i->cq = ibv_create_cq(i->ctx, 64, NULL, NULL, 0);
	init.send_cq = init.recv_cq = i->cq;
	i->a = ibv_create_qp(i->pd, &init);
	i->b = ibv_create_qp(i->pd, &init);
	CHECK(i->own && i->a && i->b && !connect_rc(i->a, i->b->qp_num) && !connect_rc(i->b, i->a->qp_num));
}

static void end_import(struct importer *i)
{
	CHECK(!ibv_destroy_qp(i->a) && !ibv_destroy_qp(i->b) && !ibv_destroy_cq(i->cq) && !ibv_dereg_mr(i->own));
	ibv_unimport_mr(i->mr);
	ibv_unimport_pd(i->pd);
	CHECK(!ibv_close_device(i->ctx));
	munmap(i->memory, BIG);
}

static enum ibv_wc_status finish(struct ibv_cq *cq)
{
	struct ibv_wc wc;

	while (!ibv_poll_cq(cq, 1, &wc))
		;
	return wc.status;
}

/* One operation from qp a; gives how it completed. */
static enum ibv_wc_status operate(struct importer *i, enum ibv_wr_opcode opcode, struct ibv_sge sge,
	uint64_t to, uint32_t rkey)
{
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED },
		*bad;

	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = to;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = 1;
	} else {
		wr.wr.rdma.remote_addr = to;
		wr.wr.rdma.rkey = rkey;
	}
	CHECK(!ibv_post_send(i->a, &wr, &bad));
	return finish(i->cq);
}

static struct ibv_sge piece(uint64_t addr, uint32_t length, uint32_t lkey)
{
	return (struct ibv_sge){ addr, length, lkey };
}

/* Runs the two sides of a test, the importer in a child. */
static void test(const char *name, void (*exporter)(int, pid_t), void (*importer)(int))
{
	int pair[2], status, before = failures;
	pid_t child;

	CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
	child = fork();
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		alarm(60);
		close(pair[0]);
		importer(pair[1]);
		_exit(failures != before);
	}
	close(pair[1]);
	exporter(pair[0], child);
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
	close(pair[0]);
	if (failures != before)
		fprintf(stderr, "import: %s\n", name);
}

/* Everything that works, and what is refused. */
static void offers(int peer, pid_t child)
{
	struct exporter e;
	struct ibv_alloc_dm_attr attr = { .length = 128 };
	struct ibv_mr *demand, *null;
	struct ibv_pd *other;
	struct ibv_dm *dm;

	(void)child;
	export_all(&e);
	other = ibv_alloc_pd(e.ctx);
	dm = ibv_alloc_dm(e.ctx, &attr);
	null = ibv_alloc_null_mr(e.pd);
	demand = ibv_reg_mr(e.pd, e.memory, PAGE, REMOTE | IBV_ACCESS_ON_DEMAND);
	CHECK(other && dm && null && demand && !ibv_memcpy_to_dm(dm, 64, "in card", 8));
	e.offer.other_pd = other->handle;
	e.offer.dm = dm->handle;
	e.offer.null = null->handle;
	e.offer.demand = demand->handle;
	strcpy(e.memory, "exporter's");
	send_fd(peer, e.ctx->cmd_fd, &e.offer);
	await_byte(peer);
	CHECK(!strcmp(e.memory + BIG - 2 * PAGE, "exporter's") && !strcmp(e.memory + PAGE, "importer's"));
	CHECK(!strncmp(e.memory + 2 * PAGE - 8, "a longer text than eight bytes, over two pages", 46));
	CHECK(!ibv_dereg_mr(demand) && !ibv_dereg_mr(null) && !ibv_dealloc_pd(other) && !ibv_free_dm(dm));
	end_export(&e);
	tell(peer);
	await_byte(peer);
}

static void refusals(struct importer *i)
{
	struct ibv_pd *other = ibv_import_pd(i->ctx, i->offer.other_pd);
	int file = memfd_create("something else", MFD_ALLOW_SEALING), ends[2];

	CHECK(!pipe(ends) && !ftruncate(file, 8 << 20));
	CHECK(!ibv_import_device(-1) && errno == EBADF);
	CHECK(!ibv_import_device(ends[0]) && errno == EINVAL);
	CHECK(!ibv_import_device(file) && errno == EINVAL);
	CHECK(!fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
	CHECK(!ibv_import_device(file) && errno == EINVAL);
	CHECK(!ibv_import_pd(i->ctx, 99999) && errno == EINVAL);
	CHECK(!ibv_import_mr(i->pd, i->offer.mr ^ 1) && errno == EINVAL);
	CHECK(!ibv_import_mr(i->pd, i->offer.pd) && errno == EINVAL);
	CHECK(other && !ibv_import_mr(other, i->offer.mr) && errno == EINVAL);
	CHECK(!ibv_import_mr(i->pd, i->offer.demand) && errno == EOPNOTSUPP);
	CHECK(!ibv_import_mr(i->pd, i->offer.null) && errno == EOPNOTSUPP);
	CHECK(!ibv_import_dm(i->ctx, 99999) && errno == EINVAL);
	CHECK(ibv_dereg_mr(i->mr) == EOPNOTSUPP && ibv_dealloc_pd(i->pd) == EOPNOTSUPP);
	CHECK(ibv_rereg_mr(i->mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
	ibv_unimport_pd(other);
	/* nobody changes what the exporter says */
	CHECK(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, i->ctx->cmd_fd, 0) == MAP_FAILED &&
	      errno == EPERM);
	CHECK(write(i->ctx->cmd_fd, "x", 1) < 0 && errno == EPERM);
	close(file);
	close(ends[0]);
	close(ends[1]);
}

static void card_memory(struct importer *i)
{
	struct ibv_dm *dm = ibv_import_dm(i->ctx, i->offer.dm);
	struct ibv_mr *mr;
	char text[8] = "";

	CHECK(dm && !ibv_memcpy_from_dm(text, dm, 64, 8) && !strcmp(text, "in card"));
	CHECK(!ibv_memcpy_to_dm(dm, 0, "changed", 8) && !ibv_memcpy_from_dm(text, dm, 0, 8) &&
	      !strcmp(text, "changed"));
	CHECK(ibv_memcpy_from_dm(text, dm, 124, 8) == EFAULT && ibv_memcpy_from_dm(text, dm, 2, 4) == EINVAL);
	CHECK(!ibv_reg_dm_mr(i->pd, dm, 0, 64, IBV_ACCESS_ZERO_BASED | REMOTE) && errno == EOPNOTSUPP);
	CHECK(!ibv_reg_dm_mr(i->pd, dm, 120, 64, IBV_ACCESS_ZERO_BASED) && errno == EINVAL);
	mr = ibv_reg_dm_mr(i->pd, dm, 64, 64, IBV_ACCESS_ZERO_BASED | IBV_ACCESS_REMOTE_READ);
	CHECK(mr && !operate(i, IBV_WR_RDMA_READ, piece((uintptr_t)i->memory, 8, i->own->lkey), 0, mr->rkey));
	CHECK(!strcmp(i->memory, "in card") && !ibv_dereg_mr(mr) && ibv_free_dm(dm) == EOPNOTSUPP);
	ibv_unimport_dm(dm);
}

static void uses(int peer)
{
	struct importer i;
	struct ibv_context *again;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	uint64_t there;
	uint32_t key;

	import_all(&i, get_fd(peer, &i.offer));
	there = i.offer.addr;
	key = i.mr->lkey;
	/* from the exporter to itself, to the importer, back, and over pages and packets */
	CHECK(!operate(&i, IBV_WR_RDMA_WRITE, piece(there, 16, key), there + BIG - 2 * PAGE, key));
	CHECK(!operate(&i, IBV_WR_RDMA_READ, piece((uintptr_t)i.memory, 16, i.own->lkey), there, key));
	CHECK(!strcmp(i.memory, "exporter's"));
	strcpy(i.memory, "importer's");
	CHECK(!operate(&i, IBV_WR_RDMA_WRITE, piece((uintptr_t)i.memory, 16, i.own->lkey), there + PAGE, key));
	strcpy(i.memory, "a longer text than eight bytes, over two pages");
	CHECK(!operate(&i, IBV_WR_RDMA_READ, piece(there + 2 * PAGE - 8, 46, key), (uintptr_t)i.memory,
	      i.own->rkey));
	memset(i.memory, 7, BIG);
	CHECK(!operate(&i, IBV_WR_RDMA_WRITE, piece((uintptr_t)i.memory, 16 * PAGE, i.own->lkey), there + 4 * PAGE,
	      key));
	CHECK(!operate(&i, IBV_WR_RDMA_READ, piece((uintptr_t)i.memory + 32 * PAGE, 17 * PAGE, i.own->lkey),
	      there + 4 * PAGE, key));
	CHECK(!memcmp(i.memory, i.memory + 32 * PAGE, 16 * PAGE) && i.memory[48 * PAGE] == 0);
	refusals(&i);
	card_memory(&i);
	/* the same things once more are the same things */
	again = ibv_import_device(dup(i.ctx->cmd_fd));
	pd = ibv_import_pd(again, i.offer.pd);
	mr = ibv_import_mr(pd, i.offer.mr);
	CHECK(mr && mr->lkey == key);
	ibv_unimport_mr(mr);
	ibv_unimport_pd(pd);
	CHECK(!ibv_close_device(again));
	CHECK(!operate(&i, IBV_WR_RDMA_READ, piece((uintptr_t)i.memory, 16, i.own->lkey), there, key));
	tell(peer);
	await_byte(peer);
	/* the exporter has ended all of it */
	CHECK(!ibv_import_pd(i.ctx, i.offer.pd) && errno == ENODEV);
	CHECK(!ibv_import_mr(i.pd, i.offer.mr) && errno == ENODEV);
	CHECK(!ibv_import_dm(i.ctx, i.offer.dm) && errno == ENODEV);
	CHECK(operate(&i, IBV_WR_RDMA_READ, piece((uintptr_t)i.memory, 16, i.own->lkey), there, key) ==
	      IBV_WC_REM_ACCESS_ERR);
	end_import(&i);
	tell(peer);
}

/* Atomics of one card are not atomic among another's. */
static void plain_offer(int peer, pid_t child)
{
	struct exporter e;

	(void)child;
	export_all(&e);
	send_fd(peer, e.ctx->cmd_fd, &e.offer);
	await_byte(peer);
	CHECK(*(uint64_t *)e.memory == 0);
	end_export(&e);
}

static void adds(int peer)
{
	struct importer i;

	import_all(&i, get_fd(peer, &i.offer));
	CHECK(operate(&i, IBV_WR_ATOMIC_FETCH_AND_ADD, piece((uintptr_t)i.memory, 8, i.own->lkey), i.offer.addr,
	      i.mr->rkey) == IBV_WC_REM_ACCESS_ERR);
	tell(peer);
	end_import(&i);
}

/* Writes ones into the exporter's memory until that fails, and says whether it failed as it should. The
 * answer of a queue pair that failed goes out once: it may be lost with a process that shared the port. */
static int stream(struct importer *i)
{
	struct ibv_sge sge = piece((uintptr_t)i->memory, 8 * PAGE, i->own->lkey);
	enum ibv_wc_status status;

	memset(i->memory, 1, BIG);
	do
		status = operate(i, IBV_WR_RDMA_WRITE, sge, i->offer.addr, i->mr->rkey);
	while (!status);
	return status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_RETRY_EXC_ERR;
}

static void streams(int peer)
{
	for (int round = 0; round < ROUNDS; round++) {
		struct importer i;

		import_all(&i, get_fd(peer, &i.offer));
		tell(peer);
		CHECK(stream(&i));
		end_import(&i);
	}
}

/* Deregistered, or the device closed, while the importer writes: when the call
 * returns, nobody writes any more. */
static void deregisters(int peer, pid_t child)
{
	static const char zeroes[BIG];

	(void)child;
	for (int round = 0; round < ROUNDS; round++) {
		struct exporter e;

		export_all(&e);
		send_fd(peer, e.ctx->cmd_fd, &e.offer);
		await_byte(peer);
		/* the moment of the call is what differs from round to round */
		nap(round * 50);
		CHECK(round & 1 ? !ibv_close_device(e.ctx) : !ibv_dereg_mr(e.mr));
		memset(e.memory, 0, BIG);
		/* nothing is to come: only time can show it */
		nap(2000);
		CHECK(!memcmp(e.memory, zeroes, BIG));
		/* what is left of a closed device is nothing but handles */
		CHECK(round & 1 ? !ibv_dereg_mr(e.mr) : 1);
		CHECK(!ibv_dealloc_pd(e.pd) && (round & 1 || !ibv_close_device(e.ctx)));
		munmap(e.memory, BIG);
	}
}

/* Waits until an importer that streams has written here. */
static void await_write(const volatile char *memory)
{
	for (int tries = 0; !*memory && tries < 600000; tries++)
		nap(100);
	CHECK(*memory);
}

/* Killed while it writes: the exporter's dereg does not wait for the dead. */
static void kills(int peer, pid_t child)
{
	struct exporter e;

	export_all(&e);
	send_fd(peer, e.ctx->cmd_fd, &e.offer);
	await_byte(peer);
	await_write(e.memory);
	kill(child, SIGKILL);
	end_export(&e);
}

static void streams_once(int peer)
{
	struct importer i;

	import_all(&i, get_fd(peer, &i.offer));
	tell(peer);
	stream(&i);
}

/* Killed while its memory is used: the user's requests fail. The exporter is a child
 * of the importer's parent here. */
static void dies(int peer, pid_t child)
{
	pid_t exporter = fork();

	(void)child;
	if (!exporter) {
		struct exporter e;

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		export_all(&e);
		send_fd(peer, e.ctx->cmd_fd, &e.offer);
		await_write(e.memory);
		raise(SIGKILL);
		_exit(1);
	}
	await_byte(peer);
	CHECK(waitpid(exporter, NULL, 0) == exporter);
	tell(peer);
}

static void survives(int peer)
{
	struct importer i;
	int fd = get_fd(peer, &i.offer), spare = dup(fd);

	import_all(&i, fd);
	tell(peer);
	CHECK(stream(&i));
	await_byte(peer);
	CHECK(!ibv_import_mr(i.pd, i.offer.mr) || i.mr);
	end_import(&i);
	CHECK(!ibv_import_device(spare) && errno == ENODEV);
}

/* Another user has the descriptor, but not the right to the memory. */
static void other_user(int peer)
{
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct offer offer;
	int fd = get_fd(peer, &offer);

	CHECK(!setgid(NOBODY) && !setuid(NOBODY));
	ctx = ibv_import_device(fd);
	pd = ctx ? ibv_import_pd(ctx, offer.pd) : NULL;
	CHECK(pd && !ibv_import_mr(pd, offer.mr) && errno == EPERM);
	ibv_unimport_pd(pd);
	CHECK(!ibv_close_device(ctx));
	tell(peer);
}

/* A process that runs as somebody else than who made the table is not taken for the exporter. Here
 * it is the exporter all the same: its process belongs to root as long as it may not be looked at.
 * The exporters are grandchildren. */
static void nobody_exports(int peer, pid_t child)
{
	int status;

	(void)child;
	for (int seen = 0; seen < 2; seen++) {
		pid_t exporter = fork();

		if (!exporter) {
			struct exporter e;

			CHECK(!setgid(NOBODY) && !setuid(NOBODY) && !prctl(PR_SET_DUMPABLE, seen));
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			alarm(60);
			export_all(&e);
			send_fd(peer, e.ctx->cmd_fd, &e.offer);
			await_byte(peer);
			end_export(&e);
			_exit(failures);
		}
		CHECK(waitpid(exporter, &status, 0) == exporter && status == 0);
	}
}

static void root_imports(int peer)
{
	for (int seen = 0; seen < 2; seen++) {
		struct offer offer;
		struct ibv_context *ctx = ibv_import_device(get_fd(peer, &offer));
		struct ibv_pd *pd = ctx ? ibv_import_pd(ctx, offer.pd) : NULL;
		struct ibv_mr *mr = NULL;

		CHECK(pd);
		CHECK(seen == !!(mr = ibv_import_mr(pd, offer.mr)) && (mr || errno == EPERM));
		if (mr)
			ibv_unimport_mr(mr);
		ibv_unimport_pd(pd);
		CHECK(!ibv_close_device(ctx));
		tell(peer);
	}
}

/* A child has its parent's descriptors without being sent any. */
static void children(void)
{
	struct exporter e;
	struct ibv_context *again;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	int status, before = failures;

	export_all(&e);
	strcpy(e.memory, "parent's");
	if (!fork()) {
		struct importer i = { .offer = e.offer };

		alarm(60);
		import_all(&i, dup(e.ctx->cmd_fd));
		strcpy(e.memory, "child's");
		CHECK(!operate(&i, IBV_WR_RDMA_READ, piece((uintptr_t)i.memory, 16, i.own->lkey), i.offer.addr,
		      i.mr->rkey));
		CHECK(!strcmp(i.memory, "parent's"));
		CHECK(!operate(&i, IBV_WR_RDMA_READ, piece(i.offer.addr + PAGE, 9, i.mr->lkey), (uintptr_t)i.memory,
		      i.own->rkey));
		/* the parent's context is closed here; what was imported from it
		 * stays, and is the same once more */
		CHECK(!ibv_close_device(e.ctx));
		again = ibv_import_device(dup(i.ctx->cmd_fd));
		pd = again ? ibv_import_pd(again, i.offer.pd) : NULL;
		mr = pd ? ibv_import_mr(pd, i.offer.mr) : NULL;
		CHECK(mr);
		if (mr) {
			ibv_unimport_mr(mr);
			ibv_unimport_pd(pd);
			CHECK(!ibv_close_device(again));
		}
		end_import(&i);
		_exit(failures != before);
	}
	CHECK(wait(&status) > 0 && status == 0 && !strcmp(e.memory + PAGE, "parent's") &&
	      !strcmp(e.memory, "parent's"));
	end_export(&e);
}

int main(void)
{
	alarm(120);
	test("offers and refusals", offers, uses);
	test("atomics", plain_offer, adds);
	test("deregistered under way", deregisters, streams);
	for (int round = 0; round < 5; round++)
		test("importer killed", kills, streams_once);
	test("exporter killed", dies, survives);
	if (geteuid() == 0) {
		test("another user", plain_offer, other_user);
		test("a table of another user", nobody_exports, root_imports);
	}
	children();
	if (!failures)
		puts("import: all as promised");
	return failures != 0;
}
