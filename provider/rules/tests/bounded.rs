//! Boards that are silent, gone, or lie: the runner ends, in bounded time, and says that they are none.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use starverbs_backend::sealed;
use starverbs_core::rng::Rng;
use starverbs_queues::board::{MAGIC, REG_MAGIC, REG_STATUS, REG_VERSION, STATUS_ENABLED, VERSION};
use starverbs_rules::{BenchOptions, RuleResult, run};
use starverbs_vfio::message::{Access, Head, REGION_MMAP, REPLY, Region, Version, parse};
use starverbs_vfio::{MessageOp, MessageStream, ReadResult, VfioMessage};
use zerocopy::IntoBytes;

/// Runs all rules against a board whose connections `serve` has, each in a thread of its own; what became of
/// the rules.
fn against(name: &str, patience: Duration, serve: fn(UnixStream, u64, &AtomicBool)) -> Vec<RuleResult> {
    let path = std::env::temp_dir().join(format!("starverbs-{name}-{}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let (stop, outcomes) = (AtomicBool::new(false), std::sync::Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (n, socket) in listener.incoming().map_while(Result::ok).enumerate() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let stop = &stop;
                scope.spawn(move || serve(socket, n as u64, stop));
            }
        });
        let options = BenchOptions { sockets: vec![path.clone()], patience, wire: None };
        let sound = run(&options, |_| true, |_, outcome| outcomes.lock().unwrap().push(outcome.clone()));
        assert!(!sound);
        stop.store(true, Ordering::Relaxed);
        let _ = UnixStream::connect(&path);
    });
    std::fs::remove_file(&path).unwrap();
    outcomes.into_inner().unwrap()
}

fn none_passed(outcomes: &[RuleResult]) {
    let passed = outcomes.iter().filter(|outcome| **outcome == RuleResult::Passed).count();
    assert_eq!(passed, 0, "{outcomes:?}");
}

#[test]
fn a_board_that_is_not_there_fails_all_rules() {
    let nowhere = PathBuf::from("/nowhere/at/all");
    let options = BenchOptions { sockets: vec![nowhere], patience: Duration::from_secs(60), wire: None };
    let mut outcomes = Vec::new();
    assert!(!run(&options, |_| true, |_, outcome| outcomes.push(outcome.clone())));
    none_passed(&outcomes);
}

/// It takes connections, and says nothing.
#[test]
fn a_board_that_is_silent_is_given_up() {
    let outcomes = against("silent", Duration::from_millis(100), |mut socket, _, _| {
        while socket.read(&mut [0; 4096]).is_ok_and(|bytes| bytes > 0) {}
    });
    none_passed(&outcomes);
    let given_up =
        |result: &&RuleResult| matches!(result, RuleResult::Failed { seen, .. } if seen.contains("given up"));
    assert!(outcomes.iter().filter(given_up).count() > 30, "{outcomes:?}");
}

/// It says VERSION's answer byte by byte, and never to its end.
#[test]
fn a_board_that_is_slow_is_given_up() {
    let outcomes = against("slow", Duration::from_millis(100), |mut socket, _, stop| {
        while !stop.load(Ordering::Relaxed) && socket.write_all(&[1]).is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    none_passed(&outcomes);
}

/// It answers every message, with what it likes.
#[test]
fn a_board_that_lies_harms_no_runner() {
    let outcomes = against("liar", Duration::from_millis(100), lie);
    let failed = outcomes.iter().filter(|outcome| matches!(outcome, RuleResult::Failed { .. })).count();
    assert!(failed > 30, "{outcomes:?}");
}

fn lie(socket: UnixStream, seed: u64, stop: &AtomicBool) {
    let mut stream = MessageStream::new(socket).unwrap();
    let mut rng = Rng::new([seed, 9]);
    let page = sealed::file(c"starverbs-liar", 64 << 10).unwrap();
    while !stop.load(Ordering::Relaxed) {
        match stream.receive() {
            ReadResult::Message(message) => {
                let VfioMessage { head, body, .. } = &message;
                let reply = answer(*head, body, &mut rng);
                let fds = [page.as_fd()];
                let with = head.op == MessageOp::RegionInfo as u16;
                let _ = stream.send(Head { flags: REPLY, ..*head }, &reply, if with { &fds } else { &[] });
            }
            ReadResult::Nothing => std::thread::yield_now(),
            ReadResult::Gone => return,
        }
    }
}

fn answer(head: Head, body: &[u8], rng: &mut Rng) -> Vec<u8> {
    match MessageOp::from_code(head.op) {
        Some(MessageOp::Version) => Version { major: 0, minor: 0 }.as_bytes().to_vec(),
        Some(MessageOp::RegionInfo) => {
            let (info, _) = parse::<Region>(body).unwrap();
            Region { flags: 3 | REGION_MMAP, size: 64 << 10, ..info }.as_bytes().to_vec()
        }
        Some(MessageOp::RegionRead) => {
            let (access, _) = parse::<Access>(body).unwrap();
            let word = match access.offset as u32 {
                REG_MAGIC => MAGIC,
                REG_VERSION => VERSION,
                REG_STATUS => STATUS_ENABLED,
                _ => rng.word() as u32,
            };
            let noise: Vec<u8> = (0..access.count).map(|_| rng.word() as u8).collect();
            let word = if access.count == 4 { &word.to_le_bytes()[..] } else { &noise };
            [access.as_bytes(), word].concat()
        }
        _ => body.to_vec(),
    }
}
