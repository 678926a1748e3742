/* What the man pages say of each call's failure, call by call: return value,
 * errno, and that nothing has changed.
 * Build: cc -Wall -o errors errors.c -libverbs; run with LD_LIBRARY_PATH naming the library under test. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "connect.h"

/* A create verb that must give NULL with this errno. */
#define REFUSED(call, error) CHECK(!(call) && errno == (error))

enum { LOCAL = IBV_ACCESS_LOCAL_WRITE };

static struct ibv_context *ctx;
static struct ibv_device_attr dev;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static char buf[8192] __attribute__((aligned(4096)));

static struct ibv_qp_init_attr rc(void)
{
	return (struct ibv_qp_init_attr){ .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { 4, 4, 1, 1, 0 } };
}

/* ibv_get_device_list, ibv_open_device, ibv_get_device_name, ... */
static void devices(void)
{
	int count = -1;
	struct ibv_device **list = ibv_get_device_list(&count), bogus = { .name = "none" };
	struct ibv_context *again;

	CHECK(list && count == 1 && list[0] && !list[1] && !strcmp(ibv_get_device_name(list[0]), list[0]->name));
	CHECK(ibv_get_device_guid(list[0]) == dev.node_guid && dev.node_guid && ibv_get_device_index(list[0]) == -1);
	REFUSED(ibv_open_device(&bogus), ENODEV);
	again = ibv_open_device(list[0]);
	CHECK(again && again != ctx && again->async_fd != ctx->async_fd && !ibv_close_device(again));
	ibv_free_device_list(list);
}

/* ibv_query_device, ibv_query_device_ex, ibv_query_port, ibv_query_pkey,
 * ibv_get_pkey_index, ibv_query_rt_values_ex */
static void queries(void)
{
	struct ibv_query_device_ex_input input = { .comp_mask = 1 };
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK }, later = values;
	struct ibv_device_attr_ex ex;
	struct ibv_port_attr port;
	uint16_t pkey;

	CHECK(ibv_query_device_ex(ctx, &input, &ex) == EINVAL);
	CHECK(!ibv_query_device_ex(ctx, NULL, &ex) && !memcmp(&ex.orig_attr, &dev, sizeof(dev)));
	CHECK(!(dev.device_cap_flags & (IBV_DEVICE_AUTO_PATH_MIG | IBV_DEVICE_RESIZE_MAX_WR)));
	CHECK(dev.device_cap_flags & IBV_DEVICE_SRQ_RESIZE);
	CHECK(ibv_query_port(ctx, 0, &port) == EINVAL && ibv_query_port(ctx, 2, &port) == EINVAL);
	CHECK(!ibv_query_port(ctx, 1, &port) && port.active_mtu <= port.max_mtu &&
	      port.pkey_tbl_len == dev.max_pkeys);
	CHECK(port.flags & IBV_QPF_GRH_REQUIRED && port.phys_state == 5 && port.max_msg_sz == 1u << 30);
	CHECK(ibv_query_pkey(ctx, 1, -1, &pkey) == -1 && ibv_query_pkey(ctx, 1, port.pkey_tbl_len, &pkey) == -1);
	CHECK(ibv_query_pkey(ctx, 2, 0, &pkey) == -1 && !ibv_query_pkey(ctx, 1, 0, &pkey));
	CHECK(!ibv_get_pkey_index(ctx, 1, pkey) && ibv_get_pkey_index(ctx, 1, htons(1)) == -1);
	CHECK(ibv_get_pkey_index(ctx, 2, pkey) == -1);
	CHECK(!ibv_query_rt_values_ex(ctx, &values) && !ibv_query_rt_values_ex(ctx, &later));
	CHECK(values.comp_mask == IBV_VALUES_MASK_RAW_CLOCK && values.raw_clock.tv_nsec > 0);
	CHECK(later.raw_clock.tv_nsec >= values.raw_clock.tv_nsec);
	values.comp_mask = IBV_VALUES_MASK_RESERVED;
	CHECK(ibv_query_rt_values_ex(ctx, &values) == EINVAL);
}

