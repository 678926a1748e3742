//! STARVERBS_PCAP, read back by tshark.

use std::path::Path;
use std::process::Command;

use crate::common::{Node, drive, free_port, pattern};
use starverbs_backend::Payload;
use starverbs_core::mr::MemoryRule;
use starverbs_core::wire::{HeaderBuf, PKEY_DEFAULT, code};
use starverbs_core::{Access, Av, Counters, Mtu, PdId, Psn, SendFlags, SendOp, SendWqe, Sge};
use starverbs_onerma::wire::{self as onerma_wire, Hop, Iv, OneRmaHeader, PacketPrefix};
use starverbs_onerma::{Class, Handle, OneRmaOp, RegionId, Status, TAG_LEN};
use starverbs_settings::{Settings, StarWire};
use starverbs_star::carried::Carried;
use starverbs_star::control::{Control, MAX_CONTROL, Preference, Role, Setup, Sum, Terms};
use starverbs_star::form::VERSION;
use starverbs_star::message::{self, Atomic, CqeMsg};
use starverbs_star::packed::{PackedWqes, ROOM};
use starverbs_star::role_message::RoleMessage;
use starverbs_star::token::{SlotArea, Token};
use starverbs_star::turn::DataTurn;
use starverbs_star::wire::{Opt, Prefix, Ptype, Queue, StarHead, StarHeader};

#[test]
fn tshark_reads_the_capture_as_rocev2() {
    if Command::new("tshark").arg("-v").output().is_err() {
        eprintln!("skipped: tshark is not installed");
        return;
    }
    let path = std::env::temp_dir().join(format!("starverbs-capture-{}.pcap", std::process::id()));
    let settings = Settings { port: free_port(), pcap: Some(path.clone()), ..Settings::default() };
    let mut node = Node::with(&settings);
    let qpn = node.qpn(0x123);
    for ip in ["127.0.0.1", "::1"] {
        let to = node.av(ip);
        for _ in 0..3 {
            node.send(&to, qpn, &pattern(1000, 1));
        }
    }
    node.flush();
    assert!(drive(&mut [&mut node], |n| n[0].got.len() == 6), "{:?}", node.counters);
    drop(node);
    let out = Command::new("tshark")
        .args(["-r", path.to_str().expect("a plain path"), "-d"])
        .arg(format!("udp.port=={},infiniband", settings.port))
        .args([
            "-T",
            "fields",
            "-e",
            "infiniband.bth.destqp",
            "-e",
            "infiniband.invariant.crc",
            "-e",
            "frame.protocols",
        ])
        .output()
        .expect("tshark runs");
    let _ = std::fs::remove_file(&path);
    let text = String::from_utf8_lossy(&out.stdout);
    let wanted = format!("0x{qpn:06x}");
    let frames = text.lines().filter(|l| l.contains(&wanted) && l.contains("infiniband"));
    assert_eq!(
        frames.count(),
        12,
        "6 sent and 6 received:\n{text}\n{}",
        String::from_utf8_lossy(&out.stderr)
    );
}

/// docs/star.lua decodes all that the two halves of a card say to each other.
#[test]
fn tshark_reads_star_packets_with_the_dissector() {
    if Command::new("tshark").arg("-v").output().is_err() {
        eprintln!("skipped: tshark is not installed");
        return;
    }
    let path = std::env::temp_dir().join(format!("starverbs-star-{}.pcap", std::process::id()));
    let star_wire = StarWire::Paper;
    let settings = Settings { port: free_port(), pcap: Some(path.clone()), star_wire, ..Settings::default() };
    let sent = send_everything(&settings);
    let columns = ["_ws.col.Protocol", "_ws.col.Info", "star.psn", "star.checksum.bad"];
    let named = ["star.slots", "star.slots.count", "star.token"];
    let fields = [&columns[..], &named].concat();
    let lines = dissected(&path, &[], &fields);
    assert_eq!(lines.len(), sent.len(), "{lines:#?}");
    let token = ["0x0000000000001000", "300", "0x0123456789abcdef"];
    for (psn, (line, info)) in lines.iter().zip(&sent).enumerate() {
        assert_eq!(line[..4], ["StaR", info, &psn.to_string(), ""], "{lines:#?}");
        let stateless = ["RD ", "RDC ", "RDCS ", "GD ", "CQEP "].iter().any(|kind| info.starts_with(kind));
        let has_token = stateless || info.ends_with("Setup");
        assert_eq!(line[4..7], if has_token { token } else { [""; 3] }, "{lines:#?}");
        assert!(!info.contains("control") || line[7].is_empty(), "bytes of no field: {lines:#?}");
    }
    /* the same, where small ones share frames */
    let settings = Settings { port: free_port(), star_wire: StarWire::Packed, ..settings };
    let sent = send_everything(&settings);
    let lines = dissected(&path, &[], &columns[..2]);
    let mut infos: Vec<&str> = lines.iter().flat_map(|line| line[1].split(", ")).collect();
    let mut all: Vec<&str> = sent.iter().flat_map(|info| info.split(", ")).collect();
    infos.sort_unstable();
    all.sort_unstable();
    assert!(lines.len() < sent.len() && infos == all, "{lines:#?}");
}

