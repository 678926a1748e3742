//! STARVERBS_PCAP, read back by tshark.

mod common;

use std::process::Command;

use common::{Node, drive, free_port, pattern};
use starverbs_core::star::control::Control;
use starverbs_core::star::message::{self, Atomic, CqeMsg};
use starverbs_core::star::wire::{Head, Header, Opt, Prefix, Ptype};
use starverbs_core::{Av, Counters, Psn, SendOp, SendWqe, Sge};
use starverbs_settings::Settings;

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
    let settings = Settings { port: free_port(), pcap: Some(path.clone()), ..Settings::default() };
    let sent = say_everything(&settings);
    let script = concat!("lua_script:", env!("CARGO_MANIFEST_DIR"), "/../../docs/star.lua");
    let fields = [
        "_ws.col.Protocol",
        "_ws.col.Info",
        "star.psn",
        "star.checksum.bad",
        "_ws.malformed",
        "_ws.lua.error",
    ];
    let mut tshark = Command::new("tshark");
    tshark.args(["-X", script, "-r"]).arg(&path).args(["-T", "fields"]);
    let out = tshark.args(fields.iter().flat_map(|f| ["-e", f])).output().expect("tshark runs");
    let _ = std::fs::remove_file(&path);
    let text = String::from_utf8_lossy(&out.stdout);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split('\t').collect()).collect();
    assert_eq!(lines.len(), sent.len(), "{text}\n{}", String::from_utf8_lossy(&out.stderr));
    for (psn, (line, info)) in lines.iter().zip(&sent).enumerate() {
        assert_eq!(line[..], ["StaR", info, &psn.to_string(), "", "", ""], "{text}");
    }
}

/// Sends a packet of each kind; gives what Wireshark shall say of them.
fn say_everything(settings: &Settings) -> Vec<&'static str> {
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
        let header = Header {
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
        let stateless = matches!(ptype, Ptype::Rd | Ptype::Gd | Ptype::Cqep);
        let head = if stateless { Head::to_stateless(header, prefix) } else { Head::to_stateful(header) };
        tx.send(&to, 40_000 + ptype as u16, &head, data, &[], false);
        psn += 1;
    };
    let mut room = [0; 256];
    let send = SendWqe { op: SendOp::Send, ..SendWqe::default() };
    let sge = Sge { addr: 0x2000, len: 77, lkey: 5 };
    let len = message::encode_send(&send, &[sge, sge], &[], &mut room).expect("room");
    say(Ptype::Wqep, Opt::Send, &room[..len]);
    let len = message::encode_recv(&[sge], &mut room).expect("room");
    say(Ptype::Wqep, Opt::Recv, &room[..len]);
    say(Ptype::Ea, Opt::Recv, &[]);
    say(Ptype::Rd, Opt::Write, &[1; 100]);
    say(Ptype::Rda, Opt::Write, &[]);
    say(Ptype::Gd, Opt::Read, &[]);
    say(Ptype::Gda, Opt::Read, &[2; 50]);
    let atomic = Atomic { op: SendOp::FetchAdd, seq: 6, slot: 32, compare_add: 1, swap: 0 };
    say(Ptype::Gd, Opt::Recv, &atomic.encode());
    say(Ptype::Cqep, Opt::Send, &CqeMsg { slot: 64, ..CqeMsg::default() }.encode());
    let len = Control::KeepAlive.encode(&mut room).expect("room");
    tx.send(&to, 40_100, &Head::control(0x123, prefix, Psn::new(psn), len as u16), &room[..len], &[], false);
    tx.flush(0);
    vec![
        "WQEP SEND QPN 0x000123 PSN 0 SEND 154 bytes",
        "WQEP RECV QPN 0x000123 PSN 1 receive 77 bytes",
        "EA RECV QPN 0x000123 PSN 2",
        "RD WRITE QPN 0x000123 PSN 3",
        "RDA WRITE QPN 0x000123 PSN 4",
        "GD READ QPN 0x000123 PSN 5",
        "GDA READ QPN 0x000123 PSN 6",
        "GD RECV QPN 0x000123 PSN 7 atomic 6",
        "CQEP SEND QPN 0x000123 PSN 8 success",
        "WQEP SEND control QPN 0x000123 PSN 9 Keep alive",
    ]
}
