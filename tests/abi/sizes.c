/* Programs built against older and newer headers: structs that end before or after those of this library, and
 * masks with bits that it does not know. An older program's struct ends where a page ends and the next cannot
 * be touched; in a newer one's the library zeroes what it does not know.
 * Build: cc -Wall -o sizes sizes.c -libverbs; run with LD_LIBRARY_PATH naming the library under test. */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "check.h"

enum { PAGE = 4096, MORE = 64, FILL = 0x5a };

static struct ibv_context *ctx;
static struct verbs_context *verbs;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
/* The end of a page of FILL, after which nothing can be touched. */
static unsigned char *end;

/* A struct of `size` bytes with nothing after it. */
static void *ending(size_t size)
{
	memset(end - PAGE, FILL, PAGE);
	return end - size;
}

/* The same, with the contents of `from` as far as they fit. */
static void *cut(const void *from, size_t size)
{
	return memcpy(ending(size), from, size);
}

/* The size of a struct that ended before `field`. */
#define UP_TO(type, field) ((offsetof(struct type, field) + 7) & ~(size_t)7)

static int zero(const unsigned char *bytes, size_t count)
{
	size_t i;

	for (i = 0; i < count; i++)
		if (bytes[i])
			return 0;
	return 1;
}

static void refused(const char *what, const void *object)
{
	if (object || (errno != EINVAL && errno != EOPNOTSUPP)) {
		failures++;
		fprintf(stderr, "%s: %p, errno %d\n", what, object, errno);
	}
}

static int declined(int answer)
{
	return answer == EINVAL || answer == EOPNOTSUPP;
}

static void the_context(void)
{
	/* A newer header looks for its functions in front of those known here, and
	 * believes `sz` that there are none. */
	CHECK(verbs && verbs->sz && verbs->sz <= sizeof(struct verbs_context) &&
	      ctx->abi_compat == __VERBS_ABI_IS_EXTENDED);
}

static void device_attributes(void)
{
	size_t least = UP_TO(ibv_device_attr_ex, odp_caps), full = sizeof(struct ibv_device_attr_ex), size;
	struct ibv_query_device_ex_input unknown = { .comp_mask = 1 };
	struct ibv_device_attr_ex all;

	CHECK(!verbs->query_device_ex(ctx, NULL, &all, full));
	for (size = least; size <= full + MORE; size += 8) {
		unsigned char *to = ending(size);
		size_t known = size < full ? size : full;

		CHECK(!verbs->query_device_ex(ctx, NULL, (void *)to, size));
		CHECK(!memcmp(to, &all, known) && zero(to + known, size - known) && (size == PAGE || to[-1] == FILL));
	}
	CHECK(verbs->query_device_ex(ctx, NULL, ending(least - 8), least - 8) == EINVAL);
	CHECK(declined(verbs->query_device_ex(ctx, &unknown, &all, full)));
}

static void port_attributes(void)
{
	size_t oldest = offsetof(struct ibv_port_attr, port_cap_flags2), full = sizeof(struct ibv_port_attr), size;
	struct ibv_port_attr all;

	CHECK(!ibv_query_port(ctx, 1, &all) && all.state == IBV_PORT_ACTIVE);
	for (size = oldest; size <= full + MORE; size += 4) {
		unsigned char *to = ending(size);
		size_t known = size < full ? size : full;

		CHECK(!verbs->query_port(ctx, 1, (void *)to, size));
		CHECK(!memcmp(to, &all, known) && zero(to + known, size - known) && to[-1] == FILL);
	}
	/* The symbol, without the macro: what programs call that were built before port_cap_flags2. */
	CHECK(!(ibv_query_port)(ctx, 1, ending(oldest)) && !memcmp(end - oldest, &all, oldest));
}