/* ibv_query_gid, ibv_query_gid_ex, ibv_query_gid_table: a table with empty places */
static void gids(void)
{
	struct ibv_gid_entry entry, table[256];
	struct ibv_port_attr port;
	union ibv_gid gid, none = { 0 };
	ssize_t valid = ibv_query_gid_table(ctx, table, 256, 0), i;

	CHECK(!ibv_query_port(ctx, 1, &port) && valid > 0 && valid < port.gid_tbl_len);
	for (i = 0; i < valid; i++) {
		CHECK(!ibv_query_gid_ex(ctx, 1, table[i].gid_index, &entry, 0) &&
		      !memcmp(&entry, &table[i], sizeof(entry)));
		CHECK(!ibv_query_gid(ctx, 1, table[i].gid_index, &gid) && !memcmp(&gid, &entry.gid, 16));
		CHECK(entry.port_num == 1 && entry.ndev_ifindex);
	}
	CHECK(ibv_query_gid_ex(ctx, 1, valid, &entry, 0) == ENODATA);
	CHECK(ibv_query_gid_ex(ctx, 1, port.gid_tbl_len - 1, &entry, 0) == ENODATA);
	CHECK(ibv_query_gid_ex(ctx, 1, port.gid_tbl_len, &entry, 0) == EINVAL);
	CHECK(ibv_query_gid_ex(ctx, 2, 0, &entry, 0) == EINVAL &&
	      ibv_query_gid_ex(ctx, 1, 0, &entry, 1) == EOPNOTSUPP);
	CHECK(!ibv_query_gid(ctx, 1, port.gid_tbl_len - 1, &gid) && !memcmp(&gid, &none, 16));
	CHECK(ibv_query_gid(ctx, 1, port.gid_tbl_len, &gid) == -1 && ibv_query_gid(ctx, 1, -1, &gid) == -1);
	CHECK(ibv_query_gid(ctx, 2, 0, &gid) == -1);
	CHECK(valid == 1 || ibv_query_gid_table(ctx, table, valid - 1, 0) == -EINVAL);
	CHECK(ibv_query_gid_table(ctx, table, 0, 0) == -EINVAL &&
	      ibv_query_gid_table(ctx, table, 256, 1) == -EOPNOTSUPP);
}

/* ibv_dealloc_pd: EBUSY with an object of each kind in it, and the domain is as good as before. */
static void domains(void)
{
	struct ibv_pd *own = ibv_alloc_pd(ctx), *parent;
	struct ibv_qp_init_attr init = rc();
	struct ibv_srq_init_attr srq_init = { .attr = { 4, 1, 0 } };
	struct ibv_ah_attr to = way_to(ctx, 0).ah_attr;
	struct ibv_td_init_attr td_init = { 0 }, bad_td = { .comp_mask = 1 };
	struct ibv_parent_domain_init_attr domain = { .pd = own }, bad = { .pd = own, .comp_mask = 1 << 9 };
	struct ibv_qp *qp = ibv_create_qp(own, &init);
	struct ibv_srq *srq = ibv_create_srq(own, &srq_init);
	struct ibv_mr *mr = ibv_reg_mr(own, buf, 64, LOCAL), *null = ibv_alloc_null_mr(own);
	struct ibv_mw *mw = ibv_alloc_mw(own, IBV_MW_TYPE_1);
	struct ibv_ah *ah = ibv_create_ah(own, &to);
	struct ibv_td *td = ibv_alloc_td(ctx, &td_init);

	CHECK(own && qp && srq && mr && null && mw && ah && td);
	CHECK(ibv_dealloc_pd(own) == EBUSY && !ibv_destroy_qp(qp));
	CHECK(ibv_dealloc_pd(own) == EBUSY && !ibv_destroy_srq(srq));
	CHECK(ibv_dealloc_pd(own) == EBUSY && !ibv_dereg_mr(mr));
	CHECK(ibv_dealloc_pd(own) == EBUSY && !ibv_dereg_mr(null));
	CHECK(ibv_dealloc_pd(own) == EBUSY && !ibv_dealloc_mw(mw));
	CHECK(ibv_dealloc_pd(own) == EBUSY && !ibv_destroy_ah(ah));
	REFUSED(ibv_alloc_td(ctx, &bad_td), EINVAL);
	REFUSED(ibv_alloc_parent_domain(ctx, &bad), EINVAL);
	domain.td = td;
	parent = ibv_alloc_parent_domain(ctx, &domain);
	CHECK(parent && ibv_dealloc_pd(own) == EBUSY && ibv_dealloc_td(td) == EBUSY);
	domain.pd = parent;
	REFUSED(ibv_alloc_parent_domain(ctx, &domain), EINVAL);
	mr = ibv_reg_mr(parent, buf, 64, LOCAL);
	qp = ibv_create_qp(parent, &init);
	CHECK(mr && qp && ibv_dealloc_pd(parent) == EBUSY && !ibv_dereg_mr(mr));
	CHECK(ibv_dealloc_pd(parent) == EBUSY && !ibv_destroy_qp(qp));
	CHECK(!ibv_dealloc_pd(parent) && !ibv_dealloc_td(td) && !ibv_dealloc_pd(own));
	CHECK(ibv_dealloc_pd(NULL) == EINVAL);
}

