//! What crosses the wire during a case, as tshark reads it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use starverbs_conformance::command::output;
use starverbs_conformance::process::{Process, tail};
use starverbs_guest::net::{ADDRESSES, TAP};

use crate::world::{Ip, Provider, World};

/// The frames of one case.
pub(crate) struct Frames {
    /// How many.
    pub count: usize,
    /// Kinds: source, op-code, AETH syndrome.
    pub kinds: usize,
    /// Numbers of those that tshark finds malformed, or not RoCE at all.
    pub malformed: Vec<u32>,
}

/// Op-code and UDP length of an RC SEND Only without a byte of payload, which tshark 4.0 calls malformed,
/// rxe's own too: it looks for a payload after the BTH.
const EMPTY_SEND: [&str; 2] = ["4", "24"];
/// The last op-code of RC's SENDs and WRITEs (IBTA table 38); none of them is an answer.
const RC_WRITE_ONLY_IMM: u8 = 11;
/// Arguments of dumpcap: no more of a frame than its headers.
const HEADERS: [&str; 2] = ["-s", "128"];
const LIMIT: Duration = Duration::from_secs(10);
/// What the last frame of a capture says, a datagram to the discard service.
const LAST: &str = "the capture ends here";
const DISCARD: u16 = 9;
/// Bytes at a capture's end that are searched for it: frames may follow that answer earlier ones.
const TAIL: u64 = 1 << 16;
const FIELDS: [&str; 7] = [
    "frame.number",
    "ip.src",
    "ipv6.src",
    "infiniband.bth.opcode",
    "infiniband.aeth.syndrome",
    "udp.length",
    "_ws.malformed",
];
const REQUEST_FIELDS: [&str; 6] = [
    "frame.number",
    "ip.src",
    "ipv6.src",
    "infiniband.bth.destqp",
    "infiniband.bth.psn",
    "infiniband.bth.opcode",
];

/// Does `body` while the tap device is captured. Keeps one frame of each kind in the folder `keep`, named
/// after `name`.
pub(crate) fn during<T>(
    world: &mut World,
    name: &str,
    keep: Option<&Path>,
    body: impl FnOnce(&mut World) -> Result<T, String>,
) -> Result<(T, Frames), String> {
    let (file, dumpcap) = start(world, &[])?;
    let result = body(world)?;
    stop(world, &file, dumpcap)?;
    let lines = output(&mut decode(&file, &FIELDS))?;
    let (frames, first_of_each) = sort(&lines);
    if let Some(folder) = keep {
        write_vectors(&file, &folder.join(file_name(name)), &first_of_each)?;
    }
    Ok((result, frames))
}

/// A failure of a pair, and what the frames of its end that is rxe say of it.
pub(crate) struct Failure {
    pub reason: String,
    /// A packet that rxe sent again as another one.
    pub changed: Option<String>,
}

/// Does `body` while the headers on the tap device are captured, to look at them if it fails. Keeps them in
/// the folder `keep`, named after `name`.
pub(crate) fn of_failure<T>(
    world: &mut World,
    name: &str,
    keep: Option<&Path>,
    body: impl FnOnce(&mut World) -> Result<T, String>,
) -> Result<T, Failure> {
    let unclear = |reason| Failure { reason, changed: None };
    let (file, dumpcap) = start(world, &HEADERS).map_err(unclear)?;
    let mut reason = match body(world) {
        Ok(value) => return Ok(value),
        Err(reason) => reason,
    };
    stop(world, &file, dumpcap).map_err(unclear)?;
    if let Some(folder) = keep {
        let kept = folder.join(file_name(name));
        reason += &match std::fs::copy(&file, &kept) {
            Ok(_) => format!("\nits frames: {}", kept.display()),
            Err(e) => format!("\n{}: {e}", kept.display()),
        };
    }
    let lines = output(&mut decode(&file, &REQUEST_FIELDS)).map_err(unclear)?;
    let rxe = [Ip::V4, Ip::V6].map(|ip| World::address(Provider::Rxe, ip));
    Err(Failure { reason, changed: changed_packet(&lines, &rxe) })
}

/// A packet of a SEND or WRITE from one of `sources` whose PSN was sent before with another op-code: no
/// repeat may differ from what it repeats in that.
fn changed_packet(lines: &str, sources: &[&str]) -> Option<String> {
    let mut sent: BTreeMap<(&str, &str), &str> = BTreeMap::new();
    lines.lines().find_map(|line| {
        let fields: Vec<&str> = line.split('\t').collect();
        let [_, v4, v6, qpn, psn, code] = fields[..] else { return None };
        let ours = !sources.contains(&v4) && !sources.contains(&v6);
        if ours || code.parse::<u8>().ok().is_none_or(|code| code > RC_WRITE_ONLY_IMM) {
            return None;
        }
        let before = *sent.entry((qpn, psn)).or_insert(code);
        (before != code).then(|| {
            format!("rdma_rxe sent PSN {psn} to queue pair {qpn} with op-code {before}, then {code}")
        })
    })
}

