/* SPDX-License-Identifier: ((GPL-2.0 WITH Linux-syscall-note) OR MIT) */
/*
 * Commands and events of a board, and marks of its completions, as provider/queues has them in Rust
 * (provider/queues/tests/board.rs compiles this file against it). Little-endian, reserved bytes are 0.
 * docs/board.md has the rules.
 */
#ifndef STARVERBS_UAPI_H
#define STARVERBS_UAPI_H

#include <linux/types.h>

/* In the high half of a CQ's cell: only a solicited completion, or an error, raises the event */
#define STARVERBS_ARM_SOLICITED (1U << 31)

/* In the last byte of a CQE: the bit that changes with every round of the ring, 1 in the first */
#define STARVERBS_CQE_PHASE 0x80

/* Status of a command that is not done */
#define STARVERBS_PENDING 0xffffffffU

/* "None" where an object may be named */
#define STARVERBS_NONE 0xffffffffU

/* Event: a completion queue that was armed has a completion. Others are enum ibv_event_type */
#define STARVERBS_EVENT_COMPLETION 0x100

/* Event: a management datagram waits, where none did before */
#define STARVERBS_EVENT_MADS 0x101

/* Event: what a queue pair is of StaR may have changed */
#define STARVERBS_EVENT_STAR 0x102

/* Event: the peer of a queue pair speaks no StRoM, so that its RPC fails */
#define STARVERBS_EVENT_NO_DIALECT 0x103

/* Bytes of a management datagram */
#define STARVERBS_MAD_BYTES 256
/* Scope of a service: one address */
#define STARVERBS_SCOPE_ONE 0
/* Scope of a service: all of IPv4 */
#define STARVERBS_SCOPE_IPV4 1
/* Scope of a service: all of IPv6 */
#define STARVERBS_SCOPE_IPV6 2
/* Scope of a service: all addresses */
#define STARVERBS_SCOPE_ALL 3
/* Flag of a service: the same client may hold it several times, if each time is so */
#define STARVERBS_SERVICE_SHARED 1

/* Flag of a QP: every send makes a completion */
#define STARVERBS_QP_SIGNAL_ALL 1
/* Flag of a QP: what it sends to a multicast group does not come back to it */
#define STARVERBS_QP_BLOCK_LOOPBACK 2
/* Flag of a QP: it may become an end of a StaR connection, as its star says */
#define STARVERBS_QP_STAR 4
/* Flag of a QP: it speaks StRoM's dialect, and its answers is memory for answers of kernels */
#define STARVERBS_QP_RPC 8

/* Bytes of the memory for one answer */
#define STARVERBS_ANSWER_BYTES 4160
/* Answers of a QP at most */
#define STARVERBS_ANSWERS 64

/* What answers RPCs: the program, which gets them as receives */
#define STARVERBS_KERNEL_PROGRAM 0
/* The same: the kernel GET */
#define STARVERBS_KERNEL_GET 1
/* The same: traversal */
#define STARVERBS_KERNEL_TRAVERSE 2
/* The same: consistent read */
#define STARVERBS_KERNEL_CONSISTENT 3
/* The same: shuffle */
#define STARVERBS_KERNEL_SHUFFLE 4
/* The same: HyperLogLog */
#define STARVERBS_KERNEL_HLL 5
/* Flag of a kernel: it takes the place of what the op-code has */
#define STARVERBS_KERNEL_REPLACE 1

/* What a program wants of StaR: plain RC */
#define STARVERBS_STAR_OFF 0
/* The same: what the cards decide by their load */
#define STARVERBS_STAR_AUTO 1
/* The same, and what a queue pair is: the stateless end */
#define STARVERBS_STAR_STATELESS 2
/* The same, and what a queue pair is: the stateful end */
#define STARVERBS_STAR_STATEFUL 3
/* What a queue pair is: nothing yet */
#define STARVERBS_STAR_WAITING 0
/* What a queue pair is: plain RC */
#define STARVERBS_STAR_PLAIN 1