/* ibv_reg_mr, ibv_reg_mr_iova, ibv_dereg_mr, ibv_alloc_mw */
static void regions(void)
{
	char *read_only = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int optional = IBV_ACCESS_RELAXED_ORDERING, huge = IBV_ACCESS_HUGETLB;
	struct ibv_mr *mr;

	REFUSED(ibv_reg_mr(pd, buf, 0, LOCAL), EINVAL);
	REFUSED(ibv_reg_mr(pd, (void *)64, 64, LOCAL), EFAULT);
	REFUSED(ibv_reg_mr(pd, (void *)-64, 128, LOCAL), EINVAL);
	REFUSED(ibv_reg_mr(pd, read_only, 64, LOCAL), EFAULT);
	REFUSED(ibv_reg_mr(pd, buf, 64, IBV_ACCESS_REMOTE_WRITE), EINVAL);
	REFUSED(ibv_reg_mr(pd, buf, 64, IBV_ACCESS_REMOTE_ATOMIC), EINVAL);
	REFUSED(ibv_reg_mr(pd, buf, 64, 1 << 19), EINVAL);
	REFUSED(ibv_reg_mr_iova(pd, buf, 64, UINT64_MAX - 3, LOCAL), EINVAL);
	CHECK((mr = ibv_reg_mr(pd, read_only, 64, IBV_ACCESS_REMOTE_READ)) && !ibv_dereg_mr(mr));
	CHECK((mr = ibv_reg_mr(pd, buf, 64, LOCAL | optional)) && !ibv_dereg_mr(mr));
	CHECK((mr = ibv_reg_mr(pd, buf, 64, LOCAL | huge)) && !ibv_dereg_mr(mr));
	CHECK((mr = ibv_reg_mr(pd, buf, 64, LOCAL | 1 << 29)) && !ibv_dereg_mr(mr));
	CHECK(ibv_dereg_mr(NULL) == EINVAL);
	REFUSED(ibv_alloc_mw(pd, 0), EINVAL);
	munmap(read_only, 4096);
}

/* ibv_create_ah, ibv_init_ah_from_wc, ibv_create_ah_from_wc, ibv_destroy_ah */
static void addresses(void)
{
	struct ibv_ah_attr good = way_to(ctx, 0).ah_attr, bad, made;
	struct ibv_wc wc = { .wc_flags = IBV_WC_GRH };
	struct ibv_port_attr port;
	struct ibv_grh grh = { 0 };
	struct ibv_ah *ah = ibv_create_ah(pd, &good);

	CHECK(ah && ah->pd == pd && ah->context == ctx && !ibv_destroy_ah(ah) && !ibv_query_port(ctx, 1, &port));
	bad = good;
	bad.is_global = 0;
	REFUSED(ibv_create_ah(pd, &bad), EINVAL);
	bad = good;
	bad.port_num = 2;
	REFUSED(ibv_create_ah(pd, &bad), EINVAL);
	bad = good;
	bad.grh.sgid_index = port.gid_tbl_len - 1;
	REFUSED(ibv_create_ah(pd, &bad), EINVAL);
	REFUSED(ibv_create_ah(pd, NULL), EINVAL);
	REFUSED(ibv_create_ah(NULL, &good), EINVAL);
	CHECK(ibv_init_ah_from_wc(ctx, 1, &wc, NULL, &made) == -1 && !ibv_init_ah_from_wc(ctx, 1, &wc, &grh, &made));
	REFUSED(ibv_create_ah_from_wc(pd, &wc, NULL, 1), EINVAL);
	CHECK(ibv_destroy_ah(NULL) == EINVAL);
}

