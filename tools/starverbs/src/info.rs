//! `starverbs info`: what devices, GIDs and settings a program started now would see.

use serde_json::{Value, json};
use starverbs_backend::host;
use starverbs_queues::board::{
    CAP_CQ_CHANGES, CAP_DOORBELL_OPS, CAP_MADS, CAP_MTT, CAP_MULTICAST, CAP_NULL, CAP_QPC_HOST, CAP_RMA,
    CAP_STAR, CAP_STROM, CAP_VERBS, CAP_WINDOWS, CAP_XRC, QPC_IN_HOST, QPC_POLICY_FCFS,
    QPC_POLICY_LATENCY_HIDING, QPC_POLICY_NON_BLOCKING,
};
use starverbs_settings::{DeviceChoice, KEYS, LinkMode, LinkTrust, Settings};
use starverbs_verbs::{BoardFacts, BoardRegisters, Context, DeviceAttr, GidEntry, PortAttr, device_name};

use crate::{Failure, run};

/// Show the device, its GIDs and the settings that a program will see.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// List all settings: values, what is allowed, what they do
    #[arg(long)]
    settings: bool,
}

/// The device as a program finds it.
struct DeviceFacts {
    attr: DeviceAttr,
    port: PortAttr,
    gids: Vec<GidEntry>,
    /// If it is a board
    board: Option<BoardFacts>,
}

impl DeviceFacts {
    /// Opens the device and asks, as a program does; it is closed when this process ends.
    fn ask() -> Result<DeviceFacts, Failure> {
        let failure = |error| Failure::new(1, format!("{}: {error}", device_name()));
        let context = Context::open().map_err(failure)?;
        let port = context.query_port(1).map_err(failure)?;
        let board = context.board_facts().map_err(failure)?;
        Ok(DeviceFacts { attr: context.device_attr().clone(), port, gids: context.gid_table(), board })
    }

    fn to_json(&self) -> Value {
        let gid = |entry: &GidEntry| {
            let address = host::ip_of(entry.gid).to_string();
            json!({ "index": entry.index, "address": address, "interface": entry.netdev })
        };
        json!({
            "name": device_name(),
            "node_guid": format!("{:016x}", self.attr.node_guid),
            "active_mtu": self.port.active_mtu.bytes(),
            "max_mtu": self.port.max_mtu.bytes(),
            "gids": self.gids.iter().map(gid).collect::<Vec<_>>(),
            "board": self.board.as_ref().map(board_json),
        })
    }

    fn to_text(&self) -> String {
        let mut text = format!(
            "device {}   port 1, Ethernet, RoCEv2, active_mtu {} (of {}), node GUID {:016x}\n",
            device_name(),
            self.port.active_mtu.bytes(),
            self.port.max_mtu.bytes(),
            self.attr.node_guid
        );
        for entry in &self.gids {
            text += &format!("  GID[{}]  {}  on {}\n", entry.index, host::ip_of(entry.gid), entry.netdev);
        }
        text + &self.board.as_ref().map_or_else(String::new, board_text)
    }
}

/// What a board may take: `CAP_*`, in words.
const CAPS: [(u64, &str); 13] = [
    (CAP_VERBS, "verbs"),
    (CAP_XRC, "XRC"),
    (CAP_STAR, "StaR"),
    (CAP_STROM, "StRoM"),
    (CAP_RMA, "1RMA"),
    (CAP_WINDOWS, "memory windows"),
    (CAP_MULTICAST, "multicast"),
    (CAP_MTT, "regions of pages"),
    (CAP_DOORBELL_OPS, "csRNA's doorbells"),
    (CAP_CQ_CHANGES, "changes of CQs"),
    (CAP_NULL, "null regions"),
    (CAP_MADS, "management datagrams"),
    (CAP_QPC_HOST, "QP contexts in host memory"),
];

fn takes(board: &BoardFacts) -> Vec<&'static str> {
    CAPS.iter().filter(|(cap, _)| board.caps & cap != 0).map(|(_, name)| *name).collect()
}

fn policy(registers: &BoardRegisters) -> &'static str {
    match registers.qpc_policy {
        QPC_POLICY_FCFS => "first come, first served",
        QPC_POLICY_NON_BLOCKING => "non-blocking",
        QPC_POLICY_LATENCY_HIDING => "latency-hiding",
        _ => "of an unknown policy",
    }
}

fn board_text(board: &BoardFacts) -> String {
    let mut text = format!("board {}", board.path.display());
    if let Some(BoardRegisters { version, .. }) = board.registers {
        text += &format!(", contract {}.{}", version >> 16, version & 0xffff);
    }
    text += &format!(": {}\n", takes(board).join(", "));
    match board.registers {
        Some(BoardRegisters { qpc_entries: 0, .. }) => text += "  QP contexts: all on chip\n",
        Some(registers) => {
            let rest = if registers.qpc_placement == QPC_IN_HOST { "the host" } else { "the board" };
            let (entries, policy) = (registers.qpc_entries, policy(&registers));
            text += &format!("  QP contexts: {entries} on chip, {policy}; the others in memory of {rest}\n");
        }
        None => {}
    }
    text
}

