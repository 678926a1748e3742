/* What a program built with libibverbs 1.0 has compiled in: the structs of that release as far as the test
 * needs them, and its symbols at version IBVERBS_1.0. Written from the release's documented interface; no
 * such header is installed today, and <infiniband/verbs.h> cannot be included beside it. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

union ibv_gid {
	uint8_t raw[16];
	struct {
		uint64_t subnet_prefix, interface_id;
	} global;
};

enum { IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR };
enum { IBV_QPT_RC = 2, IBV_QPT_UC, IBV_QPT_UD };
enum { IBV_MTU_1024 = 3 };
enum {
	IBV_WR_RDMA_WRITE,
	IBV_WR_RDMA_WRITE_WITH_IMM,
	IBV_WR_SEND,
	IBV_WR_SEND_WITH_IMM,
	IBV_WR_RDMA_READ,
	IBV_WR_ATOMIC_CMP_AND_SWP,
	IBV_WR_ATOMIC_FETCH_AND_ADD
};
enum { IBV_SEND_FENCE = 1, IBV_SEND_SIGNALED = 2, IBV_SEND_SOLICITED = 4, IBV_SEND_INLINE = 8 };
enum { IBV_ACCESS_LOCAL_WRITE = 1, IBV_ACCESS_REMOTE_WRITE = 2, IBV_ACCESS_REMOTE_READ = 4,
	IBV_ACCESS_REMOTE_ATOMIC = 8 };
enum { IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD,
	IBV_WC_RECV = 128 };
enum { IBV_WC_GRH = 1, IBV_WC_WITH_IMM = 2 };
enum { IBV_SRQ_MAX_WR = 1, IBV_SRQ_LIMIT = 2 };
enum { IBV_EVENT_SRQ_LIMIT_REACHED = 15, IBV_EVENT_QP_LAST_WQE_REACHED = 16 };
enum {
	IBV_QP_STATE = 1 << 0,
	IBV_QP_ACCESS_FLAGS = 1 << 3,
	IBV_QP_PKEY_INDEX = 1 << 4,
	IBV_QP_PORT = 1 << 5,
	IBV_QP_QKEY = 1 << 6,
	IBV_QP_AV = 1 << 7,
	IBV_QP_PATH_MTU = 1 << 8,
	IBV_QP_TIMEOUT = 1 << 9,
	IBV_QP_RETRY_CNT = 1 << 10,
	IBV_QP_RNR_RETRY = 1 << 11,
	IBV_QP_RQ_PSN = 1 << 12,
	IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
	IBV_QP_MIN_RNR_TIMER = 1 << 15,
	IBV_QP_SQ_PSN = 1 << 16,
	IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
	IBV_QP_DEST_QPN = 1 << 20
};

struct ibv_device;
struct ibv_cq;
struct ibv_qp;
struct ibv_srq;

struct ibv_device_attr {
	char fw_ver[64];
	uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
	uint32_t vendor_id, vendor_part_id, hw_ver;
	int max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd,
		max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap,
		max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach,
		max_total_mcast_qp_attach, max_ah, max_fmr,
		max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
	uint16_t max_pkeys;
	uint8_t local_ca_ack_delay, phys_port_cnt;
};

struct ibv_port_attr {
	int state, max_mtu, active_mtu, gid_tbl_len;
	uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
	uint16_t pkey_tbl_len, lid, sm_lid;
	uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state;
};

struct ibv_sge {
	uint64_t addr;
	uint32_t length, lkey;
};

struct ibv_wc {
	uint64_t wr_id;
	int status, opcode;
	uint32_t vendor_err, byte_len, imm_data, qp_num, src_qp;
	int wc_flags;
	uint16_t pkey_index, slid;
	uint8_t sl, dlid_path_bits;
};

struct ibv_send_wr {
	struct ibv_send_wr *next;
	uint64_t wr_id;
	struct ibv_sge *sg_list;
	int num_sge, opcode, send_flags;
	uint32_t imm_data;
	union {
		struct {
			uint64_t remote_addr;
			uint32_t rkey;
		} rdma;
		struct {
			uint64_t remote_addr, compare_add, swap;
			uint32_t rkey;
		} atomic;
		struct {
			struct ibv_ah *ah;
			uint32_t remote_qpn, remote_qkey;
		} ud;
	} wr;
};

struct ibv_recv_wr {
	struct ibv_recv_wr *next;
	uint64_t wr_id;
	struct ibv_sge *sg_list;
	int num_sge;
};

struct ibv_context_ops {
	void *query_device_to_create_cq[7];
	int (*poll_cq)(struct ibv_cq *, int, struct ibv_wc *);
	int (*req_notify_cq)(struct ibv_cq *, int);
	void *cq_event_to_destroy_srq[7];
	int (*post_srq_recv)(struct ibv_srq *, struct ibv_recv_wr *, struct ibv_recv_wr **);
	void *create_qp_to_destroy_qp[4];
	int (*post_send)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);
	int (*post_recv)(struct ibv_qp *, struct ibv_recv_wr *, struct ibv_recv_wr **);
	void *create_ah_to_detach_mcast[4];
};

struct ibv_context {
	struct ibv_device *device;
	struct ibv_context_ops ops;
	int cmd_fd, async_fd, num_comp_vectors;
};

struct ibv_pd {
	struct ibv_context *context;
	uint32_t handle;
};

struct ibv_mr {
	struct ibv_context *context;
	struct ibv_pd *pd;
	uint32_t handle, lkey, rkey;
};

struct ibv_comp_channel {
	int fd;
};

struct ibv_cq {
	struct ibv_context *context;
	void *cq_context;
	uint32_t handle;
	int cqe;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	uint32_t comp_events_completed, async_events_completed;
};

struct ibv_srq {
	struct ibv_context *context;
	void *srq_context;
	struct ibv_pd *pd;
	uint32_t handle;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	uint32_t events_completed;
};

struct ibv_srq_attr {
	uint32_t max_wr, max_sge, srq_limit;
};

struct ibv_srq_init_attr {
	void *srq_context;
	struct ibv_srq_attr attr;
};

struct ibv_qp_cap {
	uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct ibv_qp_init_attr {
	void *qp_context;
	struct ibv_cq *send_cq, *recv_cq;
	struct ibv_srq *srq;
	struct ibv_qp_cap cap;
	int qp_type, sq_sig_all;
};

struct ibv_qp {
	struct ibv_context *context;
	void *qp_context;
	struct ibv_pd *pd;
	struct ibv_cq *send_cq, *recv_cq;
	struct ibv_srq *srq;
	uint32_t handle, qp_num;
	int state, qp_type;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	uint32_t events_completed;
};

struct ibv_ah_attr {
	struct {
		union ibv_gid dgid;
		uint32_t flow_label;
		uint8_t sgid_index, hop_limit, traffic_class;
	} grh;
	uint16_t dlid;
	uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct ibv_ah {
	struct ibv_context *context;
	struct ibv_pd *pd;
	uint32_t handle;
};

struct ibv_qp_attr {
	int qp_state, cur_qp_state, path_mtu, path_mig_state;
	uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
	int qp_access_flags;
	struct ibv_qp_cap cap;
	struct ibv_ah_attr ah_attr, alt_ah_attr;
	uint16_t pkey_index, alt_pkey_index;
	uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num,
		timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout;
};

struct ibv_async_event {
	union {
		struct ibv_cq *cq;
		struct ibv_qp *qp;
		struct ibv_srq *srq;
		int port_num;
	} element;
	int event_type;
};

/* Programs of 1.0 are bound to these versions; a linker of today would bind to
 * later ones where there are any. */