/* ibv_create_comp_channel, ibv_create_cq, ibv_create_cq_ex, ibv_resize_cq, ibv_destroy_cq, ... */
static void completion_queues(void)
{
	struct ibv_cq_init_attr_ex ex = { .cqe = 4, .comp_mask = 1 << 8 };
	struct ibv_comp_channel *channel = ibv_create_comp_channel(ctx);
	struct ibv_cq *big = ibv_create_cq(ctx, dev.max_cqe, NULL, NULL, 0), *own;
	struct ibv_qp_init_attr init = rc();
	struct ibv_srq_init_attr srq_init = { .attr = { 4, 1, 0 } };
	struct ibv_qp *qp;
	struct ibv_srq *srq;

	CHECK(big && big->cqe >= dev.max_cqe && !ibv_destroy_cq(big));
	REFUSED(ibv_create_cq(ctx, dev.max_cqe + 1, NULL, NULL, 0), EINVAL);
	REFUSED(ibv_create_cq(ctx, 4, NULL, NULL, -1), EINVAL);
	REFUSED(ibv_create_cq_ex(ctx, &ex), EINVAL);
	ex = (struct ibv_cq_init_attr_ex){ .cqe = 4, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS, .flags = 1 << 7 };
	REFUSED(ibv_create_cq_ex(ctx, &ex), EOPNOTSUPP);
	ex = (struct ibv_cq_init_attr_ex){ .cqe = 4, .wc_flags = IBV_WC_EX_WITH_FLOW_TAG };
	REFUSED(ibv_create_cq_ex(ctx, &ex), EOPNOTSUPP);
	ex = (struct ibv_cq_init_attr_ex){ .cqe = 4, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = pd };
	REFUSED(ibv_create_cq_ex(ctx, &ex), EINVAL);
	own = ibv_create_cq(ctx, 4, NULL, channel, 0);
	CHECK(own && ibv_destroy_comp_channel(channel) == EBUSY);
	CHECK(ibv_resize_cq(own, 0) == EINVAL && ibv_resize_cq(own, -1) == EINVAL);
	CHECK(ibv_resize_cq(own, dev.max_cqe + 1) == EINVAL && own->cqe >= 4 && own->cqe <= 8);
	CHECK(!ibv_resize_cq(own, 1000) && own->cqe >= 1000);
	CHECK(ibv_modify_cq(own, NULL) == EINVAL);
	init.recv_cq = own;
	qp = ibv_create_qp(pd, &init);
	CHECK(ibv_destroy_cq(own) == EBUSY && !ibv_destroy_qp(qp));
	init = rc();
	init.send_cq = own;
	qp = ibv_create_qp(pd, &init);
	CHECK(ibv_destroy_cq(own) == EBUSY && !ibv_destroy_qp(qp));
	srq = ibv_create_srq(pd, &srq_init);
	CHECK(srq && !ibv_destroy_srq(srq) && !ibv_destroy_cq(own) && !ibv_destroy_comp_channel(channel));
	CHECK(ibv_destroy_cq(NULL) == EINVAL && ibv_destroy_comp_channel(NULL) == EINVAL);
}

/* ibv_create_srq, ibv_create_srq_ex, ibv_modify_srq, ibv_query_srq,
 * ibv_get_srq_num, ibv_post_srq_recv, ... */