/* Flag of a CQ: a completion that finds it full is lost, and the queue goes on */
#define STARVERBS_CQ_IGNORE_OVERRUN 1

/* Answers struct starverbs_device_reply */
#define STARVERBS_OP_QUERY_DEVICE 0x01
/* struct starverbs_object, an index; answers struct starverbs_gid_reply */
#define STARVERBS_OP_QUERY_GID 0x02
/* struct starverbs_open_context, in context 0 alone; answers struct starverbs_number_reply: the context */
#define STARVERBS_OP_OPEN_CONTEXT 0x03
/* struct starverbs_object, a context, in context 0 alone: all that was made in it ends */
#define STARVERBS_OP_CLOSE_CONTEXT 0x04
/* Answers struct starverbs_number_reply */
#define STARVERBS_OP_ALLOC_PD 0x10
/* struct starverbs_object */
#define STARVERBS_OP_DEALLOC_PD 0x11
/* struct starverbs_region; answers struct starverbs_number_reply: its key */
#define STARVERBS_OP_REG_MR 0x20
/* struct starverbs_region, with its key */
#define STARVERBS_OP_REREG_MR 0x21
/* struct starverbs_object, a key. The memory is out of reach when this is done */
#define STARVERBS_OP_DEREG_MR 0x22
/* struct starverbs_object, a key; answers struct starverbs_region */
#define STARVERBS_OP_QUERY_MR 0x23
/*
 * struct starverbs_object, a protection domain; answers struct starverbs_number_reply: the key of a
 * region without memory
 */
#define STARVERBS_OP_ALLOC_NULL_MR 0x24
/* struct starverbs_window; answers struct starverbs_number_reply: its first key */
#define STARVERBS_OP_ALLOC_MW 0x28
/* struct starverbs_object, any key that it ever had */
#define STARVERBS_OP_DEALLOC_MW 0x29
/* struct starverbs_address_handle; answers struct starverbs_number_reply */
#define STARVERBS_OP_CREATE_AH 0x30
/* struct starverbs_object */
#define STARVERBS_OP_DESTROY_AH 0x31
/* struct starverbs_create_cq; answers struct starverbs_number_reply */
#define STARVERBS_OP_CREATE_CQ 0x40
/* struct starverbs_object */
#define STARVERBS_OP_DESTROY_CQ 0x41
/*
 * struct starverbs_resize_cq; answers struct starverbs_number_reply: entries that were written in all
 * where it lay before
 */
#define STARVERBS_OP_RESIZE_CQ 0x42
/* struct starverbs_modify_cq */
#define STARVERBS_OP_MODIFY_CQ 0x43
/* struct starverbs_create_srq; answers struct starverbs_number_reply */
#define STARVERBS_OP_CREATE_SRQ 0x50
/* struct starverbs_srq_limit */
#define STARVERBS_OP_MODIFY_SRQ 0x51
/* struct starverbs_object; answers struct starverbs_srq_limit */
#define STARVERBS_OP_QUERY_SRQ 0x52
/* struct starverbs_object */
#define STARVERBS_OP_DESTROY_SRQ 0x53
/* struct starverbs_create_qp; answers struct starverbs_number_reply: its QPN */
#define STARVERBS_OP_CREATE_QP 0x60
/* struct starverbs_modify_qp */
#define STARVERBS_OP_MODIFY_QP 0x61
/* struct starverbs_object; answers struct starverbs_modify_qp */
#define STARVERBS_OP_QUERY_QP 0x62
/* struct starverbs_object */
#define STARVERBS_OP_DESTROY_QP 0x63
/* struct starverbs_group: what is sent to the group reaches the queue pair */
#define STARVERBS_OP_ATTACH_GROUP 0x64
/* struct starverbs_group */
#define STARVERBS_OP_DETACH_GROUP 0x65
/*
 * Answers struct starverbs_number_reply: the upper 12 bits of the communication IDs that the client gives
 * out. From then on it gets management datagrams
 */
