//! The board's registers, commands and events: what its driver and its gateware agree on beside the queues.
//!
//! `include/starverbs/regs.h` and `include/starverbs/uapi.h` have the same for C (`tests/board.rs` compiles
//! them against these types), docs/board.md has the rules. All numbers are little-endian, all reserved bytes
//! are 0.

use core::mem::size_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

constants! {
    /// BAR of the registers
    "STARVERBS_BAR_CONTROL" BAR_CONTROL: u32 = 0;
    /// BAR of the doorbell cells
    "STARVERBS_BAR_DOORBELLS" BAR_DOORBELLS: u32 = 2;
    /// BAR of the MSI-X table
    "STARVERBS_BAR_MSIX" BAR_MSIX: u32 = 4;
    /// PCI vendor while boards are being made; a maker puts in its own
    "STARVERBS_PCI_VENDOR" PCI_VENDOR: u32 = 0x1234;
    /// PCI device, the same
    "STARVERBS_PCI_DEVICE" PCI_DEVICE: u32 = 0x5354;
    /// PCI class: a network controller of no other kind
    "STARVERBS_PCI_CLASS" PCI_CLASS: u32 = 0x02_80_00;

    /// Bytes of the registers
    "STARVERBS_CONTROL_BYTES" CONTROL_BYTES: u32 = 4096;

    /// Reads as [`MAGIC`]
    "STARVERBS_REG_MAGIC" REG_MAGIC: u32 = 0x000;
    /// [`VERSION`]: major in the high half
    "STARVERBS_REG_VERSION" REG_VERSION: u32 = 0x004;
    /// 64 bits, `CAP_*`: what the board takes
    "STARVERBS_REG_CAPS" REG_CAPS: u32 = 0x008;
    /// Bits of `CTRL_*`
    "STARVERBS_REG_CONTROL" REG_CONTROL: u32 = 0x010;
    /// Bits of `STATUS_*`
    "STARVERBS_REG_STATUS" REG_STATUS: u32 = 0x014;
    /// Errno of the last error that no command reports; writing anything clears it
    "STARVERBS_REG_ERROR" REG_ERROR: u32 = 0x018;
    /// Cells of a context's doorbell page
    "STARVERBS_REG_CELLS" REG_CELLS: u32 = 0x01c;
    /// 64 bits: DMA address of the command queue
    "STARVERBS_REG_COMMANDS" REG_COMMANDS: u32 = 0x020;
    /// log2 of its commands
    "STARVERBS_REG_COMMANDS_LOG" REG_COMMANDS_LOG: u32 = 0x028;
    /// Commands posted so far, modulo 2^32: a write has the board take what is new
    "STARVERBS_REG_COMMANDS_TAIL" REG_COMMANDS_TAIL: u32 = 0x02c;
    /// Commands done so far, modulo 2^32
    "STARVERBS_REG_COMMANDS_HEAD" REG_COMMANDS_HEAD: u32 = 0x030;
    /// Interrupt vectors
    "STARVERBS_REG_VECTORS" REG_VECTORS: u32 = 0x034;
    /// 64 bits: DMA address of the event queue
    "STARVERBS_REG_EVENTS" REG_EVENTS: u32 = 0x038;
    /// log2 of its entries
    "STARVERBS_REG_EVENTS_LOG" REG_EVENTS_LOG: u32 = 0x040;
    /// Contexts, with a doorbell page each: page i begins at i * [`REG_CELLS`] * [`CELL_BYTES`] of its BAR
    "STARVERBS_REG_CONTEXTS" REG_CONTEXTS: u32 = 0x044;
    /// QP contexts for which the board has room on chip; 0: for all
    "STARVERBS_REG_QPC_ENTRIES" REG_QPC_ENTRIES: u32 = 0x048;
    /// `QPC_POLICY_*`: how requests for contexts are served
    "STARVERBS_REG_QPC_POLICY" REG_QPC_POLICY: u32 = 0x04c;
    /// `QPC_IN_*`: where the other contexts are
    "STARVERBS_REG_QPC_PLACEMENT" REG_QPC_PLACEMENT: u32 = 0x050;
    /// 64 bits: DMA address of memory for QP contexts ([`CAP_QPC_HOST`]); 0: there is none
    "STARVERBS_REG_QPC_MEMORY" REG_QPC_MEMORY: u32 = 0x058;
    /// log2 of the contexts that it holds, of [`QPC_BYTES`] each
    "STARVERBS_REG_QPC_MEMORY_LOG" REG_QPC_MEMORY_LOG: u32 = 0x060;
    /// The first of [`COUNTERS`] counters of 64 bits
    "STARVERBS_REG_COUNTERS" REG_COUNTERS: u32 = 0x100;

    /// Doorbell cells that were found changed
    "STARVERBS_COUNTER_DOORBELLS" COUNTER_DOORBELLS: u32 = 0;
    /// Send WQEs fetched
    "STARVERBS_COUNTER_SEND_FETCHES" COUNTER_SEND_FETCHES: u32 = 1;
    /// Receive WQEs fetched
    "STARVERBS_COUNTER_RECV_FETCHES" COUNTER_RECV_FETCHES: u32 = 2;
    /// CQEs written
    "STARVERBS_COUNTER_CQE_WRITES" COUNTER_CQE_WRITES: u32 = 3;
    /// Events written
    "STARVERBS_COUNTER_EVENT_WRITES" COUNTER_EVENT_WRITES: u32 = 4;
    /// Interrupts raised
    "STARVERBS_COUNTER_INTERRUPTS" COUNTER_INTERRUPTS: u32 = 5;
    /// Pieces of program memory read
    "STARVERBS_COUNTER_DMA_READS" COUNTER_DMA_READS: u32 = 6;
    /// Pieces of program memory written
    "STARVERBS_COUNTER_DMA_WRITES" COUNTER_DMA_WRITES: u32 = 7;
    /// Accesses to memory that is not mapped, or not for that
    "STARVERBS_COUNTER_DMA_MISSES" COUNTER_DMA_MISSES: u32 = 8;
    /// Commands done
    "STARVERBS_COUNTER_COMMANDS" COUNTER_COMMANDS: u32 = 9;
    /// Commands refused
    "STARVERBS_COUNTER_COMMANDS_REFUSED" COUNTER_COMMANDS_REFUSED: u32 = 10;
    /// Indices that no queue can have, and WQEs that contradict themselves
    "STARVERBS_COUNTER_MALFORMED" COUNTER_MALFORMED: u32 = 11;
    /// Requests for QP contexts that were on chip; this and those that follow are the whole board's
    "STARVERBS_COUNTER_QPC_HITS" COUNTER_QPC_HITS: u32 = 12;
    /// Requests for QP contexts that were not
    "STARVERBS_COUNTER_QPC_MISSES" COUNTER_QPC_MISSES: u32 = 13;
    /// Requests that waited behind others of their queue pair
    "STARVERBS_COUNTER_QPC_WAITED" COUNTER_QPC_WAITED: u32 = 14;
    /// QP contexts that were fetched while their WQEs were
    "STARVERBS_COUNTER_QPC_PREFETCHED" COUNTER_QPC_PREFETCHED: u32 = 15;
    /// QP contexts that made room for others
    "STARVERBS_COUNTER_QPC_EVICTED" COUNTER_QPC_EVICTED: u32 = 16;
    /// How many counters there are
    "STARVERBS_COUNTERS" COUNTERS: u32 = 17;

    /// "STAR" in ASCII
    "STARVERBS_MAGIC" MAGIC: u32 = 0x5241_5453;
    /// Version of this contract
    "STARVERBS_VERSION" VERSION: u32 = 0x0001_0004;

    /// RC, UC and UD, with PDs, MRs, AHs, CQs and SRQs
    "STARVERBS_CAP_VERBS" CAP_VERBS: u64 = 1;
    /// XRC: queue pairs and SRQs of a domain
    "STARVERBS_CAP_XRC" CAP_XRC: u64 = 1 << 1;
    /// StaR: queue pairs that may be ends of its connections
    "STARVERBS_CAP_STAR" CAP_STAR: u64 = 1 << 2;
    /// StRoM: kernels of the board's, and queue pairs that speak its dialect
    "STARVERBS_CAP_STROM" CAP_STROM: u64 = 1 << 3;
    /// 1RMA: reserved
    "STARVERBS_CAP_RMA" CAP_RMA: u64 = 1 << 4;
    /// Memory windows
    "STARVERBS_CAP_WINDOWS" CAP_WINDOWS: u64 = 1 << 8;
    /// Multicast groups
    "STARVERBS_CAP_MULTICAST" CAP_MULTICAST: u64 = 1 << 9;
    /// Regions of many pieces, by a translation table
    "STARVERBS_CAP_MTT" CAP_MTT: u64 = 1 << 10;
    /// Doorbells of csRNA's form {operation, SQ offset, count, QPN}, in the last cell of a page
    "STARVERBS_CAP_DOORBELL_OPS" CAP_DOORBELL_OPS: u64 = 1 << 11;
    /// Completion queues are resized, and their events moderated
    "STARVERBS_CAP_CQ_CHANGES" CAP_CQ_CHANGES: u64 = 1 << 12;
    /// Null regions
    "STARVERBS_CAP_NULL" CAP_NULL: u64 = 1 << 13;
    /// Management datagrams: queue pair 1
    "STARVERBS_CAP_MADS" CAP_MADS: u64 = 1 << 14;
    /// QP contexts that are not on chip may be in the host's memory
    "STARVERBS_CAP_QPC_HOST" CAP_QPC_HOST: u64 = 1 << 15;

    /// First come, first served: a context that is not there has all wait that come after
    "STARVERBS_QPC_POLICY_FCFS" QPC_POLICY_FCFS: u32 = 0;
    /// Other queue pairs pass one that waits for its context
    "STARVERBS_QPC_POLICY_NON_BLOCKING" QPC_POLICY_NON_BLOCKING: u32 = 1;
    /// And a context is fetched while the WQEs of a doorbell are
    "STARVERBS_QPC_POLICY_LATENCY_HIDING" QPC_POLICY_LATENCY_HIDING: u32 = 2;
    /// Contexts are in memory of the host's, which [`REG_QPC_MEMORY`] gives
    "STARVERBS_QPC_IN_HOST" QPC_IN_HOST: u32 = 0;
    /// Contexts are in memory of the board's
    "STARVERBS_QPC_IN_BOARD" QPC_IN_BOARD: u32 = 1;
    /// Bytes of a context in the host's memory
    "STARVERBS_QPC_BYTES" QPC_BYTES: u32 = 256;

    /// The board works: queue addresses are read when this is set
    "STARVERBS_CTRL_ENABLE" CTRL_ENABLE: u32 = 1;
    /// Ends all objects and clears all registers; reads as 0
    "STARVERBS_CTRL_RESET" CTRL_RESET: u32 = 2;
    /// The board works
    "STARVERBS_STATUS_ENABLED" STATUS_ENABLED: u32 = 1;
    /// The board cannot go on without a reset
    "STARVERBS_STATUS_FAILED" STATUS_FAILED: u32 = 2;

    /// Bytes of a doorbell cell
    "STARVERBS_CELL_BYTES" CELL_BYTES: u32 = 8;
    /// Cell of the event queue: entries that the driver has taken so far, modulo 2^32, in the low half
    "STARVERBS_CELL_EVENTS" CELL_EVENTS: u32 = 0;
    /// Cells below this are no queue's
    "STARVERBS_CELL_FIRST" CELL_FIRST: u32 = 1;
    /// Operation of a doorbell of csRNA's form: send WQEs were posted
    "STARVERBS_DOORBELL_SEND" DOORBELL_SEND: u8 = 1;
    /// The same: receive WQEs were, as the program's index line says
    "STARVERBS_DOORBELL_RECV" DOORBELL_RECV: u8 = 2;
    /// Its bits: the QPN from bit 0, of 24; from this one the operation, of 8
    "STARVERBS_DOORBELL_OP_SHIFT" DOORBELL_OP_SHIFT: u32 = 24;
    /// From this one how many WQEs were posted, 16 bits
    "STARVERBS_DOORBELL_COUNT_SHIFT" DOORBELL_COUNT_SHIFT: u32 = 32;
    /// From this one the index of the first of them, modulo 2^16
    "STARVERBS_DOORBELL_OFFSET_SHIFT" DOORBELL_OFFSET_SHIFT: u32 = 48;
    /// In the high half of a CQ's cell: only a solicited completion, or an error, raises the event
    "STARVERBS_ARM_SOLICITED" ARM_SOLICITED: u32 = 1 << 31;
    /// In the last byte of a CQE: the bit that changes with every round of the ring, 1 in the first
    "STARVERBS_CQE_PHASE" CQE_PHASE: u8 = 0x80;

    /// Status of a command that is not done
    "STARVERBS_PENDING" PENDING: u32 = u32::MAX;
    /// "None" where an object may be named
    "STARVERBS_NONE" NONE: u32 = u32::MAX;
    /// Event: a completion queue that was armed has a completion. Others are `enum ibv_event_type`
    "STARVERBS_EVENT_COMPLETION" EVENT_COMPLETION: u32 = 0x100;
    /// Event: a management datagram waits, where none did before
    "STARVERBS_EVENT_MADS" EVENT_MADS: u32 = 0x101;
    /// Event: what a queue pair is of StaR may have changed
    "STARVERBS_EVENT_STAR" EVENT_STAR: u32 = 0x102;
    /// Event: the peer of a queue pair speaks no StRoM, so that its RPC fails
    "STARVERBS_EVENT_NO_DIALECT" EVENT_NO_DIALECT: u32 = 0x103;
    /// Bytes of a management datagram
    "STARVERBS_MAD_BYTES" MAD_BYTES: u32 = 256;
    /// Scope of a service: one address
    "STARVERBS_SCOPE_ONE" SCOPE_ONE: u32 = 0;
    /// Scope of a service: all of IPv4
    "STARVERBS_SCOPE_IPV4" SCOPE_IPV4: u32 = 1;
    /// Scope of a service: all of IPv6
    "STARVERBS_SCOPE_IPV6" SCOPE_IPV6: u32 = 2;
    /// Scope of a service: all addresses
    "STARVERBS_SCOPE_ALL" SCOPE_ALL: u32 = 3;
    /// Flag of a service: the same client may hold it several times, if each time is so
    "STARVERBS_SERVICE_SHARED" SERVICE_SHARED: u32 = 1;
    /// Flag of a QP: every send makes a completion
    "STARVERBS_QP_SIGNAL_ALL" QP_SIGNAL_ALL: u8 = 1;
    /// Flag of a QP: what it sends to a multicast group does not come back to it
    "STARVERBS_QP_BLOCK_LOOPBACK" QP_BLOCK_LOOPBACK: u8 = 2;
    /// Flag of a QP: it may become an end of a StaR connection, as `star` says
    "STARVERBS_QP_STAR" QP_STAR: u8 = 4;
    /// Flag of a QP: it speaks StRoM's dialect, and `answers` is memory for answers of kernels
    "STARVERBS_QP_RPC" QP_RPC: u8 = 8;
    /// Bytes of the memory for one answer
    "STARVERBS_ANSWER_BYTES" ANSWER_BYTES: u32 = 4160;
    /// Answers of a QP at most
    "STARVERBS_ANSWERS" MAX_ANSWERS: u32 = 64;
    /// What answers RPCs: the program, which gets them as receives
    "STARVERBS_KERNEL_PROGRAM" KERNEL_PROGRAM: u32 = 0;
    /// The same: the kernel GET
    "STARVERBS_KERNEL_GET" KERNEL_GET: u32 = 1;
    /// The same: traversal
    "STARVERBS_KERNEL_TRAVERSE" KERNEL_TRAVERSE: u32 = 2;
    /// The same: consistent read
    "STARVERBS_KERNEL_CONSISTENT" KERNEL_CONSISTENT: u32 = 3;
    /// The same: shuffle
    "STARVERBS_KERNEL_SHUFFLE" KERNEL_SHUFFLE: u32 = 4;
    /// The same: HyperLogLog
    "STARVERBS_KERNEL_HLL" KERNEL_HLL: u32 = 5;
    /// Flag of a kernel: it takes the place of what the op-code has
    "STARVERBS_KERNEL_REPLACE" KERNEL_REPLACE: u32 = 1;
    /// What a program wants of StaR: plain RC
    "STARVERBS_STAR_OFF" STAR_OFF: u32 = 0;
    /// The same: what the cards decide by their load
    "STARVERBS_STAR_AUTO" STAR_AUTO: u32 = 1;
    /// The same, and what a queue pair is: the stateless end
    "STARVERBS_STAR_STATELESS" STAR_STATELESS: u32 = 2;
    /// The same, and what a queue pair is: the stateful end
    "STARVERBS_STAR_STATEFUL" STAR_STATEFUL: u32 = 3;
    /// What a queue pair is: nothing yet
    "STARVERBS_STAR_WAITING" STAR_WAITING: u32 = 0;
    /// What a queue pair is: plain RC
    "STARVERBS_STAR_PLAIN" STAR_PLAIN: u32 = 1;
    /// Flag of a CQ: a completion that finds it full is lost, and the queue goes on
    "STARVERBS_CQ_IGNORE_OVERRUN" CQ_IGNORE_OVERRUN: u32 = 1;

    /// Answers [`DeviceReply`]
    "STARVERBS_OP_QUERY_DEVICE" OP_QUERY_DEVICE: u16 = 0x01;
    /// [`Object`], an index; answers [`GidReply`]
    "STARVERBS_OP_QUERY_GID" OP_QUERY_GID: u16 = 0x02;
    /// [`OpenContext`], in context 0 alone; answers [`NumberReply`]: the context, whose cell 0 is its events'
    "STARVERBS_OP_OPEN_CONTEXT" OP_OPEN_CONTEXT: u16 = 0x03;
    /// [`Object`], a context, in context 0 alone: all that was made in it ends
    "STARVERBS_OP_CLOSE_CONTEXT" OP_CLOSE_CONTEXT: u16 = 0x04;
    /// Answers [`NumberReply`]
    "STARVERBS_OP_ALLOC_PD" OP_ALLOC_PD: u16 = 0x10;
    /// Body: [`Object`]
    "STARVERBS_OP_DEALLOC_PD" OP_DEALLOC_PD: u16 = 0x11;
    /// [`Region`]; answers [`NumberReply`]: its key
    "STARVERBS_OP_REG_MR" OP_REG_MR: u16 = 0x20;
    /// [`Region`], with its key
    "STARVERBS_OP_REREG_MR" OP_REREG_MR: u16 = 0x21;
    /// [`Object`], a key. The memory is out of reach when this is done
    "STARVERBS_OP_DEREG_MR" OP_DEREG_MR: u16 = 0x22;
    /// [`Object`], a key; answers [`Region`]
    "STARVERBS_OP_QUERY_MR" OP_QUERY_MR: u16 = 0x23;
    /// [`Object`], a protection domain; answers [`NumberReply`]: the key of a region without memory
    "STARVERBS_OP_ALLOC_NULL_MR" OP_ALLOC_NULL_MR: u16 = 0x24;
    /// [`Window`]; answers [`NumberReply`]: its first key
    "STARVERBS_OP_ALLOC_MW" OP_ALLOC_MW: u16 = 0x28;
    /// [`Object`], any key that it ever had
    "STARVERBS_OP_DEALLOC_MW" OP_DEALLOC_MW: u16 = 0x29;
    /// [`AddressHandle`]; answers [`NumberReply`]
    "STARVERBS_OP_CREATE_AH" OP_CREATE_AH: u16 = 0x30;
    /// Body: [`Object`]
    "STARVERBS_OP_DESTROY_AH" OP_DESTROY_AH: u16 = 0x31;
    /// [`CreateCq`]; answers [`NumberReply`]
    "STARVERBS_OP_CREATE_CQ" OP_CREATE_CQ: u16 = 0x40;
    /// Body: [`Object`]
    "STARVERBS_OP_DESTROY_CQ" OP_DESTROY_CQ: u16 = 0x41;
    /// [`ResizeCq`]; answers [`NumberReply`]: entries that were written in all where it lay before
    "STARVERBS_OP_RESIZE_CQ" OP_RESIZE_CQ: u16 = 0x42;
    /// Body: [`ModifyCq`]
    "STARVERBS_OP_MODIFY_CQ" OP_MODIFY_CQ: u16 = 0x43;
    /// [`CreateSrq`]; answers [`NumberReply`]
    "STARVERBS_OP_CREATE_SRQ" OP_CREATE_SRQ: u16 = 0x50;
    /// Body: [`SrqLimit`]
    "STARVERBS_OP_MODIFY_SRQ" OP_MODIFY_SRQ: u16 = 0x51;
    /// [`Object`]; answers [`SrqLimit`]
    "STARVERBS_OP_QUERY_SRQ" OP_QUERY_SRQ: u16 = 0x52;
    /// Body: [`Object`]
    "STARVERBS_OP_DESTROY_SRQ" OP_DESTROY_SRQ: u16 = 0x53;
    /// [`CreateQp`]; answers [`NumberReply`]: its QPN
    "STARVERBS_OP_CREATE_QP" OP_CREATE_QP: u16 = 0x60;
    /// Body: [`ModifyQp`]
    "STARVERBS_OP_MODIFY_QP" OP_MODIFY_QP: u16 = 0x61;
    /// [`Object`]; answers [`ModifyQp`]
    "STARVERBS_OP_QUERY_QP" OP_QUERY_QP: u16 = 0x62;
    /// Body: [`Object`]
    "STARVERBS_OP_DESTROY_QP" OP_DESTROY_QP: u16 = 0x63;
    /// [`Group`]: what is sent to the group reaches the queue pair
    "STARVERBS_OP_ATTACH_GROUP" OP_ATTACH_GROUP: u16 = 0x64;
    /// Body: [`Group`]
    "STARVERBS_OP_DETACH_GROUP" OP_DETACH_GROUP: u16 = 0x65;
    /// Answers [`NumberReply`]: the upper 12 bits of the communication IDs that the client gives out. From
    /// then on it gets management datagrams
    "STARVERBS_OP_OPEN_MADS" OP_OPEN_MADS: u16 = 0x70;
    /// [`Mad`]: to queue pair 1 at an address
    "STARVERBS_OP_SEND_MAD" OP_SEND_MAD: u16 = 0x71;
    /// [`Mad`], of which the address is 0; answers [`Mad`]: the oldest that waits. ENODATA: none does
    "STARVERBS_OP_RECEIVE_MAD" OP_RECEIVE_MAD: u16 = 0x72;
    /// [`Service`]: requests for it come here. EADDRINUSE, EADDRNOTAVAIL: somebody holds it, or a part of it
    "STARVERBS_OP_CLAIM_SERVICE" OP_CLAIM_SERVICE: u16 = 0x73;
    /// Body: [`Service`]
    "STARVERBS_OP_RELEASE_SERVICE" OP_RELEASE_SERVICE: u16 = 0x74;
    /// [`CreateXrcSrq`]; answers [`NumberReply`], by which requests name it
    "STARVERBS_OP_CREATE_XRC_SRQ" OP_CREATE_XRC_SRQ: u16 = 0x100;
    /// [`StarRole`]: what the program of a queue pair wants it to be from now on. EOPNOTSUPP: its peer has no
    /// StaR
    "STARVERBS_OP_STAR_SET_ROLE" OP_STAR_SET_ROLE: u16 = 0x200;
    /// [`Object`], a QPN; answers [`StarReply`]
    "STARVERBS_OP_STAR_QUERY" OP_STAR_QUERY: u16 = 0x201;
    /// [`RpcKernel`]: it answers RPCs of its op-code from now on. EBUSY: another does
    "STARVERBS_OP_LOAD_KERNEL" OP_LOAD_KERNEL: u16 = 0x300;
    /// [`RpcKernel`], of which domain and op-code count
    "STARVERBS_OP_UNLOAD_KERNEL" OP_UNLOAD_KERNEL: u16 = 0x301;
    /// From here on: 1RMA
    "STARVERBS_OP_RMA" OP_RMA: u16 = 0x400;
}

