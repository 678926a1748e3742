//! What a rule's test works on: connections to the board, made anew for each.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::fault::{RuleFault, Tested};
use crate::kernel::is_device;
use crate::link::BoardPatience;
use crate::qp::RawQp;
use crate::raw::{Basics, RawDriver};

/// How to test.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The board's sockets, or the kernel's devices: the first is tested, the second helps where two
    /// functions are needed
    pub sockets: Vec<PathBuf>,
    /// How long the board may take for one thing
    pub patience: Duration,
    /// How to see its frames
    pub wire: Option<Wire>,
}

impl BenchOptions {
    /// Whether the kernel is the board's driver.
    pub(crate) fn is_device(&self) -> bool {
        self.sockets.first().is_some_and(|path| is_device(path))
    }
}

/// The wire that the board's port is on.
#[derive(Clone, Copy, Debug)]
pub struct Wire {
    /// An address of this host, which the board reaches and where nobody else takes RoCE frames
    pub address: IpAddr,
    /// The UDP port of RoCE
    pub port: u16,
}

/// Two RC QPs of a driver, connected to each other.
pub(crate) struct Pair {
    /// The driver
    pub(crate) raw: RawDriver,
    /// The protection domain
    pub(crate) pd: u32,
    /// The key of all the driver's memory
    pub(crate) key: u32,
    /// The completion queue of both
    pub(crate) cq: u32,
    /// Its doorbell cell
    pub(crate) cq_cell: u32,
    /// One QP
    pub(crate) a: RawQp,
    /// The other
    pub(crate) b: RawQp,
}

/// What a test works on.
pub(crate) struct Bench<'a> {
    options: &'a BenchOptions,
    limits: BoardPatience,
}

impl<'a> Bench<'a> {
    pub(crate) fn new(options: &'a BenchOptions) -> Self {
        Bench { options, limits: BoardPatience::new(options.patience) }
    }

    pub(crate) fn socket(&self) -> Tested<&'a PathBuf> {
        self.options.sockets.first().ok_or_else(|| RuleFault::Skipped("no socket".to_owned()))
    }

    /// The way to a second function.
    pub(crate) fn second(&self) -> Tested<&'a PathBuf> {
        self.options.sockets.get(1).ok_or_else(|| {
            RuleFault::Skipped("needs a second function of the board (a second SOCKET)".to_owned())
        })
    }

    pub(crate) fn wire(&self) -> Tested<Wire> {
        self.options.wire.ok_or_else(|| {
            RuleFault::Skipped("needs an address of this host that the board reaches (--address)".to_owned())
        })
    }

    pub(crate) fn patience(&self) -> Duration {
        self.options.patience
    }

    /// A driver whose board is not enabled.
    pub(crate) fn connect(&self) -> Tested<RawDriver> {
        RawDriver::connect(self.socket()?, self.limits)
    }

    /// A driver of the board.
    pub(crate) fn open(&self) -> Tested<RawDriver> {
        RawDriver::open(self.socket()?, self.limits)
    }

    /// A driver with two RC QPs.
    pub(crate) fn pair(&self) -> Tested<Pair> {
        pair(self.open()?)
    }

    /// The same on the second function.
    pub(crate) fn second_pair(&self) -> Tested<Pair> {
        pair(RawDriver::open(self.second()?, self.limits)?)
    }
}

/// A driver with two RC QPs, on a board that is enabled.
pub(crate) fn pair(mut raw: RawDriver) -> Tested<Pair> {
    let Basics { pd, key, cq } = raw.basics()?;
    let (a, b) = (raw.qp(pd, cq.number, 0)?, raw.qp(pd, cq.number, 1)?);
    raw.connect_qp(a, b.qpn)?;
    raw.connect_qp(b, a.qpn)?;
    Ok(Pair { raw, pd, key, cq: cq.number, cq_cell: cq.cell, a, b })
}

impl Pair {
    /// Sends a message, and looks at it.
    pub(crate) fn exchange(&mut self, n: u64) -> Tested {
        self.raw.exchange(self.key, &mut self.a, &mut self.b, n)
    }
}
