//! Every attack that a process could try on what is another process's, the kernel's, or the board's. After
//! each one the victim, which uses the same board, says whether it noticed anything.

mod mapping;
mod memory;
mod objects;
mod requests;

use std::path::{Path, PathBuf};

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use starverbs_core::rng::SplitMix64;

use super::raw::{Device, Tested};
use super::victim::{Facts, Victim};

/// What an attacker has to begin with.
struct Attacker {
    path: PathBuf,
    facts: Facts,
    random: SplitMix64,
}

impl Attacker {
    fn open(&self) -> Tested<Device> {
        Device::open(&self.path).map_err(|error| format!("open: {error}"))
    }
}

/// An attack: where it succeeds, it is an error.
type Attack = (&'static str, fn(&mut Attacker) -> Tested);

const ATTACKS: [Attack; 26] = [
    ("mappings beyond the doorbell page and queue memory", mapping::beyond),
    ("all that can be mapped shows nothing of the victim's", mapping::shows_nothing),
    ("private mappings, mappings to execute, of a file that is only read", mapping::of_other_kinds),
    ("mappings that are enlarged, moved, cut, made executable", mapping::changed),
    ("a piece that is given back while it is mapped", mapping::given_back),
    ("what a forked child has of it", mapping::in_a_child),
    ("another process with the open file", mapping::passed_on),
    ("all request numbers with addresses that are none", requests::bad_addresses),
    ("a command whose answer cannot be written", requests::no_room_for_the_answer),
    ("the kernel's own commands, and other contexts' numbers", requests::of_the_kernel),
    ("commands that there are not", requests::that_are_none),
    ("descriptors that are no eventfds", requests::eventfds),
    ("read, write, seek", requests::other_calls),
    ("garbage in all commands", requests::garbage),
    ("the victim's objects by their numbers", objects::by_number),
    ("objects of all numbers", objects::of_all_numbers),
    ("the victim's keys in work requests", objects::keys),
    ("the victim's domain and completion queue for new objects", objects::made_of_others),
    ("garbage in every doorbell cell and in queues", objects::garbage_in_queues),
    ("regions of memory that is not the process's", memory::of_others),
    ("translation tables of one's own", memory::tables),
    ("regions that end twice, or whose memory goes", memory::twice),
    ("queue memory of wild sizes, ended twice, in use", memory::queue_memory),
    ("queues where no queue memory is", memory::queues_elsewhere),
    ("datagrams and moved completion queues where no queue memory is", memory::other_addresses),
    ("more memory than RLIMIT_MEMLOCK", memory::beyond_the_limit),
];

/// Tries all of them on the device at `path`, and then random calls from several threads.
pub(crate) fn run(path: &Path, seed: u64) -> Tested<String> {
    let mut victim = Victim::start(path)?;
    let mut attacker = Attacker { path: path.to_owned(), facts: victim.facts, random: SplitMix64::new(seed) };
    let mut open = Vec::new();
    for (name, attack) in ATTACKS {
        let tried = attack(&mut attacker).and_then(|()| victim.is_unharmed());
        println!("attack: {name}: {}", if tried.is_ok() { "refused" } else { "DONE" });
        if let Err(reason) = tried {
            println!("  {reason}");
            open.push(name);
        }
    }
    memory::is_the_program_s(&mut attacker).unwrap_or_else(|reason| {
        println!("region made before its memory was touched: {reason}");
        open.push("regions");
    });
    requests::threads(&mut attacker)?;
    victim.is_unharmed()?;
    if open.is_empty() { Ok(format!("{} attacks refused", ATTACKS.len())) } else { Err(format!("{open:?}")) }
}

/// What a forked child finds; an error if it is killed. Of a process with one thread.
fn in_child(work: impl FnOnce() -> Tested) -> Tested {
    match wait_for_child(work)? {
        WaitStatus::Exited(_, 0) => Ok(()),
        how => Err(format!("the child: {how:?}")),
    }
}

/// Runs this in a forked child, and says how that ends.
fn wait_for_child(work: impl FnOnce() -> Tested) -> Tested<WaitStatus> {
    // SAFETY: this process has one thread.
    match unsafe { fork() }.map_err(|e| e.to_string())? {
        ForkResult::Child => {
            let found = work();
            if let Err(reason) = &found {
                println!("  in a child: {reason}");
            }
            std::process::exit(found.is_err().into())
        }
        ForkResult::Parent { child } => waitpid(child, None).map_err(|e| e.to_string()),
    }
}