static void shared_receive_queues(void)
{
	struct ibv_srq_init_attr most = { .attr = { dev.max_srq_wr, 1, 0 } }, bad = most;
	struct ibv_srq_init_attr_ex ex = { .attr = { 4, 1, 0 }, .comp_mask = 1 << 9 };
	struct ibv_srq_init_attr small = { .attr = { 4, dev.max_srq_sge, 0 } };
	struct ibv_qp_init_attr init = rc();
	struct ibv_srq *srq = ibv_create_srq(pd, &most);
	struct ibv_recv_wr wr = { .num_sge = 0 }, *bad_wr;
	struct ibv_srq_attr attr;
	struct ibv_qp *qp, *uc;
	uint32_t number;
	int i;

	CHECK(srq && !ibv_query_srq(srq, &attr) && attr.max_wr >= (uint32_t)dev.max_srq_wr && !ibv_destroy_srq(srq));
	bad.attr.max_wr = dev.max_srq_wr + 1;
	REFUSED(ibv_create_srq(pd, &bad), EINVAL);
	bad.attr = (struct ibv_srq_attr){ 0, 1, 0 };
	REFUSED(ibv_create_srq(pd, &bad), EINVAL);
	bad.attr = (struct ibv_srq_attr){ 4, dev.max_srq_sge + 1, 0 };
	REFUSED(ibv_create_srq(pd, &bad), EINVAL);
	REFUSED(ibv_create_srq(pd, NULL), EINVAL);
	REFUSED(ibv_create_srq(NULL, &most), EINVAL);
	REFUSED(ibv_create_srq_ex(ctx, &ex), EINVAL);
	/* a basic one has no use for a completion queue: programs name one all the same */
	ex = (struct ibv_srq_init_attr_ex){ .attr = { 4, 1, 0 }, .pd = pd, .cq = cq, .srq_type = IBV_SRQT_BASIC,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ };
	srq = ibv_create_srq_ex(ctx, &ex);
	CHECK(srq && !ibv_destroy_srq(srq));
	srq = ibv_create_srq(pd, &small);
	CHECK(srq && small.attr.max_sge >= (uint32_t)dev.max_srq_sge);
	CHECK(!ibv_get_srq_num(srq, &number));
	init.srq = srq;
	qp = ibv_create_qp(pd, &init);
	CHECK(qp && ibv_destroy_srq(srq) == EBUSY && init.cap.max_recv_wr == 0 && init.cap.max_recv_sge == 0);
	CHECK(ibv_post_recv(qp, &wr, &bad_wr) == EINVAL && bad_wr == &wr);
	/* the man page has SRQs for RC and UD only, but cards and rdma_rxe
	 * take UC, and perftest asks for it */
	init.qp_type = IBV_QPT_UC;
	uc = ibv_create_qp(pd, &init);
	CHECK(uc && !ibv_destroy_qp(uc));
	for (i = 0; i < 4; i++)
		CHECK(!ibv_post_srq_recv(srq, &wr, &bad_wr));
	CHECK(ibv_post_srq_recv(srq, &wr, &bad_wr) == ENOMEM && bad_wr == &wr);
	attr = (struct ibv_srq_attr){ .max_wr = 2, .srq_limit = 1 };
	CHECK(ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) == EINVAL);
	CHECK(!ibv_query_srq(srq, &attr) && attr.max_wr == 4 && attr.srq_limit == 0);
	attr = (struct ibv_srq_attr){ .max_wr = 8, .srq_limit = 9 };
	CHECK(ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) == EINVAL);
	CHECK(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT) == EINVAL &&
	      ibv_modify_srq(srq, NULL, IBV_SRQ_LIMIT) == EINVAL);
	attr.srq_limit = 8;
	CHECK(!ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) && !ibv_modify_srq(srq, &attr, 0));
	CHECK(!ibv_query_srq(srq, &attr) && attr.max_wr == 8 && attr.srq_limit == 8);
	CHECK(!ibv_post_srq_recv(srq, &wr, &bad_wr));
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_srq(srq) && ibv_destroy_srq(NULL) == EINVAL);
}

/* ibv_create_qp, ibv_create_qp_ex, and what posting says of a queue pair that cannot yet, or no more */
static void queue_pairs(void)
{
	struct ibv_qp_init_attr init = rc();
	struct ibv_qp_init_attr_ex ex = { .qp_type = IBV_QPT_RC, .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd,
					  .send_cq = cq, .recv_cq = cq };
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND }, *bad;
	struct ibv_recv_wr recv = { .num_sge = 0 }, *bad_recv;
	struct ibv_sge sges[2] = { { 0 } };
	struct ibv_qp *qp;
	int i;

