/* No descriptors: with none, one, two and more left, each call that needs some fails with EMFILE or succeeds, and leaves none
 * behind; a connection that was there goes on; later all is well again. */
#include "faults.h"
#include <dirent.h>
#include <sys/resource.h>

static struct ibv_device *dev;
static struct side live;
static struct peer self;

static int open_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int count = 0;

	NEED(dir);
	while (readdir(dir))
		count++;
	closedir(dir);
	return count - 3;
}

/* From now on so many descriptors at most can be had; negative: as many as ever. The limit is on their numbers. */
static void leave(int count)
{
	static rlim_t usual;
	struct rlimit limit;
	int lowest;

	NEED(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	if (!usual)
		usual = limit.rlim_cur;
	limit.rlim_cur = usual;
	NEED(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	if (count < 0)
		return;
	NEED((lowest = dup(0)) >= 0 && close(lowest) == 0);
	limit.rlim_cur = (rlim_t)(lowest + count);
	NEED(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

static void *make_context(void) { return ibv_open_device(dev); }
static void *make_channel(void) { return ibv_create_comp_channel(live.ctx); }
static void *make_list(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	return list;
}
static void *make_dm(void)
{
	struct ibv_alloc_dm_attr i = { .length = 4096 };

	return ibv_alloc_dm(live.ctx, &i);
}
static int end_context(void *x) { return ibv_close_device(x); }
static int end_channel(void *x) { return ibv_destroy_comp_channel(x); }
static int end_list(void *x) { return ibv_free_device_list(x), 0; }
static int end_dm(void *x) { return ibv_free_dm(x); }

static const struct kind {
	const char *name;
	void *(*make)(void);
	int (*end)(void *);
} kinds[] = {
	{ "device list", make_list, end_list },
	{ "context", make_context, end_context },
	{ "channel", make_channel, end_channel },
	{ "device memory", make_dm, end_dm },
};

/* With so many left and fewer, down to none; `whole` is whether a connection lives meanwhile. */
static void starve(const struct kind *kind, int most, int whole)
{
	int refused = 0;

	for (int left = 0; left <= most; left++) {
		int before = open_fds(), why;
		void *made;

		leave(left);
		errno = 0;
		made = kind->make();
		why = errno;
		if (whole)
			CHECK(one(&live, &self) == IBV_WC_SUCCESS);
		leave(-1);
		if (made) {
			CHECK(kind->end(made) == 0);
		} else {
			refused++;
			if (why != EMFILE) {
				failures++;
				fprintf(stderr, "%s with %d left: errno %d\n", kind->name, left, why);
			}
		}
		if (open_fds() != before) {
			failures++;
			fprintf(stderr, "%s with %d left: %d descriptors behind\n", kind->name, left, open_fds() - before);
		}
	}
	printf("%-14s refused with %d of %d descriptors\n", kind->name, refused, most);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	void *made;

	alarm(120);
	NEED(list && (dev = list[0]));
	/* what a first context leaves for good: the page of counters and the like */
	NEED((made = make_context()) && end_context(made) == 0);
	starve(&kinds[1], 24, 0);
	open_side(&live);
	self = describe(&live, live.qp);
	NEED(connect_to(live.qp, &self, 14, 7) == 0);
	NEED(one(&live, &self) == IBV_WC_SUCCESS);
	for (unsigned int i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
		starve(&kinds[i], 8, 1);
	/* objects that need none are made all the same, and a connection with them */
	leave(0);
	{
		struct side more = live;
		struct peer other;

		CHECK((more.cq = ibv_create_cq(live.ctx, 10, NULL, NULL, 0)) != NULL);
		CHECK((more.mr = ibv_reg_mr(live.pd, live.buffer, 2 * BYTES, 0xf)) != NULL);
		CHECK((more.qp = make_qp(&more, IBV_QPT_RC)) != NULL);
		other = describe(&more, more.qp);
		CHECK(connect_to(more.qp, &other, 14, 7) == 0);
		CHECK(one(&more, &other) == IBV_WC_SUCCESS);
		CHECK(ibv_destroy_qp(more.qp) == 0 && ibv_dereg_mr(more.mr) == 0 && ibv_destroy_cq(more.cq) == 0);
	}
	leave(-1);
	CHECK(one(&live, &self) == IBV_WC_SUCCESS);
	ibv_free_device_list(list);
	return failures != 0;
}