plain! {
    /// The head of a command; its body, and then its answer, stands behind it
    "starverbs_command_head" CommandHead {
        /// Which command it is: `OP_*`
        op: u16,
        /// Whose it is: a kernel puts that in, its programs cannot
        context: u16,
        /// [`PENDING`], until the board stores 0 or an errno, behind the answer
        status: u32,
    }
    /// What names one object
    "starverbs_object" Object {
        /// Number or key
        number: u32,
        /// Reserved: 0
        reserved: u32,
    }
    /// What was made
    "starverbs_number_reply" NumberReply {
        /// Number or key
        number: u32,
        /// Its doorbell cell; 0: it has none
        cell: u32,
    }
    /// The board and its port
    "starverbs_device_reply" DeviceReply {
        /// GUID of the node, host order
        guid: u64,
        /// Queue pairs
        max_qp: u32,
        /// WQEs of a queue
        max_qp_wr: u32,
        /// SGEs of a WQE
        max_sge: u32,
        /// Inline bytes of a WQE
        max_inline: u32,
        /// Completion queues
        max_cq: u32,
        /// Entries of a completion queue
        max_cqe: u32,
        /// Memory regions
        max_mr: u32,
        /// Memory windows
        max_mw: u32,
        /// Protection domains
        max_pd: u32,
        /// Address handles
        max_ah: u32,
        /// Shared receive queues
        max_srq: u32,
        /// READs and atomics outstanding, either way
        max_rd_atomic: u32,
        /// Entries of the GID table that are in use
        gids: u32,
        /// `enum ibv_mtu` of the port
        active_mtu: u8,
        /// `enum ibv_port_state`
        port_state: u8,
        /// Reserved: 0
        reserved: [u8; 2],
        /// Multicast groups
        max_groups: u32,
        /// Queue pairs of a group
        max_group_qps: u32,
    }
    /// An entry of the GID table
    "starverbs_gid_reply" GidReply {
        /// The GID
        gid: [u8; 16],
        /// Index of its network interface on the board's host; 0: none
        ifindex: u32,
        /// Bytes that its link carries
        link_mtu: u32,
        /// Its name, up to the first 0
        name: [u8; 16],
    }
    /// A context
    "starverbs_open_context" OpenContext {
        /// DMA address of its event queue
        events: u64,
        /// log2 of the entries
        events_log: u32,
        /// Interrupt vector of its events
        vector: u32,
    }
    /// A region of memory
    "starverbs_region" Region {
        /// Its key, where it has one
        key: u32,
        /// Protection domain
        pd: u32,
        /// `enum ibv_access_flags`
        access: u32,
        /// Entries of the translation table, of 64 bits: the DMA addresses of its pages; 0: it is one piece
        pieces: u32,
        /// DMA address of the first byte, or of the translation table
        addr: u64,
        /// Length in bytes
        length: u64,
        /// Address by which SGEs and peers know the first byte
        iova: u64,
        /// log2 of the bytes of a page, 12 to 30, where there is a table
        page_log: u32,
        /// Where in the first page the first byte is
        offset: u32,
    }
    /// A memory window
    "starverbs_window" Window {
        /// Protection domain
        pd: u32,
        /// `enum ibv_mw_type`
        kind: u32,
    }
    /// Where frames go
    "starverbs_address" Address {
        /// GID of the destination
        dgid: [u8; 16],
        /// Source: one of the port's GIDs
        sgid: [u8; 16],
        /// IPv6 flow label
        flow_label: u32,
        /// Kept for queries
        dlid: u16,
        /// Index of the source in the port's table
        sgid_index: u8,
        /// IPv4 TTL, IPv6 hop limit
        hop_limit: u8,
        /// IPv4 TOS, IPv6 traffic class
        traffic_class: u8,
        /// Service level
        sl: u8,
        /// Kept for queries
        static_rate: u8,
        /// Kept for queries
        src_path_bits: u8,
    }
    /// An address handle
    "starverbs_address_handle" AddressHandle {
        /// Protection domain
        pd: u32,
        /// Where frames go
        address: Address,
    }
    /// A completion queue
    "starverbs_create_cq" CreateCq {
        /// DMA address of the entries, all zero
        entries: u64,
        /// DMA address of a word of 32 bits: entries that the program has taken so far, modulo 2^32
        taken: u64,
        /// log2 of the entries
        log: u32,
        /// Bits of `CQ_*`
        flags: u32,
    }
    /// Another place of a completion queue
    "starverbs_resize_cq" ResizeCq {
        /// DMA address of the entries, all zero
        entries: u64,
        /// DMA address of a word of 32 bits: of those, entries that the program has taken so far
        taken: u64,
        /// Number of the queue
        cq: u32,
        /// log2 of the entries
        log: u32,
    }
    /// How a completion queue's events are moderated: `struct ibv_moderate_cq`
    "starverbs_modify_cq" ModifyCq {
        /// Number of the queue
        cq: u32,
        /// Completions that make an event; 0: any number
        count: u16,
        /// Microseconds after the first of them that an event comes at the latest; 0: it waits
        period: u16,
    }
    /// The work queues of a QP, or the receive queue of an SRQ
    "starverbs_queues" Queues {
        /// DMA address of the program's index line (`struct starverbs_program_index`)
        program: u64,
        /// DMA address of the card's index line (`struct starverbs_card_index`)
        card: u64,
        /// DMA address of the send slots
        send: u64,
        /// DMA address of the receive slots
        recv: u64,
        /// Bytes of a send slot, whole blocks; 0: there is no send queue
        send_stride: u16,
        /// Most SGEs of a send WQE
        send_sge: u16,
        /// Bytes of a receive slot; 0: there is no receive queue
        recv_stride: u16,
        /// Most SGEs of a receive WQE
        recv_sge: u16,
        /// log2 of the send slots
        send_log: u8,
        /// log2 of the receive slots
        recv_log: u8,
        /// Reserved: 0
        reserved: [u8; 6],
    }
    /// A shared receive queue
    "starverbs_create_srq" CreateSrq {
        /// Where it lies
        queues: Queues,
        /// Protection domain
        pd: u32,
        /// An event when fewer receives are left; 0: none
        limit: u32,
    }
    /// A shared receive queue of an XRC domain
    "starverbs_create_xrc_srq" CreateXrcSrq {
        /// Where it lies
        queues: Queues,
        /// Protection domain of its memory
        pd: u32,
        /// The XRC domain: a protection domain in which nothing else is but XRC's
        domain: u32,
        /// Where its receives complete
        cq: u32,
        /// Reserved: 0
        reserved: u32,
    }
    /// The limit of a shared receive queue
    "starverbs_srq_limit" SrqLimit {
        /// Number of the queue
        srq: u32,
        /// An event when fewer receives are left; 0: none
        limit: u32,
    }
    /// A queue pair
    "starverbs_create_qp" CreateQp {
        /// Where its queues lie
        queues: Queues,
        /// Protection domain; of one that receives for XRC its XRC domain
        pd: u32,
        /// Completions of sends
        send_cq: u32,
        /// Completions of receives
        recv_cq: u32,
        /// Where receives come from; [`NONE`]: a queue of its own
        srq: u32,
        /// `enum ibv_qp_type`
        kind: u8,
        /// Bits of `QP_*`
        flags: u8,
        /// With [`QP_STAR`]: what the program wants it to be
        star: u8,
        /// With [`QP_RPC`]: answers that there is room for
        answer_slots: u8,
        /// Reserved: 0
        reserved: [u8; 4],
        /// With [`QP_RPC`]: DMA address of their memory, [`ANSWER_BYTES`] each
        answers: u64,
    }
    /// Attributes of a queue pair: `struct ibv_qp_attr`
    "starverbs_qp_attr" QpAttr {
        /// `enum ibv_qp_state`
        state: u8,
        /// The state that the program believes it is in
        cur_state: u8,
        /// `enum ibv_mtu`
        path_mtu: u8,
        /// `enum ibv_mig_state`
        path_mig: u8,
        /// UD: Q_Key
        qkey: u32,
        /// PSN of the first request expected
        rq_psn: u32,
        /// PSN of the first request sent
        sq_psn: u32,
        /// QPN of the peer
        dest_qpn: u32,
        /// `enum ibv_access_flags`
        access: u32,
        /// Index in the P_Key table
        pkey_index: u16,
        /// Number of the port
        port_num: u8,
        /// READs and atomics outstanding as requester
        max_rd_atomic: u8,
        /// The same as responder
        max_dest_rd_atomic: u8,
        /// RNR NAK timer code
        min_rnr_timer: u8,
        /// Local ACK timeout code
        timeout: u8,
        /// Transport retries
        retry_cnt: u8,
        /// RNR retries; 7: for ever
        rnr_retry: u8,
        /// SQD: an event when drained
        en_sqd_async_notify: u8,
        /// The send queue is draining
        sq_draining: u8,
        /// Reserved: 0
        reserved: u8,
        /// The path
        address: Address,
    }
    /// A change of a queue pair
    "starverbs_modify_qp" ModifyQp {
        /// Its number
        qpn: u32,
        /// `enum ibv_qp_attr_mask`
        mask: u32,
        /// The attributes
        attr: QpAttr,
    }
    /// What a program wants of StaR
    "starverbs_star_role" StarRole {
        /// The queue pair
        qpn: u32,
        /// What it is to be
        role: u32,
    }
    /// What has become of a queue pair
    "starverbs_star_reply" StarReply {
        /// What its program wants it to be
        preference: u32,
        /// What it is
        role: u32,
        /// Bytes that the board keeps of it on chip
        card_bytes: u64,
        /// Bytes that are kept of it elsewhere because of that
        host_bytes: u64,
    }
    /// What answers RPCs of an op-code on queue pairs of a protection domain
    "starverbs_rpc_kernel" RpcKernel {
        /// The RPC op-code; 2^64 - 1: all that have nothing else
        op: u64,
        /// Protection domain
        pd: u32,
        /// `KERNEL_*`
        kernel: u32,
        /// Bits of `KERNEL_REPLACE`
        flags: u32,
        /// Reserved: 0
        reserved: u32,
    }
    /// A queue pair in a multicast group
    "starverbs_group" Group {
        /// GID of the group
        gid: [u8; 16],
        /// The queue pair
        qpn: u32,
        /// Reserved: 0
        reserved: u32,
    }
    /// A management datagram
    "starverbs_mad" Mad {
        /// DMA address of its [`MAD_BYTES`] bytes: where they are read, or written
        addr: u64,
        /// Where it goes; of one that came, `dgid` is who sent it, and `sgid` whom it was sent to
        address: Address,
        /// Reserved: 0
        reserved: u32,
    }
    /// A service of the connection manager
    "starverbs_service" Service {
        /// Service ID, host order
        id: u64,
        /// Of [`SCOPE_ONE`]: the address
        gid: [u8; 16],
        /// `SCOPE_*`: the addresses that it is for
        scope: u32,
        /// Bits of `SERVICE_*`
        flags: u32,
    }
    /// An entry of the event queue
    "starverbs_event" Event {
        /// `EVENT_*`, or `enum ibv_event_type`
        kind: u32,
        /// Number of the object
        number: u32,
        /// Reserved: 0
        reserved: u32,
        /// Number of the event, counted from 1, modulo 2^32: stored last
        valid: u32,
    }
}

