/* Real threads on shared and separate objects, all verbs at once, under a storm of
 * signals: for SECONDS, from SEED.
 *
 * Nothing may be lost, come twice or hold wrong bytes; no call may fail;
 * everything can be destroyed in the end.
 * usage: soak SECONDS [SEED]; run.sh builds it and runs it. */
#define _GNU_SOURCE
#include "soak.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

/* How often a signal comes, nanoseconds. */
enum { STORM = 200000 };
/* How long the end may take, seconds: far beyond what it takes, also under valgrind. */
enum { PATIENCE = 120 };

static atomic_ulong signals;

static void count_signal(int number)
{
	(void)number;
	atomic_fetch_add_explicit(&signals, 1, memory_order_relaxed);
}

/* System calls go on after a signal, or end with EINTR. */
static void set_restart(bool restart)
{
	struct sigaction action = { .sa_handler = count_signal, .sa_flags = restart ? SA_RESTART : 0 };

	MUST(!sigaction(SIGALRM, &action, NULL));
}

static void mask_storm(int how)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGALRM);
	MUST(!pthread_sigmask(how, &set, NULL));
}

static timer_t start_storm(void)
{
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM };
	struct itimerspec every = { { 0, STORM }, { 0, STORM } };
	timer_t timer;

	MUST(!timer_create(CLOCK_MONOTONIC, &event, &timer));
	MUST(!timer_settime(timer, 0, &every, NULL));
	return timer;
}

/* Ends the program if its end takes too long, in a thread that sleeps until then. */
static void *watch(void *arg)
{
	sleep((uintptr_t)arg + PATIENCE);
	fprintf(stderr, "soak: does not come to its end\n");
	traffic_tell();
	churn_tell();
	abort();
}

int main(int argc, char **argv)
{
	unsigned seconds = argc > 1 ? atoi(argv[1]) : 3;
	uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : (uint64_t)time(NULL);
	struct timespec turn = { 0, 50000000 };
	pthread_t watchdog;
	timer_t timer;

	printf("soak: %u seconds, seed %llu\n", seconds, (unsigned long long)seed);
	fflush(stdout);
	/* every other thread takes the storm; this one has it blocked */
	set_restart(true);
	open_card();
	traffic_start(seed);
	churn_start(seed + 1);
	mask_storm(SIG_BLOCK);
	MUST(!pthread_create(&watchdog, NULL, watch, (void *)(uintptr_t)seconds));
	timer = start_storm();
	for (unsigned turns = 0; turns < 20 * seconds; turns++) {
		set_restart(turns % 2);
		nanosleep(&turn, NULL);
	}
	atomic_store(&over, true);
	churn_end();
	traffic_end();
	churn_quiet();
	MUST(!timer_delete(timer) && !pthread_cancel(watchdog) && !pthread_join(watchdog, NULL));
	MUST(!ibv_close_device(ctx));
	printf("soak: all as it must be, through %lu signals\n", atomic_load(&signals));
	return 0;
}
