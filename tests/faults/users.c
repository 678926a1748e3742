/* Two processes of one host that are not each other's equals: of two users, one not dumpable, one with fewer
 * capabilities, of users or groups without a number, one in a user namespace of its own, one that was
 * started with rights of its file's (AT_SECURE), or one that gives and takes nothing
 * (STARVERBS_LINK_TRUST=none). They SEND, WRITE, READ and add to each other's memory, both ways. Of each:
 *
 * - the data is right, and the other's card has executed all of it (local_executed); none went by a
 *   descriptor or a mapping of the other's memory,
 * - what is handed over is what docs/security.md says: the test looks at each descriptor that the library
 *   receives, and at those that it keeps. The table of regions and the gates cannot be mapped to write, or
 *   made writable, by whoever has them.
 *
 * Equals do the same by the descriptor, so that the test would notice. */
#include "faults.h"
#include "counters.h"
#include <grp.h>
#include <linux/capability.h>
#include <limits.h>
#include <sched.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/statvfs.h>
#include <sys/stat.h>

enum { ROUNDS = 20, WRITTEN = 8192, BACK = 16384, WORD = 16384, MESSAGES = 32768,
	MESSAGE = 64 };
/* Files that others read alone: the table of regions, and the gates. */
enum { TABLES = 2 };
/* One acts, the other looks; the other acts, the one looks. */
enum { TURNS = 4 };
enum { A_USER = 54321, NO_NUMBER = 65534 };

/* Who a process is. */
struct who {
	unsigned uid, gid;
	/* not dumpable; without one capability of root's; gives and takes nothing */
	int hides, lacks, refuses;
	/* root of a namespace of its own; started from a file that gives it a group */
	int apart, secure;
};

#define ROOT { .uid = 0 }
#define USER(user, group) { .uid = (user), .gid = (group) }

static const struct trial {
	const char *what;
	struct who who[2];
	/* whether each is handed the other's memory, and whether it keeps that */
	int is_given[2], keeps;
} trials[] = {
	{ "equals", { ROOT, ROOT }, { 1, 1 }, 1 },
	{ "equals that are not root", { USER(A_USER, A_USER), USER(A_USER, A_USER) }, { 1, 1 }, 1 },
	{ "root and a user", { ROOT, USER(A_USER, A_USER) }, { 0, 0 }, 0 },
	{ "two users", { USER(A_USER, A_USER), USER(A_USER + 1, A_USER) }, { 0, 0 }, 0 },
	{ "two groups", { USER(A_USER, A_USER), USER(A_USER, A_USER + 1) }, { 0, 0 }, 0 },
	{ "one not dumpable", { USER(A_USER, A_USER), { .uid = A_USER, .gid = A_USER, .hides = 1 } }, { 0, 0 }, 0 },
	/* to whom root's other process gives, as it cannot see that; it takes nothing */
	{ "one not dumpable, root", { ROOT, { .hides = 1 } }, { 0, 1 }, 0 },
	{ "one with fewer capabilities", { ROOT, { .lacks = 1 } }, { 0, 0 }, 0 },
	{ "users without a number", { USER(NO_NUMBER, A_USER), USER(NO_NUMBER, A_USER) }, { 0, 0 }, 0 },
	{ "groups without a number", { USER(A_USER, NO_NUMBER), USER(A_USER, NO_NUMBER) }, { 0, 0 }, 0 },
	/* to whom the other gives, as it does not know */
	{ "one that refuses", { ROOT, { .refuses = 1 } }, { 0, 1 }, 0 },
	{ "two that refuse", { { .refuses = 1 }, { .refuses = 1 } }, { 0, 0 }, 0 },
	{ "one in a user namespace of its own", { ROOT, { .apart = 1 } }, { 0, 0 }, 0 },
	/* to whom the other gives, as it cannot see that; it takes nothing */
	{ "one with rights of its file's", { ROOT, { .secure = 1 } }, { 0, 1 }, 0 },
};

static const struct trial *trial;
/* This program, as a file that gives who starts it a group. */
static char copy[PATH_MAX];
static struct side s;
/* Descriptors of another process's /proc/PID/mem that came over a socket. */
static volatile int received;
/* Descriptors of memory files that came, but cannot be mapped to write. */
static volatile int received_readonly;