/// A doorbell of csRNA's form ([`CAP_DOORBELL_OPS`]), which a word of 64 bits carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DoorbellMessage {
    /// `DOORBELL_*`
    pub op: u8,
    /// Index of the first of the WQEs, modulo 2^16
    pub offset: u16,
    /// How many there are
    pub count: u16,
    /// Number of their queue pair, of 24 bits
    pub qpn: u32,
}

impl DoorbellMessage {
    /// The word that carries it.
    pub const fn to_word(self) -> u64 {
        (self.qpn & QPN_BITS) as u64
            | (self.op as u64) << DOORBELL_OP_SHIFT
            | (self.count as u64) << DOORBELL_COUNT_SHIFT
            | (self.offset as u64) << DOORBELL_OFFSET_SHIFT
    }

    /// What a word carries.
    pub const fn from_word(word: u64) -> DoorbellMessage {
        DoorbellMessage {
            op: (word >> DOORBELL_OP_SHIFT) as u8,
            offset: (word >> DOORBELL_OFFSET_SHIFT) as u16,
            count: (word >> DOORBELL_COUNT_SHIFT) as u16,
            qpn: word as u32 & QPN_BITS,
        }
    }
}

const QPN_BITS: u32 = (1 << DOORBELL_OP_SHIFT) - 1;
/* each field begins where the one before it ends, and none is cut */
const _: () = {
    let all = DoorbellMessage { op: u8::MAX, offset: u16::MAX, count: u16::MAX, qpn: QPN_BITS };
    let some = DoorbellMessage { op: DOORBELL_SEND, offset: 0xfffe, count: 3, qpn: 0x12_3456 };
    assert!(all.to_word() == u64::MAX && some.to_word() == 0xfffe_0003_0112_3456);
    let back = DoorbellMessage::from_word(some.to_word());
    assert!(back.op == some.op && back.offset == some.offset);
    assert!(back.count == some.count && back.qpn == some.qpn);
};

/// Bytes of a command, head and body.
pub const COMMAND_BYTES: usize = 128;
/// Bytes of its body.
pub const BODY_BYTES: usize = COMMAND_BYTES - size_of::<CommandHead>();

const _: () = assert!(size_of::<ModifyQp>() <= BODY_BYTES && size_of::<CreateQp>() <= BODY_BYTES);
const _: () = assert!(size_of::<CreateXrcSrq>() <= BODY_BYTES);
const _: () = assert!(size_of::<Event>() == 16 && size_of::<CommandHead>() == 8);
