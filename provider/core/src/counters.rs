//! What the card counts. One page of plain 64-bit cells, written by the card alone and readable by
//! anyone who maps it while the program runs.
//!
//! The page lists the counters of all rooms, as its layout is one: those of StaR (`star_*`) and 1RMA
//! (`onerma_*`) included, of which core counts none.

use core::ffi::CStr;
use core::sync::atomic::{AtomicU64, Ordering};

/// One cell. A single writer (the card's owner) and any readers.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct CounterCell(AtomicU64);

impl CounterCell {
    /// Adds 1.
    #[inline]
    pub fn inc(&self) {
        self.add(1);
    }
    /// Adds `n`. A plain load and store: only the card's owner writes.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }
    /// Adds `n`, where several write.
    pub fn add_beside_others(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
    /// Subtracts `n`.
    #[inline]
    pub fn sub(&self, n: u64) {
        self.add(0u64.wrapping_sub(n));
    }
    /// The value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
    /// Sets the value.
    #[inline]
    pub fn set(&self, v: u64) {
        self.0.store(v, Ordering::Relaxed);
    }
}

/// A literal that ends with NUL, without the space that a doc comment begins with.
const fn c_str(text: &'static str) -> &'static CStr {
    let bytes = match text.as_bytes() {
        [b' ', rest @ ..] => rest,
        all => all,
    };
    match CStr::from_bytes_with_nul(bytes) {
        Ok(text) => text,
        Err(_) => c"",
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// The card's counters. Layout: consecutive 64-bit cells in the order of [`Counters::NAMES`].
        #[derive(Debug, Default)]
        #[repr(C)]
        pub struct Counters { $($(#[doc = $doc])+ pub $name: CounterCell,)+ }

        impl Counters {
            /// Names, in layout order.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name),)+];
            /// The same for C.
            pub const C_NAMES: &'static [&'static CStr] = &[$(c_str(concat!(stringify!($name), "\0")),)+];
            /// One line on each, in layout order.
            pub const HELP: &'static [&'static str] = &[$(concat!($($doc),+),)+];
            /// The same for C.
            pub const C_HELP: &'static [&'static CStr] = &[$(c_str(concat!($($doc,)+ "\0")),)+];
            /// Values, in layout order.
            pub fn values(&self) -> [u64; Self::NAMES.len()] { [$(self.$name.get(),)+] }
        }
    };
}

counters! {
    /// frames sent
    tx_packets,
    /// payload bytes sent
    tx_bytes,
    /// frames received and accepted by the port
    rx_packets,
    /// payload bytes received
    rx_bytes,
    /// system calls that sent frames
    tx_syscalls,
    /// system calls that received frames
    rx_syscalls,
    /// frames the kernel refused to send
    tx_errors,
    /// RC packets sent again
    retransmitted,
    /// local ACK timeouts
    timeouts,
    /// QPs that gave up: transport retries exceeded
    retry_exceeded,
    /// QPs that gave up: RNR retries exceeded
    rnr_retry_exceeded,
    /// RC requests that came again and were answered from memory
    duplicate_request,
    /// RC requests with a PSN ahead of the expected one
    out_of_sequence,
    /// READ responses with a gap before them (implied NAK)
    implied_nak,
    /// acknowledges sent
    sent_ack,
    /// acknowledges received
    rcvd_ack,
    /// NAKs sent: PSN sequence error
    sent_nak_seq,
    /// NAKs received: PSN sequence error
    rcvd_nak_seq,
    /// NAKs sent: receiver not ready
    sent_rnr,
    /// NAKs received: receiver not ready
    rcvd_rnr,
    /// NAKs sent: invalid request
    sent_nak_invalid,
    /// NAKs received: invalid request
    rcvd_nak_invalid,
    /// NAKs sent: remote access error
    sent_nak_access,
    /// NAKs received: remote access error
    rcvd_nak_access,
    /// NAKs sent: remote operational error
    sent_nak_op,
    /// NAKs received: remote operational error
    rcvd_nak_op,
    /// ACKs sent with what is kept behind a missing packet (selective repeat)
    sent_sack,
    /// ACKs received with what the peer keeps
    rcvd_sack,
    /// RC requests kept because one before them is missing
    kept_ahead,
    /// packets of RPCs that kernels got (StRoM)
    rx_rpc,
    /// answers of kernels sent, errors among them (StRoM)
    tx_rpc_replies,
    /// WRITEs that kernels sent for this card's own program (StRoM)
    tx_kernel_writes,
    /// RPCs that ended with an error (StRoM)
    rpc_failed,
    /// completions made
    completions,
    /// completions made with an error status
    error_completions,
    /// completions lost to a full CQ
    cq_overrun,
    /// dropped: shorter than its headers, longer than any path MTU, or with padding that it has not
    drop_malformed,
    /// dropped: bad ICRC
    drop_icrc,
    /// dropped: no such QP here
    drop_no_qp,
    /// dropped: the QP is not in a state to receive
    drop_state,
    /// dropped: op-code not of the QP's transport, or not known
    drop_opcode,
    /// dropped: source is not the connected peer
    drop_source,
    /// dropped: P_Key mismatch
    drop_pkey,
    /// dropped: Q_Key mismatch (UD)
    drop_qkey,
    /// dropped: no receive WQE, or buffer too small (UD, UC)
    drop_no_recv,
    /// dropped: UC message with a gap
    drop_uc_sequence,
    /// dropped: answer to nothing outstanding
    drop_stale_response,
    /// copies of multicast datagrams for queue pairs that are attached to their group
    rx_multicast,
    /// dropped: multicast that is no datagram to a group to which a queue pair is attached
    drop_multicast,
    /// management datagrams received on queue pair 1
    rx_mads,
    /// management datagrams sent from queue pair 1
    tx_mads,
    /// dropped: management datagrams, as too many waited
    drop_mads,
    /// frames for another process of this host, handed on
    handed_on,
    /// frames handed to us by another process
    handed_in,
    /// dropped: for a QPN block that no process of this host owns
    drop_no_owner,
    /// dropped: the process of this host that owns the QPN block did not take what was handed on
    drop_handover,
    /// frames lost on purpose (STARVERBS_FAULT)
    fault_lost,
    /// frames duplicated on purpose
    fault_duplicated,
    /// frames reordered on purpose
    fault_reordered,
    /// frames corrupted on purpose
    fault_corrupted,
    /// congestion window reductions
    window_cuts,
    /// frames that carried an ECN congestion mark
    rx_ecn_marked,
    /// congestion notifications from the connected peer, for a rate limiter that this card does not have
    rx_cnp,
    /// times the progress thread ran the card
    thread_runs,
    /// doorbells left for the holder of the card's lock
    doorbells_left,
    /// STARVERBS_QPC_CACHE: requests for a QP context that was in the cache
    qpc_hits,
    /// requests for a QP context that had to be fetched
    qpc_misses,
    /// requests for a QP context that waited behind others of their QP
    qpc_waited,
    /// doorbells answered from the SQ address table (latency-hiding)
    qpc_ring_reads,
    /// QP contexts fetched ahead (latency-hiding)
    qpc_prefetched,
    /// QP contexts not fetched ahead, as too many were on their way
    qpc_prefetch_dropped,
    /// QP contexts that left the cache for others
    qpc_evicted,
    /// requests for QP contexts that are pending now
    qpc_pending,
    /// most requests for QP contexts that were pending at once
    qpc_pending_peak,
    /// nanoseconds that doorbells, turns to send and requests waited for QP contexts, all together
    qpc_wait_ns,
    /// bytes that a chip would need for the QP contexts as they are set
    qpc_on_chip,
    /// StaR, stateless: packets whose data was written to memory (RD)
    star_rd,
    /// StaR, stateless: packets answered with data from memory (GD)
    star_gd,
    /// StaR, stateless: atomics executed
    star_atomics,
    /// StaR, stateless: atomics that came again and were answered from their slot
    star_atomics_again,
    /// StaR, stateless: atomics that came before the one that they follow, and wait for it
    star_atomics_early,
    /// StaR, stateless: packets in their turn that came before the one that they follow: they are kept until
    /// it has come, or sent again
    star_writes_early,
    /// StaR, stateless: completions written to memory (CQEP, RDC)
    star_cqep,
    /// StaR, stateless: completions, atomics and WRITEs that came again after their slot was written
    star_stale,
    /// StaR, stateless: dropped, for memory that is not registered for it
    star_refused,
    /// StaR, stateless: dropped, not understood
    star_bad,
    /// StaR, stateless host: WQEs sent to the stateful end (WQEP)
    star_wqep,
    /// StaR, stateless host: WQEs sent again
    star_wqep_again,
    /// StaR, stateful: packets sent with data for memory (RD)
    star_sent_rd,
    /// StaR, stateful: packets sent that ask for data from memory, or for an atomic (GD)
    star_sent_gd,
    /// StaR, stateful: completions sent (CQEP, RDC)
    star_sent_cqep,
    /// StaR, stateful: WQEs received (WQEP)
    star_rcvd_wqep,
    /// StaR, stateful: requests refused and packets held back, as no rule of the stateless end allows them
    star_rejects,
    /// StaR: packets sent again by the stateful half
    star_retransmitted,
    /// StaR: packets dropped by either half, as they answer nothing or are of no connection that is open
    star_drops,
    /// StaR: offers and control messages dropped, as they were not sealed under this card's key for this card
    star_foreign,
    /// StaR: sealed offers and control messages dropped, as they came before
    star_replayed,
    /// StaR: queue pairs that are stateless ends now
    star_stateless_qps,
    /// StaR: queue pairs that are stateful ends now
    star_stateful_qps,
    /// StaR: queue pairs with a preference that are of plain RoCEv2, as settled, or over the same host
    star_plain_qps,
    /// StaR: queue pairs that left plain RoCEv2 while they ran
    star_switches,
    /// StaR: queue pairs that came back to plain RoCEv2 while they ran
    star_returns,
    /// StaR, stateful: rules by which memory of stateless ends may be reached
    star_rules,
    /// StaR, stateless host: bytes of host memory that stateless ends take, beside their queues
    star_host_bytes,
    /// StaR, stateless host: bytes of ended connections' slots that are kept until the secret is replaced
    star_quarantined_bytes,
    /// StaR, stateless: bytes that the card keeps of connections
    star_stateless_connection_bytes,
    /// same host: requests written to other queue pairs' cards, without a packet
    local_requests,
    /// same host: WRITEs and READs executed by this card through a descriptor of its peer's memory
    local_direct,
    /// same host: WRITEs and READs executed by this card through the number of its peer's process
    local_traced,
    /// same host: WRITEs, READs and atomics executed by this card on memory that both have mapped
    local_mapped,
    /// same host: pieces of SENDs that this card fetched from their sender's memory, which both have mapped
    local_fetched,
    /// same host: requests of others executed
    local_executed,
    /// same host: frames handed to other processes through memory
    tx_local_frames,
    /// same host: frames that other processes handed to this one through memory
    rx_local_frames,
    /// same host: channels and sessions that were ended, as the other process broke their rules
    local_broken,
    /// same host: queue pairs whose connection goes through shared memory now
    local_qps,
    /// 1RMA: packets received
    onerma_received,
    /// 1RMA: packets received that no card sends
    onerma_malformed,
    /// 1RMA: packets received for nothing that was under way
    onerma_late,
    /// 1RMA: packets received with data that was there already
    onerma_copies,
    /// 1RMA: packets received with a wrong tag
    onerma_forged,
    /// 1RMA: requests of others refused, as they were not authenticated
    onerma_auth_failures,
    /// 1RMA: requests of others refused, as there was too much to do
    onerma_nacks,
    /// 1RMA: requests of others refused for bounds or rights
    onerma_access_failures,
    /// 1RMA: keys of regions that others changed
    onerma_rekeys,
    /// 1RMA: WRITEs and REKEYs of others that ended for want of data
    onerma_transfer_timeouts,
    /// 1RMA: commands completed
    onerma_completed,
    /// 1RMA: of them, refused by the peer's card, which had too much to do
    onerma_refused,
    /// 1RMA: of them, not admitted or not answered in time
    onerma_timeouts,
    /// 1RMA: completions that could not be written
    onerma_lost_completions,
    /// 1RMA: packets that the socket did not take
    onerma_unsent,
    /// 1RMA: datagrams from UDP ports that no card has
    onerma_foreign,
    /// 1RMA: packets to cards of this host that went through memory
    onerma_tx_local,
    /// 1RMA: packets from cards of this host that came through memory
    onerma_rx_local,
    /// queue pairs that exist
    qps,
    /// memory regions that exist
    mrs,
}