/* Whether a descriptor is of another process's memory. */
static int is_memory(int fd)
{
	char path[64], link[128] = "", own[64];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	snprintf(own, sizeof(own), "/proc/%d/mem", getpid());
	if (readlink(path, link, sizeof(link) - 1) < 0)
		return 0;
	return strncmp(link, "/proc/", 6) == 0 && strcmp(link + strlen(link) - 4, "/mem") == 0 &&
		strcmp(link, own) != 0;
}

/* Whether a descriptor is of a memory file that nobody can map to write, also not one who opens it anew. */
static int is_readonly(int fd)
{
	char path[64];
	int again, is_so = 0;

	/* none but memory files have seals */
	if (fcntl(fd, F_GET_SEALS) < 0)
		return 0;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	again = open(path, O_RDWR | O_CLOEXEC);
	for (int i = 0; i < 2; i++) {
		void *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, i ? fd : again, 0);

		is_so += at == MAP_FAILED;
		if (at != MAP_FAILED)
			munmap(at, 4096);
	}
	close(again);
	return is_so == 2;
}

/* How many mappings of others' files there are that are read only. They stay so. */
static int count_readonly(void)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	char line[512];
	int found = 0;

	NEED(maps);
	while (fgets(line, sizeof(line), maps)) {
		unsigned long begin, end;
		char rights[8];

		if (!strstr(line, "/memfd:starverbs ") || sscanf(line, "%lx-%lx %7s", &begin, &end, rights) != 3 ||
		    strcmp(rights, "r--s") != 0)
			continue;
		NEED(mprotect((void *)begin, end - begin, PROT_READ | PROT_WRITE) != 0 && errno == EACCES);
		found++;
	}
	fclose(maps);
	return found;
}

/* The library calls this one: it sees each descriptor before the library decides what to do with it. */
ssize_t recvmsg(int fd, struct msghdr *msg, int flags)
{
	ssize_t n = syscall(SYS_recvmsg, fd, msg, flags);

	if (n < 0)
		return n;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t at = 0; at + sizeof(int) <= c->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
			int one;

			memcpy(&one, CMSG_DATA(c) + at, sizeof(one));
			received += is_memory(one);
			received_readonly += is_readonly(one);
		}
	}
	return n;
}

/* How many of those this process has now. */
static int count_kept(void)
{
	int kept = 0;

	for (int fd = 0; fd < 1024; fd++)
		kept += is_memory(fd);
	return kept;
}

