//! Two hosts with 1RMA cards: a process at the first, a region at the second.

use starverbs_onerma::{
    CardConfig, Class, Completion, DerivedKey, OneRmaCommand, OneRmaOp, RegionKey, Rights,
};
use starverbs_sim::onerma::{OneRmaHost, OneRmaNet, Portal, SimRegion, SimSeal, Wire};

pub(crate) const CLIENT: usize = 0;
pub(crate) const SERVER: usize = 1;
/// The process at the client.
pub(crate) const PID: u32 = 77;
/// Whose region the server's is.
pub(crate) const OWNER: u32 = 5;
pub(crate) const KEY: RegionKey = RegionKey(*b"the region's key");

pub(crate) const REMOTE: Rights = Rights::REMOTE_READ.union(Rights::REMOTE_WRITE).union(Rights::REMOTE_REKEY);
pub(crate) const LOCAL: Rights = Rights::LOCAL_READ.union(Rights::LOCAL_WRITE);

pub(crate) struct Two {
    pub(crate) net: OneRmaNet,
    pub(crate) portal: Portal,
    /// The client's
    pub(crate) local: SimRegion,
    /// The server's
    pub(crate) remote: SimRegion,
}

impl Two {
    pub(crate) fn new(config: CardConfig, seed: u64) -> Two {
        let mut net = OneRmaNet::new(2, config, Wire::paper(), seed);
        net.hosts.iter_mut().for_each(|host| host.env.memory.watch());
        let portal = net.hosts[CLIENT].portal(PID, 32);
        let local = net.hosts[CLIENT].region(PID, 1 << 17, LOCAL, RegionKey([1; 16]));
        let remote = net.hosts[SERVER].region(OWNER, 1 << 17, REMOTE, KEY);
        Two { net, portal, local, remote }
    }

    pub(crate) fn key(&self, op: OneRmaOp) -> DerivedKey {
        SimSeal.key_for(&KEY, self.net.hosts[CLIENT].gid, PID, op)
    }

    /// `size` bytes at the same place of both regions.
    pub(crate) fn command(&self, op: OneRmaOp, at: u64, size: u32) -> OneRmaCommand {
        OneRmaCommand {
            op,
            class: Class::High,
            haste: 0,
            size,
            remote: self.net.hosts[SERVER].gid,
            region: self.remote.id,
            offset: at,
            local: self.local.id,
            local_offset: at,
            completions: self.portal.completions.id,
            key: self.key(op),
        }
    }

    pub(crate) fn issue(&mut self, slot: u16, command: &OneRmaCommand) {
        let (now, id) = (self.net.now(), self.portal.id);
        self.net.hosts[CLIENT].card.issue(now, id, slot, command).expect("a free slot");
        self.net.pump(CLIENT);
    }

    /// Issues a command and waits for its end.
    pub(crate) fn run(&mut self, command: &OneRmaCommand) -> Completion {
        self.issue(0, command);
        self.net.settle();
        let end = self.portal.poll(&self.net.hosts[CLIENT]).expect("every command completes");
        assert_eq!(self.portal.poll(&self.net.hosts[CLIENT]), None, "and once");
        end
    }

    pub(crate) fn fill(&mut self, host: usize, byte: u8) {
        let region = if host == CLIENT { self.local } else { self.remote };
        self.net.hosts[host].env.memory.write(region.addr, &vec![byte; region.len as usize]);
    }

    pub(crate) fn set(&mut self, host: usize, at: u64, bytes: &[u8]) {
        let region = if host == CLIENT { self.local } else { self.remote };
        self.net.hosts[host].env.memory.write(region.addr + at, bytes);
    }

    pub(crate) fn bytes(&self, host: usize, at: u64, len: u32) -> &[u8] {
        let region = if host == CLIENT { self.local } else { self.remote };
        self.net.hosts[host].env.memory.read(region.addr + at, len as usize)
    }

    /// Nothing is under way, and nothing was written beside what the cards may.
    pub(crate) fn check_quiet(&self) {
        for OneRmaHost { card, env, .. } in &self.net.hosts {
            assert_eq!((card.solicited(), card.inbound_bytes()), (0, 0));
            assert_eq!((card.next_deadline(), card.has_work()), (None, false));
            assert!(env.memory.gaps_intact());
        }
    }
}