/// As are the frames by which the ends settle what they are.
#[test]
fn tshark_reads_the_settling_of_roles_with_the_dissector() {
    if Command::new("tshark").arg("-v").output().is_err() {
        eprintln!("skipped: tshark is not installed");
        return;
    }
    let path = std::env::temp_dir().join(format!("starverbs-roles-{}.pcap", std::process::id()));
    let settings = Settings { port: free_port(), pcap: Some(path.clone()), ..Settings::default() };
    let mut node = Node::with(&settings);
    let said = controls().into_iter().take(5).chain(rounds());
    for ip in ["127.0.0.1", "::1"] {
        let to = node.av(ip);
        for (message, _) in said.clone() {
            let pad = message.len().wrapping_neg() as u8 & 3;
            let bth = HeaderBuf::bth(code::NEGOTIATE, 0x123, Psn::new(0), false, false, pad, PKEY_DEFAULT);
            let frame = [&bth.deth(0, 0x456)[..], &message[..]].concat();
            node.tx.send_frame(&to, &frame, Payload::EMPTY, pad, false);
        }
    }
    node.flush();
    drop(node);
    let port = format!("udp.port=={},infiniband", settings.port);
    let lines = dissected(&path, &["-d", &port], &["_ws.col.Protocol", "_ws.col.Info", "star.sl_qpn"]);
    let wanted: Vec<String> = said.map(|(_, info)| format!("Roles QPN 0x000123 {info}")).collect();
    let read: Vec<&str> =
        lines.iter().filter(|line| line[0] == "StaR").map(|line| line[1].as_str()).collect();
    assert_eq!(read, [&wanted[..], &wanted[..]].concat(), "{lines:#?}");
    assert!(lines.iter().all(|line| line[2].is_empty() || line[2..4] == ["0x00000456", ""]), "{lines:#?}");
}

/// A capture file of packets from 127.0.0.1 to 127.0.0.2, of and to a UDP port.
fn capture_of(packets: &[Vec<u8>], port: u16) -> Vec<u8> {
    /* little-endian, version 2.4, raw IP */
    let mut file = [0xa1b2_c3d4u32, 4 << 16 | 2, 0, 0, 65_535, 101].map(u32::to_le_bytes).concat();
    for packet in packets {
        let len = (28 + packet.len()) as u16;
        let mut ip = [0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 127, 0, 0, 1, 127, 0, 0, 2];
        ip[2..4].copy_from_slice(&len.to_be_bytes());
        let udp = [port, port, len - 20, 0].map(u16::to_be_bytes).concat();
        file.extend([0, 0, u32::from(len), u32::from(len)].map(u32::to_le_bytes).concat());
        file.extend([&ip[..], &udp, packet].concat());
    }
    file
}