#define STARVERBS_OP_OPEN_MADS 0x70
/* struct starverbs_mad: to queue pair 1 at an address */
#define STARVERBS_OP_SEND_MAD 0x71
/*
 * struct starverbs_mad, of which the address is 0; answers struct starverbs_mad: the oldest that
 * waits. ENODATA: none does
 */
#define STARVERBS_OP_RECEIVE_MAD 0x72
/*
 * struct starverbs_service: requests for it come here. EADDRINUSE, EADDRNOTAVAIL: somebody holds it,
 * or a part of it
 */
#define STARVERBS_OP_CLAIM_SERVICE 0x73
/* struct starverbs_service */
#define STARVERBS_OP_RELEASE_SERVICE 0x74
/* struct starverbs_create_xrc_srq; answers struct starverbs_number_reply, by which requests name it */
#define STARVERBS_OP_CREATE_XRC_SRQ 0x100
/*
 * struct starverbs_star_role: what the program of a queue pair wants it to be from now on. EOPNOTSUPP: its
 * peer has no StaR
 */
#define STARVERBS_OP_STAR_SET_ROLE 0x200
/* struct starverbs_object, a QPN; answers struct starverbs_star_reply */
#define STARVERBS_OP_STAR_QUERY 0x201
/* struct starverbs_rpc_kernel: it answers RPCs of its op-code from now on. EBUSY: another does */
#define STARVERBS_OP_LOAD_KERNEL 0x300
/* struct starverbs_rpc_kernel, of which domain and op-code count */
#define STARVERBS_OP_UNLOAD_KERNEL 0x301
/* From here on: 1RMA */
#define STARVERBS_OP_RMA 0x400

/* Bytes of a command, head and body */
#define STARVERBS_COMMAND_BYTES 128

/* The head of a command; its body, and then its answer, stands behind it */
struct starverbs_command_head {
	__u16 op;	/* STARVERBS_OP_* */
	__u16 context;	/* Whose it is: a kernel puts that in, its programs cannot */
	__u32 status;	/* STARVERBS_PENDING, until the board stores 0 or an errno, behind the answer */
};

/* What names one object */
struct starverbs_object {
	__u32 number;	/* Number or key */
	__u32 reserved;
};

/* What was made */
struct starverbs_number_reply {
	__u32 number;	/* Number or key */
	__u32 cell;	/* Its doorbell cell; 0: it has none */
};

/* The board and its port */
struct starverbs_device_reply {
	__u64 guid;	/* GUID of the node, host order */
	__u32 max_qp;	/* Queue pairs */
	__u32 max_qp_wr;	/* WQEs of a queue */
	__u32 max_sge;	/* SGEs of a WQE */
	__u32 max_inline;	/* Inline bytes of a WQE */
	__u32 max_cq;	/* Completion queues */
	__u32 max_cqe;	/* Entries of a completion queue */
	__u32 max_mr;	/* Memory regions */
	__u32 max_mw;	/* Memory windows */
	__u32 max_pd;	/* Protection domains */
	__u32 max_ah;	/* Address handles */
	__u32 max_srq;	/* Shared receive queues */
	__u32 max_rd_atomic;	/* READs and atomics outstanding, either way */
	__u32 gids;	/* Entries of the GID table that are in use */
	__u8 active_mtu;	/* enum ibv_mtu of the port */
	__u8 port_state;	/* enum ibv_port_state */
	__u8 reserved[2];
	__u32 max_groups;	/* Multicast groups */
	__u32 max_group_qps;	/* Queue pairs of a group */
};

/* An entry of the GID table */
struct starverbs_gid_reply {
	__u8 gid[16];	/* The GID */
	__u32 ifindex;	/* Index of its network interface on the board's host; 0: none */
	__u32 link_mtu;	/* Bytes that its link carries */
	__u8 name[16];	/* Its name, up to the first 0 */
};

