//! Settings by a real program: from a file with every key, and the errors that name what is wrong.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::case::{Case, Net, Verdict};
use crate::check::Expect;
use crate::pair::Pair;
use crate::process::tail;
use crate::world::{Setting, World};

pub(crate) fn cases() -> Vec<Case> {
    let case = |name, body: fn(&mut World) -> Result<String, String>| {
        Case::special("settings", name, &[Net::Lo], move |world, _| Verdict::from(body(world)))
            .of_software("settings of the wire are the board's")
    };
    vec![
        case("unknown keys and bad values are named", bad_variables),
        case("a TOML file with every key", whole_file),
        case("the file in the home directory, and what wins over it", personal_file),
        case("unknown keys and bad values in a file are named, with the file", bad_files),
    ]
}

/// Every key with a value that is not its default; `pcap` is where captures go.
fn all_keys(pcap: &Path) -> String {
    format!(
        "board_doorbell = \"message\"\n\
         fault = {{ delay = \"1ms\", seed = 7 }}\n\
         pcap = {pcap:?}\n\
         mtu = 512\n\
         addrs = [\"127.0.0.1\"]\n\
         port = 14791\n\
         link = \"udp\"\n\
         link_trust = \"none\"\n\
         share = \"malloc\"\n\
         rcvbuf = \"8M\"\n\
         sndbuf = \"8M\"\n\
         memory = \"2G\"\n\
         gso = false\n\
         gro = false\n\
         progress_thread = false\n\
         log = \"info\"\n\
         window = \"64K\"\n\
         delay_target = \"2ms\"\n\
         defer = false\n\
         repeat = \"off\"\n\
         credits = true\n\
         qpc_prefetch = false\n\
         qpc_cache = {{ entries = 300, policy = \"non-blocking\" }}\n\
         star = \"auto\"\n\
         star_threshold = 7\n\
         star_wire = \"paper\"\n\
         star_partition = \"127.0.0.0/8\"\n\
         star_key = \"{}\"\n\
         onerma_window = {{ beta = 0.7, rtt = \"50us\" }}\n",
        "5a".repeat(32)
    )
}

/// A settings file that nobody else can read: with StaR's key in it another one is refused.
fn write(world: &World, name: &str, text: &str) -> Result<PathBuf, String> {
    let file = world.scratch(name);
    let folder = file.parent().unwrap_or(&file);
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&file, text))
        .and_then(|()| std::fs::set_permissions(&file, Permissions::from_mode(0o600)))
        .map_err(|e| e.to_string())?;
    Ok(file)
}