static void write_to(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	NEED(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	close(fd);
}

/* Goes on in the copy, as who got a group from it. */
static void start_copy(int fd, int index)
{
	char of[16], at[16], socket[16];

	snprintf(of, sizeof(of), "%d", (int)(trial - trials));
	snprintf(at, sizeof(at), "%d", index);
	snprintf(socket, sizeof(socket), "%d", fd);
	NEED(fcntl(fd, F_SETFD, 0) == 0);
	execl(copy, copy, of, at, socket, (char *)NULL);
	NEED(!"it starts");
}

static void become(const struct who *who)
{
	struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct caps[2];

	if (who->lacks) {
		NEED(syscall(SYS_capget, &head, caps) == 0);
		caps[0].permitted &= ~(1u << CAP_SYS_TIME);
		caps[0].effective &= caps[0].permitted;
		NEED(syscall(SYS_capset, &head, caps) == 0);
	}
	if (who->uid != 0 || who->gid != 0) {
		NEED(setgroups(0, NULL) == 0);
		NEED(setresgid(who->gid, who->gid, who->gid) == 0);
		NEED(setresuid(who->uid, who->uid, who->uid) == 0);
	}
	if (who->apart) {
		NEED(unshare(CLONE_NEWUSER) == 0);
		write_to("/proc/self/setgroups", "deny");
		write_to("/proc/self/uid_map", "0 0 1");
		write_to("/proc/self/gid_map", "0 0 1");
	}
	/* the group goes, and what the kernel said at the start stays */
	if (who->secure)
		NEED(getauxval(AT_SECURE) == 1 && setresgid(who->gid, who->gid, who->gid) == 0);
	/* the change of the user clears both */
	NEED(prctl(PR_SET_DUMPABLE, !who->hides) == 0);
	NEED(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
	if (who->refuses)
		NEED(setenv("STARVERBS_LINK_TRUST", "none", 1) == 0);
}

/* One request; what comes back lies at BACK. */
static int run(const struct peer *p, enum ibv_wr_opcode op, uint32_t at, uint32_t len)
{
	int comes_back = op == IBV_WR_RDMA_READ || op == IBV_WR_ATOMIC_FETCH_AND_ADD;
	struct ibv_sge sge = { (uintptr_t)s.buffer + (comes_back ? BACK : 0), len, s.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED },
		*bad;
	struct ibv_wc wc;

	if (op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = p->addr + BYTES + at;
		wr.wr.atomic.rkey = p->rkey;
		wr.wr.atomic.compare_add = 1;
	} else {
		wr.wr.rdma.remote_addr = p->addr + BYTES + at;
		wr.wr.rdma.rkey = p->rkey;
	}
	NEED(ibv_post_send(s.qp, &wr, &bad) == 0);
	return next_status(&s, &wc);
}

/* Each operation, so many times. */
static void act(const struct peer *p)
{
	for (uint64_t n = 0, before; n < ROUNDS; n++) {
		memset(s.buffer, (int)n + 1, WRITTEN);
		memset(s.buffer + BACK, 0, WRITTEN);
		NEED(run(p, IBV_WR_RDMA_WRITE, 0, WRITTEN) == IBV_WC_SUCCESS);
		NEED(run(p, IBV_WR_RDMA_READ, 0, WRITTEN) == IBV_WC_SUCCESS);
		NEED(memcmp(s.buffer, s.buffer + BACK, WRITTEN) == 0);
		NEED(run(p, IBV_WR_ATOMIC_FETCH_AND_ADD, WORD, 8) == IBV_WC_SUCCESS);
		memcpy(&before, s.buffer + BACK, 8);
		NEED(before == n);
		NEED(run(p, IBV_WR_SEND, 0, MESSAGE) == IBV_WC_SUCCESS);
	}
}

static void post_receives(void)
{
	for (uint32_t n = 0; n < ROUNDS; n++) {
		struct ibv_sge sge = { (uintptr_t)s.buffer + BYTES + MESSAGES + n * MESSAGE, MESSAGE, s.mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = n, .sg_list = &sge, .num_sge = 1 }, *bad;

		NEED(ibv_post_recv(s.qp, &wr, &bad) == 0);
	}
}

/* What the other one did is all there. */
static void look_at_memory(void)
{
	const char *memory = s.buffer + BYTES;
	uint64_t sum;

	for (uint64_t n = 0; n < ROUNDS; n++) {
		struct ibv_wc wc;

		NEED(next_status(&s, &wc) == IBV_WC_SUCCESS && wc.wr_id == n && wc.byte_len == MESSAGE);
		for (uint32_t at = 0; at < MESSAGE; at++)
			NEED(memory[MESSAGES + n * MESSAGE + at] == (char)(n + 1));
	}
	for (uint32_t at = 0; at < WRITTEN; at++)
		NEED(memory[at] == ROUNDS);
	memcpy(&sum, memory + WORD, 8);
	NEED(sum == ROUNDS);
}

static void talk(int fd, int index)
{
	struct peer p;

	if (trial->who[index].secure && !getauxval(AT_SECURE))
		start_copy(fd, index);
	become(&trial->who[index]);
	open_side(&s);
	p = swap(fd, &s);
	NEED(connect_to(s.qp, &p, 14, 7) == 0);
	post_receives();
	say(fd, 'c');
	NEED(await_byte(fd) == 'g');
	/* no request is posted before both agree: it would wait for so long only */
	while (count(s.ctx, "local_qps") != 1)
		nap(1);
	say(fd, 'l');
	for (int turn = 0; turn < TURNS; turn++) {
		NEED(await_byte(fd) == 't');
		if (turn == 2 * index)
			act(&p);
		if (turn == 2 * !index + 1)
			look_at_memory();
		say(fd, 'f');
	}
	CHECK((received > 0) == trial->is_given[index]);
	CHECK(received_readonly == (trial->is_given[index] ? TABLES : 0));
	CHECK((count_kept() > 0) == trial->keeps);
	CHECK((count_readonly() >= TABLES) == trial->keeps);
	CHECK(count(s.ctx, "local_mapped") == 0 && count(s.ctx, "local_traced") == 0);
	if (trial->keeps) {
		CHECK(count(s.ctx, "local_direct") >= ROUNDS);
	} else {
		CHECK(count(s.ctx, "local_direct") == 0);
		CHECK(count(s.ctx, "local_executed") == 4 * ROUNDS);
		CHECK(count(s.ctx, "local_requests") == 4 * ROUNDS);
	}
	NEED(await_byte(fd) == 'e');
}

static void first(int fd) { talk(fd, 0); }
static void second(int fd) { talk(fd, 1); }

static void hear_both(const int *fds, char what)
{
	for (int i = 0; i < 2; i++)
		NEED(await_byte(fds[i]) == what);
}

static void say_both(const int *fds, char what)
{
	for (int i = 0; i < 2; i++)
		say(fds[i], what);
}

static void try(void)
{
	int fds[2];
	pid_t pids[2] = { start(first, &fds[0]), start(second, &fds[1]) };

	introduce(fds);
	hear_both(fds, 'l');
	for (int turn = 0; turn < TURNS; turn++) {
		say_both(fds, 't');
		hear_both(fds, 'f');
	}
	say_both(fds, 'e');
	for (int i = 0; i < 2; i++) {
		CHECK(ended_well(pids[i]));
		close(fds[i]);
	}
	printf("%s: %s\n", trial->what, trial->keeps ? "by the descriptor" : "by the ring alone");
}

/* Whether a process may become what `as` says: root of a user namespace may have no numbers for others. */
static int may(int (*as)(void))
{
	pid_t pid = fork();
	int status;

	NEED(pid >= 0);
	if (pid == 0)
		_exit(as() != 0);
	NEED(waitpid(pid, &status, 0) == pid);
	return status == 0;
}

static int as_another(void) { return setresgid(A_USER, A_USER, A_USER) || setresuid(A_USER, A_USER, A_USER); }
static int as_one_apart(void) { return unshare(CLONE_NEWUSER); }

/* Makes the copy. False: its folder's files give nobody a group. */
static int make_copy(void)
{
	ssize_t len = readlink("/proc/self/exe", copy, sizeof(copy) - 8);
	struct statvfs folder;
	struct stat self;
	int from = open("/proc/self/exe", O_RDONLY | O_CLOEXEC), to;

	NEED(len > 0 && from >= 0 && fstat(from, &self) == 0);
	strcpy(copy + len, ".group");
	NEED((to = open(copy, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700)) >= 0);
	NEED(sendfile(to, from, NULL, self.st_size) == self.st_size && fstatvfs(to, &folder) == 0);
	NEED(fchown(to, 0, A_USER) == 0 && fchmod(to, 02755) == 0);
	close(from);
	close(to);
	return !(folder.f_flag & ST_NOSUID);
}

int main(int argc, char **argv)
{
	int are_apart, get_groups;

	setvbuf(stdout, NULL, _IOLBF, 0);
	alarm(300);
	if (argc == 4) {
		trial = &trials[atoi(argv[1])];
		talk(atoi(argv[3]), atoi(argv[2]));
		return failures != 0;
	}
	if (!may(as_another)) {
		puts("skipped, needs a root that may become other users");
		return 0;
	}
	are_apart = may(as_one_apart);
	get_groups = make_copy();
	for (size_t at = 0; at < sizeof(trials) / sizeof(*trials); at++) {
		trial = &trials[at];
		if ((trial->who[1].apart && !are_apart) || (trial->who[1].secure && !get_groups))
			printf("%s: skipped, the system does not let us\n", trial->what);
		else
			try();
	}
	unlink(copy);
	return failures != 0;
}