/// docs/onerma.lua decodes each of 1RMA's packets.
#[test]
fn tshark_reads_1rma_packets_with_the_dissector() {
    if Command::new("tshark").arg("-v").output().is_err() {
        eprintln!("skipped: tshark is not installed");
        return;
    }
    let handle = |index| Handle { index, generation: 7 };
    let (region, size) = (RegionId(0x51), 4096);
    let request = Hop::Request { from: handle(1), pid: 9, region, offset: 64, size, timeout: 1000 };
    let said = [
        (OneRmaOp::Read, request, 0, "READ Request region 0x51, 4096 bytes"),
        (OneRmaOp::Read, Hop::Data { to: handle(1), offset: 1024 }, 1024, "READ Data at 1024, 1024 bytes"),
        (OneRmaOp::Write, Hop::Ask { to: handle(1), from: handle(2), size }, 0, "WRITE Ask, 4096 bytes"),
        (OneRmaOp::Write, Hop::Done { to: handle(1) }, 0, "WRITE Done"),
        (OneRmaOp::Rekey, Hop::Fail { to: handle(1), status: Status::Nack }, 0, "REKEY Fail NACK"),
    ];
    let packet = |(op, hop, data, _): &(OneRmaOp, Hop, usize, &str)| {
        let iv = Iv { sender: 0x7f00_0001, counter: 5 };
        let header = OneRmaHeader { prefix: PacketPrefix { op: *op, class: Class::Low, iv }, hop: *hop };
        let packet = [header.to_bytes(), vec![0xee; *data], vec![0xaa; TAG_LEN]].concat();
        assert!(OneRmaHeader::parse(&packet).is_ok(), "{hop:?}");
        packet
    };
    let path = std::env::temp_dir().join(format!("starverbs-1rma-{}.pcap", std::process::id()));
    std::fs::write(&path, capture_of(&said.each_ref().map(packet), onerma_wire::PORT + 63)).expect("a file");
    let fields = ["_ws.col.Protocol", "_ws.col.Info", "onerma.class", "onerma.malformed"];
    let lines = dissected_by("onerma", &path, &[], &fields, &[]);
    assert_eq!(lines.len(), said.len(), "{lines:#?}");
    for (line, (.., info)) in lines.iter().zip(&said) {
        assert_eq!(line[..4], ["1RMA", info, "1", ""], "{lines:#?}");
    }
}

/// What tshark says of the packets in `path`: these fields, then what belongs to no field, and complaints.
fn dissected(path: &Path, options: &[&str], fields: &[&str]) -> Vec<Vec<String>> {
    dissected_by("star", path, options, fields, &["star.data"])
}

/// The same by another script; `strays` are fields for what belongs to no other.
fn dissected_by(
    script: &str,
    path: &Path,
    options: &[&str],
    fields: &[&str],
    strays: &[&str],
) -> Vec<Vec<String>> {
    let script = format!("lua_script:{}/../../docs/{script}.lua", env!("CARGO_MANIFEST_DIR"));
    let mut tshark = Command::new("tshark");
    tshark.args(["-X", &script, "-r"]).arg(path).args(options).args(["-T", "fields"]);
    let complaints = [strays, &["_ws.malformed", "_ws.lua.error"]].concat();
    let out = tshark.args(fields.iter().chain(&complaints).flat_map(|f| ["-e", f])).output();
    let out = out.expect("tshark runs");
    let _ = std::fs::remove_file(path);
    let text = String::from_utf8_lossy(&out.stdout);
    let lines: Vec<Vec<String>> =
        text.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect();
    for line in &lines {
        let wrong = &line[fields.len() + strays.len()..];
        assert_eq!(wrong, ["", ""], "{text}\n{}", String::from_utf8_lossy(&out.stderr));
    }
    lines
}

/// Of a connection with 300 slots.
fn token() -> Token {
    let slots = SlotArea::new(0x1000, 300 * 32).expect("slots");
    Token { slots, mac: 0x0123_4567_89ab_cdef }
}

