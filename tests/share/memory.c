/* What programs rely on of malloc(3), mmap(2) and fork(2), with libstarverbs-share.so preloaded. Each
 * test runs in a process of its own. "plain" as argument: without the library, where nothing is shared. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <fcntl.h>
#include <ucontext.h>
#include <unistd.h>

#define MIB (1ul << 20)
#define CHECK(what) ((what) ? (void)0 : fail(__LINE__, #what))

typedef int lookup(const void *, size_t, int *, uint64_t *);
static lookup *shared_at;
static int plain;

static void fail(int line, const char *what)
{
	fprintf(stderr, "memory.c:%d: %s (errno %d: %s)\n", line, what, errno, strerror(errno));
	_exit(1);
}

/* The descriptor of a range's memory file; -1: there is none. */
static int file_of(const void *at, size_t len)
{
	int fd = -1;
	uint64_t offset;

	return !shared_at || shared_at(at, len, &fd, &offset) ? -1 : fd;
}

static int is_shared(const void *at, size_t len)
{
	return plain || file_of(at, len) >= 0;
}

static void fill(void *at, size_t len, unsigned seed)
{
	for (size_t i = 0; i < len / 4; i++)
		((uint32_t *)at)[i] = seed + i;
}

static int holds(const void *at, size_t len, unsigned seed)
{
	for (size_t i = 0; i < len / 4; i++)
		if (((const uint32_t *)at)[i] != seed + i)
			return 0;
	return 1;
}

static int is_zero(const void *at, size_t len)
{
	for (size_t i = 0; i < len; i++)
		if (((const char *)at)[i])
			return 0;
	return 1;
}

static void *map(size_t len)
{
	void *at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(at != MAP_FAILED);
	return at;
}

/* A child that ends well if its check holds. */
static void in_child(int (*check)(void *), void *of)
{
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0)
		_exit(check(of) ? 0 : 1);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void blocks(void)
{
	char *small = malloc(1000), *large = malloc(MIB), *page = memalign(4096, 10), *other;
	void *aligned = NULL;
	size_t aligns[] = { 4096, 1 << 16, 1 << 21, 1 << 28 };

	CHECK(file_of(small, 1000) < 0 && is_shared(large, MIB) && is_shared(page, 10));
	CHECK(malloc_usable_size(large) >= MIB && malloc_usable_size(small) >= 1000);
	for (int i = 0; i < 4; i++) {
		CHECK(posix_memalign(&aligned, aligns[i], 5000) == 0 && (uintptr_t)aligned % aligns[i] == 0);
		free(aligned);
		aligned = aligned_alloc(aligns[i], MIB);
		CHECK(aligned && (uintptr_t)aligned % aligns[i] == 0 && is_shared(aligned, MIB));
		free(aligned);
	}
	CHECK(posix_memalign(&aligned, 3, 10) == EINVAL && posix_memalign(&aligned, 4, 10) == EINVAL);
	aligned = pvalloc(1);
	CHECK((uintptr_t)aligned % 4096 == 0 && malloc_usable_size(aligned) >= 4096);
	free(aligned);
	fill(large, MIB, 1);
	errno = 77;
	free(large);
	free(page);
	free(NULL);
	CHECK(errno == 77);
	/* The same pages, perhaps; and zero. */
	large = calloc(MIB, 1);
	CHECK(is_zero(large, MIB));
	fill(large, MIB, 2);
	for (size_t len = MIB; len < 40 * MIB; len += 3 * MIB + 5000) {
		large = realloc(large, len);
		CHECK(large && holds(large, MIB, 2) && is_shared(large, len));
		other = malloc(200000);
		CHECK(other);
		memset(other, 1, 200000);
	}
	large = realloc(large, 300000);
	CHECK(holds(large, 300000, 2));
	large = realloc(large, 100);
	CHECK(holds(large, 100, 2));
	free(large);
	small = realloc(small, MIB);
	CHECK(small && is_shared(small, MIB));
	fill(small, MIB, 3);
	small = realloc(small, 2 * MIB);
	CHECK(holds(small, MIB, 3));
	errno = 0;
	volatile size_t too_much = SIZE_MAX / 4;
	CHECK(!malloc(too_much) && errno == ENOMEM && !realloc(small, too_much) && !calloc(too_much, 8));
	CHECK(!reallocarray(small, too_much, 16) && holds(small, MIB, 3));
	free(small);
}

