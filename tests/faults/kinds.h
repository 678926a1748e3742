/* Objects that are made while something is lacking: how each is made, and ended. */
#include <infiniband/verbs.h>

static struct ibv_device *dev;
static struct ibv_context *ctx;

struct kind {
	const char *name;
	void *(*make)(void);
	int (*end)(void *);
};

static void *make_context(void) { return ibv_open_device(dev); }
static void *make_channel(void) { return ibv_create_comp_channel(ctx); }
static void *make_dm(void)
{
	struct ibv_alloc_dm_attr i = { .length = 8192 };

	return ibv_alloc_dm(ctx, &i);
}
static int end_context(void *x) { return ibv_close_device(x); }
static int end_channel(void *x) { return ibv_destroy_comp_channel(x); }
static int end_dm(void *x) { return ibv_free_dm(x); }

/* Ends what was made. Whether nothing was, which must be with this errno;
 * `step` is how far it may have come. */
static int refused(const struct kind *kind, void *made, int error, int wanted, long step)
{
	if (made) {
		CHECK(kind->end(made) == 0);
		return 0;
	}
	if (error != wanted) {
		failures++;
		fprintf(stderr, "%s, %ld: errno %d\n", kind->name, step, error);
	}
	return 1;
}
