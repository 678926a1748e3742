/* Connects queue pairs of one card, for the C programs here. */
#include <infiniband/verbs.h>
#include <string.h>

enum {
	TO_INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
	TO_RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
	TO_RTS = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
		 IBV_QP_MAX_QP_RD_ATOMIC,
};

/* What the transitions of a connected queue pair take, for a peer at the first GID of the same card. */
static struct ibv_qp_attr way_to(struct ibv_context *ctx, uint32_t peer)
{
	struct ibv_qp_attr a = { .port_num = 1, .qp_access_flags = 0xf, .path_mtu = IBV_MTU_1024,
				 .dest_qp_num = peer, .rq_psn = 77, .sq_psn = 77, .max_dest_rd_atomic = 4, .min_rnr_timer = 12,
				 .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4 };

	a.ah_attr.is_global = 1;
	a.ah_attr.port_num = 1;
	a.ah_attr.grh.hop_limit = 1;
	a.ah_attr.grh.traffic_class = 32;
	a.ah_attr.grh.flow_label = 5;
	a.ah_attr.sl = 1;
	a.ah_attr.static_rate = IBV_RATE_10_GBPS;
	a.ah_attr.src_path_bits = 3;
	a.ah_attr.dlid = 7;
	ibv_query_gid(ctx, 1, 0, &a.ah_attr.grh.dgid);
	return a;
}

static int modify(struct ibv_qp *qp, struct ibv_qp_attr *attr, enum ibv_qp_state state, int mask)
{
	attr->qp_state = state;
	return ibv_modify_qp(qp, attr, mask);
}

/* From RESET to INIT, with these rights for the peer; 0, or the errno value. */
__attribute__((unused)) static int to_init(struct ibv_qp *qp, unsigned int access)
{
	struct ibv_qp_attr a = { .port_num = 1, .qp_access_flags = access };

	return modify(qp, &a, IBV_QPS_INIT, TO_INIT);
}

/* From INIT to RTS; 0, or the first errno value. */
__attribute__((unused)) static int to_rts(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_qp_attr a = way_to(qp->context, peer);
	int ret = modify(qp, &a, IBV_QPS_RTR, TO_RTR);

	return ret ? ret : modify(qp, &a, IBV_QPS_RTS, TO_RTS);
}

/* From RESET to RTS; 0, or the first errno value. */
__attribute__((unused)) static int connect_rc(struct ibv_qp *qp, uint32_t peer)
{
	int ret = to_init(qp, 0xf);

	return ret ? ret : to_rts(qp, peer);
}