/// Sends a packet of each kind; gives what Wireshark shall say of them.
fn send_everything(settings: &Settings) -> Vec<String> {
    let addrs = starverbs_backend::host::addresses(settings).expect("addresses");
    let counters = Counters::default();
    let (stack, _rx) = starverbs_backend::open(settings, &addrs, &counters).expect("a port");
    let (mut tx, _star) = stack.open_star(settings).expect("two ports");
    let gid = addrs[0].gid;
    let to = Av { sgid: gid, dgid: gid, ..Av::default() };
    let prefix = Prefix { qpn: 9, epoch: 0x0001_0203 };
    let mut psn = 0;
    let mut say = |ptype, opt, data: &[u8]| {
        let len = if ptype == Ptype::Gd && opt == Opt::Recv { 0 } else { data.len() as u16 };
        let header = StarHeader {
            ptype,
            opt,
            migrate: false,
            ack: true,
            qpn: 0x123,
            epoch: 3,
            psn: Psn::new(psn),
            addr: 0x1000,
            len,
        };
        let stateless = matches!(ptype, Ptype::Rd | Ptype::Rdc | Ptype::Rdcs | Ptype::Gd | Ptype::Cqep);
        let head = if stateless {
            StarHead::to_stateless(header, prefix, &token())
        } else {
            StarHead::to_stateful(header)
        };
        tx.send(&to, 40_000 + ptype as u16, &head, data, Payload::EMPTY, false);
        psn += 1;
    };
    let mut room = [0; 256];
    let send = SendWqe { op: SendOp::Send, ..SendWqe::default() };
    let sge = Sge { addr: 0x2000, len: 77, lkey: 5 };
    let len = message::encode_send(&send, &[sge, sge], &[], &mut room).expect("room");
    say(Ptype::Wqep, Opt::Send, &room[..len]);
    let len = message::encode_recv(&[sge], &mut room).expect("room");
    say(Ptype::Wqep, Opt::Recv, &room[..len]);
    let mut batch = PackedWqes::new(ROOM);
    batch.push_recv(Psn::new(9), &[sge]).expect("room");
    batch.push_send(Psn::new(8), &SendWqe { op: SendOp::Read, ..send }, &[sge, sge]).expect("room");
    batch.push_send(Psn::new(9), &SendWqe { op: SendOp::SendImm, ..send }, &[]).expect("room");
    let inline = SendWqe { flags: SendFlags::INLINE, ..send };
    let fill = |place: &mut [u8]| {
        place.fill(7);
        true
    };
    batch.push_inline(Psn::new(10), &inline, 33, fill).expect("room");
    say(Ptype::Wqeps, Opt::Recv, batch.bytes());
    let cqe = CqeMsg { slot: 96, byte_len: 5, ..CqeMsg::default() };
    let carried = Carried { queue: Queue::Recv, seq: Psn::new(77), cqe, stored: 0 }.encode();
    say(Ptype::Rdc, Opt::Send, &[&carried[..], b"fives"].concat());
    say(Ptype::Ea, Opt::Recv, &[]);
    say(Ptype::Rd, Opt::Write, &[1; 100]);
    say(Ptype::Rda, Opt::Write, &[]);
    let turn = DataTurn { slot: 48, number: 70_000, send: false }.encode();
    say(Ptype::Rd, Opt::Recv, &[&turn[..], b"two"].concat());
    let turn = DataTurn { slot: 48, number: 70_001, send: true }.encode();
    say(Ptype::Rdc, Opt::Recv, &[&carried[..], &turn, b"last"].concat());
    say(Ptype::Gd, Opt::Read, &[]);
    say(Ptype::Gda, Opt::Read, &[2; 50]);
    let atomic = Atomic { op: SendOp::FetchAdd, seq: 6, slots: 2, slot: 32, compare_add: 1, swap: 0 };
    say(Ptype::Gd, Opt::Recv, &atomic.encode());
    say(Ptype::Gda, Opt::Recv, &[3; 8]);
    say(Ptype::Gda, Opt::Recv, &[]);
    say(Ptype::Cqep, Opt::Send, &CqeMsg { slot: 64, ..CqeMsg::default() }.encode());
    let one = |data: &[u8]| [&[0; 8][..], &(data.len() as u32).to_be_bytes(), &carried, data].concat();
    say(Ptype::Rdcs, Opt::Send, &[one(b"fives"), one(b"")].concat());
    say(Ptype::Ed, Opt::Send, b"data");
    for (control, _) in controls() {
        let head = StarHead::control(0x123, prefix, Psn::new(psn), control.len() as u16);
        tx.send(&to, 40_100, &head, &control, Payload::EMPTY, false);
        psn += 1;
    }
    tx.flush(0);
    let mut said: Vec<String> = [
        "WQEP SEND QPN 0x000123 PSN 0 SEND 154 bytes",
        "WQEP RECV QPN 0x000123 PSN 1 receive 77 bytes",
        "WQEPS RECV QPN 0x000123 PSN 2 4 WQEs",
        "RDC SEND QPN 0x000123 PSN 3 completion 77 5 bytes",
        "EA RECV QPN 0x000123 PSN 4",
        "RD WRITE QPN 0x000123 PSN 5",
        "RDA WRITE QPN 0x000123 PSN 6",
        "RD RECV QPN 0x000123 PSN 7 turn 70000 3 bytes",
        "RDC RECV QPN 0x000123 PSN 8 completion 77 turn 70001 4 bytes",
        "GD READ QPN 0x000123 PSN 9",
        "GDA READ QPN 0x000123 PSN 10",
        "GD RECV QPN 0x000123 PSN 11 atomic 6",
        "GDA RECV QPN 0x000123 PSN 12",
        "GDA RECV QPN 0x000123 PSN 13 early",
        "CQEP SEND QPN 0x000123 PSN 14 success",
        "RDCS SEND QPN 0x000123 PSN 15 completion 77 5 bytes completion 77 0 bytes",
        "ED SEND QPN 0x000123 PSN 16",
    ]
    .map(str::to_owned)
    .into();
    let first = said.len();
    let text = |(n, (_, info)): (usize, (_, &str))| {
        format!("WQEP SEND control QPN 0x000123 PSN {} {info}", first + n)
    };
    said.extend(controls().into_iter().enumerate().map(text));
    said
}