#define CAP(field, most)                                       \
	do {                                                   \
		init = rc();                                   \
		init.cap.field = (most) + 1;                   \
		REFUSED(ibv_create_qp(pd, &init), EINVAL);     \
		init.cap.field = (most);                       \
		qp = ibv_create_qp(pd, &init);                 \
		CHECK(qp && init.cap.field >= (uint32_t)(most)); \
		CHECK(!ibv_destroy_qp(qp));                    \
	} while (0)
	CAP(max_send_wr, dev.max_qp_wr);
	CAP(max_recv_wr, dev.max_qp_wr);
	CAP(max_send_sge, dev.max_sge);
	CAP(max_recv_sge, dev.max_sge);
	init = rc();
	init.cap.max_inline_data = 1 << 20;
	REFUSED(ibv_create_qp(pd, &init), EINVAL);
	init = rc();
	init.send_cq = NULL;
	REFUSED(ibv_create_qp(pd, &init), EINVAL);
	init = rc();
	init.recv_cq = NULL;
	REFUSED(ibv_create_qp(pd, &init), EINVAL);
	init = rc();
	init.qp_type = 99;
	REFUSED(ibv_create_qp(pd, &init), EINVAL);
	REFUSED(ibv_create_qp(pd, NULL), EINVAL);
	ex.comp_mask = 0;
	REFUSED(ibv_create_qp_ex(ctx, &ex), EINVAL);
	ex.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_RX_HASH;
	REFUSED(ibv_create_qp_ex(ctx, &ex), EOPNOTSUPP);
	CHECK(ibv_destroy_qp(NULL) == EINVAL && ibv_query_qp_data_in_order(NULL, IBV_WR_SEND, 0) == 0);

	init = rc();
	qp = ibv_create_qp(pd, &init);
	CHECK(ibv_post_recv(qp, &recv, &bad_recv) == EINVAL && bad_recv == &recv);
	CHECK(ibv_post_send(qp, &send, &bad) == EINVAL && bad == &send);
	CHECK(!ibv_modify_qp(qp, &(struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 1 }, TO_INIT));
	CHECK(ibv_post_send(qp, &send, &bad) == EINVAL && bad == &send);
	recv.sg_list = sges;
	recv.num_sge = init.cap.max_recv_sge + 1;
	CHECK(ibv_post_recv(qp, &recv, &bad_recv) == EINVAL);
	recv.num_sge = 1;
	for (i = 0; i < (int)init.cap.max_recv_wr; i++)
		CHECK(!ibv_post_recv(qp, &recv, &bad_recv));
	CHECK(ibv_post_recv(qp, &recv, &bad_recv) == ENOMEM && bad_recv == &recv);
	CHECK(!ibv_destroy_qp(qp));
}

/* ibv_open_xrcd, ibv_close_xrcd, ibv_open_qp, ibv_create_srq_ex */
static void extended_connections(void)
{
	struct ibv_xrcd_init_attr on = { IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, -1, O_CREAT };
	struct ibv_xrcd_init_attr bad = { IBV_XRCD_INIT_ATTR_FD, -1, O_CREAT };
	struct ibv_xrcd *xrcd = ibv_open_xrcd(ctx, &on);
	struct ibv_srq_init_attr_ex srq_init = { .attr = { 4, 1, 0 }, .srq_type = IBV_SRQT_XRC, .pd = pd, .cq = cq };
	struct ibv_qp_init_attr_ex recv = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD };
	struct ibv_qp_open_attr open = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD |
						      IBV_QP_OPEN_ATTR_TYPE, .qp_type = IBV_QPT_RC };
	struct ibv_srq *srq;
	struct ibv_qp *qp;

	REFUSED(ibv_open_xrcd(ctx, &bad), EINVAL);
	bad = (struct ibv_xrcd_init_attr){ on.comp_mask, 9999, O_CREAT };
	REFUSED(ibv_open_xrcd(ctx, &bad), EBADF);
	bad = (struct ibv_xrcd_init_attr){ on.comp_mask, -1, O_CREAT | O_TRUNC };
	REFUSED(ibv_open_xrcd(ctx, &bad), EINVAL);
	srq_init.xrcd = xrcd;
	srq_init.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ |
			     IBV_SRQ_INIT_ATTR_XRCD;
	srq = ibv_create_srq_ex(ctx, &srq_init);
	recv.xrcd = xrcd;
	qp = ibv_create_qp_ex(ctx, &recv);
	CHECK(srq && qp && ibv_close_xrcd(xrcd) == EBUSY && ibv_destroy_cq(cq) == EBUSY);
	open.xrcd = xrcd;
	open.qp_num = qp->qp_num;
	REFUSED(ibv_open_qp(ctx, &open), EINVAL);
	open.qp_type = IBV_QPT_XRC_RECV;
	open.qp_num ^= 1 << 23;
	REFUSED(ibv_open_qp(ctx, &open), EINVAL);
	CHECK(!ibv_destroy_srq(srq) && ibv_close_xrcd(xrcd) == EBUSY && !ibv_destroy_qp(qp) &&
	      !ibv_close_xrcd(xrcd));
}

