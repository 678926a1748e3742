/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Formats of the queues between a program and a card, as provider/queues has them in Rust
 * (provider/queues/tests/header.rs holds the two together). Little-endian, without padding. A board reads
 * WQEs and writes CQEs in this form.
 *
 * Values: enum ibv_wr_opcode, ibv_send_flags, ibv_wc_status, ibv_wc_opcode,
 * ibv_wc_flags of <infiniband/verbs.h>.
 */
#ifndef STARVERBS_QUEUES_H
#define STARVERBS_QUEUES_H

#include <linux/types.h>

/* Send WQEs are made of blocks of so many bytes. */
#define STARVERBS_BLOCK 64

/* One piece of local memory. */
struct starverbs_sge {
	__u64 addr;
	__u32 len;
	__u32 lkey;
};

/* The first block of a send WQE; SGEs, or inline bytes, fill the blocks behind it. */
struct starverbs_send_wqe {
	__u64 wr_id;
	__u64 remote_addr;	/* bind: the window's first byte */
	__u64 compare_add;	/* bind, FLUSH: bytes */
	__u64 swap;
	__u32 rkey;		/* bind: the window's new key; LOCAL_INV: the key to invalidate */
	__u32 imm;		/* network order; SEND_WITH_INV: the peer's key; bind: the MR's key; FLUSH: FETH */
	__u32 length;		/* of all SGEs, or inline */
	__u32 remote_qpn;	/* UD; XRC: the peer's SRQ; bind: a key of the window */
	__u32 qkey;		/* UD; bind: access rights */
	__u32 av;		/* UD: number of the address vector */
	__u8 op;
	__u8 flags;
	__u16 num_sge;		/* 0: inline */
	__u16 blocks;		/* of the whole WQE, this one included */
	__u16 reserved;
};

/* A receive WQE; SGEs stand behind it. */
struct starverbs_recv_wqe {
	__u64 wr_id;
	__u32 num_sge;
	__u32 reserved;
};

/* What a program tells a device of a QP's queues, or an SRQ's: a cache line that the program alone writes. */
struct starverbs_program_index {
	__u32 send_posted;	/* WQEs so far, modulo 2^32 */
	__u32 recv_posted;
	__u32 reserved[14];
};

/*
 * What a device tells the program: a cache line that the device alone writes, with whatever it likes. It is
 * all that a device writes of a QP's queues, or an SRQ's: in front of the program's line are pointers.
 */
struct starverbs_card_index {
	__u32 send_released;	/* WQEs whose slots may be written again */
	__u32 recv_taken;
	__u32 recv_starved;	/* looks for a receive WQE that found none: a change asks for a doorbell */
	__u32 own[13];		/* the device's */
};

/* A completion. */
struct starverbs_cqe {
	__u64 wr_id;
	__u32 byte_len;
	__u32 imm;		/* network order; an invalidated key: host order */
	__u32 qpn;
	__u32 src_qp;		/* matched tag: its high half */
	__u32 vendor_err;	/* matched tag: its low half */
	__u8 status;
	__u8 opcode;
	__u8 flags;
	__u8 sl;
};

#endif
