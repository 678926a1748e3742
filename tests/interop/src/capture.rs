//! What crosses the wire during a case, as tshark reads it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use starverbs_conformance::command::output;
use starverbs_conformance::process::{Process, tail};

use crate::net::TAP;
use crate::world::World;

/// The frames of one case.
pub(crate) struct Frames {
    /// How many.
    pub count: usize,
    /// Kinds: source, op-code, AETH syndrome.
    pub kinds: usize,
    /// Numbers of those that tshark finds malformed, or not RoCE at all.
    pub malformed: Vec<u32>,
}

/// Op-code and UDP length of an RC SEND Only without a byte of payload, which tshark 4.0 calls malformed, rxe's own too: it
/// looks for a payload after the BTH.
const EMPTY_SEND: [&str; 2] = ["4", "24"];
const LIMIT: Duration = Duration::from_secs(10);
const FIELDS: [&str; 7] = [
    "frame.number",
    "ip.src",
    "ipv6.src",
    "infiniband.bth.opcode",
    "infiniband.aeth.syndrome",
    "udp.length",
    "_ws.malformed",
];

/// Does `body` while the tap device is captured. Keeps one frame of each kind in the folder `keep`, named after `name`.
pub(crate) fn during<T>(
    world: &mut World,
    name: &str,
    keep: Option<&Path>,
    body: impl FnOnce(&mut World) -> Result<T, String>,
) -> Result<(T, Frames), String> {
    let (file, result) = recorded(world, body)?;
    let result = result?;
    let lines = output(&mut decode(&file))?;
    let (frames, first_of_each) = sort(&lines);
    if let Some(folder) = keep {
        write_vectors(&file, &folder.join(file_name(name)), &first_of_each)?;
    }
    Ok((result, frames))
}

/// Does `body` while the tap device is captured; keeps the file in the folder `keep`, named after `name`, if it fails.
pub(crate) fn of_failure<T>(
    world: &mut World,
    name: &str,
    keep: &Path,
    body: impl FnOnce(&mut World) -> Result<T, String>,
) -> Result<T, String> {
    let (file, result) = recorded(world, body)?;
    result.map_err(|reason| {
        let kept = keep.join(file_name(name));
        match std::fs::copy(&file, &kept) {
            Ok(_) => format!("{reason}\nits frames: {}", kept.display()),
            Err(e) => format!("{reason}\n{}: {e}", kept.display()),
        }
    })
}

/// Does `body` while the tap device is captured into the file that is returned.
fn recorded<T>(world: &mut World, body: impl FnOnce(&mut World) -> T) -> Result<(PathBuf, T), String> {
    let file = world.scratch.join("frames.pcap");
    let mut dumpcap = start(world, &file)?;
    let result = body(world);
    // Frames may still be in the kernel's buffer.
    std::thread::sleep(Duration::from_millis(500));
    output(Command::new("kill").args(["-INT", &dumpcap.pid().to_string()]))?;
    dumpcap.wait_until(Instant::now() + LIMIT).ok_or("dumpcap does not end")?;
    Ok((file, result))
}

fn start(world: &World, file: &Path) -> Result<Process, String> {
    let _ = std::fs::remove_file(file);
    let mut command = world.net.command("dumpcap");
    command.args(["-q", "-P", "-i", TAP, "-f", "udp port 4791", "-w"]).arg(file);
    let mut dumpcap = Process::start(command, world.scratch.join("dumpcap"))?;
    let deadline = Instant::now() + LIMIT;
    // It makes the file when it is ready to capture.
    while std::fs::metadata(file).map_or(0, |data| data.len()) == 0 {
        if dumpcap.ended().is_some() || Instant::now() > deadline {
            return Err(format!("dumpcap does not start:\n{}", tail(&dumpcap.output())));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(dumpcap)
}

fn decode(file: &Path) -> Command {
    let mut command = Command::new("tshark");
    command.arg("-r").arg(file).args(["-T", "fields"]);
    for field in FIELDS {
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
    fn malformed_frames_and_kinds_are_told_apart() {
        let text = "1\ta\t\t4\t\t88\t\n2\ta\t\t4\t\t88\t\n3\tb\t\t17\t31\t28\t\n4\tb\t\t\t\t\t\n5\tb\t\t4\t\t88\t1\n6\ta\t\t4\t\t24\t1\n";
        let (frames, first) = sort(text);
        assert_eq!((frames.count, frames.kinds, first), (6, 2, vec![1, 3]));
        assert_eq!(frames.malformed, [4, 5]);
    }

    #[test]
    fn titles_make_file_names() {
        assert_eq!(
            file_name("peer -m 4096 (IPv6), rxe serves starverbs"),
            "peer-m-4096-ipv6-rxe-serves-starverbs.pcap"
        );
    }
}
