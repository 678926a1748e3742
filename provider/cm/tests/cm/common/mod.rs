//! Connection managers on a wire of virtual time that loses, repeats and reorders, as a seed has it.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::collections::BTreeMap;

use starverbs_cm::wire::Mad;
use starverbs_cm::{
    Accept, Cm, CmConfig, CmPath, ConnEvent, ConnNews, Connect, Ece, ListenAt, ListenerId, OutboundMad,
    PortSpace, QpSide, Resolve, Scope, Service,
};
use starverbs_core::{Gid, Mtu, Nanos, Psn};

pub const MS: Nanos = 1_000_000;
pub const SECOND: Nanos = 1000 * MS;

/// What the wire does to messages, in percent.
#[derive(Clone, Copy, Default)]
pub struct Wire {
    pub loss: u64,
    pub duplicate: u64,
    /// Most that a message is late, ns
    pub jitter: Nanos,
}

pub struct Host {
    pub cm: Cm,
    pub gid: Gid,
    pub events: Vec<(u32, ConnEvent)>,
}

pub struct World {
    pub hosts: Vec<Host>,
    pub wire: Wire,
    pub now: Nanos,
    under_way: BTreeMap<(Nanos, u64), (CmPath, Mad)>,
    pub sent: u64,
    rng: u64,
}

impl World {
    pub fn new(hosts: u8, wire: Wire, seed: u64) -> World {
        let host = |n: u8| Host {
            cm: Cm::new(CmConfig {
                guid: 100 + u64::from(n),
                owner: u16::from(n) + 1,
                seed: seed.wrapping_mul(31),
            }),
            gid: gid(n),
            events: Vec::new(),
        };
        World {
            hosts: (0..hosts).map(host).collect(),
            wire,
            now: 1,
            under_way: BTreeMap::new(),
            sent: 0,
            rng: seed + 1,
        }
    }

    fn random(&mut self) -> u64 {
        self.rng = self.rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.rng >> 33
    }

    /// A call on one side, and what follows from it.
    pub fn on<R>(&mut self, host: usize, call: impl FnOnce(&mut Cm, Nanos) -> R) -> R {
        let result = call(&mut self.hosts[host].cm, self.now);
        self.settle(host);
        result
    }

    fn settle(&mut self, host: usize) {
        while let Some(OutboundMad { path, mad }) = self.hosts[host].cm.poll_send() {
            assert_eq!(path.local, self.hosts[host].gid);
            self.sent += 1;
            let copies = 1 + u64::from(self.random() % 100 < self.wire.duplicate);
            for _ in 0..copies {
                if self.random() % 100 >= self.wire.loss {
                    let late = if self.wire.jitter == 0 { 0 } else { self.random() % self.wire.jitter };
                    let key = (self.now + MS + late, self.random());
                    self.under_way.insert(key, (path, mad.clone()));
                }
            }
        }
        while let Some(ConnNews { id, event }) = self.hosts[host].cm.poll_event() {
            self.hosts[host].events.push((id, event));
        }
    }

    /// One step: the next message, or the next timer. False: there is none.
    pub fn step(&mut self) -> bool {
        let timer = |(at, host): (usize, &Host)| host.cm.next_deadline().map(|due| (due, at));
        let timer = self.hosts.iter().enumerate().filter_map(timer).min();
        let message = self.under_way.keys().next().copied();
        match (message, timer) {
            (Some((at, _)), due) if due.is_none_or(|(due, _)| at <= due) => {
                let Some((_, (path, mad))) = self.under_way.pop_first() else { return false };
                self.now = self.now.max(at);
                let Some(to) = self.hosts.iter().position(|host| host.gid == path.remote) else {
                    return true;
                };
                let path = CmPath { local: path.remote, remote: path.local, ..path };
                self.on(to, |cm, now| cm.handle_mad(now, path, mad.bytes()));
            }
            (_, Some((due, host))) => {
                self.now = self.now.max(due);
                self.on(host, |cm, now| cm.handle_timeout(now));
            }
            _ => return false,
        }
        true
    }

    /// Goes on until nothing is left to do, `act` between the steps.
    pub fn run(&mut self, mut act: impl FnMut(&mut World)) {
        let mut steps = 0;
        while self.step() {
            act(self);
            steps += 1;
            assert!(steps < 1_000_000, "it does not come to rest");
        }
    }

    /// Goes on for a time.
    pub fn run_for(&mut self, time: Nanos) {
        let end = self.now + time;
        let next = |world: &World| {
            let timers = world.hosts.iter().filter_map(|host| host.cm.next_deadline());
            timers.chain(world.under_way.keys().map(|(at, _)| *at)).min()
        };
        while next(self).is_some_and(|at| at <= end) {
            self.step();
        }
        self.now = end;
    }

    pub fn listen(&mut self, host: usize, space: PortSpace, backlog: u32) -> ListenerId {
        let at = ListenAt { service: space.service_id(PORT), scope: Scope::AnyV4 };
        self.on(host, |cm, _| cm.listen(at, backlog)).expect("free")
    }

    pub fn connect(&mut self, from: usize, to: usize, qpn: u32) -> u32 {
        let connect = connect(from as u8, to as u8, qpn);
        self.on(from, |cm, now| cm.connect(now, &connect)).expect("good parameters")
    }

    /// Takes the events of a host.
    pub fn events(&mut self, host: usize) -> Vec<(u32, ConnEvent)> {
        std::mem::take(&mut self.hosts[host].events)
    }

    /// The one event that a host has.
    pub fn event(&mut self, host: usize) -> (u32, ConnEvent) {
        let mut events = self.events(host);
        assert_eq!(events.len(), 1, "{events:?}");
        events.remove(0)
    }
}

pub const PORT: u16 = 7174;

pub fn gid(n: u8) -> Gid {
    Gid::from_ipv4([10, 0, 0, n + 1])
}

pub fn address(n: u8, port: u16) -> std::net::SocketAddr {
    std::net::SocketAddr::from(([10, 0, 0, n + 1], port))
}

pub fn connect(from: u8, to: u8, qpn: u32) -> Connect {
    Connect {
        local: address(from, 4660),
        remote: address(to, PORT),
        space: PortSpace::Tcp,
        service: Service::Rc,
        qp: QpSide { qpn, psn: Psn::new(5), srq: false },
        responder_resources: 1,
        initiator_depth: 2,
        flow_control: false,
        retry_count: 7,
        rnr_retry_count: 7,
        path_mtu: Mtu::M1024,
        ack_timeout: 18,
        traffic_class: 0,
        hop_limit: 64,
        ece: Ece::default(),
        private_data: b"ask".to_vec(),
    }
}

pub fn resolve(from: u8, to: u8) -> Resolve {
    Resolve {
        local: address(from, 4660),
        remote: address(to, PORT),
        space: PortSpace::Udp,
        traffic_class: 0,
        hop_limit: 64,
        private_data: b"who".to_vec(),
    }
}

pub fn accept(qpn: u32) -> Accept {
    Accept {
        qp: QpSide { qpn, psn: Psn::new(9), srq: false },
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        rnr_retry_count: 7,
        ece: Ece::default(),
        private_data: b"yes".to_vec(),
    }
}
