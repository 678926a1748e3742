//! Others' programs in pairs: on two functions of the board, on one function, and on the board and the card
//! in software.

use std::time::{Duration, Instant};

use starverbs_conformance::check::{CALIBRATIONS, Expect, UNCALIBRATED};
use starverbs_conformance::process::tail;
use starverbs_guest::program::Program;

use crate::world::{Place, World};

/// How long a pair may take: emulation is slow.
const LIMIT: Duration = Duration::from_secs(120);
const BOARD: [Place; 2] = [Place::Board(0), Place::Board(1)];
const ONE: [Place; 2] = [Place::Board(0), Place::Board(0)];
const TO_SOFTWARE: [Place; 2] = [Place::Host, Place::Board(0)];
const FROM_SOFTWARE: [Place; 2] = [Place::Board(1), Place::Host];

/// A program, where its server and its client run, and what the client must print.
#[derive(Clone)]
pub(crate) struct Pair {
    words: String,
    places: [Place; 2],
    expect: Expect,
    /// One of the few that stand for all
    pub is_quick: bool,
}

/// All pairs.
pub(crate) fn pairs() -> Vec<Pair> {
    let pair = |words: &str, places: [Place; 2], is_quick: bool| {
        let expect = match words {
            words if words.starts_with("ibv_") => Expect::PingPong,
            words if words.contains("_lat") => Expect::Latency(1),
            _ => Expect::Bandwidth(1),
        };
        Pair { words: words.to_owned(), places, expect, is_quick }
    };
    let mut pairs = vec![
        pair("ibv_rc_pingpong -g 0 -c -n 100", BOARD, true),
        pair("ibv_rc_pingpong -g 0 -c -n 100", ONE, true),
        pair("ibv_uc_pingpong -g 0 -c -n 100", BOARD, false),
        pair("ibv_ud_pingpong -g 0 -c -n 100", BOARD, true),
        pair("ibv_srq_pingpong -g 0 -c -n 100", BOARD, true),
        pair("ibv_rc_pingpong -g 0 -c -e -n 50", BOARD, true),
        pair("ibv_rc_pingpong -g 0 -c -n 100", TO_SOFTWARE, true),
        pair("ibv_rc_pingpong -g 0 -c -n 100", FROM_SOFTWARE, false),
        pair("ib_write_bw -x 0 -n 100 -s 65536", TO_SOFTWARE, true),
        pair("ib_read_bw -x 0 -n 100 -s 65536", TO_SOFTWARE, false),
        pair("ib_send_bw -x 0 -n 100 -s 65536", FROM_SOFTWARE, false),
        pair("ib_send_lat -x 0 -n 100 -c UD", TO_SOFTWARE, false),
        pair("ib_send_lat -x 0 -n 100 -e", BOARD, false),
        pair("ib_send_bw -x 0 -n 200 -r 64 --use-srq", BOARD, false),
        pair("ib_send_bw -x 0 -n 100 -c XRC", BOARD, true),
        pair("ib_send_lat -x 0 -n 50 -c XRC -e", BOARD, false),
        /* regions of many pieces, of pages small and large */
        pair("ib_write_bw -x 0 -n 20 -s 1048576", BOARD, false),
        pair("ib_read_bw -x 0 -n 20 -s 1048576", BOARD, false),
    ];
    for program in ["send", "write", "read", "atomic"] {
        let is_quick = program == "write";
        pairs.push(pair(&format!("ib_{program}_lat -x 0 -n 100"), BOARD, is_quick));
        pairs.push(pair(&format!("ib_{program}_bw -x 0 -n 100"), BOARD, is_quick));
    }
    pairs
}

/// Those of two guests, each with a function of its own.
pub(crate) fn between_guests() -> Vec<Pair> {
    pairs().into_iter().filter(|pair| pair.is_quick && pair.places == BOARD).collect()
}

impl Pair {
    pub(crate) fn title(&self) -> String {
        let [server, client] = self.places;
        format!("{}, {server} serves {client}", self.words)
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
    pub(crate) fn to_software(words: &str) -> Pair {
        Pair { words: words.to_owned(), places: TO_SOFTWARE, expect: Expect::Latency(1), is_quick: false }
    }

    fn check_once(&self, world: &mut World) -> Result<String, String> {
        self.expect.check(&self.run(world)?)
    }

    /// Runs both ends; what the client printed.
    pub(crate) fn run(&self, world: &mut World) -> Result<String, String> {
        let deadline = Instant::now() + LIMIT;
        let port = world.next_port();
        let [server_place, client_place] = self.places;
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
