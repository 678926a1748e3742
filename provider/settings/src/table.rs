//! The one table of settings: name, syntax, meaning, how to read and how to show each.

use std::fmt::Write as _;
use std::path::PathBuf;

use crate::star::{PREFERENCES, WIRES};
use crate::value::{self, BOARD_DOORBELLS, LEVELS, LINKS, REPEAT, SHARES, TRUSTS};
use crate::{FaultSpec, OneRmaWindow, QpcSpec, Settings, StarKey, fault, onerma, qpc};

/// One setting.
pub struct Key {
    /// Name without prefix, upper case: `MTU`.
    pub name: &'static str,
    /// What may be given, for people.
    pub allowed: &'static str,
    /// What it does, for people.
    pub about: &'static str,
    /// Parses a value into its field; the error is a sentence about the value alone.
    pub(crate) set: fn(&mut Settings, &str) -> Result<(), String>,
    /// The field's value, in the syntax that `set` reads.
    pub(crate) get: fn(&Settings) -> String,
}

impl Key {
    /// The environment variable: `STARVERBS_MTU`.
    pub fn variable(&self) -> String {
        format!("STARVERBS_{}", self.name)
    }

    /// The key in the TOML file: `mtu`.
    pub fn toml_name(&self) -> String {
        self.name.to_ascii_lowercase()
    }

    /// The value in `settings`, in the syntax of the variable; of a secret only that there is one.
    pub fn show(&self, settings: &Settings) -> String {
        (self.get)(settings)
    }

    /// Whether its value may be shown.
    pub(crate) fn is_secret(&self) -> bool {
        self.name == SECRET
    }

    /// The value when nothing is set.
    pub fn default(&self) -> String {
        self.show(&Settings::default())
    }
}

/// The setting whose value is shown to nobody.
const SECRET: &str = "STAR_KEY";
const SWITCH: &str = "on or off";
const SIZE: &str = "a number of bytes, with K, M or G for powers of 1024";

fn put<T>(field: &mut T, parsed: Result<T, String>) -> Result<(), String> {
    *field = parsed?;
    Ok(())
}

fn or<T>(value: &Option<T>, none: &str, show: impl Fn(&T) -> String) -> String {
    value.as_ref().map_or_else(|| none.to_owned(), show)
}

fn path(value: &Option<PathBuf>) -> String {
    or(value, "none", |path| path.display().to_string())
}