/* A context */
struct starverbs_open_context {
	__u64 events;	/* DMA address of its event queue */
	__u32 events_log;	/* log2 of the entries */
	__u32 vector;	/* Interrupt vector of its events */
};

/* A region of memory */
struct starverbs_region {
	__u32 key;	/* Its key, where it has one */
	__u32 pd;	/* Protection domain */
	__u32 access;	/* enum ibv_access_flags */
	__u32 pieces;	/* Entries of the translation table, __u64: DMA addresses of its pages; 0: it is one piece */
	__u64 addr;	/* DMA address of the first byte, or of the translation table */
	__u64 length;	/* Bytes */
	__u64 iova;	/* Address by which SGEs and peers know the first byte */
	__u32 page_log;	/* log2 of the bytes of a page, 12 to 30, where there is a table */
	__u32 offset;	/* Where in the first page the first byte is */
};

/* A memory window */
struct starverbs_window {
	__u32 pd;	/* Protection domain */
	__u32 kind;	/* enum ibv_mw_type */
};

/* Where frames go */
struct starverbs_address {
	__u8 dgid[16];	/* GID of the destination */
	__u8 sgid[16];	/* Source: one of the port's GIDs */
	__u32 flow_label;	/* IPv6 flow label */
	__u16 dlid;	/* Kept for queries */
	__u8 sgid_index;	/* Index of the source in the port's table */
	__u8 hop_limit;	/* IPv4 TTL, IPv6 hop limit */
	__u8 traffic_class;	/* IPv4 TOS, IPv6 traffic class */
	__u8 sl;	/* Service level */
	__u8 static_rate;	/* Kept for queries */
	__u8 src_path_bits;	/* Kept for queries */
};

/* An address handle */
struct starverbs_address_handle {
	__u32 pd;	/* Protection domain */
	struct starverbs_address address;	/* Where frames go */
};

/* A completion queue */
struct starverbs_create_cq {
	__u64 entries;	/* DMA address of the entries, all zero */
	__u64 taken;	/* DMA address of a word of 32 bits: entries that the program has taken so far, modulo 2^32 */
	__u32 log;	/* log2 of the entries */
	__u32 flags;	/* STARVERBS_CQ_* */
};

/* Another place of a completion queue */
struct starverbs_resize_cq {
	__u64 entries;	/* DMA address of the entries, all zero */
	__u64 taken;	/* DMA address of a word of 32 bits: of those, entries that the program has taken so far */
	__u32 cq;	/* Number of the queue */
	__u32 log;	/* log2 of the entries */
};

/* How a completion queue's events are moderated: struct ibv_moderate_cq */
struct starverbs_modify_cq {
	__u32 cq;	/* Number of the queue */
	__u16 count;	/* Completions that make an event; 0: any number */
	__u16 period;	/* Microseconds after the first of them that an event comes at the latest; 0: it waits */
};

/* The work queues of a QP, or the receive queue of an SRQ */
struct starverbs_queues {
	__u64 program;	/* DMA address of the program's index line (struct starverbs_program_index) */
	__u64 card;	/* DMA address of the card's index line (struct starverbs_card_index) */
	__u64 send;	/* DMA address of the send slots */
	__u64 recv;	/* DMA address of the receive slots */
	__u16 send_stride;	/* Bytes of a send slot, whole blocks; 0: there is no send queue */
	__u16 send_sge;	/* Most SGEs of a send WQE */
	__u16 recv_stride;	/* Bytes of a receive slot; 0: there is no receive queue */
	__u16 recv_sge;	/* Most SGEs of a receive WQE */
	__u8 send_log;	/* log2 of the send slots */
	__u8 recv_log;	/* log2 of the receive slots */
	__u8 reserved[6];
};

/* A shared receive queue */
struct starverbs_create_srq {
	struct starverbs_queues queues;	/* Where it lies */
	__u32 pd;	/* Protection domain */
	__u32 limit;	/* An event when fewer receives are left; 0: none */
};

