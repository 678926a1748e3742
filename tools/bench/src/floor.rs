//! The floor: what the same sockets do with nothing on top of them.
//!
//! Owns the ping-pong and the stream that the card's figures are divided by. Both run as two processes, which
//! are this program once more under hidden subcommands; each prints one number. It must not know the card.

use std::time::{Duration, Instant};

use crate::error::{BenchError, Result};
use crate::socket::{MAX_SEGMENTS, MAX_SEND, Socket};

/// BTH and ICRC: what RoCEv2 adds to the payload of a SEND (IBTA volume 1, annex A17).
pub(crate) const ROCE_OVERHEAD: usize = 12 + 4;
/// A peer that hears nothing for so long gives up, so that no child outlives a broken run.
const SILENCE: Duration = Duration::from_secs(3);
/// The kernel's own bookkeeping per queued datagram, for dividing the receive buffer into credit.
const SKB_OVERHEAD: usize = 1024;
/// A segmented send is kept in pages, so that it counts for more than its bytes.
const PAGE_OVERHEAD: usize = 2;

/// Sends in flight at most: more of them leave the second-level cache and gain nothing.
const MAX_WINDOW: usize = 8;

/// How the stream puts datagrams on the wire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Batching {
    /// One UDP_SEGMENT send for many segments, UDP_GRO at the receiver.
    #[default]
    Gso,
    /// sendmmsg and recvmmsg, every segment a datagram of its own.
    Mmsg,
}

/// What one side of a floor measurement is to do.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Side {
    /// Own UDP port, or the number in the name of the own unix socket.
    #[arg(long)]
    pub(crate) port: u16,
    /// The peer's.
    #[arg(long)]
    pub(crate) peer: u16,
    /// True for the side that measures.
    #[arg(long)]
    pub(crate) client: bool,
    /// Bytes of one datagram, or copy.
    #[arg(long)]
    pub(crate) bytes: usize,
    /// Round trips, datagrams of the stream, or operations.
    #[arg(long)]
    pub(crate) iters: u64,
    /// How the stream puts datagrams on the wire.
    #[arg(long, value_enum, default_value = "gso")]
    pub(crate) batching: Batching,
}

/// Spins until `poll` gives something; an error after [`SILENCE`].
pub(crate) fn spin<T>(mut poll: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        // The clock is read rarely: on the ping-pong's way it would count.
        for _ in 0..4096 {
            if let Some(value) = poll()? {
                return Ok(value);
            }
        }
        if start.elapsed() > SILENCE {
            return Err(BenchError::Timeout { what: "the floor's peer".to_owned(), limit: SILENCE });
        }
    }
}

/// One side of the ping-pong; the client prints the median one-way time in microseconds.
pub(crate) fn pingpong(side: &Side) -> Result<()> {
    let socket = Socket::bind(side.port, side.peer)?;
    let data = vec![0x5a; side.bytes];
    let mut buffer = vec![0; side.bytes.max(64)];
    if !side.client {
        for _ in 0..side.iters {
            spin(|| socket.receive_plain(&mut buffer))?;
            socket.send(&data)?;
        }
        return Ok(());
    }
    let mut trips = Vec::with_capacity(usize::try_from(side.iters).unwrap_or(0));
    for _ in 0..side.iters {
        let start = Instant::now();
        socket.send(&data)?;
        spin(|| socket.receive_plain(&mut buffer))?;
        trips.push(start.elapsed());
    }
    trips.sort_unstable();
    let median = trips.get(trips.len() / 2).copied().unwrap_or_default();
    println!("{}", median.as_secs_f64() * 1e6 / 2.0);
    Ok(())
}

/// Datagrams per send and how many sends the receiver's buffer has room for.
struct SendBatches {
    per_send: usize,
    window: u64,
}

impl SendBatches {
    fn new(socket: &Socket, side: &Side) -> Result<Self> {
        let per_send = (MAX_SEND / side.bytes).clamp(1, MAX_SEGMENTS);
        let cost = match side.batching {
            Batching::Gso => per_send * side.bytes * PAGE_OVERHEAD + SKB_OVERHEAD,
            Batching::Mmsg => per_send * (side.bytes + SKB_OVERHEAD),
        };
        let window = (socket.receive_buffer()? / cost).clamp(2, MAX_WINDOW);
        Ok(Self { per_send, window: u64::try_from(window * per_send).unwrap_or(2) })
    }
}

/// One side of the stream; the client prints datagrams per second. The receiver's running count is the
/// credit.
pub(crate) fn stream(side: &Side) -> Result<()> {
    let socket = Socket::bind(side.port, side.peer)?;
    let plan = SendBatches::new(&socket, side)?;
    if side.client { stream_send(&socket, side, &plan) } else { stream_receive(&socket, side, &plan) }
}

fn stream_send(socket: &Socket, side: &Side, plan: &SendBatches) -> Result<()> {
    let data = vec![0x5a; plan.per_send * side.bytes];
    let segment = u16::try_from(side.bytes).unwrap_or(u16::MAX);
    let mut credit = [0; 8];
    let (mut sent, mut arrived) = (0u64, 0u64);
    let start = Instant::now();
    while arrived < side.iters {
        if sent < side.iters && sent - arrived < plan.window {
            match side.batching {
                Batching::Gso => socket.send_segmented(&data, segment)?,
                Batching::Mmsg => socket.send_batch(&data[..side.bytes], plan.per_send)?,
            }
            sent += plan.per_send as u64;
            // Credit is looked for only when the window is half used, as an acknowledged transport would.
            if sent - arrived < plan.window / 2 {
                continue;
            }
        }
        if sent < side.iters && sent - arrived < plan.window {
            if socket.receive_plain(&mut credit)?.is_some() {
                arrived = u64::from_le_bytes(credit);
            }
        } else {
            spin(|| socket.receive_plain(&mut credit))?;
            arrived = u64::from_le_bytes(credit);
        }
    }
    println!("{}", arrived as f64 / start.elapsed().as_secs_f64());
    Ok(())
}

fn stream_receive(socket: &Socket, side: &Side, plan: &SendBatches) -> Result<()> {
    if side.batching == Batching::Gso {
        socket.coalesce()?;
    }
    let slot = side.bytes.next_multiple_of(64);
    let mut buffer = vec![0; MAX_SEND.max(slot * MAX_SEGMENTS)];
    let every = (plan.window / 4).max(1);
    let (mut arrived, mut acked) = (0u64, 0u64);
    while arrived < side.iters {
        arrived += spin(|| match side.batching {
            Batching::Gso => {
                Ok(socket.receive(&mut buffer)?.map(|(len, segment)| len.div_ceil(segment.max(1)) as u64))
            }
            Batching::Mmsg => Ok(Some(socket.receive_batch(&mut buffer, slot)? as u64).filter(|&n| n > 0)),
        })?;
        if arrived - acked >= every || arrived >= side.iters {
            socket.send(&arrived.to_le_bytes())?;
            acked = arrived;
        }
    }
    Ok(())
}
