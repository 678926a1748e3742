/* No descriptors: with none, one, two and more left, each call that needs some fails with EMFILE or
 * succeeds, and leaves none behind; a connection that was there goes on; later all is well again. */
#include "faults.h"
#include "kinds.h"
#include <dirent.h>
#include <sys/resource.h>

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

/* From now on so many descriptors at most can be had; negative: as many as ever.
 * The limit is on their numbers. */
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

static void *make_list(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	return list;
}
static int end_list(void *x) { return ibv_free_device_list(x), 0; }

static const struct kind kinds[] = {
	{ "device list", make_list, end_list },
	{ "context", make_context, end_context },
	{ "channel", make_channel, end_channel },
	{ "device memory", make_dm, end_dm },
};

/* With so many left and fewer, down to none; `whole` is whether a connection lives meanwhile. */
static void starve(const struct kind *kind, int most, int whole)
{
	int count = 0;

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
		count += refused(kind, made, why, EMFILE, left);
		/* fewer: what was closed before has ended meanwhile */
		if (open_fds() > before) {
			failures++;
			fprintf(stderr, "%s with %d left: %d descriptors behind\n", kind->name, left, open_fds() - before);
		}
	}
	printf("%-14s refused with %d of %d descriptors\n", kind->name, count, most);
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
	ctx = live.ctx;
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