/* What a software card has nothing for: as rdma_rxe answers. */
static void not_offered(void)
{
	struct ibv_flow_attr flow = { 0 };
	struct ibv_counters_init_attr counters = { 0 };
	struct ibv_wq_init_attr wq = { .wq_type = IBV_WQT_RQ, .max_wr = 1, .max_sge = 1, .pd = pd, .cq = cq };
	struct ibv_rwq_ind_table_init_attr table = { 0 };
	struct ibv_flow_action_esp_attr esp = { 0 };
	struct ibv_qp_rate_limit_attr rate = { 0 };
	struct ibv_qp_init_attr init = rc();
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_ece ece = { .vendor_id = 7, .options = 7 };

	REFUSED(ibv_create_flow(qp, &flow), EOPNOTSUPP);
	REFUSED(ibv_create_counters(ctx, &counters), EOPNOTSUPP);
	REFUSED(ibv_create_wq(ctx, &wq), EOPNOTSUPP);
	REFUSED(ibv_create_rwq_ind_table(ctx, &table), EOPNOTSUPP);
	REFUSED(ibv_create_flow_action_esp(ctx, &esp), EOPNOTSUPP);
	CHECK(ibv_modify_qp_rate_limit(qp, &rate) == EOPNOTSUPP);
	CHECK(ibv_query_ece(qp, &ece) == EOPNOTSUPP && !ece.vendor_id && !ece.options);
	ece.vendor_id = 7;
	CHECK(ibv_set_ece(qp, &ece) == EOPNOTSUPP && ibv_set_ece(qp, &(struct ibv_ece){ 0 }) == EOPNOTSUPP);
	CHECK(!ibv_destroy_qp(qp));
}

/* ibv_close_device: what is left works no more and is the program's to free. */
static void closing(void)
{
	struct ibv_context *own = ibv_open_device(ctx->device);
	struct ibv_pd *left = ibv_alloc_pd(own);
	struct ibv_cq *left_cq = ibv_create_cq(own, 4, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = left_cq, .recv_cq = left_cq, .qp_type = IBV_QPT_RC,
					 .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(left, &init);

	CHECK(ibv_close_device(NULL) == -1 && errno == EINVAL);
	CHECK(qp && !ibv_close_device(own));
	CHECK(ibv_modify_qp(qp, &(struct ibv_qp_attr){ .qp_state = IBV_QPS_ERR }, IBV_QP_STATE) == EINVAL);
	ibv_destroy_qp(qp);
	ibv_destroy_cq(left_cq);
	ibv_dealloc_pd(left);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	alarm(120);
	if (!list || !list[0] || !(ctx = ibv_open_device(list[0])) || !(pd = ibv_alloc_pd(ctx)) ||
	    !(cq = ibv_create_cq(ctx, 16, NULL, NULL, 0)) || ibv_query_device(ctx, &dev)) {
		perror("opening the card");
		return 1;
	}
	ibv_free_device_list(list);
	devices();
	queries();
	gids();
	domains();
	regions();
	addresses();
	completion_queues();
	shared_receive_queues();
	queue_pairs();
	extended_connections();
	not_offered();
	closing();
	CHECK(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	if (!failures)
		puts("errors: all as promised");
	return failures != 0;
}
