//! READs that arrive by chance, through the executors of many hosts.

use starverbs_onerma::congestion::CongestionSettings;
use starverbs_onerma::{CardConfig, Class, Status};

use crate::onerma::client::{Client, RemoteRegion};
use crate::onerma::host::SimRegion;
use crate::onerma::{OneRmaNet, StepReport, Wire};

/// Wake-ups of executors have words from here on, those of arrivals the client's number.
const DRIVE: u64 = 1 << 32;

/// A READ.
#[derive(Clone, Copy)]
pub(super) struct Read {
    /// Which client's
    pub(super) client: usize,
    /// The host that has the data
    pub(super) target: usize,
    /// Bytes
    pub(super) size: u64,
    /// When it was begun, ns
    pub(super) begun: u64,
}

/// Hosts, of which the first have a client each.
pub(super) struct FigureLoad {
    pub(super) net: OneRmaNet,
    clients: Vec<Client>,
    /// By token
    reads: Vec<Read>,
}

impl FigureLoad {
    /// So many hosts at the paper's switch; clients with all of a card's slots, and memory for the largest
    /// READ.
    pub(super) fn new(hosts: u16, clients: usize, largest: u64, seed: u64) -> Self {
        let mut net = OneRmaNet::new(hosts, CardConfig::default(), Wire::paper(), seed);
        let slots = CardConfig::default().slots;
        let client =
            |host| Client::with_memory(&mut net, host, 7, slots, CongestionSettings::default(), largest);
        let clients = (0..clients).map(client).collect();
        FigureLoad { net, clients, reads: Vec::new() }
    }

    /// The next READ of a client is to begin after some nanoseconds.
    pub(super) fn arrive_in(&mut self, client: usize, wait: f64) {
        let at = self.net.now() + wait as u64;
        self.net.wake_at(at, client as u64);
    }

    /// Begins a READ now.
    pub(super) fn read(&mut self, class: Class, read: Read, region: &SimRegion) {
        let client = &mut self.clients[read.client];
        client.read_in(
            class,
            &mut self.net,
            RemoteRegion { host: read.target, region },
            read.size,
            self.reads.len() as u64,
        );
        self.reads.push(read);
        client.drive(&mut self.net, DRIVE + read.client as u64);
    }

    /// The next thing that happens: the client whose READ is to begin, if one is; and what has ended, with
    /// its status.
    pub(super) fn step(&mut self, ended: &mut Vec<(Read, Status)>) -> Option<usize> {
        match self.net.step().expect("there is always a READ to come") {
            StepReport::Woke(word) if word < DRIVE => return Some(word as usize),
            StepReport::Woke(word) => self.clients[(word - DRIVE) as usize].drive(&mut self.net, word),
            StepReport::Completed(host) => {
                let client = &mut self.clients[host];
                while let Some(finished) = client.poll(&self.net) {
                    ended.extend(finished.map(|read| (self.reads[read.token as usize], read.status)));
                }
                client.drive(&mut self.net, DRIVE + host as u64);
            }
            StepReport::Nothing => {}
        }
        None
    }
}

/// The value below which this share of the sorted values lies.
pub(super) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = (sorted.len() as f64 * share) as usize;
    sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}
