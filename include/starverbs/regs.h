/* SPDX-License-Identifier: ((GPL-2.0 WITH Linux-syscall-note) OR MIT) */
/*
 * Registers of a board (BAR 0) and cells of its doorbell page (BAR 2), as provider/queues has them in Rust
 * (provider/queues/tests/board.rs compiles this file against it). docs/board.md has the rules.
 */
#ifndef STARVERBS_REGS_H
#define STARVERBS_REGS_H

/* BAR of the registers */
#define STARVERBS_BAR_CONTROL 0
/* BAR of the doorbell cells */
#define STARVERBS_BAR_DOORBELLS 2
/* BAR of the MSI-X table */
#define STARVERBS_BAR_MSIX 4

/* PCI vendor while boards are being made; a maker puts in its own */
#define STARVERBS_PCI_VENDOR 0x1234
/* PCI device, the same */
#define STARVERBS_PCI_DEVICE 0x5354
/* PCI class: a network controller of no other kind */
#define STARVERBS_PCI_CLASS 0x028000

/* Bytes of the registers */
#define STARVERBS_CONTROL_BYTES 4096

/* STARVERBS_MAGIC */
#define STARVERBS_REG_MAGIC 0x000
/* STARVERBS_VERSION: major in the high half */
#define STARVERBS_REG_VERSION 0x004
/* 64 bits, STARVERBS_CAP_*: what the board takes */
#define STARVERBS_REG_CAPS 0x008
/* STARVERBS_CTRL_* */
#define STARVERBS_REG_CONTROL 0x010
/* STARVERBS_STATUS_* */
#define STARVERBS_REG_STATUS 0x014
/* Errno of the last error that no command reports; writing anything clears it */
#define STARVERBS_REG_ERROR 0x018
/* Cells of a context's doorbell page */
#define STARVERBS_REG_CELLS 0x01c
/* 64 bits: DMA address of the command queue */
#define STARVERBS_REG_COMMANDS 0x020
/* log2 of its commands */
#define STARVERBS_REG_COMMANDS_LOG 0x028
/* Commands posted so far, modulo 2^32: a write has the board take what is new */
#define STARVERBS_REG_COMMANDS_TAIL 0x02c
/* Commands done so far, modulo 2^32 */
#define STARVERBS_REG_COMMANDS_HEAD 0x030
/* Interrupt vectors */
#define STARVERBS_REG_VECTORS 0x034
/* 64 bits: DMA address of the event queue */
#define STARVERBS_REG_EVENTS 0x038
/* log2 of its entries */
#define STARVERBS_REG_EVENTS_LOG 0x040
/* Contexts, with a doorbell page each: page i begins at i * REG_CELLS * STARVERBS_CELL_BYTES of its BAR */
#define STARVERBS_REG_CONTEXTS 0x044
/* QP contexts for which the board has room on chip; 0: for all */
#define STARVERBS_REG_QPC_ENTRIES 0x048
/* STARVERBS_QPC_POLICY_*: how requests for contexts are served */
#define STARVERBS_REG_QPC_POLICY 0x04c
/* STARVERBS_QPC_IN_*: where the other contexts are */
#define STARVERBS_REG_QPC_PLACEMENT 0x050
/* 64 bits: DMA address of memory for QP contexts (STARVERBS_CAP_QPC_HOST); 0: there is none */
#define STARVERBS_REG_QPC_MEMORY 0x058
/* log2 of the contexts that it holds, of STARVERBS_QPC_BYTES each */
#define STARVERBS_REG_QPC_MEMORY_LOG 0x060
/* The first of STARVERBS_COUNTERS counters of 64 bits */
#define STARVERBS_REG_COUNTERS 0x100

/* Doorbell cells that were found changed */
#define STARVERBS_COUNTER_DOORBELLS 0
/* Send WQEs fetched */
#define STARVERBS_COUNTER_SEND_FETCHES 1
/* Receive WQEs fetched */
#define STARVERBS_COUNTER_RECV_FETCHES 2
/* CQEs written */
#define STARVERBS_COUNTER_CQE_WRITES 3
/* Events written */
#define STARVERBS_COUNTER_EVENT_WRITES 4
/* Interrupts raised */
#define STARVERBS_COUNTER_INTERRUPTS 5
/* Pieces of program memory read */
#define STARVERBS_COUNTER_DMA_READS 6
/* Pieces of program memory written */
#define STARVERBS_COUNTER_DMA_WRITES 7
/* Accesses to memory that is not mapped, or not for that */
#define STARVERBS_COUNTER_DMA_MISSES 8
/* Commands done */
#define STARVERBS_COUNTER_COMMANDS 9
/* Commands refused */
#define STARVERBS_COUNTER_COMMANDS_REFUSED 10
/* Indices that no queue can have, and WQEs that contradict themselves */
#define STARVERBS_COUNTER_MALFORMED 11
/* Requests for QP contexts that were on chip; this and those that follow are the whole board's */
#define STARVERBS_COUNTER_QPC_HITS 12
/* Requests for QP contexts that were not */
#define STARVERBS_COUNTER_QPC_MISSES 13
/* Requests that waited behind others of their queue pair */
#define STARVERBS_COUNTER_QPC_WAITED 14
/* QP contexts that were fetched while their WQEs were */
#define STARVERBS_COUNTER_QPC_PREFETCHED 15
/* QP contexts that made room for others */
#define STARVERBS_COUNTER_QPC_EVICTED 16