static void gid_entries(void)
{
	size_t full = sizeof(struct ibv_gid_entry), large = full + 16;
	struct ibv_gid_entry first;
	ssize_t count, i;

	CHECK(!ibv_query_gid_ex(ctx, 1, 0, &first, 0));
	CHECK(!_ibv_query_gid_ex(ctx, 1, 0, ending(large), 0, large));
	CHECK(!memcmp(end - large, &first, full) && zero(end - 16, 16));
	CHECK(declined(_ibv_query_gid_ex(ctx, 1, 0, ending(full - 4), 0, full - 4)));
	CHECK(declined(_ibv_query_gid_ex(ctx, 1, 0, &first, 1, full)));
	count = _ibv_query_gid_table(ctx, ending(32 * large), 32, 0, large);
	CHECK(count > 0);
	for (i = 0; i < count; i++) {
		unsigned char *entry = end - (32 - i) * large;

		CHECK(((struct ibv_gid_entry *)entry)->gid_index == i && zero(entry + full, 16));
	}
	CHECK(declined(-_ibv_query_gid_table(ctx, ending(full - 4), 1, 0, full - 4)));
	CHECK(declined(-_ibv_query_gid_table(ctx, ending(full), 1, 1, full)));
}

/* Without rate_limit, the last field of today's. */
static void queue_pair_attributes(void)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .cap = { 1, 1, 1, 1, 0 },
		.qp_type = IBV_QPT_RC };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	size_t old = UP_TO(ibv_qp_attr, rate_limit);
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(!ibv_modify_qp(qp, cut(&attr, old), IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
	      IBV_QP_ACCESS_FLAGS));
	CHECK(!ibv_query_qp(qp, ending(old), IBV_QP_STATE, &init) && end[-(ssize_t)old] == IBV_QPS_INIT);
	CHECK(declined(ibv_modify_qp(qp, &attr, 1 << 30)) && declined(ibv_modify_qp(qp, &attr, IBV_QP_RATE_LIMIT)));
	CHECK(ibv_modify_qp_rate_limit(qp, &(struct ibv_qp_rate_limit_attr){ .comp_mask = ~0u }) == EOPNOTSUPP);
	CHECK(!ibv_destroy_qp(qp));
}

static void queue_pairs(void)
{
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq, .cap = { 1, 1, 1, 1, 0 },
					    .qp_type = IBV_QPT_RC, .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS, .pd = pd };
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, cut(&init, UP_TO(ibv_qp_init_attr_ex, max_tso_header)));

	CHECK(qp && !ibv_destroy_qp(qp));
	for (int bit = 7; bit < 32; bit++) {
		init.comp_mask = IBV_QP_INIT_ATTR_PD | 1u << bit;
		refused("create_qp_ex, comp_mask", ibv_create_qp_ex(ctx, &init));
	}
	init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
	init.create_flags = 1u << 31;
	refused("create_qp_ex, create_flags", ibv_create_qp_ex(ctx, &init));
	init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	init.send_ops_flags = 1ull << 40;
	refused("create_qp_ex, send_ops_flags", ibv_create_qp_ex(ctx, &init));
}

static void completion_queues(void)
{
	struct ibv_cq_init_attr_ex init = { .cqe = 4, .wc_flags = IBV_WC_STANDARD_FLAGS,
					    .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS };
	struct ibv_cq_ex *ex = ibv_create_cq_ex(ctx, cut(&init, UP_TO(ibv_cq_init_attr_ex, parent_domain)));
	struct ibv_poll_cq_attr poll = { .comp_mask = 1 };
	struct ibv_modify_cq_attr modify = { .attr_mask = 1u << 9 };

	CHECK(ex && ibv_start_poll(ex, &poll) == EINVAL && declined(ibv_modify_cq(ibv_cq_ex_to_cq(ex), &modify)));
	CHECK(!ibv_destroy_cq(ibv_cq_ex_to_cq(ex)));
	init.comp_mask = 0;
	ex = ibv_create_cq_ex(ctx, cut(&init, UP_TO(ibv_cq_init_attr_ex, flags)));
	CHECK(ex && !ibv_destroy_cq(ibv_cq_ex_to_cq(ex)));
	init.comp_mask = 1u << 20;
	refused("create_cq_ex, comp_mask", ibv_create_cq_ex(ctx, &init));
	init.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
	init.flags = 1u << 20;
	refused("create_cq_ex, flags", ibv_create_cq_ex(ctx, &init));
	init.flags = 0;
	init.wc_flags = 1ull << 50;
	refused("create_cq_ex, wc_flags", ibv_create_cq_ex(ctx, &init));
}