/* A shared receive queue of an XRC domain */
struct starverbs_create_xrc_srq {
	struct starverbs_queues queues;	/* Where it lies */
	__u32 pd;	/* Protection domain of its memory */
	__u32 domain;	/* The XRC domain: a protection domain in which nothing else is but XRC's */
	__u32 cq;	/* Where its receives complete */
	__u32 reserved;
};

/* The limit of a shared receive queue */
struct starverbs_srq_limit {
	__u32 srq;	/* Number of the queue */
	__u32 limit;	/* An event when fewer receives are left; 0: none */
};

/* A queue pair */
struct starverbs_create_qp {
	struct starverbs_queues queues;	/* Where its queues lie */
	__u32 pd;	/* Protection domain; of one that receives for XRC its XRC domain */
	__u32 send_cq;	/* Completions of sends */
	__u32 recv_cq;	/* Completions of receives */
	__u32 srq;	/* Where receives come from; STARVERBS_NONE: a queue of its own */
	__u8 kind;	/* enum ibv_qp_type */
	__u8 flags;	/* STARVERBS_QP_* */
	__u8 star;	/* With STARVERBS_QP_STAR: what the program wants it to be, STARVERBS_STAR_* */
	__u8 answer_slots;	/* With STARVERBS_QP_RPC: answers that there is room for */
	__u8 reserved[4];
	__u64 answers;	/* With STARVERBS_QP_RPC: DMA address of their memory, STARVERBS_ANSWER_BYTES each */
};

/* Attributes of a queue pair: struct ibv_qp_attr */
struct starverbs_qp_attr {
	__u8 state;	/* enum ibv_qp_state */
	__u8 cur_state;	/* The state that the program believes it is in */
	__u8 path_mtu;	/* enum ibv_mtu */
	__u8 path_mig;	/* enum ibv_mig_state */
	__u32 qkey;	/* UD: Q_Key */
	__u32 rq_psn;	/* PSN of the first request expected */
	__u32 sq_psn;	/* PSN of the first request sent */
	__u32 dest_qpn;	/* QPN of the peer */
	__u32 access;	/* enum ibv_access_flags */
	__u16 pkey_index;	/* Index in the P_Key table */
	__u8 port_num;	/* Port */
	__u8 max_rd_atomic;	/* READs and atomics outstanding as requester */
	__u8 max_dest_rd_atomic;	/* The same as responder */
	__u8 min_rnr_timer;	/* RNR NAK timer code */
	__u8 timeout;	/* Local ACK timeout code */
	__u8 retry_cnt;	/* Transport retries */
	__u8 rnr_retry;	/* RNR retries; 7: for ever */
	__u8 en_sqd_async_notify;	/* SQD: an event when drained */
	__u8 sq_draining;	/* The send queue is draining */
	__u8 reserved;
	struct starverbs_address address;	/* The path */
};

/* A change of a queue pair */
struct starverbs_modify_qp {
	__u32 qpn;	/* Its number */
	__u32 mask;	/* enum ibv_qp_attr_mask */
	struct starverbs_qp_attr attr;	/* The attributes */
};

/* What a program wants of StaR */
struct starverbs_star_role {
	__u32 qpn;	/* The queue pair */
	__u32 role;	/* What it is to be: STARVERBS_STAR_* */
};

/* What has become of a queue pair */
struct starverbs_star_reply {
	__u32 preference;	/* What its program wants it to be: STARVERBS_STAR_* */
	__u32 role;	/* What it is: STARVERBS_STAR_* */
	__u64 card_bytes;	/* Bytes that the board keeps of it on chip */
	__u64 host_bytes;	/* Bytes that are kept of it elsewhere because of that */
};

/* What answers RPCs of an op-code on queue pairs of a protection domain */
struct starverbs_rpc_kernel {
	__u64 op;	/* The RPC op-code; 2^64 - 1: all that have nothing else */
	__u32 pd;	/* Protection domain */
	__u32 kernel;	/* STARVERBS_KERNEL_* */
	__u32 flags;	/* STARVERBS_KERNEL_REPLACE */
	__u32 reserved;
};

