/* What librdmacm has libibverbs translate: the kernel's structs, and verbs.h's. Bytes that
 * count up tell every field's place.
 * Build: cc -Wall -o kernel kernel.c -libverbs; run with LD_LIBRARY_PATH naming the library under test. */
#include <errno.h>
#include <infiniband/sa.h>
#include <infiniband/verbs.h>
#include <rdma/ib_user_sa.h>
#include <rdma/ib_user_verbs.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

void ibv_copy_ah_attr_from_kern(struct ibv_ah_attr *, struct ib_uverbs_ah_attr *);
void ibv_copy_qp_attr_from_kern(struct ibv_qp_attr *, struct ib_uverbs_qp_attr *);
void ibv_copy_path_rec_from_kern(struct ibv_sa_path_rec *, struct ib_user_path_rec *);
void ibv_copy_path_rec_to_kern(struct ib_user_path_rec *, struct ibv_sa_path_rec *);

static void count_up(void *bytes, size_t size)
{
	size_t i;

	for (i = 0; i < size; i++)
		((unsigned char *)bytes)[i] = i + 1;
}

#define SAME(field) CHECK(to.field == from.field)

static void address(struct ibv_ah_attr to, struct ib_uverbs_ah_attr from)
{
	CHECK(!memcmp(&to.grh.dgid, from.grh.dgid, 16));
	SAME(grh.flow_label);
	SAME(grh.sgid_index);
	SAME(grh.hop_limit);
	SAME(grh.traffic_class);
	SAME(dlid);
	SAME(sl);
	SAME(src_path_bits);
	SAME(static_rate);
	SAME(is_global);
	SAME(port_num);
}

static void queue_pair(void)
{
	struct ib_uverbs_qp_attr from;
	struct ibv_qp_attr to = { .rate_limit = 77 };

	count_up(&from, sizeof(from));
	ibv_copy_qp_attr_from_kern(&to, &from);
	CHECK((unsigned)to.qp_state == from.qp_state && (unsigned)to.cur_qp_state == from.cur_qp_state);
	CHECK((unsigned)to.path_mtu == from.path_mtu && (unsigned)to.path_mig_state == from.path_mig_state);
	CHECK((unsigned)to.qp_access_flags == from.qp_access_flags);
	SAME(qkey);
	SAME(rq_psn);
	SAME(sq_psn);
	SAME(dest_qp_num);
	address(to.ah_attr, from.ah_attr);
	address(to.alt_ah_attr, from.alt_ah_attr);
	CHECK(!memcmp(&to.cap, &from.max_send_wr, sizeof(to.cap)));
	SAME(pkey_index);
	SAME(alt_pkey_index);
	SAME(en_sqd_async_notify);
	SAME(sq_draining);
	SAME(max_rd_atomic);
	SAME(max_dest_rd_atomic);
	SAME(min_rnr_timer);
	SAME(port_num);
	SAME(timeout);
	SAME(retry_cnt);
	SAME(rnr_retry);
	SAME(alt_port_num);
	SAME(alt_timeout);
	CHECK(to.rate_limit == 77);
}

static void path(void)
{
	struct ib_user_path_rec from, back;
	struct ibv_sa_path_rec to;

	count_up(&from, sizeof(from));
	from.mtu = IBV_MTU_4096;
	ibv_copy_path_rec_from_kern(&to, &from);
	CHECK(!memcmp(&to.dgid, from.dgid, 16) && !memcmp(&to.sgid, from.sgid, 16));
	CHECK((unsigned)to.raw_traffic == from.raw_traffic && (unsigned)to.reversible == from.reversible);
	SAME(dlid);
	SAME(slid);
	SAME(flow_label);
	SAME(hop_limit);
	SAME(traffic_class);
	SAME(numb_path);
	SAME(pkey);
	SAME(sl);
	SAME(mtu_selector);
	SAME(mtu);
	SAME(rate_selector);
	SAME(rate);
	SAME(packet_life_time_selector);
	SAME(packet_life_time);
	SAME(preference);
	ibv_copy_path_rec_to_kern(&back, &to);
	CHECK(!memcmp(&back, &from, offsetof(struct ib_user_path_rec, preference) + 1));
}

int main(void)
{
	struct ib_uverbs_ah_attr from;
	struct ibv_ah_attr to;

	count_up(&from, sizeof(from));
	ibv_copy_ah_attr_from_kern(&to, &from);
	address(to, from);
	queue_pair();
	path();
	if (!failures)
		printf("the kernel's structs: all as promised\n");
	return failures != 0;
}
