//! Management datagrams from anyone, to a connection manager with listeners and connections on their way:
//! none makes it panic, loop or keep more than its backlogs allow; and what a program does meanwhile goes on.

use starverbs_cm::wire::{Attribute, Destination, Field, MAD_LEN, Mad, fields};
use starverbs_cm::{
    Accept, Cm, CmConfig, CmPath, ConnEvent, ConnNews, Connect, Ece, ListenAt, PortSpace, QpSide, Scope,
    Service,
};
use starverbs_core::{Gid, Mtu, Psn};

use crate::bytes::Bytes;

const BACKLOG: u32 = 3;
const HERE: Gid = Gid::from_ipv4([10, 0, 0, 1]);
const THERE: Gid = Gid::from_ipv4([10, 0, 0, 2]);

/// Most messages of one input.
const STEPS: usize = 64;

/// Checks one input: messages and calls in turn.
pub fn check(input: &[u8]) {
    let mut input = Bytes(input);
    let raw_len = usize::from(input.half()) % 300;
    let raw = input.take(raw_len);
    let _ = Destination::of(raw);
    let mut cm = Cm::new(CmConfig { guid: 1, owner: 7, seed: 3 });
    let path = CmPath { local: HERE, remote: THERE, ..CmPath::default() };
    cm.handle_mad(0, path, raw);
    for space in [PortSpace::Tcp, PortSpace::Udp] {
        cm.listen(ListenAt { service: space.service_id(1), scope: Scope::Any }, BACKLOG).expect("free");
    }
    let mut ids = vec![cm.connect(0, &connect()).expect("good parameters")];
    let (mut now, mut steps) = (0u64, 0);
    while let Some(kind) = input.next().filter(|_| steps < STEPS) {
        steps += 1;
        let whom = input.byte();
        let id = ids[usize::from(whom) % ids.len()];
        cm.handle_mad(now, path, &message(kind, id, whom, &mut input));
        drain(&mut cm, &mut ids);
        act(&mut cm, now, ids[usize::from(whom) % ids.len()], input.byte());
        now += u64::from(input.half()) * 1_000_000;
        cm.handle_timeout(now);
        drain(&mut cm, &mut ids);
        assert!(cm.len() <= 1 + ids.len(), "what the program was told of, and no more");
    }
    end(cm, now, ids);
}

/// What the program does with a connection.
fn act(cm: &mut Cm, now: u64, id: u32, what: u8) {
    match what % 8 {
        0 => drop(cm.accept(now, id, &accept())),
        1 => drop(cm.reject(now, id, 28, &[])),
        2 => drop(cm.establish(id)),
        3 => drop(cm.disconnect(now, id)),
        4 => cm.release(now, id),
        _ => {}
    }
}

/// All of it ends in time.
fn end(mut cm: Cm, now: u64, mut ids: Vec<u32>) {
    cm.release_all(now);
    while let Some(at) = cm.next_deadline() {
        assert!(at < now + 200_000_000_000, "a timer that never comes");
        cm.handle_timeout(at);
        drain(&mut cm, &mut ids);
    }
    assert!(cm.is_empty(), "something is left");
}

fn drain(cm: &mut Cm, ids: &mut Vec<u32>) {
    let mut sent = 0;
    while cm.poll_send().is_some() {
        sent += 1;
        assert!(sent < 256, "a message makes few");
    }
    while let Some(ConnNews { id, event }) = cm.poll_event() {
        if matches!(event, ConnEvent::Request { .. } | ConnEvent::Resolving { .. }) {
            ids.push(id);
        }
    }
}

/// A message that names `id`, with a good addressing header, and then changed anywhere.
fn message(kind: u8, id: u32, from: u8, input: &mut Bytes) -> [u8; MAD_LEN] {
    let attribute = Attribute::from_code(0x10 + u16::from(kind % 11)).expect("all of these are known");
    let from = u64::from(from % 4);
    let mut mad = Mad::new(attribute, from);
    mad.set(fields::LOCAL_ID, from);
    let header = match attribute {
        Attribute::Req => {
            mad.set(fields::req::SERVICE_ID, PortSpace::Tcp.service_id(1));
            Some(fields::req::PRIVATE_DATA)
        }
        Attribute::SidrReq => {
            mad.set(fields::sidr_req::SERVICE_ID, PortSpace::Udp.service_id(1));
            Some(fields::sidr_req::PRIVATE_DATA)
        }
        Attribute::SidrRep => {
            mad.set(fields::sidr_rep::REQUEST_ID, id.into());
            None
        }
        _ => {
            mad.set(fields::REMOTE_ID, id.into());
            None
        }
    };
    if let Some(at) = header {
        mad.put(at, &starverbs_cm::wire::ip::header(address(2), address(1)));
    }
    for _ in 0..input.byte() % 16 {
        let field = Field::new(usize::from(input.byte()).min(231), 8);
        mad.set(field, u64::from(input.byte()));
    }
    *mad.bytes()
}

fn address(n: u8) -> std::net::SocketAddr {
    std::net::SocketAddr::from(([10, 0, 0, n], 1))
}

fn side() -> QpSide {
    QpSide { qpn: 0x100, psn: Psn::new(0), srq: false }
}

fn connect() -> Connect {
    Connect {
        local: address(1),
        remote: address(2),
        space: PortSpace::Tcp,
        service: Service::Rc,
        qp: side(),
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        retry_count: 7,
        rnr_retry_count: 7,
        path_mtu: Mtu::M1024,
        ack_timeout: 14,
        traffic_class: 0,
        hop_limit: 0,
        ece: Ece::default(),
        private_data: Vec::new(),
    }
}

fn accept() -> Accept {
    Accept {
        qp: side(),
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        rnr_retry_count: 7,
        ece: Ece::default(),
        private_data: Vec::new(),
    }
}
