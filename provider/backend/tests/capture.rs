//! STARVERBS_PCAP, read back by tshark.

mod common;

use std::process::Command;

use common::{Node, drive, free_port, pattern};
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