/// Every setting there is, in the order in which they are documented.
pub const KEYS: &[Key] = &[
    Key {
        name: "DEVICE",
        allowed: "soft, or board: and the path of a socket or of a device of the kernel module",
        about: "The card that the process has: one in software, which is part of it (soft), or a function \
                of a board ([board.md](board.md)), the first that is free of those that `starverbs board` \
                offers at this socket, at SOCKET.1, SOCKET.2 and so on, or that the kernel module has as \
                /dev/starN.",
        set: |s, v| put(&mut s.device, value::device(v)),
        get: |s| value::spell_device(&s.device),
    },
    Key {
        name: "BOARD_DOORBELL",
        allowed: "cell or message",
        about: "How a board at a socket hears of what is posted: by a store into the queue's cell, or by a \
                message {operation, SQ offset, count, QPN} for each call, which costs a system call \
                ([board.md](board.md)). A board that takes no messages has the cell.",
        set: |s, v| put(&mut s.board_doorbell, value::word(&BOARD_DOORBELLS, v)),
        get: |s| value::spell(&BOARD_DOORBELLS, &s.board_doorbell),
    },
    Key {
        name: "FAULT",
        allowed: fault::SYNTAX,
        about: "Hurts the frames that this process sends: loss, reordering, duplication, corruption, delay; \
                repeatable with the same seed.",
        set: |s, v| put(&mut s.fault, FaultSpec::parse(v)),
        get: |s| s.fault.to_string(),
    },
    Key {
        name: "PCAP",
        allowed: "a file path; %p stands for the process id",
        about: "Writes every frame sent and received to a capture file for Wireshark.",
        set: |s, v| put(&mut s.pcap, Ok(Some(v.into()))),
        get: |s| path(&s.pcap),
    },
    Key {
        name: "MTU",
        allowed: "256, 512, 1024, 2048, 4096 or auto",
        about: "Upper bound of the port's active_mtu. With auto, the largest that fits the interface.",
        set: |s, v| put(&mut s.mtu, value::auto(v, value::mtu)),
        get: |s| or(&s.mtu, "auto", u16::to_string),
    },
    Key {
        name: "ADDRS",
        allowed: "a comma-separated list of IPv4 and IPv6 addresses, or auto",
        about: "The addresses to offer as GIDs, in this order. With auto, all of this host, those of \
                loopback last.",
        set: |s, v| put(&mut s.addrs, value::auto(v, value::addresses)),
        get: |s| or(&s.addrs, "auto", |a| a.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")),
    },
    Key {
        name: "PORT",
        allowed: "a UDP port, 1 to 65535",
        about: "The UDP port of the wire. Both sides need the same; other RoCEv2 devices use 4791. One of \
                net.ipv4.ip_local_port_range may be taken by any program.",
        set: |s, v| put(&mut s.port, value::port(v)),
        get: |s| s.port.to_string(),
    },
    Key {
        name: "LINK",
        allowed: "auto, local or udp",
        about: "How queue pairs, and 1RMA's cards, of this host's processes talk to each other: through \
                shared memory where both can (auto), the same with a line in the log where connected ones \
                cannot (local), or always with packets (udp). With FAULT, PCAP or QPC_CACHE, which are about \
                packets, queue pairs use those, and say so once.",
        set: |s, v| put(&mut s.link, value::word(&LINKS, v)),
        get: |s| value::spell(&LINKS, &s.link),
    },
    Key {
        name: "LINK_TRUST",
        allowed: "none, user or trace",
        about: "Which processes of this host execute WRITE and READ on this process's memory by themselves, \
                and give it the same: those of equal credentials (user; [what that gives \
                them](security.md)), or none, so that each card executes what is asked of it. With trace \
                they copy 32 KiB and more by process_vm_writev(2), which is faster, but names a process by \
                its number, and all processes of the user may trace this one.",
        set: |s, v| put(&mut s.link_trust, value::word(&TRUSTS, v)),
        get: |s| value::spell(&TRUSTS, &s.link_trust),
    },
    Key {
        name: "SHARE",
        allowed: "off or malloc",
        about: "With malloc, `starverbs run` has the program's large allocations served from shared memory, \
                which peers of equal credentials map; [not for every \
                program](decisions/0021-shared-allocations.md).",
        set: |s, v| put(&mut s.share, value::word(&SHARES, v)),
        get: |s| value::spell(&SHARES, &s.share),
    },
    Key {
        name: "RCVBUF",
        allowed: SIZE,
        about: "Receive buffer to ask for on each socket; the system may grant less (net.core.rmem_max).",
        set: |s, v| put(&mut s.rcvbuf, value::bytes(v).map(|n| n as usize)),
        get: |s| value::spell_bytes(s.rcvbuf as u64),
    },
    Key {
        name: "SNDBUF",
        allowed: SIZE,
        about: "Send buffer to ask for on each socket; the system may grant less (net.core.wmem_max).",
        set: |s, v| put(&mut s.sndbuf, value::bytes(v).map(|n| n as usize)),
        get: |s| value::spell_bytes(s.sndbuf as u64),
    },
    Key {
        name: "GSO",
        allowed: SWITCH,
        about: "Gives the frames of a message to the kernel as one segmented send where it can do that.",
        set: |s, v| put(&mut s.gso, value::switch(v)),
        get: |s| value::spell_switch(s.gso),
    },
    Key {
        name: "GRO",
        allowed: SWITCH,
        about: "Lets the kernel hand over received frames joined where it can do that.",
        set: |s, v| put(&mut s.gro, value::switch(v)),
        get: |s| value::spell_switch(s.gro),
    },
    Key {
        name: "PROGRESS_THREAD",
        allowed: SWITCH,
        about: "A thread that serves peers while the program is not in the library. Off, a program that does \
                not poll answers nobody.",
        set: |s, v| put(&mut s.progress_thread, value::switch(v)),
        get: |s| value::spell_switch(s.progress_thread),
    },
    Key {
        name: "LOG",
        allowed: "off, error, warn, info or debug",
        about: "What the library writes to standard error: why control calls are refused; with warn, also \
                queues that fail; with info, also the card opened and closed; with debug, also the states of \
                queue pairs. Why a card cannot be had is written in any case, and once for what setting's \
                sake queue pairs of one host use packets. What nobody reads in time is left out.",
        set: |s, v| put(&mut s.log, value::word(&LEVELS, v)),
        get: |s| value::spell(&LEVELS, &s.log),
    },
    Key {
        name: "WINDOW",
        allowed: "a number of bytes, with K, M or G for powers of 1024, or auto",
        about: "Most bytes on the wire towards one address without an acknowledgement; auto is 1M.",
        set: |s, v| put(&mut s.window, value::auto(v, value::bytes)),
        get: |s| or(&s.window, "auto", |w| value::spell_bytes(u64::from(*w))),
    },
    Key {
        name: "DELAY_TARGET",
        allowed: "a time with its unit, as 50us, or off",
        about: "Has that window grow while round trips take less than this, and shrink when they take \
                longer, by the algorithm of 1RMA ([decision](decisions/0024-windows-by-delay.md)); off: \
                losses shrink it, and delays do not.",
        set: |s, v| put(&mut s.delay_target, value::target(v)),
        get: |s| or(&s.delay_target, "off", |target| format!("{}ns", target.as_nanos())),
    },
    Key {
        name: "MEMORY",
        allowed: "a number of bytes, with K, M or G for powers of 1024, or auto",
        about: "Most memory that queues and tables of a process take; what is made beyond that fails with \
                ENOMEM. With auto, half of what the process may have ([below](#memory)).",
        set: |s, v| put(&mut s.memory, value::auto(v, value::memory)),
        get: |s| or(&s.memory, "auto", |m| value::spell_bytes(*m)),
    },
    Key {
        name: "DEFER",
        allowed: SWITCH,
        about: "Lets work requests posted in a row leave together (doorbell batching).",
        set: |s, v| put(&mut s.defer, value::switch(v)),
        get: |s| value::spell_switch(s.defer),
    },
    Key {
        name: "REPEAT",
        allowed: "auto or off",
        about: "With auto, a lost packet alone is sent again where the peer is starverbs and advertises it \
                (selective repeat); off, and with others, all behind it (go-back-N).",
        set: |s, v| put(&mut s.repeat, value::word(&REPEAT, v)),
        get: |s| value::spell(&REPEAT, &s.repeat),
    },
    Key {
        name: "CREDITS",
        allowed: SWITCH,
        about: "Has ACKs give how many receives are posted, so that peers that heed it wait where they would \
                get RNR NAKs (end-to-end credits). Peers' credits are heeded in any case.",
        set: |s, v| put(&mut s.credits, value::switch(v)),
        get: |s| value::spell_switch(s.credits),
    },
    Key {
        name: "QPC_PREFETCH",
        allowed: SWITCH,
        about: "Has the CPU fetch the contexts of QPs whose frames came with others, before those are \
                handled.",
        set: |s, v| put(&mut s.qpc_prefetch, value::switch(v)),
        get: |s| value::spell_switch(s.qpc_prefetch),
    },
    Key {
        name: "QPC_CACHE",
        allowed: qpc::SYNTAX,
        about: "Makes the card one that has room for so many QP contexts: a doorbell, a turn to send or a \
                request whose QP's context is elsewhere waits, and by the policy others with it \
                ([sim.md](sim.md)).",
        set: |s, v| put(&mut s.qpc_cache, QpcSpec::parse(v)),
        get: |s| or(&s.qpc_cache, "off", QpcSpec::to_string),
    },
    Key {
        name: "STAR",
        allowed: "off, auto, stateless or stateful",
        about: "Which end of an RC connection keeps its state (StaR), for queue pairs that do not set it \
                themselves: this card (stateful), the peer's (stateless), or what suits both (auto). Off, \
                and with peers that have no StaR, both: plain RoCEv2.",
        set: |s, v| put(&mut s.star, value::word(&PREFERENCES, v)),
        get: |s| value::spell(&PREFERENCES, &s.star),
    },
    Key {
        name: "STAR_THRESHOLD",
        allowed: "a number of connections",
        about: "With auto, how many connections this card keeps the state of before it wants the peers to \
                keep more of them; those that run, too.",
        set: |s, v| put(&mut s.star_threshold, v.parse().map_err(|_| "not a number".to_owned())),
        get: |s| s.star_threshold.to_string(),
    },
    Key {
        name: "STAR_WIRE",
        allowed: "packed or paper",
        about: "Which packets this card's ends of StaR connections send: few, or for study the seven \
                types of the paper one by one ([star.md](star.md)). Each end understands both.",
        set: |s, v| put(&mut s.star_wire, value::word(&WIRES, v)),
        get: |s| value::spell(&WIRES, &s.star_wire),
    },
    Key {
        name: "STAR_PARTITION",
        allowed: "comma-separated networks, as 10.1.0.0/16,fd01::/32; or any",
        about: "Between which addresses there is StaR: both ends' lie in one of these networks. With all \
                other peers there is plain RoCEv2 ([security.md](security.md)).",
        set: |s, v| put(&mut s.star_partition, value::networks(v)),
        get: |s| or(&s.star_partition, "any", |n| value::spell_networks(n)),
    },
    Key {
        name: SECRET,
        allowed: "64 hexadecimal digits; or a path with a slash, of a file that only its owner may read, \
                  with them or with 32 bytes; or none",
        about: "Under which StaR's offers and control messages are encrypted and authenticated. Both sides \
                need the same; with peers of another key there is plain RoCEv2 ([security.md](security.md)).",
        set: |s, v| put(&mut s.star_key, StarKey::parse(v)),
        get: |s| or(&s.star_key, "none", StarKey::to_string),
    },
    Key {
        name: "ONERMA_WINDOW",
        allowed: onerma::SYNTAX,
        about: "Constants of 1RMA's congestion control, each in place of the card's: its algorithm 1, with \
                windows in operations of up to 4 KB ([onerma.md](onerma.md)).",
        set: |s, v| put(&mut s.onerma_window, OneRmaWindow::parse(v)),
        get: |s| or(&s.onerma_window, "auto", OneRmaWindow::to_string),
    },
    Key {
        name: "CONFIG",
        allowed: "the path of a TOML file; in the environment only",
        about: "The file with the same keys in lower case. Not set: ~/.config/starverbs/starverbs.toml, else \
                /etc/starverbs.toml, where one exists.",
        set: |s, v| put(&mut s.config, Ok(Some(v.into()))),
        get: |s| path(&s.config),
    },
];

/// The settings as a Markdown table, as it stands in docs/settings.md.
pub fn markdown() -> String {
    let mut text = String::from(
        "| variable | in the file | allowed | default | what it does |\n|---|---|---|---|---|\n",
    );
    for key in KEYS {
        let file = if key.name == "CONFIG" { "-".to_owned() } else { format!("`{}`", key.toml_name()) };
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "| `{}` | {file} | {} | `{}` | {} |",
            key.variable(),
            key.allowed,
            key.default(),
            key.about
        );
    }
    text
}
