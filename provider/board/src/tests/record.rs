//! Records of boards, and what becomes of them when they are played back.

use std::fs::{self, File};

use starverbs_rules::{BenchOptions, Wire, run};
use starverbs_settings::{QpcPolicy, QpcSpec, Settings};

use super::*;
use crate::{Replay, ReplayError};

/// Records a board while `clients` run; gives the record's text.
fn recorded(settings: &Settings, sockets: usize, clients: impl FnOnce(&[PathBuf]) + Send) -> String {
    let file =
        std::env::temp_dir().join(format!("starverbs-record-{}-{}", std::process::id(), settings.port));
    let record = File::create_new(&file).unwrap();
    drop(with_board_recorded(settings, sockets, record, clients));
    let text = fs::read_to_string(&file).unwrap();
    fs::remove_file(&file).unwrap();
    text
}

/// Plays a record back; gives its turns.
fn played(text: &str) -> Result<u64, ReplayError> {
    let file = sealed::file(c"record", text.len()).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, text.as_bytes(), 0).unwrap();
    Ok(Replay::open(file)?.run()?.turns)
}

fn messages(paths: &[PathBuf]) {
    let mut raw = Raw::open(&paths[0]);
    let TwoQps { key, mut a, mut b } = two_qps(&mut raw);
    for n in 0..20 {
        raw.exchange(key, &mut a, &mut b, n).unwrap();
    }
    let wqe = SendWqe { remote_addr: BASE + DATA as u64, rkey: key, ..request(SendOp::FetchAdd, 7) };
    raw.put_send(&mut a, wqe, data(64, 8, key));
    raw.doorbell(&a);
    assert_eq!(raw.completion().status, WcStatus::Success);
}

#[test]
fn a_record_is_played_back() {
    let text = recorded(&settings(), 1, messages);
    let lines = |kind: &str| text.lines().filter(|line| line.split(' ').next() == Some(kind)).count();
    assert!(lines("bell") >= 21 && lines("frame-out") >= 42 && lines("frame-in") >= 42, "{text}");
    assert_eq!((lines("dma-atomic"), lines("gone")), (1, 1), "{text}");
    assert!(played(&text).unwrap() > 21);
}

/// All that the rules do, hostile and broken clients with it: with room for all contexts, and for one.
#[test]
fn what_the_rules_do_is_played_back() {
    let time = Duration::from_micros(1);
    let few = QpcSpec { entries: 1, miss: time, fetch: time, policy: QpcPolicy::LatencyHiding };
    for qpc_cache in [None, Some(few)] {
        let settings = Settings { qpc_cache, ..settings() };
        let wire = Some(Wire { address: "127.0.0.2".parse().unwrap(), port: settings.port });
        let text = recorded(&settings, 2, |paths| {
            let options = BenchOptions { sockets: paths.to_vec(), patience: Duration::from_secs(60), wire };
            assert!(run(&options, |_| true, |_, _| ()), "the rules are kept");
        });
        assert!(played(&text).unwrap() > 100);
    }
}

/// A board that does something else is found, by the line.
#[test]
fn what_is_different_is_named() {
    let text = recorded(&settings(), 1, messages);
    let changed = |from: &str, change: fn(&str) -> String| {
        let at = text.lines().position(|line| line.starts_with(from)).unwrap();
        let lines = text.lines().enumerate();
        let lines = lines.map(|(n, line)| if n == at { change(line) } else { line.to_owned() } + "\n");
        match played(&lines.collect::<String>()) {
            Err(ReplayError::Diverged(found)) => (found.line as i64 - 1 - at as i64, found.recorded),
            other => panic!("{from}: {other:?}"),
        }
    };
    let flip = |line: &str| {
        let (front, last) = line.split_at(line.len() - 1);
        format!("{front}{}", if last == "0" { "1" } else { "0" })
    };
    let drop_it = |_: &str| String::new();
    for kind in ["frame-out", "dma-write"] {
        assert_eq!(changed(kind, flip).0, 0, "{kind}: an output that is another one");
        assert!(changed(kind, drop_it).0 >= 1, "{kind}: an output that is missing");
    }
    /* an input that is another one: what follows from it is */
    assert!(changed("bell", flip).0 >= 1);
    assert!(changed("frame-in", flip).0 >= 1);
    assert!(changed("dma-read", drop_it).0 >= 1);
    assert_eq!(changed("time", |_| "tim 5".to_owned()).1, "tim 5");
    /* in the middle of an output: at the end of a turn it would be a shorter record, and right */
    let middle = text.rfind("\nframe-out").unwrap() + "\nframe-out".len();
    let cut = played(&text[..middle]);
    assert!(matches!(cut, Err(ReplayError::Diverged(_))), "a record that ends in the middle: {cut:?}");
    assert!(matches!(played(""), Err(ReplayError::Head(1))));
}