static void mappings(void)
{
	size_t page = sysconf(_SC_PAGESIZE), len = 64 * page;
	char *at = map(len), *to, *next;
	int file;

	CHECK(is_shared(at, len) && is_zero(at, len));
	fill(at, len, 5);
	CHECK(madvise(at + page, page, MADV_DONTNEED) == 0);
	CHECK(holds(at, page, 5) && is_zero(at + page, page) && holds(at + 2 * page, page, 5 + 2 * page / 4));
	CHECK(madvise(at + 3 * page, page, MADV_FREE) == 0);
	CHECK(madvise(at + 1, page, MADV_DONTNEED) == -1 && errno == EINVAL);
	CHECK(madvise(at, len, MADV_HUGEPAGE) == 0 || errno == EINVAL);
	/* Parts go; what is left stays. */
	CHECK(munmap(at + 8 * page, 8 * page) == 0 && munmap(at + 1, page) == -1 && errno == EINVAL);
	CHECK(holds(at + 16 * page, page, 5 + 16 * page / 4) && file_of(at, len) < 0);
	CHECK(is_shared(at + 16 * page, 48 * page) && munmap(at, len) == 0 && munmap(at, len) == 0);
	/* Reserved, then made usable; emptied by mapping over it. */
	at = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	CHECK(at != MAP_FAILED && mprotect(at, len / 2, PROT_READ | PROT_WRITE) == 0);
	fill(at, len / 2, 6);
	to = mmap(at + page, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	CHECK(to == at + page && is_zero(to, page) && holds(at, page, 6) && is_shared(at, len / 2));
	to = mmap(at, page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	CHECK(to == at && munmap(at, len) == 0);
	/* A file in its place, and the arena's again behind it. */
	at = map(len);
	fill(at, len, 7);
	file = open("/proc/self/exe", O_RDONLY);
	to = mmap(at + page, page, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0);
	CHECK(to == at + page && memcmp(to, "\177ELF", 4) == 0 && file_of(to, page) < 0);
	CHECK(madvise(at, len, MADV_DONTNEED) == 0 && memcmp(to, "\177ELF", 4) == 0 && is_zero(at, page));
	CHECK(munmap(at, len) == 0);
	next = map(len);
	CHECK(is_zero(next, len) && is_shared(next, len));
	fill(next, len, 8);
	/* Beyond the arena, at both ends of a mapping of the program's own. */
	at = mmap(NULL, 100, PROT_READ, MAP_PRIVATE, file, 0);
	CHECK(at != MAP_FAILED && munmap(at, 100) == 0 && holds(next, len, 8) && munmap(next, len) == 0);
	CHECK(mmap(NULL, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == EINVAL);
	close(file);
}

static void moves(void)
{
	size_t page = sysconf(_SC_PAGESIZE), len = 64 * page;
	char *at = map(len), *to, *fixed;

	fill(at, len, 9);
	CHECK(mremap(at, len, len / 2, 0) == at && holds(at, len / 2, 9));
	to = mremap(at, len / 2, len, 0);
	CHECK(to == at && is_zero(at + len / 2, len / 2));
	to = mremap(at, len, 1024 * page, MREMAP_MAYMOVE);
	CHECK(to != MAP_FAILED && holds(to, len / 2, 9) && is_zero(to + len, len) && is_shared(to, 1024 * page));
	fill(to, 1024 * page, 10);
	fixed = map(2048 * page);
	at = mremap(to, 1024 * page, 512 * page, MREMAP_MAYMOVE | MREMAP_FIXED, fixed + page);
	CHECK(at == fixed + page && holds(at, 512 * page, 10) && is_zero(fixed, page));
	CHECK(mremap(at, page, 0, 0) == MAP_FAILED && errno == EINVAL);
	CHECK(munmap(fixed, 2048 * page) == 0);
}

struct words {
	volatile int *at;
	size_t len;
	int seed;
};

static int child_sees(void *of)
{
	struct words *words = of;
	int *at = (int *)words->at;

	if (!holds(at, words->len, words->seed))
		return 0;
	fill(at, words->len, words->seed + 1000);
	/* A grandchild has what the child has. */
	pid_t child = fork();
	int status;

	if (child == 0)
		_exit(!holds(at, words->len, words->seed + 1000) || (fill(at, words->len, 1), !holds(at, words->len, 1)));
	if (child < 0 || waitpid(child, &status, 0) != child || status)
		return 0;
	/* What is the parent's and what is new may be given back in any order. */
	char *more = malloc(3 * MIB);
	memset(more, 1, 3 * MIB);
	at = realloc(at, words->len * 2);
	if (!holds(at, words->len, words->seed + 1000) || file_of(at, 4) >= 0)
		return 0;
	free(more);
	free(at);
	return 1;
}

static void forks(void)
{
	struct words words = { malloc(5 * MIB), 5 * MIB, 20 };
	char *odd = map(MIB), *none = map(MIB);
	char *sparse = mmap(NULL, 1ul << 33, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
			    -1, 0);
	int status;

	CHECK(sparse != MAP_FAILED);
	sparse[1ul << 32] = 1;
	fill((void *)words.at, words.len, 20);
	fill(odd, MIB, 30);
	CHECK(mprotect(odd, 4096, PROT_READ) == 0 && mprotect(odd + 8192, 4096, PROT_NONE) == 0);
	CHECK(madvise(none, 4096, MADV_DONTFORK) == 0);
	CHECK(madvise(none + 65536, 4096, MADV_WIPEONFORK) == 0);
	none[65536] = none[70000] = 1;
	for (int i = 0; i < 3; i++) {
		in_child(child_sees, &words);
		CHECK(holds((void *)words.at, words.len, 20));
	}
	/* The parent's later writes are its own. */
	int go[2], done[2];
	CHECK(pipe(go) == 0 && pipe(done) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		char byte;
		CHECK(read(go[0], &byte, 1) == 1 && holds((void *)words.at, words.len, 20));
		CHECK(sparse[1ul << 32] == 1 && sparse[1ul << 31] == 0);
		CHECK(holds(odd, 4096, 30) && holds(odd + 12288, 4096, 30 + 12288 / 4));
		CHECK(none[65536] == 0 && none[70000] == 1);
		CHECK(file_of((void *)words.at, 4) < 0);
		fill((void *)words.at, words.len, 1);
		CHECK(write(done[1], "x", 1) == 1);
		/* Ends by a fault, as nobody gave it what it may not have. */
		signal(SIGSEGV, SIG_DFL);
		if (fork() == 0) {
			odd[0] = 1;
			_exit(0);
		}
		CHECK(wait(&status) > 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
		none[0] = 1;
		_exit(0);
	}
	fill((void *)words.at, words.len, 40);
	CHECK(write(go[1], "x", 1) == 1);
	char byte;
	CHECK(read(done[0], &byte, 1) == 1 && holds((void *)words.at, words.len, 40));
	CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
	CHECK(none[65536] == 1 && is_shared((void *)words.at, words.len));
	/* vfork shares, and so it stays. */
	child = vfork();
	if (child == 0) {
		words.at[0] = 41;
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && words.at[0] == 41);
	CHECK(system("true") == 0);
}

static volatile int stop;

static void *churn(void *seed)
{
	unsigned random = (unsigned)(uintptr_t)seed;
	char *kept[16] = { 0 };
	size_t lens[16] = { 0 };

	while (!stop) {
		random = random * 1103515245 + 12345;
		int i = random >> 8 & 15;
		size_t len = (random >> 12 & 0x7ffff) + 1000;
		if (kept[i] && (kept[i][0] != (char)i || kept[i][lens[i] - 1] != (char)i))
			fail(__LINE__, "a block changed under its owner");
		switch (random >> 4 & 3) {
		case 0:
			free(kept[i]);
			kept[i] = malloc(len);
			break;
		case 1:
			free(kept[i]);
			kept[i] = calloc(len, 1);
			CHECK(is_zero(kept[i], len));
			break;
		case 2:
			kept[i] = realloc(kept[i], len);
			break;
		default: {
			char *at = map(len + 131072);
			CHECK(at[len] == 0);
			at[len] = 1;
			CHECK(madvise(at, len + 131072, MADV_DONTNEED) == 0 && at[len] == 0);
			munmap(at, len + 131072);
			continue;
		}
		}
		CHECK(kept[i]);
		kept[i][0] = kept[i][len - 1] = i;
		lens[i] = len;
	}
	for (int i = 0; i < 16; i++)
		free(kept[i]);
	return NULL;
}

static int can_allocate(void *of)
{
	(void)of;
	for (int i = 1; i < 20; i++) {
		char *at = malloc(i * 100000);
		memset(at, i, i * 100000);
		free(at);
	}
	return 1;
}

static void *forking(void *of)
{
	struct words *words = of;

	for (int i = 0; i < 12; i++) {
		in_child(child_sees, words);
		in_child(can_allocate, NULL);
	}
	stop = 1;
	return NULL;
}

static void threads(void)
{
	pthread_t thread[5];
	struct words words = { malloc(MIB), MIB, 50 };

	fill((void *)words.at, MIB, 50);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_create(&thread[i], NULL, churn, (void *)(uintptr_t)(i + 1)) == 0);
	CHECK(pthread_create(&thread[4], NULL, forking, &words) == 0);
	for (int i = 0; i < 5; i++)
		pthread_join(thread[i], NULL);
	CHECK(holds((void *)words.at, MIB, 50));
}

/* Many threads fork at once. */
static void *forking_too(void *of)
{
	for (int i = 0; i < 8; i++)
		in_child(child_sees, of);
	return NULL;
}

static void forks_of_threads(void)
{
	pthread_t thread[4];
	struct words words[4];

	for (int i = 0; i < 4; i++) {
		words[i] = (struct words){ malloc(MIB), MIB, i };
		fill((void *)words[i].at, MIB, i);
		CHECK(pthread_create(&thread[i], NULL, forking_too, &words[i]) == 0);
	}
	for (int i = 0; i < 4; i++)
		pthread_join(thread[i], NULL);
}

/* A child that gets no memory, or is killed as it copies, ends; its parent goes on. */
static void dying_children(void)
{
	size_t len = 300 * MIB;
	char *at = malloc(len);
	struct rlimit old, few = { 40 * MIB, RLIM_INFINITY };
	int status;
	pid_t child;

	if (plain)
		return;
	memset(at, 1, len);
	CHECK(getrlimit(RLIMIT_DATA, &old) == 0);
	few.rlim_max = old.rlim_max;
	CHECK(setrlimit(RLIMIT_DATA, &few) == 0);
	child = fork();
	if (child == 0)
		_exit(7);
	CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 1);
	/* The CPU time it takes is too much. */
	CHECK(setrlimit(RLIMIT_DATA, &old) == 0 && at[len - 1] == 1);
	CHECK(signal(SIGALRM, SIG_IGN) != SIG_ERR);
	/* The parent's own descriptors come and go as before. */
	int before = dup(0), after;
	close(before);
	for (int i = 0; i < 3; i++) {
		child = fork();
		if (child == 0)
			_exit(7);
		CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
	}
	after = dup(0);
	CHECK(before == after);
	/* Without a descriptor there is no copy, and no child. */
	struct rlimit files;
	CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
	few = (struct rlimit){ after, files.rlim_max };
	CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
	child = fork();
	if (child == 0)
		_exit(7);
	CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 1);
	CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
	free(at);
}

/* A killer of children: the parent waits in fork, so another process does it. */
static void killed_children(void)
{
	size_t len = 200 * MIB;
	char *at = malloc(len), line[64];
	int status, killed = 0;
	pid_t parent = getpid(), killer, child;

	if (plain)
		return;
	snprintf(line, sizeof line, "/proc/%d/task/%d/children", parent, parent);
	killer = fork();
	if (killer == 0) {
		for (;;) {
			FILE *list = fopen(line, "r");
			int pid;
			while (list && fscanf(list, "%d", &pid) == 1)
				if (pid != getpid())
					kill(pid, SIGKILL);
			if (list)
				fclose(list);
		}
	}
	memset(at, 1, len);
	for (int i = 0; i < 10; i++) {
		child = fork();
		if (child == 0)
			_exit(7);
		CHECK(child > 0 && waitpid(child, &status, 0) == child);
		killed += WIFSIGNALED(status);
	}
	kill(killer, SIGKILL);
	waitpid(killer, &status, 0);
	printf("%d of 10 children killed as they copied\n", killed);
	CHECK(at[len - 1] == 1 && is_shared(at, len));
}

/* Locks that others take before a fork, and ask for memory while they hold them. */
static pthread_mutex_t of_others = PTHREAD_MUTEX_INITIALIZER;

static void others_before(void)
{
	pthread_mutex_lock(&of_others);
	free(malloc(MIB));
}

static void others_after(void)
{
	free(malloc(MIB));
	pthread_mutex_unlock(&of_others);
}

static void *allocates_locked(void *of)
{
	while (!stop) {
		pthread_mutex_lock(&of_others);
		free(malloc(MIB));
		munmap(map(MIB), MIB);
		pthread_mutex_unlock(&of_others);
	}
	return of;
}

static void handlers(void)
{
	pthread_t thread[2];
	struct words words = { malloc(MIB), MIB, 60 };

	fill((void *)words.at, MIB, 60);
	pthread_atfork(others_before, others_after, others_after);
	for (int i = 0; i < 2; i++)
		pthread_create(&thread[i], NULL, allocates_locked, NULL);
	for (int i = 0; i < 20; i++)
		in_child(child_sees, &words);
	stop = 1;
	for (int i = 0; i < 2; i++)
		pthread_join(thread[i], NULL);
}

/* Streams and stacks in large allocations: glibc touches both in a child, before all handlers. */
static void *waits(void *of)
{
	while (!stop)
		usleep(1000);
	return of;
}

static void glibcs_own(void)
{
	pthread_t thread, other;
	pthread_attr_t attributes;
	char *stack = malloc(MIB);
	struct words words = { malloc(MIB), MIB, 70 };

	fill((void *)words.at, MIB, 70);
	pthread_attr_init(&attributes);
	CHECK(pthread_attr_setstack(&attributes, stack, MIB) == 0);
	CHECK(pthread_create(&thread, &attributes, waits, NULL) == 0);
	CHECK(pthread_create(&other, NULL, forking_too, &words) == 0);
	pthread_join(other, NULL);
	stop = 1;
	CHECK(pthread_join(thread, NULL) == 0);
	free(stack);
}

static int forked_as;
static ucontext_t here, there;

static void on_own_stack(void)
{
	forked_as = fork();
	if (forked_as == 0)
		_exit(0);
}

static void coroutine(void)
{
	char *stack = malloc(MIB);

	getcontext(&there);
	there.uc_stack.ss_sp = stack;
	there.uc_stack.ss_size = MIB;
	there.uc_link = &here;
	makecontext(&there, on_own_stack, 0);
	swapcontext(&here, &there);
	CHECK(plain ? forked_as > 0 : forked_as == -1 && errno == ENOTSUP);
}

/* Descriptors closed by number, as daemons do. */
static void descriptors(void)
{
	struct words words = { malloc(MIB), MIB, 80 };

	fill((void *)words.at, MIB, 80);
	for (int fd = 3; fd < 4096; fd++)
		close(fd);
	CHECK(close_range(3, ~0u, 0) == 0);
	CHECK(is_shared((void *)words.at, MIB));
	in_child(child_sees, &words);
	free((void *)words.at);
}

static void locked(void)
{
	char *at = malloc(MIB);

	memset(at, 1, MIB);
	/* Not all that the arena could ever be. */
	if (mlockall(MCL_CURRENT) != 0)
		printf("not tried: mlockall (%s)\n", strerror(errno));
	free(at);
	munlockall();
}

static const struct {
	const char *name;
	void (*run)(void);
} tests[] = {
	{ "blocks", blocks }, { "mappings", mappings }, { "moves", moves }, { "forks", forks },
	{ "threads", threads }, { "forks of threads", forks_of_threads },
	{ "children without memory", dying_children },
	{ "children that are killed", killed_children }, { "others' handlers of fork", handlers },
	{ "glibc's own memory", glibcs_own }, { "a fork on a stack of malloc's", coroutine },
	{ "descriptors closed by number", descriptors }, { "mlockall", locked },
};

int main(int count, char **arguments)
{
	int failed = 0, n = sizeof tests / sizeof *tests;

	plain = count > 1 && !strcmp(arguments[1], "plain");
	setvbuf(stdout, NULL, _IOLBF, 0);
	shared_at = (lookup *)dlsym(RTLD_DEFAULT, "starverbs_shared_at");
	if (!shared_at && !plain)
		fail(__LINE__, "the library is not loaded");
	for (int i = 0; i < n; i++) {
		int status = 0;
		if (count > 2 && strcmp(arguments[2], tests[i].name))
			continue;
		pid_t child = fork();
		if (child == 0) {
			alarm(120);
			tests[i].run();
			_exit(0);
		}
		if (waitpid(child, &status, 0) != child || status) {
			printf("FAILED: %s (status %x)\n", tests[i].name, status);
			failed++;
		}
	}
	printf("%d of %d as it should be\n", n - failed, n);
	return failed != 0;
}