/* A queue pair in a multicast group */
struct starverbs_group {
	__u8 gid[16];	/* GID of the group */
	__u32 qpn;	/* The queue pair */
	__u32 reserved;
};

/* A management datagram */
struct starverbs_mad {
	__u64 addr;	/* DMA address of its STARVERBS_MAD_BYTES bytes: where they are read, or written */
	struct starverbs_address address;	/* Where it goes; of one that came: from dgid to sgid */
	__u32 reserved;
};

/* A service of the connection manager */
struct starverbs_service {
	__u64 id;	/* Service ID, host order */
	__u8 gid[16];	/* Of STARVERBS_SCOPE_ONE: the address */
	__u32 scope;	/* STARVERBS_SCOPE_*: the addresses that it is for */
	__u32 flags;	/* STARVERBS_SERVICE_* */
};

/* An entry of the event queue */
struct starverbs_event {
	__u32 kind;	/* STARVERBS_EVENT_*, or enum ibv_event_type */
	__u32 number;	/* Number of the object */
	__u32 reserved;
	__u32 valid;	/* Number of the event, counted from 1, modulo 2^32: stored last */
};

#if defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
_Static_assert(sizeof(struct starverbs_command_head) == 8, "starverbs_command_head");
_Static_assert(sizeof(struct starverbs_object) == 8, "starverbs_object");
_Static_assert(sizeof(struct starverbs_number_reply) == 8, "starverbs_number_reply");
_Static_assert(sizeof(struct starverbs_device_reply) == 72, "starverbs_device_reply");
_Static_assert(sizeof(struct starverbs_gid_reply) == 40, "starverbs_gid_reply");
_Static_assert(sizeof(struct starverbs_open_context) == 16, "starverbs_open_context");
_Static_assert(sizeof(struct starverbs_region) == 48, "starverbs_region");
_Static_assert(sizeof(struct starverbs_window) == 8, "starverbs_window");
_Static_assert(sizeof(struct starverbs_address) == 44, "starverbs_address");
_Static_assert(sizeof(struct starverbs_address_handle) == 48, "starverbs_address_handle");
_Static_assert(sizeof(struct starverbs_create_cq) == 24, "starverbs_create_cq");
_Static_assert(sizeof(struct starverbs_resize_cq) == 24, "starverbs_resize_cq");
_Static_assert(sizeof(struct starverbs_modify_cq) == 8, "starverbs_modify_cq");
_Static_assert(sizeof(struct starverbs_queues) == 48, "starverbs_queues");
_Static_assert(sizeof(struct starverbs_create_srq) == 56, "starverbs_create_srq");
_Static_assert(sizeof(struct starverbs_create_xrc_srq) == 64, "starverbs_create_xrc_srq");
_Static_assert(sizeof(struct starverbs_srq_limit) == 8, "starverbs_srq_limit");
_Static_assert(sizeof(struct starverbs_create_qp) == 80, "starverbs_create_qp");
_Static_assert(sizeof(struct starverbs_qp_attr) == 80, "starverbs_qp_attr");
_Static_assert(sizeof(struct starverbs_modify_qp) == 88, "starverbs_modify_qp");
_Static_assert(sizeof(struct starverbs_star_role) == 8, "starverbs_star_role");
_Static_assert(sizeof(struct starverbs_star_reply) == 24, "starverbs_star_reply");
_Static_assert(sizeof(struct starverbs_rpc_kernel) == 24, "starverbs_rpc_kernel");
_Static_assert(sizeof(struct starverbs_group) == 24, "starverbs_group");
_Static_assert(sizeof(struct starverbs_mad) == 56, "starverbs_mad");
_Static_assert(sizeof(struct starverbs_service) == 32, "starverbs_service");
_Static_assert(sizeof(struct starverbs_event) == 16, "starverbs_event");
#endif

#endif