/// What `starverbs info --settings` says with these variables.
fn in_force(world: &World, variables: &[(&str, &Path)]) -> Result<String, String> {
    let starverbs = world.starverbs.to_string_lossy();
    let mut command = world.command(Net::Lo, 0, &[&starverbs, "info", "--settings"]);
    let output = command.envs(variables.iter().copied()).output().map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() { Ok(text) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

fn whole_file(world: &mut World) -> Result<String, String> {
    let file = write(world, "all.toml", &all_keys(&world.scratch("settings-%p.pcap")))?;
    let shown = in_force(world, &[("STARVERBS_CONFIG", &file)])?;
    let keys: Vec<&str> = shown.lines().filter(|line| line.starts_with("STARVERBS_")).collect();
    /* another device would need a board that runs */
    let kept = |line: &&&str| !line.contains("(default ") && !line.starts_with("STARVERBS_DEVICE=");
    if let Some(line) = keys.iter().find(kept) {
        return Err(format!("this case's file does not change {line}"));
    }
    // 4096 bytes each way, in frames of 512.
    let pair = Pair::new("ibv_rc_pingpong", "-g 0 -c -m 512 -n 200", Expect::PingPong);
    let mut running = pair.env("STARVERBS_CONFIG", &file.to_string_lossy()).start(world, Net::Lo)?;
    let pids = [running.server.pid(), running.client.pid()];
    let deadline = Instant::now() + Duration::from_secs(60);
    let capture = |world: &World, pid| world.scratch(&format!("settings-{pid}.pcap"));
    while !capture(world, pids[1]).exists() && Instant::now() < deadline && running.client.ended().is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let threads = std::fs::read_dir(format!("/proc/{}/task", pids[0])).map_or(0, Iterator::count);
    let remark = running.finish()?;
    if threads != 1 {
        return Err(format!("{threads} threads without progress thread"));
    }
    // Each iteration is one message there and one back, both held for a millisecond.
    let figure = remark.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0.0);
    if figure < 2000.0 {
        return Err(format!("{remark}: frames were not held for 1 ms"));
    }
    for pid in pids {
        let bytes = std::fs::read(capture(world, pid)).map_err(|e| format!("no capture: {e}"))?;
        let frames = frames(&bytes);
        let longest = frames.iter().map(|frame| frame.len()).max().unwrap_or(0);
        // Ethernet, IPv4, UDP, BTH, 512 bytes, ICRC.
        if longest != 14 + 20 + 8 + 12 + 512 + 4 || !frames.iter().all(|frame| frame[36..38] == [0x39, 0xc7])
        {
            return Err(format!("{} frames of at most {longest} bytes, not all to port 14791", frames.len()));
        }
    }
    Ok(format!("{} keys", keys.len()))
}

/// The frames of a classic pcap file: 24 bytes of header, then 16 bytes before each.
fn frames(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    bytes = bytes.get(24..).unwrap_or_default();
    while let Some((head, rest)) = bytes.split_first_chunk::<16>() {
        let len = u32::from_le_bytes([head[8], head[9], head[10], head[11]]) as usize;
        let Some((frame, rest)) = rest.split_at_checked(len) else { break };
        found.push(frame);
        bytes = rest;
    }
    found
}

fn personal_file(world: &mut World) -> Result<String, String> {
    let home = world.scratch("home");
    write(world, "home/.config/starverbs/starverbs.toml", "port = 14792\nmtu = 256\n")?;
    let named = write(world, "named.toml", "port = 14793\n")?;
    let port = |variables: &[(&str, &Path)], wanted: &str| {
        let shown = in_force(world, variables)?;
        let line = shown.lines().find(|line| line.starts_with("STARVERBS_PORT=")).unwrap_or_default();
        let right = line.split([' ', '=']).nth(1) == Some(wanted);
        if right { Ok(()) } else { Err(format!("{line} instead of {wanted}")) }
    };
    let (home_is, named_is) = (("HOME", home.as_path()), ("STARVERBS_CONFIG", named.as_path()));
    port(&[home_is], "14792")?;
    port(&[home_is, named_is], "14793")?;
    port(&[home_is, named_is, ("STARVERBS_PORT", Path::new("14794"))], "14794")?;
    let setting = Setting { env: vec![("HOME", home.to_string_lossy().into_owned())], ..Setting::default() };
    let mut process = world.start(Net::Lo, 0, &setting, &["ibv_devinfo"])?;
    process.wait_until(Instant::now() + Duration::from_secs(60)).ok_or("does not end")?;
    let output = process.output();
    let mtu = output.lines().find(|line| line.contains("active_mtu:")).unwrap_or_default();
    if mtu.contains("256 (1)") { Ok(String::new()) } else { Err(format!("{mtu}:\n{}", tail(&output))) }
}

/// Whether ibv_devinfo, started with `key` set, fails with a message that holds all of `words`: by `starverbs
/// run`, then with the library alone.
fn refused(world: &mut World, key: &'static str, value: &str, words: &[&str]) -> Result<(), String> {
    for by_command in [true, false] {
        let mut process = if by_command {
            let setting = Setting { env: vec![(key, value.to_owned())], ..Setting::default() };
            world.start(Net::Lo, 0, &setting, &["ibv_devinfo"])?
        } else {
            let mut command = world.command(Net::Lo, 0, &["ibv_devinfo"]);
            command.env("LD_LIBRARY_PATH", &world.lib).env(key, value);
            world.launch(command)?
        };
        let status = process.wait_until(Instant::now() + Duration::from_secs(60)).ok_or("does not end")?;
        let output = process.output();
        if status.success() || words.iter().any(|word| !output.contains(word)) {
            return Err(format!("{key}={value}: {status}: {output}, which should name {words:?}"));
        }
    }
    Ok(())
}

fn bad_variables(world: &mut World) -> Result<String, String> {
    let bad = [
        ("STARVERBS_FUALT", "loss=1%", "STARVERBS_FUALT"),
        ("STARVERBS_MTU", "1500", "STARVERBS_MTU"),
        ("STARVERBS_FAULT", "loss=lots", "STARVERBS_FAULT"),
        ("STARVERBS_CONFIG", "/nonexistent.toml", "/nonexistent.toml"),
    ];
    for (key, value, named) in bad {
        refused(world, key, value, &[named])?;
    }
    Ok(format!("{} settings refused", bad.len()))
}

fn bad_files(world: &mut World) -> Result<String, String> {
    let bad: [(&str, &[&str]); 19] = [
        ("fualt = \"loss=1%\"", &["fualt (in ", "did you mean fault?"]),
        ("PORT = 5000", &["PORT (in ", "did you mean port?"]),
        ("fault = { loss = \"lots\" }", &["fault (in ", "loss=lots", "allowed: "]),
        ("fault = \"los=1%\"", &["fault (in ", "los=1%"]),
        ("mtu = 1500", &["mtu (in ", "\"1500\"", "256, 512, 1024"]),
        ("addrs = [\"127.0.0.1\", \"nowhere\"]", &["addrs (in ", "nowhere"]),
        ("port = 0", &["port (in ", "\"0\""]),
        ("link = \"shm\"", &["link (in ", "\"shm\"", "auto, local or udp"]),
        ("rcvbuf = \"4X\"", &["rcvbuf (in ", "\"4X\""]),
        ("sndbuf = 0", &["sndbuf (in ", "\"0\""]),
        ("gso = \"yes\"", &["gso (in ", "\"yes\"", "on or off"]),
        ("gro = 1", &["gro (in ", "\"1\"", "on or off"]),
        ("progress_thread = \"maybe\"", &["progress_thread (in ", "\"maybe\""]),
        ("log = \"loud\"", &["log (in ", "\"loud\""]),
        ("window = -1", &["window (in ", "\"-1\""]),
        ("defer = \"no\"", &["defer (in ", "\"no\""]),
        ("config = \"x.toml\"", &["config (in ", "only be set in the environment"]),
        ("mtu = = 3", &["not TOML", "line 1"]),
        ("[wire]\nmtu = 1024", &["wire (in "]),
    ];
    for (text, words) in bad {
        let file = write(world, "bad.toml", text)?;
        let path = file.to_string_lossy().into_owned();
        refused(world, "STARVERBS_CONFIG", &path, &[words, &[path.as_str()]].concat())
            .map_err(|reason| format!("{text}: {reason}"))?;
    }
    let file = write(world, "open.toml", &format!("star_key = \"{}\"", "5a".repeat(32)))?;
    std::fs::set_permissions(&file, Permissions::from_mode(0o640)).map_err(|e| e.to_string())?;
    let path = file.to_string_lossy().into_owned();
    refused(world, "STARVERBS_CONFIG", &path, &[path.as_str(), "star_key", "chmod 600"])?;
    Ok(format!("{} files refused", bad.len() + 1))
}
