/* What memory and forks cost, for a run with libstarverbs-share.so and one without: medians. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB (1ul << 20)

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static int by_value(const void *one, const void *other)
{
	double a = *(const double *)one, b = *(const double *)other;

	return (a > b) - (a < b);
}

/* The median of some runs, in ns of each of `times` turns. */
static double median(void (*run)(int), int times)
{
	double took[9];

	for (int i = 0; i < 9; i++) {
		double begun = now();
		run(times);
		took[i] = (now() - begun) / times;
	}
	qsort(took, 9, sizeof *took, by_value);
	return took[4];
}

static volatile char *sink;

static void blocks(int times, size_t len)
{
	for (int i = 0; i < times; i++) {
		char *at = malloc(len);
		at[0] = 1;
		sink = at;
		free(at);
	}
}

static void small(int times) { blocks(times, 64); }
static void medium(int times) { blocks(times, 8000); }
static void large(int times) { blocks(times, MIB); }
static void huge(int times) { blocks(times, 48 * MIB); }

static void written(int times, size_t len)
{
	for (int i = 0; i < times; i++) {
		char *at = malloc(len);
		memset(at, 1, len);
		sink = at;
		free(at);
	}
}

static void large_written(int times) { written(times, MIB); }
static void huge_written(int times) { written(times, 48 * MIB); }

static void mapped(int times)
{
	for (int i = 0; i < times; i++) {
		char *at = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		memset(at, 1, MIB);
		munmap(at, MIB);
	}
}

static void forked(int times)
{
	for (int i = 0; i < times; i++) {
		pid_t child = fork();
		if (child == 0)
			_exit(0);
		waitpid(child, NULL, 0);
	}
}

int main(void)
{
	const char *preload = getenv("LD_PRELOAD");
	char *data;

	printf("%s\n", preload && *preload ? "with the library" : "without");
	printf("  malloc and free, 64 B            %10.1f ns\n", median(small, 1000000));
	printf("  malloc and free, 8000 B          %10.1f ns\n", median(medium, 1000000));
	printf("  malloc and free, 1 MiB           %10.1f ns\n", median(large, 20000));
	printf("  malloc, write, free, 1 MiB       %10.1f us\n", median(large_written, 500) / 1e3);
	printf("  malloc and free, 48 MiB          %10.1f us\n", median(huge, 200) / 1e3);
	printf("  malloc, write, free, 48 MiB      %10.1f us\n", median(huge_written, 5) / 1e3);
	printf("  mmap, write, munmap, 1 MiB       %10.1f us\n", median(mapped, 200) / 1e3);
	printf("  fork and exit of the child       %10.1f us\n", median(forked, 20) / 1e3);
	for (size_t gib = 1; gib <= 2; gib++) {
		data = malloc(gib << 30);
		memset(data, 1, gib << 30);
		printf("  the same with %zu GiB              %10.1f us\n", gib, median(forked, 1) / 1e3);
		free(data);
	}
	return 0;
}