/// Starts to capture what crosses the tap device, and gives the file. `more`: arguments of dumpcap.
fn start(world: &World, more: &[&str]) -> Result<(PathBuf, Process), String> {
    let file = world.scratch.join("frames.pcap");
    let _ = std::fs::remove_file(&file);
    let mut command = world.net.command("dumpcap");
    let filter = format!("udp port 4791 or udp dst port {DISCARD}");
    command.args(["-q", "-P", "-i", TAP, "-f", &filter]).args(more).arg("-w").arg(&file);
    let mut dumpcap = Process::start(command, world.scratch.join("dumpcap"))?;
    let deadline = Instant::now() + LIMIT;
    // It makes the file when it is ready to capture.
    while std::fs::metadata(&file).map_or(0, |data| data.len()) == 0 {
        if dumpcap.ended().is_some() || Instant::now() > deadline {
            return Err(format!("dumpcap does not start:\n{}", tail(&dumpcap.output())));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok((file, dumpcap))
}

/// Ends a capture; all that crossed the device before is in its file then.
fn stop(world: &World, file: &Path, mut dumpcap: Process) -> Result<(), String> {
    // The kernel's buffer and dumpcap's keep the order of frames: once this one is in the file, all are.
    let send = format!("printf '{LAST}' >/dev/udp/{}/{DISCARD}", ADDRESSES[1]);
    output(world.net.command("bash").args(["-c", &send]))?;
    let deadline = Instant::now() + LIMIT;
    while !is_whole(file) {
        if dumpcap.ended().is_some() || Instant::now() > deadline {
            return Err(format!("dumpcap does not write the last frame:\n{}", tail(&dumpcap.output())));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    output(Command::new("kill").args(["-INT", &dumpcap.pid().to_string()]))?;
    dumpcap.wait_until(Instant::now() + LIMIT).map(drop).ok_or("dumpcap does not end".to_owned())
}

/// Whether the last frame of a capture is in its file.
fn is_whole(file: &Path) -> bool {
    let mut bytes = Vec::new();
    let read = File::open(file).and_then(|mut file| {
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
        file.read_to_end(&mut bytes)
    });
    read.is_ok() && bytes.windows(LAST.len()).any(|window| window == LAST.as_bytes())
}

fn decode(file: &Path, fields: &[&str]) -> Command {
    let mut command = Command::new("tshark");
    command.arg("-r").arg(file).args(["-Y", "udp.port == 4791", "-T", "fields"]);
    for field in fields {
        command.args(["-e", field]);
    }
    command
}

/// Counts tshark's lines, and gives the numbers of the first frame of each kind.
fn sort(lines: &str) -> (Frames, Vec<u32>) {
    let mut kinds = BTreeSet::new();
    let mut first_of_each = Vec::new();
    let mut frames = Frames { count: 0, kinds: 0, malformed: Vec::new() };
    for line in lines.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let (true, Ok(number)) = (fields.len() == FIELDS.len(), fields[0].parse()) else { continue };
        frames.count += 1;
        let empty_send = [fields[3], fields[5]] == EMPTY_SEND;
        if fields[3].is_empty() || !(fields[6].is_empty() || empty_send) {
            frames.malformed.push(number);
        } else if kinds.insert(fields[1..5].to_vec()) {
            first_of_each.push(number);
        }
    }
    frames.kinds = kinds.len();
    (frames, first_of_each)
}

fn write_vectors(from: &Path, to: &PathBuf, numbers: &[u32]) -> Result<(), String> {
    let mut command = Command::new("editcap");
    command.args(["-F", "pcap", "-r"]).arg(from).arg(to).args(numbers.iter().map(u32::to_string));
    output(&mut command).map(drop)
}

/// A file name from a title: its words, joined by hyphens.
fn file_name(title: &str) -> String {
    let words: Vec<&str> =
        title.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    words.join("-").to_lowercase() + ".pcap"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_is_whole_with_its_last_frame() {
        let file = std::env::temp_dir().join(format!("starverbs-capture-{}", std::process::id()));
        assert!(!is_whole(&file), "there is none");
        let mut bytes = vec![b'.'; 2 * TAIL as usize];
        bytes.extend(&LAST.as_bytes()[1..]);
        std::fs::write(&file, &bytes).unwrap();
        let half = is_whole(&file);
        bytes.extend(LAST.as_bytes());
        bytes.extend([b'.'; 1000]);
        std::fs::write(&file, &bytes).unwrap();
        let whole = is_whole(&file);
        std::fs::remove_file(&file).unwrap();
        assert_eq!((half, whole), (false, true));
    }

    #[test]
    fn malformed_frames_and_kinds_are_told_apart() {
        let text = "1\ta\t\t4\t\t88\t\n2\ta\t\t4\t\t88\t\n3\tb\t\t17\t31\t28\t\n\
                    4\tb\t\t\t\t\t\n5\tb\t\t4\t\t88\t1\n6\ta\t\t4\t\t24\t1\n";
        let (frames, first) = sort(text);
        assert_eq!((frames.count, frames.kinds, first), (6, 2, vec![1, 3]));
        assert_eq!(frames.malformed, [4, 5]);
    }

    #[test]
    fn a_repeat_with_another_op_code_is_found() {
        let (first, middle) = ("1\trxe\t\t0x11\t7\t6\n", "2\trxe\t\t0x11\t8\t7\n");
        let again =
            "3\trxe\t\t0x11\t7\t6\n4\trxe\t\t0x12\t7\t7\n5\trxe\t\t0x11\t8\t17\n6\tours\t\t0x11\t7\t8\n";
        let text = format!("{first}{middle}{again}");
        assert_eq!(changed_packet(&text, &["rxe", "rxe6"]), None);
        let text = text + "7\t\trxe6\t0x11\t8\t6\n";
        let said = changed_packet(&text, &["rxe", "rxe6"]).unwrap();
        assert_eq!(said, "rdma_rxe sent PSN 8 to queue pair 0x11 with op-code 7, then 6");
    }

    #[test]
    fn titles_make_file_names() {
        assert_eq!(
            file_name("peer -m 4096 (IPv6), rxe serves starverbs"),
            "peer-m-4096-ipv6-rxe-serves-starverbs.pcap"
        );
    }
}
