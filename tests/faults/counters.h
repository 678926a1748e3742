/* A counter of a process's card, by its name. */
#include <infiniband/stardv.h>

static uint64_t count(struct ibv_context *ctx, const char *name)
{
	enum { COUNTERS = 512 };
	static struct stardv_counter list[COUNTERS];
	ssize_t n = stardv_list_counters(ctx, list, COUNTERS, 0);

	NEED(n > 0 && n <= COUNTERS);
	for (ssize_t i = 0; i < n; i++)
		if (strcmp(list[i].name, name) == 0)
			return list[i].value;
	NEED(!"a counter of that name");
	return 0;
}