fn board_json(board: &BoardFacts) -> Value {
    let registers = board.registers.map(|registers| {
        let BoardRegisters { version, qpc_entries, qpc_placement, .. } = registers;
        json!({
            "version": format!("{}.{}", version >> 16, version & 0xffff),
            "qpc_entries": qpc_entries,
            "qpc_policy": policy(&registers),
            "qpc_placement": if qpc_placement == QPC_IN_HOST { "host" } else { "board" },
        })
    });
    json!({ "path": board.path, "takes": takes(board), "registers": registers })
}

/// Prints what was asked for.
pub(crate) fn info(args: &Args) -> Result<(), Failure> {
    let settings = Settings::load().map_err(|e| Failure::new(1, e))?;
    if args.settings && !args.json {
        print!("{}", settings_text(&settings));
        return Ok(());
    }
    let device = DeviceFacts::ask()?;
    let library = run::library_dir(None).map(|dir| dir.join("libibverbs.so.1"));
    if args.json {
        let text = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "library": library.ok(),
            "device": device.to_json(),
            "same_host": same_host(&settings),
            "settings": settings_json(&settings),
        });
        println!("{text:#}");
        return Ok(());
    }
    print!("{}", device.to_text());
    match library {
        Ok(path) => println!("library {}", path.display()),
        Err(failure) => println!("library {}", failure.message),
    }
    println!("same host: {}", same_host(&settings));
    print!("{}", changed_text(&settings));
    Ok(())
}

/// How a program reaches others of this host, where they allow the same; `starverbs stat --qp` says what came
/// of it.
fn same_host(settings: &Settings) -> &'static str {
    if settings.device != DeviceChoice::Soft {
        return "packets of the board's port";
    }
    let hurt = settings.fault.is_active() || settings.pcap.is_some();
    match settings.link_trust {
        _ if settings.link == LinkMode::Udp || hurt || settings.qpc_cache.is_some() => "packets",
        LinkTrust::None => "shared memory; each card executes what it is asked for",
        LinkTrust::User => "shared memory; that of one user's processes by mapped files and by descriptor",
        LinkTrust::Trace => "shared memory; that of one user's processes by mapped files, descriptor and PID",
    }
}

/// The settings that are not at their default.
fn changed_text(settings: &Settings) -> String {
    let changed = KEYS.iter().filter(|key| key.show(settings) != key.default());
    let lines: String = changed.map(|key| format!("  {}={}\n", key.variable(), key.show(settings))).collect();
    if lines.is_empty() {
        "settings: all at their defaults (`starverbs info --settings` lists them)\n".to_owned()
    } else {
        format!("settings that are not at their default:\n{lines}")
    }
}

fn settings_json(settings: &Settings) -> Value {
    let entry = |key: &starverbs_settings::Key| {
        let value = json!({
            "value": key.show(settings), "default": key.default(), "allowed": key.allowed, "about": key.about,
        });
        (key.variable(), value)
    };
    KEYS.iter().map(entry).collect::<serde_json::Map<_, _>>().into()
}

fn settings_text(settings: &Settings) -> String {
    let mut text = String::new();
    for key in KEYS {
        let (value, default) = (key.show(settings), key.default());
        let note = if value == default { String::new() } else { format!("   (default {default})") };
        text +=
            &format!("{}={value}{note}\n    {}\n    allowed: {}\n", key.variable(), key.about, key.allowed);
    }
    text += "\nA setting is given in the environment, or in lower case without STARVERBS_ in a TOML file.\n";
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_board_is_described() {
        let registers = BoardRegisters {
            version: 0x0001_0003,
            qpc_entries: 300,
            qpc_policy: QPC_POLICY_LATENCY_HIDING,
            qpc_placement: 1,
        };
        let path = "/tmp/board.sock".into();
        let mut board = BoardFacts { path, caps: CAP_VERBS | CAP_XRC | 1 << 63, registers: Some(registers) };
        let text = board_text(&board);
        assert!(text.starts_with("board /tmp/board.sock, contract 1.3: verbs, XRC\n"), "{text}");
        assert!(text.ends_with("300 on chip, latency-hiding; the others in memory of the board\n"), "{text}");
        assert_eq!(board_json(&board)["registers"]["qpc_entries"], 300);
        board.registers = Some(BoardRegisters { qpc_entries: 0, ..registers });
        assert!(board_text(&board).ends_with("all on chip\n"));
        board.registers = None;
        assert_eq!(board_text(&board), "board /tmp/board.sock: verbs, XRC\n");
        let settings = Settings { device: DeviceChoice::Board(board.path), ..Settings::default() };
        assert_eq!(same_host(&settings), "packets of the board's port");
    }

    #[test]
    fn every_setting_is_listed_with_its_value() {
        let env = [("STARVERBS_PORT".to_owned(), "5000".to_owned())];
        let settings = Settings::from_sources(env.into_iter(), None).unwrap();
        let text = settings_text(&settings);
        assert!(KEYS.iter().all(|key| text.contains(&key.variable())));
        assert!(text.contains("STARVERBS_PORT=5000   (default 4791)"), "{text}");
        assert_eq!(settings_json(&settings)["STARVERBS_PORT"]["value"], "5000");
        assert!(changed_text(&settings).ends_with(":\n  STARVERBS_PORT=5000\n"));
        assert!(same_host(&settings).contains("descriptor"));
        assert_eq!(same_host(&Settings { link: LinkMode::Udp, ..settings }), "packets");
    }
}