/* Counters */
#define STARVERBS_COUNTERS 17

/* "STAR" */
#define STARVERBS_MAGIC 0x52415453

/* Version of this contract */
#define STARVERBS_VERSION 0x00010004

/* RC, UC and UD, with PDs, MRs, AHs, CQs and SRQs */
#define STARVERBS_CAP_VERBS 1ULL
/* XRC: queue pairs and SRQs of a domain */
#define STARVERBS_CAP_XRC (1ULL << 1)
/* StaR: queue pairs that may be ends of its connections */
#define STARVERBS_CAP_STAR (1ULL << 2)
/* StRoM: kernels of the board's, and queue pairs that speak its dialect */
#define STARVERBS_CAP_STROM (1ULL << 3)
/* 1RMA: reserved */
#define STARVERBS_CAP_RMA (1ULL << 4)
/* Memory windows */
#define STARVERBS_CAP_WINDOWS (1ULL << 8)
/* Multicast groups */
#define STARVERBS_CAP_MULTICAST (1ULL << 9)
/* Regions of many pieces, by a translation table */
#define STARVERBS_CAP_MTT (1ULL << 10)
/* Doorbells of csRNA's form {operation, SQ offset, count, QPN}, in the last cell of a page */
#define STARVERBS_CAP_DOORBELL_OPS (1ULL << 11)
/* Completion queues are resized, and their events moderated */
#define STARVERBS_CAP_CQ_CHANGES (1ULL << 12)
/* Null regions */
#define STARVERBS_CAP_NULL (1ULL << 13)
/* Management datagrams: queue pair 1 */
#define STARVERBS_CAP_MADS (1ULL << 14)
/* QP contexts that are not on chip may be in the host's memory */
#define STARVERBS_CAP_QPC_HOST (1ULL << 15)

/* First come, first served: a context that is not there has all wait that come after */
#define STARVERBS_QPC_POLICY_FCFS 0
/* Other queue pairs pass one that waits for its context */
#define STARVERBS_QPC_POLICY_NON_BLOCKING 1
/* And a context is fetched while the WQEs of a doorbell are */
#define STARVERBS_QPC_POLICY_LATENCY_HIDING 2
/* Contexts are in memory of the host's, which STARVERBS_REG_QPC_MEMORY gives */
#define STARVERBS_QPC_IN_HOST 0
/* Contexts are in memory of the board's */
#define STARVERBS_QPC_IN_BOARD 1
/* Bytes of a context in the host's memory */
#define STARVERBS_QPC_BYTES 256

/* The board works: queue addresses are read when this is set */
#define STARVERBS_CTRL_ENABLE 1
/* Ends all objects and clears all registers; reads as 0 */
#define STARVERBS_CTRL_RESET 2

/* The board works */
#define STARVERBS_STATUS_ENABLED 1
/* The board cannot go on without a reset */
#define STARVERBS_STATUS_FAILED 2

/* Bytes of a doorbell cell */
#define STARVERBS_CELL_BYTES 8
/* Cell of the event queue: entries that the driver has taken so far, modulo 2^32, in the low half */
#define STARVERBS_CELL_EVENTS 0
/* Cells below this are no queue's */
#define STARVERBS_CELL_FIRST 1

/* Operation of a doorbell of csRNA's form: send WQEs were posted */
#define STARVERBS_DOORBELL_SEND 1
/* The same: receive WQEs were, as the program's index line says */
#define STARVERBS_DOORBELL_RECV 2
/* Its bits: the QPN from bit 0, of 24; from this one the operation, of 8 */
#define STARVERBS_DOORBELL_OP_SHIFT 24
/* From this one how many WQEs were posted, 16 bits */
#define STARVERBS_DOORBELL_COUNT_SHIFT 32
/* From this one the index of the first of them, modulo 2^16 */
#define STARVERBS_DOORBELL_OFFSET_SHIFT 48

#endif
