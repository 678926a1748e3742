/* The program's own shared memory, of which libstarverbs.so keeps descriptors: found when it is sealed, by
 * whomever, also after fork and close, and not when it is gone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEN 65536ul
#define CHECK(what) ((what) ? (void)0 : fail(__LINE__, #what))

static int (*shared_at)(const void *, size_t, int *, uint64_t *);

static void fail(int line, const char *what)
{
	printf("kept.c:%d: %s (%s)\n", line, what, strerror(errno));
	exit(1);
}

/* The offset of a range in its memory file, through which the byte there is written; -1: there is none. */
static long offset_of(char *at, size_t len)
{
	uint64_t offset;
	int fd;

	if (shared_at(at, len, &fd, &offset))
		return -1;
	at[0]++;
	char seen;
	CHECK(pread(fd, &seen, 1, offset) == 1 && seen == at[0] && fcntl(fd, F_GETFD) == FD_CLOEXEC);
	return offset;
}

static int descriptors(void)
{
	int count = 0;

	for (int fd = 0; fd < 1000; fd++)
		count += fcntl(fd, F_GETFD) != -1;
	return count;
}

int main(void)
{
	int at_first = descriptors();

	shared_at = (int (*)(const void *, size_t, int *, uint64_t *))dlsym(RTLD_DEFAULT, "starverbs_shared_at");
	CHECK(shared_at);
	int file = memfd_create("program", MFD_ALLOW_SEALING);
	CHECK(ftruncate(file, 4 * LEN) == 0);
	char *at = mmap(NULL, 2 * LEN, PROT_READ | PROT_WRITE, MAP_SHARED, file, LEN);
	CHECK(at != MAP_FAILED && offset_of(at, 1) == -1);
	CHECK(fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) == 0 && close(file) == 0);
	CHECK(offset_of(at, 2 * LEN) == (long)LEN && offset_of(at + 100, 5) == (long)LEN + 100);
	CHECK(offset_of(at, 2 * LEN + 1) == -1 && offset_of(at + 5, 0) == -1 && offset_of((char *)&file, 1) == -1);
	/* A child has the same mapping, and its own descriptor. */
	int status;
	pid_t child = fork();
	if (child == 0) {
		CHECK(offset_of(at, 2 * LEN) == (long)LEN && munmap(at, 2 * LEN) == 0);
		exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0 && offset_of(at, 2 * LEN) == (long)LEN);
	at = mremap(at, 2 * LEN, 3 * LEN, MREMAP_MAYMOVE);
	CHECK(at != MAP_FAILED && offset_of(at, 3 * LEN) == (long)LEN);
	/* Other memory in its place. */
	CHECK(mmap(at, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
	CHECK(offset_of(at, 1) == -1 && offset_of(at + LEN, LEN) == 2 * (long)LEN);
	CHECK(munmap(at, 3 * LEN) == 0);
	/* Many come and go: no descriptor is left. */
	for (int i = 0; i < 300; i++) {
		file = memfd_create("program", MFD_ALLOW_SEALING);
		CHECK(ftruncate(file, LEN) == 0 && fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
		at = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
		CHECK(at != MAP_FAILED && close(file) == 0 && offset_of(at, LEN) == 0 && munmap(at, LEN) == 0);
	}
	CHECK(descriptors() == at_first);
	printf("all as it should be\n");
	return 0;
}
