//! Containers as people run them with the host's network: namespaces of their own for everything but the
//! network, so that they share its address; folders of their own where programs leave things for each other.

use std::process::{Command, Stdio};

use crate::case::{BOTH, Case, Net, Verdict};
use crate::check::Expect;
use crate::pair::Pair;
use crate::special::together;
use crate::world::World;

/// Who root is inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Container {
    /// The host's root: no user namespace. Needs root.
    Root,
    /// Whoever runs this, by a user namespace of its own.
    Mapped,
    /// This user of the host, by a user namespace of its own. Needs root.
    Other(&'static str),
}

/// Inside: the build under /mnt, and nothing else of the host where files are exchanged.
const ENTER: &str = "set -e
mount --bind \"$1\" /mnt
shift
for folder in /tmp /dev/shm /run; do mount -t tmpfs tmpfs $folder; done
mount -t proc proc /proc
cd /
exec /mnt/bin/starverbs run \"$@\"";

const UNSHARE: [&str; 7] = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--ipc", "--uts"];

impl Container {
    /// What precedes the arguments of `starverbs run` in a container; `dist` is the build.
    pub(crate) fn words(self, dist: &str) -> Vec<&str> {
        let mut words = Vec::new();
        if let Container::Other(user) = self {
            words.extend(["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"]);
        }
        words.extend(UNSHARE);
        if self != Container::Root {
            words.extend(["--user", "--map-root-user"]);
        }
        words.extend(["--", "sh", "-c", ENTER, "sh", dist]);
        words
    }

    /// Why such a container cannot be made here.
    fn hindrance(self) -> Option<String> {
        let words = self.words("/");
        // All but the script and its arguments.
        let (program, before) = words[..words.len() - 5].split_first()?;
        let mut command = Command::new(program);
        command.args(before).args(["sh", "-c", "mount -t tmpfs tmpfs /run && mount -t proc proc /proc"]);
        match command.stdin(Stdio::null()).output() {
            Ok(output) if output.status.success() => None,
            Ok(output) => {
                Some(format!("no containers here: {}", String::from_utf8_lossy(&output.stderr).trim()))
            }
            Err(error) => Some(format!("no containers here: {program}: {error}")),
        }
    }
}

const ROOT: Option<Container> = Some(Container::Root);
const MAPPED: Option<Container> = Some(Container::Mapped);
/// Users that are nobody else's.
const ONE: Option<Container> = Some(Container::Other("190001"));
const ANOTHER: Option<Container> = Some(Container::Other("190002"));

type Sides = (&'static str, [Option<Container>; 2]);

const SIDES: [Sides; 8] = [
    ("both root", [ROOT, ROOT]),
    ("both with a user namespace", [MAPPED, MAPPED]),
    ("both of one other user", [ONE, ONE]),
    ("of two other users", [ONE, ANOTHER]),
    ("root and outside", [ROOT, None]),
    ("outside and with a user namespace", [None, MAPPED]),
    ("outside and of another user", [None, ONE]),
    ("of another user and outside", [ONE, None]),
];

pub(crate) fn cases() -> Vec<Case> {
    let pair = |args: &str| Pair::new("ibv_rc_pingpong", args, Expect::PingPong);
    let bandwidth = |program, args: &str| Pair::new(program, args, Expect::Bandwidth(1));
    let mut cases = Vec::new();
    for (at, sides) in SIDES.into_iter().enumerate() {
        let quick: &[Net] = if at == 1 || at == 3 { &[Net::Lo] } else { &[] };
        cases.push(case(pair("-g 0 -c"), sides).quick(quick));
        cases.push(case(pair("-g 0 -c -e"), sides).quick(&[]));
        cases.push(case(bandwidth("ib_write_bw", "-q 4 -n 500"), sides).quick(&[]));
        cases.push(case(bandwidth("ib_send_bw", "-c UD"), sides).quick(&[]));
        cases.push(case(bandwidth("ib_read_bw", ""), sides).quick(&[]));
    }
    cases.push(Case::special("containers", "seven pairs at once, in and out", BOTH, crowd).quick(&[Net::Lo]));
    cases.into_iter().map(|case| case.of_software("a board's socket is outside of the container")).collect()
}

/// A pair between two places, skipped where there can be no such place.
fn case(pair: Pair, (who, [server, client]): Sides) -> Case {
    let name = format!("{} ({who})", pair.title());
    let pair = pair.limit(60).containers(server, client);
    Case::special("containers", &name, BOTH, move |world, net| {
        let hindrance = [server, client].into_iter().flatten().find_map(Container::hindrance);
        hindrance.map_or_else(|| pair.run(world, net).into(), Verdict::Skip)
    })
}

/// One pair between each two places, all at once. Over veth, the servers share one address and the clients
/// the other.
fn crowd(world: &mut World, net: Net) -> Verdict {
    if let Some(reason) = [ROOT, MAPPED, ONE].into_iter().flatten().find_map(Container::hindrance) {
        return Verdict::Skip(reason);
    }
    let pairs = [
        Pair::new("ibv_rc_pingpong", "-g 0 -c -n 2000", Expect::PingPong).containers(ROOT, MAPPED),
        Pair::new("ib_write_bw", "-n 1000", Expect::Bandwidth(1)).containers(MAPPED, ROOT),
        Pair::new("ibv_srq_pingpong", "-g 0 -c -e", Expect::PingPong).containers(ONE, ONE),
        Pair::new("ib_read_bw", "-n 500", Expect::Bandwidth(1)).containers(ONE, None),
        Pair::new("ib_send_lat", "", Expect::Latency(1)).containers(None, ANOTHER),
        Pair::new("ib_atomic_bw", "", Expect::Bandwidth(1)).containers(ANOTHER, MAPPED),
        Pair::new("ib_send_bw", "-c UD", Expect::Bandwidth(1)).containers(None, ROOT),
    ];
    together(world, net, &pairs.map(|pair| pair.limit(120)))
}
