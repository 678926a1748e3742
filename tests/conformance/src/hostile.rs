//! A board's functions beside each other: a hostile client on one, programs on others; and a board that is
//! killed under its programs. Of runs with `--device board` alone.

use std::time::{Duration, Instant};

use crate::board::FUNCTIONS;
use crate::case::{Case, Net};
use crate::check::Expect;
use crate::pair::{Pair, Running, sent};
use crate::process::tail;
use crate::world::{Setting, World};

const WHERE: &[Net] = &[Net::Lo];
/// Packets of a board that is in the middle of its programs' messages.
const TRAFFIC: u64 = 1000;
/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(120);
/// A variable that gives these cases a board of their own: 4096 is what it would be.
const OWN: (&str, &str) = ("STARVERBS_MTU", "4096");
/// Rules whose tests are a hostile client's: garbage everywhere, wild indices, requests that contradict
/// themselves, keys and maps of others, messages that are none.
const HOSTILE: [&str; 9] = ["9", "11", "17", "21", "24", "35", "36", "39", "40"];

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::special("board", "perftest beside a hostile function", WHERE, |world, net| {
            beside_hostile(world, net).into()
        })
        .quick(&[]),
        Case::special("board", "killed under perftest: its programs end", WHERE, |world, net| {
            killed(world, net).into()
        }),
    ]
}

fn traffic() -> [Pair; 3] {
    let of = |program, args| Pair::new(program, args, Expect::Bandwidth(1)).limit(120).env(OWN.0, OWN.1);
    [of("ib_write_bw", "-D 6"), of("ib_send_bw", "-e -n 10000"), of("ib_read_bw", "-D 6")]
}

/// Waits until the board is in the middle of messages.
fn await_traffic(world: &mut World, running: &mut Running) -> Result<(), String> {
    let deadline = Instant::now() + LIMIT;
    let board = world.board_of(OWN).ok_or("there is no board")?;
    let before = sent(world, board);
    while sent(world, board) < before + TRAFFIC {
        if let Some(status) = running.client.ended() {
            return Err(format!("ended before its traffic ({status}):\n{}", tail(&running.client.output())));
        }
        if Instant::now() > deadline {
            return Err(format!("sends nothing:\n{}", tail(&running.client.output())));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn beside_hostile(world: &mut World, net: Net) -> Result<String, String> {
    let setting = Setting { env: vec![(OWN.0, OWN.1.to_owned())], ..Setting::default() };
    for pair in traffic() {
        let mut running = pair.start(world, net)?;
        await_traffic(world, &mut running)?;
        let board = world.board(net, 0, &setting)?;
        /* the last function, which no program has */
        let socket = format!("{}.{}", board.trim_start_matches("board:"), FUNCTIONS - 1);
        let starverbs = world.starverbs.to_string_lossy().into_owned();
        let mut words = vec![starverbs.as_str(), "board", "test", &socket, "--patience", "60"];
        HOSTILE.iter().for_each(|rule| words.extend(["--rule", rule]));
        let command = world.command(net, 0, &words);
        let mut hostile = world.launch(command)?;
        let overlapped = running.client.ended().is_none();
        let status = hostile.wait_until(Instant::now() + LIMIT);
        if !status.is_some_and(|status| status.success()) {
            return Err(format!(
                "{}: the hostile one: {status:?}:\n{}",
                pair.title(),
                tail(&hostile.output())
            ));
        }
        if !overlapped {
            return Err(format!("{}: it ended before the hostile one began", pair.title()));
        }
        running
            .finish()
            .map_err(|reason| format!("{}, beside a hostile function: {reason}", pair.title()))?;
    }
    Ok(format!("{} rules broken beside 3 programs", HOSTILE.len()))
}

fn killed(world: &mut World, net: Net) -> Result<String, String> {
    let mut ended = 0;
    for pair in traffic() {
        let mut running = pair.start(world, net)?;
        await_traffic(world, &mut running)?;
        world.kill_boards();
        let deadline = Instant::now() + LIMIT;
        for (side, process) in [("client", &mut running.client), ("server", &mut running.server)] {
            match process.wait_until(deadline) {
                /* no program may take it for a success, nor die of it */
                Some(status) if status.code().is_some_and(|code| code != 0) => ended += 1,
                other => {
                    let output = tail(&process.output());
                    return Err(format!(
                        "{}: the {side} of a board that is killed: {other:?}:\n{output}",
                        pair.title()
                    ));
                }
            }
        }
    }
    Pair::new("ibv_rc_pingpong", "-g 0 -c", Expect::PingPong).run(world, net)?;
    Ok(format!("{ended} programs"))
}
