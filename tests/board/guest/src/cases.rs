//! Others' programs in pairs: on two functions of the board, on one, on the board and the card in software,
//! and on functions of two guests.

use std::fmt;
use std::time::{Duration, Instant};

use starverbs_conformance::check::{CALIBRATIONS, Expect, UNCALIBRATED};
use starverbs_conformance::process::tail;
use starverbs_guest::program::Program;

use crate::world::{Place, World};

/// How long a pair may take: emulation is slow.
const LIMIT: Duration = Duration::from_secs(120);

/// Where the ends of a pair run: a column of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ends {
    /// Both in the guest, on two functions
    Functions,
    /// Both in the guest, on one function
    OneFunction,
    /// The server on the host's card in software, the client in the guest
    ToHost,
    /// The other way
    FromHost,
    /// In two guests, each of which has a function
    Guests,
}

use Ends::{FromHost, Functions, Guests, OneFunction, ToHost};

/// The columns, from left to right.
pub(crate) const COLUMNS: [Ends; 5] = [Functions, OneFunction, ToHost, FromHost, Guests];

const EVERY: &[Ends] = &COLUMNS;
/// A guest with whatever is outside of it.
const AWAY: &[Ends] = &[Functions, ToHost, FromHost, Guests];
const HERE: &[Ends] = &[Functions];

/// A program, where its ends run, and those of them that a quick run has.
type Row = (&'static str, &'static [Ends], &'static [Ends]);

const ROWS: [Row; 24] = [
    ("ibv_rc_pingpong -g 0 -c -n 100", EVERY, &[Functions, OneFunction, ToHost]),
    ("ibv_rc_pingpong -g 0 -c -e -n 50", AWAY, HERE),
    ("ibv_uc_pingpong -g 0 -c -n 100", AWAY, &[]),
    ("ibv_ud_pingpong -g 0 -c -n 100", AWAY, HERE),
    ("ibv_srq_pingpong -g 0 -c -n 100", AWAY, HERE),
    ("ib_send_lat -x 0 -n 100", AWAY, &[]),
    ("ib_send_bw -x 0 -n 100", AWAY, &[]),
    ("ib_write_lat -x 0 -n 100", AWAY, HERE),
    ("ib_write_bw -x 0 -n 100", AWAY, &[Functions, ToHost]),
    ("ib_read_lat -x 0 -n 100", AWAY, &[]),
    ("ib_read_bw -x 0 -n 100", AWAY, &[]),
    ("ib_atomic_lat -x 0 -n 100", AWAY, &[]),
    ("ib_atomic_bw -x 0 -n 100", AWAY, &[]),
    ("ib_send_lat -x 0 -n 100 -c UD", AWAY, &[]),
    ("ib_send_bw -x 0 -n 100 -c UD", AWAY, &[]),
    ("ib_send_lat -x 0 -n 100 --use-srq", AWAY, &[]),
    ("ib_send_bw -x 0 -n 200 -r 64 --use-srq", AWAY, &[]),
    ("ib_send_bw -x 0 -n 200 -c UD -r 512 --use-srq", AWAY, &[]),
    ("ib_send_bw -x 0 -n 100 -c XRC", AWAY, HERE),
    ("ib_send_lat -x 0 -n 50 -c XRC -e", HERE, &[]),
    ("ib_send_lat -x 0 -n 100 -e", HERE, &[]),
    ("ib_write_bw -x 0 -n 100 -q 4 -b", AWAY, &[]),
    /* regions of many pieces, of pages small and large */
    ("ib_write_bw -x 0 -n 20 -s 1048576", HERE, &[]),
    ("ib_read_bw -x 0 -n 20 -s 1048576", HERE, &[]),
];

/// A program, and where its ends run.
pub(crate) struct Pair {
    pub words: &'static str,
    pub ends: Ends,
    /// One of the few that stand for all
    pub is_quick: bool,
}

/// All pairs.
pub(crate) fn pairs() -> Vec<Pair> {
    let of = |&(words, ends, quick): &Row| {
        ends.iter().map(move |&ends| Pair { words, ends, is_quick: quick.contains(&ends) })
    };
    ROWS.iter().flat_map(of).collect()
}

impl fmt::Display for Ends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Functions => "two functions",
            OneFunction => "one function",
            ToHost => "the host serves",
            FromHost => "the guest serves",
            Guests => "two guests",
        })
    }
}

impl Ends {
    /// Where the server runs, and the client.
    fn places(self) -> [Place; 2] {
        match self {
            Functions | Guests => [Place::Board(0), Place::Board(1)],
            OneFunction => [Place::Board(0), Place::Board(0)],
            ToHost => [Place::Host, Place::Board(0)],
            FromHost => [Place::Board(1), Place::Host],
        }
    }

    /// How many guests it takes.
    pub(crate) fn guests(self) -> usize {
        if self == Guests { 2 } else { 1 }
    }
}

impl Pair {
    pub(crate) fn title(&self) -> String {
        format!("{}, {}", self.words, self.ends)
    }

    fn expect(&self) -> Expect {
        match self.words {
            words if words.starts_with("ibv_") => Expect::PingPong,
            words if words.contains("_lat") => Expect::Latency(1),
            _ => Expect::Bandwidth(1),
        }
    }

    /// Runs both ends and checks what the client printed: a remark, or what went wrong. Again, when perftest
    /// could not measure the CPU's frequency.
    pub(crate) fn check(&self, world: &mut World) -> Result<String, String> {
        for _ in 1..CALIBRATIONS {
            match self.check_once(world) {
                Err(reason) if reason.contains(UNCALIBRATED) => {}
                result => return result,
            }
        }
        self.check_once(world)
    }

    /// A pair whose server is on the host, on the card in software.
    pub(crate) fn to_host(words: &'static str) -> Pair {
        Pair { words, ends: ToHost, is_quick: false }
    }

    fn check_once(&self, world: &mut World) -> Result<String, String> {
        self.expect().check(&self.run(world)?)
    }

    /// Runs both ends; what the client printed.
    pub(crate) fn run(&self, world: &mut World) -> Result<String, String> {
        let deadline = Instant::now() + LIMIT;
        let port = world.next_port();
        let [server_place, client_place] = self.ends.places();
        let mut server = self.start(world, server_place, port, None)?;
        if !server.await_listening(deadline) {
            return Err(format!("server does not listen:\n{}", tail(&server.output())));
        }
        let address = world.address(server_place, client_place);
        let mut client = self.start(world, client_place, port, Some(address))?;
        let well = client.wait_until(deadline);
        let served =
            server.wait_until(Instant::now() + Duration::from_secs(if well == Some(true) { 30 } else { 2 }));
        if (well, served) != (Some(true), Some(true)) {
            let how = |ended| match ended {
                Some(true) => "ended",
                Some(false) => "failed",
                None => "does not end",
            };
            let (client, server_said) = (tail(&client.output()), tail(&server.output()));
            return Err(format!("client {}:\n{client}\nserver {}:\n{server_said}", how(well), how(served)));
        }
        Ok(client.output())
    }

    fn start(
        &self,
        world: &mut World,
        place: Place,
        port: u16,
        peer: Option<&str>,
    ) -> Result<Program, String> {
        let number = port.to_string();
        let mut words: Vec<&str> = self.words.split_ascii_whitespace().collect();
        words.extend(["-d", "star0", "-p", &number]);
        words.extend(peer);
        world.start(place, &words, port)
    }
}