#define AT_1_0(result, name, ...)                                \
	__asm__(".symver " #name "," #name "@IBVERBS_1.0"); \
	extern result name(__VA_ARGS__)

AT_1_0(struct ibv_device **, ibv_get_device_list, int *);
AT_1_0(void, ibv_free_device_list, struct ibv_device **);
AT_1_0(const char *, ibv_get_device_name, struct ibv_device *);
AT_1_0(uint64_t, ibv_get_device_guid, struct ibv_device *);
AT_1_0(struct ibv_context *, ibv_open_device, struct ibv_device *);
AT_1_0(int, ibv_close_device, struct ibv_context *);
AT_1_0(int, ibv_get_async_event, struct ibv_context *, struct ibv_async_event *);
AT_1_0(void, ibv_ack_async_event, struct ibv_async_event *);
AT_1_0(int, ibv_query_device, struct ibv_context *, struct ibv_device_attr *);
AT_1_0(int, ibv_query_port, struct ibv_context *, uint8_t, struct ibv_port_attr *);
AT_1_0(int, ibv_query_gid, struct ibv_context *, uint8_t, int, union ibv_gid *);
AT_1_0(int, ibv_query_pkey, struct ibv_context *, uint8_t, int, uint16_t *);
AT_1_0(struct ibv_pd *, ibv_alloc_pd, struct ibv_context *);
AT_1_0(int, ibv_dealloc_pd, struct ibv_pd *);
AT_1_0(struct ibv_mr *, ibv_reg_mr, struct ibv_pd *, void *, size_t, int);
AT_1_0(int, ibv_dereg_mr, struct ibv_mr *);
AT_1_0(struct ibv_comp_channel *, ibv_create_comp_channel, struct ibv_context *);
AT_1_0(int, ibv_destroy_comp_channel, struct ibv_comp_channel *);
AT_1_0(struct ibv_cq *, ibv_create_cq, struct ibv_context *, int, void *, struct ibv_comp_channel *, int);
AT_1_0(int, ibv_resize_cq, struct ibv_cq *, int);
AT_1_0(int, ibv_destroy_cq, struct ibv_cq *);
AT_1_0(int, ibv_get_cq_event, struct ibv_comp_channel *, struct ibv_cq **, void **);
AT_1_0(void, ibv_ack_cq_events, struct ibv_cq *, unsigned int);
AT_1_0(struct ibv_srq *, ibv_create_srq, struct ibv_pd *, struct ibv_srq_init_attr *);
AT_1_0(int, ibv_modify_srq, struct ibv_srq *, struct ibv_srq_attr *, int);
AT_1_0(int, ibv_query_srq, struct ibv_srq *, struct ibv_srq_attr *);
AT_1_0(int, ibv_destroy_srq, struct ibv_srq *);
AT_1_0(struct ibv_qp *, ibv_create_qp, struct ibv_pd *, struct ibv_qp_init_attr *);
AT_1_0(int, ibv_modify_qp, struct ibv_qp *, struct ibv_qp_attr *, int);
AT_1_0(int, ibv_query_qp, struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *);
AT_1_0(int, ibv_destroy_qp, struct ibv_qp *);
AT_1_0(struct ibv_ah *, ibv_create_ah, struct ibv_pd *, struct ibv_ah_attr *);
AT_1_0(int, ibv_destroy_ah, struct ibv_ah *);
AT_1_0(int, ibv_attach_mcast, struct ibv_qp *, union ibv_gid *, uint16_t);
AT_1_0(int, ibv_detach_mcast, struct ibv_qp *, union ibv_gid *, uint16_t);