/// The same of messages by which roles are settled anew, and of one by which they are at first.
fn rounds() -> Vec<(Vec<u8>, &'static str)> {
    let encoded = |message| {
        let mut room = [0; MAX_CONTROL];
        let len = RoleMessage { from: 1, to: 2, message }.encode(&mut room).expect("room");
        room[..len].to_vec()
    };
    let terms =
        Terms { preference: Preference::Auto, stateful: 121, threshold: 120, ports: [4793, 4794], boot: 7 };
    let change = Control::Change { round: 258, version: VERSION, star: false, terms };
    let quiescing =
        Control::Quiescing { round: 258, role: Role::Stateful, ports: [4793, 4794], boot: 7, point: None };
    vec![
        (encoded(change), "Change auto"),
        (encoded(quiescing), "Quiescing stateful"),
        (encoded(Control::Settled { round: 258, star: true }), "Settled"),
        (encoded(Control::Plain), "Plain"),
    ]
}

/// Each control message, and what Wireshark shall say of it.
fn controls() -> Vec<(Vec<u8>, &'static str)> {
    let encoded = |control: Control| {
        let mut room = [0; MAX_CONTROL];
        let len = control.encode(&mut room).expect("room");
        room[..len].to_vec()
    };
    let (ports, boot) = ([4793, 4794], 7);
    let terms = Terms { preference: Preference::Stateless, stateful: 5, threshold: 120, ports, boot };
    let setup = Setup {
        boot,
        pd: PdId(3),
        mtu: Mtu::M4096,
        sq_depth: 64,
        rq_depth: 32,
        srq: true,
        token: token(),
        replay_slots: 16,
        access: Access::REMOTE_WRITE,
        max_rd_atomic: 4,
        rnr_retry: 6,
        min_rnr_timer: 12,
    };
    let access = Access::REMOTE_READ;
    let rule = MemoryRule { key: 9, pd: PdId(3), qpn: 0, addr: 0x4000, len: 4096, iova: 0x5000, access };
    vec![
        (encoded(Control::Offer { terms, version: 3 }), "Offer stateless"),
        (encoded(Control::Accept { role: Role::Stateful, ports, boot }), "Accept stateful"),
        (encoded(Control::Confirm { role: Role::Stateless }), "Confirm stateless"),
        (encoded(Control::Plain), "Plain"),
        (encoded(Control::NotYet), "Not yet"),
        (encoded(Control::Setup(setup)), "Setup"),
        (encoded(Control::Rule(rule)), "Rule"),
        (encoded(Control::Begin { known: None }), "Begin"),
        (encoded(Control::Begin { known: Some(Sum::default()) }), "Begin with rules that are known"),
        (encoded(Control::ResendRules), "Resend rules"),
        (encoded(Control::Unrule { key: 9 }), "Unrule"),
        (encoded(Control::Want { upto: 77 }), "Want"),
        (encoded(Control::KeepAlive), "Keep alive"),
        (encoded(Control::Bye { why: 12, recvs: Psn::default() }), "Bye"),
    ]
}
