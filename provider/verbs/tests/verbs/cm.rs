//! Connection management between two cards of one host, as librdmacm would use it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::common::{Node, settings};

use starverbs_core::{Mtu, Psn, QpType};
use starverbs_settings::{FaultSpec, Settings};
use starverbs_verbs::Qp;
use starverbs_verbs::cm::{
    Accept, Agent, BindAddr, CmEvent, CmEventKind, Conn, Connect, Ece, Listener, PortSpace, QpSide, Request,
    Resolve, Service, SidrAnswer, Sink, reason, sidr,
};

/// How long a test waits for what must come: far beyond what it takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A sink, and where its events come out.
fn sink() -> (Sink, Receiver<CmEvent>) {
    let (sender, events) = channel();
    let sink: Sink = Arc::new(move |event| {
        let _nobody_reads_any_more = sender.send(event);
    });
    (sink, events)
}

fn next(events: &Receiver<CmEvent>) -> CmEventKind {
    events.recv_timeout(PATIENCE).expect("an event").kind
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn bind(port: u16, space: PortSpace) -> BindAddr {
    BindAddr { local: local(port), space, reuse: false, v6_only: false }
}

/// One side: a card, its agent.
struct Side {
    node: Node,
    agent: Agent,
}

impl Side {
    fn new(settings: &Settings) -> Side {
        let node = Node::new(settings);
        let agent = Agent::of(&node.ctx).unwrap();
        Side { node, agent }
    }

    fn pair(settings: &Settings) -> [Side; 2] {
        [Side::new(settings), Side::new(settings)]
    }

    fn listen(&self, space: PortSpace, backlog: u32) -> (Listener, Receiver<CmEvent>) {
        let (sink, events) = sink();
        let held = self.agent.bind(bind(0, space)).unwrap();
        let listener = self.agent.listen(&held, backlog, sink).unwrap();
        (listener, events)
    }

    fn connect(&self, remote: SocketAddr, qp: &Qp, private_data: &[u8]) -> (Conn, Receiver<CmEvent>) {
        let (sink, events) = sink();
        let connect = connect(remote, side(qp), private_data);
        (self.agent.connect(&connect, sink).unwrap(), events)
    }
}

fn side(qp: &Qp) -> QpSide {
    QpSide { qpn: qp.number(), psn: Psn::new(0xfffffe), srq: false }
}

fn connect(remote: SocketAddr, qp: QpSide, private_data: &[u8]) -> Connect {
    Connect {
        local: local(4660),
        remote,
        space: PortSpace::Tcp,
        service: Service::Rc,
        qp,
        responder_resources: 3,
        initiator_depth: 4,
        flow_control: true,
        retry_count: 7,
        rnr_retry_count: 6,
        path_mtu: Mtu::M1024,
        ack_timeout: 14,
        traffic_class: 0,
        hop_limit: 0,
        ece: Ece { vendor_id: 0x0012_3456, options: 0x89ab_cdef },
        private_data: private_data.to_vec(),
    }
}

fn accept(qp: QpSide, private_data: &[u8]) -> Accept {
    Accept {
        qp,
        responder_resources: 5,
        initiator_depth: 6,
        flow_control: false,
        rnr_retry_count: 2,
        ece: Ece { vendor_id: 0x00fe_dcba, options: 7 },
        private_data: private_data.to_vec(),
    }
}

/// Brings a queue pair to RTS towards the peer's.
fn ready(node: &Node, qp: &Qp, peer: QpSide) {
    crate::common::to_init(qp);
    crate::common::to_rtr(qp, crate::common::way_to(node), peer.qpn);
    crate::common::to_rts(qp);
}

fn requested(events: &Receiver<CmEvent>) -> (Conn, Box<Request>) {
    match next(events) {
        CmEventKind::Request(conn, request) => (conn, request),
        other => panic!("{other:?} instead of a request"),
    }
}

/// Connects, moves a message, disconnects, and looks at all events meanwhile.
fn whole_connection(settings: &Settings) {
    let [a, b] = Side::pair(settings);
    let (listener, events_b) = b.listen(PortSpace::Tcp, 4);
    let qps = [a.node.qp(QpType::Rc), b.node.qp(QpType::Rc)];
    let (conn_a, events_a) = a.connect(listener.local(), &qps[0], b"hello");

    let (conn_b, request) = requested(&events_b);
    assert_eq!((request.local, request.remote), (listener.local(), local(4660)));
    assert_eq!((request.qp, request.service), (side(&qps[0]), Service::Rc));
    assert_eq!((request.responder_resources, request.initiator_depth), (4, 3), "turned round");
    assert_eq!((request.retry_count, request.rnr_retry_count, request.ack_timeout), (7, 6, 14));
    assert_eq!(request.ece, Ece { vendor_id: 0x0012_3456, options: 0x89ab_cdef });
    assert_eq!((&request.private_data[..6], request.private_data.len()), (&b"hello\0"[..], 56));
    ready(&b.node, &qps[1], request.qp);
    b.node.post_recv(&qps[1], 5, 0, 64).unwrap();
    conn_b.accept(&accept(side(&qps[1]), b"welcome")).unwrap();

    let CmEventKind::Response(response) = next(&events_a) else { panic!("no response") };
    assert_eq!(response.qp, side(&qps[1]));
    assert_eq!((response.responder_resources, response.initiator_depth), (6, 5), "turned round");
    assert_eq!(response.ece, Ece { vendor_id: 0x00fe_dcba, options: 7 });
    assert_eq!((&response.private_data[..8], response.private_data.len()), (&b"welcome\0"[..], 196));
    ready(&a.node, &qps[0], response.qp);
    conn_a.establish().unwrap();
    assert!(matches!(next(&events_b), CmEventKind::Established));
    assert_eq!(conn_b.notify_comm_est().map_err(|e| e.errno()), Err(libc::EISCONN));

    crate::common::post(&qps[0], &crate::common::send(1, &[a.node.sge(0, 16)])).unwrap();
    assert_eq!(b.node.completions(1)[0].wr_id, 5);
    assert_eq!(a.node.completions(1)[0].wr_id, 1);

    conn_a.disconnect().unwrap();
    for events in [&events_a, &events_b] {
        assert!(matches!(next(events), CmEventKind::Disconnected { status: 0 }));
        assert!(matches!(next(events), CmEventKind::TimewaitExit));
    }
    conn_b.disconnect().unwrap();
}

#[test]
fn a_connection_lives_and_ends() {
    whole_connection(&settings());
}

#[test]
fn a_connection_lives_and_ends_on_a_wire_that_loses_a_fifth() {
    for seed in 1..=3 {
        let fault = FaultSpec { loss: 0.2, duplicate: 0.1, reorder: 0.1, seed, ..FaultSpec::default() };
        whole_connection(&Settings { fault, ..settings() });
    }
}

#[test]
fn requests_are_refused_by_program_by_backlog_and_where_nobody_listens() {
    let [a, b] = Side::pair(&settings());
    let (listener, events_b) = b.listen(PortSpace::Tcp, 1);
    let qp = a.node.qp(QpType::Rc);
    let (_conn, events_a) = a.connect(listener.local(), &qp, &[]);
    let (conn_b, _) = requested(&events_b);
    let (_conn2, events_2) = a.connect(listener.local(), &qp, &[]);
    assert!(matches!(next(&events_2), CmEventKind::Rejected { reason: reason::NO_RESOURCES, .. }));

    conn_b.reject(reason::CONSUMER, b"no").unwrap();
    let CmEventKind::Rejected { reason, private_data } = next(&events_a) else { panic!("not rejected") };
    assert_eq!((reason, &private_data[..3], private_data.len()), (reason::CONSUMER, &b"no\0"[..], 148));
    assert_eq!(conn_b.reject(28, &[]).map_err(|e| e.errno()), Err(libc::EINVAL), "once");

    let (_conn3, events_3) = a.connect(listener.local(), &qp, &[]);
    drop(requested(&events_b));
    assert!(
        matches!(next(&events_3), CmEventKind::Rejected { reason: reason::CONSUMER, .. }),
        "dropped is refused"
    );

    let gone = listener.local();
    drop(listener);
    let (_conn4, events_4) = a.connect(gone, &qp, &[]);
    assert!(matches!(next(&events_4), CmEventKind::Rejected { reason: reason::INVALID_SERVICE_ID, .. }));
}

/// The program of the passive side could not use such a queue pair, and hears nothing of it.
#[test]
fn a_request_for_more_than_the_path_mtu_is_refused_for_it() {
    let settings = settings();
    let small = Side::new(&Settings { mtu: Some(512), ..settings.clone() });
    let other = Side::new(&settings);
    let (listener, events) = small.listen(PortSpace::Tcp, 1);
    let qp = other.node.qp(QpType::Rc);
    let (_conn, events_other) = other.connect(listener.local(), &qp, &[]);
    assert!(matches!(next(&events_other), CmEventKind::Rejected { reason: reason::INVALID_PATH_MTU, .. }));
    assert!(events.try_recv().is_err());
}

#[test]
fn a_dropped_connection_is_released() {
    let [a, b] = Side::pair(&settings());
    let (listener, events_b) = b.listen(PortSpace::Tcp, 4);
    let qps = [a.node.qp(QpType::Rc), b.node.qp(QpType::Rc)];
    let (conn_a, events_a) = a.connect(listener.local(), &qps[0], &[]);
    let (conn_b, _) = requested(&events_b);
    let (own_sink, own_told) = sink();
    conn_b.set_sink(own_sink);
    conn_b.accept(&accept(side(&qps[1]), &[])).unwrap();
    assert!(matches!(next(&events_a), CmEventKind::Response(_)));
    conn_a.establish().unwrap();
    assert!(matches!(next(&own_told), CmEventKind::Established));
    drop(conn_a);
    assert!(matches!(next(&own_told), CmEventKind::Disconnected { status: 0 }));
    assert!(events_b.try_recv().is_err(), "the listener's sink gets requests alone");
}

/// What a process leaves behind is ended when it goes: the peer need not find out by itself.
#[test]
fn who_leaves_tells_its_peers() {
    let [a, b] = Side::pair(&settings());
    let (listener, at_listener) = a.listen(PortSpace::Tcp, 8);
    let (qa, qb) = (a.node.qp(QpType::Rc), b.node.qp(QpType::Rc));
    let (_waiting, events) = b.connect(listener.local(), &qb, b"");
    let (_unanswered, _) = requested(&at_listener);
    let (_conn, at_b) = {
        let (listener, events) = b.listen(PortSpace::Tcp, 8);
        let (conn, at_a) = a.connect(listener.local(), &qa, b"");
        let (served, request) = requested(&events);
        let (own_sink, own_told) = sink();
        served.set_sink(own_sink);
        ready(&b.node, &qb, request.qp);
        served.accept(&accept(side(&qb), b"")).unwrap();
        assert!(matches!(next(&at_a), CmEventKind::Response(_)));
        conn.establish().unwrap();
        assert!(matches!(next(&own_told), CmEventKind::Established));
        ((conn, served), own_told)
    };
    a.agent.leave();
    assert!(matches!(next(&events), CmEventKind::Rejected { .. }));
    assert!(matches!(next(&at_b), CmEventKind::Disconnected { status: 0 }));
}

#[test]
fn a_datagram_queue_pair_is_asked_for() {
    let [a, b] = Side::pair(&settings());
    let (listener, events_b) = b.listen(PortSpace::Udp, 4);
    let (sink, events_a) = sink();
    let resolve = Resolve {
        local: local(4660),
        remote: listener.local(),
        space: PortSpace::Udp,
        traffic_class: 0,
        hop_limit: 0,
        private_data: b"who".to_vec(),
    };
    let _asked = a.agent.resolve(&resolve, Arc::clone(&sink)).unwrap();
    let CmEventKind::Resolving(conn, asked) = next(&events_b) else { panic!("no question") };
    assert_eq!((asked.local, asked.remote), (listener.local(), local(4660)));
    assert_eq!((&asked.private_data[..4], asked.private_data.len()), (&b"who\0"[..], 180));
    let mut answer = SidrAnswer {
        status: sidr::SUCCESS,
        qpn: 0x1234,
        qkey: 0x0123_4567,
        ece: Ece::default(),
        private_data: b"me".to_vec(),
    };
    conn.answer(&answer).unwrap();
    let CmEventKind::Resolved(resolved) = next(&events_a) else { panic!("no answer") };
    assert_eq!((resolved.qpn, resolved.qkey), (0x1234, 0x0123_4567));
    assert_eq!((&resolved.private_data[..3], resolved.private_data.len()), (&b"me\0"[..], 136));

    let _again = a.agent.resolve(&resolve, Arc::clone(&sink)).unwrap();
    let CmEventKind::Resolving(conn, _) = next(&events_b) else { panic!("no question") };
    answer.status = sidr::REJECT;
    conn.answer(&answer).unwrap();
    assert!(matches!(next(&events_a), CmEventKind::Unreachable { status: 2 }));

    drop(listener);
    let _nobody = a.agent.resolve(&resolve, sink).unwrap();
    assert!(matches!(next(&events_a), CmEventKind::Unreachable { status: 1 }));
}

#[test]
fn a_port_has_one_holder_of_the_host() {
    let [a, b] = Side::pair(&settings());
    let held = a.agent.bind(bind(0, PortSpace::Tcp)).unwrap();
    let port = held.local().port();
    assert_ne!(port, 0);
    let errno = |bind| b.agent.bind(bind).map(|held| held.local()).map_err(|e| e.errno());
    assert_eq!(errno(bind(port, PortSpace::Tcp)), Err(libc::EADDRINUSE));
    let any = BindAddr { local: SocketAddr::from(([0, 0, 0, 0], port)), ..bind(0, PortSpace::Tcp) };
    assert_eq!(errno(any), Err(libc::EADDRNOTAVAIL));
    let foreign = BindAddr { local: SocketAddr::from(([192, 0, 2, 77], 0)), ..any };
    assert_eq!(errno(foreign), Err(libc::EADDRNOTAVAIL));
    assert_eq!(errno(bind(port, PortSpace::Udp)), Ok(local(port)), "another port space");
    let (sink, _) = sink();
    let listener = a.agent.listen(&held, 1, Arc::clone(&sink)).unwrap();
    assert_eq!(a.agent.listen(&held, 1, sink).map(drop).map_err(|e| e.errno()), Err(libc::EADDRINUSE));
    drop(held);
    assert_eq!(errno(bind(port, PortSpace::Tcp)), Err(libc::EADDRINUSE), "the listener holds it");
    drop(listener);
    assert_eq!(errno(bind(port, PortSpace::Tcp)), Ok(local(port)));
}

#[test]
fn wrong_parameters_are_refused() {
    let [a, _b] = Side::pair(&settings());
    let qp = QpSide { qpn: 2, psn: Psn::new(0), srq: false };
    let errno = |change: &dyn Fn(&mut Connect)| {
        let mut parameters = connect(local(1), qp, &[]);
        change(&mut parameters);
        a.agent.connect(&parameters, sink().0).map(drop).map_err(|e| e.errno())
    };
    assert_eq!(errno(&|_| {}), Ok(()));
    assert_eq!(errno(&|c| c.private_data = vec![0; 57]), Err(libc::EINVAL));
    assert_eq!(errno(&|c| c.retry_count = 8), Err(libc::EINVAL));
    assert_eq!(errno(&|c| c.space = PortSpace::Udp), Err(libc::EINVAL));
    assert_eq!(errno(&|c| c.local = "192.0.2.77:1".parse().unwrap()), Err(libc::EADDRNOTAVAIL));
    assert_eq!(errno(&|c| c.remote = "[::1]:1".parse().unwrap()), Err(libc::EINVAL));
}

/// The first ports are for services (ip(7)); which they are is the system's to say.
#[test]
fn a_privileged_port_takes_the_capability() {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start").unwrap();
    let first: u16 = text.trim().parse().unwrap();
    if first < 2 {
        return;
    }
    let side = Side::new(&settings());
    let agent = side.agent.clone();
    let alone = std::thread::spawn(move || {
        give_up_capabilities();
        agent.bind(bind(first - 1, PortSpace::Tcp)).map(drop).map_err(|error| error.errno())
    });
    assert_eq!(alone.join().unwrap(), Err(libc::EACCES));
}

/// Of the calling thread.
fn give_up_capabilities() {
    const VERSION_3: u32 = 0x2008_0522;
    let (header, none) = ([VERSION_3, 0], [0u32; 6]);
    // SAFETY: capset(2) reads a header of two words and two structs of three words, which both are.
    assert_eq!(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) }, 0);
}
