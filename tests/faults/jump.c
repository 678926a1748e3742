/* A clock that jumps, preloaded: clock_gettime gives what the kernel does and what stands in a file that JUMP names: two numbers of
 * nanoseconds, for CLOCK_REALTIME and for CLOCK_MONOTONIC. Sleeps stay the kernel's. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *jumps;

static __attribute__((constructor)) void begin(void)
{
	const char *path = getenv("JUMP");
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	void *at = fd < 0 ? MAP_FAILED : mmap(NULL, 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (fd >= 0)
		close(fd);
	if (at != MAP_FAILED)
		jumps = at;
}

int clock_gettime(clockid_t clock, struct timespec *to)
{
	int ret = (int)syscall(SYS_clock_gettime, clock, to);

	if (ret == 0 && jumps && (clock == CLOCK_REALTIME || clock == CLOCK_MONOTONIC)) {
		int64_t t = to->tv_sec * INT64_C(1000000000) + to->tv_nsec + jumps[clock == CLOCK_MONOTONIC];

		to->tv_sec = t / 1000000000;
		to->tv_nsec = t % 1000000000;
	}
	return ret;
}