static void shared_receive_queues(void)
{
	struct ibv_srq_init_attr_ex init = { .attr = { 4, 1, 0 }, .comp_mask = IBV_SRQ_INIT_ATTR_PD, .pd = pd };
	struct ibv_srq *srq = ibv_create_srq_ex(ctx, cut(&init, UP_TO(ibv_srq_init_attr_ex, tm_cap)));

	CHECK(srq && !ibv_destroy_srq(srq));
	init.comp_mask |= 1u << 20;
	refused("create_srq_ex", ibv_create_srq_ex(ctx, &init));
	init.comp_mask = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE;
	init.srq_type = 99;
	refused("create_srq_ex, type", ibv_create_srq_ex(ctx, &init));
}

static void domains(void)
{
	struct ibv_parent_domain_init_attr parent = { .pd = pd };
	struct ibv_pd *made = ibv_alloc_parent_domain(ctx, cut(&parent, UP_TO(ibv_parent_domain_init_attr, alloc)));
	struct ibv_xrcd_init_attr xrcd = { .comp_mask = 1u << 20 };
	struct ibv_qp_open_attr open = { .comp_mask = 1u << 20 };

	CHECK(made && !ibv_dealloc_pd(made));
	parent.comp_mask = 1u << 20;
	refused("alloc_parent_domain", ibv_alloc_parent_domain(ctx, &parent));
	refused("alloc_td", ibv_alloc_td(ctx, &(struct ibv_td_init_attr){ .comp_mask = 1 }));
	refused("open_xrcd", ibv_open_xrcd(ctx, &xrcd));
	refused("open_qp", ibv_open_qp(ctx, &open));
}

static void others(void)
{
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };

	CHECK(!ibv_query_rt_values_ex(ctx, &values) && values.raw_clock.tv_nsec);
	values.comp_mask = 1u << 20;
	CHECK(declined(ibv_query_rt_values_ex(ctx, &values)));
	refused("alloc_dm", ibv_alloc_dm(ctx, &(struct ibv_alloc_dm_attr){ .length = 64, .comp_mask = 1 }));
	refused("create_counters", ibv_create_counters(ctx, &(struct ibv_counters_init_attr){ .comp_mask = 1 }));
	refused("create_wq", ibv_create_wq(ctx, &(struct ibv_wq_init_attr){ .comp_mask = ~0u }));
	refused("create_rwq_ind_table", ibv_create_rwq_ind_table(ctx,
		&(struct ibv_rwq_ind_table_init_attr){ .comp_mask = ~0u }));
	refused("create_flow_action_esp", ibv_create_flow_action_esp(ctx,
		&(struct ibv_flow_action_esp_attr){ .comp_mask = ~0u }));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	unsigned char *map = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	end = map + PAGE;
	ctx = ibv_open_device(list[0]);
	ibv_free_device_list(list);
	verbs = verbs_get_ctx(ctx);
	pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 4, NULL, NULL, 0);
	CHECK(pd && cq && map != MAP_FAILED && !mprotect(end, PAGE, PROT_NONE));
	the_context();
	device_attributes();
	port_attributes();
	gid_entries();
	queue_pair_attributes();
	queue_pairs();
	completion_queues();
	shared_receive_queues();
	domains();
	others();
	CHECK(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	if (!failures)
		printf("sizes and masks: all as promised\n");
	return failures != 0;
}
